"""Prepares images as shards with a manifest: ``shoal prepare images``.

1. Takes a source with its classes, its splits and a digest of its state (``folder``, ``imagenet``).
2. Lists its images on disk (``sources``); the number of shards follows from their bytes.
3. Writes shards in a pool of processes, in any order (``shard_worker``), and records each. A shard is a range
   of one permutation of its split, so it is a mix of all classes.
4. Writes the manifest.

Every step writes whole files, so the same command continues after a kill at any moment. The result depends on
source and configuration only, not on the number of processes or on interruptions.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from shoal.data.atomic_io import write_atomically
from shoal.data.images.manifest import INDEX, TAR, ImageManifest
from shoal.data.images.reencode import ReencodeConfig, check_pillow
from shoal.data.images.shard_worker import (
    SPLITS,
    OnBad,
    ShardResult,
    ShardTask,
    finished_shard,
    num_shards,
    start_worker,
    write_shard,
)
from shoal.data.images.sources import TRAIN, ImageSource, Totals, write_listing
from shoal.data.manifest import MANIFEST, VERSION
from shoal.data.prepare_dir import RECORDS, clear, locked, open_plan, read_record
from shoal.data.process_pool import num_cores, run_unfinished
from shoal.data.progress import Progress
from shoal.errors import UsageError

KIND = "images"
SKIPPED = "skipped.txt"
"""Images that could not be read: split, name and reason, separated by tabs."""

_LISTED = "listed.json"
_SHARD = re.compile(rf"(?:{'|'.join(SPLITS)})-\d{{5}}\.(?:{TAR}|{INDEX})")
_NOT_IN_PLAN = ("processes", "overwrite", "on_bad")
"""Fields that do not change the result of a finished shard: one without a bad image is the same with
``--on-bad skip``, so that a run stopped by such an image can continue."""


@dataclass(frozen=True, kw_only=True)
class ImagePrepareConfig(ReencodeConfig):
    """Size, order and re-encoding of the images of a preparation."""

    shard_bytes: int = 128 << 20
    """Approximate bytes of source images per shard."""
    on_bad: OnBad = "refuse"
    """Stop at a file that is not a whole image and name it, or skip and list it."""
    seed: int = 0
    """Another seed puts the images into another order."""
    processes: int = 0
    """Worker processes; 0: one per core. The result does not depend on it."""
    overwrite: bool = False
    """Remove what an earlier preparation wrote to the directory, and start from nothing."""

    def __post_init__(self) -> None:
        """Check each field.

        Raises:
            UsageError: a value is out of its range.
        """
        super().__post_init__()
        for name, least in (("shard_bytes", 1 << 12), ("processes", 0), ("seed", 0)):
            if not least <= getattr(self, name) < 1 << 63:
                raise UsageError(f"{name}={getattr(self, name)} must be at least {least}")


def prepare_images(
    source: ImageSource, out: Path, *, config: ImagePrepareConfig | None = None, progress: bool = True
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
    with locked(out), Progress(shown=progress, what=KIND) as shown:
        if config.overwrite:
            clear(out, KIND, lambda name: _SHARD.fullmatch(name) is not None or name == SKIPPED)
        fields = {key: value for key, value in dataclasses.asdict(config).items() if key not in _NOT_IN_PLAN}
        state = {"source": source.description, "source_state": source.state()}
        open_plan(out, {"kind": KIND, "version": VERSION, **state, **fields})
        if (out / MANIFEST).is_file():
            shutil.rmtree(out / RECORDS, ignore_errors=True)  # killed while removing them
            shown.say(f"{out} is already prepared (--overwrite starts from nothing)")
            return ImageManifest.load(out)
        for line in source.remarks:
            shown.say(line)
        totals = _list_source(source, out, shown)
        tasks = []
        for split, found in totals.items():
            count = num_shards(found.num_images, found.num_bytes, config.shard_bytes)
            tasks += [ShardTask(split, number, count) for number in range(count)]
        results = run_unfinished(
            write_shard,
            tasks,
            lambda task: finished_shard(out, task, config.on_bad),
            shown,
            what="image shards",
            num_bytes=lambda task: totals[task.split].num_bytes / task.num_shards,
            processes=config.processes or num_cores(),
            initializer=start_worker,
            initargs=(out, config),
        )
        return _finish(source, config, results, out, shown)


def _list_source(source: ImageSource, out: Path, shown: Progress) -> dict[str, Totals]:
    """List the images of the source, unless an earlier run did; return the totals of each split.

    Raises:
        UsageError: there is no image to train on, or a class has none.
    """
    path = out / RECORDS / _LISTED
    if not path.is_file():
        path.parent.mkdir(exist_ok=True)
        shown.start("Listing images", 0)
        totals = list_images(source, path.parent)
        value = {split: dataclasses.asdict(found) for split, found in totals.items()}
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
        raise UsageError(f"{source.description}: there is no image to train on")
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
    source: ImageSource, config: ImagePrepareConfig, results: list[ShardResult], out: Path, shown: Progress
) -> ImageManifest:
    """Write the manifest and remove the records."""
    splits = {split: tuple(r.shard for r in results if r.task.split == split and r.shard) for split in SPLITS}
    if not splits[TRAIN]:
        raise UsageError(f"{source.description}: none of the images to train on can be read")
    lines = [f"{r.task.split}\t{name}\t{reason}\n" for r in results for name, reason in r.skipped]
    if lines:
        write_atomically(out / SKIPPED, "".join(lines).encode("utf-8", "surrogateescape"))
        shown.say(f"{len(lines):,} images could not be read and were skipped; {out / SKIPPED} names them")
    changed = f", shorter sides of {config.resize} pixels at most" if config.resize else ""
    manifest = ImageManifest(
        classes=source.classes,
        source=source.description + changed,
        splits={split: found for split, found in splits.items() if found},
        skipped=len(lines),
    )
    manifest.save(out)
    shutil.rmtree(out / RECORDS)
    for split, shards in manifest.splits.items():
        size = sum(shard.files[TAR]["bytes"] for shard in shards) / (1 << 20)
        shown.say(f"{split}: {manifest.num_images(split):,} images, {len(shards)} shards, {size:,.1f} MiB")
    return manifest
