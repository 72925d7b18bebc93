# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
"""Computes attention with keyed dropout on a GPU without the matrix of weights, in Triton.

The kernels are those of FlashAttention-2 (Dao, 2023): a program takes a block of queries past all blocks of
keys and values, with the running maximum and sum of the softmax. The backward pass computes the weights again
from the logarithm of that sum. The mask of dropout is computed each time too, with the bits of
``torch.ops.shoal.keep_mask``, so that nothing of size S x S is in memory. No two programs add to the same
element: results have the same bits in each run.

One hash decides about four neighbouring keys. Of a matrix in tensor cores a thread holds pairs of columns
that are 8 columns apart. Blocks of keys are read in an order that makes them neighbours, so that the compiler
finds the same hash four times and computes it once.

Only :mod:`shoal.dropout` calls this module, and loads it when it is needed first.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from shoal.decide.rng import DROPOUT_RANGE, GOLDEN, ROUNDS, signed

_GOLDEN = tl.constexpr(signed(GOLDEN))
_FIRST, _SECOND = (tl.constexpr(signed(multiplier)) for _, multiplier in ROUNDS)


class _Blocks(NamedTuple):
    """Queries and keys that a program computes at a time, its warps, and the blocks that it reads ahead."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


# By the columns of a head. They are fixed, since the order of sums depends on them. On compute capability 9.0
# none of the programs keeps registers in memory.
FORWARD = dict.fromkeys((16, 32, 64), _Blocks(128, 64, 8, 3)) | {128: _Blocks(128, 64, 8, 2)}
BACKWARD_OF_QUERIES = dict.fromkeys((16, 32, 64, 128), _Blocks(64, 64, 4, 2))
BACKWARD_OF_KEYS = dict.fromkeys((16, 32, 64), _Blocks(64, 64, 4, 2)) | {128: _Blocks(128, 64, 8, 1)}


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    mask: Tensor | None,
    num_dropped: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return the context, and the logarithms (base 2) of the sums of the softmax, fp32 ``[B, heads, S]``.

    Args:
        query: ``[B, heads, S, d]``, d one of 16, 32, 64 and 128.
        key: ``[B, heads, T, d]``, as ``value``.
        keys: int64 ``[B, heads, S]`` of dropout.
        mask: bool ``[B, T]``, true for the keys to attend to; default: all.
        num_dropped: of 2**16 weights, from 1 to 2**16 - 1.
        scale: of the scores, above 0.
    """
    out = torch.empty_like(query)
    log_sums = torch.empty(query.shape[:3], dtype=torch.float32, device=query.device)
    inputs = {"q": query, "k": key, "v": value}
    inputs = {name: _readable(x) for name, x in inputs.items()}
    blocks = FORWARD[query.shape[-1]]
    num_programs = query.shape[:2].numel() * math.ceil(query.shape[2] / blocks.queries)
    is_whole = key.shape[2] % blocks.keys == 0
    rows = {"keys": keys.contiguous(), "log_sums": log_sums}
    _run(_forward, num_programs, blocks, is_whole, inputs | {"out": out}, rows, mask, num_dropped, scale)
    return out, log_sums


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    mask: Tensor | None,
    out: Tensor,
    log_sums: Tensor,
    num_dropped: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value, from that of the context and what :func:`forward` has."""
    q_grad, k_grad, v_grad = map(torch.empty_like, (query, key, value))
    inputs = {"q": query, "k": key, "v": value, "grad": grad}
    inputs = {name: _readable(x) for name, x in inputs.items()}
    num_heads, num_queries, num_keys = query.shape[:2].numel(), query.shape[2], key.shape[2]
    rows = {"keys": keys.contiguous(), "log_sums": log_sums, "corrections": torch.empty_like(log_sums)}
    # The first kernel writes the corrections that the second one reads.
    blocks = BACKWARD_OF_QUERIES[query.shape[-1]]
    num_programs, is_whole = num_heads * math.ceil(num_queries / blocks.queries), num_keys % blocks.keys == 0
    matrices = inputs | {"out": _readable(out), "q_grad": q_grad}
    _run(_backward_of_queries, num_programs, blocks, is_whole, matrices, rows, mask, num_dropped, scale)
    blocks = BACKWARD_OF_KEYS[query.shape[-1]]
    num_programs, is_whole = num_heads * math.ceil(num_keys / blocks.keys), num_queries % blocks.queries == 0
    matrices = inputs | {"k_grad": k_grad, "v_grad": v_grad}
    _run(_backward_of_keys, num_programs, blocks, is_whole, matrices, rows, mask, num_dropped, scale)
    return q_grad, k_grad, v_grad


def _readable(x: Tensor) -> Tensor:
    """Return ``x`` with the elements of a row side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _run(
    kernel: Any,
    num_programs: int,
    blocks: _Blocks,
    is_whole: bool,
    matrices: dict[str, Tensor],
    rows: dict[str, Tensor],
    mask: Tensor | None,
    num_dropped: int,
    scale: float,
) -> None:
    """Queue a kernel on the device of its tensors.

    Args:
        is_whole: whether the blocks that a program takes one after the other are all whole.
        matrices: by the names of their arguments, which have arguments for strides.
        rows: a number per query.
    """
    query, key = matrices["q"], matrices["k"]
    arguments: dict[str, Any] = matrices | rows
    for name, matrix in matrices.items():
        strides = zip(("b", "h", "s"), matrix.stride(), strict=False)
        arguments |= {f"{name}_{dimension}": stride for dimension, stride in strides}
    arguments["mask"] = mask if mask is None else mask.view(torch.uint8)
    arguments["mask_b"], arguments["mask_s"] = (0, 0) if mask is None else mask.stride()
    with torch.cuda.device_of(query):
        kernel[(num_programs,)](
            **arguments,
            num_heads=query.shape[1],
            num_queries=query.shape[2],
            num_keys=key.shape[2],
            scale=scale,
            threshold=(num_dropped - DROPOUT_RANGE // 2) << 16,
            kept_scale=DROPOUT_RANGE / (DROPOUT_RANGE - num_dropped),
            D=query.shape[3],
            M=blocks.queries,
            N=blocks.keys,
            IS_WHOLE=is_whole,
            num_warps=blocks.num_warps,
            num_stages=blocks.num_stages,
        )


@triton.jit
def _order(N: tl.constexpr):
    """Return the order in which the keys of a block are read: columns 0, 1, 8 and 9 are neighbours."""
    c = tl.arange(0, N)
    return (c >> 4) * 16 + ((c >> 1) & 3) * 4 + ((c >> 3) & 1) * 2 + (c & 1)


@triton.jit
def _kept(row_keys, threshold, N: tl.constexpr):
    """Return which weights of a block ``[queries, N]`` are kept, as ``_keep_mask`` in ``shoal.dropout``.

    The number of a hash is added in two parts: of the second one each thread knows the values beforehand.
    """
    c = tl.arange(0, N)
    x = row_keys[:, None] + (((c >> 1) & 3).to(tl.int64) * _GOLDEN)[None, :]
    x += ((c >> 4).to(tl.int64) * 4 * _GOLDEN)[None, :]
    x = (x ^ (x >> 32)) * _FIRST
    x = (x ^ (x >> 29)) * _SECOND
    half = tl.where(((c >> 3) & 1)[None, :] == 1, (x >> 32).to(tl.int32), x.to(tl.int32))
    return (half << (16 - (c & 1) * 16)[None, :]) >= threshold


@triton.jit
def _step(num_keys):
    """Return what keys of rows grow by after ``num_keys`` keys, a multiple of 4: that of their hashes."""
    return tl.cast(num_keys, tl.int64) // 4 * _GOLDEN


@triton.jit
def _read(base, rows, stride, count, D: tl.constexpr, IS_WHOLE: tl.constexpr):
    """Return rows of a matrix, zeros behind its end."""
    at = base + rows[:, None] * stride + tl.arange(0, D)[None, :]
    return tl.load(at) if IS_WHOLE else tl.load(at, mask=(rows < count)[:, None], other=0.0)


@triton.jit
def _read_row(base, at, count, other, IS_WHOLE: tl.constexpr):
    return tl.load(base + at) if IS_WHOLE else tl.load(base + at, mask=at < count, other=other)


@triton.jit
def _write(base, rows, stride, count, values, D: tl.constexpr):
    at = base + rows[:, None] * stride + tl.arange(0, D)[None, :]
    tl.store(at, values.to(base.dtype.element_ty), mask=(rows < count)[:, None])


@triton.jit
def _end_of_keys(mask, mask_s, num_keys):
    """Return the number of keys up to the last one to attend to."""
    end = 0
    for first in range(0, num_keys, 1024):
        at = first + tl.arange(0, 1024)
        allowed = tl.load(mask + at * mask_s, mask=at < num_keys, other=0) != 0
        end = tl.maximum(end, tl.max(tl.where(allowed, at + 1, 0), 0))
    return end


@triton.jit
def _limited(scores, mask, mask_s, at, num_keys, IS_WHOLE: tl.constexpr):
    """Return scores ``[queries, keys]``, -inf for keys that are not there or not to be attended to."""
    if mask is not None:
        allowed = tl.load(mask + at * mask_s, mask=at < num_keys, other=0) != 0
        scores = tl.where(allowed[None, :], scores, float("-inf"))
    elif not IS_WHOLE:
        scores = tl.where((at < num_keys)[None, :], scores, float("-inf"))
    return scores


@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def _forward(
    q, k, v, mask, keys, out, log_sums,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, out_b, out_h, out_s, mask_b, mask_s,
    num_heads, num_queries, num_keys, scale, threshold, kept_scale,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Write the context of a block of queries."""
    num_blocks = tl.cdiv(num_queries, M)
    head = tl.program_id(0) // num_blocks
    b, h = (head // num_heads).to(tl.int64), (head % num_heads).to(tl.int64)
    rows = tl.program_id(0) % num_blocks * M + tl.arange(0, M)
    of_rows = head.to(tl.int64) * num_queries + rows
    query = _read(q + b * q_b + h * q_h, rows, q_s, num_queries, D, False)
    row_keys = tl.load(keys + of_rows, mask=rows < num_queries, other=0)
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    end = num_keys
    if mask is not None:
        mask += b * mask_b
        end = _end_of_keys(mask, mask_s, num_keys)
    order = _order(N)
    score_scale = scale * 1.4426950408889634  # of powers of 2
    highest = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    context = tl.zeros([M, D], tl.float32)
    for first in range(0, end, N):
        key = _read(k, order, k_s, num_keys - first, D, IS_WHOLE)
        scores = _limited(tl.dot(query, tl.trans(key)), mask, mask_s, first + order, num_keys, IS_WHOLE)
        now_highest = tl.maximum(highest, tl.max(scores, 1) * score_scale)
        subtracted = now_highest
        if mask is not None:  # while there was no key to attend to
            subtracted = tl.where(now_highest == float("-inf"), 0.0, now_highest)
        weights = tl.exp2(scores * score_scale - subtracted[:, None])
        shrinkage = tl.exp2(highest - subtracted)
        total = total * shrinkage + tl.sum(weights, 1)
        weights = tl.where(_kept(row_keys, threshold, N), weights, 0.0)
        value = _read(v, order, v_s, num_keys - first, D, IS_WHOLE)
        context = tl.dot(weights.to(value.dtype), value, context * shrinkage[:, None])
        highest = now_highest
        row_keys += _step(N)
        k += N * k_s
        v += N * v_s
    # Without any key the context is 0, and the backward pass finds weights of exp2(-inf) = 0.
    is_empty = total == 0.0
    total = tl.where(is_empty, 1.0, total)
    _write(out + b * out_b + h * out_h, rows, out_s, num_queries, context * (kept_scale / total)[:, None], D)
    log_sum = tl.where(is_empty, float("inf"), highest + tl.log2(total))
    tl.store(log_sums + of_rows, log_sum, mask=rows < num_queries)


@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def _backward_of_queries(
    q, k, v, mask, keys, out, log_sums, grad, corrections, q_grad,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, out_b, out_h, out_s, grad_b, grad_h, grad_s,
    q_grad_b, q_grad_h, q_grad_s, mask_b, mask_s,
    num_heads, num_queries, num_keys, scale, threshold, kept_scale,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a block of queries, and the corrections of their rows by the softmax.

    The factor of kept weights is left out of all gradients until their end.
    """
    num_blocks = tl.cdiv(num_queries, M)
    head = tl.program_id(0) // num_blocks
    b, h = (head // num_heads).to(tl.int64), (head % num_heads).to(tl.int64)
    rows = tl.program_id(0) % num_blocks * M + tl.arange(0, M)
    of_rows = head.to(tl.int64) * num_queries + rows
    query = _read(q + b * q_b + h * q_h, rows, q_s, num_queries, D, False)
    context = _read(out + b * out_b + h * out_h, rows, out_s, num_queries, D, False)
    context_grad = _read(grad + b * grad_b + h * grad_h, rows, grad_s, num_queries, D, False)
    row_keys = tl.load(keys + of_rows, mask=rows < num_queries, other=0)
    log_sum = tl.load(log_sums + of_rows, mask=rows < num_queries, other=float("inf"))
    correction = tl.sum(context.to(tl.float32) * context_grad.to(tl.float32), 1) / kept_scale
    tl.store(corrections + of_rows, correction, mask=rows < num_queries)
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    end = num_keys
    if mask is not None:
        mask += b * mask_b
        end = _end_of_keys(mask, mask_s, num_keys)
    order = _order(N)
    score_scale = scale * 1.4426950408889634
    query_grad = tl.zeros([M, D], tl.float32)
    for first in range(0, end, N):
        key = _read(k, order, k_s, num_keys - first, D, IS_WHOLE)
        value = _read(v, order, v_s, num_keys - first, D, IS_WHOLE)
        scores = _limited(tl.dot(query, tl.trans(key)), mask, mask_s, first + order, num_keys, IS_WHOLE)
        weights = tl.exp2(scores * score_scale - log_sum[:, None])
        weight_grads = tl.dot(context_grad, tl.trans(value))
        weight_grads = tl.where(_kept(row_keys, threshold, N), weight_grads, 0.0)
        score_grads = weights * (weight_grads - correction[:, None])
        query_grad = tl.dot(score_grads.to(key.dtype), key, query_grad)
        row_keys += _step(N)
        k += N * k_s
        v += N * v_s
    q_grad += b * q_grad_b + h * q_grad_h
    _write(q_grad, rows, q_grad_s, num_queries, query_grad * (scale * kept_scale), D)


@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def _backward_of_keys(
    q, k, v, mask, keys, log_sums, grad, corrections, k_grad, v_grad,
    q_b, q_h, q_s, k_b, k_h, k_s, v_b, v_h, v_s, grad_b, grad_h, grad_s,
    k_grad_b, k_grad_h, k_grad_s, v_grad_b, v_grad_h, v_grad_s, mask_b, mask_s,
    num_heads, num_queries, num_keys, scale, threshold, kept_scale,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a block of keys and values."""
    num_blocks = tl.cdiv(num_keys, N)
    head = tl.program_id(0) // num_blocks
    block = tl.program_id(0) % num_blocks
    b, h = (head // num_heads).to(tl.int64), (head % num_heads).to(tl.int64)
    at = block * N + _order(N)
    key = _read(k + b * k_b + h * k_h, at, k_s, num_keys, D, False)
    value = _read(v + b * v_b + h * v_h, at, v_s, num_keys, D, False)
    q += b * q_b + h * q_h
    grad += b * grad_b + h * grad_h
    keys += head.to(tl.int64) * num_queries
    log_sums += head.to(tl.int64) * num_queries
    corrections += head.to(tl.int64) * num_queries
    end = num_queries
    if mask is not None:
        allowed = tl.load(mask + b * mask_b + at * mask_s, mask=at < num_keys, other=0) != 0
        end = tl.where(tl.max(allowed.to(tl.int32), 0) > 0, num_queries, 0)
    rows = tl.arange(0, M)
    score_scale = scale * 1.4426950408889634
    key_found = tl.zeros([N, D], tl.float32)
    value_found = tl.zeros([N, D], tl.float32)
    for first in range(0, end, M):
        query = _read(q, rows, q_s, num_queries - first, D, IS_WHOLE)
        context_grad = _read(grad, rows, grad_s, num_queries - first, D, IS_WHOLE)
        row_keys = _read_row(keys, first + rows, num_queries, 0, IS_WHOLE)
        log_sum = _read_row(log_sums, first + rows, num_queries, float("inf"), IS_WHOLE)
        correction = _read_row(corrections, first + rows, num_queries, 0.0, IS_WHOLE)
        weights = tl.exp2(tl.dot(query, tl.trans(key)) * score_scale - log_sum[:, None])
        if mask is not None:
            weights = tl.where(allowed[None, :], weights, 0.0)
        # Dropped weights are marked by their sign, so that no register keeps the mask for the next product.
        weights = tl.where(_kept(row_keys + _step(block * N), threshold, N), weights, -weights)
        used = tl.maximum(weights, 0.0)
        value_found = tl.dot(tl.trans(used.to(query.dtype)), context_grad, value_found)
        weight_grads = tl.dot(context_grad, tl.trans(value))
        score_grads = used * weight_grads - tl.abs(weights) * correction[:, None]
        key_found = tl.dot(tl.trans(score_grads.to(query.dtype)), query, key_found)
        q += M * q_s
        grad += M * grad_s
    k_grad += b * k_grad_b + h * k_grad_h
    v_grad += b * v_grad_b + h * v_grad_h
    _write(k_grad, at, k_grad_s, num_keys, key_found * (scale * kept_scale), D)
    _write(v_grad, at, v_grad_s, num_keys, value_found * kept_scale, D)
