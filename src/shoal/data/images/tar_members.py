"""The members of an uncompressed tar, or of a tar inside a tar, read in place: names and where bytes lie.

Python's ``tarfile`` ends quietly at a damaged header; here that is an error, since a member less would be a
training image less. A header follows behind the data of the one before, so members do not overlap, and none
ends beyond the tar.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from shoal.errors import ShoalError

_BLOCK = tarfile.BLOCKSIZE


class Member(NamedTuple):
    """A file in a tar; ``offset`` counts from the begin of the outermost file."""

    name: str
    offset: int
    size: int


def members(path: Path, inside: Member | None = None) -> Iterator[Member]:
    """Yield the files of the tar ``path``, or of the tar that is its member ``inside``, in their order.

    Folders and extended headers (long names, which ImageNet has not) are passed over.

    Raises:
        ShoalError: the file cannot be read, is no tar, was cut short or is damaged.
    """
    where = f"{path}: {inside.name}" if inside else str(path)
    try:
        with path.open("rb", buffering=0) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            at = inside.offset if inside else 0
            end = min(at + inside.size, num_bytes) if inside else num_bytes
            while True:
                header = os.pread(file.fileno(), _BLOCK, at) if at + _BLOCK <= end else b""
                if not header:
                    raise ShoalError(f"{where} was cut short: it has no end after byte {at:,}; get it again")
                if not any(header):  # a tar ends with blocks of zeros
                    return
                member = _parse(header, where, at)
                if member.size < 0:  # the place of the next header would be this one again, or before it
                    raise ShoalError(
                        f"{where} is damaged at byte {at:,}: {member.name} has the size {member.size:,}, "
                        "which must be at least 0; get it again"
                    )
                if at + _BLOCK + member.size > end:
                    raise ShoalError(
                        f"{where} was cut short in {member.name}, which ends at byte "
                        f"{at + _BLOCK + member.size:,} of {end:,}; get it again"
                    )
                if member.isreg():
                    yield Member(member.name, at + _BLOCK, member.size)
                at += _BLOCK + -(-member.size // _BLOCK) * _BLOCK
    except OSError as error:
        raise ShoalError(f"{where} cannot be read: {error.strerror}") from error


def _parse(header: bytes, where: str, at: int) -> tarfile.TarInfo:
    try:
        return tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
    except tarfile.TarError as error:
        if at == 0:
            raise ShoalError(f"{where} is not an uncompressed tar ({error})") from None
        raise ShoalError(f"{where} is damaged at byte {at:,} ({error}); get it again") from None
