"""Starts the workers of ``comm``: on emulated hosts, on this host, or by mpirun on emulated hosts."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.harness import Benchmark
from benchmarks.machine import ForeignCores
from benchmarks.worker import TIMEOUT_S, Spec, command, meeting_point, run_here, run_on_hosts
from shoal.launch.emulated import Cluster
from shoal.launch.emulated_network import MASTER_PORT

MAX_FOREIGN = 0.3
KIB, MIB = 1 << 10, 1 << 20
ALL_REDUCE = "all_reduce"
WORKER = "benchmarks.comm_worker:measure"
ONE_THREAD = {"OMP_NUM_THREADS": "1"}
_WIRE_PORT = 9_000
_MPI_PORT = MASTER_PORT + 2_000
_MPIRUN = Path(sys.executable).with_name("mpirun")
MPI_AS_ROOT = {
    f"{prefix}_ALLOW_RUN_AS_ROOT{suffix}": "1" for prefix in ("OMPI", "PRTE") for suffix in ("", "_CONFIRM")
}


@dataclass(frozen=True)
class Measured:
    """Measurements of one run of the workers. ``samples`` are seconds, by case and backend."""

    samples: dict[str, dict[str, list[float]]]
    foreign: float
    num_retaken: int


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


def size_of(num_bytes: int) -> str:
    for unit, name in ((MIB, "MiB"), (KIB, "KiB")):
        if num_bytes >= unit:
            return f"{num_bytes // unit} {name}"
    return f"{num_bytes} B"


def watched(run: Callable[[], Any], *, most_retaken: int) -> tuple[Any, float, int]:
    """Run; again while others used the processors, at most so often. Also return foreign cores, retakes."""
    num_retaken = 0
    while True:
        with ForeignCores(own_network=True) as watch:
            result = run()
        foreign = watch.cores or 0.0
        if foreign <= MAX_FOREIGN or num_retaken >= most_retaken:
            return result, foreign, num_retaken
        num_retaken += 1


Backends = Mapping[str, int | dict[str, Any] | None]


def spec_of(backends: Backends, cases: list[tuple[str, int]], repeats: int) -> Spec:
    return {"backends": backends, "cases": cases, "repeats": repeats}


def on_cluster(cluster: Cluster, spec: Spec, *, most_retaken: int) -> Measured:
    """Run the workers, one on each worker host."""
    return Measured(*watched(partial(run_on_hosts, cluster, WORKER, spec), most_retaken=most_retaken))


def on_this_host(num_workers: int, spec: Spec, *, most_retaken: int) -> Measured:
    """Run the workers as processes of this host, by mpirun if OpenMPI is measured; they meet on loopback."""
    if "openmpi" in spec["backends"]:
        run = partial(_by_mpirun_here, num_workers, spec)
    else:
        run = partial(run_here, WORKER, spec, num_workers, settings=ONE_THREAD)
    return Measured(*watched(run, most_retaken=most_retaken))


def wire_bytes_per_s(cluster: Cluster, *, repeats: int) -> list[float]:
    """Return payload bytes a second of plain TCP transfers from worker host 0 to worker host 1."""
    rates = []
    for turn in range(repeats):
        where = [cluster.address(1), str(_WIRE_PORT + turn)]
        argv = [sys.executable, "-m", "benchmarks.comm_wire"]
        receiver = cluster.start(1, [*argv, "receive", *where], stdout=subprocess.PIPE)
        sender = cluster.start(0, [*argv, "send", *where])
        text, _ = receiver.communicate(timeout=TIMEOUT_S)
        if receiver.returncode or sender.wait():
            raise SystemExit("the plain TCP transfer failed")
        rates.append(float(text))
    return rates


# ---- OpenMPI ----------------------------------------------------------------------------------------------


def missing_for_openmpi() -> list[str]:
    """Return the packages of OpenMPI that are not there."""
    missing = [name for name in ("mpi4py",) if importlib.util.find_spec(name) is None]
    return missing if _MPIRUN.exists() else [*missing, "openmpi"]


def _by_mpirun_here(num_workers: int, spec: Spec) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "samples.json"
        environment = {**os.environ, **meeting_point(), **ONE_THREAD, **MPI_AS_ROOT}
        argv = [*mpirun_here(num_workers), *command(WORKER, spec, out)]
        if code := subprocess.run(argv, env=environment, timeout=TIMEOUT_S).returncode:
            raise SystemExit(f"mpirun failed with {code}")
        return json.loads(out.read_text())


def mpirun_here(num_workers: int) -> list[str]:
    """Return mpirun's command line for shared memory; ranks yield where they outnumber the cores."""
    yields = "1" if num_workers > (os.cpu_count() or 1) else "0"
    return [
        *(
            str(_MPIRUN),
            "--mca",
            "pml",
            "ob1",
            "--mca",
            "btl",
            "sm,self",
            "--mca",
            "mpi_yield_when_idle",
            yields,
        ),
        *("-n", str(num_workers), "--map-by", ":OVERSUBSCRIBE", "--bind-to", "none"),
        *(word for name in ("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS") for word in ("-x", name)),
    ]


def by_mpirun(cluster: Cluster, spec: Spec, *, most_retaken: int) -> Measured:
    """Run the workers, started by mpirun on the first worker host, one on each.

    Each emulated host has a host name of its own already; it also gets a TMPDIR of its own, or the daemons
    would take each other for one host. In the place of ssh stands a script that enters the host's namespaces.
    """
    cluster.start_helpers()
    with tempfile.TemporaryDirectory(prefix="mpi") as name:
        folder = Path(name)
        out = folder / "samples.json"
        agent = folder / "agent"
        agent.write_text(_agent(cluster, folder))
        agent.chmod(0o755)
        argv = _mpirun(cluster, agent, command(WORKER, spec, out))
        log = folder / "log"

        def run() -> None:
            with log.open("w") as file:
                process = cluster.start(
                    0, argv, env=_mpi_environment(cluster, folder), stdout=file, stderr=subprocess.STDOUT
                )
                until = time.monotonic() + TIMEOUT_S
                while process.poll() is None and time.monotonic() < until:
                    time.sleep(0.05)
            if process.poll() != 0:
                raise SystemExit(f"mpirun failed ({process.poll()}):\n{log.read_text()[-4000:]}")

        _, foreign, num_retaken = watched(run, most_retaken=most_retaken)
        return Measured(json.loads(out.read_text()), foreign, num_retaken)


def _agent(cluster: Cluster, folder: Path) -> str:
    """Return the script that mpirun calls with an address and a command."""
    lines = ["#!/bin/sh", "address=$1; shift", 'case "$address" in']
    for host in range(cluster.num_hosts):
        scratch = folder / f"host{host}"
        scratch.mkdir()
        enter = shlex.join([*cluster.enter(host), "env", f"TMPDIR={scratch}", "sh", "-c"])
        lines.append(f'{cluster.address(host)}) exec {enter} "$*" ;;')
    lines += ["*) exit 255 ;;", "esac"]
    return "\n".join(lines) + "\n"


def _mpi_environment(cluster: Cluster, folder: Path) -> dict[str, str]:
    return {
        "TMPDIR": str(folder / "host0"),
        "MASTER_ADDR": cluster.address(0),
        "MASTER_PORT": str(_MPI_PORT),
        **MPI_AS_ROOT,
    }


def _mpirun(cluster: Cluster, agent: Path, argv: list[str]) -> list[str]:
    """Return mpirun's command line; its components are named, so that it uses TCP and nothing else."""
    places = ",".join(f"{cluster.address(host)}:1" for host in range(cluster.num_hosts))
    exported = [*cluster.environment(), "MASTER_ADDR", "MASTER_PORT", "PYTHONPATH"]
    return [
        *(str(_MPIRUN), "--prtemca", "plm_ssh_agent", str(agent)),
        *("--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "eth0"),
        *("--mca", "mpi_yield_when_idle", "1"),  # 8 processes share few cores
        *("--host", places, "-n", str(cluster.num_hosts), "--map-by", "node", "--bind-to", "none"),
        *(word for name in exported if name in os.environ or name != "PYTHONPATH" for word in ("-x", name)),
        *argv,
    ]
