"""Shares between LAMB, LANS, LARS, NovoGrad and Adafactor: on a GPU their steps are Triton kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.utils._triton import has_triton

from shoal.optim.moments import Batch, MomentsOptimizer, Squares, local_part, same_layout


class KernelOptimizer(MomentsOptimizer):
    """Updates dense float32 tensors on a GPU by Triton kernels, those of all groups in one launch.

    There a step may be skipped by the device: where ``found_inf``, which torch's GradScaler sets, is not 0,
    weights, state and step counts stay as they are, and the host does not wait.
    """

    entries: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    """Of a state, those that have the weights' shape."""

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Return whether a step reads ``found_inf`` on the device, which torch's GradScaler asks."""
        grown = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        return bool(grown) and all(map(suits_kernel, grown))

    def _counts_on_device(self, params: Sequence[Tensor]) -> bool:
        return all(map(suits_kernel, params))

    def _update_all(self, batches: Sequence[Batch]) -> list[Squares]:
        by_device: dict[torch.device, list[Batch]] = {}
        others: list[Batch] = []
        for batch in batches:
            indices = self._kernel_indices(batch)
            rest = sorted(set(range(len(batch.params))) - set(indices))
            if indices:
                by_device.setdefault(batch.weights[0].device, []).append(batch.chosen(indices))
            if rest and not (batch.skip is not None and batch.skip.item()):
                others.append(batch.chosen(rest))
        squares = [self._update_by_kernels(of_device) for of_device in by_device.values()]
        return squares + [self._update(batch) for batch in others]

    def _kernel_indices(self, batch: Batch) -> Sequence[int]:
        """Return the indices of the parameters that the kernels update: here all or none."""
        lists = [batch.grads, batch.weights, *map(batch.entries, self.entries)]
        is_fp32 = all(tensor.dtype == torch.float32 for tensors in lists for tensor in tensors)
        suits = batch.weights[0].is_cuda and has_triton() and is_fp32 and same_layout(*lists)
        return range(len(batch.params)) if suits else ()

    def _update_by_kernels(self, batches: Sequence[Batch]) -> Squares:
        """Update parameters of one device."""
        raise NotImplementedError


def suits_kernel(parameter: Tensor) -> bool:
    """Return whether kernels update a parameter, if its state has the same form."""
    weight, grad = local_part(parameter), local_part(parameter.grad)
    is_fp32 = weight.dtype == grad.dtype == torch.float32
    return weight.is_cuda and is_fp32 and same_layout([weight], [grad]) and has_triton()
