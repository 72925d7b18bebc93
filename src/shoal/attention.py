"""Computes attention over packed sequences by own kernels (:mod:`shoal.attention_kernel`).

Where there are none, attention is computed over padded sequences, by torch's fused kernels or, with dropout,
explicitly (:func:`shoal.dropout.attention`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

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
    num_keys: Tensor | None = None,
    max_queries: int,
    max_keys: int,
    scale: float | None = None,
) -> Tensor:
    """Return the context ``[queries, heads, d]`` of packed sequences, for tensors of :func:`has_kernels`.

    It is one kernel forward and two backward, on an A100, an H100 or a later GPU like them (128 KiB of shared
    memory for a block) beside a C compiler, for 16 bits, and 16, 32, 64 or 128 columns a head. A query that
    may attend to no key has the context 0.

    Args:
        query: ``[queries, heads, d]``; none: ``stacked`` begins with the heads of the queries.
        stacked: ``[T, n * heads, d]``, the heads of keys, and behind them those of values.
        keys: int64 ``[queries]`` of dropout, which each head folds its number into
            (:func:`shoal.dropout.fold_in`); none: nothing is dropped.
        p: probability of dropping a weight, below 1.
        cu_queries: ``[B + 1]`` the first query of each sequence, and the number of queries.
        cu_keys: ``[B + 1]`` the first row of each sequence in ``stacked``, and T.
        num_keys: ``[B]`` keys to attend to, from the first one; default: all.
        max_queries: of a sequence, or more.
        max_keys: of a sequence, or more.
        scale: of the scores, above 0; default: d ** -0.5.
    """
    num_dropped = 0 if keys is None else round(p * DROPOUT_RANGE)
    context: Tensor = torch.ops.shoal.attention(
        query,
        stacked,
        keys if num_dropped else None,
        cu_queries,
        cu_keys,
        num_keys,
        max_queries,
        max_keys,
        num_dropped,
        stacked.shape[-1] ** -0.5 if scale is None else scale,
    )[0]
    return context


@contextmanager
def assuming_kernels(has_kernels: bool) -> Iterator[None]:
    """Choose attention as on a device with or without its kernels, in this process, to count its memory."""
    global _assumed_kernels
    before, _assumed_kernels = _assumed_kernels, has_kernels
    try:
        yield
    finally:
        _assumed_kernels = before


def has_kernels(device: torch.device, dtype: torch.dtype, num_columns: int, p: float) -> bool:
    """Return whether there are kernels for heads of so many columns and this dropout on a device."""
    there = (
        dtype in (torch.bfloat16, torch.float16)
        and num_columns in (16, 32, 64, 128)
        and round(p * DROPOUT_RANGE) < DROPOUT_RANGE
        and (runs_kernels(device) if _assumed_kernels is None else _assumed_kernels)
    )
    if there:
        _load()
    return there


def runs_kernels(device: torch.device) -> bool:
    """Return whether a device runs the kernels, some of them for other types and sizes."""
    there = (
        USES_KERNELS
        and device.type == "cuda"
        and torch.cuda.is_available()
        and torch.cuda.get_device_properties(device).shared_memory_per_block_optin >= 128 << 10
    )
    if there:
        _load()
    return there


def _load() -> None:
    """Make the operators, which load Triton, which few processes need."""
    import shoal.attention_operators  # noqa: F401
