"""Real finetuning jobs for tests: workers forked with torch already loaded."""

from __future__ import annotations

import os
import sys
from multiprocessing.process import BaseProcess

from forked import fork_process, free_port, wait_for
from shoal.env.worker import WorkerEnv, WorkerRanks
from shoal.launch.worker import run_worker
from shoal.recipes import classify, lm_finetune, main_of, squad, t5_classify
from shoal.recipes.finetuning import FinetuneConfig


def start(config: FinetuneConfig, num_workers: int) -> list[BaseProcess]:
    """Start the workers of a job."""
    port = free_port()
    return [fork_process(_work, config, rank, num_workers, port) for rank in range(num_workers)]


def run(config: FinetuneConfig, num_workers: int = 1, deadline_s: float = 120.0) -> list[int | None]:
    """Run a job to its end and return the workers' exit codes."""
    return wait_for(start(config, num_workers), deadline_s)


def worker(rank: int, num_workers: int, port: int) -> WorkerEnv:
    """Return the environment of a worker of a job on this host."""
    ranks = WorkerRanks(rank=rank, num_workers=num_workers, local_rank=rank, num_local_workers=num_workers)
    return WorkerEnv(ranks=ranks, master_addr="127.0.0.1", master_port=port, launcher="test")


def _work(config: FinetuneConfig, rank: int, num_workers: int, port: int) -> None:
    assert config.run.dir is not None
    config.run.dir.mkdir(parents=True, exist_ok=True)
    log = (config.run.dir / f"worker-{rank}.log").open("a")
    os.dup2(log.fileno(), sys.stderr.fileno())
    os.dup2(log.fileno(), sys.stdout.fileno())
    joined = worker(rank, num_workers, port)
    if isinstance(config, squad.SquadConfig):
        run_worker(lambda: squad.main(config, joined))
    if isinstance(config, t5_classify.T5ClassifyConfig):
        run_worker(lambda: t5_classify.main(config, joined))
    if isinstance(config, lm_finetune.LmFinetuneConfig):
        run_worker(lambda: main_of("lm_finetune", config)(config, joined))
    assert isinstance(config, classify.ClassifyConfig)
    run_worker(lambda: classify.main(config, joined))
