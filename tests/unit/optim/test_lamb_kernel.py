"""LAMB in Triton against its ``_foreach_`` operations in fp64: Triton's interpreter runs it on the CPU.

It runs in a process of its own, since Triton decides for the interpreter as it is imported.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.optim import lamb
from shoal.optim.lamb import Lamb

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

SHAPES = ((130, 200), (7,), (), (3, 5), (64, 2), (1,))
"""The first has two chunks, the second of which is not whole."""


def groups(dtype: torch.dtype) -> list[dict[str, Any]]:
    """Return weights of two groups; one tensor is zero, which has no ratio."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    weights[3].data.zero_()
    return [
        {"params": weights[:4], "weight_decay": 0.1, "trust_ratio": True},
        {"params": weights[4:], "weight_decay": 0.0, "trust_ratio": False},
    ]


def give_gradients(optimizer: Lamb, step: int, *, shifted: bool) -> None:
    """Give all weights gradients; ``shifted``: views that no 16 bytes are aligned to."""
    torch.manual_seed(step)
    for group in optimizer.param_groups:
        for weight in group["params"]:
            flat = torch.randn(weight.numel() + 1).to(weight.dtype)
            weight.grad = flat[int(shifted) :][: weight.numel()].view_as(weight)


def check(**options: Any) -> None:
    ours = Lamb(groups(torch.float32), 0.1, implementation="foreach", **options)
    exact = Lamb(groups(torch.float64), 0.1, implementation="foreach", **options)
    late = ours.param_groups[0]["params"][1], exact.param_groups[0]["params"][1]
    for step in range(3):
        give_gradients(ours, step, shifted=step == 1)
        give_gradients(exact, step, shifted=step == 1)
        for mine, theirs in zip(*(optimizer.param_groups for optimizer in (ours, exact)), strict=True):
            for a, b in zip(mine["params"], theirs["params"], strict=True):
                b.grad = a.grad.double()
        if step == 0:  # another number of steps from here on
            late[0].grad = late[1].grad = None
        # a scale on the device and one of the host
        scale: Tensor | float = torch.tensor(0.5) if step == 2 else 0.25
        lamb._has_kernel = lambda batch: batch.weights[0].dtype == torch.float32
        for optimizer in (ours, exact):
            optimizer.step(grad_scale=scale)  # type: ignore[arg-type]
        torch.testing.assert_close(torch.tensor(ours.norms()), torch.tensor(exact.norms()), rtol=1e-6, atol=0)
        for mine, theirs in zip(ours.state.values(), exact.state.values(), strict=True):
            for name in ("step", "exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(mine[name].double(), theirs[name].double(), rtol=2e-6, atol=1e-7)
        for mine, theirs in zip(*(optimizer.param_groups for optimizer in (ours, exact)), strict=True):
            for a, b in zip(mine["params"], theirs["params"], strict=True):
                torch.testing.assert_close(a.double(), b, rtol=2e-6, atol=1e-6)


def check_repeats() -> None:
    """Two runs have the same bits."""
    results = []
    for _ in range(2):
        optimizer = Lamb(groups(torch.float32), 0.1, implementation="foreach")
        give_gradients(optimizer, 0, shifted=False)
        optimizer.step()
        results.append([weight for group in optimizer.param_groups for weight in group["params"]])
    assert all(map(torch.equal, *results))


def check_skipped(*, dtype: torch.dtype) -> None:
    """A step that the device skips leaves no trace, in the kernel and in ``_foreach_`` operations."""
    ours, other = (Lamb(groups(torch.float32), 0.1, implementation="foreach") for _ in range(2))
    lamb._has_kernel = lambda batch: batch.weights[0].dtype == dtype
    for step, skipped in enumerate((False, True, False)):
        for optimizer in (ours, other):
            give_gradients(optimizer, step, shifted=False)
        if skipped:
            ours.param_groups[0]["params"][0].grad.fill_(torch.inf)
        ours.found_inf = torch.tensor(float(skipped))  # type: ignore[attr-defined]
        ours.step()
        if not skipped:
            other.step()
    assert [float(state["step"]) for state in ours.state.values()] == [2.0] * len(SHAPES)
    for mine, theirs in zip(ours.state.values(), other.state.values(), strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in ("step", "exp_avg", "exp_avg_sq"))
    for mine, theirs in zip(ours.param_groups, other.param_groups, strict=True):
        assert all(map(torch.equal, mine["params"], theirs["params"]))


def test_in_the_interpreter() -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    if "only 0-dimensional arrays can be converted" in done.stderr:
        pytest.skip("Triton's interpreter cannot count loops with this NumPy; Triton 3.9 can")
    assert done.returncode == 0, done.stderr


if __name__ == "__main__":
    check(max_grad_norm=1.0)
    check(bias_correction=False)
    check_repeats()
    check_skipped(dtype=torch.float32)
    check_skipped(dtype=torch.float64)
