"""Reads the synsets out of ``meta.mat``, the list of classes in ImageNet's development kit.

The format is MATLAB's level 5 ("MAT-File Format", The MathWorks, chapter 1): elements of a type, a length
and data, padded to 8 bytes; a matrix is an element of elements. Only what the list is made of is read: an
array of structures with numbers and strings.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from shoal.data.files import MAX_WHOLE_BYTES, read_whole
from shoal.errors import ShoalError

_HEADER_BYTES = 128
_MATRIX, _COMPRESSED = 14, 15
_STRUCT, _CHAR = 2, 4  # classes of a matrix
_TYPES = {
    1: "<i1",
    2: "<u1",
    3: "<i2",
    4: "<u2",
    5: "<i4",
    6: "<u4",
    7: "<f4",
    9: "<f8",
    12: "<i8",
    13: "<u8",
}
_TYPES |= {16: "<u1", 17: "<u2"}  # UTF-8, UTF-16
_ID, _WNID = "ILSVRC2012_ID", "WNID"

Value = str | float | None

_WRONG = (ValueError, LookupError, TypeError, OverflowError, StopIteration, struct.error, zlib.error)


def read_synsets(data: bytes, where: str) -> dict[int, str]:
    """Return the WordNet id of each number of the development kit, from the bytes of ``meta.mat``.

    Raises:
        ShoalError: they are not such a list; ``where`` names the file.
    """
    try:
        if data[126:128] != b"IM":
            raise ValueError("it is not a little-endian MAT file of level 5")
        for kind, body in _elements(data[_HEADER_BYTES:]):
            if kind == _COMPRESSED:
                kind, body = next(_elements(_unpacked(body)))
            if kind == _MATRIX and (rows := _structures(body)):
                return {int(row[_ID]): str(row[_WNID]) for row in rows}  # type: ignore[arg-type]
        raise ValueError("it has no array of structures")
    except _WRONG as error:
        raise ShoalError(
            f"{where} is not the list of synsets of ImageNet's development kit ({error}); get it again, or "
            "give a text file of the synsets in its order as --synsets"
        ) from None


def read_synsets_file(path: Path) -> dict[int, str]:
    """The same for a file.

    Raises:
        ShoalError: it cannot be read, or is no such list.
    """
    try:
        data = read_whole(path)
    except OSError as error:
        raise ShoalError(f"{path} cannot be read: {error.strerror}") from error
    return read_synsets(data, str(path))


def _unpacked(data: bytes) -> bytes:
    unpacking = zlib.decompressobj()
    found = unpacking.decompress(data, MAX_WHOLE_BYTES)
    if not unpacking.eof:
        is_full = len(found) >= MAX_WHOLE_BYTES
        what = f"unpacks to more than {MAX_WHOLE_BYTES:,} bytes" if is_full else "was cut short"
        raise ValueError(f"a compressed element {what}")
    return found


def _elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (type, data) of elements that stand one after the other."""
    at = 0
    while at + 8 <= len(data):
        kind, size = struct.unpack_from("<II", data, at)
        if kind >> 16:  # up to four bytes stand in the tag itself
            kind, size, begin, following = kind & 0xFFFF, kind >> 16, at + 4, at + 8
        else:
            begin = at + 8
            following = begin + size if kind == _COMPRESSED else begin + -(-size // 8) * 8
        if begin + size > len(data):
            raise ValueError(f"an element of {size} bytes at byte {at} goes beyond the end")
        yield kind, data[begin : begin + size]
        at = following


def _structures(matrix: bytes) -> list[dict[str, Value]]:
    """Return the rows of a matrix of structures; none for another matrix."""
    flags, _, _, *parts = (body for _, body in _elements(matrix))  # between them: dimensions, name
    if flags[0] != _STRUCT:
        return []
    name_size, names, *values = parts
    width = int.from_bytes(name_size, "little")
    fields = [names[at : at + width].partition(b"\0")[0].decode() for at in range(0, len(names), width)]
    cells = [_value(body) for body in values]
    return [
        dict(zip(fields, cells[at : at + len(fields)], strict=True))
        for at in range(0, len(cells), len(fields))
    ]


def _value(matrix: bytes) -> Value:
    """Return a string or the first number of a matrix; ``None`` for an empty one."""
    (_, flags), _, _, *parts = list(_elements(matrix))
    if not parts:
        return None
    kind, data = parts[0]
    numbers = np.frombuffer(data, dtype=_TYPES[kind])
    if flags[0] == _CHAR:
        return "".join(map(chr, numbers.tolist()))
    return float(numbers[0]) if len(numbers) else None
