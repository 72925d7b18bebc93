"""Defines ``shoal bench``."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from shoal.bench.comm_options import CommBench
from shoal.cli.settings import this_command
from shoal.env import worker_env
from shoal.errors import EXIT_OK

bench = App(name="bench")
bench.command(
    "shoal.cli.bench_train:bench_train",
    name="train",
    help="Time some steps of a recipe on this machine, on synthetic data; nothing is kept.",
)


@bench.command(name="comm")
def bench_comm(*, options: Annotated[CommBench, Parameter(name="*")] = CommBench()) -> int:  # noqa: B008
    """Time the collectives of gloo and shoal, and compare them with what the links allow.

    Started by torchrun or mpirun, the command is one of their workers and measures your hosts. Started alone,
    it starts workers on this machine; with --hosts on emulated hosts.
    """
    options.check()
    worker = worker_env()
    if worker is not None:
        from shoal.bench.collectives import measure_all
        from shoal.launch.worker import run_worker

        run_worker(lambda: measure_all(options, worker))
    from shoal.launch.emulated_job import launch_emulated
    from shoal.launch.local import launch

    logs = Path(tempfile.mkdtemp(prefix="shoal-bench-"))
    code = 1
    try:
        command, hosts = this_command(), options.emulated
        if hosts.hosts is None:
            code = launch(command, num_workers=options.workers or 2, log_dir=logs)
        else:
            code = launch_emulated(command, hosts, workers_per_host=options.workers or 1, log_dir=logs)
    finally:
        if code == EXIT_OK:
            shutil.rmtree(logs, ignore_errors=True)
        else:
            print(f"output of the other workers: {logs}", file=sys.stderr)
    return code
