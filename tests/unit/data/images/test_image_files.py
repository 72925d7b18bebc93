"""Images read from files are, pixel for pixel, those that a shard of the same files gives."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from image_files import encoded, turned
from shoal.data.images.files import FileReader
from shoal.data.images.headers import JPEG_BEGIN
from shoal.data.images.manifest import ImageManifest
from shoal.data.images.reader import ImageReader
from shoal.data.images.reencode import ReencodeConfig, reencode
from shoal.data.images.shards import ImageShards, ImageShardWriter
from shoal.data.images.transform import CentreTransform
from shoal.errors import UsageError

NOISE = Image.fromarray(np.random.default_rng(3).integers(0, 256, (30, 40, 3), dtype=np.uint8))
"""A JPEG would change it."""
WIDE = (np.asarray(NOISE.convert("L")).astype(np.uint16) << 8) + 77
FILES = {
    "a.png": encoded(NOISE, "PNG"),
    "b.png": encoded(NOISE.convert("L"), "PNG"),
    "c.png": encoded(NOISE.convert("RGBA"), "PNG"),
    "d.png": encoded(Image.fromarray(WIDE), "PNG"),
    "e.gif": encoded(NOISE.convert("P"), "GIF"),
    "f.bmp": encoded(NOISE, "BMP"),
    "g.webp": encoded(NOISE, "WEBP", quality=60),
    "h.jpg": encoded(NOISE),
    "i.jpg": turned(6, seed=4),
    "j.jpg": encoded(NOISE.convert("CMYK")),
}


def test_files_give_the_pixels_of_their_shards(tmp_path: Path) -> None:
    for name, data in FILES.items():
        (tmp_path / name).write_bytes(data)
    with ImageShardWriter(tmp_path, "train-00000") as writer:
        for name, data in FILES.items():
            writer.add(name[0], **reencode(data, ReencodeConfig())._asdict(), label=0)
        shard = writer.finish()
    ImageManifest(classes=("x",), source="made", splits={"train": (shard,)}).save(tmp_path)
    shards = ImageShards(tmp_path, "train")
    assert [shards.read(n)[:2] == JPEG_BEGIN for n in range(10)] == [name.endswith("jpg") for name in FILES]
    files, centre = sorted(path for path in tmp_path.iterdir() if path.name in FILES), CentreTransform(24, 30)
    stored = ImageReader(shards, centre, seed=0, threads=1).batch(0, range(10))["images"]
    read = FileReader(files, centre, threads=1).batch(0, range(10))["images"]
    np.testing.assert_array_equal(read, stored)
    alike = ImageReader(
        shards, CentreTransform(30, 30, mean=(0, 0, 0), std=(1 / 255,) * 3), seed=0, threads=1
    )
    pixels = alike.batch(0, [0])["images"][0].transpose(1, 2, 0)
    np.testing.assert_allclose(pixels, np.asarray(NOISE)[:, 5:35], atol=1e-3)  # nothing was lost


@pytest.mark.parametrize(
    ("data", "words"),
    [(b"text", "not an image of a known format"), (FILES["a.png"][:-40], "cut short"), (b"", "is empty")],
)
def test_a_file_that_is_no_image_is_named(data: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(data)
    reader = FileReader([tmp_path / "bad.png"], CentreTransform(8, 8), threads=1)
    with pytest.raises(UsageError, match=rf"bad\.png: not an image that can be decoded: it .*{words}"):
        reader.batch(0, [0])
