"""Copies of a device's tensors in the host's memory, for what the inner gloo group does."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shoal.comm.devices import Device


class Aside:
    """Tensors of one device beside which copies are made. The calling thread waits for each copy."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lane = device.new_lane()

    def given(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return copies of what the caller has queued for these tensors."""
        copies = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
        self._copy(copies, tensors)
        return copies

    def room(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        """Return memory for results, and what then brings them to the device, and waits."""
        copies = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
        self._lane.wait_for(self._device.here().mark())
        return copies, lambda: self._copy(tensors, copies, after_caller=False)

    def _copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor], after_caller: bool = True) -> None:
        if after_caller:
            self._lane.wait_for(self._device.here().mark())
        for target, source in zip(targets, sources, strict=True):
            self._lane.run(_one_copy(target.detach(), source.detach()))
        self._lane.mark().wait()


def _one_copy(target: Tensor, source: Tensor) -> Callable[[], object]:
    return lambda: target.copy_(source)
