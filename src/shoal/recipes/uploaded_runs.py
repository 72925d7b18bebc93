"""Brings runs that ``--run.upload-to`` uploaded to this machine, for the commands that read their files.

The copy of a run is a run directory below ``~/.cache/shoal/runs`` (or ``XDG_CACHE_HOME``), which only this
user may write to. Its checkpoint and its export are kept for the next command, and compared with those of
the store by their marks, which have the checksums of all files.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shoal import record
from shoal.atomic_io import check_private, take_lock, write_atomically
from shoal.data.objects import scheme_of
from shoal.data.storage import open_objects
from shoal.env.variables import text
from shoal.errors import UsageError
from shoal.recipes.model_source import find_model
from shoal.train.run_dir import CONFIG_FILE

_CHECKPOINT = re.compile(r"(?P<run>.+)/checkpoints/(?P<name>step-\d{8,}(?:\.[0-9a-f]{16})?)")
_LOCK = ".lock"


def is_uploaded(path: Path | None) -> bool:
    """Return whether a path lies in an object store."""
    return path is not None and scheme_of(path) is not None


def location_of(path: Path) -> str:
    """Return the location in a store as it is written; ``Path`` collapses its two slashes.

    Raises:
        UsageError: the store does not list its objects.
    """
    scheme, _, rest = str(path).partition(":")
    if scheme not in ("s3", "gs"):
        raise UsageError(
            f"{scheme}://{rest.strip('/')}: runs are read from s3:// and gs://, whose objects can be listed; "
            "copy this one to a folder"
        )
    return f"{scheme}://{rest.strip('/')}"


def local_record(run: Path) -> Path:
    """Return a folder with the record of a run: the run directory, or a copy of what is in the store.

    Raises:
        UsageError: the credentials do not suffice, or there is no such bucket.
        ShoalError: there is no record, or the store cannot be read.
    """
    if not is_uploaded(run):
        return run
    location = location_of(run)
    with _copy_of(location) as copy:
        write_atomically(copy / record.FILE_NAME, open_objects(location).get(record.FILE_NAME))
    return copy


def local_run(run: Path) -> Path:
    """Return a folder with the settings and the record of a run: the run directory, or a copy.

    Raises:
        UsageError: there is no run, the credentials do not suffice, or there is no such bucket.
        ShoalError: the store cannot be read.
    """
    if not is_uploaded(run):
        return run
    from shoal.train.checkpoint_uploads import Uploads

    location = location_of(run)
    with _copy_of(location) as copy:
        if not open_objects(location).names(CONFIG_FILE):
            raise UsageError(
                f"{location} is no run that --run.upload-to uploaded (it has no {CONFIG_FILE}): check the "
                "prefix"
            )
        Uploads(location, copy).fetch_run_files(again=True)
    return copy


def local_model(path: Path, *, checkpoint: bool = False) -> Path:
    """Return a path on this machine with the model that ``path`` names: itself, or a copy.

    Args:
        path: a run, a checkpoint in one, or its export; on this machine or in a store.
        checkpoint: whether the run's best or newest checkpoint is wanted, not the export at its end.

    Returns:
        Of a run in a store the copy of its checkpoint, or of the run with its export, as
        :func:`~shoal.recipes.model_source.find_model` chooses.

    Raises:
        UsageError: the location is none of these, the credentials do not suffice, or there is no such bucket.
        ShoalError: objects are missing or damaged, or the store cannot be read.
    """
    if not is_uploaded(path):
        return path
    from shoal.train.checkpoint_uploads import Uploads

    location = location_of(path)
    run, part = location, ""
    if match := _CHECKPOINT.fullmatch(location):
        run, part = match["run"], match["name"]
    elif not open_objects(location).names(CONFIG_FILE):
        run, _, part = location.rpartition("/")
    with _copy_of(run) as copy:
        uploads = Uploads(run, copy)
        uploads.fetch_run_files(again=True)
        exports, checkpoints = uploads.exports(), uploads.names()
        if part:
            found = [name for name in (*exports, *checkpoints) if part in (name, name.partition(".")[0])]
        else:
            for export in exports:
                uploads.bring(export)
            if exports and not checkpoint and find_model(copy).checkpoint is None:
                return copy
            found = _best_last(copy, checkpoints)
        if not found:
            raise UsageError(
                f"{location} is no run with a complete checkpoint that --run.upload-to uploaded, and neither "
                "such a checkpoint nor an exported model in one: check the prefix, or wait for the first"
            )
        return uploads.bring(found[-1])


def _best_last(run: Path, names: list[str]) -> list[str]:
    """Return copies of checkpoints, the oldest first, or only the best one if the run keeps it."""
    from shoal.train.checkpoint_files import best_step, step_in

    best = best_step(run)
    return [name for name in names if step_in(name) == best] or names


@contextmanager
def _copy_of(run: str) -> Iterator[Path]:
    """Lock the copy of a run among this host's processes."""
    home = Path(text("XDG_CACHE_HOME", None) or Path.home() / ".cache")
    copy = (
        home / "shoal" / "runs" / f"{run.rpartition('/')[2]}-{hashlib.sha256(run.encode()).hexdigest()[:16]}"
    )
    copy.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(copy, copy.stat(), "set XDG_CACHE_HOME to a folder of your own")
    with (copy / _LOCK).open("wb") as lock:
        take_lock(lock.fileno(), copy / _LOCK, wait=True)
        yield copy
