"""Starts the workers of a job on this host for tests, forked with torch already loaded; each writes a log."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from forked import fork_process, free_port, wait_for
from forked_programs import fork_programs
from shoal.env.worker import WorkerEnv, WorkerRanks
from shoal.launch.worker import run_worker
from shoal.recipes import RECIPES, main_of


def run(config: Any, num_workers: int = 1, deadline_s: float = 120.0) -> list[int | None]:
    """Run a recipe to its end and return the workers' exit codes."""
    return wait_for(start(config, num_workers), deadline_s)


def start(config: Any, num_workers: int) -> list[BaseProcess]:
    """Start the workers of the recipe whose settings these are."""
    return _start(partial(_run_recipe, config), config.run.dir, num_workers)


def run_script(
    script: Callable[..., int], directory: Path, num_workers: int = 2, **options: Any
) -> list[int | None]:
    """Run ``script(directory, worker, **options)`` to its end and return the workers' exit codes."""
    return wait_for(_start(partial(script, directory, **options), directory, num_workers), 120)


def work(config: Any, rank: int, num_workers: int, port: int) -> None:
    """Be a worker of a job in this process, which ends with it."""
    _work(partial(_run_recipe, config), config.run.dir, joined(rank, num_workers, port))


def joined(rank: int, num_workers: int, port: int) -> WorkerEnv:
    """Return the environment of a worker of a job on this host."""
    ranks = WorkerRanks(rank=rank, num_workers=num_workers, local_rank=rank, num_local_workers=num_workers)
    return WorkerEnv(ranks=ranks, master_addr="127.0.0.1", master_port=port, launcher="test")


def _start(main: Callable[[WorkerEnv], int], directory: Path, num_workers: int) -> list[BaseProcess]:
    port = free_port()
    workers = [joined(rank, num_workers, port) for rank in range(num_workers)]
    return [fork_process(_work, main, directory, worker) for worker in workers]


def _work(main: Callable[[WorkerEnv], int], directory: Path, worker: WorkerEnv) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    log = (directory / f"worker-{worker.ranks.rank}.log").open("a")
    os.dup2(log.fileno(), sys.stderr.fileno())
    os.dup2(log.fileno(), sys.stdout.fileno())
    fork_programs()
    run_worker(lambda: main(worker))


def _run_recipe(config: Any, worker: WorkerEnv) -> int:
    name = next(name for name, recipe in RECIPES.items() if recipe.config == type(config).__name__)
    return main_of(name, config)(config, worker)
