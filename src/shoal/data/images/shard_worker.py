"""What one worker does for one shard: its images, read where they lie, re-encoded and written.

A shard's images are a run of positions of one permutation of the split, so which they are follows from the
number of the shard alone. A small record ``records/SPLIT-NNNNN.json`` is written after the shard; a shard
with a record is finished, and nobody touches it again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from shoal.data.atomic_io import write_atomically
from shoal.data.images.headers import BadImage
from shoal.data.images.manifest import ImageShardInfo
from shoal.data.images.reencode import MAX_IMAGE_BYTES, ReencodeConfig, check_pillow, reencode
from shoal.data.images.shards import ImageShardWriter
from shoal.data.images.sources import TRAIN, VALIDATION, Listing, SourceImage
from shoal.data.prepare_dir import OVERWRITE, RECORDS, read_record
from shoal.data.process_pool import advance
from shoal.decide.order import shuffled
from shoal.errors import ShoalError, UsageError

OnBad = Literal["refuse", "skip"]
SPLITS = (TRAIN, VALIDATION)

_EPOCH = 1 << 32
"""Permutations of preparation are those of epochs that no training reaches, one a split."""


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
    """A finished shard, ``None`` if none of its images could be read, and (name, reason) of those that could
    not."""

    shard: ImageShardInfo | None
    skipped: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is the same for all shards."""

    out: Path
    encoding: ReencodeConfig
    on_bad: OnBad
    seed: int


def start_worker(job: Job) -> None:
    """Remember the job once a process."""
    global _job, _listings
    check_pillow()
    _job, _listings = job, {}


def write_shard(task: ShardTask) -> ShardResult:
    """Write a shard and its record.

    Raises:
        UsageError: an image cannot be used, and bad images are refused.
        ShoalError: a source can no longer be read, the disk is full.
    """
    if task.split not in _listings:
        _listings[task.split] = Listing(_job.out / RECORDS, task.split)
    listing = _listings[task.split]
    skipped: list[tuple[str, str]] = []
    shard = None
    with ImageShardWriter(_job.out, task.name) as writer:
        for number in images_of(task, len(listing), _job.seed):
            image = listing.image(number)
            try:
                _add(writer, image)
            except BadImage as error:
                skipped.append((image.name, str(error)))
                check_allowed(skipped, _job.on_bad)
            advance(image.size)
        if writer.num_images:
            shard = writer.finish()
    record = {"shard": shard and shard.to_json(), "skipped": skipped}
    write_atomically(_record_path(_job.out, task), json.dumps(record).encode())
    return ShardResult(shard=shard, skipped=tuple(skipped))


def images_of(task: ShardTask, num_images: int, seed: int) -> list[int]:
    """Return which images of the source make a shard: a run of positions of the split's permutation."""
    begin, end = (at * num_images // task.num_shards for at in (task.number, task.number + 1))
    epoch = _EPOCH + SPLITS.index(task.split)
    return [int(number) for number in shuffled(np.arange(begin, end), num_images, seed, epoch)]


def num_shards(num_images: int, num_bytes: int, shard_bytes: int) -> int:
    """Return into how many shards a split is cut: about ``shard_bytes`` each, none without images."""
    return min(num_images, max(1, math.ceil(num_bytes / shard_bytes)))


def check_allowed(skipped: Sequence[tuple[str, str]], on_bad: OnBad) -> None:
    """Refuse images that cannot be used, unless they may be skipped.

    Raises:
        UsageError: there is one, and bad images are refused.
    """
    if skipped and on_bad == "refuse":
        name, reason = skipped[-1]
        raise UsageError(
            f"{name} {reason}; replace or remove it, or go on without such images: --on-bad skip"
        )


def finished_shard(out: Path, task: ShardTask) -> ShardResult | None:
    """Return a shard that an earlier run has finished, or ``None``.

    Raises:
        ShoalError: one of its files is missing or has another size.
    """
    path = _record_path(out, task)
    if not path.is_file():
        return None
    result = read_record(path, _result)
    shard = result.shard
    for suffix, facts in shard.files.items() if shard else ():
        file = out / f"{task.name}.{suffix}"
        if not file.is_file() or file.stat().st_size != facts["bytes"]:
            raise ShoalError(
                f"{file}: an earlier run finished this file, now it is missing or has another size than "
                f"{facts['bytes']} bytes; {OVERWRITE}"
            )
    return result


def _result(record: dict[str, Any]) -> ShardResult:
    shard = ImageShardInfo(**record["shard"]) if record["shard"] else None
    return ShardResult(shard=shard, skipped=tuple((name, reason) for name, reason in record["skipped"]))


def read_image(image: SourceImage) -> bytes:
    """Return the bytes of an image where it lies.

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


def _add(writer: ImageShardWriter, image: SourceImage) -> None:
    encoded = reencode(read_image(image), _job.encoding)
    annotations = None if image.annotations is None else image.annotations.encode()
    writer.add(
        image.key,
        encoded.jpeg,
        label=image.label,
        width=encoded.width,
        height=encoded.height,
        annotations=annotations,
    )


def _record_path(out: Path, task: ShardTask) -> Path:
    return out / RECORDS / f"{task.name}.json"


_job: Job
_listings: dict[str, Listing]
