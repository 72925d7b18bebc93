"""LARS as MLPerf has it, and LARC, against the written formulas in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import pytorch_optimizer
import timm.optim
import torch
from moments_formula import (
    assert_close,
    groups_of,
    large_parameters,
    make_parameters,
    parameters_after,
    set_gradients,
)
from torch import Tensor, nn

from shoal import native
from shoal.errors import UsageError
from shoal.optim.lars import Lars

IMPLEMENTATIONS = ("native", "foreach")


def formula(
    weights: list[Tensor],
    grads_of_step: list[list[Tensor]],
    *,
    lr: float,
    momentum: float,
    weight_decay: float,
    eta: float = 1e-3,
    eps: float = 0.0,
    form: str = "lars",
    nesterov: bool = False,
    grad_scale: float = 1.0,
) -> list[Tensor]:
    """The update rules; one-dimensional tensors neither decay nor have a ratio."""
    after = []
    for index, begin in enumerate(weights):
        w = begin.detach().double().clone()
        m = torch.zeros_like(w)
        for grads in grads_of_step:
            g = grads[index].double() * grad_scale
            decay = weight_decay if w.ndim > 1 else 0.0
            d = g + decay * w
            ratio: Tensor | float = 1.0
            if w.ndim > 1 and form == "lars" and w.norm() > 0 and g.norm() > 0:
                ratio = eta * w.norm() / (g.norm() + decay * w.norm() + eps)
            elif w.ndim > 1 and form == "larc":
                both = w.norm() > 0 and d.norm() > 0
                ratio = min(1.0, float(eta * w.norm() / d.norm() if both else 1.0) / lr)
            inside, outside = (lr, 1.0) if form == "lars" else (1.0, lr)
            m = momentum * m + inside * ratio * d
            w = w - outside * (momentum * m + inside * ratio * d if nesterov else m)
        after.append(w)
    return after


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("form", ["lars", "larc"])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(("lr", "eta"), [(10.0, 1e-3), (0.1, 0.13)], ids=["large-rate", "clipping"])
def test_formula(implementation: Any, form: Any, nesterov: bool, lr: float, eta: float) -> None:
    params = make_parameters()
    begin = [p.detach().clone() for p in params]
    options = {"momentum": 0.9, "eta": eta, "eps": 1e-3, "form": form, "nesterov": nesterov}
    optimizer = Lars(groups_of(params, 2e-2), lr=lr, implementation=implementation, **options)
    grads_of_step = []
    for step in range(4):
        set_gradients(params, step, scale=10.0 ** (step - 2))
        grads_of_step.append([p.grad.clone() for p in params])
        optimizer.step(grad_scale=0.5)
        assert all(torch.equal(p.grad, g) for p, g in zip(params, grads_of_step[-1], strict=True))
    expected = formula(begin, grads_of_step, lr=lr, weight_decay=2e-2, grad_scale=0.5, **options)
    assert_close(params, expected, 2e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("nesterov", [False, True])
def test_timm_and_pytorch_optimizer_at_a_constant_rate(implementation: Any, nesterov: bool) -> None:
    """Their rate is outside of the momentum, which makes a difference where it changes."""
    same = {"lr": 5.0, "momentum": 0.9, "nesterov": nesterov}
    ours, with_eps = (
        parameters_after(lambda p: Lars(groups_of(p), **same, eps=eps, implementation=implementation))  # noqa: B023
        for eps in (0.0, 1e-3)
    )
    theirs = parameters_after(lambda p: timm.optim.Lars(groups_of(p), **same, eps=1e-3))
    assert_close(with_eps, theirs, 2e-6)
    theirs = parameters_after(lambda p: pytorch_optimizer.LARS(groups_of(p), **same))
    assert_close(ours, theirs, 2e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_timms_clip_form_without_decay(implementation: Any) -> None:
    """With decay its ratio has |g| + weight_decay |w| where AWS's has |g + weight_decay w|."""
    same = {"lr": 0.1, "momentum": 0.9, "nesterov": True}
    ours = parameters_after(
        lambda p: Lars(p, **same, eta=0.13, form="larc", implementation=implementation), scale=0.1
    )
    theirs = parameters_after(
        lambda p: timm.optim.Lars(p, **same, trust_coeff=0.13, eps=0.0, trust_clip=True, always_adapt=True),
        scale=0.1,
    )
    assert_close(ours, theirs, 2e-6)


@pytest.mark.parametrize("form", ["lars", "larc"])
@pytest.mark.parametrize(("implementation", "relative"), [("native", 1e-6), ("foreach", 1e-5)])
def test_formula_over_many_blocks_and_layouts(form: Any, implementation: Any, relative: float) -> None:
    """torch's fp32 norm of 600,000 elements is off by 4e-6."""
    params = large_parameters()
    begin, grads = [p.detach().clone() for p in params], [p.grad for p in params]
    options = {"lr": 0.3, "momentum": 0.9, "form": form, "nesterov": True}
    optimizer = Lars(groups_of(params, 2e-2), **options, implementation=implementation)
    optimizer.step(grad_scale=0.5)
    grad_norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in grads)) * 0.5
    weight_norm = math.sqrt(sum(float((b.double() ** 2).sum()) for b in begin))
    assert optimizer.norms() == pytest.approx((grad_norm, weight_norm), rel=relative)
    optimizer.step(grad_scale=0.5)
    assert_close(params, formula(begin, [grads] * 2, **options, weight_decay=2e-2, grad_scale=0.5), relative)
    assert params[5].is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("level", native.simd_levels())
def test_bits_depend_on_neither_threads_nor_level(level: native.Level) -> None:
    def run_native(num_threads: int, level: native.Level | None) -> list[Tensor]:
        params = [p.detach().contiguous() for p in large_parameters()]
        grads = [p.grad.contiguous() for p in large_parameters()]
        momenta = [p.detach().contiguous() for p in large_parameters(4)]
        tensors = []
        for clips in (False, True):
            norms = native.lars_step(
                params, grads, momenta, learning_rate=0.1, momentum=0.9, weight_decay=0.01, eta=0.02,
                eps=0.0, grad_scale=0.3, clips=clips, nesterov=clips, trust_ratio=True,
                num_threads=num_threads, level=level,
            )  # fmt: skip
            tensors += [torch.tensor(norms, dtype=torch.float64)]
        return [*params, *momenta, *tensors]

    expected = run_native(1, None)
    for num_threads in (1, 2, 5):
        assert all(torch.equal(a, b) for a, b in zip(run_native(num_threads, level), expected, strict=True))


def test_a_momentum_that_was_loaded_in_another_layout_goes_on() -> None:
    ours, again = large_parameters(), large_parameters()
    optimizer, loaded = Lars(ours, lr=0.3), Lars(again, lr=0.3)
    optimizer.step()
    for parameter, twin in zip(again, ours, strict=True):
        parameter.data = twin.detach().clone()
        momentum = optimizer.state[twin]["momentum_buffer"].clone(memory_format=torch.contiguous_format)
        loaded.state[parameter]["momentum_buffer"] = momentum
    optimizer.step()
    loaded.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))


def test_other_types_take_foreach_under_auto() -> None:
    half = [nn.Parameter(p.detach().to(torch.bfloat16)) for p in make_parameters()]
    params = [*half, *make_parameters(1)]
    begin = [p.detach().clone() for p in params]
    set_gradients(params, 0)
    expected = formula(begin, [[p.grad for p in params]], lr=0.1, momentum=0.9, weight_decay=0.0)
    groups = [
        {"params": [p for p in params if p.ndim > 1]},
        {"params": [p for p in params if p.ndim <= 1], "trust_ratio": False},
    ]
    Lars(groups, lr=0.1).step()
    assert_close(half, expected[: len(half)], 2.0**-7)
    assert_close(params[len(half) :], expected[len(half) :], 1e-6)
    with pytest.raises(UsageError, match="'native' takes contiguous float32"):
        Lars(half, lr=0.1, implementation="native").step()


def test_the_clip_form_is_never_faster_than_plain_momentum() -> None:
    """With a large eta the ratio is 1 everywhere: torch's SGD, Nesterov's momentum included."""
    ours, theirs = make_parameters(), make_parameters()
    larc = Lars(ours, lr=0.1, momentum=0.9, weight_decay=1e-2, eta=1e6, form="larc", nesterov=True)
    sgd = torch.optim.SGD(theirs, lr=0.1, momentum=0.9, weight_decay=1e-2, nesterov=True)
    for step in range(3):
        for params, optimizer in ((ours, larc), (theirs, sgd)):
            set_gradients(params, step)
            optimizer.step()
    assert_close(ours, theirs, 1e-6)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(("form", "ratio"), [("lars", 1.0), ("larc", 0.25)])
def test_a_zero_norm(implementation: Any, form: Any, ratio: float) -> None:
    zero, still = nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.ones(4, 4))
    zero.grad, still.grad = torch.ones(4, 4), torch.zeros(4, 4)
    Lars([zero, still], lr=4.0, form=form, implementation=implementation).step()
    assert torch.equal(zero.detach(), torch.full((4, 4), -4.0 * ratio))
    assert torch.equal(still.detach(), torch.ones(4, 4))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_rate_of_0_moves_nothing(implementation: Any) -> None:
    for form in ("lars", "larc"):
        params = make_parameters()
        begin = [p.detach().clone() for p in params]
        set_gradients(params, 0)
        Lars(params, lr=0.0, form=form, implementation=implementation).step()
        assert all(torch.equal(p.detach(), b) for p, b in zip(params, begin, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0 must be a number of at least 0"),
        ({"lr": 1.0, "momentum": 1.0}, "momentum=1.0 must be at least 0 and below 1"),
        ({"lr": 1.0, "eta": math.nan}, "eta=nan must be a number of at least 0"),
        ({"lr": 1.0, "form": "lard"}, "form='lard' must be 'lars' or 'larc'"),
    ],
)
def test_values_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Lars(make_parameters(), **options)
