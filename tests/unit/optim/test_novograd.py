"""NovoGrad against the written formula in float64, in the paper's form and in apex's variants."""

from __future__ import annotations

import math
from typing import Any

import pytest
import pytorch_optimizer
import timm.optim
import torch
from moments_formula import (
    assert_close,
    large_parameters,
    make_parameters,
    parameters_after,
    set_gradients,
)
from torch import Tensor, nn

from shoal import native
from shoal.errors import UsageError
from shoal.optim.novograd import Novograd

IMPLEMENTATIONS = ("native", "foreach")


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
@pytest.mark.parametrize(
    ("implementation", "dtype", "relative"),
    [("native", torch.float32, 2e-6), ("foreach", torch.float32, 2e-6), ("foreach", torch.float64, 1e-13)],
)
def test_formula(
    implementation: Any,
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
    settings = {"lr": 0.01, "betas": (0.9, 0.35), "eps": 1e-3, "weight_decay": 0.1}
    optimizer = Novograd(params, **settings, **variant, implementation=implementation)
    grads_of_step = []
    for step in range(4):
        set_gradients(params, step, scale=10.0 ** (step - 2))
        grads_of_step.append([p.grad.clone() for p in params])
        optimizer.step(grad_scale=0.5)
        assert all(torch.equal(p.grad, g) for p, g in zip(params, grads_of_step[-1], strict=True))
    assert_close(params, formula(begin, grads_of_step, **settings, **variant, grad_scale=0.5), relative)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("grad_averaging", [False, True])
def test_timm_is_the_form_of_the_paper(implementation: Any, grad_averaging: bool) -> None:
    same = {"lr": 0.01, "betas": (0.9, 0.35), "weight_decay": 0.1, "grad_averaging": grad_averaging}
    ours = parameters_after(lambda p: Novograd(p, **same, implementation=implementation))
    theirs = parameters_after(lambda p: timm.optim.NvNovoGrad(p, **same))
    assert_close(ours, theirs, 2e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_pytorch_optimizer_is_the_form_of_the_paper(implementation: Any) -> None:
    """With grad_averaging it would take its first gradient as it is, unlike the others."""
    same = {"lr": 0.01, "betas": (0.9, 0.35), "weight_decay": 0.1}
    ours = parameters_after(lambda p: Novograd(p, **same, implementation=implementation))
    theirs = parameters_after(lambda p: pytorch_optimizer.NovoGrad(p, **same))
    assert_close(ours, theirs, 2e-6)


@pytest.mark.parametrize("reg_inside_moment", [False, True])
@pytest.mark.parametrize(("implementation", "relative"), [("native", 1e-6), ("foreach", 1e-5)])
def test_formula_over_many_blocks_and_layouts(
    reg_inside_moment: bool, implementation: Any, relative: float
) -> None:
    """torch's fp32 norm of 600,000 elements is off by 4e-6."""
    params = large_parameters()
    begin, grads = [p.detach().clone() for p in params], [p.grad for p in params]
    options = {"lr": 0.01, "betas": (0.9, 0.35), "eps": 1e-7, "weight_decay": 0.1, "bias_correction": True}
    variant = {"grad_averaging": False, "reg_inside_moment": reg_inside_moment}
    optimizer = Novograd(params, **options, **variant, implementation=implementation)
    for _ in range(2):
        before = [p.detach().clone() for p in params]
        optimizer.step(grad_scale=0.5)
    expected = formula(begin, [grads] * 2, **options, **variant, grad_scale=0.5)
    assert_close(params, expected, relative)
    for parameter, grad in zip(params, grads, strict=True):
        square = float((grad.double() ** 2).sum()) * 0.25
        assert float(optimizer.state[parameter]["exp_avg_sq"]) == pytest.approx(square, rel=relative)
    grad_norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in grads)) * 0.5
    weight_norm = math.sqrt(sum(float((b.double() ** 2).sum()) for b in before))
    assert optimizer.norms() == pytest.approx((grad_norm, weight_norm), rel=relative)
    assert params[5].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("level", native.simd_levels())
def test_bits_depend_on_neither_threads_nor_level(level: native.Level) -> None:
    def run_native(num_threads: int, level: native.Level | None) -> list[Tensor]:
        params = [p.detach().contiguous() for p in large_parameters()]
        grads = [p.grad.contiguous() for p in large_parameters()]
        momenta = [p.detach().contiguous() for p in large_parameters(4)]
        norm_sqs = [torch.tensor(2.0) for _ in params]
        norms = native.novograd_step(
            params, grads, momenta, norm_sqs, [3.0] * len(params), learning_rate=0.1, betas=(0.9, 0.3),
            eps=1e-6, weight_decay=0.01, grad_scale=0.3, bias_correction=True, grad_averaging=False,
            init_zero=False, reg_inside_moment=True, num_threads=num_threads, level=level,
        )  # fmt: skip
        return [*params, *momenta, *norm_sqs, torch.tensor(norms, dtype=torch.float64)]

    expected = run_native(1, None)
    for num_threads in (1, 2, 5):
        assert all(torch.equal(a, b) for a, b in zip(run_native(num_threads, level), expected, strict=True))


def test_native_kernels_refuse_what_they_cannot_take() -> None:
    weight, state = torch.ones(2, 3, 4, 5), torch.ones(())
    options = {"learning_rate": 0.1, "betas": (0.9, 0.3), "eps": 1e-6, "weight_decay": 0.0}
    last = weight.contiguous(memory_format=torch.channels_last)
    with pytest.raises(UsageError, match="lie like their weights"):
        native.novograd_step([weight], [last], [weight], [state], [1.0], **options)
    with pytest.raises(UsageError, match="without gaps"):
        native.novograd_step([weight[:, :2]], [weight[:, :2]], [weight[:, :2]], [state], [1.0], **options)
    with pytest.raises(UsageError, match="one squared norm for each of the 1 weights"):
        native.novograd_step([weight], [weight], [weight], [torch.ones(2)], [1.0], **options)
    with pytest.raises(UsageError, match="native kernels take float32"):
        native.novograd_step([weight], [weight], [weight], [state.double()], [1.0], **options)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_state_that_was_stored_goes_on(implementation: Any) -> None:
    def trained(num_steps: int, halfway: int | None = None) -> list[nn.Parameter]:
        params = make_parameters()
        optimizer = Novograd(params, lr=0.01, implementation=implementation)
        for step in range(num_steps):
            if step == halfway:
                stored = optimizer.state_dict()
                assert set(stored["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
                optimizer = Novograd(params, lr=0.01, implementation=implementation)
                optimizer.load_state_dict(stored)
            set_gradients(params, step)
            optimizer.step()
        return params

    assert all(torch.equal(a, b) for a, b in zip(trained(4), trained(4, halfway=2), strict=True))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_size_of_a_gradient_does_not_count(implementation: Any) -> None:
    ours, theirs = (
        parameters_after(
            lambda p: Novograd(p, lr=0.01, eps=0.0, implementation=implementation), scale=scale, num_steps=3
        )
        for scale in (1.0, 2.0**12)
    )
    assert_close(ours, theirs, 1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_gradient_of_0_moves_nothing(implementation: Any) -> None:
    params = make_parameters()
    begin = [p.detach().clone() for p in params]
    set_gradients(params, 0, scale=0.0)
    Novograd(params, lr=0.1, implementation=implementation).step()
    assert all(torch.equal(p.detach(), b) for p, b in zip(params, begin, strict=True))
