"""Measures the training throughput of libraries' models in a plain PyTorch loop, beside which ours is shown.

    python -m benchmarks.gpu.peers bert-512 --device cuda --json peer.json

Forward, backward and our recipe's optimizer in bf16 autocast (on a CPU fp32), on one batch of made input that
lies on the device: no loader, no copies, no padding and no clipping, all of which our side has. Models that
our recipes compile by default are compiled. Those with attention are timed with cuDNN's and without.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.gpu.counts import LARGE, TINY
from shoal.models.pretraining import transformers_config
from shoal.recipes.workloads import preset_settings
from shoal.train.optimizers import build_optimizer

WARM_UP, STEPS = 4, 10
LAYERS = ("BertLayer", "T5Block")
"""Classes of transformers that are compiled one by one."""
CLASSES = 1000

Made = tuple[nn.Module, Callable[[], Tensor]]


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A library's model, and how its step is taken."""

    title: str
    unit: str
    batch: int
    make: Callable[[int, torch.device, bool], Made]
    """Returns the model and what computes its loss, for a batch size, a device and tiny sizes."""
    compiled: bool
    recipe: str
    preset: str
    """Of our side, whose optimizer is taken."""
    is_text: bool = True
    """It has attention."""


def bert(length: int) -> Callable[[int, torch.device, bool], Made]:
    """Return what makes transformers' BERT-large and its pretraining heads, a seventh masked."""

    def make(batch: int, device: torch.device, tiny: bool) -> Made:
        from transformers import BertForPreTraining

        config = transformers_config(TINY if tiny else LARGE)
        model = BertForPreTraining(config).to(device)
        tokens = 32 if tiny else length
        ids = torch.randint(config.vocab_size, (batch, tokens), device=device)
        labels = torch.where(torch.arange(tokens, device=device) % 7 == 0, ids, -100)
        is_next = torch.zeros(batch, dtype=torch.int64, device=device)
        return model, lambda: model(input_ids=ids, labels=labels, next_sentence_label=is_next).loss

    return make


def t5(batch: int, device: torch.device, tiny: bool) -> Made:
    """Return transformers' T5, of the base preset's sizes."""
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 2} if tiny else {
        "d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12
    }  # fmt: skip
    model = T5ForConditionalGeneration(T5Config(vocab_size=32_128, decoder_start_token_id=0, **sizes))
    model.to(device)
    lengths = (16, 8) if tiny else (512, 114)
    ids, labels = (torch.randint(2, 32_000, (batch, length), device=device) for length in lengths)
    return model, lambda: model(input_ids=ids, labels=labels).loss


def resnet(batch: int, device: torch.device, tiny: bool) -> Made:
    """Return torchvision's ResNet-50 on images that are on the device."""
    from torchvision.models import resnet18, resnet50

    model = (resnet18 if tiny else resnet50)().to(device, memory_format=torch.channels_last)
    side = 32 if tiny else 224
    images = torch.randn(batch, 3, side, side, device=device).to(memory_format=torch.channels_last)
    labels = torch.randint(CLASSES, (batch,), device=device)
    return model, lambda: nn.functional.cross_entropy(model(images).float(), labels)


def mask_rcnn(batch: int, device: torch.device, tiny: bool) -> Made:
    """Return torchvision's Mask R-CNN with ResNet-50 and FPN, on scenes of eight objects."""
    from torchvision.models.detection import maskrcnn_resnet50_fpn

    height, width = (64, 96) if tiny else (800, 1088)
    few = {"rpn_post_nms_top_n_train": 20, "box_batch_size_per_image": 8} if tiny else {}
    model = maskrcnn_resnet50_fpn(
        weights=None, weights_backbone=None, num_classes=81, min_size=height, max_size=width, **few
    ).to(device)
    images = list(torch.rand(batch, 3, height, width, device=device))
    corners = torch.arange(8.0) * height / 16
    boxes = torch.stack([corners, corners, corners + height / 4, corners + height / 3], dim=1)
    masks = torch.zeros(8, height, width, dtype=torch.uint8)
    for mask, (left, top, right, bottom) in zip(masks, boxes.int().tolist(), strict=True):
        mask[top:bottom, left:right] = 1
    objects = {"boxes": boxes, "labels": torch.ones(8, dtype=torch.int64), "masks": masks}
    targets = [{name: value.to(device) for name, value in objects.items()} for _ in images]
    return model, lambda: torch.stack(list(model(images, targets).values())).sum()


PEERS = {
    "bert-512": Peer(
        title="transformers' BERT", unit="sequences", batch=64, make=bert(512), compiled=True,
        recipe="bert", preset="large",
    ),
    "bert-128": Peer(
        title="transformers' BERT", unit="sequences", batch=256, make=bert(128), compiled=True,
        recipe="bert", preset="large",
    ),
    "t5": Peer(
        title="transformers' T5", unit="sequences", batch=64, make=t5, compiled=True, recipe="t5",
        preset="base",
    ),
    "resnet50": Peer(
        title="torchvision's ResNet", unit="images", batch=256, make=resnet, compiled=True, is_text=False,
        recipe="resnet50", preset="imagenet-16k",
    ),
    "mask_rcnn": Peer(
        title="torchvision's Mask R-CNN", unit="images", batch=12, make=mask_rcnn, compiled=False,
        is_text=False, recipe="mask_rcnn", preset="coco-1x",
    ),
}  # fmt: skip


def by_attention(peer: Peer, device: torch.device, *, tiny: bool) -> dict[str, float]:
    """Return the samples a second by the form of attention, which is empty where there is none."""
    if not peer.is_text:
        return {"": samples_per_s(peer, device, tiny=tiny)}
    found = {}
    for form, is_on in (("cuDNN's attention off", False), ("cuDNN's attention on", True)):
        torch.backends.cuda.enable_cudnn_sdp(is_on)
        torch.compiler.reset()  # compiled code has chosen its attention
        found[form] = samples_per_s(peer, device, tiny=tiny)
    return found


def samples_per_s(peer: Peer, device: torch.device, *, tiny: bool) -> float:
    """Train for some steps and return the samples a second after warming up."""
    torch.manual_seed(0)
    batch = 2 if tiny else peer.batch
    cuda = device.type == "cuda"
    torch.backends.cudnn.benchmark = cuda and not peer.is_text and peer.compiled
    model, loss = peer.make(batch, device, tiny)
    model.train()
    settings = preset_settings(peer.recipe, "tiny" if tiny else peer.preset).optim
    optimizer = build_optimizer(model.named_parameters(), settings, 1e-4)
    if cuda and peer.compiled:
        layers = [each for each in model.modules() if type(each).__name__ in LAYERS]
        for module in layers or [
            model
        ]:  # a whole BERT-large does not compile in 90 s; layers share their code
            module.compile()

    def steps(count: int) -> None:
        for _ in range(count):
            with torch.autocast(device.type, torch.bfloat16, enabled=cuda):
                value = loss()
            value.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        if cuda:
            torch.cuda.synchronize()

    steps(1 if tiny else WARM_UP)
    num_steps = 1 if tiny else STEPS
    begin_s = time.perf_counter()
    steps(num_steps)
    return num_steps * batch / (time.perf_counter() - begin_s)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peer", choices=tuple(PEERS))
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="show that it runs")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    args = parser.parse_args()
    peer = PEERS[args.peer]
    found = by_attention(peer, torch.device(args.device), tiny=args.tiny)
    result = {"peer": peer.title, "samples_per_s": found, "unit": f"{peer.unit}/s"}
    args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
