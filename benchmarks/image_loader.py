"""Training images per second and core, against torchvision's ImageFolder and DataLoader.

Both sides begin with the same JPEGs and end with float batches of 64 × 3 × 224 × 224: decoding, a random
resized crop, mirror image, jitter of brightness, contrast, saturation (.4) and hue (.1), normalisation. Ours
also adds the lighting noise (.1) of the recipe, which torchvision does not have. Ours reads prepared shards
through ``ImageReader`` and the loader, one decoding thread a core. The peer's transforms are v2's, written
three ways (on Pillow's images; on tensors that Pillow decoded; on tensors that torchvision decoded), each
with one worker process a core and one more; what is fastest in a trial is compared. Its processes persist and
a pass is long, so that no start is measured.

The other rows are single steps in one thread, without targets: they say where the time goes.
"""

from __future__ import annotations

import io
import itertools
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, RandomSampler

from benchmarks.harness import Benchmark, peer_module
from shoal.data.images.augment import IMAGENET_MEAN, IMAGENET_STD, JITTERS, AugmentConfig, Box, draws
from shoal.data.images.folder import FolderSource
from shoal.data.images.pixels import finish
from shoal.data.images.prepare import ImagePrepareConfig, prepare_images
from shoal.data.images.reader import ImageReader
from shoal.data.images.shards import ImageShards
from shoal.data.images.transform import TrainTransform, decode, normalisation, resized
from shoal.data.loader import LoaderConfig, streamed_steps
from shoal.data.steps import DataShard, StepReader
from shoal.env.machine import num_cores
from shoal.env.settings import test_data_dir

BATCH, SIZE = 64, 224
NUM_MADE = 96
CONFIG = AugmentConfig(size=SIZE, lighting=0.1, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1)
JITTER = {name: getattr(CONFIG, name) for name in JITTERS}
TARGET = 1.8
Measured = Callable[[], float]

# torchvision's decoders warn at every call that they will go; the peer is measured without that.
warnings.filterwarnings("ignore", category=DeprecationWarning, module="torchvision")
warnings.filterwarnings("ignore", message="This DataLoader will create")


def write_made(folder: Path) -> None:
    """Write JPEGs of 640 × 480 with structure at all scales, as photographs have it; 100 to 160 kB each."""
    image = peer_module("PIL.Image")
    for number in range(NUM_MADE):
        rng = np.random.default_rng(number)
        pixels = np.full((480, 640, 3), 128.0)
        for octave in range(8):
            height, width = 480 >> (7 - octave), 640 >> (7 - octave)
            noise = rng.normal(0, 1, (max(height, 2), max(width, 2), 3)) @ rng.normal(0.4, 0.3, (3, 3))
            layer = [image.fromarray(noise[..., c].astype(np.float32)).resize((640, 480)) for c in range(3)]
            pixels += 45 * 0.8**octave * np.stack([np.asarray(channel) for channel in layer], axis=-1)
        file = folder / "train" / f"class{number % 2}" / f"{number:04d}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(file, quality=90)


def link_coco(folder: Path) -> None:
    """Make folders of two classes of COCO's images, which the tests' data has."""
    for split in ("train2017", "val2017"):
        target = folder / "train" / split
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to((test_data_dir() / "coco_tiny100" / "tiny_coco" / split).resolve())


# ---- the peer: what torchvision's documentation recommends -----------------------------------------------


def pillow_image(path: str) -> Any:
    return peer_module("torchvision.datasets.folder").pil_loader(path)


def tensor_image(path: str) -> torch.Tensor:
    io = peer_module("torchvision.io")
    image: torch.Tensor = io.decode_image(io.read_file(path), mode="RGB")
    return image


def colour_steps(first: list[Any]) -> list[Any]:
    """Return the crop, ``first``'s place in front of it or behind, and the jitter, in torchvision's order."""
    v2 = peer_module("torchvision.transforms.v2")
    crop = v2.RandomResizedCrop(SIZE, scale=CONFIG.area, ratio=CONFIG.ratio, antialias=True)
    return [*first, crop, v2.RandomHorizontalFlip(), v2.ColorJitter(**JITTER)]


def peers_ways() -> dict[str, tuple[Callable[[str], Any], Any]]:
    """Return the loader of a file and the transforms, for each way to write them."""
    v2 = peer_module("torchvision.transforms.v2")
    end = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(IMAGENET_MEAN, IMAGENET_STD)]
    return {
        "on Pillow's images": (pillow_image, v2.Compose([*colour_steps([]), v2.PILToTensor(), *end])),
        "on Pillow's, as tensors": (pillow_image, v2.Compose([*colour_steps([v2.PILToTensor()]), *end])),
        "on tensors": (tensor_image, v2.Compose([*colour_steps([]), *end])),
    }


def peer_loader(folder: Path, way: str, num_processes: int, num_images: int) -> DataLoader[Any]:
    load, transforms = peers_ways()[way]
    datasets = peer_module("torchvision.datasets")
    data = datasets.ImageFolder(str(folder / "train"), transforms, loader=load)
    return DataLoader(
        data,
        batch_size=BATCH,
        sampler=RandomSampler(data, replacement=True, num_samples=num_images),
        num_workers=num_processes,
        persistent_workers=True,
        drop_last=True,
    )


def peers(loader: DataLoader[Any], num_images: int) -> Measured:
    def read() -> float:
        return rate(num_images, (images for images, _ in loader))

    return read


def fastest_peer(folder: Path, num_images: int) -> tuple[str, DataLoader[Any]]:
    """Try each way and number of processes twice, and return the best with its name."""
    best: tuple[float, str, DataLoader[Any]] | None = None
    for way, num_processes in itertools.product(peers_ways(), (num_cores(), num_cores() + 1)):
        loader = peer_loader(folder, way, num_processes, num_images)
        read = peers(loader, num_images)
        found = max(read(), read())
        print(
            f"  trial: torchvision v2 {way}, {num_processes} processes: {found:.1f} images/s/core", flush=True
        )
        if best is None or found > best[0]:
            best = (found, f"torchvision v2 {way}, {num_processes} processes", loader)
    assert best is not None
    return best[1], best[2]


# ---- ours -------------------------------------------------------------------------------------------------


def ours(shards: ImageShards, num_images: int) -> Measured:
    reader = ImageReader(shards, TrainTransform(CONFIG), seed=0, threads=num_cores())
    passes = itertools.count()

    def read() -> float:
        steps = streamed_steps(
            StepReader(
                reader=reader,
                share=DataShard(global_batch_size=BATCH, micro_batch_size=BATCH),
                samples_consumed=next(passes) * num_images,
            ),
            LoaderConfig(),
            num_steps=num_images // BATCH,
        )
        return rate(num_images, (batch["images"] for step in steps for batch in step))

    return read


def rate(num_images: int, batches: Iterator[torch.Tensor]) -> float:
    """Return images a second and core of a pass over ``num_images``."""
    begin_s = time.perf_counter()
    count = 0
    for images in batches:
        if images.shape != (BATCH, 3, SIZE, SIZE) or images.dtype != torch.float32:
            raise SystemExit(f"a batch is {images.dtype} {tuple(images.shape)}")
        count += len(images)
    if count != num_images:
        raise SystemExit(f"a pass had {count} images instead of {num_images}")
    return num_images / (time.perf_counter() - begin_s) / num_cores()


# ---- single steps -----------------------------------------------------------------------------------------


def compare_steps(bench: Benchmark, folder: Path) -> None:
    """Add rows of the three steps, in one thread, in ms an image; the peer's are those on Pillow's images."""
    v2 = peer_module("torchvision.transforms.v2")
    image = peer_module("PIL.Image")
    functional = peer_module("torchvision.transforms.v2.functional")
    files = [path.read_bytes() for path in sorted(folder.glob("train/*/*.jpg"))[:32]]
    pixels = [decode(data) for data in files]
    pillow = [image.open(io.BytesIO(data)).convert("RGB") for data in files]
    drawn = [draws(CONFIG, (0, 0, i), p.shape[0], p.shape[1], SIZE) for i, p in enumerate(pixels)]
    crops = [resized(p, d.crop, SIZE, SIZE) for p, d in zip(pixels, drawn, strict=True)]
    out = np.empty((3, SIZE, SIZE), np.float32)
    scale, shift = normalisation(IMAGENET_MEAN, IMAGENET_STD)
    rest = v2.Compose([
        v2.RandomHorizontalFlip(), v2.ColorJitter(**JITTER), v2.PILToTensor(),
        v2.ToDtype(torch.float32, scale=True), v2.Normalize(IMAGENET_MEAN, IMAGENET_STD),
    ])  # fmt: skip
    small = [image.fromarray(crop) for crop in crops]

    def crop_pillow(whole: Any, box: Box) -> Any:
        return functional.resized_crop(whole, box.top, box.left, box.height, box.width, [SIZE, SIZE])

    steps: tuple[tuple[str, Callable[[int], Any], Callable[[int], Any]], ...] = (
        (
            "decode",
            lambda i: decode(files[i]),
            lambda i: image.open(io.BytesIO(files[i])).convert("RGB"),
        ),
        (
            "crop and resize",
            lambda i: resized(pixels[i], drawn[i].crop, SIZE, SIZE),
            lambda i: crop_pillow(pillow[i], drawn[i].crop),
        ),
        (
            "mirror, jitter, normalise",
            lambda i: finish(
                crops[i], out, scale=scale, shift=shift, flip=drawn[i].flip, jitter=drawn[i].jitter
            ),
            lambda i: rest(small[i]),
        ),
    )  # fmt: skip
    for name, our_step, peer_step in steps:
        bench.compare(
            f"  {name}, one thread",
            ours=partial(mean_ms, our_step, len(files)),
            peer=partial(mean_ms, peer_step, len(files)),
            peer_name="Pillow" if name == "decode" else "v2 on Pillow's images",
            repetitions=6,
            quick_repetitions=2,
        )


def mean_ms(step: Callable[[int], Any], count: int) -> float:
    begin_s = time.perf_counter()
    for number in range(count):
        step(number)
    return (time.perf_counter() - begin_s) / count * 1e3


def compare(bench: Benchmark, name: str, folder: Path, num_images: int) -> None:
    prepared = folder / "prepared"
    # The rest of the data that the source checks (a split for validation) is not measured.
    source = FolderSource(folder / "train", validation=0.02)
    prepare_images(source, prepared, config=ImagePrepareConfig(shard_bytes=4 << 20), progress=False)
    shards = ImageShards(prepared, "train")
    peer_name, loader = fastest_peer(folder, num_images)
    sizes = [path.stat().st_size for path in folder.glob("train/*/*.jpg")]
    bench.compare(
        f"{name}, {sum(sizes) / len(sizes) / 1e3:.0f} kB",
        ours=ours(shards, num_images),
        peer=peers(loader, num_images),
        peer_name=peer_name,
        unit="images/s/core",
        target=TARGET,
        better="higher",
        repetitions=8,
        quick_repetitions=3,
        warmup=1,
    )
    compare_steps(bench, folder)


def main() -> int:
    bench = Benchmark("image_loader")
    peer_module("torchvision")
    torch.set_num_threads(1)
    num_images = (2 if bench.quick else 8) * BATCH * num_cores()
    cases: list[tuple[str, Callable[[Path], None]]] = [("made, 640 × 480", write_made)]
    if (test_data_dir() / "coco_tiny100").is_dir():
        cases.append(("COCO, 100 images", link_coco))
    for name, write in cases:
        with tempfile.TemporaryDirectory() as directory:
            write(Path(directory))
            compare(bench, name, Path(directory), num_images)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
