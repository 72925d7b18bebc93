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

# Columns of the table: addresses, the number of elements, the address of the step, and options as fp64.
_GRAD, _WEIGHT, _FIRST, _SECOND, _SIZE, _STEP = map(tl.constexpr, range(6))
_LR, _DECAY, _EPS, _LOG1, _LOG2, _CORRECTS, _OWN = map(tl.constexpr, range(6, 13))
"""Options of all optimizers; those of one begin at ``_OWN``."""
_WIDTH = tl.constexpr(_OWN.value + 5)

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
        rows = [
            row
            for batch, counts in zip(batches, self._counts, strict=True)
            for row in _rows(batch, counts, entries, options)
        ]
        addresses, numbers = ([row[k] for row in rows] for k in (0, 1))
        table = torch.zeros(len(rows), _WIDTH.value, dtype=torch.int64)
        table[:, : _LR.value] = torch.tensor(addresses)
        own = torch.tensor(numbers, dtype=torch.float64).view(torch.int64)
        table[:, _LR.value : _LR.value + own.shape[1]] = own
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
            "IS_ALIGNED": all(address % 16 == 0 for row in addresses for address in row[: _SIZE.value]),
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

    def sums(self, kernel: Any, *arguments: Any, parts: Tensor | None = None, **flags: Any) -> Tensor:
        """Queue a kernel that sums; return its sums over the whole tensors, fp32 ``[tensors, 4]``."""
        parts = self.new_parts() if parts is None else parts
        sums = torch.empty(self.num_tensors, _NUM_SUMS.value, device=self.device)
        self.run(kernel, parts, *arguments, **flags)
        with _on(self.device):
            _sum_parts[(self.num_tensors,)](parts, self.chunks.first, sums, num_warps=4)
        sum_shards(self._params, sums)
        return sums

    def _launch(self, kernel: Any, num_programs: int, *arguments: Any, **flags: bool) -> None:
        if num_programs:
            with _on(self.device):
                kernel[(num_programs,)](self.table, self._scale, self._skip, *arguments, **flags, num_warps=8)


def _rows(
    batch: Batch, counts: Tensor | None, entries: Entries, options: Options
) -> list[tuple[list[int], list[float]]]:
    """Return the table's rows of a batch: integers, and numbers."""
    group = batch.group
    beta1, beta2 = group.get("betas", (0.0, 0.0))
    shared = [group["lr"], group["weight_decay"], group.get("eps", 0.0), _log(beta1), _log(beta2)]
    shared.append(float(group.get("bias_correction", True)))
    rows = []
    indices = batch.chosen_indices or range(len(batch.params))
    for k, grad, weight, state in zip(indices, batch.grads, batch.weights, batch.states, strict=True):
        step = 0 if counts is None else counts.data_ptr() + counts.element_size() * k
        addresses = [tensor.data_ptr() for tensor in (grad, weight, *entries(state))]
        rows.append(([*addresses, weight.numel(), step], [*shared, *options(group, weight)]))
    return rows


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
        return _blend_options(group, 1.0, trusts=group["trust_ratio"])

    passes = Passes(batches, _moments, options)
    sums = passes.sums(_blend_moments, None, HAS_TWO=False)
    passes.run(_apply_moments, None, sums, HAS_TWO=False)
    return sums[:, 0].sum(), sums[:, 1].sum()


def update_lans(batches: Sequence[Batch]) -> Squares:
    """Update parameters by :class:`shoal.optim.lans.Lans`, whose norms of gradients take a pass before."""

    def options(group: dict[str, Any], weight: Tensor) -> list[float]:
        return _blend_options(group, group["betas"][0], trusts=True)

    passes = Passes(batches, _moments, options)
    grad_sums = passes.sums(_square, OF_WEIGHTS=False)
    sums = passes.sums(_blend_moments, grad_sums, HAS_TWO=True)
    passes.run(_apply_moments, grad_sums, sums, HAS_TWO=True)
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
    sums = passes.sums(_square, OF_WEIGHTS=True)
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
    sums = passes.sums(_square, OF_WEIGHTS=True)
    passes.run_by_tensor(_blend_norms, sums)
    passes.run(_apply_novograd, sums)
    return sums[:, 0].sum(), sums[:, 1].sum()


def _blend_options(group: dict[str, Any], share: float, *, trusts: bool) -> list[float]:
    """Return the options of LAMB and LANS; ``share``: of the update from the momentum."""
    beta1, beta2 = group["betas"]
    return [share, beta2, 1.0 - beta1, 1.0 - beta2, float(trusts)]


# ---- shared by the kernels ------------------------------------------------------------------------------


@triton.jit
def _number(row, column):
    """Return an option in fp64."""
    return tl.load(row + column).to(tl.float64, bitcast=True)


@triton.jit
def _option(row, column):
    return _number(row, column).to(tl.float32)


@triton.jit
def _elements(row, column, begin, IS_ALIGNED: tl.constexpr):
    """Return where a chunk of a tensor begins."""
    pointer = tl.load(row + column).to(tl.pointer_type(tl.float32))
    return (tl.multiple_of(pointer, 16) if IS_ALIGNED else pointer) + begin


@triton.jit
def _pointers(row, begin, IS_ALIGNED: tl.constexpr):
    """Return where gradients, weights, and first and second entries of the state are, from an element on."""
    grads, weights = _elements(row, _GRAD, begin, IS_ALIGNED), _elements(row, _WEIGHT, begin, IS_ALIGNED)
    return (
        grads,
        weights,
        _elements(row, _FIRST, begin, IS_ALIGNED),
        _elements(row, _SECOND, begin, IS_ALIGNED),
    )


@triton.jit
def _chunk(table, tensors, first, IS_ALIGNED: tl.constexpr):
    """Return this program's tensor, its row of the table, how many elements it has, and their pointers."""
    chunk = tl.program_id(0)
    tensor = tl.load(tensors + chunk)
    row = table + tensor * _WIDTH
    begin = (chunk - tl.load(first + tensor)).to(tl.int64) * CHUNK
    left = tl.minimum(tl.load(row + _SIZE) - begin, CHUNK).to(tl.int32)
    grads, weights, firsts, seconds = _pointers(row, begin, IS_ALIGNED)
    return tensor, row, left, grads, weights, firsts, seconds


@triton.jit
def _read(elements, i, inside):
    return tl.load(elements + i, mask=inside, other=0.0)


@triton.jit
def _step_of(row):
    """Return the number of this step, from 1."""
    return tl.load(tl.load(row + _STEP).to(tl.pointer_type(tl.float32)))


@triton.jit
def _corrections(row):
    """Return the corrections of both moments: 1 - beta1^t, and the root of 1 - beta2^t."""
    step = _step_of(row).to(tl.float64)
    correction1 = (1.0 - tl.exp(step * _number(row, _LOG1))).to(tl.float32)
    correction2 = (1.0 - tl.exp(step * _number(row, _LOG2))).to(tl.float32)
    corrects = _option(row, _CORRECTS) != 0.0
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
def _blended(before, now, share):
    """Return ``before`` moved by a share towards ``now``, or ``now`` itself, whatever was before."""
    return tl.where(share == 1.0, now, before + (now - before) * share)


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
def _square(
    table, scale, skip, tensors, first, parts,
    MAY_SKIP: tl.constexpr, IS_ALIGNED: tl.constexpr, OF_WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Sum the squares of the scaled gradients; of the weights, and of the sums g + weight_decay w."""
    _, row, left, grads, weights, _, _ = _chunk(table, tensors, first, IS_ALIGNED)
    factor, decay = tl.load(scale), _option(row, _DECAY)
    grad_sq = tl.zeros((BLOCK,), tl.float32)
    weight_sq = tl.zeros((BLOCK,), tl.float32)
    change_sq = tl.zeros((BLOCK,), tl.float32)
    for at in range(0, CHUNK, BLOCK):
        i = at + tl.arange(0, BLOCK)
        g = _read(grads, i, i < left) * factor
        grad_sq += g * g
        if OF_WEIGHTS:
            w = _read(weights, i, i < left)
            weight_sq += w * w
            change_sq += (g + decay * w) * (g + decay * w)
    _store_sums(parts, grad_sq, weight_sq, change_sq, tl.zeros((BLOCK,), tl.float32))


# ---- LAMB and LANS --------------------------------------------------------------------------------------


@triton.jit
def _normalised(factor, row, tensor, grad_sums, HAS_TWO: tl.constexpr):
    """Return what gradients are multiplied by: LANS divides them by their tensor's norm."""
    return factor / (_norm(grad_sums, tensor, 0) + _option(row, _EPS)) if HAS_TWO else factor


@triton.jit
def _constants(row):
    """Return the corrections of both moments, eps and the weight decay."""
    correction1, correction2 = _corrections(row)
    return correction1, correction2, _option(row, _EPS), _option(row, _DECAY)


@triton.jit
def _updates(g, m, v, w, constants, HAS_TWO: tl.constexpr):
    """Return m^ / (sqrt(v^) + eps) + weight_decay w, and the same of the gradient, which LANS adds."""
    correction1, correction2, eps, decay = constants
    denominator = tl.sqrt_rn(v) / correction2 + eps
    if HAS_TWO:
        update = m / (denominator * correction1)
    else:
        update = m / correction1 / denominator
    return update + decay * w, g / denominator + decay * w


@triton.jit
def _blend_moments(
    table, scale, skip, tensors, first, parts, grad_sums,
    MAY_SKIP: tl.constexpr, IS_ALIGNED: tl.constexpr, HAS_TWO: tl.constexpr,
):  # fmt: skip
    """Blend gradients into the moments; sum the squares of gradients, weights and updates."""
    tensor, row, left, grads, weights, firsts, seconds = _chunk(table, tensors, first, IS_ALIGNED)
    beta2, new1, new2 = _option(row, _OWN + 1), _option(row, _OWN + 2), _option(row, _OWN + 3)
    factor = _normalised(tl.load(scale), row, tensor, grad_sums, HAS_TWO)
    constants, stored = _constants(row), _stored(left, skip, MAY_SKIP)
    grad_sq = tl.zeros((BLOCK,), tl.float32)
    weight_sq = tl.zeros((BLOCK,), tl.float32)
    update_sq = tl.zeros((BLOCK,), tl.float32)
    second_sq = tl.zeros((BLOCK,), tl.float32)
    for at in range(0, CHUNK, BLOCK):
        i = at + tl.arange(0, BLOCK)
        inside = i < left
        g, m = _read(grads, i, inside) * factor, _read(firsts, i, inside)
        v, w = _read(seconds, i, inside), _read(weights, i, inside)
        m += (g - m) * new1
        v = v * beta2 + g * g * new2
        tl.store(firsts + i, m, mask=i < stored)
        tl.store(seconds + i, v, mask=i < stored)
        update, second = _updates(g, m, v, w, constants, HAS_TWO)
        weight_sq += w * w
        update_sq += tl.where(inside, update * update, 0.0)
        if HAS_TWO:
            second_sq += tl.where(inside, second * second, 0.0)
        else:
            grad_sq += g * g
    _store_sums(parts, grad_sq, weight_sq, update_sq, second_sq)


@triton.jit
def _apply_moments(
    table, scale, skip, tensors, first, grad_sums, sums,
    MAY_SKIP: tl.constexpr, IS_ALIGNED: tl.constexpr, HAS_TWO: tl.constexpr,
):  # fmt: skip
    """Subtract the updates, each times the learning rate, its share and each tensor's ratio."""
    tensor, row, left, grads, weights, firsts, seconds = _chunk(table, tensors, first, IS_ALIGNED)
    factor = _normalised(tl.load(scale), row, tensor, grad_sums, HAS_TWO)
    constants, stored = _constants(row), _stored(left, skip, MAY_SKIP)
    weight_norm, norm, second_norm = _norm(sums, tensor, 1), _norm(sums, tensor, 2), _norm(sums, tensor, 3)
    trusts = _option(row, _OWN + 4) != 0.0
    rate, second_rate = _option(row, _LR) * _option(row, _OWN), _option(row, _LR) * _option(row, _OWN + 2)
    rate *= tl.where(trusts, _ratio(weight_norm, norm, weight_norm, norm), 1.0)
    second_rate *= _ratio(weight_norm, second_norm, weight_norm, second_norm)
    for at in range(0, CHUNK, BLOCK):
        i = at + tl.arange(0, BLOCK)
        inside = i < stored
        g = _read(grads, i, inside) * factor if HAS_TWO else 0.0
        m, v, w = _read(firsts, i, inside), _read(seconds, i, inside), _read(weights, i, inside)
        update, second = _updates(g, m, v, w, constants, HAS_TWO)
        new = w - rate * update - second_rate * second if HAS_TWO else w - rate * update
        tl.store(weights + i, new, mask=inside)


# ---- LARS -----------------------------------------------------------------------------------------------


@triton.jit
def _apply_lars(
    table, scale, skip, tensors, first, sums,
    MAY_SKIP: tl.constexpr, IS_ALIGNED: tl.constexpr, CLIPS: tl.constexpr, NESTEROV: tl.constexpr,
):  # fmt: skip
    """Add the gradients, times each tensor's ratio, to the momenta, and move the weights by these."""
    tensor, row, left, grads, weights, momenta, _ = _chunk(table, tensors, first, IS_ALIGNED)
    lr, decay, momentum = _option(row, _LR), _option(row, _DECAY), _option(row, _OWN)
    factor, weight_norm, norm = tl.load(scale), _norm(sums, tensor, 1), _norm(sums, tensor, 0)
    if CLIPS:
        norm = _norm(sums, tensor, 2)
        bound = norm
    else:
        bound = norm + decay * weight_norm + _option(row, _EPS)
    ratio = _ratio(_option(row, _OWN + 1) * weight_norm, bound, weight_norm, norm)
    if CLIPS:
        ratio = tl.where(ratio < lr, ratio / tl.where(lr == 0.0, 1.0, lr), 1.0)
    ratio = tl.where(_option(row, _OWN + 2) != 0.0, ratio, 1.0)
    inside_rate = ratio if CLIPS else ratio * lr
    outside_rate = lr if CLIPS else 1.0
    stored = _stored(left, skip, MAY_SKIP)
    for at in range(0, CHUNK, BLOCK):
        i = at + tl.arange(0, BLOCK)
        inside = i < stored
        g, w, m = _read(grads, i, inside) * factor, _read(weights, i, inside), _read(momenta, i, inside)
        change = (g + decay * w) * inside_rate
        m = m * momentum + change
        tl.store(momenta + i, m, mask=inside)
        move = change + m * momentum if NESTEROV else m
        tl.store(weights + i, w - outside_rate * move, mask=inside)


# ---- NovoGrad -------------------------------------------------------------------------------------------


@triton.jit
def _blend_norms(table, scale, skip, sums, MAY_SKIP: tl.constexpr):
    """Blend a tensor's squared norm into the running one; write what gradients are divided by as sum 2."""
    tensor = tl.program_id(0)
    row = table + tensor * _WIDTH
    norm_sq = _elements(row, _SECOND, 0, False)
    share = tl.where(_step_of(row) == 1.0, _option(row, _OWN + 2), _option(row, _OWN + 1))
    before, now = tl.load(norm_sq), tl.load(sums + tensor * 4)
    running = _blended(before, now, share)
    tl.store(norm_sq, running, mask=_stored(1, skip, MAY_SKIP) == 1)
    _, correction2 = _corrections(row)
    divisor = tl.sqrt_rn(running) / correction2 + _option(row, _EPS)
    tl.store(sums + tensor * 4 + 2, divisor)


@triton.jit
def _apply_novograd(
    table, scale, skip, tensors, first, sums,
    MAY_SKIP: tl.constexpr, IS_ALIGNED: tl.constexpr,
):  # fmt: skip
    """Add the gradients to the momenta, and move the weights by these."""
    tensor, row, left, grads, weights, momenta, _ = _chunk(table, tensors, first, IS_ALIGNED)
    lr, decay = _option(row, _LR), _option(row, _DECAY)
    beta1, new = _option(row, _OWN), _option(row, _OWN + 3)
    is_inside, divisor = _option(row, _OWN + 4) != 0.0, tl.load(sums + tensor * 4 + 2)
    factor = new * tl.load(scale) / tl.where(is_inside, divisor, 1.0)
    correction1, _ = _corrections(row)
    rate = lr / correction1 / tl.where(is_inside, 1.0, divisor)
    inside_decay = tl.where(is_inside, new * decay, 0.0)
    kept = tl.where(is_inside, 1.0, 1.0 - lr * decay)
    stored = _stored(left, skip, MAY_SKIP)
    for at in range(0, CHUNK, BLOCK):
        i = at + tl.arange(0, BLOCK)
        inside = i < stored
        g, w, m = _read(grads, i, inside), _read(weights, i, inside), _read(momenta, i, inside)
        m = m * beta1 + g * factor + w * inside_decay
        tl.store(momenta + i, m, mask=inside)
        tl.store(weights + i, w * kept - m * rate, mask=inside)
