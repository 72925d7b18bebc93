"""Reencoding of an image: nothing, or the same picture encoded again, or an error that says why."""

import io

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageOps

from image_files import ORIENTATION, encoded, photo, pixels, turned
from shoal.data.images.reencode import BadImage, ReencodeConfig, is_ambiguous, reencode
from shoal.data.images.transform import decode
from shoal.errors import UsageError

PLAIN = ReencodeConfig(quality=95)


@pytest.mark.parametrize(
    "data",
    [
        encoded(photo()),
        encoded(photo(mode="L")),
        encoded(photo(), progressive=True),
        encoded(photo(), quality=30, subsampling=0),
        turned(1),
        encoded(photo(), "PNG"),
        encoded(photo(mode="L"), "PNG"),
        encoded(photo(), "WEBP", lossless=True),
        encoded(photo(), "WEBP", quality=50),
        encoded(photo()) + b"what a camera wrote behind it",
        encoded(photo(), icc_profile=ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()),
    ],
    ids=[
        *("rgb", "grey", "progressive", "444", "upright"),
        *("png", "grey png", "webp", "lossy webp", "tail", "profile"),
    ],
)
def test_bytes_that_need_no_change_stay_as_they_are(data):
    found = reencode(data, ReencodeConfig(resize=30))
    assert found.data is data
    assert (found.width, found.height) == (40, 30)


def test_other_formats_become_the_same_pixels_as_png():
    picture, turned_exif = photo(), Image.Exif()
    turned_exif[0x0112] = 3
    frames = [photo(seed=1), photo(seed=2)]
    for data, pillow in (
        (encoded(picture, "BMP"), picture),
        (encoded(picture, "TIFF"), picture),
        (encoded(picture, "PPM"), picture),
        (encoded(picture.convert("P"), "GIF"), picture.convert("P").convert("RGB")),
        (encoded(picture.convert("RGBA"), "PNG"), picture),
        (encoded(picture.convert("P"), "PNG", transparency=0), picture.convert("P").convert("RGB")),
        (encoded(picture, "PNG", exif=turned_exif), picture.transpose(Image.Transpose.ROTATE_180)),
        (encoded(frames[0], "PNG", save_all=True, append_images=frames[1:]), frames[0]),
    ):
        found = reencode(data, PLAIN)
        assert (found.width, found.height, found.suffix) == (40, 30, "png")
        with Image.open(io.BytesIO(found.data)) as image:
            assert (image.format, image.mode, image.info, dict(image.getexif())) == ("PNG", "RGB", {}, {})
        np.testing.assert_array_equal(pixels(found.data), np.asarray(pillow))
        np.testing.assert_array_equal(decode(found.data), np.asarray(pillow))  # as training reads it


def test_cmyk_becomes_rgb_as_pillow_means_it():
    data = encoded(photo(mode="CMYK"))
    found = reencode(data, PLAIN)
    with Image.open(io.BytesIO(found.data)) as image:
        assert image.mode == "RGB"
    assert abs(pixels(found.data) - pixels(data)).max() <= 12
    # and not the negative, which a decoder without Adobe's convention shows
    assert abs(pixels(found.data) - np.asarray(photo()).astype(int)).mean() < 6


def test_greyscale_stays_greyscale_and_correct():
    grey = photo(mode="L")
    for picture, resize in (
        (encoded(grey, "PNG"), 0),
        (encoded(grey.convert("LA"), "PNG"), 0),
        (encoded(grey), 15),
    ):
        found = reencode(picture, ReencodeConfig(resize=resize, quality=95))
        with Image.open(io.BytesIO(found.data)) as image:
            assert image.mode == "L"
        expected = grey.resize((found.width, found.height), Image.Resampling.BOX)
        assert abs(pixels(found.data, "L") - np.asarray(expected).astype(int)).max() <= 8


def test_sixteen_bits_are_scaled_and_not_clipped():
    wide = (np.asarray(photo(mode="L")).astype(np.uint16) << 8) + 77
    found = reencode(encoded(Image.fromarray(wide), "PNG"), PLAIN)
    np.testing.assert_array_equal(pixels(found.data, "L"), wide >> 8)


@pytest.mark.parametrize("mode", ["P", "RGBA", "1"])
def test_other_modes_show_what_image_folder_shows(mode):
    data = encoded(photo().convert(mode), "PNG")
    np.testing.assert_array_equal(pixels(reencode(data, PLAIN).data), pixels(data))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_turns_as_pillow_does(orientation):
    data = turned(orientation)
    found = reencode(data, PLAIN)
    with Image.open(io.BytesIO(data)) as image:
        upright = ImageOps.exif_transpose(image)
    assert (found.width, found.height) == upright.size
    assert abs(pixels(found.data) - np.asarray(upright).astype(int)).max() <= 12
    with Image.open(io.BytesIO(found.data)) as image:
        assert image.getexif().get(0x0112, 1) == 1


@pytest.mark.parametrize(
    ("size", "limit", "expected"),
    [
        ((40, 30), 0, (40, 30)),
        ((40, 30), 30, (40, 30)),
        ((40, 30), 15, (20, 15)),
        ((30, 40), 15, (15, 20)),
        ((300, 33), 8, (73, 8)),
        ((29, 29), 28, (28, 28)),
    ],
)
def test_the_shorter_side_is_limited(size, limit, expected):
    found = reencode(encoded(photo(*size)), ReencodeConfig(resize=limit))
    with Image.open(io.BytesIO(found.data)) as image:
        assert image.size == (found.width, found.height) == expected


def test_the_turned_side_counts():
    found = reencode(turned(6, width=64, height=16), ReencodeConfig(resize=8))
    assert (found.width, found.height) == (8, 32)


JPEG = encoded(photo(200, 100), quality=90)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "is empty"),
        (b"<html>404 Not Found</html>", "is not an image"),
        (JPEG[: len(JPEG) // 2], "cut short"),
        (JPEG[:-2], "cut short"),
        (JPEG[:300], "cut short"),
        (encoded(photo(), "PNG")[:-40], "cut short"),
        (encoded(Image.fromarray(np.full((8, 8), 0.5, np.float32)), "TIFF"), "floating-point"),
        (encoded(Image.new("1", (30_000, 10_000)), "PNG"), "pixels"),
    ],
    ids=["empty", "html", "half", "no-end", "header", "png", "float", "bomb"],
)
def test_a_bad_image_says_why(data, words):
    with pytest.raises(BadImage, match=words):
        reencode(data, PLAIN)


def test_truncated_everywhere_is_found():
    """Wherever a file ends too early: nothing is passed on that torchvision would refuse in training."""
    for cut in range(1, len(JPEG), 97):
        with pytest.raises(BadImage):
            reencode(JPEG[:cut], PLAIN)


@pytest.mark.parametrize(("field", "value"), [("resize", -1), ("resize", 3), ("quality", 0), ("quality", 99)])
def test_settings_out_of_range_are_refused(field, value):
    with pytest.raises(UsageError, match=f"{field}={value}"):
        ReencodeConfig(**{field: value})


@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_has_the_size_of_its_annotations(orientation: int) -> None:
    data, stored = turned(orientation), (40, 30)
    found = reencode(data, PLAIN, stored)
    assert found.data is data and (found.width, found.height) == stored
    np.testing.assert_array_equal(decode(found.data), pixels(data))
    assert is_ambiguous(data, stored) == (orientation in (2, 3, 4))
    if orientation >= 5:
        assert reencode(data, PLAIN, (30, 40)) == reencode(data, PLAIN)
        assert not is_ambiguous(data, (30, 40))
    for other in [(77, 33), *([(30, 40)] if orientation < 5 else [])]:
        with pytest.raises(BadImage, match=f"has 40 x 30 pixels, but its annotations are for {other[0]} x"):
            reencode(data, PLAIN, other)


def test_a_square_image_that_is_turned_is_ambiguous() -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    data = encoded(photo().crop((0, 0, 30, 30)), exif=exif.tobytes())
    assert reencode(data, PLAIN, (30, 30)).data is data and is_ambiguous(data, (30, 30))
