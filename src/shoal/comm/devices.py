"""Defines the device interface of staging: streams, events, the lane.

``cuda_device`` implements it for GPUs. ``benchmarks/memory_device.py`` implements it for CPU tensors with a
runtime of CUDA whose streams are threads, so that the tests run all code, and the lane, without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch._C._distributed_c10d import Store

from shoal.comm.lane import Lane
from shoal.comm.routes import IntraHostGroup


class Event(Protocol):
    """A point in a stream, reached once all work queued before it has completed."""

    @property
    def cuda_event(self) -> int:
        """Return the handle of CUDA's runtime."""

    def synchronize(self) -> None:
        """Block the calling thread until the event is reached; raise the first error before it."""

    def query(self) -> bool:
        """Return whether the event has been reached."""


class DeviceStream(Protocol):
    """A queue of device work that executes in order, concurrently with other streams."""

    def run(self, step: Callable[[], object]) -> None:
        """Queue the tensor operations of ``step``. The caller keeps its tensors alive until a later event."""

    def wait_event(self, event: Any) -> None:
        """Make work queued from now on start after ``event``; does not block the calling thread."""

    def record_event(self) -> Event: ...


class Device(Protocol):
    """One device, as used by one process group."""

    torch_device: torch.device

    def identity(self) -> str:
        """Return a string that is equal for two processes of a host exactly if they use the same device."""

    def current_stream(self) -> DeviceStream:
        """Return the stream of the calling thread's own work."""

    def new_stream(self) -> DeviceStream: ...

    def open_lane(self, to_host: Any, to_device: Any, num_buffers: int, buffer_bytes: int) -> Lane:
        """Return a lane whose copies to the host and back are on these streams."""

    def intra_host_group(
        self, store: Store, rank: int, size: int, timeout: timedelta, name: str
    ) -> IntraHostGroup:
        """Connect the ranks of this host, all of which call it; raise if they cannot be connected."""

    def is_capturing(self) -> bool:
        """Return whether the current stream records into a graph instead of executing."""

    def future_devices(self) -> list[torch.device]:
        """Return the ``devices`` argument of a future of tensors on this device."""

    def run_thread(self, work: Callable[[], None]) -> None:
        """Run the body of a thread with this as its current device.

        Only such threads may wait for events while another one captures a graph.
        """

    def close(self) -> None: ...
