"""Forks the workers of one group of backend ``"shoal"`` (or gloo), as several hosts on one machine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

import shoal.comm  # registers the backend where the installed package is older than its entry point
from forked import fork_process, wait_for


def run_group(function: Callable[..., None], size: int, folder: Path, *args: Any, **given: Any) -> None:
    """Run ``function(rank, *args)`` as :func:`exit_codes` does; all workers must succeed."""
    codes = exit_codes(function, size, folder, *args, **given)
    assert codes == [0] * size, codes


def exit_codes(
    function: Callable[..., None],
    size: int,
    folder: Path,
    *args: Any,
    backend: str = "shoal",
    hosts: Sequence[str] | None = None,
    environment: Mapping[str, str] | None = None,
    deadline_s: float = 120,
) -> list[int | None]:
    """Run ``function(rank, *args)`` on ``size`` workers, on these hosts, and return how each has ended."""
    folder.mkdir(exist_ok=True)
    meeting = folder / f"meeting-{backend.replace(':', '-')}-{len(list(folder.iterdir()))}"
    environments = [
        {**(environment or {}), **({"SHOAL_HOST_ID": hosts[rank]} if hosts else {})} for rank in range(size)
    ]
    processes = [
        fork_process(_worker, function, rank, size, meeting, backend, environments[rank], args)
        for rank in range(size)
    ]
    return wait_for(processes, deadline_s)


def _worker(
    function: Callable[..., None],
    rank: int,
    size: int,
    meeting: Path,
    backend: str,
    environment: Mapping[str, str],
    args: tuple[Any, ...],
) -> None:
    os.environ.update(environment)
    shoal.comm.register()
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=size)
    function(rank, *args)
    if dist.is_initialized():
        dist.destroy_process_group()


def group_counters() -> dict[str, int]:
    """Return the counters of this worker's default group."""
    group: Any = dist.group.WORLD
    counters: dict[str, int] = group.engine.counters()
    return counters


def ops(kind: str) -> int:
    return group_counters().get(f"ops_{kind}", 0)


def has_inner_group(group: Any = None) -> bool:
    group = group or dist.group.WORLD
    return group.gloo._group is not None
