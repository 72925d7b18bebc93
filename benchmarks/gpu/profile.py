"""Profiles a training step: time by kernel of forward and backward, and the share of the host.

python -m benchmarks.gpu.profile bert --device cuda --json profile.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.counts import LARGE, packed_batch
from shoal.models.pretraining import BertPretraining
from shoal.models.resnet import new_resnet
from shoal.models.resnet_config import ResNetConfig
from shoal.models.t5 import new_t5
from shoal.models.text_config import BertModelConfig, T5ModelConfig
from shoal.train.world import choose_kernels

STEPS = 3
MOST_KERNELS = 15
TINY = BertModelConfig(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=128, vocab_size=97
)

Made = tuple[nn.Module, Callable[[], Tensor]]


def make(name: str, device: str, *, tiny: bool) -> Made:
    """Return a model and what computes its loss on one micro-batch."""
    if name == "bert":
        bert = BertPretraining(TINY if tiny else LARGE).to(device)
        batch = packed_batch(
            2 if tiny else 64, 32 if tiny else 512, num_masked=4 if tiny else 76, device=device
        )

        def loss() -> Tensor:
            sums = bert(**batch)
            total: Tensor = sums[0] + sums[2]
            return total

        return bert, loss
    if name == "resnet50":
        network, size, count = ("resnet18", 32, 2) if tiny else ("resnet50", 224, 256)
        resnet = new_resnet(ResNetConfig(network=network), 1000).to(device)  # type: ignore[arg-type]
        resnet.to(memory_format=torch.channels_last)
        images = torch.randn(count, 3, size, size, device=device).to(memory_format=torch.channels_last)
        labels = torch.zeros(count, dtype=torch.int64, device=device)
        return resnet, lambda: nn.functional.cross_entropy(resnet(images).float(), labels)
    config = T5ModelConfig(d_model=64, d_ff=128, num_layers=2, num_heads=2) if tiny else T5ModelConfig()
    t5 = new_t5(config, pad_id=0, end_id=1).to(device)
    lengths = {"input_ids": 16, "labels": 8} if tiny else {"input_ids": 512, "labels": 114}
    ids = {n: torch.ones(2 if tiny else 64, k, dtype=torch.int64, device=device) for n, k in lengths.items()}
    return t5, lambda: t5(**ids).loss


def profile(name: str, device: str, *, tiny: bool) -> dict[str, Any]:
    """Return the time of a step and its kernels, and what the host took to queue it."""
    cuda = device == "cuda"
    if cuda:
        choose_kernels()
    model, loss = make(name, device, tiny=tiny)
    if cuda:
        model.compile(dynamic=name == "bert")

    def step() -> float:
        model.zero_grad()
        begin_s = time.perf_counter()
        with torch.autocast(device, torch.bfloat16):
            value = loss()
        value.backward()  # type: ignore[no-untyped-call]
        queued_s = time.perf_counter() - begin_s
        if cuda:
            torch.cuda.synchronize()
        return queued_s

    for _ in range(2):
        step()
    begin_s = time.perf_counter()
    queued_s = sum(step() for _ in range(STEPS)) / STEPS
    step_s = (time.perf_counter() - begin_s) / STEPS
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if cuda else []
    with torch.profiler.profile(activities=activities) as measured:
        for _ in range(STEPS):
            step()

    def own_s(event: Any) -> float:
        return float(event.self_device_time_total if cuda else event.self_cpu_time_total) / 1e6 / STEPS

    events = sorted(measured.key_averages(), key=own_s, reverse=True)
    total_s = sum(map(own_s, events))
    return {
        "model": name,
        "step_s": step_s,
        "queued_s": queued_s,
        "device_s": total_s,
        "kernels": [
            {
                "name": event.key,
                "calls": event.count // STEPS,
                "s": own_s(event),
                "share": own_s(event) / total_s,
            }
            for event in events[:MOST_KERNELS]
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=("bert", "resnet50", "t5"))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="show that it runs")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    args = parser.parse_args()
    found = profile(args.model, args.device, tiny=args.tiny)
    args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
