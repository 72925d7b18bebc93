"""NovoGrad against the written formula in float64, in the paper's form and in apex's variants."""

from __future__ import annotations

import math

import pytest
import torch
from moments_formula import assert_close, make_parameters, set_gradients
from torch import Tensor, nn

from shoal.optim.novograd import NovoGrad


def formula(
    weights: list[Tensor],
    grads_of_step: list[list[Tensor]],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    bias_correction: bool,
    grad_averaging: bool,
    grad_scale: float,
    init_zero: bool = False,
    reg_inside_moment: bool = True,
) -> list[Tensor]:
    after = []
    for index, begin in enumerate(weights):
        w = begin.detach().double().clone()
        m, v = torch.zeros_like(w), 0.0
        for step, grads in enumerate(grads_of_step, start=1):
            g = grads[index].double() * grad_scale
            square = float(g.norm()) ** 2
            v = square if step == 1 and not init_zero else betas[1] * v + (1 - betas[1]) * square
            root, unbias = math.sqrt(v), 1.0
            if bias_correction:
                root, unbias = root / math.sqrt(1 - betas[1] ** step), 1 - betas[0] ** step
            share = 1 - betas[0] if grad_averaging else 1.0
            if reg_inside_moment:
                m = betas[0] * m + share * (g / (root + eps) + weight_decay * w)
                w = w - lr * m / unbias
            else:
                m = betas[0] * m + share * g
                w = w - lr * (m / unbias / (root + eps) + weight_decay * w)
        after.append(w)
    return after


@pytest.mark.parametrize("bias_correction", [False, True])
@pytest.mark.parametrize("grad_averaging", [False, True])
@pytest.mark.parametrize("init_zero", [False, True])
@pytest.mark.parametrize("reg_inside_moment", [False, True])
@pytest.mark.parametrize(("dtype", "relative"), [(torch.float32, 2e-6), (torch.float64, 1e-13)])
def test_formula(
    bias_correction: bool,
    grad_averaging: bool,
    init_zero: bool,
    reg_inside_moment: bool,
    dtype: torch.dtype,
    relative: float,
) -> None:
    params = [nn.Parameter(p.detach().to(dtype)) for p in make_parameters()]
    begin = [p.detach().clone() for p in params]
    variant = {
        "bias_correction": bias_correction,
        "grad_averaging": grad_averaging,
        "init_zero": init_zero,
        "reg_inside_moment": reg_inside_moment,
    }
    optimizer = NovoGrad(params, lr=0.01, betas=(0.9, 0.35), eps=1e-3, weight_decay=0.1, **variant)
    grads_of_step = []
    for step in range(4):
        set_gradients(params, step, scale=10.0 ** (step - 2))
        grads_of_step.append([p.grad.clone() for p in params])
        optimizer.step(grad_scale=0.5)
        assert all(torch.equal(p.grad, g) for p, g in zip(params, grads_of_step[-1], strict=True))
    settings = {"lr": 0.01, "betas": (0.9, 0.35), "eps": 1e-3, "weight_decay": 0.1, "grad_scale": 0.5}
    assert_close(params, formula(begin, grads_of_step, **settings, **variant), relative)


def test_the_size_of_a_gradient_does_not_count() -> None:
    ours, theirs = make_parameters(), make_parameters()
    for params, scale in ((ours, 1.0), (theirs, 2.0**12)):
        optimizer = NovoGrad(params, lr=0.01, eps=0.0)
        for step in range(3):
            set_gradients(params, step, scale)
            optimizer.step()
    assert_close(ours, theirs, 1e-6)


def test_a_gradient_of_0_moves_nothing() -> None:
    params = make_parameters()
    begin = [p.detach().clone() for p in params]
    set_gradients(params, 0, scale=0.0)
    NovoGrad(params, lr=0.1).step()
    assert all(torch.equal(p.detach(), b) for p, b in zip(params, begin, strict=True))
