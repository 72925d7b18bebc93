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

from shoal.atomic_io import AtomicFile, archive_of
from shoal.data.text.packed import peek, unpacked_blocks
from shoal.errors import ShoalError, UsageError, cannot_read

_BLOCK = tarfile.BLOCKSIZE
_MOST_NAME_BYTES = 1 << 16
_NAMING = (tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE)
"""Types of headers that hold the name of the next member."""
_PACKED = {
    "a tar": "",
    "compressed by gzip": ".gz",
    "compressed by bzip2": ".bz2",
    "compressed by xz": ".xz",
    "compressed by zstd": ".zst",
}
"""Forms of a tar, by the words of ``archive_of``."""


class TarMember(NamedTuple):
    """A file in a tar; ``offset`` counts from the beginning of the outermost file."""

    name: str
    offset: int
    size: int


def members(
    path: Path, inside: TarMember | None = None, *, name: Path | None = None, others: list[str] | None = None
) -> Iterator[TarMember]:
    """Yield the files of the tar ``path``, or of the tar that is its member ``inside``, in their order.

    Folders, links and devices are skipped. A name may come from an extended header (GNU, PAX).

    Args:
        path: the tar.
        inside: a member of it that is a tar.
        name: of the tar in messages; default: ``path``.
        others: gets the names of links and devices.

    Raises:
        ShoalError: the file cannot be read, is not a tar, is truncated or damaged, or has a name that leads
            out of it.
    """
    source = f"{path}: {inside.name}" if inside else str(name or path)
    try:
        with path.open("rb", buffering=0) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            at = inside.offset if inside else 0
            end = min(at + inside.size, num_bytes) if inside else num_bytes
            extended = ""
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
                    extended = _extended_name(file.fileno(), member, source, at) or extended
                elif member.type != tarfile.XGLTYPE:
                    if member.isreg():
                        yield TarMember(_checked(extended or member.name, source), at + _BLOCK, member.size)
                    elif others is not None and not member.isdir():
                        others.append(extended or member.name)
                    extended = ""
                at += _BLOCK + -(-member.size // _BLOCK) * _BLOCK
    except OSError as error:
        raise ShoalError(cannot_read(source, error)) from error


def _parse(header: bytes, source: str, at: int) -> tarfile.TarInfo:
    try:
        return tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
    except tarfile.TarError as error:
        if at == 0:
            raise ShoalError(
                f"{source} holds no tar ({error}); get it again, or pack it again with tar"
            ) from None
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
        raise ShoalError(
            f"{source} has the member {name!r:.200}, a name that leads out of it; pack it again with "
            "names below its folder, as by tar -C FOLDER -cf NEW.tar ."
        )
    return "/".join(parts)


def packing_of_tar(path: Path) -> str:
    """Return how a tar is compressed, one of ``PACKINGS`` or ``""``, by its content and not by its name.

    Raises:
        UsageError: it is another archive, or none.
    """
    try:
        kind = archive_of(peek(path, "", _BLOCK))
    except OSError as error:
        raise UsageError(cannot_read(path, error)) from None
    if kind not in _PACKED:
        form = kind or ("a file" if path.stat().st_size else "an empty file")
        raise UsageError(f"{path} is {form}, neither a folder nor a tar of one; {_remedy(path, kind)}")
    return _PACKED[kind]


def _remedy(path: Path, kind: str) -> str:
    """Return what to do with a file that is no tar, by the words of :func:`archive_of`."""
    if kind == "a zip":
        return f"unpack it and give its folder: unzip -q {path.name} -d {path.stem}"
    if "archive" in kind or kind.startswith("compressed"):
        return "unpack it and give its folder"
    return "give a folder of class folders, or a tar of it"


def unpack(path: Path, folder: Path) -> Path:
    """Return the tar in a compressed archive, written into ``folder`` unless it is there; or a plain tar.

    Raises:
        UsageError: the archive is damaged, or none.
        ShoalError: the disk is full.
    """
    packing = packing_of_tar(path)
    if not packing:
        return path
    target = folder / f"{path.name}.unpacked"
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with AtomicFile(target) as out:
            for block in unpacked_blocks(path, packing):
                out.write(block)
            out.close()
            out.publish()
    except OSError as error:
        raise UsageError(cannot_read(path, error)) from None
    return target
