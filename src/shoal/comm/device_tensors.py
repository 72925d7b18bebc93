"""Provides collectives on lists of device tensors in a :class:`~shoal.comm.job_group.JobGroup`.

The counterpart of ``comm.arrays`` for gradients of programs that have no process group of torch, as Keras':
tensors pass through the lane (``comm.staging``) to the group's own engine. A call returns when the results
are queued on the device, and the calling thread's stream waits for them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.comm.arrays import FUSED_BELOW_BYTES
from shoal.comm.collectives import collective
from shoal.comm.devices import Device
from shoal.comm.engine import CommError, EngineOptions
from shoal.comm.job_group import JobGroup
from shoal.comm.routes import flat_route
from shoal.comm.staging import DeviceWork, Staging, Transfer


class DeviceTensors:
    """The collectives of a group on tensors of one device.

    No other collective of the group may begin before a call has returned, so that all ranks' operations have
    one order.

    Attributes:
        staging: of the device.
    """

    def __init__(self, device: Device, group: JobGroup) -> None:
        options = EngineOptions()
        self._device, self._group = device, group
        self.staging = Staging(
            device, self, num_buffers=options.staging_buffers, buffer_bytes=options.staging_bytes
        )

    def all_reduce(self, tensors: Sequence[Tensor], op: str = "avg") -> None:
        """Replace each tensor by its reduction over all ranks.

        Args:
            tensors: contiguous, on the device, of the same shapes and dtypes on all ranks.
            op: ``avg`` of floating-point numbers, ``sum``, ``min``, ``max`` or ``prod``.

        Raises:
            CommError: a rank was lost, or ranks differ.
        """
        if self._group.size == 1:
            return
        sent, fused = _fused(tensors)
        works = [self._begin(each, op) for each in sent]
        for work in works:
            work.wait()
        for block, small in fused:
            parts = torch.split(block, [each.numel() for each in small])
            for each, part in zip(small, parts, strict=True):
                each.copy_(part.view(each.shape))

    def close(self) -> None:
        """Join the threads; the group's engine is still open, or was closed."""
        self.staging.stop()
        self._device.close()

    def _begin(self, tensor: Tensor, op: str) -> DeviceWork:
        flat = tensor.view(-1)
        operation = collective("all_reduce", flat, flat, op=op)
        work = DeviceWork(self._device, "all_reduce", [tensor], self, lambda: None)
        self.staging.begin(
            Transfer(
                route=flat_route(operation, self._group.engine, self._group.rank, self._group.size),
                ready=self._device.current_stream().record_event(),
                timeout_s=self._group.timeout_s,
                work=work,
                on_end=lambda: None,
            )
        )
        return work

    # ---- for staging --------------------------------------------------------------------------------------

    def error(self) -> str | None:
        """Return the reason for which the group has failed, if it has."""
        return self._group.engine.error()

    def abort(self, reason: str) -> None:
        """Fail the group on all ranks."""
        self._group.engine.abort(f"rank {self._group.rank}: {reason}")

    def explain(self, problem: Exception) -> Exception:
        """Return the group's error, which names the first cause, if it has failed; else ``problem``."""
        reason = self.error()
        return CommError(reason) if reason and not isinstance(problem, CommError) else problem


def _fused(tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[tuple[Tensor, list[Tensor]]]]:
    """Return what is sent, in the same order on all ranks, and the blocks in it with their small tensors."""
    small: dict[torch.dtype, list[Tensor]] = {}
    for each in tensors:
        if 0 < each.numel() * each.element_size() < FUSED_BELOW_BYTES:
            small.setdefault(each.dtype, []).append(each)
    fused = [(torch.cat([each.view(-1) for each in alike]), alike) for alike in small.values()]
    rest = [each for each in tensors if each.numel() * each.element_size() >= FUSED_BELOW_BYTES]
    return [*(block for block, _ in fused), *rest], fused
