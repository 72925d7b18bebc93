"""LANS against the written formula in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from moments_formula import after_steps, assert_close, make_parameters, set_gradients, trust_ratio
from torch import Tensor, nn

from shoal import native
from shoal.errors import UsageError
from shoal.optim.lamb import Lamb, parameter_groups
from shoal.optim.lans import Lans
from shoal.optim.moments import Implementation
from shoal.train.optim_config import OptimConfig
from shoal.train.optimizers import build_optimizer


def groups_of(params: list[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0},
    ]


def formula(
    weights: list[Tensor],
    grads_of_step: list[list[Tensor]],
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    grad_scale: float = 1.0,
) -> list[Tensor]:
    """The update rule; one-dimensional tensors do not decay."""

    def normalised(grads: list[Tensor]) -> list[Tensor]:
        return [g * grad_scale / ((g * grad_scale).norm() + eps) for g in grads]

    def change(w: Tensor, g: Tensor, m: Tensor, v: Tensor, step: int) -> Tensor:
        decay = (weight_decay if w.ndim > 1 else 0.0) * w
        root = (v / (1 - betas[1] ** step)).sqrt() + eps
        u_m = m / (1 - betas[0] ** step) / root + decay
        u_g = g / root + decay
        return lr * (betas[0] * trust_ratio(w, u_m) * u_m + (1 - betas[0]) * trust_ratio(w, u_g) * u_g)

    return after_steps(weights, grads_of_step, change, betas=betas, prepared=normalised)


@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.9)])
@pytest.mark.parametrize("grad_scale", [1.0, 1 / 128])
@pytest.mark.parametrize("implementation", ["native", "foreach"])
def test_formula(
    weight_decay: float, betas: tuple[float, float], grad_scale: float, implementation: Implementation
) -> None:
    params = make_parameters()
    begin = [p.detach().clone() for p in params]
    optimizer = Lans(groups_of(params, weight_decay), lr=0.02, betas=betas, implementation=implementation)
    grads_of_step = []
    for step in range(5):
        set_gradients(params, step, scale=10.0 ** (step - 2))
        grads_of_step.append([p.grad.clone() for p in params])
        optimizer.step(grad_scale=grad_scale)
        assert all(torch.equal(p.grad, g) for p, g in zip(params, grads_of_step[-1], strict=True))
    expected = formula(
        begin, grads_of_step, lr=0.02, weight_decay=weight_decay, betas=betas, grad_scale=grad_scale
    )
    assert_close(params, expected, 2e-6)
    assert min(float((p.detach() - b).abs().max()) for p, b in zip(params, begin, strict=True)) > 1e-3


def test_the_bits_depend_neither_on_threads_nor_on_the_processor() -> None:
    def stepped(num_threads: int, level: native.Level | None) -> list[Tensor]:
        random = torch.Generator().manual_seed(1)
        weights, grads, moments, squares = (
            [torch.rand(count, generator=random) for count in (70_001, 3, 16_384)] for _ in range(4)
        )
        norms = native.lans_step(
            weights, grads, moments, squares, [2.0, 2.0, 5.0],
            learning_rate=0.1, betas=(0.9, 0.999), eps=1e-6,
            weight_decay=0.01, grad_scale=0.5, num_threads=num_threads, level=level,
        )  # fmt: skip
        return [*weights, *moments, *squares, torch.tensor(norms)]

    plain = stepped(1, "portable")
    for level in native.simd_levels():
        for num_threads in (1, 4):
            assert all(map(torch.equal, stepped(num_threads, level), plain))


def test_float64_is_the_formula_to_the_last_digits() -> None:
    params = [nn.Parameter(p.detach().double()) for p in make_parameters()]
    begin = [p.detach().clone() for p in params]
    optimizer = Lans(groups_of(params, 0.01), lr=0.02)
    grads_of_step = []
    for step in range(4):
        set_gradients(params, step)
        grads_of_step.append([p.grad.clone() for p in params])
        optimizer.step()
    assert_close(params, formula(begin, grads_of_step, lr=0.02, weight_decay=0.01), 1e-13)


def test_the_size_of_a_gradient_does_not_count() -> None:
    ours, theirs = make_parameters(), make_parameters()
    for params, scale in ((ours, 1.0), (theirs, 2.0**12)):
        optimizer = Lans(groups_of(params, 0.01), lr=0.01, eps=0.0)
        for step in range(3):
            set_gradients(params, step, scale)
            optimizer.step()
    assert_close(ours, theirs, 1e-6)


def test_a_zero_norm_has_the_ratio_1() -> None:
    zero, still = nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.ones(4, 4))
    zero.grad, still.grad = torch.ones(4, 4), torch.zeros(4, 4)
    Lans([zero, still], lr=0.1, weight_decay=0.0).step()
    expected = formula([torch.zeros(4, 4)], [[torch.ones(4, 4)]], lr=0.1, weight_decay=0.0)
    assert_close([zero], expected, 1e-6)
    assert float(zero.detach().max()) == pytest.approx(-0.1, rel=1e-4)
    assert torch.equal(still, torch.ones(4, 4))


def test_norms_are_of_the_gradients_before_and_the_weights_before() -> None:
    params = make_parameters()
    weight_norm = math.sqrt(sum(float((p.detach().double() ** 2).sum()) for p in params))
    set_gradients(params, 0)
    grad_norm = math.sqrt(sum(float((p.grad.double() ** 2).sum()) for p in params)) * 0.25
    optimizer = Lans(groups_of(params, 0.01), lr=0.1)
    optimizer.step(grad_scale=0.25)
    assert optimizer.norms() == pytest.approx((grad_norm, weight_norm), rel=1e-6)


def test_types_and_layouts_may_be_mixed() -> None:
    half = [nn.Parameter(p.detach().to(torch.bfloat16)) for p in make_parameters()]
    strided, single = nn.Parameter(torch.randn(6, 8).t()), make_parameters(1)
    begin = [p.detach().clone() for p in [*half, strided, *single]]
    params = [*half, strided, *single]
    set_gradients(params, 0)
    expected = formula(begin, [[p.grad for p in params]], lr=0.01, weight_decay=0.0)
    Lans(params, lr=0.01, weight_decay=0.0).step()
    assert_close(half, expected[: len(half)], 2.0**-7)
    assert_close(params[len(half) :], expected[len(half) :], 1e-6)


def test_closure() -> None:
    params = make_parameters()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = sum((p**2).sum() for p in params)
        loss.backward()
        return loss

    optimizer = Lans(params, lr=0.01)
    expected = float(sum((p.detach() ** 2).sum() for p in params))
    assert float(optimizer.step(closure).detach()) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0 must be a number of at least 0"),
        ({"lr": 0.1, "eps": math.nan}, "eps=nan must be a number of at least 0"),
        ({"lr": 0.1, "betas": (0.9, 1.0)}, r"betas=\(0.9, 1.0\) must be at least 0 and below 1"),
    ],
)
def test_values_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Lans(make_parameters(), **options)


def test_groups_that_are_not_for_it() -> None:
    named = [(f"{k}.weight", p) for k, p in enumerate(make_parameters())]
    with pytest.raises(UsageError, match="LANS scales every tensor"):
        Lans(parameter_groups(named, 0.01), lr=0.1)


def test_settings_choose_it() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    config = OptimConfig(optimizer="lans", beta1=0.8, eps=1e-5, weight_decay=0.07)
    optimizer = build_optimizer(model.named_parameters(), config, learning_rate=0.3)
    assert isinstance(optimizer, Lans)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.07, 0.0]
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 3]
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (0.3, (0.8, 0.999), 1e-5)
    assert isinstance(build_optimizer(model.named_parameters(), OptimConfig(bias_correction=False)), Lamb)
    for name in ("lans", "adamw"):
        with pytest.raises(UsageError, match=f"bias_correction False is not an option of {name}"):
            OptimConfig(optimizer=name, bias_correction=False)
