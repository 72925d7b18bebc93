"""JAX, Keras and TensorFlow over shoal, against what their users have today.

- XLA's FFI against ``torch.distributed`` on the same engine, by turns in the same processes.
- ``psum`` of unchanged JAX over shoal against jaxlib's gloo: on one host, and on 8 emulated hosts.
- ``model.fit`` of Keras against a custom loop under MultiWorkerMirroredStrategy, whose own ``fit`` fails.
- Gradients and weights against one process.

Each job of a pair runs several times, by turns with its peer. Needs `shoal[torch,jax,tensorflow]`, and root
for the emulated hosts.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.comm_runs import watched
from benchmarks.harness import Benchmark
from benchmarks.worker import free_port, run_here, run_on_hosts
from shoal.errors import import_extra
from shoal.launch.emulated import Cluster

KIB, MIB = 256, 1 << 18
"""Elements of float32."""
NIC = "200mbit"
NUM_HOSTS = 8
MOST_MICROSECONDS = 60.0
WORKERS = "benchmarks.frameworks_worker:"
SETTINGS = {
    "OMP_NUM_THREADS": "1", "PJRT_NPROC": "1", "TF_NUM_INTRAOP_THREADS": "1", "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "1", "TF_CPP_MIN_LOG_LEVEL": "2", "KERAS_BACKEND": "tensorflow",
    "TF_ENABLE_ONEDNN_OPTS": "0",
}  # fmt: skip


def on_this_host(name: str, size: int, **spec: Any) -> Any:
    """Run a job in ``size`` processes; return the result of rank 0."""
    ports = {"port": free_port(), "torch_port": free_port()}
    settings = {**SETTINGS, "SHOAL_SECRET": "of a benchmark on one host"}
    return run_here(WORKERS + name, ports | spec, size, settings=settings)


def on_hosts(helpers: int, **spec: Any) -> Any:
    """Run ``seam`` on emulated hosts."""
    with Cluster(hosts=NUM_HOSTS, helpers=helpers, nic=NIC) as cluster:
        addresses = [cluster.address(host) for host in range(NUM_HOSTS)]
        spec |= {"port": 9911, "addresses": addresses}
        return run_on_hosts(cluster, f"{WORKERS}seam", spec, settings=SETTINGS)


def by_turns(
    sides: dict[str, Callable[[], dict[str, list[float]]]], rounds: int, most_retaken: int
) -> tuple[dict[str, dict[str, list[float]]], list[float], int]:
    """Run jobs by turns; return the samples of each side by case, foreign cores and retakes."""
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in sides}
    foreign, retaken = [], 0
    for turn in range(rounds):
        for name, run in list(sides.items()) if turn % 2 == 0 else reversed(sides.items()):
            found, cores, times = watched(run, most_retaken=most_retaken)
            foreign.append(cores)
            retaken += times
            for case, values in found.items():
                samples[name].setdefault(case, []).extend(values)
    return samples, foreign, retaken


def ffi(bench: Benchmark, rounds: int, retakes: int) -> None:
    """The same engine from JAX and from torch."""
    counts = {"1 KiB": KIB, "64 KiB": 64 * KIB, "1 MiB": MIB, "25 MiB": 25 * MIB}
    repeats = 9 if bench.quick else 30
    found, cores, retaken = watched(
        lambda: on_this_host("paths", 2, counts=list(counts.values()), repeats=repeats), most_retaken=retakes
    )
    for title, count in counts.items():
        ours, peer = ([1e3 * s for s in found[str(count)][side]] for side in ("ffi", "torch"))
        bench.add(
            f"FFI, 2 processes, {title}", ours=ours, peer=peer, peer_name="torch.distributed, shoal",
            unit="ms", target=1 / 1.1 if count >= MIB else None, foreign_cores=[cores], num_retaken=retaken,
        )  # fmt: skip
        if count < MIB:
            more = 1e3 * (statistics.median(ours) - statistics.median(peer))
            bench.limit(
                f"FFI, 2 processes, {title}, beyond torch", max(more, 0.0), MOST_MICROSECONDS, unit="us",
                formula="60 µs more than torch.distributed", foreign_cores=[cores],
            )  # fmt: skip


def one_host(bench: Benchmark, rounds: int, retakes: int) -> None:
    """JAX's own collectives in 4 processes of this host."""
    counts, repeats = [KIB, 25 * MIB], 5 if bench.quick else 15
    samples, cores, retaken = by_turns(
        {
            each: lambda each=each: on_this_host("seam", 4, collectives=each, counts=counts, repeats=repeats)  # type: ignore[misc]
            for each in ("shoal", "gloo")
        },
        rounds,
        retakes,
    )
    for title, count, target in (("25 MiB", 25 * MIB, 1 / 0.2), ("1 KiB", KIB, 1 / 0.15)):
        bench.add(
            f"psum, 4 processes of a host, {title}", unit="ms", target=target,
            ours=[1e3 * s for s in samples["shoal"][str(count)]],
            peer=[1e3 * s for s in samples["gloo"][str(count)]],
            peer_name="jaxlib's gloo", foreign_cores=cores, num_retaken=retaken,
        )  # fmt: skip


def emulated(bench: Benchmark, rounds: int, retakes: int) -> None:
    """JAX's own collectives on 8 hosts with links of 200 Mbit/s."""
    counts, repeats = [25 * MIB], 3 if bench.quick else 5
    sides = {
        "8 helpers": lambda: on_hosts(8, collectives="shoal", counts=counts, repeats=repeats),
        "gloo": lambda: on_hosts(0, collectives="gloo", counts=counts, repeats=repeats),
        "no helpers": lambda: on_hosts(0, collectives="shoal", counts=counts, repeats=repeats),
    }
    samples, cores, retaken = by_turns(sides, 1 if bench.quick else rounds, 0)
    for name, target in (("8 helpers", 1 / 0.6), ("no helpers", 1 / 1.05)):
        bench.add(
            f"psum, 8 hosts at 200 Mbit/s, 25 MiB, {name}", unit="s", target=target,
            ours=samples[name][str(counts[0])], peer=samples["gloo"][str(counts[0])],
            peer_name="jaxlib's gloo", foreign_cores=cores, num_retaken=retaken,
        )  # fmt: skip


def fit(bench: Benchmark, rounds: int, retakes: int) -> None:
    """``model.fit`` of Keras on TensorFlow in 2 processes."""
    import_extra("tensorflow", "tensorflow", "the part `fit` needs TensorFlow")
    options = {"epochs": 2 if bench.quick else 4, "steps": 30 if bench.quick else 100}
    samples, cores, retaken = by_turns(
        {
            "fit": lambda: on_this_host("keras_fit", 2, **options),
            "mirrored": lambda: on_this_host("mirrored", 2, **options),
        },
        rounds,
        retakes,
    )
    bench.add(
        "Keras fit, 2 processes, 1.9 M weights", unit="examples/s", better="higher", target=1.5,
        ours=samples["fit"]["rates"], peer=samples["mirrored"]["rates"],
        peer_name="loop under MultiWorkerMirroredStrategy", foreign_cores=cores, num_retaken=retaken,
    )  # fmt: skip


def exact(bench: Benchmark, rounds: int, retakes: int) -> None:
    """20 steps of SGD and Adam against one process."""
    for size in (2, 4):
        found = on_this_host("training", size)
        for what in ("gradients", "weights"):
            bench.limit(
                f"{what} after 20 steps, {size} processes", max(found[what]), 1e-6,
                unit="apart", formula="1e-6 from one process, SGD and Adam",
            )  # fmt: skip
        bench.limit(
            f"ranks with other bits, {size} processes", 0.0 if found["alike"] else 1.0, 0.5, unit="ranks",
            formula="none",
        )  # fmt: skip


PARTS = {"ffi": ffi, "one-host": one_host, "emulated": emulated, "fit": fit, "exact": exact}


def main() -> int:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--only", choices=PARTS, action="append", help="only these parts")
    bench = Benchmark("frameworks", options=options)
    for name, extra in (("torch", "torch"), ("optax", "jax")):
        import_extra(name, extra, f"benchmarks.frameworks needs {name}")
    for name, part in PARTS.items():
        if not bench.args.only or name in bench.args.only:
            part(bench, 1 if bench.quick else 3, 0 if bench.quick else 1)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
