"""Forks the workers of one group of backend ``"shoal"`` (or gloo), as several hosts on one machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch.distributed as dist

import shoal.comm  # registers the backend where the installed package is older than its entry point
from forked import fork_process, wait_for
from shoal.comm import native_group
from shoal.env.settings import CACHE_DIR, NATIVE_GROUP


def in_both_groups(
    name: str, values: Sequence[Any], *, python: Sequence[Any], native: Sequence[Any] | None = None
) -> Any:
    """Parametrize a test by values in both process groups, which hand collectives to the same engine.

    The quick tests have ``python`` in the group in Python, and ``native`` in that in C++ (default: all).
    """
    quick = {"native": values if native is None else native, "python": python}
    cases = [
        pytest.param(group, value, marks=() if value in few else pytest.mark.slow, id=f"{group}-{value}")
        for group, few in quick.items()
        for value in values
    ]
    return pytest.mark.parametrize(("both_groups", name), cases, indirect=["both_groups"])


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
    environment: Mapping[str, str] | Sequence[Mapping[str, str]] = MappingProxyType({}),
    deadline_s: float = 120,
    **options: Any,
) -> list[int | None]:
    """Run ``function(rank, *args)`` on ``size`` workers, on these hosts, and return how each has ended.

    ``environment`` is that of all workers, or a list with one per rank; ``options`` are those of
    ``init_process_group``.
    """
    folder.mkdir(exist_ok=True)
    meeting = folder / f"meeting-{backend.replace(':', '-')}-{len(list(folder.iterdir()))}"
    chosen = {name: os.environ[name] for name in (NATIVE_GROUP, CACHE_DIR) if name in os.environ}
    given = [environment] * size if isinstance(environment, Mapping) else environment
    environments = [
        {**chosen, **given[rank], **({"SHOAL_HOST_ID": hosts[rank]} if hosts else {})} for rank in range(size)
    ]
    processes = [
        fork_process(_worker, function, rank, size, meeting, backend, environments[rank], options, args)
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
    options: Mapping[str, Any],
    args: tuple[Any, ...],
) -> None:
    os.environ.update(environment)
    shoal.comm.register()
    dist.init_process_group(backend, init_method=f"file://{meeting}", rank=rank, world_size=size, **options)
    function(rank, *args)
    if dist.is_initialized():
        dist.destroy_process_group()


def shoal_group(group: Any = None) -> Any:
    """Return the ``ShoalProcessGroup`` of a group or beside a native one; default: of the default group."""
    return native_group.python_group(group or dist.group.WORLD)


def is_native(group: Any = None) -> bool:
    return native_group.native_backend(group or dist.group.WORLD) is not None


def sequence_number(group: Any = None) -> int:
    """Return how many collectives the group has begun."""
    group = group or dist.group.WORLD
    # torch 2.11 asks the backends that it knows, no others
    return int((native_group.native_backend(group) or group)._get_sequence_number_for_group())


def num_pending() -> int:
    """Return how many operations the default group keeps for an end that nobody has waited for."""
    operations = shoal_group().operations
    num = len(operations.pending) + len(operations.messages)
    if (backend := native_group.native_backend(dist.group.WORLD)) is not None:
        num += int(sys.modules["shoal_torch"].num_pending(backend))
    return num


def thread_names() -> list[str]:
    """Return the names of this process's threads, which the system knows for those of C++ too."""
    names = []
    for task in Path("/proc/self/task").glob("*/comm"):
        with suppress(OSError):  # a thread that has just ended
            names.append(task.read_text().strip())
    return names


def group_counters(group: Any = None) -> dict[str, int]:
    """Return the counters of a group's engine; default: of the default group."""
    return native_group.counters(group or dist.group.WORLD)


def ops(kind: str) -> int:
    return group_counters().get(f"ops_{kind}", 0)
