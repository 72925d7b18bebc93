# mypy: disable-error-code="no-untyped-call, no-untyped-def, untyped-decorator"
"""Computes attention over packed sequences on a GPU without a matrix of weights, in Triton.

The kernels are those of FlashAttention-2 (Dao, 2023): a program takes a block of queries of a sequence past
all blocks of its keys and values, with the running maximum and sum of the softmax. The backward pass computes
the weights again from the logarithm of that sum. The mask of dropout is computed each time too, with the bits
of ``torch.ops.shoal.keep_mask``, so that nothing of size S x S is in memory. No two programs add to the same
element: results have the same bits in each run.

There are programs for as many blocks of each sequence as the longest one has. Those behind the end of their
sequence have nothing to read or to write. Kernels load the places of rows themselves, not in functions:
torch.compile would take a tensor for written, of which a function's result is part of an address.

One hash decides about four neighbouring keys. Of a matrix in tensor cores a thread holds pairs of columns
that are 8 columns apart. Blocks of keys are read in an order that makes them neighbours, so that the compiler
finds the same hash four times and computes it once.

Only :mod:`shoal.attention_operators` calls this module, and loads it when it is needed first.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import wrap_triton

from shoal.decide.rng import DROPOUT_RANGE, GOLDEN, ROUNDS, signed

_GOLDEN = tl.constexpr(signed(GOLDEN))
_FIRST, _SECOND = (tl.constexpr(signed(multiplier)) for _, multiplier in ROUNDS)


_TOKENS = 1_024
"""Whose keys at a site a program computes."""


class Blocks(NamedTuple):
    """Queries and keys that a program computes at a time, its warps, and the blocks that it reads ahead."""

    queries: int
    keys: int
    num_warps: int
    num_stages: int


# By the columns of a head. They are fixed, since the order of sums depends on them. On compute capability 9.0
# none of the programs keeps registers in memory.
FORWARD = dict.fromkeys((16, 32, 64), Blocks(128, 64, 8, 3)) | {128: Blocks(128, 64, 8, 2)}
BACKWARD_OF_QUERIES = dict.fromkeys((16, 32, 64, 128), Blocks(64, 64, 4, 2))
BACKWARD_OF_KEYS = dict.fromkeys((16, 32, 64), Blocks(64, 64, 4, 2)) | {128: Blocks(128, 64, 8, 1)}


class Packing(NamedTuple):
    """Sequences of a packed batch.

    Attributes:
        cu_queries: ``[B + 1]`` the first query of each sequence, and their number.
        cu_keys: the same of keys.
        num_keys: ``[B]`` how many keys of each sequence are attended to, from its first; none: all.
        max_queries: of a sequence, or more.
        max_keys: of a sequence, or more.
    """

    cu_queries: Tensor
    cu_keys: Tensor
    num_keys: Tensor | None
    max_queries: int
    max_keys: int


def forward(
    query: Tensor | None,
    stacked: Tensor,
    keys: Tensor | None,
    packing: Packing,
    num_dropped: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return the context ``[queries, heads, d]``, and the logarithms (base 2) of the sums of the softmax.

    The latter are fp32 ``[heads, queries]``.

    Args:
        query: ``[queries, heads, d]``, d one of 16, 32, 64 and 128; none: the first third of ``stacked``.
        stacked: ``[T, n, d]``, the heads of queries (without ``query``), of keys and of values.
        keys: int64 ``[queries]`` of dropout; none: nothing is dropped.
        num_dropped: of 2**16 weights.
        scale: of the scores, above 0.
    """
    heads = _heads(query, stacked)
    num_queries = heads["q"].shape[0]
    out = stacked.new_empty(num_queries, heads["num_heads"], stacked.shape[2])
    log_sums = stacked.new_empty(heads["num_heads"], num_queries, dtype=torch.float32)
    outputs = {"out": out, "log_sums": log_sums}
    blocks = FORWARD[stacked.shape[2]]
    num_blocks = -(-packing.max_queries // blocks.queries)
    _run(_forward, num_blocks, blocks, heads | outputs, keys, packing, num_dropped, scale)
    return out, log_sums


def backward(
    grad: Tensor,
    query: Tensor | None,
    stacked: Tensor,
    keys: Tensor | None,
    packing: Packing,
    out: Tensor,
    log_sums: Tensor,
    num_dropped: int,
    scale: float,
) -> tuple[Tensor | None, Tensor]:
    """Return the gradients of query and of stacked, from that of the context and what :func:`forward` has."""
    heads = _heads(query, stacked)
    stacked_grad = torch.empty(stacked.shape, dtype=stacked.dtype, device=stacked.device)
    query_grad = None if query is None else torch.empty_like(out)
    grad = _readable(grad)
    rows = {"log_sums": log_sums, "corrections": torch.empty_like(log_sums)}
    shared = heads | rows | {"grad": grad, "grad_s": grad.stride(0)}
    # The first kernel writes the corrections that the second one reads.
    of_queries = stacked_grad if query_grad is None else query_grad
    matrices = shared | {"out": out, "q_grad": of_queries, "q_grad_s": of_queries.stride(0)}
    blocks = BACKWARD_OF_QUERIES[stacked.shape[2]]
    num_blocks = -(-packing.max_queries // blocks.queries)
    _run(_backward_of_queries, num_blocks, blocks, matrices, keys, packing, num_dropped, scale)
    matrices = shared | {"stacked_grad": stacked_grad, "grads_s": stacked_grad.stride(0)}
    blocks = BACKWARD_OF_KEYS[stacked.shape[2]]
    num_blocks = -(-packing.max_keys // blocks.keys)
    _run(_backward_of_keys, num_blocks, blocks, matrices, keys, packing, num_dropped, scale)
    return query_grad, stacked_grad


def site_keys(keys: Tensor, positions: Tensor, num_sites: int) -> Tensor:
    """Return the keys of tokens at the sites from 0, int64 ``[num_sites, T]``.

    Args:
        keys: int64 ``[T]``, of the tokens' samples.
        positions: ``[T]``.
    """
    out = keys.new_empty(num_sites, keys.shape[0])
    with torch.cuda.device_of(keys):
        wrap_triton(_site_keys)[(-(-keys.shape[0] // _TOKENS), num_sites)](
            keys, positions, out, keys.shape[0], N=_TOKENS
        )
    return out


def _heads(query: Tensor | None, stacked: Tensor) -> dict[str, Any]:
    """Return the arguments of kernels about the places of queries, keys and values."""
    stacked = _readable(stacked)
    query = stacked if query is None else _readable(query)
    num_heads = stacked.shape[1] // 3 if query is stacked else query.shape[1]
    first_key = stacked.shape[1] - 2 * num_heads
    return {
        "q": query,
        "kv": stacked,
        "q_s": query.stride(0),
        "kv_s": stacked.stride(0),
        "first_key": first_key,
        "num_heads": num_heads,
    }


def _readable(x: Tensor) -> Tensor:
    """Return ``x`` with the elements of its rows side by side."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _run(
    kernel: Any,
    num_blocks: int,
    blocks: Blocks,
    arguments: dict[str, Any],
    keys: Tensor | None,
    packing: Packing,
    num_dropped: int,
    scale: float,
) -> None:
    """Queue a kernel on the device of its tensors: ``num_blocks`` programs a head of a sequence."""
    num_programs = (packing.cu_keys.shape[0] - 1) * arguments["num_heads"] * num_blocks
    with torch.cuda.device_of(arguments["q"]):
        wrap_triton(kernel)[(num_programs,)](
            **arguments,
            keys=keys,
            cu_queries=packing.cu_queries,
            cu_keys=packing.cu_keys,
            num_keys=packing.num_keys,
            num_blocks=num_blocks,
            num_queries=arguments["q"].shape[0],
            scale=scale,
            threshold=(num_dropped - DROPOUT_RANGE // 2) << 16,
            kept_scale=DROPOUT_RANGE / (DROPOUT_RANGE - num_dropped),
            D=arguments["q"].shape[2],
            M=blocks.queries,
            N=blocks.keys,
            num_warps=blocks.num_warps,
            num_stages=blocks.num_stages,
        )


@triton.jit
def _order(N: tl.constexpr):
    """Return the order in which the keys of a block are read: columns 0, 1, 8 and 9 are neighbours."""
    c = tl.arange(0, N)
    return (c >> 4) * 16 + ((c >> 1) & 3) * 4 + ((c >> 3) & 1) * 2 + (c & 1)


@triton.jit
def _fold_in(keys, counters):
    """Return a key per pair, as ``fold_in`` in ``shoal.dropout``."""
    x = keys + (counters + 1).to(tl.int64) * _GOLDEN
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _FIRST
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _SECOND
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


@triton.jit(do_not_specialize=["num_tokens"])
def _site_keys(keys, positions, out, num_tokens, N: tl.constexpr):
    """Write the keys of a block of tokens at a site."""
    site = tl.program_id(1)
    at = tl.program_id(0) * N + tl.arange(0, N)
    is_there = at < num_tokens
    of_tokens = _fold_in(tl.load(keys + at, mask=is_there), tl.load(positions + at, mask=is_there))
    tl.store(out + site.to(tl.int64) * num_tokens + at, _fold_in(of_tokens, site), mask=is_there)


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
def _attended(num_keys, b, num_rows):
    """Return how many keys of a sequence are attended to."""
    return num_rows if num_keys is None else tl.minimum(tl.load(num_keys + b).to(tl.int32), num_rows)


@triton.jit
def _read(base, rows, stride, count, D: tl.constexpr):
    """Return rows of a matrix, zeros behind its end."""
    at = base + rows[:, None] * stride + tl.arange(0, D)[None, :]
    return tl.load(at, mask=(rows < count)[:, None], other=0.0)


@triton.jit
def _read_keys(base, stride, count, D: tl.constexpr, N: tl.constexpr):
    """Return a block of keys or values; behind their end, the last one: masks would take registers."""
    rows = tl.minimum(_order(N), count - 1)
    return tl.load(base + rows[:, None] * stride + tl.arange(0, D)[None, :])


@triton.jit
def _write(base, rows, stride, count, values, D: tl.constexpr):
    at = base + rows[:, None] * stride + tl.arange(0, D)[None, :]
    tl.store(at, values.to(base.dtype.element_ty), mask=(rows < count)[:, None])


@triton.jit
def _scores(query, key, count, N: tl.constexpr):
    """Return scores ``[queries, keys]`` of a block of keys, -inf behind their end.

    A thread compares constants, which take no registers, with a number of its own.
    """
    c = tl.arange(0, N)
    is_before = (c >> 4) * 16 + ((c >> 3) & 1) * 2 + (c & 1) < count - ((c >> 1) & 3) * 4
    return tl.where(is_before[None, :], tl.dot(query, tl.trans(key)), float("-inf"))


@triton.jit(do_not_specialize=["num_blocks", "num_queries"])
def _forward(
    q, kv, keys, out, log_sums, cu_queries, cu_keys, num_keys,
    q_s, kv_s, first_key, num_heads, num_blocks, num_queries, scale, threshold, kept_scale,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Write the context of a block of queries."""
    b, h = tl.program_id(0) // num_blocks // num_heads, tl.program_id(0) // num_blocks % num_heads
    first_query = tl.load(cu_queries + b).to(tl.int64)
    num_rows = (tl.load(cu_queries + b + 1) - first_query).to(tl.int32)
    rows = tl.program_id(0) % num_blocks * M + tl.arange(0, M)
    of_rows = h.to(tl.int64) * num_queries + first_query + rows
    query = _read(q + first_query * q_s + h * D, rows, q_s, num_rows, D)
    begin = tl.load(cu_keys + b).to(tl.int64)
    num_rows_of_keys = (tl.load(cu_keys + b + 1) - begin).to(tl.int32)
    k = kv + begin * kv_s + (first_key + h) * D
    v = k + num_heads * D
    end = _attended(num_keys, b, num_rows_of_keys)
    end = tl.where(tl.program_id(0) % num_blocks * M < num_rows, end, 0)
    row_keys = None
    if keys is not None:
        row_keys = _fold_in(tl.load(keys + first_query + rows, mask=rows < num_rows, other=0), h)
    score_scale = scale * 1.4426950408889634  # of powers of 2
    highest = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    context = tl.zeros([M, D], tl.float32)
    for first in range(0, end, N):
        scores = _scores(query, _read_keys(k, kv_s, end - first, D, N), end - first, N)
        now_highest = tl.maximum(highest, tl.max(scores, 1) * score_scale)
        weights = tl.exp2(scores * score_scale - now_highest[:, None])
        shrinkage = tl.exp2(highest - now_highest)
        total = total * shrinkage + tl.sum(weights, 1)
        if keys is not None:
            weights = tl.where(_kept(row_keys, threshold, N), weights, 0.0)
            row_keys += _step(N)
        value = _read_keys(v, kv_s, end - first, D, N)
        context = tl.dot(weights.to(value.dtype), value, context * shrinkage[:, None])
        highest = now_highest
        k += N * kv_s
        v += N * kv_s
    # Without any key the context is 0, and the backward pass finds weights of exp2(-inf) = 0.
    is_empty = total == 0.0
    total = tl.where(is_empty, 1.0, total)
    context = context * (kept_scale / total)[:, None]
    _write(out + first_query * (num_heads * D) + h * D, rows, num_heads * D, num_rows, context, D)
    log_sum = tl.where(is_empty, float("inf"), highest + tl.log2(total))
    tl.store(log_sums + of_rows, log_sum, mask=rows < num_rows)


@triton.jit(do_not_specialize=["num_blocks", "num_queries"])
def _backward_of_queries(
    q, kv, keys, out, log_sums, grad, corrections, q_grad, cu_queries, cu_keys, num_keys,
    q_s, kv_s, grad_s, q_grad_s, first_key, num_heads, num_blocks, num_queries, scale, threshold, kept_scale,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a block of queries, and the corrections of their rows by the softmax.

    The factor of kept weights is left out of all gradients until their end.
    """
    b, h = tl.program_id(0) // num_blocks // num_heads, tl.program_id(0) // num_blocks % num_heads
    first_query = tl.load(cu_queries + b).to(tl.int64)
    num_rows = (tl.load(cu_queries + b + 1) - first_query).to(tl.int32)
    rows = tl.program_id(0) % num_blocks * M + tl.arange(0, M)
    of_rows = h.to(tl.int64) * num_queries + first_query + rows
    out_s = num_heads * D
    query = _read(q + first_query * q_s + h * D, rows, q_s, num_rows, D)
    context = _read(out + first_query * out_s + h * D, rows, out_s, num_rows, D)
    context_grad = _read(grad + first_query * grad_s + h * D, rows, grad_s, num_rows, D)
    log_sum = tl.load(log_sums + of_rows, mask=rows < num_rows, other=float("inf"))
    correction = tl.sum(context.to(tl.float32) * context_grad.to(tl.float32), 1) / kept_scale
    tl.store(corrections + of_rows, correction, mask=rows < num_rows)
    begin = tl.load(cu_keys + b).to(tl.int64)
    num_rows_of_keys = (tl.load(cu_keys + b + 1) - begin).to(tl.int32)
    k = kv + begin * kv_s + (first_key + h) * D
    v = k + num_heads * D
    end = _attended(num_keys, b, num_rows_of_keys)
    end = tl.where(tl.program_id(0) % num_blocks * M < num_rows, end, 0)
    row_keys = None
    if keys is not None:
        row_keys = _fold_in(tl.load(keys + first_query + rows, mask=rows < num_rows, other=0), h)
    score_scale = scale * 1.4426950408889634
    query_grad = tl.zeros([M, D], tl.float32)
    for first in range(0, end, N):
        key = _read_keys(k, kv_s, end - first, D, N)
        value = _read_keys(v, kv_s, end - first, D, N)
        weights = tl.exp2(_scores(query, key, end - first, N) * score_scale - log_sum[:, None])
        weight_grads = tl.dot(context_grad, tl.trans(value))
        if keys is not None:
            weight_grads = tl.where(_kept(row_keys, threshold, N), weight_grads, 0.0)
            row_keys += _step(N)
        score_grads = weights * (weight_grads - correction[:, None])
        query_grad = tl.dot(score_grads.to(key.dtype), key, query_grad)
        k += N * kv_s
        v += N * kv_s
    query_grad *= scale * kept_scale
    _write(q_grad + first_query * q_grad_s + h * D, rows, q_grad_s, num_rows, query_grad, D)


@triton.jit(do_not_specialize=["num_blocks", "num_queries"])
def _backward_of_keys(
    q, kv, keys, log_sums, grad, corrections, stacked_grad, cu_queries, cu_keys, num_keys,
    q_s, kv_s, grad_s, grads_s, first_key, num_heads, num_blocks, num_queries, scale, threshold, kept_scale,
    D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a block of keys and values."""
    b, h = tl.program_id(0) // num_blocks // num_heads, tl.program_id(0) // num_blocks % num_heads
    block = tl.program_id(0) % num_blocks
    begin = tl.load(cu_keys + b).to(tl.int64)
    num_rows = (tl.load(cu_keys + b + 1) - begin).to(tl.int32)
    at = block * N + _order(N)
    k = kv + begin * kv_s + (first_key + h) * D
    key = _read(k, at, kv_s, num_rows, D)
    value = _read(k + num_heads * D, at, kv_s, num_rows, D)
    first_query = tl.load(cu_queries + b).to(tl.int64)
    end = (tl.load(cu_queries + b + 1) - first_query).to(tl.int32)
    q += first_query * q_s + h * D
    grad += first_query * grad_s + h * D
    log_sums += h.to(tl.int64) * num_queries + first_query
    corrections += h.to(tl.int64) * num_queries + first_query
    num_attended = _attended(num_keys, b, num_rows)
    end = tl.where(block * N < num_attended, end, 0)
    score_scale = scale * 1.4426950408889634
    key_found = tl.zeros([N, D], tl.float32)
    value_found = tl.zeros([N, D], tl.float32)
    for first in range(0, end, M):
        rows = first + tl.arange(0, M)
        query = _read(q, rows, q_s, end, D)
        context_grad = _read(grad, rows, grad_s, end, D)
        log_sum = tl.load(log_sums + rows, mask=rows < end, other=float("inf"))
        correction = tl.load(corrections + rows, mask=rows < end, other=0.0)
        weights = tl.exp2(tl.dot(query, tl.trans(key)) * score_scale - log_sum[:, None])
        used = weights
        if keys is not None:
            # Dropped weights are marked by their sign: no register keeps the mask for the next product.
            row_keys = _fold_in(tl.load(keys + first_query + rows, mask=rows < end, other=0), h)
            weights = tl.where(_kept(row_keys + _step(block * N), threshold, N), weights, -weights)
            used = tl.maximum(weights, 0.0)
        value_found = tl.dot(tl.trans(used.to(query.dtype)), context_grad, value_found)
        weight_grads = tl.dot(context_grad, tl.trans(value))
        score_grads = used * weight_grads - tl.abs(weights) * correction[:, None]
        key_found = tl.dot(tl.trans(score_grads.to(query.dtype)), query, key_found)
    # Keys that are not attended to have no gradient.
    is_attended = (at < num_attended)[:, None]
    key_found = tl.where(is_attended, key_found * (scale * kept_scale), 0.0)
    value_found = tl.where(is_attended, value_found * kept_scale, 0.0)
    grads = stacked_grad + begin * grads_s + (first_key + h) * D
    _write(grads, at, grads_s, num_rows, key_found, D)
    _write(grads + num_heads * D, at, grads_s, num_rows, value_found, D)
