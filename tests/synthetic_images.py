"""Prepared directories of made-up images for the tests of the reading side; bytes need not be images."""

import numpy as np

from shoal.data.images.manifest import ImageManifest
from shoal.data.images.shards import ImageShardWriter
from shoal.errors import ShoalError

CLASSES = ("ant", "bee", "cat")
BAD = b"not an image"


def random_images(count, *, size=(200, 900), seed=0):
    """Contents of random lengths, none a multiple of a tar's blocks; the number stands first."""
    rng = np.random.default_rng(seed)
    return [number.to_bytes(4, "little") + rng.bytes(int(rng.integers(*size)) | 1) for number in range(count)]


def key_of(number):
    return f"{CLASSES[number % 3]}/{number:04d}"


def write_images(directory, images, *, num_shards=1, split="train", container="tar"):
    """Prepare images whose label is their number mod 3, and which are 10 + number × 20 pixels large."""
    directory.mkdir(exist_ok=True)
    shards = []
    for shard, numbers in enumerate(np.array_split(np.arange(len(images)), num_shards)):
        with ImageShardWriter(directory, f"{split}-{shard:05d}", container) as writer:
            for number in numbers.tolist():
                writer.add(
                    key_of(number), images[number], label=number % 3, width=10 + number, height=20
                )  # fmt: skip
            shards.append(writer.finish())
    ImageManifest(classes=CLASSES, source="made up", splits={split: tuple(shards)}).save(directory)
    return shards


class StampTransform:
    """Writes what it was given: the image's number, its last byte, and its key. Refuses ``BAD``."""

    def __init__(self, sizes=(8, 8)):
        self.sizes = sizes

    def size_at(self, epoch):
        return self.sizes[min(epoch, 1)]

    def __call__(self, encoded, out, key):
        encoded = bytes(encoded)
        if encoded.endswith(BAD):
            raise ShoalError("not an image that can be decoded: made so")
        seed, epoch, index = key
        out[:] = 0
        out[0, 0, :5] = int.from_bytes(encoded[:4], "little"), encoded[-1], seed, epoch, index
