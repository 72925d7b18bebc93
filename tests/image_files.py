"""Image files of every kind that a data set may hold, and ImageNet's tars in small."""

from __future__ import annotations

import io
import struct
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

ORIENTATION = 0x0112


def photo(width: int = 40, height: int = 30, *, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """A smooth picture, which JPEG keeps nearly as it is, of which no two corners are alike."""
    rng = np.random.default_rng(seed)
    corners = rng.integers(0, 256, (2, 2, 3), dtype=np.uint8)
    corners[0, 0], corners[1, 1] = (250, 20, 20), (20, 20, 250)
    small = Image.fromarray(corners)
    return small.resize((width, height), Image.Resampling.BILINEAR).convert(mode)


def encoded(image: Image.Image, format: str = "JPEG", **options: Any) -> bytes:
    """The bytes of an image file."""
    out = io.BytesIO()
    image.save(out, format, **({"quality": 95} | options if format == "JPEG" else options))
    return out.getvalue()


def turned(orientation: int, **options: Any) -> bytes:
    """A JPEG that says in EXIF how it is to be turned."""
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return encoded(photo(**options), exif=exif.tobytes())


def pixels(data: bytes, mode: str = "RGB") -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the pixels of an image file as whole numbers that can be subtracted."""
    with Image.open(io.BytesIO(data)) as image:
        return np.asarray(image.convert(mode)).astype(np.int64)


def write_folder(path: Path, files: dict[str, bytes]) -> Path:
    """Write files by their names relative to ``path``."""
    for name, data in files.items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    return path


def tar_of(files: dict[str, bytes]) -> bytes:
    """An uncompressed tar with these members, as GNU tar makes it."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return out.getvalue()


def announcing(format: str, width: int, height: int) -> bytes:
    """A small file whose header says that the image has so many pixels."""
    if format == "TIFF":
        data = encoded(photo(7, 5), format)
        for tag, value in ((256, width), (257, height)):  # little-endian entries: tag, type, count, value
            at = data.index(struct.pack("<H", tag), 8)
            data = data[:at] + struct.pack("<HHII", tag, 4, 1, value) + data[at + 12 :]
        return data
    small = bytearray(encoded(photo(7, 5), format))
    if format == "JPEG":
        at = small.index(b"\xff\xc0") + 5
        small[at : at + 4] = struct.pack(">HH", height, width)
    elif format == "PNG":
        small[16:24] = struct.pack(">II", width, height)
        small[29:33] = struct.pack(">I", zlib.crc32(small[12:29]))
    elif format == "GIF":
        small[6:10] = struct.pack("<HH", width, height)
    elif format == "BMP":
        small[18:26] = struct.pack("<II", width, height)
    elif format == "PPM":
        small = small.replace(b"7 5", f"{width} {height}".encode(), 1)
    else:
        raise ValueError(format)
    return bytes(small)
