"""Speed of a detector's operations over a batch, against torchvision's functions called image by image.

Sizes are Mask R-CNN's on COCO: images of 800 x 1216 pixels with 243,000 anchors and 7 objects on average;
2,000 proposals of each of five levels; 1,000 boxes of 80 classes; 100 masks of 28 x 28. Each operation
computes what torchvision's model does at that place; results are compared before the clock starts.
CUDA rows are added where there is a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import Benchmark, peer_module
from shoal.models.detection.masks import paste_bitmaps
from shoal.models.detection.matching import match_boxes
from shoal.models.detection.suppression import suppress

TARGET = 1.5
HEIGHT, WIDTH = 800, 1216
NUM_OBJECTS = (1, 3, 4, 7, 9, 12, 2, 20)


def made_boxes(*shape: int, random: torch.Generator, device: torch.device, around: int = 0) -> Tensor:
    """Return boxes all over the image, or in heaps around ``around`` places, as proposals are."""
    size = torch.tensor([WIDTH, HEIGHT], dtype=torch.float32)
    middle = torch.rand(*shape, 2, generator=random) * size
    sides = 16 * 2 ** (torch.rand(*shape, 2, generator=random) * 4.5)
    if around:
        which = torch.randint(around, shape, generator=random)
        noise = torch.randn(*shape, 2, generator=random) * 8
        middle = middle.reshape(-1, 2)[which] + noise
        sides = sides.reshape(-1, 2)[which] + noise.abs()
    low, high = (middle - sides / 2).clamp(min=0), torch.minimum(middle + sides / 2, size)
    return torch.cat([low, torch.maximum(high, low + 1)], dim=-1).to(device)


def anchors_of_image() -> Tensor:
    """Return torchvision's anchors for an image of this size, ``[A, 4]``."""
    utils = peer_module("torchvision.models.detection.anchor_utils")
    generator = utils.AnchorGenerator(tuple((2**n,) for n in range(5, 10)), ((0.5, 1.0, 2.0),) * 5)
    shapes = [(-(-HEIGHT // 2**n), -(-WIDTH // 2**n)) for n in range(2, 7)]
    strides = [[torch.tensor(2**n), torch.tensor(2**n)] for n in range(2, 7)]
    return torch.cat(generator.grid_anchors(shapes, strides))


def compare(
    bench: Benchmark, case: str, ours: Callable[[], Any], peer: Callable[[], Any], peer_name: str, cuda: bool
) -> None:
    def waiting(call: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            call()
            if cuda:
                torch.cuda.synchronize()

        return run

    bench.compare(
        f"{case}, {'CUDA' if cuda else f'CPU, {torch.get_num_threads()} threads'}",
        ours=waiting(ours),
        peer=waiting(peer),
        peer_name=peer_name,
        target=TARGET,
        repetitions=5,
        quick_repetitions=2,
        warmup=1,
    )


def matching(bench: Benchmark, device: torch.device, num_images: int, random: torch.Generator) -> None:
    """Anchors to objects, as in the region proposal network's loss."""
    utils, ops = peer_module("torchvision.models.detection._utils"), peer_module("torchvision.ops")
    counts = torch.tensor(NUM_OBJECTS[:num_images] * -(-num_images // len(NUM_OBJECTS)))[:num_images]
    objects = made_boxes(num_images, int(counts.max()), random=random, device=device)
    anchors, there = anchors_of_image().to(device), counts.to(device)
    own = [objects[n, :count] for n, count in enumerate(counts.tolist())]
    matcher = utils.Matcher(0.7, 0.3, allow_low_quality_matches=True)

    def ours() -> Tensor:
        return match_boxes(objects, there, anchors, high=0.7, low=0.3, allow_low_quality=True)

    def peer() -> Tensor:
        return torch.stack([matcher(ops.box_iou(boxes, anchors)) for boxes in own])

    assert torch.equal(ours(), peer())
    compare(
        bench,
        f"matching, {num_images} images x {len(anchors)} anchors",
        ours,
        peer,
        "torchvision Matcher(box_iou)",
        device.type == "cuda",
    )


def suppression(
    bench: Benchmark, device: torch.device, num_images: int, random: torch.Generator, *, proposals: bool
) -> None:
    """Proposals by level (threshold .7), or detections by class (threshold .5)."""
    ops = peer_module("torchvision.ops")
    size, groups, threshold = (2000, 5, 0.7) if proposals else (1000, 80, 0.5)
    shape = (num_images, groups, size) if proposals else (num_images, size)
    boxes = made_boxes(*shape, random=random, device=device, around=40)
    scores = torch.rand(shape, generator=random).to(device)
    classes = torch.randint(groups, shape, generator=random).to(device)
    one_class = torch.zeros(num_images * groups, size, dtype=torch.int64, device=device)
    levels = torch.arange(groups).repeat_interleave(size).to(device) if proposals else None

    def ours() -> Tensor:
        if proposals:
            return suppress(boxes.flatten(0, 1), scores.flatten(0, 1), threshold, one_class)
        return suppress(boxes, scores, threshold, classes)

    def peer() -> list[Tensor]:
        return [
            ops.batched_nms(
                boxes[n].view(-1, 4),
                scores[n].flatten(),
                classes[n] if levels is None else levels,
                threshold,
            )
            for n in range(num_images)
        ]

    num_ours, num_peer = int(ours().sum()), sum(map(len, peer()))
    # torchvision moves classes apart by adding to coordinates, which rounds them
    assert abs(num_ours - num_peer) <= 1e-3 * num_peer, (num_ours, num_peer)
    what = f"{groups} levels x {size} proposals" if proposals else f"{size} boxes of {groups} classes"
    compare(
        bench,
        f"suppression, {num_images} images x {what}",
        ours,
        peer,
        "torchvision batched_nms",
        device.type == "cuda",
    )


def pasting(bench: Benchmark, device: torch.device, num_images: int, random: torch.Generator) -> None:
    """Masks of 100 detections an image to bitmaps of the image."""
    heads = peer_module("torchvision.models.detection.roi_heads")
    counts, sizes = [100] * num_images, [(480, 640), (640, 480), (427, 640), (333, 500)] * num_images
    sizes = sizes[:num_images]
    boxes = made_boxes(100 * num_images, random=random, device=device) * 0.4
    coarse = torch.rand(100 * num_images, 1, 6, 6, generator=random).to(device)
    masks = torch.nn.functional.interpolate(coarse, size=(28, 28), mode="bicubic").clamp(0, 1)

    def ours() -> list[Tensor]:
        return paste_bitmaps(masks[:, 0], boxes, counts, sizes)

    def peer() -> list[Tensor]:
        parts = zip(torch.split(masks, counts), torch.split(boxes, counts), sizes, strict=True)
        return [heads.paste_masks_in_image(own, where, size)[:, 0] > 0.5 for own, where, size in parts]

    num_pixels = sum(int(part.sum()) for part in peer())
    num_other = sum(int((a != b).sum()) for a, b in zip(ours(), peer(), strict=True))
    assert num_other <= 1e-5 * num_pixels, (num_other, num_pixels)
    compare(
        bench,
        f"pasting, {num_images} images x 100 masks",
        ours,
        peer,
        "torchvision paste_masks_in_image",
        device.type == "cuda",
    )


def main() -> int:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--images", type=int, default=4, help="in a batch")
    options.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of both sides")
    bench = Benchmark("detection_ops", options=options)
    torch.set_num_threads(bench.args.threads)
    random = torch.Generator().manual_seed(0)
    for name in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
        device = torch.device(name)
        matching(bench, device, bench.args.images, random)
        suppression(bench, device, bench.args.images, random, proposals=True)
        suppression(bench, device, bench.args.images, random, proposals=False)
        pasting(bench, device, bench.args.images, random)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
