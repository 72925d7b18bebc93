"""Workers of one gloo group for tests, forked from a process that has torch loaded."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

from forked import fork_process, wait_for


def start_workers(
    function: Callable[..., None], num_workers: int, meeting: Path, *args: Any
) -> list[BaseProcess]:
    """Start ``function(rank, *args)`` in processes of one gloo group that meet at a file."""
    return [
        fork_process(_worker, function, rank, num_workers, meeting, args, daemon=True)
        for rank in range(num_workers)
    ]


def run_workers(
    function: Callable[..., None], num_workers: int, meeting: Path, *args: Any, deadline_s: float = 120
) -> list[int | None]:
    """Run ``function(rank, *args)`` on ``num_workers`` workers and return their exit codes."""
    processes = start_workers(function, num_workers, meeting, *args)
    return wait_for(processes, deadline_s)


def _worker(
    function: Callable[..., None], rank: int, num_workers: int, meeting: Path, args: tuple[Any, ...]
) -> None:
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
