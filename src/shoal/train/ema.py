"""An exponential moving average of a model's weights, to evaluate and to export instead of the last ones.

    a = decay a + (1 - decay) w          after each optimizer step

Source: Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging" (1992), in the form with
exponential weights of TensorFlow's ``ExponentialMovingAverage``, whose warm-up it has too.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.optim.moments import indices_by_kind


def decay_after(decay: float, step: int, *, warmup: bool) -> float:
    """Return the decay of the update that follows optimizer step ``step``, counted from 1.

    With a warm-up it is ``min(decay, (1 + step) / (10 + step))``: the first steps, whose weights are hardly
    trained, are soon forgotten. Without one the initial weights count like any step's.

    Raises:
        UsageError: a value is out of its range.
    """
    if not 0.0 <= decay < 1.0:
        raise UsageError(f"decay={decay} of the average of weights must be at least 0 and below 1")
    if step < 1:
        raise UsageError(f"step={step} must be at least 1")
    return min(decay, (1 + step) / (10 + step)) if warmup else decay


class WeightAverage:
    """The average of a model's parameters and floating-point buffers; other buffers are the last ones.

    All workers update theirs alike and hold the same. Put :attr:`model` into the state of a checkpoint: there
    is no other state.

    Args:
        model: what is trained, before or after DistributedDataParallel took it in, not that wrapper.
        decay: of the average, such as 0.9999 for a decay over ten thousand steps.
        warmup: begin with smaller decays (:func:`decay_after`).

    Raises:
        UsageError: ``decay`` is out of its range.
    """

    def __init__(self, model: nn.Module, decay: float, *, warmup: bool = True) -> None:
        decay_after(decay, 1, warmup=warmup)
        self.decay = decay
        self.warmup = warmup
        self.model = copy.deepcopy(model).requires_grad_(False).eval()
        """A model like that which is trained, with the averaged weights."""

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Take the weights of ``model`` after optimizer step ``step``, counted from 1, into the average."""
        share = 1.0 - decay_after(self.decay, step, warmup=self.warmup)
        averages, weights = _tensors(self.model), _tensors(model)
        for indices in indices_by_kind(averages):
            ours, theirs = [averages[k] for k in indices], [weights[k] for k in indices]
            if ours[0].is_floating_point():
                torch._foreach_lerp_(ours, theirs, share)
            else:
                torch._foreach_copy_(ours, theirs)


def _tensors(model: nn.Module) -> list[Tensor]:
    return [tensor.detach() for tensor in (*model.parameters(), *model.buffers())]
