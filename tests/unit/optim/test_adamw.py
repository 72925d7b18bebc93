"""AdamW against torch's and against the written formula, number by number."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from moments_formula import (
    after_steps,
    assert_close,
    groups_of,
    large_parameters,
    make_parameters,
    set_gradients,
    torchs_bits,
)
from torch import Tensor

from shoal import native
from shoal.errors import UsageError
from shoal.optim.adamw import AdamW

OPTIONS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
IMPLEMENTATIONS = ("native", "foreach")


def ulps(ours: Tensor, theirs: Tensor) -> int:
    """Return the largest distance in representable numbers."""
    a, b = (tensor.detach().numpy().view(np.int32).astype(np.int64) for tensor in (ours, theirs))
    a, b = (np.where(bits < 0, -(bits & 0x7FFFFFFF), bits) for bits in (a, b))
    return int(np.abs(a - b).max())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_formula(implementation: Any) -> None:
    params = make_parameters()
    begin = [p.detach().clone() for p in params]
    optimizer = AdamW(params, **OPTIONS, implementation=implementation)
    grads_of_step = []
    for step in range(4):
        set_gradients(params, step, scale=10.0 ** (step - 2))
        grads_of_step.append([p.grad.clone() for p in params])
        optimizer.step(grad_scale=0.5)
        assert all(torch.equal(p.grad, g) for p, g in zip(params, grads_of_step[-1], strict=True))

    def change(w: Tensor, g: Tensor, m: Tensor, v: Tensor, step: int) -> Tensor:
        unbiased = m / (1 - 0.9**step), v / (1 - 0.99**step)
        return 1e-2 * (0.1 * w + unbiased[0] / (unbiased[1].sqrt() + 1e-8))

    halved = lambda grads: [0.5 * g for g in grads]  # noqa: E731
    expected = after_steps(begin, grads_of_step, change, betas=(0.9, 0.99), prepared=halved)
    assert_close(params, expected, 2e-6)


def written_out(w: float, g: float, m: float, v: float, step: int) -> tuple[float, float, float]:
    """One number of one step, each operation rounded to fp32; a fused one is computed in double."""
    f = np.float32
    beta1, beta2 = OPTIONS["betas"]

    def fused(x: Any, y: Any, z: Any) -> Any:
        exact = math.fma(x, y, z) if hasattr(math, "fma") else float(x) * float(y) + float(z)
        return f(exact)  # a product of two fp32 numbers is exact in double; the sum is rounded twice, seldom

    m = fused(f(1 - beta1), f(f(g) - f(m)), f(m))
    v = fused(f(f(1 - beta2) * f(g)), f(g), f(f(v) * f(beta2)))
    kept = f(f(w) * f(1 - OPTIONS["lr"] * OPTIONS["weight_decay"]))
    bound = f(f(np.sqrt(v) / f(math.sqrt(1 - beta2**step))) + f(OPTIONS["eps"]))
    return f(kept + f(f(f(-(OPTIONS["lr"] / (1 - beta1**step))) * m) / bound)), m, v


def test_each_operation_is_rounded_as_written() -> None:
    params = make_parameters()
    begin = params[0].detach().flatten().tolist()
    optimizer = AdamW(params, **OPTIONS, implementation="native")
    states = [(w, 0.0, 0.0) for w in begin]
    for step in range(1, 4):
        set_gradients(params, step)
        grads = params[0].grad.flatten().tolist()
        states = [
            written_out(*state[:1], g, *state[1:], step) for state, g in zip(states, grads, strict=True)
        ]
        optimizer.step()
    found = [params[0], *(optimizer.state[params[0]][name] for name in ("exp_avg", "exp_avg_sq"))]
    for tensor, expected in zip(found, zip(*states, strict=True), strict=True):
        wanted = torch.tensor(np.array(expected, dtype=np.float32))
        assert ulps(tensor.detach().flatten(), wanted) <= 1
        assert float((tensor.detach().flatten() == wanted).double().mean()) > 0.95


@torchs_bits
def test_moments_have_torchs_bits_and_weights_are_a_few_ulps_off() -> None:
    params, theirs = large_parameters(), large_parameters()
    params = [torch.nn.Parameter(p.detach().contiguous()) for p in params]
    theirs = [torch.nn.Parameter(p.detach().contiguous()) for p in theirs]
    ours = AdamW(params, **OPTIONS, implementation="native")
    peer = torch.optim.AdamW(theirs, **OPTIONS, foreach=True)
    for step in range(5):
        set_gradients(params, step)
        set_gradients(theirs, step)
        ours.step()
        peer.step()
        for one, other in zip(params, theirs, strict=True):
            for name in ("exp_avg", "exp_avg_sq"):
                assert torch.equal(ours.state[one][name], peer.state[other][name]), (step, name)
    # an ulp of the update a step, seen against weights of 0.1
    assert_close(params, theirs, 5 * 2.0**-23)


@pytest.mark.parametrize("level", native.simd_levels())
def test_bits_depend_on_neither_threads_nor_level_nor_cuts(level: native.Level) -> None:
    def run_native(num_threads: int, level: native.Level | None, cut: int = 0) -> list[Tensor]:
        weights = [p.detach().contiguous() for p in large_parameters()]
        grads = [p.grad.contiguous() for p in large_parameters()]
        firsts, seconds = ([torch.rand(w.shape, generator=draw(k)) for w in weights] for k in (1, 2))
        given = [weights, grads, firsts, seconds]
        if cut:
            given = [[part for t in tensors for part in t.flatten().split(cut)] for tensors in given]
        norms = native.adamw_step(
            *given, steps=[3.0] * len(given[0]), learning_rate=0.1, betas=(0.9, 0.99), eps=1e-8,
            weight_decay=0.01, grad_scale=0.3, num_threads=num_threads, level=level,
        )  # fmt: skip
        if not cut:
            return [*weights, *firsts, *seconds, torch.tensor(norms, dtype=torch.float64)]
        return [torch.cat(list(tensors)) for tensors in (given[0], given[2], given[3])]

    def draw(seed: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed)

    expected = run_native(1, None)
    for num_threads in (1, 2, 5):
        assert all(torch.equal(a, b) for a, b in zip(run_native(num_threads, level), expected, strict=True))
    count = len(large_parameters())
    flat = [torch.cat([t.flatten() for t in expected[k * count : (k + 1) * count]]) for k in range(3)]
    for cut in (1_001, 8_193):
        assert all(torch.equal(a, b) for a, b in zip(run_native(2, level, cut), flat, strict=True))


def test_norms_are_those_of_gradients_and_weights_before() -> None:
    params = large_parameters()
    grads = math.sqrt(sum(float((p.grad.double() ** 2).sum()) for p in params)) * 0.5
    weights = math.sqrt(sum(float((p.detach().double() ** 2).sum()) for p in params))
    optimizer = AdamW(groups_of(params), **{**OPTIONS, "lr": 0.3})
    optimizer.step(grad_scale=0.5)
    assert optimizer.norms() == pytest.approx((grads, weights), rel=1e-6)


@pytest.mark.parametrize("option", [{"lr": -1.0}, {"betas": (1.0, 0.9)}, {"eps": math.inf}])
def test_options_out_of_range_are_refused(option: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="must be"):
        AdamW(make_parameters(), **option)
