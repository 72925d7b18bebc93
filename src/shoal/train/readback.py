"""Reads scalars of a device after the host has queued more work."""

from __future__ import annotations

import torch
from torch import Tensor


class Readback:
    """Scalars on their way to the host.

    The copy is queued at once, into pinned memory. :meth:`read` waits for it alone, not for what the host has
    queued behind it: one step later it does not wait at all.

    Args:
        values: scalars of one device.
    """

    def __init__(self, *values: Tensor) -> None:
        found = torch.stack([value.detach().double() for value in values])
        self._copied: torch.cuda.Event | None = None
        self._values = found
        if found.device.type == "cuda":
            self._values = torch.empty(len(values), dtype=torch.float64, pin_memory=True)
            self._values.copy_(found, non_blocking=True)
            self._copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._copied.record()

    def read(self) -> list[float]:
        """Return the values, in the order of the arguments."""
        if self._copied is not None:
            self._copied.synchronize()
        values: list[float] = self._values.tolist()
        return values
