"""Prepares images as shards with a manifest: ``shoal prepare images``.

1. Takes a source with its classes, its splits and a digest of its state (``folder``, ``imagenet``).
2. Lists its images on disk (``sources``); the number of shards follows from their bytes.
3. Writes shards in a pool of processes, in any order. A shard is a range of positions in one permutation of
   its split, so it is a mix of all classes, and its number determines its images. A record
   ``records/SPLIT-NNNNN.json`` is written after it; a shard with a record is finished and not touched again.
4. Writes the manifest.

Every step writes whole files, so the same command continues after a kill at any moment. The result depends on
source and configuration only, not on the number of processes or on interruptions.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from shoal.atomic_io import write_atomically
from shoal.data.bad_entries import MOST_BAD, BadEntries, BadEntry, OnBad
from shoal.data.images.headers import BadImage
from shoal.data.images.manifest import INDEX, TAR, ImageManifest, ImageShardInfo
from shoal.data.images.reencode import MAX_IMAGE_BYTES, ReencodeConfig, check_pillow, is_ambiguous, reencode
from shoal.data.images.shards import ImageShardWriter
from shoal.data.images.sources import (
    TRAIN,
    VALIDATION,
    ImageSource,
    Listing,
    PackedSource,
    SourceImage,
    Totals,
    write_listing,
)
from shoal.data.manifest import TFRECORD, VERSION
from shoal.data.prepare_dir import OVERWRITE, RECORDS, check_finished, preparing, read_record
from shoal.data.process_pool import advance, run_unfinished
from shoal.data.progress import PreparationProgress
from shoal.decide.order import shuffled
from shoal.env.machine import num_cores
from shoal.errors import ShoalError, UsageError, cannot_read
from shoal.formatting import plural

SPLITS = (TRAIN, VALIDATION)
KIND = "images"
UNREADABLE = "an image that cannot be used"
SKIPPED = "skipped.txt"
"""Images that could not be read: split, name and reason, separated by tabs."""

_EPOCH = 1 << 32
"""Epoch numbers of the permutations of preparation, one per split, that no training reaches."""
_LISTED = "listed.json"
_OWN_FILE = re.compile(rf"(?:{'|'.join(SPLITS)})-\d{{5}}\.(?:{TAR}|{TFRECORD}|{INDEX})|{SKIPPED}")
_NOT_IN_PLAN = ("processes", "overwrite", "on_bad", "most_bad")
"""Fields that do not change the result of a finished shard: one without a bad image is the same with
``--on-bad skip``, so that a run stopped by such an image can continue."""


@dataclass(frozen=True, kw_only=True)
class ImagePrepareConfig(ReencodeConfig):
    """Size, order and re-encoding of the images of a preparation."""

    shard_bytes: int = 128 << 20
    """Approximate bytes of source images per shard."""
    container: Literal["tar", "tfrecord"] = "tar"
    """Files of the shards: tars for WebDataset, or TFRecords for TensorFlow; training reads both."""
    on_bad: OnBad = "skip"
    """Leave out what cannot be used, and list it; or stop at the first."""
    most_bad: float = MOST_BAD
    """Largest share that may be left out, beside flaws that standard sets are known for."""
    seed: int = 0
    """Seed of the order of the images."""
    processes: int = 0
    """Worker processes; 0: one per core. The result does not depend on it."""
    overwrite: bool = False
    """Remove the output of an earlier preparation, and start from the beginning."""

    def __post_init__(self) -> None:
        """Check each field.

        Raises:
            UsageError: a value is out of its range.
        """
        super().__post_init__()
        for name, least in (("shard_bytes", 1 << 12), ("processes", 0), ("seed", 0)):
            if not least <= getattr(self, name) < 1 << 63:
                raise UsageError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.container not in (TAR, TFRECORD):
            raise UsageError(f"container={self.container!r} must be {TAR} or {TFRECORD}")
        if not 0 <= self.most_bad <= 1:
            raise UsageError(f"most_bad={self.most_bad} must be a share from 0 to 1")


def prepare_images(
    source: ImageSource | PackedSource,
    out: Path,
    *,
    config: ImagePrepareConfig | None = None,
    progress: bool = True,
) -> ImageManifest:
    """Prepare ``source`` into ``out`` and return the manifest; return it if it is there already.

    After an interruption, the same call continues with the shards that are not finished. ``progress`` reports
    on standard error. Processes are spawned: a script that calls this needs the usual
    ``if __name__ == "__main__":``.

    Raises:
        UsageError: the source or the configuration cannot be used, or differs from that of the directory; an
            image is bad and ``on_bad`` refuses it.
        ShoalError: the disk is full, a file cannot be read or written, a worker process was killed.
    """
    config = config or ImagePrepareConfig()
    check_pillow()
    fields = {key: value for key, value in dataclasses.asdict(config).items() if key not in _NOT_IN_PLAN}
    state = {"source": source.description, "source_state": source.state()}
    plan = {"kind": KIND, "version": VERSION, **state, **fields}
    begun = preparing(out, plan, _OWN_FILE, overwrite=config.overwrite, progress=progress)
    with begun as (shown, is_prepared):
        if is_prepared:
            return ImageManifest.load(out)
        if isinstance(source, PackedSource):
            names = ", ".join(str(path) for path in source.files)
            shown.say(f"unpacking {names} to {out / RECORDS}, until the shards are written")
            source = source.unpack(out / RECORDS)
        for line in source.remarks:
            shown.say(line)
        totals = _list_source(source, out, shown)
        tasks = []
        for split, total in totals.items():
            count = num_shards(total.num_images, total.num_bytes, config.shard_bytes)
            tasks += [ShardTask(split, number, count) for number in range(count)]
        results = run_unfinished(
            write_shard,
            tasks,
            lambda task: finished_shard(out, task, config.on_bad),
            shown,
            outputs="image shards",
            num_bytes=lambda task: totals[task.split].num_bytes / task.num_shards,
            processes=config.processes or num_cores(),
            initializer=start_worker,
            initargs=(out, config),
        )
        return _finish(source, config, results, out, shown)


def _list_source(source: ImageSource, out: Path, shown: PreparationProgress) -> dict[str, Totals]:
    """List the images of the source, unless an earlier run did; return the totals of each split.

    Raises:
        UsageError: there is no image to train on, or a class has none.
    """
    path = out / RECORDS / _LISTED
    if not path.is_file():
        path.parent.mkdir(exist_ok=True)
        shown.start("Listing images", 0)
        totals = list_images(source, path.parent)
        value = {split: dataclasses.asdict(total) for split, total in totals.items()}
        write_atomically(path, json.dumps(value).encode())
    return read_record(path, lambda record: {split: Totals(**value) for split, value in record.items()})


def list_images(source: ImageSource, folder: Path) -> dict[str, Totals]:
    """List the images of every split in ``folder``; return their totals.

    Raises:
        UsageError: there is no image to train on, or a class has none although others have.
        ShoalError: the source cannot be read, or the disk is full.
    """
    totals = {
        split: write_listing(source.images(split), folder, split, num_classes=len(source.classes))
        for split in source.splits
    }
    if not totals[TRAIN].num_images:
        remarks = "".join(f"; {line}" for line in source.remarks)
        raise UsageError(f"{source.description}: there is no image to train on{remarks}")
    counts = zip(source.classes, totals[TRAIN].class_counts, strict=True)
    empty = [name for name, count in counts if not count]
    if empty and len(empty) < len(source.classes):
        raise UsageError(
            f"{source.description}: class {empty[0]!r} has no image to train on"
            + (f", nor have {len(empty) - 1} more ({', '.join(empty[1:4])})" if empty[1:] else "")
            + "; give it some, or remove its folder"
        )
    return totals


def _finish(
    source: ImageSource,
    config: ImagePrepareConfig,
    results: list[ShardResult],
    out: Path,
    shown: PreparationProgress,
) -> ImageManifest:
    """Write the manifest and remove the records."""
    splits = {split: tuple(r.shard for r in results if r.task.split == split and r.shard) for split in SPLITS}
    if not splits[TRAIN]:
        skipped = (skipped for r in results if r.task.split == TRAIN for skipped in r.skipped)
        first = next((f"; {name} {reason}" for name, reason in skipped), "")
        raise UsageError(f"{source.description}: none of the images to train on can be read{first}")
    lines = [f"{r.task.split}\t{name}\t{reason}\n" for r in results for name, reason in r.skipped]
    if lines:
        write_atomically(out / SKIPPED, "".join(lines).encode("utf-8", "surrogateescape"))
    bad = BadEntries(source.description, "skip", config.most_bad)
    for result in results:
        for name, reason in result.skipped:
            bad.add(BadEntry(UNREADABLE, reason), name)
    bad.check(sum(shard.num_images for shards in splits.values() for shard in shards))
    for line in bad.lines():
        shown.say(f"{line}; {out / SKIPPED} names all")
    if ambiguous := [name for result in results for name in result.ambiguous]:
        names = ", ".join(ambiguous[:3]) + (" …" if ambiguous[3:] else "")
        shown.say(
            f"left {plural(len(ambiguous), 'image')} as stored, as pycocotools does, although EXIF turns "
            f"them and their annotations fit both: {names}; turn the files if the boxes are for the turned "
            "images"
        )
    changed = f", shorter sides of {config.resize} pixels at most" if config.resize else ""
    manifest = ImageManifest(
        classes=source.classes,
        source=source.description + changed,
        splits={split: of_split for split, of_split in splits.items() if of_split},
        skipped=len(lines),
    )
    manifest.save(out)
    shutil.rmtree(out / RECORDS)
    for split, shards in manifest.splits.items():
        size = sum(shard.images.num_bytes for shard in shards) / (1 << 20)
        held = f"{plural(manifest.num_images(split), 'image')}, {plural(len(shards), 'shard')}"
        shown.say(f"{split}: {held}, {size:,.1f} MiB")
    return manifest


class ShardTask(NamedTuple):
    """Shard ``number`` of ``num_shards`` of a split."""

    split: str
    number: int
    num_shards: int

    @property
    def name(self) -> str:
        return f"{self.split}-{self.number:05d}"


class ShardResult(NamedTuple):
    """A finished shard, ``None`` if none of its images could be read.

    Attributes:
        skipped: (name, reason) of the images that could not be used.
        ambiguous: names of images whose annotations may be for another orientation.
    """

    task: ShardTask
    shard: ImageShardInfo | None
    skipped: list[tuple[str, str]]
    ambiguous: list[str]


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
    ambiguous: list[str] = []
    with ImageShardWriter(_out, task.name, _config.container) as writer:
        for number in images_of(task, len(listing), _config.seed):
            image = listing.image(number)
            try:
                data = read_image(image)
                encoded = reencode(data, _config, image.annotated_size)
            except BadImage as error:
                skipped.append((image.name, str(error)))
                check_allowed(skipped, _config.on_bad)
            else:
                if image.annotated_size and is_ambiguous(data, image.annotated_size):
                    ambiguous.append(image.name)
                extra = None if image.annotations is None else image.annotations.encode()
                writer.add(image.key, **encoded._asdict(), label=image.label, annotations=extra)
            advance(image.size)
        shard = writer.finish() if writer.num_images else None
    record = {
        "shard": shard and dataclasses.asdict(shard),
        "skipped": skipped,
        "ambiguous": ambiguous,
    }
    write_atomically(_record_path(_out, task), json.dumps(record).encode())
    return ShardResult(task, shard, skipped, ambiguous)


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
        skipped = [(name, reason) for name, reason in record["skipped"]]
        return ShardResult(task, shard, skipped, record["ambiguous"])

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
        raise ShoalError(cannot_read(image.name, error)) from error
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
