"""Copies micro-batches to a GPU on a stream of their own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shoal.comm.devices import Device, Event
from shoal.data.loader import to_device

Copies = Callable[[Any], Any]
"""Returns a tensor, or a dictionary, list or tuple of tensors and other values, with its tensors on the
device."""


class DeviceCopies:
    """Copies tensors beside the kernels of the current stream, which waits only for the copies that it uses.

    The host queues the copy of a micro-batch when the loop asks for it. By then a GPU is usually still busy
    with the kernels before, and the copy runs at the same time. Results may be used on the stream that is
    current at the call.

    Args:
        device: where to copy to; :func:`shoal.data.loader.to_device` is the same without streams.
    """

    def __init__(self, device: Device) -> None:
        self._device, self._stream = device, device.new_stream()
        self._sources: deque[tuple[Event, Any]] = deque()  # copies under way need their memory

    def __call__(self, batch: Any) -> Any:
        """Return ``batch`` with its tensors on the device; those that are there stay as they are."""
        moved = self._moved(batch)
        copied = self._stream.record_event()
        self._device.current_stream().wait_event(copied)
        self._sources.append((copied, batch))
        while self._sources and self._sources[0][0].query():
            self._sources.popleft()
        return moved

    def _moved(self, batch: Any) -> Any:
        if isinstance(batch, Tensor):
            return self._device.upload(batch, self._stream)
        if isinstance(batch, Mapping):
            return {name: self._moved(value) for name, value in batch.items()}
        if isinstance(batch, list | tuple):
            return type(batch)(map(self._moved, batch))
        return batch


def copies_to(device: torch.device) -> Copies:
    """Return what copies micro-batches to ``device``."""
    if device.type != "cuda":
        return partial(to_device, device=device)
    from shoal.comm.cuda_device import CudaDevice

    return DeviceCopies(CudaDevice(device))
