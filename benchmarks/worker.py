"""Runs a function in the workers of a benchmark: ``python -m benchmarks.worker MODULE:FUNCTION SPEC OUT``.

The function takes SPEC, a JSON object, and returns what JSON can hold; rank 0, or a process without a rank,
writes that to OUT. SPEC also gets ``folder``: the directory of OUT, which all workers share.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shoal.env.launcher import worker_env
from shoal.env.settings import HOST_ID
from shoal.env.variables import child_environment
from shoal.launch.emulated import Cluster

TIMEOUT_S = 540.0

Spec = Mapping[str, Any]


def command(function: str, spec: Spec, out: Path) -> list[str]:
    """Return the command line of a worker that runs ``function``, ``"benchmarks.comm_worker:measure"``."""
    return [sys.executable, "-m", "benchmarks.worker", function, json.dumps(spec), str(out)]


def run_on_hosts(cluster: Cluster, function: str, spec: Spec, *, settings: Mapping[str, str] = {}) -> Any:
    """Run one worker on each host, with ``settings`` in its environment; return the result of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        prefix = ["/usr/bin/env", *(f"{name}={value}" for name, value in settings.items())]
        run_command_on(cluster, [*prefix, *command(function, spec, out)])
        return json.loads(out.read_text())


def run_command_on(cluster: Cluster, argv: list[str]) -> None:
    """Run a command on each host to its end.

    Raises:
        SystemExit: one failed; the message is the error output of the first of them.
    """
    results = cluster.run(argv, timeout_s=TIMEOUT_S)
    failed = [result for result in results if result.exit_code]
    if failed:
        texts = [result.stderr for result in failed if "Error" in result.stderr] or [failed[0].stderr]
        raise SystemExit(f"{len(failed)} workers failed; one said:\n{texts[0][-4000:]}")


def run_here(
    function: str,
    spec: Spec,
    num_workers: int,
    *,
    settings: Mapping[str, str] = {},
    hosts: Sequence[str] = (),
    timeout_s: float = TIMEOUT_S,
) -> Any:
    """Run workers as processes of this host, which meet on loopback; return the result of rank 0.

    Args:
        settings: for the environment of all workers.
        hosts: a name for each worker, if they count as hosts of their own.
        timeout_s: most seconds that they may take.
    """
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(num_workers))
    shared = {**os.environ, **meeting_point(), **sizes, **settings}
    environments = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_workers)]
    for environment, host in zip(environments, hosts, strict=False):
        environment[HOST_ID] = host
    return _run_all(function, spec, environments, timeout_s=timeout_s)


def run_alone(function: str, spec: Spec, *, settings: Mapping[str, str] = {}) -> Any:
    """Run the function in one process, without a rank; return its result."""
    return _run_all(function, spec, [child_environment(**settings)], timeout_s=None)


def _run_all(
    function: str, spec: Spec, environments: Sequence[Mapping[str, str]], *, timeout_s: float | None
) -> Any:
    """Run a process for each environment to its end; return the result.

    Raises:
        SystemExit: one failed; the message has the end of what each has printed.
    """
    with tempfile.TemporaryDirectory() as name:
        out, logs = Path(name) / "result.json", [Path(name) / f"{k}.log" for k in range(len(environments))]
        argv, workers = command(function, spec, out), []
        for environment, log in zip(environments, logs, strict=True):
            with log.open("w") as file:
                workers.append(subprocess.Popen(argv, env=environment, stdout=file, stderr=file))
        try:
            codes = [worker.wait(timeout_s) for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
        if any(codes):
            texts = [log.read_text(errors="replace")[-4000:] for log in logs]
            raise SystemExit(f"{function} ended with {codes}:\n" + "\n".join(texts))
        return json.loads(out.read_text())


def meeting_point() -> dict[str, str]:
    """Return the address of a free port of this host, as torch's variables."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def free_port() -> int:
    """Return a port of this host that no process uses."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def main() -> None:
    function, spec, out = sys.argv[1:]
    worker = worker_env()
    module, _, name = function.partition(":")
    shared = {**json.loads(spec), "folder": str(Path(out).parent.absolute())}
    result = getattr(importlib.import_module(module), name)(shared)
    if worker is None or worker.ranks.rank == 0:
        Path(out).write_text(json.dumps(result), encoding="utf-8")


if __name__ == "__main__":
    main()
