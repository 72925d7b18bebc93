"""Losses of tokens by formula, and the kernels against it: Triton's interpreter runs them on the CPU."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from interpreted import run_in_interpreter
from shoal.models.token_losses import IGNORED, token_losses

LABELS = (2, IGNORED, 4_100, 0, 4_095, IGNORED, 4_199)
COLUMNS = 4_200
"""More than a program of the kernels has in registers at a time."""


def by_kernels() -> Any:
    return mock.patch("shoal.models.token_losses.runs_kernels", lambda device: True)


def made(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return logits, and labels of which two are the likeliest tokens."""
    random = torch.Generator().manual_seed(2)
    logits, labels = 4 * torch.randn(len(LABELS), COLUMNS, generator=random), torch.tensor(LABELS)
    logits[[2, 3], labels[[2, 3]]] = 30.0
    logits[4, [7, 4_150]] = 25.0  # of equal ones the first is the likeliest
    logits[6, ::2] = -torch.inf
    return logits.to(dtype), labels


def computed(logits: Tensor, labels: Tensor, z_loss: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return losses, gradients of logits, and what was right."""
    logits = logits.detach().requires_grad_()
    losses, is_right = token_losses(logits, labels, z_loss=z_loss)
    weights = torch.linspace(0.5, 2.0, len(labels), dtype=losses.dtype)
    (grad,) = torch.autograd.grad(losses, logits, weights)
    return losses.detach(), grad, is_right


def test_losses_are_those_of_the_formula() -> None:
    logits, labels = made(torch.float64)
    losses, grad, is_right = computed(logits, labels, z_loss=0.1)
    z = logits.exp().sum(-1)
    for row, label in enumerate(LABELS):
        if label == IGNORED:
            assert losses[row] == 0 and not grad[row].any() and not is_right[row]
            continue
        expected = -(logits[row, label].exp() / z[row]).log() + 0.1 * z[row].log() ** 2
        torch.testing.assert_close(losses[row], expected, rtol=1e-12, atol=0)
        assert grad[row].isfinite().all() and grad[row].count_nonzero() > COLUMNS // 3
    assert is_right.tolist() == [False, False, True, True, False, False, False]


def check_values() -> None:
    for dtype, limit in ((torch.float32, 2e-6), (torch.float16, 2e-3)):
        logits, labels = made(dtype)
        for z_loss in (0.0, 0.1):
            expected = computed(logits.double(), labels, z_loss)
            with by_kernels():
                losses, grad, is_right = computed(logits, labels, z_loss)
            assert losses.dtype == torch.float32 and grad.dtype == dtype
            torch.testing.assert_close(losses.double(), expected[0], rtol=2e-6, atol=2e-6)
            torch.testing.assert_close(grad.double(), expected[1], rtol=limit, atol=limit)
            assert torch.equal(is_right, expected[2])
            assert not losses[1] and not grad[1].any() and not grad[5].any()


def check_ties_and_odd_values() -> None:
    logits, labels = made(torch.float32)
    labels[0], logits[3, 7], logits[6, 0] = COLUMNS, torch.nan, torch.inf
    _, log_sums, likeliest = torch.ops.shoal.token_losses(logits, labels, 0.0)
    assert likeliest[[1, 2, 4]].tolist() == [-1, 4_100, 7] and not log_sums[1]
    with by_kernels():
        losses, _ = token_losses(logits, labels)
        assert losses.isfinite().tolist() == [False, True, True, False, True, True, False]
        views = logits.t().contiguous().t().view(1, *logits.shape), labels[None]  # columns side by side
        torch.testing.assert_close(token_losses(*views)[0][0], losses, equal_nan=True)
        assert token_losses(logits[:0], labels[:0])[0].shape == (0,)


def check_operators() -> None:
    """Schemas, shapes and types of results on fake tensors, gradients."""
    logits, labels = made(torch.float16)
    kinds = ("test_schema", "test_faketensor", "test_autograd_registration")
    arguments = (logits.requires_grad_(), labels, 0.1)
    torch.library.opcheck(torch.ops.shoal.token_losses.default, arguments, test_utils=kinds)


def test_in_the_interpreter() -> None:
    run_in_interpreter(__file__)


TYPES = {
    **dict.fromkeys(("logits", "out"), "*bf16"),
    **dict.fromkeys(("losses", "log_sums", "grads"), "*fp32"),
    **dict.fromkeys(("labels", "likeliest"), "*i64"),
    "num_columns": "i32",
    "z_loss": "fp32",
}


@pytest.mark.parametrize("name", ["_forward", "_backward"])
def test_code_for_an_h100(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No register is kept in memory, and logits are read 16 bytes at a time."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget

    from shoal.models import token_loss_kernel

    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns where it is not set
    kernel: Any = getattr(token_loss_kernel, name)
    types = {n: TYPES[n] for n in kernel.arg_names}
    aligned = [(k,) for k, n in enumerate(types) if types[n][0] == "*" or n == "num_columns"]
    source = triton.compiler.ASTSource(
        kernel, types, {}, {place: [["tt.divisibility", 16]] for place in aligned}
    )
    options = {"num_warps": token_loss_kernel.NUM_WARPS}
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm
    assert "ld.global.v4.b32" in code["ptx"]
    (tmp_path / "cubin").write_bytes(code["cubin"])
    command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(tmp_path / "cubin")]
    usage = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout
    assert re.findall(r"(?:STACK|LOCAL):\d+", usage) == ["STACK:0", "LOCAL:0"]


if __name__ == "__main__":
    check_values()
    check_ties_and_odd_values()
    check_operators()
