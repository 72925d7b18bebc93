"""Lists the files of a tar by their places, so that images are read without unpacking them.

Names are data: nothing is written by them. A name that is absolute or leads out of the archive is refused, as
is an extended header of more than 64 KiB. Compressed archives are unpacked once, as a tar.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from shoal.atomic_io import AtomicFile
from shoal.data.text.packed import PACKINGS, unpacked_blocks
from shoal.errors import ShoalError, UsageError

_BLOCK = tarfile.BLOCKSIZE
_MOST_NAME_BYTES = 1 << 16
_NAMING = (tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
"""Types of headers that hold the name of the next member."""


class TarMember(NamedTuple):
    """A file in a tar; ``offset`` counts from the beginning of the outermost file."""

    name: str
    offset: int
    size: int


def members(path: Path, inside: TarMember | None = None) -> Iterator[TarMember]:
    """Yield the files of the tar ``path``, or of the tar that is its member ``inside``, in their order.

    Folders, links and devices are skipped. A name may come from an extended header (GNU, PAX).

    Raises:
        ShoalError: the file cannot be read, is not a tar, is truncated or damaged, or has a name that leads
            out of it.
    """
    source = f"{path}: {inside.name}" if inside else str(path)
    try:
        with path.open("rb", buffering=0) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            at = inside.offset if inside else 0
            end = min(at + inside.size, num_bytes) if inside else num_bytes
            name = ""
            while True:
                header = os.pread(file.fileno(), _BLOCK, at) if at + _BLOCK <= end else b""
                if not header:
                    raise ShoalError(f"{source} was cut short: it has no end after byte {at:,}; get it again")
                if not any(header):  # a tar ends with blocks of zeros
                    return
                member = _parse(header, source, at)
                if member.size < 0:  # the next header would be this one again, or before it
                    raise ShoalError(
                        f"{source} is damaged at byte {at:,}: {member.name} has the size {member.size:,}, "
                        "which must be at least 0; get it again"
                    )
                if at + _BLOCK + member.size > end:
                    raise ShoalError(
                        f"{source} was cut short in {member.name}, which ends at byte "
                        f"{at + _BLOCK + member.size:,} of {end:,}; get it again"
                    )
                if member.type in _NAMING:
                    name = _extended_name(file.fileno(), member, source, at) or name
                elif member.type != tarfile.XGLTYPE:
                    if member.isreg():
                        yield TarMember(_checked(name or member.name, source), at + _BLOCK, member.size)
                    name = ""
                at += _BLOCK + -(-member.size // _BLOCK) * _BLOCK
    except OSError as error:
        raise ShoalError(f"{source} cannot be read: {error.strerror}") from error


def _parse(header: bytes, source: str, at: int) -> tarfile.TarInfo:
    try:
        return tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
    except tarfile.TarError as error:
        if at == 0:
            raise ShoalError(f"{source} is not an uncompressed tar ({error})") from None
        raise ShoalError(f"{source} is damaged at byte {at:,} ({error}); get it again") from None


def _extended_name(file: int, header: tarfile.TarInfo, source: str, at: int) -> str:
    """Return the name that an extended header gives to the next member, or "" if it gives none."""
    if header.size > _MOST_NAME_BYTES:
        raise ShoalError(
            f"{source} has an extended header of {header.size:,} bytes at byte {at:,}; names have at most "
            f"{_MOST_NAME_BYTES:,}: is it damaged?"
        )
    data = os.pread(file, header.size, at + _BLOCK)
    if header.type == tarfile.GNUTYPE_LONGNAME:
        return data.rstrip(b"\0").decode("utf-8", "surrogateescape")
    name = ""
    while data:  # records "LENGTH KEY=VALUE\n"
        length, _, _ = data.partition(b" ")
        if not length.isdigit() or not len(length) + 2 <= int(length) <= len(data):
            raise ShoalError(f"{source} is damaged at byte {at:,} (an extended header); get it again")
        key, _, value = data[len(length) + 1 : int(length) - 1].partition(b"=")
        if key == b"path":
            name = value.decode("utf-8", "surrogateescape")
        elif key == b"size":
            raise ShoalError(f"{source} has a member of more than 8 GiB at byte {at:,}; no image is so large")
        data = data[int(length) :]
    return name


def _checked(name: str, source: str) -> str:
    """Return the name of a member without a leading "./"."""
    parts = PurePosixPath(name).parts
    if name.startswith("/") or ".." in parts or not parts or "\0" in name:
        raise ShoalError(f"{source} has the member {name!r:.200}, a name that leads out of it; pack it again")
    return "/".join(parts)


def archive_suffix(name: str) -> str:
    """Return the end of the name of a tar, compressed or not, such as ``.tar.gz``; empty for other files.

    Example:
        >>> archive_suffix("photos.tgz"), archive_suffix("photos.tar"), archive_suffix("photos.zip")
        ('.tgz', '.tar', '')
    """
    suffixes = (".tar", ".tgz", *(f".tar{packing}" for packing in PACKINGS))
    return next((suffix for suffix in suffixes if name.endswith(suffix)), "")


def unpack(path: Path, folder: Path) -> Path:
    """Return the tar in a compressed archive, written into ``folder`` unless it is there; or a plain tar.

    Raises:
        UsageError: the archive is damaged, or not compressed as its name says.
        ShoalError: the disk is full.
    """
    suffix = archive_suffix(path.name)
    if suffix == ".tar":
        return path
    target = folder / f"{path.name.removesuffix(suffix)}.tar"
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    packing = ".gz" if suffix == ".tgz" else suffix.removeprefix(".tar")
    try:
        with AtomicFile(target) as out:
            for block in unpacked_blocks(path, packing):
                out.write(block)
            out.close()
            out.publish()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from None
    return target
