"""Rows of ``comm`` about single processes: an n-way sum, LAMB and LARS against what memory allows.

The roofline of a pass is the bytes that it must read and write, at the rate of ``Tensor.copy_`` between two
tensors too large for the caches, with as many threads and in the same run. LAMB reads weights, gradients and
two moments and writes all but the gradients; LARS has one moment. What a second pass reads again counts as
cached.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from benchmarks.comm_runs import MIB
from benchmarks.harness import Benchmark, settled_ms
from benchmarks.optimizers import parameters_like
from shoal import native
from shoal.optim.lamb import Lamb, parameter_groups
from shoal.optim.lars import Lars

TARGET = 0.9


def roofline_rows(bench: Benchmark) -> None:
    """Compare each pass with the copy of as many bytes."""
    num_inputs, count = 8, 25 * MIB // 4
    inputs = [torch.randn(count) for _ in range(num_inputs)]
    out = torch.zeros(count)

    def sum_ms() -> float:
        begin_s = time.perf_counter()
        native.sum_in_rank_order(out, inputs, num_threads=torch.get_num_threads())
        return (time.perf_counter() - begin_s) * 1e3

    against_copy(bench, "sum of 8 × 25 MiB", sum_ms, (num_inputs + 1) * 4 * count)
    albert = parameters_like("albert-base")
    lamb = Lamb(parameter_groups(albert, 0.01), lr=1e-4, max_grad_norm=None)
    against_copy(bench, "LAMB, ALBERT-base", settled_ms(lamb.step), 7 * bytes_of(albert))
    resnet = parameters_like("resnet50")
    lars = Lars(parameter_groups(resnet, 5e-5), lr=1e-4)
    against_copy(bench, "LARS, ResNet-50", settled_ms(lars.step), 5 * bytes_of(resnet))


def bytes_of(named: list[tuple[str, torch.nn.Parameter]]) -> int:
    return sum(parameter.numel() * parameter.element_size() for _, parameter in named)


def against_copy(bench: Benchmark, case: str, ours: Callable[[], float], num_bytes: int) -> None:
    """Add the row of a pass that moves ``num_bytes``; a copy reads half of them and writes the other half."""
    source, target = torch.ones(num_bytes // 8), torch.zeros(num_bytes // 8)

    def copy_ms() -> float:
        begin_s = time.perf_counter()
        target.copy_(source)
        return (time.perf_counter() - begin_s) * 1e3

    bench.compare(
        f"{case}, {torch.get_num_threads()} threads", ours=ours, peer=copy_ms,
        peer_name=f"copy that moves as many bytes ({num_bytes / 1e6:.0f} MB)", target=TARGET,
    )  # fmt: skip
