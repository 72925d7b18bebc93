"""LANS against the written formula in float64, and itself after a restart."""

from __future__ import annotations

import copy
import io
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from shoal.errors import UsageError
from shoal.optim.lamb import Lamb, parameter_groups
from shoal.optim.lans import Lans
from shoal.train.config import OptimConfig
from shoal.train.optimizers import build_optimizer

SHAPES = [(7, 13), (5,), (3, 4, 5), (1,), (130, 129), (33,)]


def make_parameters(seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator) * 0.3) for shape in SHAPES]


def set_gradients(params: list[nn.Parameter], step: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(1000 + step)
    for parameter in params:
        parameter.grad = (torch.randn(parameter.shape, generator=generator) * scale).to(parameter.dtype)


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
    """The update rule in float64, one tensor after the other; one-dimensional tensors do not decay."""
    weights = [w.detach().double().clone() for w in weights]
    for k, w in enumerate(weights):
        m, v = torch.zeros_like(w), torch.zeros_like(w)
        wd = weight_decay if w.ndim > 1 else 0.0
        for step, grads in enumerate(grads_of_step, start=1):
            g = grads[k].double() * grad_scale
            g = g / (g.norm() + eps)
            m = betas[0] * m + (1 - betas[0]) * g
            v = betas[1] * v + (1 - betas[1]) * g**2
            root = (v / (1 - betas[1] ** step)).sqrt() + eps
            u_m = m / (1 - betas[0] ** step) / root + wd * w
            u_g = g / root + wd * w
            ratio_m, ratio_g = (
                w.norm() / u.norm() if w.norm() > 0 and u.norm() > 0 else 1 for u in (u_m, u_g)
            )
            w -= lr * (betas[0] * ratio_m * u_m + (1 - betas[0]) * ratio_g * u_g)
    return weights


def assert_close(ours: list[Tensor], theirs: list[Tensor], relative: float) -> None:
    for one, other in zip(ours, theirs, strict=True):
        scale = max(float(other.detach().abs().max()), 1e-12)
        assert float((one.detach().double() - other.detach().double()).abs().max()) <= relative * scale


@pytest.mark.parametrize("weight_decay", [0.0, 0.05])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.9)])
@pytest.mark.parametrize("grad_scale", [1.0, 1 / 128])
def test_formula(weight_decay: float, betas: tuple[float, float], grad_scale: float) -> None:
    params = make_parameters()
    begin = [p.detach().clone() for p in params]
    optimizer = Lans(groups_of(params, weight_decay), lr=0.02, betas=betas)
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


def test_parameters_without_gradient_stay_and_count_no_steps() -> None:
    params = make_parameters()
    optimizer = Lans(params, lr=0.01)
    optimizer.step()
    assert not optimizer.state
    before = params[2].detach().clone()
    set_gradients(params, 0)
    params[2].grad = None
    optimizer.step()
    assert torch.equal(params[2], before) and params[2] not in optimizer.state
    set_gradients(params, 1)
    optimizer.step()
    assert [float(optimizer.state[p]["step"]) for p in params] == [2, 2, 1, 2, 2, 2]
    lone = nn.Parameter(before.clone())
    lone.grad = params[2].grad.clone()
    Lans([lone], lr=0.01).step()
    assert torch.equal(params[2], lone)


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


def test_state_dict_continues_bit_for_bit() -> None:
    params = make_parameters()
    optimizer = Lans(groups_of(params, 0.01), lr=0.01)
    for step in range(2):
        set_gradients(params, step)
        optimizer.step()
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "params": params}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = [nn.Parameter(p.detach().clone()) for p in saved["params"]]
    resumed = Lans(groups_of(again, 0.5), lr=0.5)
    resumed.load_state_dict(saved["optimizer"])
    for both, stepped in ((params, optimizer), (again, resumed)):
        set_gradients(both, 7)
        stepped.step()
    assert all(torch.equal(a, b) for a, b in zip(params, again, strict=True))
    assert set(optimizer.state[params[0]]) == {"step", "exp_avg", "exp_avg_sq"}


def test_distributed_checkpoint_state_dict() -> None:
    def make() -> tuple[nn.Module, Lans]:
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 2))
        return model, Lans(model.parameters(), lr=0.02)

    def train(model: nn.Module, optimizer: Lans, seed: int) -> None:
        model(torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = make()
    train(model, optimizer, 0)
    fresh, fresh_optimizer = make()
    fresh.load_state_dict(model.state_dict())
    state = copy.deepcopy(get_optimizer_state_dict(model, optimizer))
    set_optimizer_state_dict(fresh, fresh_optimizer, state)
    train(model, optimizer, 9)
    train(fresh, fresh_optimizer, 9)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))


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


def test_groups_and_parameters_that_are_not_for_it() -> None:
    named = [(f"{k}.weight", p) for k, p in enumerate(make_parameters())]
    with pytest.raises(UsageError, match="LANS scales every tensor"):
        Lans(parameter_groups(named, 0.01), lr=0.1)
    sparse = nn.Embedding(4, 2, sparse=True)
    sparse(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match="LANS takes neither sparse gradients nor complex"):
        Lans(sparse.parameters(), lr=0.1).step()


def test_settings_choose_it() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    config = OptimConfig(optimizer="lans", learning_rate=0.3, beta1=0.8, eps=1e-5, weight_decay=0.07)
    optimizer = build_optimizer(model.named_parameters(), config)
    assert isinstance(optimizer, Lans)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.07, 0.0]
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 3]
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (0.3, (0.8, 0.999), 1e-5)
    assert isinstance(build_optimizer(model.named_parameters(), OptimConfig(bias_correction=False)), Lamb)
    for name in ("lans", "adamw"):
        with pytest.raises(UsageError, match=f"variant of LAMB; {name} always corrects"):
            OptimConfig(optimizer=name, bias_correction=False)
