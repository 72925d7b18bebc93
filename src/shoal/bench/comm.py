"""Where ``shoal bench comm`` runs: in this process if it is a worker, else in workers that it starts."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from shoal.bench.settings import CommBench
from shoal.env import WorkerEnv, worker_env
from shoal.errors import EXIT_OK
from shoal.launch.emulated_job import Hosts, launch_emulated
from shoal.launch.local import launch


def run(bench: CommBench, *, command: Sequence[str]) -> int:
    """Measure if this process is a worker, else start workers with ``command``; return the exit code.

    Raises:
        UsageError: an option cannot be right.
        ShoalError: a worker failed.
    """
    bench.check()
    place = worker_env()
    if place is not None:
        _work(bench, place)
    logs = Path(tempfile.mkdtemp(prefix="shoal-bench-"))
    code = 1
    try:
        if bench.hosts is None:
            code = launch(command, num_workers=bench.workers or 2, log_dir=logs)
        else:
            hosts = Hosts(
                hosts=bench.hosts,
                nic=bench.nic,
                helpers=bench.num_helpers,
                helper_nic=bench.helper_nic,
                workers_per_host=bench.workers or 1,
            )
            code = launch_emulated(command, hosts, log_dir=logs)
    finally:
        if code == EXIT_OK:
            shutil.rmtree(logs, ignore_errors=True)
        else:
            print(f"what the other workers wrote: {logs}", file=sys.stderr)
    return code


def _work(bench: CommBench, place: WorkerEnv) -> NoReturn:
    from shoal.bench.measure import measure_all
    from shoal.launch.worker import run_worker

    run_worker(lambda: measure_all(bench, place))
