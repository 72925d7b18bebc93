"""Real finetuning jobs for tests: workers forked with torch already loaded."""

from __future__ import annotations

import os
import sys
from multiprocessing.process import BaseProcess

from forked import fork_process, free_port, wait_for
from shoal.env import WorkerEnv, WorkerPlace
from shoal.launch.worker import run_worker
from shoal.recipes.finetune.config import (
    ClassifyFinetuneConfig,
    FinetuneConfig,
    SquadFinetuneConfig,
    T5FinetuneConfig,
)


def start(config: FinetuneConfig, num_workers: int) -> list[BaseProcess]:
    """Start the workers of a job."""
    port = free_port()
    return [fork_process(_work, config, rank, num_workers, port) for rank in range(num_workers)]


def run(config: FinetuneConfig, num_workers: int = 1, deadline_s: float = 120.0) -> list[int | None]:
    """Run a job to its end and return the workers' exit codes."""
    return wait_for(start(config, num_workers), deadline_s)


def _work(config: FinetuneConfig, rank: int, num_workers: int, port: int) -> None:
    from shoal.recipes.finetune import classify, squad, text_to_text

    assert config.run.dir is not None
    config.run.dir.mkdir(parents=True, exist_ok=True)
    log = (config.run.dir / f"worker-{rank}.log").open("a")
    os.dup2(log.fileno(), sys.stderr.fileno())
    os.dup2(log.fileno(), sys.stdout.fileno())
    place = WorkerPlace(rank=rank, num_workers=num_workers, local_rank=rank, num_local_workers=num_workers)
    joined = WorkerEnv(place=place, master_addr="127.0.0.1", master_port=port, launcher="test")
    if isinstance(config, SquadFinetuneConfig):
        run_worker(lambda: squad.finetune(config, joined=joined, command=["test"]))
    if isinstance(config, T5FinetuneConfig):
        run_worker(lambda: text_to_text.finetune(config, joined=joined, command=["test"]))
    assert isinstance(config, ClassifyFinetuneConfig)
    run_worker(lambda: classify.finetune(config, joined=joined, command=["test"]))
