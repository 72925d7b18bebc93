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

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import ParamsT

from shoal import native
from shoal.errors import UsageError
from shoal.optim.kernel_optimizer import KernelOptimizer, suits_kernel
from shoal.optim.moments import Batch, Implementation, Squares, local_box, local_part, sum_shards

_DECAY_RATE = 0.8
_LEAST_RMS = 1e-3
"""Of the weights, to which a step is relative."""
_PART_BYTES = 32 << 20
"""Of the weights of one shape that are updated together, unless one tensor of the model has more."""


class Adafactor(KernelOptimizer):
    """Implements Adafactor for any device, any floating type and FSDP2's shards.

    On the CPU a native kernel updates whole float32 tensors, but those of more than two dims that are
    factored, with bits that do not depend on the number of threads. On a GPU Triton kernels update the same;
    they need memory for a 64th of the weights. All else is updated as the following says.

    The state of a factored parameter is ``step``, ``row_var`` and ``col_var``, kept whole by every worker
    that holds a shard (they have the tensor's rows plus columns), of any other ``step`` and ``variance``; all
    of the parameter's type. Tensors of one shape are updated as one, so that a GPU gets few operations. A
    step needs memory for 32 MiB of updates, or for those of the largest tensor. Gradients that
    are not finite make weights that are not finite: check before the step.

    Args:
        params: parameters or groups; a group may set ``lr``, ``weight_decay`` and the other options.
        lr: size of the step relative to the weights' root mean square.
        eps1: added to each squared gradient.
        weight_decay: decoupled, times ``lr``.
        min_factored_size: least size of both dims of a factored second moment.
        implementation: ``"native"`` for what the native kernel updates, ``"foreach"`` for any device,
            ``"auto"`` uses the kernel where it can.

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
        implementation: Implementation = "auto",
    ) -> None:
        defaults = {
            "lr": lr,
            "eps1": eps1,
            "weight_decay": weight_decay,
            "min_factored_size": min_factored_size,
        }
        super().__init__(params, defaults, implementation=implementation)

    def _goes_native(self, group: dict[str, Any], parameter: Tensor) -> bool:
        dims = factored_dims(tuple(parameter.shape), group["min_factored_size"])
        if dims is not None and not (parameter.ndim == 2 and parameter.is_contiguous()):
            if self.implementation == "native":
                raise UsageError(
                    f"implementation='native' factors matrices, got {tuple(parameter.shape)}; use 'auto'"
                )
            return False
        return super()._goes_native(group, parameter)

    def _update_native(self, batch: Batch) -> tuple[float, float]:
        is_plain = ["variance" in state for state in batch.states]
        plain = batch.chosen([index for index, each in enumerate(is_plain) if each])
        plain.lay_out("variance")
        moments = [
            state["variance"] if each else (state["row_var"], state["col_var"])
            for each, state in zip(is_plain, batch.states, strict=True)
        ]
        return native.adafactor_step(
            second_moments=moments, shares=list(map(share_of, batch.steps)),
            **batch.native_arguments("eps1", "weight_decay"),
        )  # fmt: skip

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

    def _kernel_indices(self, batch: Batch) -> Sequence[int]:
        return [
            index
            for index, (parameter, state) in enumerate(zip(batch.params, batch.states, strict=True))
            if suits_kernel(parameter) and _is_plain(parameter, state)
        ]

    def _update_by_kernels(self, batches: Sequence[Batch]) -> Squares:
        from shoal.optim.adafactor_kernel import update_adafactor  # Triton is loaded where it is needed

        return update_adafactor(batches)

    def _update(self, batch: Batch) -> Squares:
        groups = _of_one_shape(batch)
        ordered = batch.chosen([index for indices in groups for index in indices])
        grad_squares, weight_squares = ordered.squares(ordered.grads), ordered.squares(ordered.weights)
        most = max(_PART_BYTES, max(parameter.nbytes for parameter in batch.params))
        parts = [part for indices in groups for part in parts_of(batch.chosen(indices), most)]
        of_parts = torch.split(weight_squares, [len(part.params) for part in parts])
        for part, squares in zip(parts, of_parts, strict=True):
            _update_part(part, squares)
        return grad_squares.sum() * batch.scale**2, weight_squares.sum()


def _is_plain(parameter: Tensor, state: dict[str, Any]) -> bool:
    """Return whether a tensor is whole, contiguous, and a matrix if it is factored."""
    if isinstance(parameter, DTensor) or not parameter.is_contiguous():
        return False
    return "variance" in state or parameter.ndim == 2


def _of_one_shape(batch: Batch) -> list[list[int]]:
    """Group parameters that are updated as one tensor: of one shape, sharded alike, of as many steps.

    All workers find the same groups in the same order.
    """
    groups: dict[Any, list[int]] = {}
    for index, (parameter, step) in enumerate(zip(batch.params, batch.steps, strict=True)):
        shards = None
        if isinstance(parameter, DTensor):
            shards = parameter.device_mesh, parameter.placements
        groups.setdefault((tuple(parameter.shape), shards, step), []).append(index)
    return list(groups.values())


def parts_of(batch: Batch, num_bytes: int) -> Iterator[Batch]:
    """Yield the parameters in their order, as many at a time as have ``num_bytes``; shards count as whole."""
    begin = held = 0
    for index, parameter in enumerate(batch.params):
        if index > begin and held + parameter.nbytes > num_bytes:
            yield replace(batch, params=batch.params[begin:index], states=batch.states[begin:index])
            begin, held = index, 0
        held += parameter.nbytes
    yield replace(batch, params=batch.params[begin:], states=batch.states[begin:])


def _update_part(batch: Batch, weight_squares: Tensor) -> None:
    """Update parameters of one shape in place.

    Args:
        weight_squares: the sum of squares of each.
    """
    group, weights, size = batch.group, batch.weights, batch.params[0].numel()
    updates = torch.stack(batch.grads)
    if batch.scale != 1.0:
        updates.mul_(batch.scale)
    normalise = _normalise_factored if "row_var" in batch.states[0] else _normalise
    updates = normalise(batch, updates)
    clips = (batch.squares(list(updates.unbind())) / size).sqrt_()
    sizes_of_steps = (weight_squares / size).sqrt_().clamp_(min=_LEAST_RMS) * batch.lr
    factors = (sizes_of_steps / clips.clamp_(min=1.0)).to(updates.dtype)
    updates.mul_(factors.view(-1, *(1,) * (updates.ndim - 1)))
    if group["weight_decay"] != 0.0:
        torch._foreach_mul_(weights, 1.0 - batch.lr * group["weight_decay"])
    torch._foreach_sub_(weights, list(updates.unbind()))


def factored_dims(shape: tuple[int, ...], min_size: int) -> tuple[int, int] | None:
    """Return the two largest dims of a tensor in their order, or ``None`` where one is below ``min_size``."""
    if len(shape) < 2:
        return None
    largest = sorted(range(len(shape)), key=lambda dim: shape[dim])[-2:]
    if shape[largest[0]] < min_size:
        return None
    return min(largest), max(largest)


def is_factored(parameter: Tensor, min_size: int) -> bool:
    """Return whether the second moment of a tensor is factored."""
    return factored_dims(tuple(parameter.shape), min_size) is not None


def _normalise(batch: Batch, grads: Tensor) -> Tensor:
    """Update the second moments; return gradients ``[tensors, ...]`` divided by their roots."""
    variances = batch.entries("variance")
    squares = grads.square().add_(batch.group["eps1"])
    torch._foreach_lerp_(variances, list(squares.unbind()), _share(batch))
    return torch.stack(variances, out=squares).rsqrt_().mul_(grads)


def _normalise_factored(batch: Batch, grads: Tensor) -> Tensor:
    """Update rows and columns of the second moments; divide gradients ``[tensors, ...]`` by the roots."""
    shape = tuple(batch.params[0].shape)
    dims = factored_dims(shape, batch.group["min_factored_size"])
    assert dims is not None, "a tensor does not change its shape"
    first, second = dims
    entries = [[state[name] for state in batch.states] for name in ("row_var", "col_var")]
    means = [mean for dim in (second, first) for mean in _means_of_squares(batch, grads, dim).unbind()]
    torch._foreach_lerp_([*entries[0], *entries[1]], means, _share(batch))
    rows, cols = map(torch.stack, entries)
    rows.div_(rows.mean(dim=first + 1, keepdim=True)).rsqrt_()
    box = local_box(batch.params[0])
    grads.mul_(rows[:, *_box_without(box, second)])
    return grads.mul_(cols.rsqrt_()[:, *_box_without(box, first)])


def _share(batch: Batch) -> float:
    """Return 1 - beta2."""
    return share_of(batch.steps[0])


def share_of(step: float) -> float:
    """Return 1 - beta2 of an update, counted from 1."""
    return math.pow(step, -_DECAY_RATE)


def _means_of_squares(batch: Batch, grads: Tensor, dim: int) -> Tensor:
    """Return the means over a dim of the squared whole gradients, plus eps1, on all shards.

    Shards write theirs into zeros of the whole length, so that one sum over the workers completes both those
    that they share and those that they do not.
    """
    shape = tuple(batch.params[0].shape)
    squares = torch.linalg.vector_norm(grads, dim=dim + 1, keepdim=True).square_()
    if grads.shape[1:] != shape:
        whole = grads.new_zeros(len(grads), *_without(shape, dim))
        whole[:, *_box_without(local_box(batch.params[0]), dim)] = squares
        squares = whole
    sum_shards(batch.params, squares)
    means: Tensor = squares.div_(shape[dim]).add_(batch.group["eps1"])
    return means


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], 1, *shape[dim + 1 :])


def _box_without(box: tuple[slice, ...], dim: int) -> tuple[slice, ...]:
    return (*box[:dim], slice(0, 1), *box[dim + 1 :])
