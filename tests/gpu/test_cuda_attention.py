"""Attention with keyed dropout in kernels, against its explicit form in fp64 on the same inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal import dropout
from shoal.decide.rng import dropout_keys

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LIMITS = {torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropout, "USES_KERNELS", True)


def inputs(
    samples: int, heads: int, size: int, columns: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[list[Tensor], Tensor]:
    """Return query, key and value, views with the heads side by side, and keys of dropout."""
    torch.manual_seed(0)
    rows = torch.randn(3, samples, size, heads, columns, device="cuda", dtype=dtype)
    keys = torch.from_numpy(dropout_keys(3, 0, np.arange(samples))).cuda()
    matrices = [x.transpose(1, 2).requires_grad_() for x in rows.unbind()]
    return matrices, dropout.row_keys(keys, (samples, heads, size))


def padding(samples: int, size: int) -> Tensor:
    lengths = torch.linspace(1, size, samples, device="cuda").long()
    return (torch.arange(size, device="cuda") < lengths[:, None])[:, None, None]


def computed(
    attention: Callable[..., Tensor], matrices: list[Tensor], keys: Tensor, p: float, mask: Tensor | None
) -> list[Tensor]:
    """Return the context and the gradients of query, key and value."""
    out = attention(*matrices, keys, p, attn_mask=mask)
    torch.manual_seed(1)
    grad = torch.randn(out.shape, device=out.device).bfloat16()  # of the same values in all types
    return [out, *torch.autograd.grad(out, matrices, grad.to(out.dtype))]


def explicit(
    kept: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    p: float,
    *,
    attn_mask: Tensor | None,
) -> Tensor:
    """Return attention whose softmax has the gradient of the context ``kept``."""
    scores = (query * query.shape[-1] ** -0.5) @ key.transpose(-2, -1)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    context: Tensor = _SoftmaxOf.apply(scores, kept, value, keys, p)
    return context


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


def check(found: list[Tensor], matrices: list[Tensor], keys: Tensor, p: float, mask: Tensor | None) -> None:
    """Compare ||found - explicit|| / ||explicit|| with the limit of the type.

    As in all forms of FlashAttention the softmax's part of the gradient is that of the context as it is
    kept, in 16 bits: where a query has one key, that part should cancel the rest, and leaves the rounding.
    """
    assert dropout._has_kernel(*matrices, mask)
    exact = [x.detach().double().requires_grad_() for x in matrices]
    expected = computed(partial(explicit, found[0].detach().double()), exact, keys, p, mask)
    errors = [
        float((ours.detach().double() - theirs.detach()).norm() / theirs.detach().norm())
        for ours, theirs in zip(found, expected, strict=True)
    ]
    assert max(errors) < LIMITS[matrices[0].dtype], errors


@pytest.mark.parametrize("columns", [16, 32, 64, 128])
@pytest.mark.parametrize("size", [7, 128, 200, 512])
@pytest.mark.parametrize("kind", ["none", "padding", "any"])
def test_values_and_gradients(columns: int, size: int, kind: str) -> None:
    matrices, keys = inputs(3, 4, size, columns)
    mask = padding(3, size) if kind == "padding" else None
    if kind == "any":
        mask = torch.rand(3, 1, 1, size, device="cuda") < 0.5
        mask[..., size // 2] = True
    found = computed(dropout.attention, matrices, keys, 0.1, mask)
    check(found, matrices, keys, 0.1, mask)
    assert found[0].stride() == matrices[0].stride()
    again = computed(dropout.attention, matrices, keys, 0.1, mask)
    assert all(map(torch.equal, found, again))


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_fp16_and_contiguous_heads(p: float) -> None:
    matrices, keys = inputs(2, 3, 130, 64, torch.float16)
    matrices = [x.detach().contiguous().requires_grad_() for x in matrices]
    check(computed(dropout.attention, matrices, keys, p, None), matrices, keys, p, None)


@pytest.mark.parametrize("size", [64, 150, 512])
@pytest.mark.parametrize("columns", [64, 128])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_masks_have_the_bits_of_the_explicit_form(size: int, columns: int, p: float) -> None:
    """All weights are equal; values of one at a time show which keys are kept, and gradients do too."""
    (_, _, values), keys = inputs(2, 3, size, columns)
    zeros = torch.zeros_like(values)
    kept = torch.ops.shoal.keep_mask(keys, size, round(p * 65_536))
    found = torch.zeros_like(kept)
    for first in range(0, size, columns):
        shown = min(columns, size - first)
        value = torch.zeros_like(values)
        value[:, :, torch.arange(first, first + shown), torch.arange(shown)] = 1
        found[..., first : first + shown] = dropout.attention(zeros, zeros, value, keys, p)[..., :shown] != 0
    assert torch.equal(found, kept)
    for first in range(0, size, columns):
        shown = min(columns, size - first)
        value = torch.zeros_like(values).requires_grad_()
        grad = torch.zeros_like(values)
        grad[:, :, torch.arange(first, first + shown), torch.arange(shown)] = 1
        dropout.attention(zeros, zeros, value, keys, p).backward(grad)
        assert value.grad is not None
        found[..., first : first + shown, :] = (value.grad[..., :shown] != 0).transpose(-1, -2)
    assert torch.equal(found, kept)


def test_a_sample_without_keys_has_zeros() -> None:
    matrices, keys = inputs(2, 2, 70, 64)
    mask = torch.arange(2, device="cuda")[:, None, None, None].expand(2, 1, 1, 70) > 0
    for x in computed(dropout.attention, matrices, keys, 0.1, mask):
        assert x[0].eq(0).all() and x[1].ne(0).any() and x.isfinite().all()


def test_one_graph_serves_lengths_that_change() -> None:
    def attention(*tensors: Tensor, p: float, attn_mask: Tensor | None) -> Tensor:
        query, key, value, keys = tensors
        return dropout.attention(query * 1, key, value, keys, p, attn_mask=attn_mask) * 1

    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, dynamic=True)
    for size in (64, 77, 130, 512):
        matrices, keys = inputs(3, 2, size, 64)
        mask = padding(3, size)
        found = computed(
            lambda *tensors, attn_mask: compiled(*tensors[:4], p=0.1, attn_mask=attn_mask),
            matrices,
            keys,
            0.1,
            mask,
        )
        check(found, matrices, keys, 0.1, mask)


def test_autocast_reaches_the_kernel() -> None:
    """Of linear layers under autocast come tensors of 16 bits."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(64, 3 * 64, device="cuda")
    x = torch.randn(2, 40, 64, device="cuda")
    keys = torch.arange(2 * 40, device="cuda").view(2, 1, 40)
    with torch.autocast("cuda", torch.bfloat16):
        matrices = list(layer(x).view(2, 40, 3, 1, 64).permute(2, 0, 3, 1, 4).unbind())
        out = dropout.attention(*matrices, keys, 0.1)
    out.float().square().sum().backward()
    assert out.dtype == torch.bfloat16 and layer.weight.grad is not None
    check(computed(dropout.attention, matrices, keys, 0.1, None), matrices, keys, 0.1, None)
