"""Encoded images read in random order, against ``webdataset`` on the same shards.

Both sides read local tar shards of images of about 100 kB (made of random bytes: nothing is decoded), one
epoch in one thread, from files that the operating system has in memory, and hand over the bytes and the label
of each image. The peer's setting is the one that its documentation recommends for local shards: all shards
shuffled, then a buffer of 1,000 samples. Ours is the full shuffle of the training order, over all images;
the other rows read by blocks, and hand over views of the mapped shards, which a decoder can take as well.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Benchmark, peer_module
from shoal.data.images.manifest import ImageManifest
from shoal.data.images.shards import ImageShards, ImageShardWriter
from shoal.decide.order import BlockShuffle, ShuffledOrder

NUM_SHARDS = 8
NUM_IMAGES = 2000
NUM_CLASSES = 1000
BATCH = 256
BUFFER = 1000
PEER = f"webdataset, shards shuffled, buffer of {BUFFER:,}"


def write_shards(directory: Path, mean_bytes: int) -> None:
    """Write images of 0.6 to 1.4 times ``mean_bytes`` random bytes."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(mean_bytes * 6 // 10, mean_bytes * 14 // 10, NUM_IMAGES).tolist()
    infos = []
    for shard, numbers in enumerate(np.array_split(np.arange(NUM_IMAGES), NUM_SHARDS)):
        with ImageShardWriter(directory, f"train-{shard:05d}") as writer:
            for number in numbers.tolist():
                label = number % NUM_CLASSES
                writer.add(f"{number:06d}", rng.bytes(sizes[number]), label=label, width=1, height=1)
            infos.append(writer.finish())
    classes = tuple(f"{number:04d}" for number in range(NUM_CLASSES))
    ImageManifest(classes=classes, source="made up", splits={"train": tuple(infos)}).save(directory)


def ours(
    shards: ImageShards, form: Callable[[Any], Any], blocks: BlockShuffle | None = None
) -> Callable[[], float]:
    """Return what reads an epoch and returns images/s."""
    epochs = itertools.count()
    order = ShuffledOrder(num_examples=NUM_IMAGES, seed=0, blocks=blocks)

    def read() -> float:
        first = next(epochs) * NUM_IMAGES
        num_bytes = 0
        begin_s = time.perf_counter()
        for batch in range(0, NUM_IMAGES, BATCH):
            numbers = np.arange(first + batch, first + min(batch + BATCH, NUM_IMAGES))
            for index in order.examples_of(numbers)[1].tolist():
                image, label = form(shards.read(index)), int(shards.labels[index])
                num_bytes += len(image) + (label < 0)
        seconds = time.perf_counter() - begin_s
        check(num_bytes, shards)
        return NUM_IMAGES / seconds

    return read


def peers(directory: Path, shards: ImageShards) -> Callable[[], float]:
    webdataset = peer_module("webdataset")
    urls = [str(directory / f"{info.name}.tar") for info in shards.shards]

    def read() -> float:
        data = webdataset.WebDataset(urls, shardshuffle=NUM_SHARDS).shuffle(BUFFER)
        num_bytes = 0
        begin_s = time.perf_counter()
        for sample in data:
            image, label = sample["jpg"], int(sample["cls"])
            num_bytes += len(image) + (label < 0)
        seconds = time.perf_counter() - begin_s
        check(num_bytes, shards)
        return NUM_IMAGES / seconds

    return read


def check(num_bytes: int, shards: ImageShards) -> None:
    """End if an epoch did not have each image once."""
    expected = sum(len(shards.read(number)) for number in range(len(shards)))
    if num_bytes != expected:
        raise SystemExit(f"an epoch had {num_bytes:,} bytes instead of {expected:,}")


def compare(bench: Benchmark, mean_bytes: int, target: float | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_shards(Path(folder), mean_bytes)
        shards = ImageShards(folder, "train")
        peer = peers(Path(folder), shards)
        blocks = BlockShuffle(block_size=NUM_IMAGES // NUM_SHARDS // 4, blocks_in_window=4)
        rows: list[tuple[str, Callable[[], float], float | None]] = [
            ("full shuffle", ours(shards, bytes), target),
            ("by blocks", ours(shards, bytes, blocks), None),
            ("full shuffle, views", ours(shards, memoryview), None),
        ]
        for name, read, wanted in rows[:1] if bench.quick else rows:
            bench.compare(
                f"{mean_bytes // 1000} kB, {name}",
                ours=read,
                peer=peer,
                peer_name=PEER,
                unit="images/s",
                target=wanted,
                better="higher",
                warmup=1,
            )


def main() -> int:
    bench = Benchmark("image_reader")
    compare(bench, 100_000, 5.0)
    if not bench.quick:
        compare(bench, 10_000, None)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
