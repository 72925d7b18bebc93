"""Defines the device interface of staging: streams, events, the lane.

:class:`BounceBuffers` uses it for single copies, of tensors that are sent as messages.

``cuda_device`` implements it for GPUs. ``benchmarks/memory_device.py`` implements it for CPU tensors with a
runtime of CUDA whose streams are threads, so that the tests run all code, and the lane, without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
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


class BounceBuffers:
    """Copies device tensors to and from host memory for messages. The calling thread blocks for each copy."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._stream = device.new_stream()

    def to_host(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return host copies of tensors, made after the work that the caller has queued."""
        copies, _ = self.for_outputs(tensors)
        self._copy(copies, tensors)
        return copies

    def for_outputs(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        """Return host tensors for results, and a function that copies them to the device."""
        copies = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
        self._stream.wait_event(self._device.current_stream().record_event())
        return copies, lambda: self._copy(tensors, copies)

    def _copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            self._stream.run(partial(target.detach().copy_, source.detach()))
        self._stream.record_event().synchronize()
