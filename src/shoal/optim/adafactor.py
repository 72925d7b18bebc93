"""Adafactor: Adam's second moment in two vectors per matrix, steps relative to the size of the weights.

    beta2 = 1 - t^-0.8                                         0 in the first step
    R = beta2 R + (1 - beta2) mean over columns of (g^2 + eps1)
    C = beta2 C + (1 - beta2) mean over rows of (g^2 + eps1)
    V = R C / mean(R)                                          unfactored: as Adam's
    u = g / sqrt(V)          u = u / max(1, rms(u))
    w = w - lr max(0.001, rms(w)) u

Source: Shazeer and Stern, "Adafactor: Adaptive Learning Rates with Sublinear Memory Cost" (arXiv 1804.04235),
algorithms 4 to 6 with its constants and, as T5, without momentum, and the rule of T5's own code for
factoring: the two largest dims, where both have at least 128 elements. The paper's relative step is
``lr = min(1e-2, 1 / sqrt(t))``, which is T5's schedule of pre-training
(:class:`shoal.optim.lr_schedules.InverseSquareRoot`).

``torch.optim.Adafactor`` computes the same for matrices with large gradients, which a test checks, but
differs from T5 elsewhere:

- ``eps1`` bounds V from below by its square instead of being added to g^2, and defaults to 1.2e-7: smaller
  gradients, as rows of rare words have, are no longer normalised. The paper's 1e-30 cannot be given: its
  square is 0 in fp32, and a row without a gradient becomes 0 / 0;
- every tensor of two dims is factored, T5's position biases of 32 x 12 too;
- ``lr`` is limited to 1 / sqrt(t), so that T5's constant rate of fine-tuning falls once t exceeds 1e6, the
  steps of its pre-training;
- it reads three norms of each tensor on the host, and does not support FSDP2's shards: torch 2.15 refuses
  matrices, and updates a shard of a vector by norms that are not the vector's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from shoal.optim.moments import Batch, MomentsOptimizer, Squares, local_box, local_part, sum_shards

_DECAY_RATE = 0.8
_LEAST_RMS = 1e-3
"""Of the weights, to which a step is relative."""
_PART_BYTES = 32 << 20
"""Of the weights that are updated together, unless one tensor has more."""


class Adafactor(MomentsOptimizer):
    """Implements Adafactor for any device, any floating type and FSDP2's shards.

    The state of a factored parameter is ``step``, ``row_var`` and ``col_var``, kept whole by every worker
    that holds a shard (they have the tensor's rows plus columns), of any other ``step`` and ``variance``; all
    of the parameter's type. A step needs memory for 32 MiB of updates, or for those of the largest tensor.
    Gradients that are not finite make weights that are not finite: check before the step.

    Args:
        params: parameters or groups; a group may set ``lr``, ``weight_decay`` and the other options.
        lr: size of the step relative to the weights' root mean square.
        eps1: added to each squared gradient.
        weight_decay: decoupled, times ``lr``.
        min_factored_size: least size of both dims of a factored second moment.

    Raises:
        UsageError: a value is out of its range.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        eps1: float = 1e-30,
        weight_decay: float = 0.0,
        min_factored_size: int = 128,
    ) -> None:
        defaults = {
            "lr": lr,
            "eps1": eps1,
            "weight_decay": weight_decay,
            "min_factored_size": min_factored_size,
        }
        super().__init__(params, defaults)

    def _new_state(self, group: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
        entry: dict[str, Any] = {"step": torch.tensor(0.0)}
        dims = factored_dims(tuple(parameter.shape), group["min_factored_size"])
        if dims is None:
            entry["variance"] = torch.zeros_like(parameter)
        else:
            local = local_part(parameter)
            entry["row_var"] = local.new_zeros(_without(tuple(parameter.shape), dims[1]))
            entry["col_var"] = local.new_zeros(_without(tuple(parameter.shape), dims[0]))
        return entry

    def _update(self, batch: Batch) -> Squares:
        parts = list(parts_of(batch, _PART_BYTES))
        # One copy to the device for all parts: each makes the host wait.
        sizes = torch.tensor(
            [parameter.numel() for parameter in batch.params], device=batch.weights[0].device
        )
        of_parts = torch.split(sizes, [len(part.params) for part in parts])
        grad_squares, weight_squares = zip(*map(_update_part, parts, of_parts), strict=True)
        return torch.cat(grad_squares).sum(), torch.cat(weight_squares).sum()


def parts_of(batch: Batch, num_bytes: int) -> Iterator[Batch]:
    """Yield the parameters in their order, as many at a time as have ``num_bytes``; shards count as whole."""
    begin = held = 0
    for index, parameter in enumerate(batch.params):
        if index > begin and held + parameter.nbytes > num_bytes:
            yield replace(batch, params=batch.params[begin:index], states=batch.states[begin:index])
            begin, held = index, 0
        held += parameter.nbytes
    yield replace(batch, params=batch.params[begin:], states=batch.states[begin:])


def _update_part(batch: Batch, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Update parameters in place; return the sums of squares of each gradient and weight.

    Args:
        sizes: number of elements of each parameter, on its device.
    """
    group, weights, grads = batch.group, batch.weights, batch.grads
    if batch.scale != 1.0:
        grads = list(torch._foreach_mul(grads, batch.scale))
    grad_squares, weight_squares = batch.squares(grads), batch.squares(weights)
    updates = _normalised(batch, grads)
    clips = (batch.squares(updates) / sizes).sqrt()
    sizes_of_steps = batch.lr * (weight_squares / sizes).sqrt().clamp(min=_LEAST_RMS)
    factors = (sizes_of_steps / clips.clamp(min=1.0)).to(weights[0].dtype)
    torch._foreach_mul_(updates, list(factors.unbind()))
    if group["weight_decay"] != 0.0:
        torch._foreach_mul_(weights, 1.0 - batch.lr * group["weight_decay"])
    torch._foreach_sub_(weights, updates)
    return grad_squares, weight_squares


def factored_dims(shape: tuple[int, ...], min_size: int) -> tuple[int, int] | None:
    """Return the two largest dims of a tensor in their order, or ``None`` where one is below ``min_size``."""
    if len(shape) < 2:
        return None
    largest = sorted(range(len(shape)), key=lambda dim: shape[dim])[-2:]
    if shape[largest[0]] < min_size:
        return None
    return min(largest), max(largest)


def _normalised(batch: Batch, grads: list[Tensor]) -> list[Tensor]:
    """Update the second moments; return the gradients divided by their roots."""
    group, params, states, eps1 = batch.group, batch.params, batch.states, batch.group["eps1"]
    factored = [k for k, state in enumerate(states) if "row_var" in state]
    means = _means_of_squares([params[k] for k in factored], [grads[k] for k in factored], group)
    updates = list(grads)
    for k, (row_mean, col_mean) in zip(factored, means, strict=True):
        rows, cols = states[k]["row_var"], states[k]["col_var"]
        share = float(states[k]["step"]) ** -_DECAY_RATE
        rows.lerp_(row_mean + eps1, share)
        cols.lerp_(col_mean + eps1, share)
        dims = factored_dims(tuple(params[k].shape), group["min_factored_size"])
        assert dims is not None, "a tensor does not change its shape"
        of_rows = (rows / rows.mean(dim=dims[0], keepdim=True)).rsqrt_()
        box = local_box(params[k])
        updates[k] = (grads[k] * of_rows[_box_without(box, dims[1])]).mul_(
            cols.rsqrt()[_box_without(box, dims[0])]
        )
    for k, state in enumerate(states):
        if "variance" in state:
            variance = local_part(state["variance"])
            variance.lerp_(grads[k].square().add_(eps1), float(state["step"]) ** -_DECAY_RATE)
            updates[k] = variance.rsqrt().mul_(grads[k])
    return updates


def _means_of_squares(
    params: list[Tensor], grads: list[Tensor], group: dict[str, Any]
) -> list[tuple[Tensor, Tensor]]:
    """Return the means of the squared whole gradients over columns and over rows, on all shards.

    Shards write theirs into zeros of the whole length, so that one sum over the workers completes both the
    rows that they share and those that they do not.
    """
    sums: list[Tensor] = []
    sizes: list[int] = []
    for parameter, grad in zip(params, grads, strict=True):
        dims = factored_dims(tuple(parameter.shape), group["min_factored_size"])
        assert dims is not None, "only factored parameters come here"
        box = local_box(parameter)
        for dim in (dims[1], dims[0]):
            squares = torch.linalg.vector_norm(grad, dim=dim, keepdim=True).square_()
            if grad.shape != parameter.shape:
                whole = grad.new_zeros(_without(tuple(parameter.shape), dim))
                whole[_box_without(box, dim)] = squares
                squares = whole
            sums.append(squares)
            sizes.append(parameter.shape[dim])
    sum_shards([parameter for parameter in params for _ in range(2)], sums)
    means = [squares / size for squares, size in zip(sums, sizes, strict=True)]
    return list(zip(means[::2], means[1::2], strict=True))


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], 1, *shape[dim + 1 :])


def _box_without(box: tuple[slice, ...], dim: int) -> tuple[slice, ...]:
    return (*box[:dim], slice(0, 1), *box[dim + 1 :])
