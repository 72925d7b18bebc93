"""Guards the output directory of a preparation: one process at a time, one plan, a clean restart."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from shoal.atomic_io import PARTIAL, take_lock, write_atomically, write_error
from shoal.data.manifest import MANIFEST
from shoal.data.progress import PreparationProgress
from shoal.errors import ShoalError, UsageError
from shoal.json_text import json_bytes, parse_json

PLAN = "prepare.json"
"""Kind, format version, configuration and state of the source; the shards beside it follow from it."""
LOCK = "prepare.lock"
RECORDS = "records"
"""Folder of the records of an unfinished preparation, removed when it is complete."""
OVERWRITE = "run again with --overwrite to start from nothing"
"""The remedy for a directory that was changed by something else."""

T = TypeVar("T")


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Create ``out`` and hold a lock on it; the system releases the lock when the process ends.
    Raises:
        ShoalError: the directory cannot be created or written, or another process prepares into it.
    """
    path = out / LOCK
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    except OSError as error:
        raise write_error(path, error) from error
    with file:
        if not take_lock(file.fileno(), path, wait=False):
            raise ShoalError(f"{out}: another process is preparing data into it; wait for its end")
        yield


@contextmanager
def preparing(
    out: Path, plan: dict[str, Any], own_files: re.Pattern[str], *, overwrite: bool, progress: bool
) -> Iterator[tuple[PreparationProgress, bool]]:
    """Begin the preparation of ``plan`` in ``out``, or continue it; hold the lock meanwhile.

    Yields the progress to report to, and whether ``out`` is already prepared.

    Args:
        own_files: names of what such a preparation writes, which ``overwrite`` removes, besides the files
            that every preparation has.
        progress: whether to report on standard error.

    Raises:
        UsageError: the directory holds other files, was started with another plan, or has a name that is not
            UTF-8.
        ShoalError: the directory cannot be created or written, or another process prepares into it.
    """
    try:
        str(out).encode()
    except UnicodeEncodeError:
        raise UsageError(f"--out {str(out)!r} is not UTF-8; choose a name that is") from None
    with locked(out), PreparationProgress(shown=progress, data=plan["kind"]) as shown:
        if overwrite:
            _clear(out, plan["kind"], own_files)
        open_plan(out, plan)
        is_prepared = (out / MANIFEST).is_file()
        if is_prepared:
            shutil.rmtree(out / RECORDS, ignore_errors=True)  # killed while removing them
            shown.say(f"{out} is already prepared (--overwrite starts from nothing)")
        yield shown, is_prepared


def open_plan(out: Path, plan: dict[str, Any]) -> None:
    """Record ``plan`` in ``out``, or check that the preparation there was started with the same plan.

    Raises:
        UsageError: the plan differs, or the directory holds unrelated files.
        ShoalError: the file of the plan is damaged.
    """
    path = out / PLAN
    if not path.is_file():
        foreign = [f.name for f in sorted(out.iterdir()) if f.name != LOCK and f.suffix != PARTIAL]
        if foreign:
            raise UsageError(
                f"{out} holds other files ({', '.join(foreign[:3])}); give a new or empty directory as --out"
            )
        write_atomically(path, json_bytes(plan))
        return
    old = _read_plan(path)
    if old is None:
        raise ShoalError(f"{path} is damaged; {OVERWRITE}")
    _check_kind(out, old, plan.get("kind"))
    # through JSON, so that tuples compare as the lists they were written as
    new = parse_json(json.dumps(plan), "the plan")
    changes = [
        f"{key} was {old.get(key)!r} and is now {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]
    if changes:
        raise UsageError(
            f"{out} was started with another configuration or source: {'; '.join(changes)}. Give another "
            "--out, or --overwrite to remove what is there and start from nothing"
        )


def read_record(path: Path, make: Callable[[Any], T]) -> T:
    """Return ``make`` of the JSON in a record of this preparation.

    Raises:
        ShoalError: it was changed since.
    """
    try:
        return make(parse_json(path.read_bytes(), str(path), remedy=OVERWRITE))
    except OSError as error:
        raise ShoalError(f"{path} cannot be read: {error.strerror}; {OVERWRITE}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ShoalError(f"{path}: a field is missing or wrong ({error}); {OVERWRITE}") from None


def check_finished(out: Path, name: str, files: Mapping[str, Mapping[str, Any]]) -> None:
    """Check that the files ``NAME.SUFFIX`` of a shard that an earlier run finished have their sizes.

    Raises:
        ShoalError: one is missing or has another size.
    """
    for suffix, facts in files.items():
        file = out / f"{name}.{suffix}"
        if not file.is_file() or file.stat().st_size != facts["bytes"]:
            raise ShoalError(
                f"{file}: an earlier run finished this file, now it is missing or has another size than "
                f"{facts['bytes']} bytes; {OVERWRITE}"
            )


def _clear(out: Path, kind: str, own_files: re.Pattern[str]) -> None:
    """Remove the output of a preparation of ``kind``: plan, manifest, records, files named by ``own_files``.

    Other files stay.

    Raises:
        UsageError: the directory holds another kind of data.
        ShoalError: a file cannot be removed.
    """
    if not (out / PLAN).is_file():
        return
    _check_kind(out, _read_plan(out / PLAN), kind)
    try:
        (out / MANIFEST).unlink(missing_ok=True)  # first: from here on the directory is unfinished
        if (out / RECORDS).is_dir():
            shutil.rmtree(out / RECORDS)
        for file in out.iterdir():
            name = file.name.removesuffix(PARTIAL)
            if name == MANIFEST or own_files.fullmatch(name):
                file.unlink()
        with contextlib.suppress(FileNotFoundError):
            (out / PLAN).unlink()
    except OSError as error:
        raise ShoalError(f"{error.filename}: cannot be removed: {error.strerror}") from error


def _read_plan(path: Path) -> dict[str, Any] | None:
    """Return the plan of a directory, or ``None`` if it is damaged."""
    try:
        return dict(parse_json(path.read_bytes(), str(path)))
    except (ShoalError, ValueError, TypeError):
        return None


def _check_kind(out: Path, plan: dict[str, Any] | None, kind: object) -> None:
    present = kind if plan is None else plan.get("kind")
    if present != kind:
        raise UsageError(f"{out} holds prepared {present}, not {kind}; give another directory as --out")
