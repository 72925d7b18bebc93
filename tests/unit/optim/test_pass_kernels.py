"""The optimizers' Triton kernels against their ``_foreach_`` operations in fp64, by Triton's interpreter."""

from __future__ import annotations

import importlib
import itertools
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from interpreted import run_in_interpreter
from shoal.optim.adafactor import Adafactor
from shoal.optim.kernel_optimizer import KernelOptimizer
from shoal.optim.lamb import Lamb
from shoal.optim.lans import Lans
from shoal.optim.lars import Lars
from shoal.optim.moments import Batch
from shoal.optim.novograd import Novograd

Make = Callable[[list[dict[str, Any]]], KernelOptimizer]

SHAPES = ((130, 200), (7,), (), (3, 5), (64, 2), (1,))
"""The first has two chunks, the second of which is not whole."""
MAKERS: dict[str, Make] = {
    "lamb": partial(Lamb, lr=0.1, max_grad_norm=1.0, implementation="foreach"),
    "lamb, not corrected": partial(Lamb, lr=0.1, bias_correction=False, implementation="foreach"),
    "lans": partial(Lans, lr=0.1, implementation="foreach"),
    "lars": partial(Lars, lr=0.1, eta=0.02, eps=1e-3, implementation="foreach"),
    "lars, nesterov": partial(Lars, lr=0.1, eta=0.02, nesterov=True, implementation="foreach"),
    "lars, clipped": partial(Lars, lr=0.1, eta=0.02, form="larc", implementation="foreach"),
    "lars, above its clip": partial(
        Lars, lr=0.1, eta=20.0, form="larc", nesterov=True, implementation="foreach"
    ),
    "novograd": partial(Novograd, lr=0.1, implementation="foreach"),
    "novograd, corrected": partial(
        Novograd, lr=0.1, bias_correction=True, grad_averaging=True, implementation="foreach"
    ),
    "novograd, outside": partial(
        Novograd, lr=0.1, reg_inside_moment=False, init_zero=True, implementation="foreach"
    ),
    "adafactor": partial(Adafactor, lr=0.1, implementation="foreach"),
    "adafactor, small matrices": partial(
        Adafactor, lr=0.1, eps1=1e-3, min_factored_size=2, implementation="foreach"
    ),
}
LAUNCHES = {Lamb: 3, Lans: 5, Lars: 3, Novograd: 4, Adafactor: 6}


def groups(dtype: torch.dtype, make: Make) -> list[dict[str, Any]]:
    """Return weights of two groups; one tensor is zero, which has no ratio."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    weights[3].data.zero_()
    ratios: list[dict[str, Any]] = [{}, {}]
    if make.func in (Lamb, Lars):  # type: ignore[attr-defined]
        ratios = [{"trust_ratio": True}, {"trust_ratio": False}]
    return [
        {"params": weights[:4], "weight_decay": 0.1, **ratios[0]},
        {"params": weights[4:], "weight_decay": 0.0, "lr": 0.05, **ratios[1]},
    ]


def weights_of(optimizer: KernelOptimizer) -> list[nn.Parameter]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def give_gradients(optimizer: KernelOptimizer, step: int, *, shifted: bool) -> None:
    """Give all weights gradients; ``shifted``: views that no 16 bytes are aligned to."""
    torch.manual_seed(step)
    for weight in weights_of(optimizer):
        flat = torch.randn(weight.numel() + 1).to(weight.dtype)
        weight.grad = flat[int(shifted) :][: weight.numel()].view_as(weight)


def by_kernels(dtype: torch.dtype = torch.float32) -> Any:
    """Let kernels update the parameters of this type, on the CPU."""

    def indices(self: KernelOptimizer, batch: Batch) -> Sequence[int]:
        return range(len(batch.params)) if batch.weights[0].dtype == dtype else ()

    stack = ExitStack()
    for kind in LAUNCHES:
        stack.enter_context(mock.patch.object(kind, "_kernel_indices", indices))
    return stack


def check(make: Make) -> None:
    ours, exact = (make(groups(dtype, make)) for dtype in (torch.float32, torch.float64))
    for step in range(3):
        give_gradients(ours, step, shifted=step == 1)
        for mine, theirs in zip(weights_of(ours), weights_of(exact), strict=True):
            assert mine.grad is not None
            theirs.grad = mine.grad.double()
        if step == 0:  # another number of steps from here on
            weights_of(ours)[1].grad = weights_of(exact)[1].grad = None
        # a scale on the device and one of the host
        scale: Tensor | float = torch.tensor(0.5) if step == 2 else 0.25
        with by_kernels():
            for optimizer in (ours, exact):
                optimizer.step(grad_scale=scale)  # type: ignore[arg-type]
        torch.testing.assert_close(torch.tensor(ours.norms()), torch.tensor(exact.norms()), rtol=1e-6, atol=0)
        for mine, theirs in zip(ours.state.values(), exact.state.values(), strict=True):
            for name in mine:
                torch.testing.assert_close(mine[name].double(), theirs[name].double(), rtol=2e-6, atol=2e-7)
        for mine, theirs in zip(weights_of(ours), weights_of(exact), strict=True):
            torch.testing.assert_close(mine.double(), theirs, rtol=2e-6, atol=1e-6)


def check_repeats(make: Make) -> None:
    """Two runs have the same bits, in few launches."""
    from shoal.optim import pass_kernels

    results = []
    with by_kernels():
        for _ in range(2):
            optimizer = make(groups(torch.float32, make))
            give_gradients(optimizer, 0, shifted=False)
            with mock.patch.object(pass_kernels, "_on", wraps=pass_kernels._on) as launched:
                optimizer.step()
            results.append(weights_of(optimizer))
    assert all(map(torch.equal, *results))
    assert launched.call_count == LAUNCHES[type(optimizer)] <= 6


def check_skipped(make: Make, dtype: torch.dtype) -> None:
    """A step that the device skips leaves no trace, in the kernels and in ``_foreach_`` operations."""
    ours, other = (make(groups(torch.float32, make)) for _ in range(2))
    for step, skipped in enumerate((True, False, True, False)):
        for optimizer in (ours, other):
            give_gradients(optimizer, step, shifted=False)
        if skipped:
            weights_of(ours)[0].grad.fill_(torch.inf)  # type: ignore[union-attr]
        ours.found_inf = torch.tensor(float(skipped))  # type: ignore[attr-defined]
        with by_kernels(dtype):
            ours.step()
            if not skipped:
                other.step()
    for mine, theirs in zip(ours.state.values(), other.state.values(), strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        assert float(mine.get("step", 2.0)) == 2.0
    assert all(map(torch.equal, weights_of(ours), weights_of(other)))


@pytest.mark.parametrize(
    "kind",
    [
        "lamb",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("lans", "lars", "novograd", "adafactor")),
    ],
)
def test_in_the_interpreter(kind: str) -> None:
    run_in_interpreter(__file__, kind)


@pytest.mark.slow
def test_kernels_are_compiled_for_an_h100_and_keep_their_registers() -> None:
    compiler = importlib.import_module("triton.compiler")
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    from shoal.optim import adafactor_kernel, pass_kernels

    types = {"table": "*i64", "tensors": "*i32", "first": "*i32"}
    jitted = [each for module in (pass_kernels, adafactor_kernel) for each in vars(module).values()]
    kernels = {each for each in jitted if "scale" in getattr(each, "arg_names", ())}
    assert len(kernels) == 6 + 5
    for kernel, value in itertools.product(kernels, (True, False)):
        flags = {name: value for name in kernel.arg_names if name.isupper()}
        signature = {
            name: "constexpr" if name in flags else types.get(name, "*fp32") for name in kernel.arg_names
        }
        source = compiler.ASTSource(kernel, signature, flags)
        found = compiler.compile(source, target=target, options={"num_warps": 8, "enable_fp_fusion": True})
        assert found.asm["cubin"][:4] == b"\x7fELF"
        assert ".local" not in found.asm["ptx"]


if __name__ == "__main__":
    kind = sys.argv[1]
    for name, make in MAKERS.items():
        if name.startswith(kind):
            check(make)
    check_repeats(MAKERS[kind])
    check_skipped(MAKERS[kind], torch.float32)
    check_skipped(MAKERS[kind], torch.float64)
