"""Packed attention in kernels, against its explicit form in fp64 on the same inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal import attention, dropout
from shoal.decide.rng import dropout_keys

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LIMITS = {torch.bfloat16: 1e-2, torch.float16: 2e-3}


@dataclass(frozen=True)
class Batch:
    """Sequences of a packed batch on the device.

    Attributes:
        stacked: ``[T, 3 * heads, d]``.
        keys: ``[T]``.
        attended: ``[B]`` keys to attend to; none: all.
    """

    stacked: Tensor
    keys: Tensor
    lengths: tuple[int, ...]
    attended: tuple[int, ...] | None = None


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "USES_KERNELS", True)
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns where it is not set


def batch(
    lengths: tuple[int, ...],
    columns: int,
    heads: int = 3,
    dtype: torch.dtype = torch.bfloat16,
    attended: tuple[int, ...] | None = None,
) -> Batch:
    torch.manual_seed(0)
    stacked = torch.randn(sum(lengths), 3 * heads, columns, device="cuda", dtype=dtype).requires_grad_()
    (key,) = torch.from_numpy(dropout_keys(3, 0, np.arange(1))).cuda()
    return Batch(stacked, dropout.fold_in(key, torch.arange(len(stacked), device="cuda")), lengths, attended)


def packed(stacked: Tensor, given: Batch, p: float) -> Tensor:
    cu_seqlens = torch.tensor([0, *given.lengths], device="cuda").cumsum(0).int()
    assert attention.has_kernels(stacked.device, stacked.dtype, stacked.shape[2], p)
    return attention.packed_attention(
        None,
        stacked,
        given.keys,
        p,
        cu_queries=cu_seqlens,
        cu_keys=cu_seqlens,
        num_keys=None if given.attended is None else torch.tensor(given.attended, device="cuda"),
        max_queries=max(given.lengths),
        max_keys=max(given.lengths),
    )


def computed(form: Callable[..., Tensor], stacked: Tensor, given: Batch, p: float) -> list[Tensor]:
    """Return the context and the gradient of the stacked heads."""
    out = form(stacked, given, p)
    torch.manual_seed(1)
    grad = torch.randn(out.shape, device=out.device).bfloat16()  # of the same values in all types
    return [out, *torch.autograd.grad(out, [stacked], grad.to(out.dtype))]


def explicit(kept: Tensor, stacked: Tensor, given: Batch, p: float) -> Tensor:
    """Return attention whose softmax has the gradient of the context ``kept``."""
    found, first = [], 0
    for length, attended in zip(given.lengths, given.attended or given.lengths, strict=True):
        at = slice(first, first + length)
        first += length
        query, key, value = (x.transpose(0, 1) for x in stacked[at].chunk(3, 1))
        if attended == 0:
            found.append(0 * query.transpose(0, 1))
            continue
        keys = dropout.fold_in(given.keys[None, at], torch.arange(len(query), device="cuda")[:, None])
        scores = (query * query.shape[-1] ** -0.5) @ key[:, :attended].transpose(-2, -1)
        context = _SoftmaxOf.apply(scores, kept[at].transpose(0, 1), value[:, :attended], keys, p)
        found.append(context.transpose(0, 1))
    return torch.cat(found)


class _SoftmaxOf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, kept: Tensor, value: Tensor, keys: Tensor, p: float) -> Tensor:
        weights = scores.softmax(-1)
        factors = dropout.dropout(torch.ones_like(weights), keys, p)
        ctx.save_for_backward(weights, factors, kept, value)
        return (weights * factors) @ value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weights, factors, kept, value = ctx.saved_tensors
        weight_grads = grad @ value.transpose(-2, -1) * factors
        score_grads = weights * (weight_grads - (grad * kept).sum(-1, keepdim=True))
        return score_grads, None, (weights * factors).transpose(-2, -1) @ grad, None, None


def check(found: list[Tensor], given: Batch, p: float) -> None:
    """Compare ||found - explicit|| / ||explicit|| with the limit of the type.

    As in all forms of FlashAttention the softmax's part of the gradient is that of the context as it is
    kept, in 16 bits: where a query has one key, that part should cancel the rest, and leaves the rounding.
    """
    exact = given.stacked.detach().double().requires_grad_()
    expected = computed(partial(explicit, found[0].detach().double()), exact, given, p)
    for ours, theirs in zip(found, expected, strict=True):
        parts = (
            [(ours, theirs)] if ours is found[0] else zip(ours.chunk(3, 1), theirs.chunk(3, 1), strict=True)
        )
        for one, other in parts:  # the gradients of queries, keys and values
            error = float((one.detach().double() - other.detach()).norm() / other.detach().norm())
            assert error < LIMITS[given.stacked.dtype]


@pytest.mark.parametrize("columns", [16, 32, 64, 128])
@pytest.mark.parametrize(
    "lengths", [(7, 1, 9), (128, 128, 128), (200, 0, 63, 65), (512, 31, 512)], ids=lambda found: str(found)
)
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5])
def test_values_and_gradients(columns: int, lengths: tuple[int, ...], p: float) -> None:
    given = batch(lengths, columns)
    found = computed(packed, given.stacked, given, p)
    check(found, given, p)
    again = computed(packed, given.stacked, given, p)
    assert all(map(torch.equal, found, again))


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_fp16_and_padding(p: float) -> None:
    given = batch((130, 130, 130), 64, dtype=torch.float16, attended=(130, 7, 64))
    check(computed(packed, given.stacked, given, p), given, p)


@pytest.mark.parametrize("size", [64, 150, 512])
@pytest.mark.parametrize("columns", [64, 128])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_masks_have_the_bits_of_the_explicit_form(size: int, columns: int, p: float) -> None:
    """All weights are equal; values of one at a time show which keys are kept, and gradients do too."""
    given = batch((size, size), columns)
    heads = torch.arange(3, device="cuda")
    kept = torch.ops.shoal.keep_mask(dropout.fold_in(given.keys[:, None], heads), size, round(p * 65_536))
    found = torch.zeros_like(kept)
    for first in range(0, size, columns):
        shown = torch.arange(first, min(first + columns, size))
        stacked = torch.zeros_like(given.stacked)
        rows = torch.cat([shown, shown + size])
        stacked.data[rows, 6:] = torch.eye(columns, device="cuda", dtype=stacked.dtype)[rows % size - first][
            :, None
        ]
        found[..., shown] = packed(stacked, given, p)[..., : len(shown)] != 0
    assert torch.equal(found, kept)
    for first in range(0, size, columns):
        shown = torch.arange(first, min(first + columns, size))
        stacked = torch.zeros_like(given.stacked).requires_grad_()
        grad = torch.zeros(2 * size, 3, columns, device="cuda", dtype=stacked.dtype)
        for begin in (0, size):
            grad[begin + shown, :, shown - first] = 1
        packed(stacked, given, p).backward(grad)
        assert stacked.grad is not None
        by_keys = stacked.grad[:, 6:, : len(shown)] != 0  # of each key, the queries that keep it
        for begin in (0, size):
            found[begin + shown] = by_keys[begin : begin + size].permute(2, 1, 0)
    assert torch.equal(found, kept)


def test_a_sequence_without_keys_has_zeros() -> None:
    given = batch((70, 70), 64, attended=(0, 70))
    for x in computed(packed, given.stacked, given, 0.1):
        assert x[:70].eq(0).all() and x[70:].ne(0).any() and x.isfinite().all()


def test_one_graph_serves_lengths_that_change() -> None:
    def form(stacked: Tensor, given: Batch, p: float) -> Tensor:
        return packed(stacked * 1, given, p) * 1

    torch._dynamo.reset()

    def attend(stacked: Tensor, keys: Tensor, cu_seqlens: Tensor, longest: int) -> Tensor:
        return 1 * attention.packed_attention(
            None,
            stacked * 1,
            keys,
            0.1,
            cu_queries=cu_seqlens,
            cu_keys=cu_seqlens,
            max_queries=longest,
            max_keys=longest,
        )

    compiled = torch.compile(attend, fullgraph=True, dynamic=True)
    for lengths in ((64, 3), (77, 5, 20), (130,), (512, 100, 1)):
        given = batch(lengths, 64)
        eager = computed(form, given.stacked, given, 0.1)
        cu_seqlens = torch.tensor([0, *lengths], device="cuda").cumsum(0).int()
        found = computed(
            lambda stacked, given, _, at=cu_seqlens: compiled(stacked, given.keys, at, max(given.lengths)),
            given.stacked,
            given,
            0.1,
        )
        assert all(map(torch.equal, eager, found))
