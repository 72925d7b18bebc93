"""The directory of a preparation: one process at a time, one plan, and a clean way to begin anew."""

from __future__ import annotations

import contextlib
import fcntl
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from shoal.data.atomic_io import PARTIAL, write_atomically, write_error
from shoal.data.manifest import MANIFEST
from shoal.errors import ShoalError, UsageError
from shoal.json_text import parse_json

PLAN = "prepare.json"
"""Configuration and state of the source. Shards belong to the plan beside them, finished or not."""
LOCK = "prepare.lock"
RECORDS = "records"
"""Folder of what only an unfinished preparation needs."""
OVERWRITE = "run again with --overwrite to begin from nothing"
"""The remedy for a directory that somebody else has changed."""

_KIND, _TEXT = "kind", "text"
"""What a plan prepares; plans of text do not say so."""

T = TypeVar("T")


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Make ``out`` and hold it for this process; the system lets go of it when the process ends.

    Raises:
        ShoalError: the directory cannot be made or written, or another process prepares into it.
    """
    path = out / LOCK
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    except OSError as error:
        raise write_error(path, error) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ShoalError(f"{out}: another process is preparing data into it; wait for its end") from None
        yield


def open_plan(out: Path, plan: dict[str, Any]) -> None:
    """Record ``plan`` in ``out``, or check that what is there was made with the same.

    Raises:
        UsageError: the plan differs, or the directory holds files of somebody else.
        ShoalError: the plan's file is damaged.
    """
    path = out / PLAN
    if not path.is_file():
        foreign = [f.name for f in sorted(out.iterdir()) if f.name != LOCK and f.suffix != PARTIAL]
        if foreign:
            raise UsageError(
                f"{out} holds other files ({', '.join(foreign[:3])}); give a new or empty directory as --out"
            )
        write_atomically(path, (json.dumps(plan, indent=1, ensure_ascii=False) + "\n").encode())
        return
    old = _read_plan(path)
    if old is None:
        raise ShoalError(f"{path} is damaged; {OVERWRITE}")
    _check_kind(out, old, plan.get(_KIND, _TEXT))
    # through JSON, so that tuples compare as the lists they were written as
    new = parse_json(json.dumps(plan), "the plan")
    changes = [
        f"{key} was {old.get(key)!r} and is now {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    ]
    if changes:
        raise UsageError(
            f"{out} was begun with another configuration or source: {'; '.join(changes)}. Give another "
            "--out, or --overwrite to remove what is there and begin anew"
        )


def read_record(path: Path, make: Callable[[Any], T]) -> T:
    """Return what ``make`` makes of the JSON that this preparation wrote down.

    Raises:
        ShoalError: it has been changed since.
    """
    try:
        return make(parse_json(path.read_bytes(), str(path), remedy=OVERWRITE))
    except OSError as error:
        raise ShoalError(f"{path} cannot be read: {error.strerror}; {OVERWRITE}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ShoalError(f"{path}: a field is missing or wrong ({error}); {OVERWRITE}") from None


def clear(out: Path, kind: str, is_ours: Callable[[str], bool]) -> None:
    """Remove what a preparation of ``kind`` wrote: plan, manifest, records, files that ``is_ours`` names.

    Files of others stay.

    Raises:
        UsageError: the directory belongs to another kind of data.
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
            if name == MANIFEST or is_ours(name):
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


def _check_kind(out: Path, plan: dict[str, Any] | None, kind: str) -> None:
    found = kind if plan is None else plan.get(_KIND, _TEXT)
    if found != kind:
        raise UsageError(
            f"{out} holds {found} that was prepared, not {kind}; give another directory as --out"
        )
