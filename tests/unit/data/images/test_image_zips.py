"""Zips are read in place: the bytes of stored files, and a remedy for all others."""

from __future__ import annotations

import random
import zipfile
from pathlib import Path

import pytest

from shoal.data.images.zips import ZipImages
from shoal.errors import ShoalError, UsageError

FILES = {f"train2017/{n:012d}.jpg": random.Random(n).randbytes(1000 + n) for n in range(50)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "train2017.zip"
    with zipfile.ZipFile(path, "w") as file:
        file.mkdir("train2017")
        for name, data in FILES.items():
            info = zipfile.ZipInfo(name)
            info.extra = bytes(4) * (len(data) % 3)  # of another length than in the zip's directory
            file.writestr(info, data)
        file.writestr("plain.txt", b"plain")
        file.writestr("train2017/packed.jpg", bytes(1000), compress_type=zipfile.ZIP_DEFLATED)
    return path


def test_places_hold_the_files(path: Path) -> None:
    images = ZipImages(path)
    data = path.read_bytes()
    for name, content in [*FILES.items(), ("plain.txt", b"plain")]:
        for known_as in {name, name.removeprefix("train2017/")}:
            assert known_as in images
            offset, size = images.extent(known_as)
            assert data[offset : offset + size] == content
    assert "train2017/" not in images and "none.jpg" not in images


def test_what_cannot_be_read_in_place_names_the_remedy(path: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"train2017.zip: train2017/packed.jpg is compressed .*unzip -q"):
        ZipImages(path).extent("packed.jpg")
    data = path.read_bytes()
    images = ZipImages(path)
    path.write_bytes(bytes(100) + data[100:])
    with pytest.raises(ShoalError, match="is damaged at train2017/0"):
        images.extent("000000000000.jpg")
    path.write_bytes(data[:-30])
    with pytest.raises(UsageError, match="no zip, or was cut short"):
        ZipImages(path)
    with pytest.raises(UsageError, match=r"none.zip: there is no such file"):
        ZipImages(tmp_path / "none.zip")
