"""Attention in Triton against its explicit form: Triton's interpreter runs the kernels on the CPU."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from interpreted import run_in_interpreter
from shoal import dropout
from shoal.decide.rng import dropout_keys


def kernel(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, p: float, attn_mask: Tensor | None = None
) -> Tensor:
    """Compute what `dropout.attention` does for tensors on a GPU."""
    mask = None if attn_mask is None else attn_mask[:, 0, 0]
    out: Tensor = torch.ops.shoal.attention(q, k, v, keys, mask, round(p * 65_536), q.shape[-1] ** -0.5)[0]
    return out


def inputs(
    samples: int, heads: int, queries: int, num_keys: int, columns: int, dtype: torch.dtype
) -> tuple[list[Tensor], Tensor]:
    """Return query, key and value, views with the heads side by side, and keys of dropout."""
    torch.manual_seed(0)
    matrices = [
        torch.randn(samples, size, heads, columns, dtype=dtype).transpose(1, 2).requires_grad_()
        for size in (queries, num_keys, num_keys)
    ]
    keys = torch.from_numpy(dropout_keys(3, 0, np.arange(samples)))
    return matrices, dropout.row_keys(keys, (samples, heads, queries))


def masks(samples: int, num_keys: int) -> dict[str, Tensor | None]:
    """Return masks of keys: in any places, the last one, the first ones, all; each sample has its own."""
    at = torch.arange(num_keys).expand(samples, 1, 1, num_keys)
    any_places = torch.rand(at.shape) < 0.5
    any_places[..., num_keys // 2] = True
    firsts = torch.arange(samples)[:, None, None, None] * num_keys // (2 * samples)
    return {
        "none": None,
        "any": any_places,
        "last": at >= num_keys - 1,
        "first": at <= firsts,
        "all": at >= 0,
    }


def compare(sizes: tuple[int, int, int, int, int], p: float, mask: Tensor | None, dtype: torch.dtype) -> None:
    (q, k, v), keys = inputs(*sizes, dtype)
    out = kernel(q, k, v, keys, p, mask)
    grad = torch.randn_like(out)
    found = [out, *torch.autograd.grad(out, (q, k, v), grad)]
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out = dropout.attention(*exact, keys, p, attn_mask=mask)
    expected = [out, *torch.autograd.grad(out, exact, grad.double())]
    tolerance = 2e-6 if dtype == torch.float32 else 2e-3
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == dtype
        error, size = ((x.square().mean() ** 0.5) for x in (ours.double() - theirs, theirs))
        assert error <= tolerance * max(size, 1.0), (sizes, p)
    assert found[0].stride() == q.stride() and found[1].stride() == q.stride()


def check_values() -> None:
    from shoal.attention_kernel import FORWARD

    more = FORWARD[64].queries + 2
    for size, mask in ((1, "none"), (7, "any"), (7, "last"), (70, "first"), (100, "none")):
        compare((2, 1, size, size, 16), 0.1, masks(2, size)[mask], torch.float32)
    compare((1, 2, 64, 128, 64), 0.5, None, torch.float32)
    compare((2, 1, more, 70, 64), 0.5, masks(2, 70)["all"], torch.float32)
    compare((1, 2, 70, more, 32), 0.9, masks(1, more)["any"], torch.float16)
    compare((1, 1, more, 64, 128), 0.1, None, torch.float16)


def check_masks() -> None:
    """Equal weights, and values of which each column shows 16 keys by their powers of 2."""
    size, p = 150, 0.3
    _, keys = inputs(2, 2, size, size, 16, torch.float32)
    zeros = torch.zeros(2, 2, size, 16)
    number = torch.arange(size)
    values = zeros.clone()
    values[:, :, number, number // 16] = 2.0 ** (number % 16)
    shown = kernel(zeros, zeros, values, keys, p) * size * (65_536 - round(p * 65_536)) / 65_536
    bits = shown.round().long()[..., None] >> torch.arange(16) & 1
    assert torch.equal(
        bits.flatten(-2)[..., :size].bool(), torch.ops.shoal.keep_mask(keys, size, round(p * 65_536))
    )


def check_samples_without_keys() -> None:
    (q, k, v), keys = inputs(2, 1, 70, 70, 16, torch.float32)
    mask = torch.arange(2)[:, None, None, None].expand(2, 1, 1, 70) > 0
    out = kernel(q, k, v, keys, 0.1, mask)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(x[0].eq(0).all() and x[1].ne(0).any() and x.isfinite().all() for x in (out, *grads))


def check_operators() -> None:
    """Schemas, shapes and strides of results, gradients; and no graph break for sizes that change."""
    (q, k, v), keys = inputs(1, 2, 20, 20, 16, torch.float32)
    arguments = (q, k, v, keys, torch.ones(1, 20, dtype=torch.bool), 6_554, 0.25)
    kinds = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.shoal.attention.default, arguments, test_utils=kinds)
    dropout._has_kernel = lambda *tensors: True
    compiled = torch.compile(dropout.attention, fullgraph=True, dynamic=True, backend="aot_eager")
    for size in (20, 33):
        (q, k, v), keys = inputs(2, 2, size, size, 16, torch.float32)
        mask = (torch.arange(size) < torch.tensor([[size], [7]]))[:, None, None]
        results = []
        for attention in (dropout.attention, compiled):
            out = attention(q, k, v, keys, 0.25, attn_mask=mask)
            results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
        assert all(map(torch.equal, *results))


def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


if __name__ == "__main__":
    check_values()
    check_masks()
    check_samples_without_keys()
    check_operators()
