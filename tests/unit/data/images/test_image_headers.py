"""Formats by list, and sizes that are too large, before anything is decoded."""

import io
import struct

import numpy as np
import pytest
from PIL import Image

from image_files import announcing, encoded, photo
from shoal.data.images import headers
from shoal.data.images.headers import FORMATS, BadImage, check_jpeg, open_image
from shoal.data.images.reencode import ReencodeConfig, reencode
from shoal.data.images.transform import decode
from shoal.errors import ShoalError

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 30\n%%EndComments\nshowpage\n%%EOF\n"


def after_begin(data, inserted):
    return data[:2] + inserted + data[2:]


def segment(marker, body):
    return bytes((0xFF, marker)) + struct.pack(">H", len(body) + 2) + body


def with_thumbnail():
    """A JPEG within EXIF stands before the picture's own header."""
    return after_begin(encoded(photo(40, 30)), segment(0xE1, b"Exif\0\0" + encoded(photo(8, 8))))


JPEGS = {
    "rgb": encoded(photo(40, 30)),
    "grey": encoded(photo(40, 30, mode="L")),
    "cmyk": encoded(photo(40, 30, mode="CMYK")),
    "progressive": encoded(photo(40, 30), progressive=True),
    "restarts": encoded(photo(40, 30), restart_marker_blocks=1),
    "optimised": encoded(photo(40, 30), optimize=True),
    "profile": encoded(photo(40, 30), icc_profile=bytes(range(256)) * 300),
    "thumbnail": with_thumbnail(),
    "comment like a header": after_begin(encoded(photo(40, 30)), segment(0xFE, segment(0xC0, bytes(20)))),
    "fill bytes": after_begin(encoded(photo(40, 30)), b"\xff" * 7),
    "bytes between": after_begin(
        encoded(photo(40, 30)), segment(0xFE, b"") + b"what \x00 is this \xff\x00 here"
    ),
    "markers alone": after_begin(encoded(photo(40, 30)), b"\xff\x01\xff\xd0\xff\xd7"),
    "many pictures": encoded(photo(40, 30), "MPO", save_all=True, append_images=[photo(50, 50)]),
}


NOT_PILLOWS = ("bytes between", "markers alone")  # libjpeg reads them


@pytest.mark.parametrize("name", JPEGS)
def test_the_size_of_a_jpeg_is_the_one_that_is_decoded(name, monkeypatch):
    """One pixel less than it has is too few; as many as it has are enough."""
    data = JPEGS[name]
    assert decode(data).shape == (30, 40, 3)
    monkeypatch.setattr(headers, "MAX_PIXELS", 1200)
    check_jpeg(data)
    assert decode(data).shape == (30, 40, 3)
    monkeypatch.setattr(headers, "MAX_PIXELS", 1199)
    for look in (check_jpeg,) if name in NOT_PILLOWS else (check_jpeg, open_image):
        with pytest.raises(BadImage, match="has more than 1,199 pixels"):
            look(data)
    with pytest.raises(ShoalError, match=r"^not an image that can be decoded: it has more than 1,199 pixels"):
        decode(memoryview(data))


def test_a_jpeg_without_a_size():
    whole = JPEGS["rgb"]
    frame = whole.index(b"\xff\xc0")
    for data in (b"\xff\xd8", whole[: frame + 8], b"\xff\xd8" + bytes(500), b"\xff\xd8" + b"\xff" * 500):
        with pytest.raises(BadImage, match="without a frame header"):
            check_jpeg(data)
    for data in (whole[:2] + whole[whole.index(b"\xff\xda") :], b"\xff\xd8\xff\xd9" + whole):
        with pytest.raises(BadImage, match="without a frame header"):
            check_jpeg(data)
    check_jpeg(whole[: frame + 9])


def saved(form):
    for mode in ("RGB", "L", "1"):
        out = io.BytesIO()
        try:
            photo(64, 64, mode=mode).save(out, form)
        except (OSError, KeyError, ValueError):
            continue
        return out.getvalue()
    return b""


def every_format():
    Image.init()
    return sorted(set(Image.SAVE) - {"IM"})  # Pillow 13 warns that it will go


@pytest.mark.parametrize("form", every_format())
def test_only_listed_formats_are_opened(form):
    """Whatever else Pillow writes is refused before its reader runs."""
    data = EPS if form == "EPS" else saved(form)
    known = form in (*FORMATS, "MPO")
    try:
        with open_image(data) as image:
            assert known or image.format in FORMATS, form
            assert image.size == (64, 64)
    except BadImage as error:
        assert not known
        assert str(error) == ("is not an image of a known format (JPEG, PNG, GIF, BMP, PPM, TIFF, WEBP)")


def test_postscript_is_not_run():
    for read in (lambda data: reencode(data, ReencodeConfig()), decode):
        with pytest.raises((BadImage, ShoalError), match=r"is not an image of a known format \(JPEG, PNG"):
            read(EPS)


@pytest.mark.parametrize("form", ["JPEG", "PNG", "GIF", "BMP", "TIFF", "PPM"])
def test_a_header_that_announces_too_much(form):
    """60,000 x 60,000 pixels would be 10.8 GB; nothing is decoded, so nothing is allocated."""
    data = announcing(form, 60_000, 60_000)
    with pytest.raises(BadImage, match="has more than 89,478,485 pixels"):
        reencode(data, ReencodeConfig())
    with pytest.raises(ShoalError, match="not an image that can be decoded: it has more than 89,478,485 pix"):
        decode(data)


def test_one_limit_for_all():
    """Pillow warns from there on, and refuses from twice as many."""
    assert headers.MAX_PIXELS == Image.MAX_IMAGE_PIXELS
    for form, width in (("PNG", 10_000), ("JPEG", 10_000)):
        data = announcing(form, width, 9_000)
        with pytest.raises(BadImage, match="pixels"):
            open_image(data)


def test_several_frames_are_no_image():
    frames = [photo(40, 30, seed=seed) for seed in range(3)]
    for form in ("GIF", "WEBP", "TIFF"):
        data = encoded(frames[0], form, save_all=True, append_images=frames[1:])
        with pytest.raises(ShoalError, match="it is not a single image: it has several frames"):
            decode(data)
        assert decode(encoded(frames[0], form)).shape == (30, 40, 3)


@pytest.mark.parametrize("form", ["PNG", "BMP", "PPM", "TIFF"])
def test_other_formats_are_decoded_to_their_pixels(form):
    assert np.array_equal(decode(encoded(photo(40, 30), form)), np.asarray(photo(40, 30)))
