"""Files that are complete or absent: temporary name, fsync, rename."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
from pathlib import Path

from shoal.errors import ShoalError

PARTIAL = ".partial"
"""Suffix of a file that is still being written; one left behind by a kill is overwritten next time."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_error(path: Path, error: OSError) -> ShoalError:
    """Return what to raise when writing ``path`` failed: a full disk says so, and what to do."""
    if error.errno in _FULL:
        return ShoalError(
            f"{path}: no space left to write it ({error.strerror}); its unfinished part was removed and "
            "finished files were kept: free some space or choose another folder, then run the command again"
        )
    return ShoalError(f"{path}: cannot be written: {error.strerror or error}")


def publish(partial: Path, final: Path) -> None:
    """Give a finished temporary its name so that a crash leaves either no file or the whole one.

    The caller has already flushed and fsynced ``partial``.
    """
    partial.replace(final)
    folder = os.open(final.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_atomically(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path``, keeping the old file until the new one is on the disk.

    Raises:
        ShoalError: the disk is full or the folder cannot be written.
    """
    partial = path.with_name(path.name + PARTIAL)
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        publish(partial, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise write_error(path, error) from error


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
