"""What staging needs of a device: lanes of work, marks in them, buffers, and the ranks beside it.

Two implementations: ``cuda_device`` for GPUs, and ``memory_device``, whose lanes are threads and whose
tensors lie in the processor's memory. The second is what the tests run: all above this interface is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store


class Mark(Protocol):
    """A place in a lane. It is passed when all that was queued before it has ended."""

    def wait(self) -> None:
        """Hold the calling thread until the mark is passed; raises what went wrong before it."""

    def is_done(self) -> bool: ...


class Lane(Protocol):
    """Work of the device, done in the order in which it was queued, beside that of other lanes (a stream)."""

    def run(self, step: Callable[[], object]) -> None:
        """Queue what ``step`` does to tensors. Whoever queues it keeps them alive until a later mark."""

    def wait_for(self, mark: Any) -> None:
        """Let what is queued from now on begin after ``mark``; the calling thread goes on."""

    def mark(self) -> Mark: ...


class HostRanks(Protocol):
    """The ranks of one host among themselves. Called inside a step of a lane, in the same order on all."""

    def reduce_scatter(self, output: Tensor, input: Tensor, op: str) -> None:
        """Combine the ranks' inputs and leave this rank's part, the rank-th of equal ones, in ``output``."""

    def all_gather(self, output: Tensor, input: Tensor) -> None: ...

    def abort(self, reason: str) -> None:
        """Free who waits here."""

    def close(self) -> None: ...


class Device(Protocol):
    """One device, as one group of ranks uses it."""

    place: torch.device

    def identity(self) -> str:
        """Return a text that is the same for two processes of a host exactly if they use the same device."""

    def here(self) -> Lane:
        """Return the lane into which the calling thread's own work goes."""

    def new_lane(self) -> Lane: ...

    def buffer(self, num_bytes: int) -> Tensor:
        """Return memory of the host (uint8) which the device copies to and from without the processor."""

    def inside_host(self, store: Store, rank: int, size: int, timeout: timedelta, name: str) -> HostRanks:
        """Meet the ranks of this host, which all call this; raises if they cannot work together."""

    def is_recording(self) -> bool:
        """Whether what the calling thread queues is recorded to be done later, instead of being done."""

    def future_devices(self) -> list[torch.device]:
        """Return what a future of tensors on this device must name."""

    def run_thread(self, work: Callable[[], None]) -> None:
        """Do the whole of a thread's work, with this device as its current one."""

    def close(self) -> None: ...
