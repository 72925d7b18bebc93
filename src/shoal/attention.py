"""Computes attention over packed sequences by own kernels (:mod:`shoal.attention_kernel`).

Where there are none, attention is computed over padded sequences, by torch's fused kernels or, with dropout,
explicitly (:func:`shoal.dropout.attention`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from shoal.decide.footprint import KERNEL_SHARED_BYTES
from shoal.decide.rng import DROPOUT_RANGE
from shoal.env.machine import compiler_problem

USES_KERNELS = not compiler_problem()
"""Select the kernels for the CUDA tensors that they support."""
_assumed_kernels: bool | None = None


def packed_attention(
    query: Tensor | None,
    stacked: Tensor,
    keys: Tensor | None,
    p: float,
    *,
    cu_queries: Tensor,
    cu_keys: Tensor,
    bias: Tensor | None = None,
    num_keys: Tensor | None = None,
    documents: Tensor | None = None,
    max_queries: int,
    max_keys: int,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Return the context ``[queries, heads, d]`` of packed sequences, for tensors of :func:`has_kernels`.

    It is one kernel forward and two backward, on an A100, an H100 or a later GPU like them (128 KiB of shared
    memory for a block) beside a C compiler, for 16 bits, and 16, 32, 64 or 128 columns a head. A query that
    may attend to no key has the context 0.

    Args:
        query: ``[queries, heads, d]``; none: ``stacked`` begins with the heads of the queries.
        stacked: ``[T, n, d]``, the heads of keys, and behind them as many of values. With a query they may
            be fewer, each for as many heads of queries that stand side by side.
        keys: int64 ``[queries]`` of dropout, which each head folds its number into
            (:func:`shoal.dropout.fold_in`); none: nothing is dropped.
        p: probability of dropping a weight, below 1.
        cu_queries: ``[B + 1]`` the first query of each sequence, and the number of queries.
        cu_keys: ``[B + 1]`` the first row of each sequence in ``stacked``, and T.
        bias: ``[heads, queries, keys]``, at least of the longest sequence; it is added to the scores of each
            sequence, behind their scale, and has a gradient.
        num_keys: ``[B]`` keys to attend to, from the first one; default: all.
        documents: of causal attention, as :func:`document_bounds` returns it; default: a sequence is one.
        max_queries: of a sequence, or more.
        max_keys: of a sequence, or more.
        is_causal: the n-th query of a sequence attends to its first n keys.
        scale: of the scores, above 0; default: d ** -0.5.
    """
    num_dropped = 0 if keys is None else round(p * DROPOUT_RANGE)
    context: Tensor = torch.ops.shoal.attention(
        query,
        stacked,
        keys if num_dropped else None,
        bias,
        cu_queries,
        cu_keys,
        num_keys,
        documents,
        max_queries,
        max_keys,
        is_causal,
        num_dropped,
        stacked.shape[-1] ** -0.5 if scale is None else scale,
    )[0]
    return context


def document_bounds(position_ids: Tensor) -> Tensor:
    """Return the first row of each row's document in its block, and the row behind its last, ``[2, B, T]``.

    They are int32, and no host waits for them.

    Args:
        position_ids: ``[B, T]``; a document begins wherever it does not rise by one.

    Example:

        >>> document_bounds(torch.tensor([[0, 1, 2, 0, 1]])).tolist()
        [[[0, 0, 0, 3, 3]], [[3, 3, 3, 5, 5]]]
    """
    rows = torch.arange(position_ids.shape[1], device=position_ids.device, dtype=torch.int32)
    begins = position_ids.diff(dim=1, prepend=position_ids[:, :1]) != 1
    first = torch.where(begins, rows, 0).cummax(1).values
    behind = torch.where(begins, rows, len(rows)).roll(-1, 1)
    behind[:, -1] = len(rows)
    return torch.stack([first, behind.flip(1).cummin(1).values.flip(1)])


def windowed(bounds: Tensor, window: int) -> Tensor:
    """Return bounds of documents in which a row attends to ``window`` rows at most, itself among them."""
    rows = torch.arange(bounds.shape[-1], device=bounds.device, dtype=bounds.dtype)
    return torch.stack([bounds[0].clamp(min=rows - (window - 1)), bounds[1].clamp(max=rows + window)])


@contextmanager
def assuming_kernels(has_kernels: bool) -> Iterator[None]:
    """Choose operators as on a device with or without the kernels, in this process, to count their memory."""
    global _assumed_kernels
    before, _assumed_kernels = _assumed_kernels, has_kernels
    try:
        yield
    finally:
        _assumed_kernels = before


def has_kernels(device: torch.device, dtype: torch.dtype, num_columns: int, p: float) -> bool:
    """Return whether there are kernels for heads of so many columns and this dropout on a device."""
    return (
        dtype in (torch.bfloat16, torch.float16)
        and num_columns in (16, 32, 64, 128)
        and round(p * DROPOUT_RANGE) < DROPOUT_RANGE
        and runs_kernels(device)
    )


def runs_kernels(device: torch.device) -> bool:
    """Return whether a device runs the kernels, some of them for other types and sizes."""
    there = _assumed_kernels
    if there is None:
        there = (
            USES_KERNELS
            and device.type == "cuda"
            and torch.cuda.is_available()
            and torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= KERNEL_SHARED_BYTES
        )
    if there:
        _load()
    return there


def _load() -> None:
    """Make the operators, which load Triton, which few processes need."""
    import shoal.attention_operators  # noqa: F401
