"""Small values exchanged between the workers as JSON, over a process group of processors.

``torch.distributed``'s own object collectives pickle what they send; a peer's bytes are never unpickled here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shoal.errors import ShoalError, UsageError
from shoal.json_text import parse_json

T = TypeVar("T")


def exchange(group: dist.ProcessGroup | None, value: Any) -> list[Any]:
    """Return every worker's ``value``, in rank order. ``group`` is ``None`` for a single worker.

    Raises:
        ShoalError: a worker was lost, or did not take part before the group's deadline.
    """
    return together(group, lambda: value)


def together(group: dist.ProcessGroup | None, action: Callable[[], T]) -> list[T]:
    """Run ``action`` on every worker and return all its results (values that JSON can hold).

    Raises:
        ShoalError: it failed on some worker, in any way, or a worker was lost; all raise the error of the
            lowest rank, as the class it was. Only a worker with a defect (an exception that is neither a
            :class:`ShoalError` nor an :class:`OSError`) raises its own, which has the traceback.
    """
    cause: Exception | None = None
    try:
        report = json.dumps({"result": action()})
    except Exception as error:  # unreported, it would leave the others waiting until the group's deadline
        cause = error
        text = f"{type(error).__name__}: {error}" if _is_defect(error) else str(error)
        report = json.dumps({"error": text, "usage": isinstance(error, UsageError)})
    gathered = _gathered(group, report.encode())
    reports = [parse_json(data, f"what worker {rank} sent") for rank, data in enumerate(gathered)]
    if cause is not None and _is_defect(cause):
        raise cause
    for rank, other in enumerate(reports):
        if "error" in other:
            where = f" (worker {rank})" if len(reports) > 1 and not other["usage"] else ""
            raise (UsageError if other["usage"] else ShoalError)(other["error"] + where) from cause
    return [other["result"] for other in reports]


def _is_defect(error: Exception) -> bool:
    return not isinstance(error, ShoalError | OSError)


def _gathered(group: dist.ProcessGroup | None, data: bytes) -> list[bytes]:
    """Return every worker's ``data``, padded with spaces to one length."""
    if group is None:
        return [data]
    num_workers = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(num_workers)]
    try:
        dist.all_gather(sizes, torch.tensor([len(data)]), group=group)
        longest = int(max(sizes))
        mine = torch.frombuffer(bytearray(data.ljust(longest)), dtype=torch.uint8)
        all_data = [torch.empty(longest, dtype=torch.uint8) for _ in range(num_workers)]
        dist.all_gather(all_data, mine, group=group)
    except RuntimeError as error:
        raise ShoalError(f"another worker was lost while the workers agreed: {error}") from error
    return [buffer.numpy().tobytes() for buffer in all_data]
