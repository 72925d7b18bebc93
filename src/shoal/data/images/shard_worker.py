"""Writes one image shard: reads its images where they are stored, re-encodes and appends them.

The images of a shard are a contiguous range of positions in one permutation of the split, so the number of a
shard determines them. A record ``records/SPLIT-NNNNN.json`` is written after the shard; a shard with a record
is finished and not touched again.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from shoal.data.atomic_io import write_atomically
from shoal.data.images.headers import BadImage
from shoal.data.images.manifest import ImageShardInfo
from shoal.data.images.reencode import MAX_IMAGE_BYTES, check_pillow, reencode
from shoal.data.images.shards import ImageShardWriter
from shoal.data.images.sources import TRAIN, VALIDATION, Listing, SourceImage
from shoal.data.prepare_dir import OVERWRITE, RECORDS, check_finished, read_record
from shoal.data.process_pool import advance
from shoal.decide.order import shuffled
from shoal.errors import ShoalError, UsageError

if TYPE_CHECKING:
    from shoal.data.images.prepare import ImagePrepareConfig

OnBad = Literal["refuse", "skip"]
SPLITS = (TRAIN, VALIDATION)

_EPOCH = 1 << 32
"""Epoch numbers of the permutations of preparation, one per split, that no training reaches."""


class ShardTask(NamedTuple):
    """Shard ``number`` of ``num_shards`` of a split."""

    split: str
    number: int
    num_shards: int

    @property
    def name(self) -> str:
        return f"{self.split}-{self.number:05d}"


@dataclass(frozen=True, kw_only=True)
class ShardResult:
    """A finished shard, ``None`` if none of its images could be read, and (name, reason) of unreadable
    ones."""

    task: ShardTask
    shard: ImageShardInfo | None
    skipped: tuple[tuple[str, str], ...]


def start_worker(out: Path, config: ImagePrepareConfig) -> None:
    """Store what all shards of a preparation share, once per process."""
    global _out, _config, _listings
    check_pillow()
    _out, _config, _listings = out, config, {}


def write_shard(task: ShardTask) -> ShardResult:
    """Write a shard and its record.

    Raises:
        UsageError: an image cannot be used, and bad images are refused.
        ShoalError: a source can no longer be read, the disk is full.
    """
    if task.split not in _listings:
        _listings[task.split] = Listing(_out / RECORDS, task.split)
    listing = _listings[task.split]
    skipped: list[tuple[str, str]] = []
    with ImageShardWriter(_out, task.name) as writer:
        for number in images_of(task, len(listing), _config.seed):
            image = listing.image(number)
            try:
                encoded = reencode(read_image(image), _config)
            except BadImage as error:
                skipped.append((image.name, str(error)))
                check_allowed(skipped, _config.on_bad)
            else:
                extra = None if image.annotations is None else image.annotations.encode()
                jpeg, width, height = encoded
                writer.add(image.key, jpeg, width=width, height=height, label=image.label, annotations=extra)
            advance(image.size)
        shard = writer.finish() if writer.num_images else None
    record = {"shard": shard and dataclasses.asdict(shard), "skipped": skipped}
    write_atomically(_record_path(_out, task), json.dumps(record).encode())
    return ShardResult(task=task, shard=shard, skipped=tuple(skipped))


def images_of(task: ShardTask, num_images: int, seed: int) -> list[int]:
    """Return the images of a shard: a range of positions in the permutation of its split."""
    begin, end = (at * num_images // task.num_shards for at in (task.number, task.number + 1))
    epoch = _EPOCH + SPLITS.index(task.split)
    return [int(number) for number in shuffled(np.arange(begin, end), num_images, seed, epoch)]


def num_shards(num_images: int, num_bytes: int, shard_bytes: int) -> int:
    """Return the number of shards of a split: about ``shard_bytes`` each, none without images."""
    return min(num_images, max(1, math.ceil(num_bytes / shard_bytes)))


def check_allowed(skipped: Sequence[tuple[str, str]], on_bad: OnBad) -> None:
    """Raise if there is an unusable image and ``on_bad`` refuses it.

    Raises:
        UsageError: names the last one.
    """
    if skipped and on_bad == "refuse":
        name, reason = skipped[-1]
        raise UsageError(
            f"{name} {reason}; replace or remove it, or go on without such images: --on-bad skip"
        )


def finished_shard(out: Path, task: ShardTask, on_bad: OnBad) -> ShardResult | None:
    """Return a shard that an earlier run finished, or ``None``.

    Raises:
        UsageError: it skipped an image, and bad images are refused now.
        ShoalError: one of its files is missing or has another size.
    """
    path = _record_path(out, task)
    if not path.is_file():
        return None

    def make(record: dict[str, Any]) -> ShardResult:
        shard = ImageShardInfo(**record["shard"]) if record["shard"] else None
        skipped = tuple((name, reason) for name, reason in record["skipped"])
        return ShardResult(task=task, shard=shard, skipped=skipped)

    result = read_record(path, make)
    check_allowed(result.skipped, on_bad)
    if result.shard:
        check_finished(out, task.name, result.shard.files)
    return result


def read_image(image: SourceImage) -> bytes:
    """Return the encoded bytes of an image of the source.

    Raises:
        BadImage: it is too large to be one.
        ShoalError: its file cannot be read, or changed since it was listed.
    """
    if image.size > MAX_IMAGE_BYTES:
        raise BadImage(f"has {image.size:,} bytes; files above {MAX_IMAGE_BYTES:,} are not read as images")
    try:
        with image.path.open("rb", buffering=0) as file:
            file.seek(image.offset)
            data = file.read(image.size)
            same = len(data) == image.size and bool(image.member or not file.read(1))
    except OSError as error:
        raise ShoalError(f"{image.name} cannot be read: {error.strerror}") from error
    if not same:
        raise ShoalError(
            f"{image.name} has another size since the preparation began ({image.size:,} bytes then); "
            f"{OVERWRITE}"
        )
    return data


def _record_path(out: Path, task: ShardTask) -> Path:
    return out / RECORDS / f"{task.name}.json"


_out: Path
_config: ImagePrepareConfig
_listings: dict[str, Listing]
