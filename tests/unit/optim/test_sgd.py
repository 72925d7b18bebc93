"""SGD against torch's, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from moments_formula import assert_close, large_parameters, make_parameters, set_gradients, torchs_bits
from torch import Tensor, nn

from shoal import native
from shoal.errors import UsageError
from shoal.optim.sgd import SGD

CASES = [
    {"lr": 0.1},
    {"lr": 0.1, "weight_decay": 0.01},
    {"lr": 0.1, "momentum": 0.9},
    {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
]


@torchs_bits
@pytest.mark.parametrize("options", CASES, ids=str)
def test_the_kernel_has_torchs_bits(options: dict[str, Any]) -> None:
    params, theirs = ([nn.Parameter(p.detach().contiguous()) for p in large_parameters()] for _ in range(2))
    ours, peer = SGD(params, **options, implementation="native"), torch.optim.SGD(theirs, **options)
    for step in range(5):
        set_gradients(params, step)
        set_gradients(theirs, step)
        ours.step()
        peer.step()
    assert all(torch.equal(a, b) for a, b in zip(params, theirs, strict=True))
    if "momentum" in options:
        buffers = [(ours.state[a], peer.state[b]) for a, b in zip(params, theirs, strict=True)]
        assert all(torch.equal(a["momentum_buffer"], b["momentum_buffer"]) for a, b in buffers)
    else:
        assert not any(ours.state.values())


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize("implementation", ["native", "foreach"])
def test_torchs_steps_with_scaled_gradients(options: dict[str, Any], implementation: Any) -> None:
    params, theirs = make_parameters(), [nn.Parameter(p.detach().double()) for p in make_parameters()]
    ours, peer = SGD(params, **options, implementation=implementation), torch.optim.SGD(theirs, **options)
    for step in range(5):
        set_gradients(params, step)
        for one, other in zip(params, theirs, strict=True):
            other.grad = one.grad.double() * 0.5
        ours.step(grad_scale=0.5)
        peer.step()
    assert_close(params, theirs, 1e-6)


@pytest.mark.parametrize("level", native.simd_levels())
def test_bits_depend_on_neither_threads_nor_level_nor_cuts(level: native.Level) -> None:
    def run_native(num_threads: int, level: native.Level | None, cut: int) -> list[Tensor]:
        weights = [p.detach().flatten() for p in large_parameters()]
        grads = [p.grad.flatten() for p in large_parameters()]
        momenta = [p.detach().flatten() for p in large_parameters(4)]
        given = [[part for t in tensors for part in t.split(cut)] for tensors in (weights, grads, momenta)]
        native.sgd_step(
            *given, learning_rate=0.1, momentum=0.9, weight_decay=0.01, grad_scale=0.3, nesterov=True,
            num_threads=num_threads, level=level,
        )  # fmt: skip
        return [*weights, *momenta]

    expected = run_native(1, None, 1 << 30)
    for num_threads, cut in ((1, 1 << 30), (2, 1_001), (5, 8_193)):
        found = run_native(num_threads, level, cut)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_nesterov_needs_momentum() -> None:
    with pytest.raises(UsageError, match=r"nesterov needs a momentum above 0, not 0\.0"):
        SGD(make_parameters(), lr=0.1, nesterov=True)
