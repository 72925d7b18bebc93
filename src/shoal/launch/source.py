"""Packs a folder with a user's script for a container, and unpacks it there after checking its hash."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
from pathlib import Path

from shoal.errors import ShoalError, UsageError

ARCHIVE = "source.tar.gz"
MAX_BYTES = 100 << 20


def pack(folder: Path) -> bytes:
    """Return the files of a folder as ``.tar.gz``; the same files give the same bytes.

    Hidden files and folders, such as ``.env`` and ``.git``, caches, links and special files are left out.

    Raises:
        UsageError: it is not a folder, has no files, or more than 100 MiB.
    """
    if not folder.is_dir():
        raise UsageError(f"--source {folder} is no folder")
    packed, total = io.BytesIO(), 0
    with (
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for path in _files(folder):
            total += path.stat().st_size
            if total > MAX_BYTES:
                raise UsageError(
                    f"--source {folder} has more than {MAX_BYTES >> 20} MiB; name a folder with the program "
                    "alone, and bring data by --channel or the file system"
                )
            member = tarfile.TarInfo(path.relative_to(folder).as_posix())
            member.size, member.mode = path.stat().st_size, 0o755 if os.access(path, os.X_OK) else 0o644
            with path.open("rb") as file:
                archive.addfile(member, file)
    if not total:
        raise UsageError(f"--source {folder} has no files")
    return packed.getvalue()


def _files(folder: Path) -> list[Path]:
    paths: list[Path] = []
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name != "__pycache__" and not name.startswith("."))
        visible = [Path(root, name) for name in files if not name.startswith(".")]
        paths += [path for path in visible if path.is_file() and not path.is_symlink()]
    return sorted(path for path in paths if path.suffix != ".pyc")


def digest(packed: bytes) -> str:
    """Return the SHA-256 of an archive in hexadecimal digits."""
    return hashlib.sha256(packed).hexdigest()


def unpack(archive: Path, folder: Path, expected: str) -> None:
    """Unpack an archive whose SHA-256 is ``expected`` into ``folder``.

    Raises:
        ShoalError: it cannot be read, has another hash, or would write outside of the folder.
    """
    try:
        packed = archive.read_bytes()
    except OSError as problem:
        raise ShoalError(f"{archive}: cannot be read: {problem.strerror}") from None
    if (actual := digest(packed)) != expected:
        raise ShoalError(
            f"{archive}: its SHA-256 is {actual} and the job was submitted with {expected}; submit it again"
        )
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as opened:
            opened.extractall(folder, filter="data")
    except (tarfile.TarError, OSError) as problem:
        raise ShoalError(f"{archive}: cannot be unpacked: {problem}") from None
