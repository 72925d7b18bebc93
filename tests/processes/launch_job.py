"""A job for the tests of the launcher: ``launch_job.py work --dir DIR …`` is one of its workers.

The workers step along like a training loop and do what their orders say. With ``--backend`` they average a
number over it at each step and agree so on stopping; without it they need no torch and agree by a file.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from shoal.env.launcher import worker_env
from shoal.errors import EXIT_STOPPED, ShoalError, UsageError
from shoal.launch.worker import run_worker
from shoal.train.stopping import StopRequest


def work(folder: Path, orders: str, backend: str) -> int:
    """Take 3 steps, or steps without end until asked to stop; at step 2 follow ``orders`` (RANK:WHAT,…)."""
    rank = int(os.environ.get("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "-1")))
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    todo = dict(order.split(":") for order in orders.split(",") if ":" in order)
    mine = todo.get(str(rank), todo.get("all", ""))
    if mine == "die-early":
        time.sleep(30)  # to be met by a signal before StopRequest is made
    assert backend or "torch" not in sys.modules, "without a backend a worker starts without torch"
    stop = StopRequest()
    agree = agree_over(backend) if backend else agree_by_file(folder)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS")
    (folder / f"env-{rank}").write_text(" ".join(os.environ.get(name, "-") for name in names))
    (folder / f"variables-{rank}").write_text(json.dumps(dict(os.environ)))
    print(f"worker {rank} says hello; terminal: {sys.stdout.isatty()}", flush=True)
    step = 0
    while step < 3 or "endless" in orders:
        step += 1
        if step == 2:
            follow(mine)
        if agree(stop.requested is not None):
            (folder / f"saved-{rank}").write_text(str(stop.requested))
            if mine == "slow-leave":
                time.sleep(2.5)  # longer than the grace that a failure leaves the others
            return EXIT_STOPPED
        (folder / f"step-{rank}").write_text(str(step))
        time.sleep(0.02)
    return 0


def agree_by_file(folder: Path) -> Callable[[bool], bool]:
    def agree(asked: bool) -> bool:
        if asked:
            (folder / "asked").touch()
        return (folder / "asked").exists()

    return agree


def agree_over(backend: str) -> Callable[[bool], bool]:
    import torch
    import torch.distributed as dist

    worker = worker_env()
    assert worker is not None
    torch.set_num_threads(1)
    dist.init_process_group(
        backend,
        init_method=worker.init_method,
        rank=worker.ranks.rank,
        world_size=worker.ranks.num_workers,
    )

    def agree(asked: bool) -> bool:
        votes = torch.tensor([int(asked), 1])
        dist.all_reduce(votes)
        assert votes[1] == worker.ranks.num_workers
        return bool(votes[0] > 0)

    return agree


def crash_deep_inside() -> None:
    raise ValueError("the flux capacitor is empty")


def follow(order: str) -> None:
    if order == "crash":
        crash_deep_inside()
    elif order == "usage":
        raise UsageError("micro batch 3 does not divide 8; use 2 or 4")
    elif order == "shoal":
        raise ShoalError("the disk of the shards is gone; mount it again")
    elif order == "hang":
        while True:
            time.sleep(1)
    elif order == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif order == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif order == "exit3":
        print("exit 3 was ordered", file=sys.stderr, flush=True)
        os._exit(3)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--orders", default="")
    parser.add_argument("--backend", default="")
    options = parser.parse_args()
    run_worker(lambda: work(options.dir, options.orders, options.backend), run=options.dir)
