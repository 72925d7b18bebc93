"""Profiles training steps: time by kernel of forward and backward, and the share of the host.

python -m benchmarks.gpu.profile bert t5 --device cuda --json profile.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.gpu.counts import LARGE, packed_batch
from benchmarks.gpu.stages import MODELS
from shoal.models.encoder import packed_inputs
from shoal.models.pretraining import AlbertPretraining, BertPretraining, transformers_config
from shoal.models.resnet import new_resnet
from shoal.models.resnet_config import ResNetConfig
from shoal.models.t5 import new_t5
from shoal.models.tasks import QuestionAnswering, span_loss
from shoal.models.text_config import AlbertModelConfig, BertModelConfig, T5ModelConfig
from shoal.train.world import choose_kernels

STEPS = 3
MOST_KERNELS = 15
_TINY_SIZES: dict[str, Any] = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128,
    "vocab_size": 97,
}  # fmt: skip
TINY = BertModelConfig(**_TINY_SIZES)

Made = tuple[nn.Module, Callable[[], Tensor]]


def make(name: str, device: str, *, tiny: bool) -> Made:
    """Return a model and what computes its loss on one micro-batch."""
    if name in ("bert", "albert"):
        albert = AlbertModelConfig(**_TINY_SIZES) if tiny else AlbertModelConfig()
        bert = (BertPretraining(TINY if tiny else LARGE) if name == "bert" else AlbertPretraining(albert)).to(
            device
        )
        batch = packed_batch(
            2 if tiny else 64, 32 if tiny else 512, num_masked=4 if tiny else 76, device=device
        )

        def loss() -> Tensor:
            sums = bert(**batch)
            total: Tensor = sums[0] + sums[2]
            return total

        return bert, loss
    if name == "squad":
        return _squad(device, tiny=tiny)
    if name == "mask_rcnn":
        return _mask_rcnn(device, tiny=tiny)
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


def _squad(device: str, *, tiny: bool) -> Made:
    from transformers import BertForQuestionAnswering

    weights = BertForQuestionAnswering(transformers_config(TINY if tiny else LARGE))
    model = QuestionAnswering(weights).to(device)
    count, length = (2, 32) if tiny else (32, 384)
    batch = packed_inputs(packed_batch(count, length, num_masked=1, device=device))
    where = torch.ones(count, dtype=torch.int64, device=device)

    def loss() -> Tensor:
        start, end = model(**batch)
        return span_loss(start, end, batch, where, where)

    return model, loss


def _mask_rcnn(device: str, *, tiny: bool) -> Made:
    """Return Mask R-CNN and its loss on made objects, eight in an image."""
    from shoal.models.detection.config import MaskRCNNConfig
    from shoal.models.detection.mask_rcnn import MaskRCNN
    from shoal.recipes.mask_rcnn import mean_losses

    config = MaskRCNNConfig()
    count, height, width = 12, 800, 1088
    if tiny:
        count, height, width = 1, 64, 96
        config = replace(
            config, backbone="resnet18", anchor_sizes=(8, 16, 32, 64, 128), proposals_a_level=60,
            proposals=50, proposal_samples=40, region_samples=32,
        )  # fmt: skip
    model = MaskRCNN(config, 80).to(device)
    images = torch.randn(count, 3, height, width, device=device)
    corners = torch.arange(8.0) * height / 16
    boxes = torch.stack([corners, corners, corners + height / 4, corners + height / 3], dim=1)
    side = height // 8
    places = torch.tensor([[0, 0, 0, side, side]]).expand(count, 8, 5)
    targets = {
        "sizes": torch.tensor([[height, width]]).expand(count, 2),
        "boxes": boxes.expand(count, 8, 4),
        "labels": torch.ones(count, 8, dtype=torch.int64),
        "num_objects": torch.full((count,), 8),
        "masks": torch.ones(count, side * side, dtype=torch.uint8),
        "mask_places": places,
    }
    targets = {name: value.contiguous().to(device) for name, value in targets.items()}
    keys = torch.arange(count, device=device)
    return model, lambda: mean_losses(model(images, targets, keys)).sum()


def profile(name: str, device: str, *, tiny: bool) -> dict[str, Any]:
    """Return the time of a step and its kernels, and what the host took to queue it."""
    cuda = device == "cuda"
    if cuda:
        choose_kernels()
    model, loss = make(name, device, tiny=tiny)
    if cuda:
        part: Any = model.backbone if name == "mask_rcnn" else model
        part.compile(dynamic=name in ("bert", "squad"))

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

    num_steps = 1 if tiny else STEPS
    for _ in range(num_steps):
        step()
    begin_s = time.perf_counter()
    queued_s = sum(step() for _ in range(num_steps)) / num_steps
    step_s = (time.perf_counter() - begin_s) / num_steps
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if cuda else []
    with torch.profiler.profile(activities=activities) as measured:
        for _ in range(num_steps):
            step()

    def own_s(event: Any) -> float:
        return float(event.self_device_time_total if cuda else event.self_cpu_time_total) / 1e6 / num_steps

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
                "calls": event.count // num_steps,
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
    parser.add_argument("models", nargs="+", choices=MODELS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="show that it runs")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    args = parser.parse_args()
    found = [profile(name, args.device, tiny=args.tiny) for name in args.models]
    args.json.write_text(json.dumps({"models": found}, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
