"""Real worker processes for tests, forked from a process that has torch loaded: each starts at once."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

_context = multiprocessing.get_context("forkserver")
# torch._dynamo: every optimizer imports it at its first step, seconds in each process otherwise
_context.set_forkserver_preload(
    [
        "torch._dynamo",
        "torch.distributed.fsdp",
        "shoal.train.checkpoint",
        "shoal.launch.agent",
    ]
)


def fork_process(function: Callable[..., None], *args: Any) -> BaseProcess:
    """Start ``function(*args)`` in a process that has torch loaded already; it may have children."""
    process = _context.Process(target=function, args=args)
    process.start()
    return process


def start_workers(
    function: Callable[..., None], num_workers: int, meeting: Path, *args: Any
) -> list[BaseProcess]:
    """Start ``function(rank, *args)`` in processes of one gloo group that meet at a file."""
    processes = [
        _context.Process(target=_worker, args=(function, rank, num_workers, meeting, args), daemon=True)
        for rank in range(num_workers)
    ]
    for process in processes:
        process.start()
    return processes


def run_workers(
    function: Callable[..., None], num_workers: int, meeting: Path, *args: Any, deadline_s: float = 120
) -> list[int | None]:
    """Run ``function(rank, *args)`` on ``num_workers`` workers and return their exit codes."""
    processes = start_workers(function, num_workers, meeting, *args)
    return wait_for(processes, deadline_s)


def wait_for(processes: list[BaseProcess], deadline_s: float = 120) -> list[int | None]:
    end = time.monotonic() + deadline_s
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    exit_codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return exit_codes


def _worker(
    function: Callable[..., None], rank: int, num_workers: int, meeting: Path, args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    try:
        if num_workers > 1:
            dist.init_process_group(
                "gloo", init_method=f"file://{meeting}", rank=rank, world_size=num_workers
            )
        function(rank, *args)
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
