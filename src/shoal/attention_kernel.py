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

A causal query attends to the keys up to its own place, from the first one of its document. Blocks of keys
before or behind all of these are not read, nor blocks of queries that attend to none of a block of keys.

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
BACKWARD_OF_BIAS = dict.fromkeys((16, 32, 64), Blocks(64, 64, 4, 1)) | {128: Blocks(64, 64, 8, 1)}
# Biases take registers, which 128 columns have only beside fewer keys.
BIASED_FORWARD = FORWARD | {128: Blocks(128, 32, 8, 2)}
BIASED_BACKWARD_OF_QUERIES = BACKWARD_OF_QUERIES | {128: Blocks(64, 32, 4, 2)}


def blocks_of_keys(num_columns: int, group: int, drops: bool) -> Blocks:
    """Return the sizes of the program that computes the gradients of keys.

    Args:
        group: heads of queries for each head of keys.
        drops: with dropout.
    """
    blocks = BACKWARD_OF_KEYS[num_columns]
    # With the loop over heads, a block that is read ahead would take the registers of the masks.
    return blocks._replace(num_stages=1) if group > 1 and drops else blocks


class Packing(NamedTuple):
    """Sequences of a packed batch.

    Attributes:
        cu_queries: ``[B + 1]`` the first query of each sequence, and their number.
        cu_keys: the same of keys.
        num_keys: ``[B]`` how many keys of each sequence are attended to, from its first; none: all.
        documents: int32 ``[2, queries]`` the first row of each query's document in its sequence, and the row
            behind its last; neither falls. None: a sequence is one.
        max_queries: of a sequence, or more.
        max_keys: of a sequence, or more.
        is_causal: queries attend to no later key.
    """

    cu_queries: Tensor
    cu_keys: Tensor
    num_keys: Tensor | None
    documents: Tensor | None
    max_queries: int
    max_keys: int
    is_causal: bool


def forward(
    query: Tensor | None,
    stacked: Tensor,
    keys: Tensor | None,
    bias: Tensor | None,
    packing: Packing,
    num_dropped: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return the context ``[queries, heads, d]``, and the logarithms (base 2) of the sums of the softmax.

    The latter are fp32 ``[heads, queries]``.

    Args:
        query: ``[queries, heads, d]``, d one of 16, 32, 64 and 128; none: the first third of ``stacked``.
        stacked: ``[T, n, d]``, the heads of queries (without ``query``), of keys and of values. Of these two
            there may be fewer, each for as many heads of queries that stand side by side.
        keys: int64 ``[queries]`` of dropout; none: nothing is dropped.
        bias: ``[heads, max_queries, max_keys]``, which is added to the scores of each sequence, or nothing.
        num_dropped: of 2**16 weights.
        scale: of the scores, above 0.
    """
    heads = _heads(query, stacked, bias)
    num_queries = heads["q"].shape[0]
    out = stacked.new_empty(num_queries, heads["num_heads"], stacked.shape[2])
    log_sums = stacked.new_empty(heads["num_heads"], num_queries, dtype=torch.float32)
    outputs = {"out": out, "log_sums": log_sums}
    blocks = (FORWARD if bias is None else BIASED_FORWARD)[stacked.shape[2]]
    shape = (-(-packing.max_queries // blocks.queries), heads["num_heads"])
    _run(_forward, shape, blocks, heads | outputs, keys, packing, num_dropped, scale)
    return out, log_sums


def backward(
    grad: Tensor,
    query: Tensor | None,
    stacked: Tensor,
    keys: Tensor | None,
    bias: Tensor | None,
    packing: Packing,
    out: Tensor,
    log_sums: Tensor,
    num_dropped: int,
    scale: float,
    *,
    needs_bias_grad: bool = False,
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Return the gradients of query, stacked and bias, from that of the context and what forward returns."""
    heads = _heads(query, stacked, bias)
    stacked_grad = torch.empty(stacked.shape, dtype=stacked.dtype, device=stacked.device)
    query_grad = None if query is None else torch.empty_like(out)
    grad = _readable(grad)
    rows = {"log_sums": log_sums, "corrections": torch.empty_like(log_sums)}
    shared = heads | rows | {"grad": grad, "grad_s": grad.stride(0)}
    # The first kernel writes the corrections that the second one reads.
    of_queries = stacked_grad if query_grad is None else query_grad
    matrices = shared | {"out": out, "q_grad": of_queries, "q_grad_s": of_queries.stride(0)}
    blocks = (BACKWARD_OF_QUERIES if bias is None else BIASED_BACKWARD_OF_QUERIES)[stacked.shape[2]]
    shape = (-(-packing.max_queries // blocks.queries), heads["num_heads"])
    _run(_backward_of_queries, shape, blocks, matrices, keys, packing, num_dropped, scale)
    matrices = shared | {"stacked_grad": stacked_grad, "grads_s": stacked_grad.stride(0)}
    blocks = blocks_of_keys(stacked.shape[2], heads["GROUP"], keys is not None)
    shape = (-(-packing.max_keys // blocks.keys), heads["num_heads"] // heads["GROUP"])
    _run(_backward_of_keys, shape, blocks, matrices, keys, packing, num_dropped, scale)
    if bias is None or not needs_bias_grad:
        return query_grad, stacked_grad, None
    bias_grad = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
    matrices = shared | {"bias_grad": bias_grad, "num_sequences": packing.cu_keys.shape[0] - 1}
    blocks, (num_heads, max_queries, max_keys) = BACKWARD_OF_BIAS[stacked.shape[2]], bias.shape
    shape = (-(-max_queries // blocks.queries) * -(-max_keys // blocks.keys), num_heads)
    _run(_backward_of_bias, shape, blocks, matrices, keys, packing, num_dropped, scale)
    return query_grad, stacked_grad, bias_grad


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


def _heads(query: Tensor | None, stacked: Tensor, bias: Tensor | None) -> dict[str, Any]:
    """Return the arguments of kernels about the places of queries, keys, values and biases."""
    stacked = _readable(stacked)
    query = stacked if query is None else _readable(query)
    num_heads = stacked.shape[1] // 3 if query is stacked else query.shape[1]
    first_key = num_heads if query is stacked else 0
    return {
        "q": query,
        "kv": stacked,
        "q_s": query.stride(0),
        "kv_s": stacked.stride(0),
        "first_key": first_key,
        "num_heads": num_heads,
        "GROUP": num_heads // ((stacked.shape[1] - first_key) // 2),
        "bias": None if bias is None else bias.contiguous(),
        "bias_rows": 0 if bias is None else bias.shape[1],
        "bias_s": 0 if bias is None else bias.shape[2],
    }


def _readable(x: Tensor) -> Tensor:
    """Return ``x`` with the elements of its rows side by side."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()


def _run(
    kernel: Any,
    shape: tuple[int, int],
    blocks: Blocks,
    arguments: dict[str, Any],
    keys: Tensor | None,
    packing: Packing,
    num_dropped: int,
    scale: float,
) -> None:
    """Queue a kernel on the device of its tensors: for each sequence ``shape``, blocks and heads."""
    num_blocks, num_heads = shape
    num_sequences = 1 if "num_sequences" in arguments else packing.cu_keys.shape[0] - 1
    num_programs = num_sequences * num_heads * num_blocks
    with torch.cuda.device_of(arguments["q"]):
        wrap_triton(kernel)[(num_programs,)](
            **arguments,
            keys=keys,
            cu_queries=packing.cu_queries,
            cu_keys=packing.cu_keys,
            num_keys=packing.num_keys,
            documents=packing.documents,
            num_blocks=num_blocks,
            num_queries=arguments["q"].shape[0],
            scale=scale,
            threshold=(num_dropped - DROPOUT_RANGE // 2) << 16,
            kept_scale=DROPOUT_RANGE / (DROPOUT_RANGE - num_dropped),
            D=arguments["q"].shape[2],
            CAUSAL=packing.is_causal,
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
def _is_before(limit, N: tl.constexpr):
    """Return which keys of a block are before a limit, which is a number or a column of one for each query.

    A thread compares constants, which take no registers, with numbers of its own.
    """
    c = tl.arange(0, N)[None, :]
    return (c >> 4) * 16 + ((c >> 3) & 1) * 2 + (c & 1) < limit - ((c >> 1) & 3) * 4


@triton.jit
def _attended_scores(scores, first, start, end, N: tl.constexpr):
    """Return scores ``[queries, keys]`` of the keys from ``first``, -inf before the start and from the end.

    Both are a number or a column of one for each query; without documents there is no start.
    """
    is_attended = _is_before(end - first, N)
    if start is not None:
        is_attended = is_attended & (_is_before(start - first, N) == 0)
    return tl.where(is_attended, scores, float("-inf"))


@triton.jit
def _biased(scores, score_scale, bias, h, rows, bias_rows, bias_s, first, N: tl.constexpr):
    """Return scores in powers of 2 with the biases of keys from ``first``; behind the end, of the last."""
    at = h.to(tl.int64) * bias_rows * bias_s + tl.minimum(rows, bias_rows - 1)[:, None] * bias_s
    biases = tl.load(bias + at + tl.minimum(first + _order(N), bias_s - 1)[None, :])
    return scores * score_scale + biases.to(tl.float32) * 1.4426950408889634


@triton.jit
def _finite(highest, start):
    """Return the highest scores; 0 where a document, which is then later, has found no key yet."""
    return highest if start is None else tl.where(highest == float("-inf"), 0.0, highest)


@triton.jit(do_not_specialize=["num_blocks", "num_queries", "bias_rows", "bias_s"])
def _forward(
    q, kv, keys, bias, out, log_sums, cu_queries, cu_keys, num_keys, documents,
    q_s, kv_s, first_key, num_heads, num_blocks, num_queries, bias_rows, bias_s,
    scale, threshold, kept_scale,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Write the context of a block of queries."""
    b, h = tl.program_id(0) // num_blocks // num_heads, tl.program_id(0) // num_blocks % num_heads
    first_row = tl.program_id(0) % num_blocks * M
    first_query = tl.load(cu_queries + b).to(tl.int64)
    num_rows = (tl.load(cu_queries + b + 1) - first_query).to(tl.int32)
    rows = first_row + tl.arange(0, M)
    of_rows = h.to(tl.int64) * num_queries + first_query + rows
    query = _read(q + first_query * q_s + h * D, rows, q_s, num_rows, D)
    first_of_keys = tl.load(cu_keys + b).to(tl.int64)
    end = _attended(num_keys, b, (tl.load(cu_keys + b + 1) - first_of_keys).to(tl.int32))
    end = tl.where(first_row < num_rows, end, 0)
    limit, begin, start = end, 0, None
    if CAUSAL:
        limit = tl.minimum(rows + 1, end)[:, None]
        end = tl.minimum(end, first_row + M)
    if documents is not None:
        of_queries = documents + first_query
        begin = tl.load(of_queries + first_row, mask=first_row < num_rows, other=0) // N * N
        start = tl.load(of_queries + rows, mask=rows < num_rows, other=0)[:, None]
    row_keys = None
    if keys is not None:
        row_keys = _fold_in(tl.load(keys + first_query + rows, mask=rows < num_rows, other=0), h) + _step(
            begin
        )
    k = kv + (first_of_keys + begin) * kv_s + (first_key + h // GROUP) * D
    v = k + num_heads // GROUP * D
    score_scale = scale * 1.4426950408889634  # of powers of 2
    factor = score_scale if bias is None else 1.0
    highest = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    context = tl.zeros([M, D], tl.float32)
    for first in range(begin, end, N):
        scores = tl.dot(query, tl.trans(_read_keys(k, kv_s, end - first, D, N)))
        if bias is not None:
            scores = _biased(scores, score_scale, bias, h, rows, bias_rows, bias_s, first, N)
        scores = _attended_scores(scores, first, start, limit, N)
        now_highest = tl.maximum(highest, tl.max(scores, 1) * factor)
        subtracted = _finite(now_highest, start)
        weights = tl.exp2(scores * factor - subtracted[:, None])
        shrinkage = tl.exp2(highest - subtracted)
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


@triton.jit(do_not_specialize=["num_blocks", "num_queries", "bias_rows", "bias_s"])
def _backward_of_queries(
    q, kv, keys, bias, out, log_sums, grad, corrections, q_grad, cu_queries, cu_keys, num_keys, documents,
    q_s, kv_s, grad_s, q_grad_s, first_key, num_heads, num_blocks, num_queries, bias_rows, bias_s,
    scale, threshold, kept_scale,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a block of queries, and the corrections of their rows by the softmax.

    The factor of kept weights is left out of all gradients until their end.
    """
    b, h = tl.program_id(0) // num_blocks // num_heads, tl.program_id(0) // num_blocks % num_heads
    first_row = tl.program_id(0) % num_blocks * M
    first_query = tl.load(cu_queries + b).to(tl.int64)
    num_rows = (tl.load(cu_queries + b + 1) - first_query).to(tl.int32)
    rows = first_row + tl.arange(0, M)
    of_rows = h.to(tl.int64) * num_queries + first_query + rows
    out_s = num_heads * D
    query = _read(q + first_query * q_s + h * D, rows, q_s, num_rows, D)
    context = _read(out + first_query * out_s + h * D, rows, out_s, num_rows, D)
    context_grad = _read(grad + first_query * grad_s + h * D, rows, grad_s, num_rows, D)
    log_sum = tl.load(log_sums + of_rows, mask=rows < num_rows, other=float("inf"))
    correction = tl.sum(context.to(tl.float32) * context_grad.to(tl.float32), 1) / kept_scale
    tl.store(corrections + of_rows, correction, mask=rows < num_rows)
    first_of_keys = tl.load(cu_keys + b).to(tl.int64)
    end = _attended(num_keys, b, (tl.load(cu_keys + b + 1) - first_of_keys).to(tl.int32))
    end = tl.where(first_row < num_rows, end, 0)
    limit, begin, start = end, 0, None
    if CAUSAL:
        limit = tl.minimum(rows + 1, end)[:, None]
        end = tl.minimum(end, first_row + M)
    if documents is not None:
        of_queries = documents + first_query
        begin = tl.load(of_queries + first_row, mask=first_row < num_rows, other=0) // N * N
        start = tl.load(of_queries + rows, mask=rows < num_rows, other=0)[:, None]
    row_keys = None
    if keys is not None:
        row_keys = _fold_in(tl.load(keys + first_query + rows, mask=rows < num_rows, other=0), h) + _step(
            begin
        )
    k = kv + (first_of_keys + begin) * kv_s + (first_key + h // GROUP) * D
    v = k + num_heads // GROUP * D
    score_scale = scale * 1.4426950408889634
    factor = score_scale if bias is None else 1.0
    query_grad = tl.zeros([M, D], tl.float32)
    for first in range(begin, end, N):
        key = _read_keys(k, kv_s, end - first, D, N)
        value = _read_keys(v, kv_s, end - first, D, N)
        scores = tl.dot(query, tl.trans(key))
        if bias is not None:
            scores = _biased(scores, score_scale, bias, h, rows, bias_rows, bias_s, first, N)
        scores = _attended_scores(scores, first, start, limit, N)
        weights = tl.exp2(scores * factor - log_sum[:, None])
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


@triton.jit(do_not_specialize=["num_blocks", "num_queries", "bias_rows", "bias_s"])
def _backward_of_keys(
    q, kv, keys, bias, log_sums, grad, corrections, stacked_grad, cu_queries, cu_keys, num_keys, documents,
    q_s, kv_s, grad_s, grads_s, first_key, num_heads, num_blocks, num_queries, bias_rows, bias_s,
    scale, threshold, kept_scale,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a block of keys and values, by all heads of queries that attend to them."""
    num_groups = num_heads // GROUP
    b, group = tl.program_id(0) // num_blocks // num_groups, tl.program_id(0) // num_blocks % num_groups
    first_row = tl.program_id(0) % num_blocks * N
    first_of_keys = tl.load(cu_keys + b).to(tl.int64)
    num_rows = (tl.load(cu_keys + b + 1) - first_of_keys).to(tl.int32)
    at = first_row + _order(N)
    k = kv + first_of_keys * kv_s + (first_key + group) * D
    key = _read(k, at, kv_s, num_rows, D)
    value = _read(k + num_groups * D, at, kv_s, num_rows, D)
    first_query = tl.load(cu_queries + b).to(tl.int64)
    num_rows_of_queries = (tl.load(cu_queries + b + 1) - first_query).to(tl.int32)
    num_attended = _attended(num_keys, b, num_rows)
    begin, end = 0, num_rows_of_queries
    if CAUSAL:
        begin = first_row // M * M
    if documents is not None:
        last = tl.minimum(first_row + N, num_rows) - 1
        end = tl.load(documents + num_queries + first_query + last, mask=first_row < num_rows, other=0)
    end = tl.where(first_row < num_attended, end, 0)
    score_scale = scale * 1.4426950408889634
    factor = score_scale if bias is None else 1.0
    key_gradient = tl.zeros([N, D], tl.float32)
    value_gradient = tl.zeros([N, D], tl.float32)
    for number in range(GROUP):
        h = group * GROUP + number
        q_of_head = q + first_query * q_s + h * D
        grad_of_head = grad + first_query * grad_s + h * D
        of_head = h.to(tl.int64) * num_queries + first_query
        for first in range(begin, end, M):
            rows = first + tl.arange(0, M)
            query = _read(q_of_head, rows, q_s, end, D)
            context_grad = _read(grad_of_head, rows, grad_s, end, D)
            log_sum = tl.load(log_sums + of_head + rows, mask=rows < end, other=float("inf"))
            correction = tl.load(corrections + of_head + rows, mask=rows < end, other=0.0)
            scores = tl.dot(query, tl.trans(key))
            if bias is not None:
                scores = _biased(scores, score_scale, bias, h, rows, bias_rows, bias_s, first_row, N)
            if CAUSAL:
                start = None
                if documents is not None:
                    start = tl.load(documents + first_query + rows, mask=rows < end, other=0)[:, None]
                scores = _attended_scores(scores, first_row, start, rows[:, None] + 1, N)
            weights = tl.exp2(scores * factor - log_sum[:, None])
            used = weights
            if keys is not None:
                # Dropped weights are marked by their sign: no register keeps the mask for the next product.
                row_keys = _fold_in(tl.load(keys + first_query + rows, mask=rows < end, other=0), h)
                weights = tl.where(_kept(row_keys + _step(first_row), threshold, N), weights, -weights)
                used = tl.maximum(weights, 0.0)
            value_gradient = tl.dot(tl.trans(used.to(query.dtype)), context_grad, value_gradient)
            weight_grads = tl.dot(context_grad, tl.trans(value))
            score_grads = used * weight_grads - tl.abs(weights) * correction[:, None]
            key_gradient = tl.dot(tl.trans(score_grads.to(query.dtype)), query, key_gradient)
    # Keys that are not attended to have no gradient.
    is_attended = (at < num_attended)[:, None]
    key_gradient = tl.where(is_attended, key_gradient * (scale * kept_scale), 0.0)
    value_gradient = tl.where(is_attended, value_gradient * kept_scale, 0.0)
    grads = stacked_grad + first_of_keys * grads_s + (first_key + group) * D
    _write(grads, at, grads_s, num_rows, key_gradient, D)
    _write(grads + num_groups * D, at, grads_s, num_rows, value_gradient, D)


@triton.jit(do_not_specialize=["num_blocks", "num_queries", "bias_rows", "bias_s", "num_sequences"])
def _backward_of_bias(
    q, kv, keys, bias, log_sums, grad, corrections, bias_grad, cu_queries, cu_keys, num_keys, documents,
    q_s, kv_s, grad_s, first_key, num_heads, num_blocks, num_queries, bias_rows, bias_s, num_sequences,
    scale, threshold, kept_scale,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a block of biases, which all sequences share."""
    h = tl.program_id(0) // num_blocks
    num_blocks_of_keys = tl.cdiv(bias_s, N)
    rows = tl.program_id(0) % num_blocks // num_blocks_of_keys * M + tl.arange(0, M)
    first = tl.program_id(0) % num_blocks % num_blocks_of_keys * N
    score_scale = scale * 1.4426950408889634
    gradient = tl.zeros([M, N], tl.float32)
    for b in range(num_sequences):
        first_query = tl.load(cu_queries + b).to(tl.int64)
        num_rows = (tl.load(cu_queries + b + 1) - first_query).to(tl.int32)
        of_rows = h.to(tl.int64) * num_queries + first_query + rows
        query = _read(q + first_query * q_s + h * D, rows, q_s, num_rows, D)
        context_grad = _read(grad + first_query * grad_s + h * D, rows, grad_s, num_rows, D)
        log_sum = tl.load(log_sums + of_rows, mask=rows < num_rows, other=float("inf"))
        correction = tl.load(corrections + of_rows, mask=rows < num_rows, other=0.0)
        first_of_keys = tl.load(cu_keys + b).to(tl.int64)
        num_rows_of_keys = (tl.load(cu_keys + b + 1) - first_of_keys).to(tl.int32)
        end = _attended(num_keys, b, num_rows_of_keys)
        k = kv + first_of_keys * kv_s + (first_key + h // GROUP) * D
        key = _read(k, first + _order(N), kv_s, num_rows_of_keys, D)
        value = _read(k + num_heads // GROUP * D, first + _order(N), kv_s, num_rows_of_keys, D)
        limit, start = end, None
        if CAUSAL:
            limit = tl.minimum(rows + 1, end)[:, None]
        if documents is not None:
            start = tl.load(documents + first_query + rows, mask=rows < num_rows, other=0)[:, None]
        scores = tl.dot(query, tl.trans(key))
        scores = _biased(scores, score_scale, bias, h, rows, bias_rows, bias_s, first, N)
        weights = tl.exp2(_attended_scores(scores, first, start, limit, N) - log_sum[:, None])
        weight_grads = tl.dot(context_grad, tl.trans(value))
        if keys is not None:
            row_keys = _fold_in(tl.load(keys + first_query + rows, mask=rows < num_rows, other=0), h)
            weight_grads = tl.where(_kept(row_keys + _step(first), threshold, N), weight_grads, 0.0)
        gradient += weights * (weight_grads - correction[:, None])
    at = (h.to(tl.int64) * bias_rows + rows[:, None]) * bias_s + (first + _order(N))[None, :]
    is_there = (rows < bias_rows)[:, None] & (first + _order(N) < bias_s)[None, :]
    tl.store(bias_grad + at, gradient * kept_scale, mask=is_there)
