"""Where a model is cut into stages, so that the slowest stage is as fast as can be and memory suffices."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.decide.cost import Link, ModelCost


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The memory of one device, and what a byte of parameters brings with it."""

    limit_bytes: int
    gradient_ratio: float = 1.0
    """Bytes of gradients for each byte of parameters."""
    optimizer_ratio: float = 2.0
    """Bytes of optimizer state for each byte of parameters: Adam in the parameters' precision has 2; bf16
    parameters with fp32 masters and moments have 6."""
    reserved_bytes: int = 0
    """What the device's library, workspaces and fragmentation take."""


def partition(
    cost: ModelCost, num_stages: int, *, link: Link | None = None, memory: Memory | None = None
) -> tuple[int, ...]:
    """Return the cuts: the units at which the second, third, ... stage begins."""
    raise NotImplementedError
