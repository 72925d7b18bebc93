"""LARS as MLPerf has it, and LARC, against the written formulas in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from moments_formula import assert_close, groups_of, make_parameters, set_gradients
from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.optim.lars import Lars


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


@pytest.mark.parametrize("form", ["lars", "larc"])
@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(("lr", "eta"), [(10.0, 1e-3), (0.1, 0.13)], ids=["large-rate", "clipping"])
def test_formula(form: Any, nesterov: bool, lr: float, eta: float) -> None:
    params = make_parameters()
    begin = [p.detach().clone() for p in params]
    optimizer = Lars(
        groups_of(params, 2e-2), lr=lr, momentum=0.9, eta=eta, eps=1e-3, form=form, nesterov=nesterov
    )
    grads_of_step = []
    for step in range(4):
        set_gradients(params, step, scale=10.0 ** (step - 2))
        grads_of_step.append([p.grad.clone() for p in params])
        optimizer.step(grad_scale=0.5)
        assert all(torch.equal(p.grad, g) for p, g in zip(params, grads_of_step[-1], strict=True))
    expected = formula(
        begin,
        grads_of_step,
        lr=lr,
        momentum=0.9,
        weight_decay=2e-2,
        eta=eta,
        eps=1e-3,
        form=form,
        nesterov=nesterov,
        grad_scale=0.5,
    )
    assert_close(params, expected, 2e-6)


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


@pytest.mark.parametrize(("form", "ratio"), [("lars", 1.0), ("larc", 0.25)])
def test_a_zero_norm(form: Any, ratio: float) -> None:
    zero, still = nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.ones(4, 4))
    zero.grad, still.grad = torch.ones(4, 4), torch.zeros(4, 4)
    Lars([zero, still], lr=4.0, form=form).step()
    assert torch.equal(zero.detach(), torch.full((4, 4), -4.0 * ratio))
    assert torch.equal(still.detach(), torch.ones(4, 4))


def test_a_rate_of_0_moves_nothing() -> None:
    for form in ("lars", "larc"):
        params = make_parameters()
        begin = [p.detach().clone() for p in params]
        set_gradients(params, 0)
        Lars(params, lr=0.0, form=form).step()
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
