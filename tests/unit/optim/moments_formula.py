"""Shared by the tests of the optimizers: parameters, gradients, and the moments' formula in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.optim.lamb import parameter_groups

SHAPES = [(7, 13), (5,), (3, 4, 5), (1,), (130, 129), (33,)]

torchs_bits = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT",
    reason="torch's bits are others where its kernels have no fused multiply-add",
)
"""Marks tests that compare bits with torch's: its kernels for AVX2 and newer fuse, as shoal's do on any."""

Change = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]
"""Weights, gradient, first and second moment, and the number of the step to what is taken off the weights."""


def make_parameters(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator) * 0.3) for shape in SHAPES]


def set_gradients(params: list[nn.Parameter], step: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for parameter in params:
        parameter.grad = (torch.randn(parameter.shape, generator=generator) * scale).to(parameter.dtype)


def groups_of(params: list[nn.Parameter], weight_decay: float = 0.01) -> list[dict[str, Any]]:
    names = [f"layer{k}.{'weight' if p.ndim > 1 else 'bias'}" for k, p in enumerate(params)]
    return parameter_groups(zip(names, params, strict=True), weight_decay)


def parameters_after(
    make: Callable[[list[nn.Parameter]], torch.optim.Optimizer], *, scale: float = 1.0, num_steps: int = 6
) -> list[nn.Parameter]:
    """Return the parameters after steps of the optimizer, each with gradients of its own."""
    params = make_parameters()
    optimizer = make(params)
    for step in range(num_steps):
        set_gradients(params, step, scale)
        optimizer.step()
    return params


def large_parameters(seed: int = 3) -> list[nn.Parameter]:
    """Return parameters of many blocks and waves of the native kernels with gradients, some channels-last."""
    generator = torch.Generator().manual_seed(seed)
    params = []
    for shape in [(100_003,), (16_384,), (40, 41), (800, 750), (7,), (64, 32, 3, 3), (9, 5, 1, 1), (16_385,)]:
        form = torch.channels_last if len(shape) == 4 else torch.contiguous_format
        weight, grad = (torch.randn(shape, generator=generator) * size for size in (0.1, 1.0))
        params.append(nn.Parameter(weight.contiguous(memory_format=form)))
        params[-1].grad = grad
    return params


def after_steps(
    weights: list[Tensor],
    grads_of_step: list[list[Tensor]],
    change: Change,
    *,
    betas: tuple[float, float],
    prepared: Callable[[list[Tensor]], list[Tensor]],
) -> list[Tensor]:
    """Return the weights after these steps, one tensor after the other; ``prepared`` gradients are taken."""
    weights = [w.detach().double().clone() for w in weights]
    moments = [(torch.zeros_like(w), torch.zeros_like(w)) for w in weights]
    for step, grads in enumerate(grads_of_step, start=1):
        ready = prepared([g.double() for g in grads])
        for w, g, (m, v) in zip(weights, ready, moments, strict=True):
            m.copy_(betas[0] * m + (1 - betas[0]) * g)
            v.copy_(betas[1] * v + (1 - betas[1]) * g**2)
            w -= change(w, g, m, v, step)
    return weights


def trust_ratio(w: Tensor, u: Tensor) -> Tensor | float:
    return w.norm() / u.norm() if w.norm() > 0 and u.norm() > 0 else 1.0


def assert_close(ours: list[Tensor], theirs: list[Tensor], relative: float) -> None:
    """Compare by the largest difference of a tensor relative to its largest element."""
    for one, other in zip(ours, theirs, strict=True):
        scale = max(float(other.detach().abs().max()), 1e-12)
        assert float((one.detach().double() - other.detach().double()).abs().max()) <= relative * scale
