"""Lets models average over another group than the default one, to compare two backends in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def averaging_over(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Let models that are wrapped in this block average over ``group``."""
    default = dist.group.WORLD
    dist.group.WORLD = group
    try:
        yield
    finally:
        dist.group.WORLD = default
