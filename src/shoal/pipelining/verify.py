"""Compares loss and gradients of the first step with the unsplit model.

Without random operations the reference is the model as the user gave it. With dropout it is the exported
graph before it is split, on the same random streams, since the model itself would draw other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from shoal.errors import ShoalError
from shoal.pipelining.loss import loss_of
from shoal.pipelining.measure_cost import undisturbed
from shoal.pipelining.process_groups import ProcessGroups

_TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Largest error of a gradient, relative to its largest entry or 1/1000 of the largest of all; else 0.1."""
_TINY = 1e-3


@dataclass(frozen=True)
class Reference:
    """Result of the unsplit model for a batch: its part of the loss, and the gradients by canonical name."""

    loss: Tensor
    gradients: dict[str, Tensor]


def run_unsplit(
    model: nn.Module,
    forward: Callable[[Mapping[str, Tensor]], object],
    parts: Sequence[Mapping[str, Tensor]],
    weights: Sequence[Tensor],
    streams: Callable[[int], AbstractContextManager[None]],
    groups: ProcessGroups,
) -> Reference:
    """Run all micro-batches through the unsplit model and sum over the replicas; buffers are restored.

    Args:
        forward: runs the unsplit model on a micro-batch.
        streams: context of micro-batch m.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    sums = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    loss = torch.zeros((), dtype=torch.float64)
    with undisturbed(model):
        for number, (part, weight) in enumerate(zip(parts, weights, strict=True)):
            with streams(number):
                share = loss_of(forward(part))
            share = torch.where(weight > 0, share * weight, torch.zeros_like(share))
            gradients = torch.autograd.grad(share, list(parameters.values()), allow_unused=True)
            for total, gradient in zip(sums.values(), gradients, strict=True):
                if gradient is not None:
                    total += gradient
            loss += share.detach().cpu().double()
    for total in (*sums.values(), loss) if groups.data_group is not None else ():
        dist.all_reduce(total, group=groups.data_group)
    return Reference(loss, sums)


def compare(
    reference: Reference, loss: Tensor, parameters: Mapping[str, nn.Parameter], groups: ProcessGroups
) -> None:
    """Check this rank's gradients and the loss; all ranks raise if one of them differs.

    Raises:
        ShoalError: names the parameter that differs most on this rank, and the difference.
    """
    largest = max((float(g.abs().max()) for g in reference.gradients.values() if g.numel()), default=0.0)
    worst, found_at = 0.0, ""
    for name, parameter in parameters.items():
        if name not in reference.gradients:
            continue
        expected = reference.gradients[name]
        actual = torch.zeros_like(expected) if parameter.grad is None else _whole(parameter.grad).to(expected)
        scale = max(float(expected.abs().max()), _TINY * largest, torch.finfo(expected.dtype).tiny)
        error = float((actual - expected).abs().max()) / scale
        excess = error / _TOLERANCE.get(expected.dtype, 0.1)
        if not excess <= worst:
            worst, found_at = excess, f"the gradient of {name} by {error:.2g} of its largest entry"
    difference = abs(float(loss) - float(reference.loss)) / max(abs(float(reference.loss)), 1e-30)
    excess = difference / _TOLERANCE.get(loss.dtype, 0.1)
    if not excess <= worst:
        worst, found_at = excess, f"the loss is {float(loss):.8g} instead of {float(reference.loss):.8g}"
    wrong = torch.tensor([0.0 if worst <= 1 else 1.0], device=groups.device)
    if groups.sum(wrong).item() == 0:
        return
    if worst <= 1:
        found_at = "see the message of another rank"
    raise ShoalError(
        f"verify: the pipeline's first step differs from the unsplit model: {found_at}. "
        "Report the model; until then train it on one stage, or give its stages as modules="
    )


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
