"""Is the two-hop backend as fast as its formulas promise, and faster than gloo and OpenMPI?

Hosts are emulated: network namespaces whose links are shaped. All backends run in the same processes, by
turns. Nobody tells the engine a rate: it measures its helpers' links, and the wire limit M/B takes B from a
plain TCP transfer between two of the hosts in this run. Needs root and iproute2, and OpenMPI for one row.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

from benchmarks.comm_buckets import bucket_samples
from benchmarks.comm_rounding import cancelling_inputs, engine_sum, errors_over_bound, ring_sum
from benchmarks.comm_runs import (
    Measured,
    by_mpirun,
    on_cluster,
    on_this_host,
    spec_of,
    watched,
    wire_bytes_per_s,
)
from benchmarks.comm_worker import IN_PYTHON, MANY, NUM_MANY, PROCESSOR, SMALL_LAYERS
from benchmarks.harness import Benchmark
from shoal.decide.server_assignment import DDP_BUCKET_BYTES, gain_over_ring, recommended_bucket_bytes
from shoal.launch.emulated import Cluster

KIB, MIB = 1 << 10, 1 << 20
NUM_HOSTS = 8
NIC = "200mbit"
FAST_NIC = "400mbit"
SLOW_NIC = "50mbit"
ALL_REDUCE = "all_reduce"


def add_row(
    bench: Benchmark, measured: Measured, case: str, key: tuple[str, int], ours: str, *, peer: str = "gloo",
    target: float | None = None, unit: str = "ms",
) -> None:  # fmt: skip
    """Add a row; ``key`` is the collective and its bytes, ``unit`` ms or us."""
    samples = measured.samples[f"{key[0]} {key[1]}"]
    per_s = {"ms": 1e3, "us": 1e6}[unit]
    bench.add(
        case,
        ours=[per_s * seconds for seconds in samples[ours]],
        peer=[per_s * seconds for seconds in samples[peer]],
        peer_name=peer,
        unit=unit,
        target=target,
        foreign_cores=[measured.foreign],
        num_retaken=measured.num_retaken,
    )


def repeats_of(bench: Benchmark) -> int:
    return 3 if bench.quick else 7


def retakes_of(bench: Benchmark) -> int:
    return 0 if bench.quick else 1


def helpers_rows(bench: Benchmark) -> None:
    """8 workers, with 8, 4 and no helper hosts, links of 200 Mbit/s each."""
    big, medium, small = ((ALL_REDUCE, size) for size in (16 * MIB, 64 * KIB, KIB))
    many = (MANY, NUM_MANY * KIB)
    retakes = retakes_of(bench)
    # The 4 before the 8: a group measures helpers that no earlier group has measured.
    backends: dict[str, int | None] = {"gloo": None, "colocated": 0, "4 helpers": 4, "8 helpers": 8}
    with Cluster(hosts=NUM_HOSTS, helpers=8, nic=NIC, announce_rates=False) as cluster:
        rates = wire_bytes_per_s(cluster, repeats=2)
        one = on_cluster(cluster, spec_of(backends, [big, many], repeats_of(bench)), most_retaken=retakes)
        rates += wire_bytes_per_s(cluster, repeats=1)
        few: dict[str, int | None] = {"gloo": None, "colocated": 0}
        short = on_cluster(
            cluster, spec_of(few, [medium, small], 3 * repeats_of(bench)), most_retaken=retakes
        )
    workers = f"{NUM_HOSTS} workers"
    add_row(bench, one, f"{workers} + 8 helpers, 16 MiB", big, "8 helpers", target=1.55)
    bench.add(
        f"{workers} + 8 helpers, 16 MiB, wire",
        ours=[1e3 * seconds for seconds in one.samples[f"{ALL_REDUCE} {16 * MIB}"]["8 helpers"]],
        peer=[1e3 * 16 * MIB / rate for rate in rates],
        peer_name=f"limit M/B, B of a plain TCP transfer ({sorted(rates)[1] * 8e-6:.1f} Mbit/s)",
        unit="ms",
        target=0.85,
        foreign_cores=[one.foreign],
    )
    add_row(bench, one, f"{workers} + 4 helpers, 16 MiB", big, "4 helpers", target=1.25)
    add_row(bench, one, f"{workers}, colocated, 16 MiB", big, "colocated", target=0.95)
    add_row(bench, short, f"{workers}, colocated, 64 KiB", medium, "colocated", target=3.0)
    add_row(bench, short, f"{workers}, colocated, 1 KiB", small, "colocated", target=3.0)
    add_row(bench, one, f"{workers}, colocated, {NUM_MANY} × 1 KiB in a row", many, "colocated")


def fast_helpers_rows(bench: Benchmark) -> None:
    """4 helpers with twice the bandwidth against the gain that the formula promises."""
    big = (ALL_REDUCE, 16 * MIB)
    with Cluster(hosts=NUM_HOSTS, helpers=4, nic=NIC, helper_nic=FAST_NIC, announce_rates=False) as cluster:
        spec = spec_of({"gloo": None, "4 helpers": 4}, [big], repeats_of(bench))
        measured = on_cluster(cluster, spec, most_retaken=retakes_of(bench))
    gain = gain_over_ring(NUM_HOSTS, [2.0] * 4)
    add_row(
        bench, measured, f"{NUM_HOSTS} workers + 4 helpers × 2, 16 MiB", big, "4 helpers", target=0.9 * gain
    )
    away = 100 * abs(bench.rows[-1].ratio / gain - 1)
    bench.limit(
        f"{NUM_HOSTS} workers + 4 helpers × 2, away from formula", away, 10.0, unit="%",
        formula=f"10 % of the formula's gain over a ring, {gain:.3f}", foreign_cores=[measured.foreign],
    )  # fmt: skip


def growth_rows(bench: Benchmark) -> None:
    """As many helpers as workers: time must not grow with their number, whatever a link lets through at once.

    With ``--quick`` 4 and 16 hosts instead of 32: 64 processes take two minutes to start on two cores.
    """
    big, most = (ALL_REDUCE, 16 * MIB), 16 if bench.quick else 32
    for burst_bytes in (32_000, 1_000_000):
        took: dict[int, Measured] = {}
        for hosts in (4, most) if bench.quick else (4, 16, most):
            with Cluster(
                hosts=hosts, helpers=hosts, nic=SLOW_NIC, burst_bytes=burst_bytes, announce_rates=False
            ) as cluster:
                spec = spec_of({"helpers": hosts}, [big], 3)
                took[hosts] = on_cluster(cluster, spec, most_retaken=0)
        for hosts, measured in took.items():
            if hosts == 4:
                continue
            bench.add(
                f"{hosts} + {hosts} hosts, {SLOW_NIC}, bursts of {burst_bytes // 1000} KB, 16 MiB",
                ours=[1e3 * seconds for seconds in measured.samples[f"{ALL_REDUCE} {16 * MIB}"]["helpers"]],
                peer=[1e3 * seconds for seconds in took[4].samples[f"{ALL_REDUCE} {16 * MIB}"]["helpers"]],
                peer_name="4 + 4 hosts, rates measured in both",
                unit="ms",
                target=1 / 1.05,
                foreign_cores=[measured.foreign],
            )


def size_of(num_bytes: int) -> str:
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes // unit} {name}"
    return f"{num_bytes} B"


def one_host_rows(bench: Benchmark) -> None:
    """2 and 4 processes of one host: shared memory against gloo on loopback.

    Small operations have an upper limit in microseconds too, which stands in the row.
    """
    limits_us = {
        (2, 64): 15, (2, 4 * KIB): 18, (2, 64 * KIB): 40,
        (4, 64): 60, (4, 64 * KIB): 120, (4, MIB): 900,
    }  # fmt: skip
    ratios: dict[int, dict[tuple[str, int], float | None]] = {
        2: {(ALL_REDUCE, 64): None, (ALL_REDUCE, 4 * KIB): None, (ALL_REDUCE, 64 * KIB): None},
        4: {
            (ALL_REDUCE, 64): None,
            (ALL_REDUCE, 64 * KIB): 15.0,
            (ALL_REDUCE, MIB): 5.0,
            (ALL_REDUCE, 25 * MIB): 3.0,
            (ALL_REDUCE, 100 * MIB): 2.0,
            ("reduce_scatter", 25 * MIB): 3.0,
            ("all_gather", 25 * MIB): 3.0,
            ("broadcast", 25 * MIB): 3.0,
        },
    }
    for num_processes, targets in ratios.items():
        spec = spec_of({"gloo": None, "shoal": 0}, list(targets), 7 if bench.quick else 21)
        measured = on_this_host(num_processes, spec, most_retaken=retakes_of(bench))
        for (collective, num_bytes), target in targets.items():
            case = f"{num_processes} processes of one host, {size_of(num_bytes)} {collective}"
            limit = limits_us.get((num_processes, num_bytes))
            add_row(
                bench, measured, case + (f" (at most {limit} us)" if limit else ""),
                (collective, num_bytes), "shoal", target=target, unit="us" if limit else "ms",
            )  # fmt: skip


def unshaped_rows(bench: Benchmark) -> None:
    """2 and 4 hosts whose links are not shaped: what the processors can do, and what each GB costs them."""
    big = (ALL_REDUCE, 25 * MIB)
    key = f"{big[0]} {big[1]}"
    for hosts in (2, 4):
        with Cluster(hosts=hosts) as cluster:
            spec = spec_of({"gloo": None, "shoal": 0}, [big], 3 * repeats_of(bench))
            measured = on_cluster(cluster, spec, most_retaken=retakes_of(bench))
        sent_gb = (
            2 * (hosts - 1) / hosts * big[1] / 1e9
        )  # by each rank, in a ring as with servers on the workers
        case = f"{hosts} hosts, links not shaped, 25 MiB"
        add_row(bench, measured, case, big, "shoal", target=1.2)
        used = measured.samples[PROCESSOR + key]
        bench.add(
            f"{case}, processor time for each GB that a rank sends",
            ours=[seconds / sent_gb for seconds in used["shoal"]],
            peer=[seconds / sent_gb for seconds in used["gloo"]],
            peer_name="gloo",
            unit="s",
            target=1 / 0.7,
            foreign_cores=[measured.foreign],
            num_retaken=measured.num_retaken,
        )
        for name in ("shoal", "gloo"):
            took, cores = median(measured.samples[key][name]), median(used[name])
            gbit = 8 * sent_gb
            print(
                f"{case}: {name} sends {gbit / took:.1f} Gbit/s a rank, {gbit / cores:.1f} for each core "
                f"in use; 25 GbE takes {25 * cores / gbit:.1f} cores"
            )


def native_rows(bench: Benchmark) -> None:
    """Compare the process groups in C++ and in Python on one host, and a DDP step with gloo's too."""
    small, layers = (ALL_REDUCE, 64), (SMALL_LAYERS, MIB)
    for num_processes in (2, 4):
        spec = spec_of({"gloo": None, "shoal": 0, IN_PYTHON: 0}, [small, layers], repeats_of(bench) * 3)
        measured = on_this_host(num_processes, spec, most_retaken=retakes_of(bench))
        where = f"{num_processes} processes of one host"
        add_row(bench, measured, f"{where}, 64 B all_reduce", small, "shoal", peer=IN_PYTHON, unit="us")
        add_row(bench, measured, f"{where}, {SMALL_LAYERS}", layers, "shoal", peer=IN_PYTHON)
        add_row(bench, measured, f"{where}, {SMALL_LAYERS}, gloo", layers, "shoal", target=1.3)


def bucket_rows(bench: Benchmark) -> None:
    """DDP's default buckets over 32 hosts, the recommended size, and one that the rule calls too small.

    With one worker a host the recommended size is the default. It is larger from 104 ranks on (32 MiB for
    128, 64 MiB for 256), and so many engines' heartbeats alone, one to each other rank every quarter of a
    second, keep the two cores of the machine of the published results busy.
    """
    total_bytes, nic, too_small = 50 * MIB, "100mbit", 4 * MIB
    recommended = recommended_bucket_bytes(32)
    sizes = [recommended, DDP_BUCKET_BYTES, too_small]
    samples, foreign, num_retaken = watched(
        lambda: bucket_samples(32, 1, nic, total_bytes, sizes, repeats_of(bench)), most_retaken=0
    )
    for peer_bytes, peer, target in zip(sizes[1:], samples[1:], (1.2, None), strict=True):
        what = "DDP's default" if peer_bytes == DDP_BUCKET_BYTES else "below the rule"
        bench.add(
            f"32 hosts, {total_bytes // MIB} MiB in buckets of {recommended // MIB} MiB",
            ours=samples[0],
            peer=peer,
            peer_name=f"buckets of {peer_bytes // MIB} MiB ({what}), links of {nic}",
            unit="s",
            target=target,
            foreign_cores=[foreign],
            num_retaken=num_retaken,
        )


def rounding_rows(bench: Benchmark) -> None:
    """bf16 sums over 64 ranks against fp64; no times."""
    for kind in ("random", "cancelling"):
        inputs = cancelling_inputs(1, cancelling=kind == "cancelling")
        ours, ring = (errors_over_bound(add(inputs), inputs) for add in (engine_sum, ring_sum))
        case = f"bf16 sum over 64 ranks, {kind}: error"
        formula = "½ ulp_bf16(sum) + 64·2⁻²⁴·Σ|xᵢ|"
        bench.limit(case, ours, 1.0, unit="× bound", formula=formula)
        bench.add(case, ours=[ours], peer=[ring], peer_name="simulated ring in bf16", unit="× bound")


def mpi_rows(bench: Benchmark) -> None:
    """OpenMPI on the same emulated hosts, in the same processes as ours."""
    missing = [name for name in ("mpi4py",) if importlib.util.find_spec(name) is None]
    if not Path(sys.executable).with_name("mpirun").exists():
        missing.append("openmpi")
    case = f"{NUM_HOSTS} workers"
    if missing:
        print(
            f"OpenMPI's rows are missing, which counts as a failure: {', '.join(missing)} cannot be found; "
            "pip install 'shoal[bench]'"
        )
        bench.add(
            f"{case}, OpenMPI", ours=[float("nan")], peer=[float("nan")], unit="ms", target=1.0,
            peer_name=f"OpenMPI: not installed ({', '.join(missing)})",
        )  # fmt: skip
        return
    big, medium = (ALL_REDUCE, 16 * MIB), (ALL_REDUCE, 64 * KIB)
    backends: dict[str, int | None] = {"openmpi": None, "colocated": 0, "8 helpers": 8}
    with Cluster(hosts=NUM_HOSTS, helpers=8, nic=NIC, announce_rates=False) as cluster:
        spec = spec_of(backends, [big, medium], repeats_of(bench))
        measured = by_mpirun(cluster, spec, most_retaken=retakes_of(bench))
    peer = "openmpi"
    add_row(bench, measured, f"{case} + 8 helpers, 16 MiB", big, "8 helpers", peer=peer, target=1.0)
    add_row(bench, measured, f"{case}, colocated, 16 MiB", big, "colocated", peer=peer, target=1.0)
    add_row(bench, measured, f"{case}, colocated, 64 KiB", medium, "colocated", peer=peer)


PARTS: dict[str, Callable[[Benchmark], None]] = {
    "helpers": helpers_rows,
    "fast-helpers": fast_helpers_rows,
    "growth": growth_rows,
    "one-host": one_host_rows,
    "native-group": native_rows,
    "unshaped": unshaped_rows,
    "buckets": bucket_rows,
    "rounding": rounding_rows,
    "openmpi": mpi_rows,
}


def main() -> int:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--only", choices=tuple(PARTS), action="append", help="only this part")
    bench = Benchmark("comm", options=options)
    if shutil.which("ip") is None:
        raise SystemExit("benchmarks.comm emulates hosts: install iproute2 and run it as root")
    for name, part in PARTS.items():
        if not bench.args.only or name in bench.args.only:
            part(bench)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
