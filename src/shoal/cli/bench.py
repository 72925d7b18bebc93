"""Defines ``shoal bench``."""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from shoal.bench.comm_options import CommBench
from shoal.bench.scaling import ScalingBench, hourly
from shoal.cli.settings import this_command
from shoal.env.launcher import worker_env
from shoal.errors import EXIT_OK, UsageError

bench = App(name="bench")
bench.command(
    "shoal.cli.bench_train:bench_train",
    name="train",
    help="Time some steps of a recipe on this machine, on synthetic data; nothing is kept.",
)


@bench.command(name="comm")
def bench_comm(*, options: Annotated[CommBench, Parameter(name="*")] = CommBench()) -> int:  # noqa: B008
    """Time the collectives of gloo and shoal, and compare them with the limits of the links.

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


@bench.command(name="scaling")
def bench_scaling(
    recipe: str,
    /,
    *arguments: Annotated[str, Parameter(allow_leading_hyphen=True)],
    options: Annotated[ScalingBench, Parameter(name="*")] = ScalingBench(),  # noqa: B008
) -> int:
    """Time a recipe's steps on several numbers of hosts: steps/s, scaling efficiency and cost.

        shoal bench scaling albert --on emulated --hosts 1,2,4 --nic 200mbit --helpers 4 -- --preset tiny

        shoal bench scaling albert --hosts 1,8 --launcher 'srun -N {hosts} -n {hosts}' -- --preset base

    Parameters
    ----------
    recipe
        A recipe of `shoal bench train`.
    arguments
        Options of `shoal bench train`, after `--`.
    """
    options.check(arguments)
    from shoal.bench.scaling_runs import measure

    hourly(options, _price_of, hosts=1, helpers=1)  # a wrong name is said before anything is measured
    folder = Path(tempfile.mkdtemp(prefix="shoal-scaling-"))
    done = False
    try:
        scaling = measure(
            options,
            recipe,
            arguments,
            folder,
            hourly=lambda hosts, helpers: hourly(options, _price_of, hosts=hosts, helpers=helpers),
            report=lambda text: print(text, flush=True),
        )
        print("\n" + scaling.legend())
        for path, write in ((options.json, scaling.write), (options.plot, scaling.draw)):
            if path is not None:
                write(path)
                print(path)
        done = True
    finally:
        if done or not any(folder.iterdir()):
            shutil.rmtree(folder, ignore_errors=True)
        else:
            print(f"output of the workers: {folder}", file=sys.stderr)
    return EXIT_OK


def _price_of(name: str) -> float:
    """Return the dollars per hour of an instance type of the planner's catalog."""
    from shoal.planner.hardware import Catalog

    instance = Catalog().instance(name)
    if instance.price_per_hour is None:
        raise UsageError(f"--price {name}: the catalog has no price of it; give dollars per hour")
    return instance.price_per_hour
