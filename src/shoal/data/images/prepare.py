"""``shoal prepare images``: from a source to a directory of image shards with a manifest.

1. The source is looked at: its classes, its splits, a digest of its state (``folder``, ``imagenet``).
2. Its images are listed on the disk (``listing``); the number of shards follows from their bytes.
3. Shards are written in several processes, in any order (``shard_work``); each is a run of one permutation
   of its split, so it is a mix of all classes. Each finished one is recorded.
4. The manifest is put together and written last.

Every step leaves whole files behind, so the same command goes on after a kill at any moment. The result
depends on source and configuration only, not on the number of processes or on interruptions.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from shoal.data.atomic_io import write_atomically
from shoal.data.images.manifest import INDEX, TAR, ImageManifest
from shoal.data.images.reencode import ReencodeConfig, check_pillow
from shoal.data.images.shard_worker import (
    SPLITS,
    Job,
    OnBad,
    ShardResult,
    ShardTask,
    check_allowed,
    finished_shard,
    num_shards,
    start_worker,
    write_shard,
)
from shoal.data.images.sources import TRAIN, ImageSource, Totals, write_listing
from shoal.data.manifest import MANIFEST
from shoal.data.prepare_dir import RECORDS, clear, locked, open_plan, read_record
from shoal.data.process_pool import num_cores, run_tasks
from shoal.data.progress import Progress
from shoal.errors import UsageError, did_you_mean

KIND = "images"
SKIPPED = "skipped.txt"
"""Images that could not be read: split, name and reason, with tabs between."""

_LISTED = "listed.json"
_SHARD = re.compile(rf"(?:{'|'.join(SPLITS)})-\d{{5}}\.(?:{TAR}|{INDEX})")
_HOW_NOT_WHAT = ("processes", "overwrite", "on_bad")
"""Fields that do not change the result of a finished shard: one without a bad image is the same with
``--on-bad skip``, so that a run stopped by such an image can go on."""


@dataclass(frozen=True, kw_only=True)
class ImagePrepareConfig(ReencodeConfig):
    """How images become shards."""

    shard_bytes: int = 128 << 20
    """Bytes of source images that make one shard, about."""
    on_bad: OnBad = "refuse"
    """What to do with a file that is no whole image: stop and name it, or skip and list it."""
    seed: int = 0
    """Another seed puts the images into another order."""
    processes: int = 0
    """Worker processes; 0 takes one a core. The result does not depend on it."""
    overwrite: bool = False
    """Remove what an earlier preparation wrote to the directory, and begin anew."""

    def __post_init__(self) -> None:
        """Check each field by itself.

        Raises:
            UsageError: a value is out of its range.
        """
        super().__post_init__()
        for name, least in (("shard_bytes", 1 << 12), ("processes", 0), ("seed", 0)):
            if not least <= getattr(self, name) < 1 << 63:
                raise UsageError(f"{name}={getattr(self, name)} must be at least {least}")
        if self.on_bad not in get_args(OnBad):
            raise UsageError(
                f"on_bad={self.on_bad!r} must be one of {', '.join(get_args(OnBad))}."
                + did_you_mean(self.on_bad, get_args(OnBad))
            )

    @property
    def encoding(self) -> ReencodeConfig:
        """The part that says what becomes of an image."""
        return ReencodeConfig(resize=self.resize, quality=self.quality)


def prepare_images(
    source: ImageSource, out: Path, *, config: ImagePrepareConfig | None = None, progress: bool = True
) -> ImageManifest:
    """Prepare ``source`` into ``out`` and return the manifest, also if it was there already.

    Started again after an interruption, it goes on with the shards that are not finished. With ``progress``
    it reports on standard error. Processes are spawned: a script that calls this needs the usual
    ``if __name__ == "__main__":``.

    Raises:
        UsageError: the source or the configuration cannot be used, or differs from that of what the
            directory holds; an image is bad and ``on_bad`` refuses it.
        ShoalError: the disk is full, a file cannot be read or written, a worker process was killed.
    """
    config = config or ImagePrepareConfig()
    check_pillow()
    with locked(out), Progress(shown=progress, what=KIND) as shown:
        if config.overwrite:
            clear(out, KIND, lambda name: _SHARD.fullmatch(name) is not None or name == SKIPPED)
        open_plan(out, _plan(source, config))
        if (out / MANIFEST).is_file():
            shutil.rmtree(out / RECORDS, ignore_errors=True)  # killed while removing them
            shown.say(f"{out} is already prepared (--overwrite begins anew)")
            return ImageManifest.load(out)
        for line in source.remarks:
            shown.say(line)
        totals = _list_source(source, out, shown)
        results = _run_shards(_tasks(totals, config), totals, out, config, shown)
        return _finish(source, config, results, out, shown)


def _plan(source: ImageSource, config: ImagePrepareConfig) -> dict[str, Any]:
    """Return all that the result depends on, in JSON's terms."""
    fields = {name: value for name, value in dataclasses.asdict(config).items() if name not in _HOW_NOT_WHAT}
    return {"kind": KIND, "source": source.description, "source_state": source.state(), **fields}


def _list_source(source: ImageSource, out: Path, shown: Progress) -> dict[str, Totals]:
    """Write down what the source holds, unless an earlier run did; return the totals of each split.

    Raises:
        UsageError: there is no image to train on, or a class has none.
    """
    records = out / RECORDS
    path = records / _LISTED
    if not path.is_file():
        records.mkdir(exist_ok=True)
        shown.start("Listing images", 0)
        num_classes = len(source.classes)
        totals = {
            split: write_listing(source.images(split), records, split, num_classes=num_classes)
            for split in source.splits
        }
        check_totals(source, totals)
        value = {split: dataclasses.asdict(found) for split, found in totals.items()}
        write_atomically(path, json.dumps(value).encode())
    return read_record(path, lambda record: {split: Totals(**value) for split, value in record.items()})


def check_totals(source: ImageSource, totals: dict[str, Totals]) -> None:
    """Check that there is something to train on, in each class unless no image has a label.

    Raises:
        UsageError: there is not.
    """
    if not totals[TRAIN].num_images:
        raise UsageError(f"{source.description}: there is no image to train on")
    empty = [
        name for name, count in zip(source.classes, totals[TRAIN].class_counts, strict=True) if not count
    ]
    if empty and len(empty) < len(source.classes):
        raise UsageError(
            f"{source.description}: class {empty[0]!r} has no image to train on"
            + (f", nor have {len(empty) - 1} more ({', '.join(empty[1:4])})" if empty[1:] else "")
            + "; give it some, or remove its folder"
        )


def _tasks(totals: dict[str, Totals], config: ImagePrepareConfig) -> list[ShardTask]:
    tasks = []
    for split, found in totals.items():
        count = num_shards(found.num_images, found.num_bytes, config.shard_bytes)
        tasks += [ShardTask(split, number, count) for number in range(count)]
    return tasks


def _run_shards(
    tasks: list[ShardTask], totals: dict[str, Totals], out: Path, config: ImagePrepareConfig, shown: Progress
) -> dict[ShardTask, ShardResult]:
    """Write the shards that are not finished; return the results of all, in order."""
    results = {task: finished_shard(out, task) for task in tasks}
    todo = [task for task in tasks if results[task] is None]
    for result in results.values():
        check_allowed(result.skipped if result else (), config.on_bad)
    if len(todo) < len(tasks):
        shown.say(f"{len(tasks) - len(todo)} of {len(tasks)} shards were finished before")
    if todo:
        num_bytes = sum(totals[task.split].num_bytes / task.num_shards for task in todo)
        shown.start("Writing image shards", round(num_bytes))
        job = Job(out=out, encoding=config.encoding, on_bad=config.on_bad, seed=config.seed)
        running = run_tasks(
            write_shard,
            todo,
            processes=config.processes or num_cores(),
            initializer=start_worker,
            initargs=(job,),
            show=shown.show,
        )
        for index, result in running:
            results[todo[index]] = result
    return {task: result for task, result in results.items() if result is not None}


def _finish(
    source: ImageSource,
    config: ImagePrepareConfig,
    results: dict[ShardTask, ShardResult],
    out: Path,
    shown: Progress,
) -> ImageManifest:
    """Write the manifest and remove what only an unfinished preparation needs."""
    splits = {
        split: tuple(
            result.shard
            for task, result in results.items()
            if task.split == split and result.shard is not None
        )
        for split in SPLITS
    }
    if not splits[TRAIN]:
        raise UsageError(f"{source.description}: none of the images to train on can be read")
    lines = [
        f"{task.split}\t{name}\t{reason}\n"
        for task, result in results.items()
        for name, reason in result.skipped
    ]
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
