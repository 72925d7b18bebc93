"""Time of a LAMB step on BERT-large on a GPU, against timm's LAMB with ``foreach``.

Both clip the global norm in their step. Each side has its own weights and gradients, on the device.

    python -m benchmarks.gpu.lamb_step --device cuda --json lamb.json
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.optim import Optimizer

from benchmarks.gpu.counts import LARGE, TINY
from benchmarks.harness import Benchmark, peer_module
from shoal.models.pretraining import BertPretraining
from shoal.optim.lamb import Lamb, parameter_groups

TARGET = 1.0
_LR = 1e-4


def named_weights(device: torch.device, *, tiny: bool) -> list[tuple[str, nn.Parameter]]:
    """Return random weights with gradients, of BERT-large's names and shapes."""
    with torch.device("meta"):
        shapes = BertPretraining(TINY if tiny else LARGE).named_parameters()
    torch.manual_seed(0)
    named = [(name, nn.Parameter(torch.randn(meta.shape, device=device) * 0.02)) for name, meta in shapes]
    for _, parameter in named:
        parameter.grad = torch.randn_like(parameter) * 1e-3
    return named


def step_ms(optimizer: Optimizer, device: torch.device) -> Callable[[], float]:
    def measure() -> float:
        begin_s = time.perf_counter()
        optimizer.step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return 1e3 * (time.perf_counter() - begin_s)

    return measure


def main() -> int:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    options.add_argument("--tiny", action="store_true", help="show that it runs")
    bench = Benchmark("gpu.lamb_step", options=options)
    device = torch.device(bench.args.device)
    sides = [parameter_groups(named_weights(device, tiny=bench.args.tiny), 0.01) for _ in range(2)]
    timm = peer_module("timm.optim")
    num_millions = sum(p.numel() for group in sides[0] for p in group["params"]) / 1e6
    bench.compare(
        f"LAMB, {num_millions:.1f} M parameters",
        ours=step_ms(Lamb(sides[0], lr=_LR, max_grad_norm=1.0), device),
        peer=step_ms(timm.Lamb(sides[1], lr=_LR, max_grad_norm=1.0, foreach=True), device),
        peer_name="timm, foreach",
        target=TARGET,
    )
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
