"""Reads zips in place: the files in them by their offsets, as COCO's are downloaded (``train2017.zip``).

COCO's images are stored in their zips without compression, so an image is a range of bytes of the zip.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path

from shoal.errors import ShoalError, UsageError, cannot_read

SUFFIX = ".zip"

_LOCAL_HEADER = struct.Struct("<4s22xHH")  # signature, …, lengths of name and extra field
_SIGNATURE = b"PK\x03\x04"


class ZipImages:
    """The places of the files in a zip, by their names with and without the first folder."""

    def __init__(self, path: Path) -> None:
        """Read the zip's directory.

        Raises:
            UsageError: the path is no zip, or one that was cut short.
            ShoalError: it cannot be read.
        """
        self._path = path
        self._members: dict[str, zipfile.ZipInfo] = {}
        for member in open_zip(path).infolist():
            if not member.is_dir():
                self._members[member.filename.partition("/")[2] or member.filename] = member
                self._members[member.filename] = member

    def __contains__(self, name: str) -> bool:
        return name in self._members

    def names(self) -> Iterator[str]:
        """Return the names of the files, as in the zip."""
        return (member.filename for name, member in self._members.items() if name == member.filename)

    def extent(self, name: str) -> tuple[int, int]:
        """Return offset and size of a file in bytes of the zip.

        Raises:
            UsageError: it is compressed or encrypted.
            ShoalError: the zip is damaged or cannot be read.
        """
        member = self._members[name]
        if member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1:
            raise UsageError(
                f"{self._path}: {member.filename} is compressed in the zip and cannot be read in place; "
                f"unpack it (unzip -q {self._path.name}) and give the folder"
            )
        try:
            with self._path.open("rb", buffering=0) as file:
                file.seek(member.header_offset)
                header = file.read(_LOCAL_HEADER.size)
        except OSError as error:
            raise ShoalError(cannot_read(self._path, error)) from error
        if not header.startswith(_SIGNATURE) or len(header) < _LOCAL_HEADER.size:
            raise ShoalError(f"{self._path} is damaged at {member.filename}; get it again")
        _, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(header)
        return member.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes, member.file_size


def open_zip(path: Path) -> zipfile.ZipFile:
    """Return a zip whose directory was read.

    Raises:
        UsageError: the path is no zip, or one that was cut short.
        ShoalError: it cannot be read.
    """
    try:
        return zipfile.ZipFile(path)
    except zipfile.BadZipFile as error:
        raise UsageError(f"{path}: is no zip, or was cut short ({error}); get it again") from None
    except FileNotFoundError:
        raise UsageError(f"{path}: there is no such file") from None
    except OSError as error:
        raise ShoalError(cannot_read(path, error)) from error
