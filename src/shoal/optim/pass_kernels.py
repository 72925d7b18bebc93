# mypy: disable-error-code="no-untyped-def, untyped-decorator"
"""Computes the updates of LAMB, LANS, LARS and NovoGrad on a GPU in passes over memory, in Triton.

A first pass sums squares for the norms of tensors (of LAMB and LANS also of the updates, which it computes
without writing them); the last one moves the weights. A program takes a chunk of one tensor. It finds the
tensor's addresses and options in a table, so one launch serves all tensors of all groups. No two programs add
to the same element: results have the same bits in each run. Steps that the device skips leave all as it is.

The optimizers import this module when their first parameter on a GPU is updated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.optim.moments import local_part, sum_shards

if TYPE_CHECKING:
    from shoal.optim.moments import Batch, Squares

CHUNK, BLOCK = tl.constexpr(16_384), tl.constexpr(2_048)
"""Elements of a program, and of those the ones that it has in registers at a time."""
_NUM_SUMS = tl.constexpr(4)

# Rows of the table: addresses, the number of elements, the address of the step, and options as fp64.
_GRAD, _WEIGHT, _FIRST, _SECOND, _SIZE, _STEP = map(tl.constexpr, range(6))
_LR, _DECAY, _EPS, _LOG1, _LOG2, _CORRECTS, _OWN = map(tl.constexpr, range(6, 13))
"""Options of all optimizers; those of one begin at ``_OWN``."""

Entries = Callable[[dict[str, Any]], tuple[Tensor, Tensor]]
"""Returns the two entries of a state that are updated, twice the same where it has one."""
Options = Callable[[dict[str, Any], Tensor], Sequence[float]]
"""Returns an optimizer's own options of a group and a weight."""


class Chunks(NamedTuple):
    """Holds the places of the chunks of all tensors."""

    tensors: Tensor
    """int32, the number of each chunk's tensor."""
    first: Tensor
    """int32, the number of each tensor's first chunk, and the number of all."""


@lru_cache(maxsize=16)
def chunks_of(counts: tuple[int, ...], device: torch.device) -> Chunks:
    """Return the chunks of tensors that have so many each."""
    numbers = torch.tensor(counts)
    tensors = torch.repeat_interleave(torch.arange(len(counts), dtype=torch.int32), numbers)
    first = torch.cat([torch.zeros(1, dtype=torch.int64), numbers.cumsum(0)]).int()
    return Chunks(tensors.to(device), first.to(device))


def _num_chunks(weights: Sequence[Tensor]) -> list[int]:
    return [math.ceil(weight.numel() / CHUNK.value) for weight in weights]


class Passes:
    """Runs kernels over dense float32 tensors of one device.

    Args:
        batches: gradients (before they are scaled), weights, states, step numbers and groups are read.
        entries: of the optimizer's states.
        options: the optimizer's own.
        num_chunks: returns how many programs each weight takes, after ``options``.
    """

    def __init__(
        self,
        batches: Sequence[Batch],
        entries: Entries,
        options: Options,
        num_chunks: Callable[[Sequence[Tensor]], Sequence[int]] = _num_chunks,
    ) -> None:
        self._params = [parameter for batch in batches for parameter in batch.params]
        weights = [weight for batch in batches for weight in batch.weights]
        self.device, self.num_tensors = weights[0].device, len(weights)
        # The kernels read the steps at their addresses.
        self._counts = [
            None if each.counts is None else each.counts.tensor.to(self.device) for each in batches
        ]
        columns = [
            column
            for batch, counts in zip(batches, self._counts, strict=True)
            for column in _columns(batch, counts, entries, options)
        ]
        addresses, numbers = ([column[k] for column in columns] for k in (0, 1))
        table = torch.cat(
            [torch.tensor(addresses), torch.tensor(numbers, dtype=torch.float64).view(torch.int64)], dim=1
        ).t().contiguous()  # fmt: skip
        # Pinned memory is kept until the copy from it is done: the host does not wait.
        self.table = table.pin_memory().to(self.device, non_blocking=True) if self._is_cuda else table
        self.chunks = chunks_of(tuple(num_chunks(weights)), self.device)
        scale, skip = batches[0].scale, batches[0].skip
        self._scale = (  # neither waits for the device
            scale.to(self.device, torch.float32)
            if isinstance(scale, Tensor)
            else torch.full((), scale, device=self.device)
        )
        self._skip = self._scale if skip is None else skip.to(self.device, torch.float32)
        self._flags = {
            "MAY_SKIP": skip is not None,
            # gradients may lie at any place of a bucket
            "IS_ALIGNED": all(address % 16 == 0 for column in addresses for address in column[: _SIZE.value]),
        }

    @property
    def _is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def run(self, kernel: Any, *arguments: Any, chunks: Chunks | None = None, **flags: bool) -> None:
        """Queue a kernel that takes a chunk a program, of the weights or other ones."""
        chunks = chunks or self.chunks
        self._launch(kernel, len(chunks.tensors), *chunks, *arguments, **self._flags, **flags)

    def run_by_tensor(self, kernel: Any, *arguments: Tensor) -> None:
        """Queue a kernel that takes a tensor a program."""
        self._launch(kernel, self.num_tensors, *arguments, MAY_SKIP=self._flags["MAY_SKIP"])

    def new_parts(self) -> Tensor:
        """Return a place for the sums of each chunk, fp32 ``[chunks, 4]``."""
        return torch.empty(len(self.chunks.tensors), _NUM_SUMS.value, device=self.device)

    def sums(self, kernel: Any, *arguments: Any, parts: Tensor | None = None) -> Tensor:
        """Queue a kernel that sums; return its sums over the whole tensors, fp32 ``[tensors, 4]``."""
        parts = self.new_parts() if parts is None else parts
        sums = torch.empty(self.num_tensors, _NUM_SUMS.value, device=self.device)
        self.run(kernel, parts, *arguments)
        with _on(self.device):
            _sum_parts[(self.num_tensors,)](parts, self.chunks.first, sums, num_warps=4)
        sum_shards(self._params, sums)
        return sums

    def _launch(self, kernel: Any, num_programs: int, *arguments: Any, **flags: bool) -> None:
        if num_programs:
            with _on(self.device):
                kernel[(num_programs,)](
                    self.table, self.num_tensors, self._scale, self._skip, *arguments, **flags, num_warps=8
                )


def _columns(
    batch: Batch, counts: Tensor | None, entries: Entries, options: Options
) -> list[tuple[list[int], list[float]]]:
    """Return the table's columns of a batch: integers, and numbers."""
    group = batch.group
    beta1, beta2 = group.get("betas", (0.0, 0.0))
    shared = [group["lr"], group["weight_decay"], group.get("eps", 0.0), _log(beta1), _log(beta2)]
    shared.append(float(group.get("bias_correction", True)))
    columns = []
    indices = batch.chosen_indices or range(len(batch.params))
    for k, grad, weight, state in zip(indices, batch.grads, batch.weights, batch.states, strict=True):
        step = 0 if counts is None else counts.data_ptr() + counts.element_size() * k
        addresses = [tensor.data_ptr() for tensor in (grad, weight, *entries(state))]
        columns.append(([*addresses, weight.numel(), step], [*shared, *options(group, weight)]))
    return columns


def _moments(state: dict[str, Any]) -> tuple[Tensor, Tensor]:
    return local_part(state["exp_avg"]), local_part(state["exp_avg_sq"])


def _log(rate: float) -> float:
    return math.log(rate) if rate else -math.inf


def _on(device: torch.device) -> Any:
    return torch.cuda.device(device if device.type == "cuda" else -1)


# ---- one function for each optimizer --------------------------------------------------------------------


def update_lamb(batches: Sequence[Batch]) -> Squares:
    """Update parameters by :class:`shoal.optim.lamb.Lamb`."""

    def options(group: dict[str, Any], weight: Tensor) -> list[float]:
        return [*_blend_options(group, weight), float(group["trust_ratio"])]

    passes = Passes(batches, _moments, options)
    sums = passes.sums(_blend_lamb)
    passes.run(_apply_lamb, sums)
    return sums[:, 0].sum(), sums[:, 1].sum()


def update_lans(batches: Sequence[Batch]) -> Squares:
    """Update parameters by :class:`shoal.optim.lans.Lans`, whose norms of gradients take a pass before."""
    passes = Passes(batches, _moments, _blend_options)
    grad_sums = passes.sums(_square_grads)
    sums = passes.sums(_blend_lans, grad_sums)
    passes.run(_apply_lans, grad_sums, sums)
    return grad_sums[:, 0].sum(), sums[:, 1].sum()


def update_lars(batches: Sequence[Batch], *, clips: bool, nesterov: bool) -> Squares:
    """Update parameters by :class:`shoal.optim.lars.Lars`.

    Args:
        clips: in the form ``larc``.
        nesterov: with Nesterov's momentum.
    """

    def options(group: dict[str, Any], weight: Tensor) -> list[float]:
        return [group["momentum"], group["eta"], float(group["trust_ratio"])]

    def entries(state: dict[str, Any]) -> tuple[Tensor, Tensor]:
        momentum = local_part(state["momentum_buffer"])
        return momentum, momentum

    passes = Passes(batches, entries, options)
    sums = passes.sums(_square)
    passes.run(_apply_lars, sums, CLIPS=clips, NESTEROV=nesterov)
    return sums[:, 0].sum(), sums[:, 1].sum()


def update_novograd(batches: Sequence[Batch]) -> Squares:
    """Update parameters by :class:`shoal.optim.novograd.Novograd`."""

    def options(group: dict[str, Any], weight: Tensor) -> list[float]:
        beta1, beta2 = group["betas"]
        new = 1.0 - beta1 if group["grad_averaging"] else 1.0
        first = 1.0 - beta2 if group["init_zero"] else 1.0
        return [beta1, 1.0 - beta2, first, new, float(group["reg_inside_moment"])]

    passes = Passes(batches, _moments, options)
    sums = passes.sums(_square)
    passes.run_by_tensor(_blend_norms, sums)
    passes.run(_apply_novograd, sums)
    return sums[:, 0].sum(), sums[:, 1].sum()


def _blend_options(group: dict[str, Any], weight: Tensor) -> list[float]:
    beta1, beta2 = group["betas"]
    return [beta1, beta2, 1.0 - beta1, 1.0 - beta2]


# ---- shared by the kernels ------------------------------------------------------------------------------


@triton.jit
def _number(table, row, tensor, num_tensors):
    """Return an option of a tensor in fp64."""
    return tl.load(table + row * num_tensors + tensor).to(tl.float64, bitcast=True)


@triton.jit
def _option(table, row, tensor, num_tensors):
    return _number(table, row, tensor, num_tensors).to(tl.float32)


@triton.jit
def _elements(table, row, tensor, num_tensors, begin, IS_ALIGNED: tl.constexpr):
    """Return where a chunk of a tensor begins."""
    pointer = tl.load(table + row * num_tensors + tensor).to(tl.pointer_type(tl.float32))
    return (tl.multiple_of(pointer, 16) if IS_ALIGNED else pointer) + begin


@triton.jit
def _place(table, tensors, first, num_tensors):
    """Return this program's tensor, the chunk's first element, and how many elements it has."""
    chunk = tl.program_id(0)
    tensor = tl.load(tensors + chunk)
    begin = (chunk - tl.load(first + tensor)).to(tl.int64) * CHUNK
    size = tl.load(table + _SIZE * num_tensors + tensor)
    return tensor, begin, tl.minimum(size - begin, CHUNK).to(tl.int32)


@triton.jit
def _step_of(table, tensor, num_tensors):
    """Return the number of this step, from 1."""
    return tl.load(tl.load(table + _STEP * num_tensors + tensor).to(tl.pointer_type(tl.float32)))


@triton.jit
def _corrections(table, tensor, num_tensors):
    """Return the corrections of both moments: 1 - beta1^t, and the root of 1 - beta2^t."""
    step = _step_of(table, tensor, num_tensors).to(tl.float64)
    correction1 = (1.0 - tl.exp(step * _number(table, _LOG1, tensor, num_tensors))).to(tl.float32)
    correction2 = (1.0 - tl.exp(step * _number(table, _LOG2, tensor, num_tensors))).to(tl.float32)
    corrects = _option(table, _CORRECTS, tensor, num_tensors) != 0.0
    return tl.where(corrects, correction1, 1.0), tl.where(corrects, tl.sqrt_rn(correction2), 1.0)


@triton.jit
def _stored(count, skip, MAY_SKIP: tl.constexpr):
    """Return how many of a chunk's elements are written: none if the step is skipped."""
    return tl.where(tl.load(skip) == 0.0, count, 0) if MAY_SKIP else count


@triton.jit
def _norm(sums, tensor, column: tl.constexpr):
    return tl.sqrt_rn(tl.load(sums + tensor * 4 + column))


@triton.jit
def _ratio(numerator, denominator, weight_norm, norm):
    """Return the quotient, 1 where either norm is 0."""
    is_zero = (weight_norm == 0.0) | (norm == 0.0)
    return tl.where(is_zero, 1.0, numerator / tl.where(is_zero, 1.0, denominator))


@triton.jit
def _store_sums(parts, first, second, third, fourth):
    sums = parts + tl.program_id(0) * 4
    tl.store(sums, tl.sum(first))
    tl.store(sums + 1, tl.sum(second))
    tl.store(sums + 2, tl.sum(third))
    tl.store(sums + 3, tl.sum(fourth))


@triton.jit
def _sum_parts(parts, first, sums):
    """Sum the chunks of one tensor, in their order by place."""
    tensor = tl.program_id(0)
    begin, end = tl.load(first + tensor), tl.load(first + tensor + 1)
    columns = tl.arange(0, 4)
    total = tl.zeros((256, 4), tl.float32)
    for at in range(begin, end, 256):
        rows = at + tl.arange(0, 256)
        total += tl.load(parts + rows[:, None] * 4 + columns[None, :], mask=(rows < end)[:, None], other=0.0)
    tl.store(sums + tensor * 4 + columns, tl.sum(total, axis=0))


@triton.jit
def _square_grads(
    table, num_tensors, scale, skip, tensors, first, parts, MAY_SKIP: tl.constexpr, IS_ALIGNED: tl.constexpr
):
    """Sum the squares of the scaled gradients."""
    tensor, begin, left = _place(table, tensors, first, num_tensors)
    grads = _elements(table, _GRAD, tensor, num_tensors, begin, IS_ALIGNED)
    factor = tl.load(scale)
    grad_sq = tl.zeros((BLOCK,), tl.float32)
    for at in range(0, CHUNK, BLOCK):
        i = at + tl.arange(0, BLOCK)
        g = tl.load(grads + i, mask=i < left, other=0.0) * factor
        grad_sq += g * g
    nothing = tl.zeros((BLOCK,), tl.float32)
    _store_sums(parts, grad_sq, nothing, nothing, nothing)


@triton.jit
def _square(
    table, num_tensors, scale, skip, tensors, first, parts, MAY_SKIP: tl.constexpr, IS_ALIGNED: tl.constexpr
):
    """Sum the squares of the scaled gradients, of the weights, and of the sums of g + weight_decay w."""
    tensor, begin, left = _place(table, tensors, first, num_tensors)
    grads = _elements(table, _GRAD, tensor, num_tensors, begin, IS_ALIGNED)
    weights = _elements(table, _WEIGHT, tensor, num_tensors, begin, IS_ALIGNED)
    factor, decay = tl.load(scale), _option(table, _DECAY, tensor, num_tensors)
    grad_sq = tl.zeros((BLOCK,), tl.float32)
    weight_sq = tl.zeros((BLOCK,), tl.float32)
    change_sq = tl.zeros((BLOCK,), tl.float32)
    for at in range(0, CHUNK, BLOCK):
        i = at + tl.arange(0, BLOCK)
        g = tl.load(grads + i, mask=i < left, other=0.0) * factor
        w = tl.load(weights + i, mask=i < left, other=0.0)
        grad_sq += g * g
        weight_sq += w * w
        change_sq += (g + decay * w) * (g + decay * w)
    _store_sums(parts, grad_sq, weight_sq, change_sq, tl.zeros((BLOCK,), tl.float32))


# ---- LAMB -----------------------------------------------------------------------------------------------


@triton.jit
def _lamb(m, v, w, correction1, correction2, eps, decay):
    """Return m^ / (sqrt(v^) + eps) + weight_decay w."""
    return m / correction1 / (tl.sqrt_rn(v) / correction2 + eps) + decay * w


@triton.jit
def _blend_lamb(
    table, num_tensors, scale, skip, tensors, first, parts, MAY_SKIP: tl.constexpr, IS_ALIGNED: tl.constexpr
):
    """Blend scaled gradients into the moments; sum the squares of gradients, weights and updates."""
    tensor, begin, left = _place(table, tensors, first, num_tensors)
    grads = _elements(table, _GRAD, tensor, num_tensors, begin, IS_ALIGNED)
    weights = _elements(table, _WEIGHT, tensor, num_tensors, begin, IS_ALIGNED)
    firsts = _elements(table, _FIRST, tensor, num_tensors, begin, IS_ALIGNED)
    seconds = _elements(table, _SECOND, tensor, num_tensors, begin, IS_ALIGNED)
    beta2 = _option(table, _OWN + 1, tensor, num_tensors)
    new1, new2 = _option(table, _OWN + 2, tensor, num_tensors), _option(table, _OWN + 3, tensor, num_tensors)
    eps, decay = _option(table, _EPS, tensor, num_tensors), _option(table, _DECAY, tensor, num_tensors)
    factor = tl.load(scale)
    correction1, correction2 = _corrections(table, tensor, num_tensors)
    stored = _stored(left, skip, MAY_SKIP)
    grad_sq = tl.zeros((BLOCK,), tl.float32)
    weight_sq = tl.zeros((BLOCK,), tl.float32)
    update_sq = tl.zeros((BLOCK,), tl.float32)
    for at in range(0, CHUNK, BLOCK):
        i = at + tl.arange(0, BLOCK)
        inside = i < left
        g = tl.load(grads + i, mask=inside, other=0.0) * factor
        m = tl.load(firsts + i, mask=inside, other=0.0)
        v = tl.load(seconds + i, mask=inside, other=0.0)
        w = tl.load(weights + i, mask=inside, other=0.0)
        m += (g - m) * new1
        v = v * beta2 + g * g * new2
        tl.store(firsts + i, m, mask=i < stored)
        tl.store(seconds + i, v, mask=i < stored)
        u = tl.where(inside, _lamb(m, v, w, correction1, correction2, eps, decay), 0.0)
        grad_sq += g * g
        weight_sq += w * w
        update_sq += u * u
    _store_sums(parts, grad_sq, weight_sq, update_sq, tl.zeros((BLOCK,), tl.float32))


@triton.jit
def _apply_lamb(
    table, num_tensors, scale, skip, tensors, first, sums, MAY_SKIP: tl.constexpr, IS_ALIGNED: tl.constexpr
):
    """Subtract the updates, times the learning rate and each tensor's ratio."""
    tensor, begin, left = _place(table, tensors, first, num_tensors)
    weights = _elements(table, _WEIGHT, tensor, num_tensors, begin, IS_ALIGNED)
    firsts = _elements(table, _FIRST, tensor, num_tensors, begin, IS_ALIGNED)
    seconds = _elements(table, _SECOND, tensor, num_tensors, begin, IS_ALIGNED)
    eps, decay = _option(table, _EPS, tensor, num_tensors), _option(table, _DECAY, tensor, num_tensors)
    correction1, correction2 = _corrections(table, tensor, num_tensors)
    weight_norm, update_norm = _norm(sums, tensor, 1), _norm(sums, tensor, 2)
    ratio = _ratio(weight_norm, update_norm, weight_norm, update_norm)
    rate = _option(table, _LR, tensor, num_tensors)
    rate *= tl.where(_option(table, _OWN + 4, tensor, num_tensors) != 0.0, ratio, 1.0)
    stored = _stored(left, skip, MAY_SKIP)
    for at in range(0, CHUNK, BLOCK):
        i = at + tl.arange(0, BLOCK)
        inside = i < stored
        m = tl.load(firsts + i, mask=inside, other=0.0)
        v = tl.load(seconds + i, mask=inside, other=0.0)
        w = tl.load(weights + i, mask=inside, other=0.0)
        tl.store(weights + i, w - rate * _lamb(m, v, w, correction1, correction2, eps, decay), mask=inside)


# ---- LANS -----------------------------------------------------------------------------------------------


@triton.jit
def _lans(g, m, v, w, correction1, correction2, eps, decay):
    """Return the updates from the momentum and from the gradient."""
    denominator = tl.sqrt_rn(v) / correction2 + eps
    return m / (denominator * correction1) + decay * w, g / denominator + decay * w


@triton.jit
def _blend_lans(
    table, num_tensors, scale, skip, tensors, first, parts, grad_sums,
    MAY_SKIP: tl.constexpr, IS_ALIGNED: tl.constexpr,
):  # fmt: skip
    """Blend normalised gradients into the moments; sum the squares of weights and of both updates."""
    tensor, begin, left = _place(table, tensors, first, num_tensors)
    grads = _elements(table, _GRAD, tensor, num_tensors, begin, IS_ALIGNED)
    weights = _elements(table, _WEIGHT, tensor, num_tensors, begin, IS_ALIGNED)
    firsts = _elements(table, _FIRST, tensor, num_tensors, begin, IS_ALIGNED)
    seconds = _elements(table, _SECOND, tensor, num_tensors, begin, IS_ALIGNED)
    beta2 = _option(table, _OWN + 1, tensor, num_tensors)
    new1, new2 = _option(table, _OWN + 2, tensor, num_tensors), _option(table, _OWN + 3, tensor, num_tensors)
    eps, decay = _option(table, _EPS, tensor, num_tensors), _option(table, _DECAY, tensor, num_tensors)
    factor = tl.load(scale) / (_norm(grad_sums, tensor, 0) + eps)
    correction1, correction2 = _corrections(table, tensor, num_tensors)
    stored = _stored(left, skip, MAY_SKIP)
    weight_sq = tl.zeros((BLOCK,), tl.float32)
    momentum_sq = tl.zeros((BLOCK,), tl.float32)
    gradient_sq = tl.zeros((BLOCK,), tl.float32)
    for at in range(0, CHUNK, BLOCK):
        i = at + tl.arange(0, BLOCK)
        inside = i < left
        g = tl.load(grads + i, mask=inside, other=0.0) * factor
        m = tl.load(firsts + i, mask=inside, other=0.0)
        v = tl.load(seconds + i, mask=inside, other=0.0)
        w = tl.load(weights + i, mask=inside, other=0.0)
        m += (g - m) * new1
        v = v * beta2 + g * g * new2
        tl.store(firsts + i, m, mask=i < stored)
        tl.store(seconds + i, v, mask=i < stored)
        from_momentum, from_gradient = _lans(g, m, v, w, correction1, correction2, eps, decay)
        weight_sq += w * w
        momentum_sq += tl.where(inside, from_momentum * from_momentum, 0.0)
        gradient_sq += tl.where(inside, from_gradient * from_gradient, 0.0)
    _store_sums(parts, tl.zeros((BLOCK,), tl.float32), weight_sq, momentum_sq, gradient_sq)


@triton.jit
def _apply_lans(
    table, num_tensors, scale, skip, tensors, first, grad_sums, sums,
    MAY_SKIP: tl.constexpr, IS_ALIGNED: tl.constexpr,
):  # fmt: skip
    """Subtract both updates, each times the learning rate, its share and its ratio."""
    tensor, begin, left = _place(table, tensors, first, num_tensors)
    grads = _elements(table, _GRAD, tensor, num_tensors, begin, IS_ALIGNED)
    weights = _elements(table, _WEIGHT, tensor, num_tensors, begin, IS_ALIGNED)
    firsts = _elements(table, _FIRST, tensor, num_tensors, begin, IS_ALIGNED)
    seconds = _elements(table, _SECOND, tensor, num_tensors, begin, IS_ALIGNED)
    beta1, new1 = _option(table, _OWN, tensor, num_tensors), _option(table, _OWN + 2, tensor, num_tensors)
    eps, decay = _option(table, _EPS, tensor, num_tensors), _option(table, _DECAY, tensor, num_tensors)
    factor = tl.load(scale) / (_norm(grad_sums, tensor, 0) + eps)
    correction1, correction2 = _corrections(table, tensor, num_tensors)
    weight_norm, lr = _norm(sums, tensor, 1), _option(table, _LR, tensor, num_tensors)
    momentum_norm, gradient_norm = _norm(sums, tensor, 2), _norm(sums, tensor, 3)
    momentum_rate = lr * beta1 * _ratio(weight_norm, momentum_norm, weight_norm, momentum_norm)
    gradient_rate = lr * new1 * _ratio(weight_norm, gradient_norm, weight_norm, gradient_norm)
    stored = _stored(left, skip, MAY_SKIP)
    for at in range(0, CHUNK, BLOCK):
        i = at + tl.arange(0, BLOCK)
        inside = i < stored
        g = tl.load(grads + i, mask=inside, other=0.0) * factor
        m = tl.load(firsts + i, mask=inside, other=0.0)
        v = tl.load(seconds + i, mask=inside, other=0.0)
        w = tl.load(weights + i, mask=inside, other=0.0)
        from_momentum, from_gradient = _lans(g, m, v, w, correction1, correction2, eps, decay)
        tl.store(weights + i, w - momentum_rate * from_momentum - gradient_rate * from_gradient, mask=inside)


# ---- LARS -----------------------------------------------------------------------------------------------


@triton.jit
def _apply_lars(
    table, num_tensors, scale, skip, tensors, first, sums,
    MAY_SKIP: tl.constexpr, IS_ALIGNED: tl.constexpr, CLIPS: tl.constexpr, NESTEROV: tl.constexpr,
):  # fmt: skip
    """Add the gradients, times each tensor's ratio, to the momenta, and move the weights by these."""
    tensor, begin, left = _place(table, tensors, first, num_tensors)
    grads = _elements(table, _GRAD, tensor, num_tensors, begin, IS_ALIGNED)
    weights = _elements(table, _WEIGHT, tensor, num_tensors, begin, IS_ALIGNED)
    momenta = _elements(table, _FIRST, tensor, num_tensors, begin, IS_ALIGNED)
    lr, decay = _option(table, _LR, tensor, num_tensors), _option(table, _DECAY, tensor, num_tensors)
    momentum, eta = _option(table, _OWN, tensor, num_tensors), _option(table, _OWN + 1, tensor, num_tensors)
    factor, weight_norm, norm = tl.load(scale), _norm(sums, tensor, 1), _norm(sums, tensor, 0)
    if CLIPS:
        norm = _norm(sums, tensor, 2)
        bound = norm
    else:
        bound = norm + decay * weight_norm + _option(table, _EPS, tensor, num_tensors)
    ratio = _ratio(eta * weight_norm, bound, weight_norm, norm)
    if CLIPS:
        ratio = tl.where(ratio < lr, ratio / tl.where(lr == 0.0, 1.0, lr), 1.0)
    ratio = tl.where(_option(table, _OWN + 2, tensor, num_tensors) != 0.0, ratio, 1.0)
    inside_rate = ratio if CLIPS else ratio * lr
    outside_rate = lr if CLIPS else 1.0
    stored = _stored(left, skip, MAY_SKIP)
    for at in range(0, CHUNK, BLOCK):
        i = at + tl.arange(0, BLOCK)
        inside = i < stored
        g = tl.load(grads + i, mask=inside, other=0.0) * factor
        m = tl.load(momenta + i, mask=inside, other=0.0)
        w = tl.load(weights + i, mask=inside, other=0.0)
        change = (g + decay * w) * inside_rate
        m = m * momentum + change
        tl.store(momenta + i, m, mask=inside)
        move = change + m * momentum if NESTEROV else m
        tl.store(weights + i, w - outside_rate * move, mask=inside)


# ---- NovoGrad -------------------------------------------------------------------------------------------


@triton.jit
def _blend_norms(table, num_tensors, scale, skip, sums, MAY_SKIP: tl.constexpr):
    """Blend a tensor's squared norm into the running one; write what gradients are divided by as sum 2."""
    tensor = tl.program_id(0)
    norm_sq = tl.load(table + _SECOND * num_tensors + tensor).to(tl.pointer_type(tl.float32))
    is_first = _step_of(table, tensor, num_tensors) == 1.0
    new2 = _option(table, _OWN + 1, tensor, num_tensors)
    share = tl.where(is_first, _option(table, _OWN + 2, tensor, num_tensors), new2)
    before, now = tl.load(norm_sq), tl.load(sums + tensor * 4)
    running = tl.where(share == 1.0, now, before + (now - before) * share)
    tl.store(norm_sq, running, mask=_stored(1, skip, MAY_SKIP) == 1)
    _, correction2 = _corrections(table, tensor, num_tensors)
    divisor = tl.sqrt_rn(running) / correction2 + _option(table, _EPS, tensor, num_tensors)
    tl.store(sums + tensor * 4 + 2, divisor)


@triton.jit
def _apply_novograd(
    table, num_tensors, scale, skip, tensors, first, sums, MAY_SKIP: tl.constexpr, IS_ALIGNED: tl.constexpr
):
    """Add the gradients to the momenta, and move the weights by these."""
    tensor, begin, left = _place(table, tensors, first, num_tensors)
    grads = _elements(table, _GRAD, tensor, num_tensors, begin, IS_ALIGNED)
    weights = _elements(table, _WEIGHT, tensor, num_tensors, begin, IS_ALIGNED)
    momenta = _elements(table, _FIRST, tensor, num_tensors, begin, IS_ALIGNED)
    lr, decay = _option(table, _LR, tensor, num_tensors), _option(table, _DECAY, tensor, num_tensors)
    beta1, new = _option(table, _OWN, tensor, num_tensors), _option(table, _OWN + 3, tensor, num_tensors)
    is_inside = _option(table, _OWN + 4, tensor, num_tensors) != 0.0
    divisor = tl.load(sums + tensor * 4 + 2)
    correction1, _ = _corrections(table, tensor, num_tensors)
    factor = new * tl.load(scale) / tl.where(is_inside, divisor, 1.0)
    rate = lr / correction1 / tl.where(is_inside, 1.0, divisor)
    inside_decay = tl.where(is_inside, new * decay, 0.0)
    kept = tl.where(is_inside, 1.0, 1.0 - lr * decay)
    stored = _stored(left, skip, MAY_SKIP)
    for at in range(0, CHUNK, BLOCK):
        i = at + tl.arange(0, BLOCK)
        inside = i < stored
        g = tl.load(grads + i, mask=inside, other=0.0)
        m = tl.load(momenta + i, mask=inside, other=0.0)
        w = tl.load(weights + i, mask=inside, other=0.0)
        m = m * beta1 + g * factor + w * inside_decay
        tl.store(momenta + i, m, mask=inside)
        tl.store(weights + i, w * kept - m * rate, mask=inside)
