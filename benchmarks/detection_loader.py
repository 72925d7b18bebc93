"""Training images with boxes and masks per second and core, against torchvision's loader.

Both sides begin with the same JPEGs of COCO and the same annotations, and end with what a detector trains on:
the image resized to a shorter side of 800 pixels (a longer one of at most 1333), mirrored at random,
normalised, float32, and the boxes, labels and masks of its objects moved along. (Crowds are left out of the
annotations for both; torchvision would rasterise them.)

The peer is ``CocoDetection`` as torchvision's references use it: wrapped for transforms v2, in a
``DataLoader``, mirrored before it is resized, with ``SanitizeBoundingBoxes``. The references resize within
the model; here that is a transform, so that both sides do the same. (Some boxes that end at the image's edge
are dropped by ``SanitizeBoundingBoxes`` then: rounding has moved them beyond it.) It is written two ways (on
Pillow's images; on tensors), each with one worker process a core and one more; what is fastest in a trial is
compared. Ours also pads the images of a batch to one size, which the peer leaves to the model. Its masks are
bitmaps of whole images, ours of the parts that hold them.

Ours reads prepared shards through ``DetectionReader`` and the loader, in the order by aspect groups, with one
decoding thread a core.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import tempfile
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler

from benchmarks.harness import Benchmark, Measured, peer_module
from shoal.data.coco.augment import DetectionAugmentConfig
from shoal.data.coco.reader import DetectionReader
from shoal.data.coco.source import CocoSource, CocoSplit, prepare_coco, read_categories
from shoal.data.coco.transform import DetectionTransform
from shoal.data.images.augment import IMAGENET_MEAN, IMAGENET_STD
from shoal.data.images.prepare import ImagePrepareConfig
from shoal.data.images.shards import ImageShards
from shoal.data.loader import LoaderConfig, streamed_steps
from shoal.data.steps import DataShard, StepReader
from shoal.decide.bucketing import GroupedOrder, aspect_groups
from shoal.env.machine import num_cores
from shoal.env.settings import test_data_dir

BATCH = 4
CONFIG = DetectionAugmentConfig(shorter=(800,), longer=1333, flip=0.5)
TARGET = 1.5

warnings.filterwarnings("ignore", message="This DataLoader will create")


# ---- the peer ---------------------------------------------------------------------------------------------


def peers_ways() -> dict[str, Any]:
    """Return the transforms of an image and its target, for each way to write them."""
    v2 = peer_module("torchvision.transforms.v2")
    moved = [v2.RandomHorizontalFlip(CONFIG.flip), v2.Resize(CONFIG.shorter[0], max_size=CONFIG.longer)]
    end = [
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(IMAGENET_MEAN, IMAGENET_STD),
        v2.SanitizeBoundingBoxes(),
    ]
    return {
        "on Pillow's images": v2.Compose([*moved, v2.ToImage(), *end]),
        "on tensors": v2.Compose([v2.ToImage(), *moved, *end]),
    }


def as_lists(examples: list[Any]) -> tuple[Any, ...]:
    return tuple(zip(*examples, strict=True))


def peer_loader(split: CocoSplit, way: str, num_processes: int, num_images: int) -> DataLoader[Any]:
    datasets = peer_module("torchvision.datasets")
    peer_module("pycocotools.coco")
    with contextlib.redirect_stdout(io.StringIO()):
        data = datasets.CocoDetection(split.images, split.annotations, transforms=peers_ways()[way])
    data.ids = [number for number in data.ids if data.coco.getAnnIds(number)]
    keys = ("boxes", "labels", "masks", "image_id")
    data = datasets.wrap_dataset_for_transforms_v2(data, target_keys=keys)
    return DataLoader(
        data,
        batch_size=BATCH,
        sampler=RandomSampler(data, replacement=True, num_samples=num_images),
        num_workers=num_processes,
        collate_fn=as_lists,
        persistent_workers=True,
        drop_last=True,
    )


def peers(loader: DataLoader[Any], num_images: int) -> Measured:
    def batches() -> Iterable[list[tuple[Any, int, int]]]:
        for images, targets in loader:
            yield [
                (image, len(target["boxes"]), len(target["masks"]))
                for image, target in zip(images, targets, strict=True)
            ]

    return lambda: rate(num_images, batches())


def fastest_peer(split: CocoSplit, num_images: int) -> tuple[str, Measured]:
    """Try each way and number of processes twice, and return the best with its name."""
    found = []
    for way, num_processes in itertools.product(peers_ways(), (num_cores(), num_cores() + 1)):
        name = f"CocoDetection, v2 {way}, {num_processes} processes"
        read = peers(peer_loader(split, way, num_processes, num_images), num_images)
        found.append((max(rate_of(read), rate_of(read)), name, read))
        print(f"  trial: {name}: {found[-1][0]:.1f} images/s/core", flush=True)
    _, name, read = max(found, key=lambda one: one[0])
    return name, read


def rate_of(read: Measured) -> float:
    return read() or 0.0


# ---- ours -------------------------------------------------------------------------------------------------


def ours(directory: Path, num_images: int) -> Measured:
    shards = ImageShards(directory, "train")
    reader = DetectionReader(
        shards, DetectionTransform(CONFIG), read_categories(directory), seed=0, threads=num_cores()
    )
    order = GroupedOrder(aspect_groups(shards.sizes), BATCH, seed=0)
    passes = itertools.count()

    def batches() -> Iterable[list[tuple[Any, int, int]]]:
        steps = streamed_steps(
            StepReader(
                reader=reader,
                share=DataShard(global_batch_size=BATCH, micro_batch_size=BATCH),
                samples_consumed=next(passes) * num_images,
                order=order,
            ),
            LoaderConfig(),
            num_steps=num_images // BATCH,
        )
        for step in steps:
            for batch in step:
                num_masks = (batch["mask_places"][:, :, 3] > 0).sum(dim=1).tolist()
                yield list(zip(batch["images"], batch["num_objects"].tolist(), num_masks, strict=True))

    return lambda: rate(num_images, batches())


def rate(num_images: int, batches: Iterable[list[tuple[Any, int, int]]]) -> float:
    """Return images a second and core of a pass over ``num_images``: (image, its boxes, its masks)."""
    begin_s = time.perf_counter()
    count = num_objects = 0
    for batch in batches:
        for image, num_boxes, num_masks in batch:
            if image.dtype != torch.float32 or max(image.shape[1:]) < CONFIG.shorter[0]:
                raise SystemExit(f"an image is {image.dtype} {tuple(image.shape)}")
            if num_boxes != num_masks:
                raise SystemExit(f"an image has {num_boxes} boxes and {num_masks} masks")
            count += 1
            num_objects += num_boxes
    if count != num_images or num_objects < count:
        raise SystemExit(f"a pass had {count} images instead of {num_images}, and {num_objects} objects")
    return num_images / (time.perf_counter() - begin_s) / num_cores()


def without_crowds(folder: Path) -> CocoSplit:
    """Return the training images of the tests' data, with annotations of single objects only.

    Raises:
        SystemExit: the data are not there.
    """
    coco = test_data_dir() / "coco_tiny100" / "tiny_coco"
    if not coco.is_dir():
        raise SystemExit(f"{coco} does not exist; name the tests' data with SHOAL_TEST_DATA")
    tree = json.loads((coco / "annotations" / "instances_train2017.json").read_bytes())
    tree["annotations"] = [one for one in tree["annotations"] if not one["iscrowd"]]
    annotations = folder / "instances.json"
    annotations.write_text(json.dumps(tree), encoding="utf-8")
    return CocoSplit(coco / "train2017", annotations)


def main() -> int:
    bench = Benchmark("detection_loader")
    torch.set_num_threads(1)
    num_images = (8 if bench.quick else 24) * BATCH * num_cores()
    with tempfile.TemporaryDirectory() as name:
        split = without_crowds(Path(name))
        prepared = Path(name) / "prepared"
        prepare_coco(CocoSource(split), prepared, config=ImagePrepareConfig())
        peer_name, peer = fastest_peer(split, num_images)
        bench.compare(
            "COCO, 50 images, shorter side 800",
            ours=ours(prepared, num_images),
            peer=peer,
            peer_name=peer_name,
            unit="images/s/core",
            target=TARGET,
            better="higher",
            repetitions=8,
            quick_repetitions=3,
            warmup=1,
        )
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
