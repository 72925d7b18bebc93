"""From bytes to the model's input, against the same steps by torchvision; what cannot be decoded."""

import io
import math
import pickle
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from shoal.data.images import transform
from shoal.data.images.augment import IMAGENET_MEAN, IMAGENET_STD, AugmentConfig, draws
from shoal.data.images.transform import CentreTransform, TrainTransform, decode
from shoal.errors import ShoalError, UsageError

KEY = (7, 2, 31)


def picture(height, width, seed=0):
    """A picture with structure at all scales, so that a shift by a pixel shows."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (5, 7, 3), dtype=np.uint8)).resize((width, height))
    noise = rng.integers(-20, 20, (height, width, 3))
    return Image.fromarray((np.asarray(coarse) + noise).clip(0, 255).astype(np.uint8))


def encoded(image, kind="JPEG", **options):
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def tensor_of(data):
    return torch.from_numpy(decode(data)).permute(2, 0, 1)


def output(size, dtype=np.float32):
    return np.full((3, size, size), 77, dtype)


def made(make, data, key=KEY, *, size=None, dtype=np.float32):
    out = output(size or make.size_at(key[1]), dtype)
    make(data, out, key)
    return out


def test_a_training_image_is_torchvisions_step_by_step():
    config = AugmentConfig(
        size=96, brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1, lighting=0.1, erase=0.5
    )
    train, data = TrainTransform(config), encoded(picture(200, 300))
    peers = {name: getattr(F, f"adjust_{name}") for name in ("brightness", "contrast", "saturation", "hue")}
    num_flipped = num_erased = 0
    for index in range(24):
        d = draws(config, (0, 0, index), 200, 300, 96)
        crop = d.crop
        image = F.resized_crop(
            tensor_of(data), crop.top, crop.left, crop.height, crop.width, [96, 96], antialias=True
        )
        image = F.horizontal_flip(image) if d.flip else image
        image = F.to_dtype(image, torch.float32, scale=True)
        for name, factor in d.jitter:
            image = peers[name](image, factor)
        image = image + torch.tensor(d.light)[:, None, None]
        image = F.normalize(image, IMAGENET_MEAN, IMAGENET_STD)
        if (box := d.erased) is not None:
            image = F.erase(image, box.top, box.left, box.height, box.width, torch.zeros(3, 1, 1))
        # Before normalisation a step of 1/255 is at least 1/255/0.229; this is a hundredth of it.
        assert np.abs(made(train, data, (0, 0, index)) - image.numpy()).max() < 1e-4
        num_flipped += d.flip
        num_erased += d.erased is not None
    assert 0 < num_flipped < 24 and 0 < num_erased < 24


def gaussian(pixels, deviation):
    """The formula in float64: a sum of neighbours along rows, then columns, of an image that is mirrored."""
    radius = math.ceil(3 * deviation)
    weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / deviation) ** 2)
    weights /= weights.sum()
    padded = np.pad(pixels.astype(np.float64), ((radius,) * 2, (radius,) * 2, (0, 0)), mode="reflect")
    for axis in (0, 1):
        padded = np.apply_along_axis(np.convolve, axis, padded, weights, "valid")
    return padded


@pytest.mark.parametrize("deviation", [0.1, 0.7, 2.0])
def test_a_blur_is_gauss_s_to_the_nearest_step(deviation):
    pixels = np.array(picture(40, 50))
    found = transform.blurred(pixels, deviation)
    assert found.dtype == np.uint8 and found.shape == pixels.shape
    assert np.abs(found - gaussian(pixels, deviation)).max() < 0.5 + 1e-3
    assert transform.blurred(pixels[:2, :3], 2.0).shape == (2, 3, 3)  # smaller than the Gaussian


def test_blurred_images_are_those_whose_draw_says_so():
    config = AugmentConfig(size=64, blur=0.5)
    sharp, blurry = TrainTransform(replace(config, blur=0.0)), TrainTransform(config)
    data, num_blurred = encoded(picture(100, 120)), 0
    for index in range(16):
        d = draws(config, (0, 0, index), 100, 120, 64)
        pixels = made(sharp, data, (0, 0, index), dtype=np.uint8)
        if d.blur:
            pixels = transform.blurred(pixels.transpose(1, 2, 0), d.blur).transpose(2, 0, 1)
        assert (made(blurry, data, (0, 0, index), dtype=np.uint8) == pixels).all()
        num_blurred += d.blur > 0
    assert 0 < num_blurred < 16


@pytest.mark.parametrize(
    ("height", "width"), [(200, 300), (300, 200), (64, 64), (65, 97), (40, 41), (256, 90)]
)
@pytest.mark.parametrize(("size", "resize"), [(48, 64), (47, 64), (33, 40), (64, 64)])
def test_validation_is_torchvisions_resize_and_centre_crop(height, width, size, resize):
    data = encoded(picture(height, width))
    peer = v2.Compose([v2.Resize(resize, antialias=True), v2.CenterCrop(size)])
    expected = peer(tensor_of(data))
    centre = CentreTransform(size, resize)
    np.testing.assert_array_equal(made(centre, data, dtype=np.uint8), expected.numpy())
    normal = F.normalize(F.to_dtype(expected, torch.float32, scale=True), IMAGENET_MEAN, IMAGENET_STD)
    assert np.abs(made(centre, data) - normal.numpy()).max() < 1e-5
    out = output(size)
    centre(data, out)  # needs no key
    np.testing.assert_array_equal(out, made(centre, data))


@pytest.mark.parametrize(("height", "width", "fraction"), [(200, 300, 0.875), (301, 201, 0.8), (80, 80, 1.0)])
def test_a_fraction_of_the_middle_is_cut_then_resized(height, width, fraction):
    data = encoded(picture(height, width))
    side = round(fraction * min(height, width))
    expected = v2.Compose([v2.CenterCrop(side), v2.Resize((48, 48), antialias=True)])(tensor_of(data))
    centre = CentreTransform(48, None, fraction=fraction)
    np.testing.assert_array_equal(made(centre, data, dtype=np.uint8), expected.numpy())


def test_a_padded_crop_is_cut_from_the_mirrored_border():
    config = AugmentConfig(size=32, crop="padded", padding=4)
    data = encoded(picture(32, 40))
    padded = F.pad(tensor_of(data), [4], padding_mode="reflect")
    for index in range(40):
        d = draws(config, (1, 0, index), 32, 40, 32)
        expected = padded[:, d.crop.top + 4 :, d.crop.left + 4 :][:, :32, :32]
        expected = F.horizontal_flip(expected) if d.flip else expected
        found = made(TrainTransform(config), data, (1, 0, index), dtype=np.uint8)
        np.testing.assert_array_equal(found, expected.numpy())


def test_types_and_layouts_hold_the_same_image():
    config = AugmentConfig(size=64, brightness=0.2, lighting=0.1, erase=1.0)
    train, data = TrainTransform(config), encoded(picture(90, 80))
    plain = made(train, data)
    last = np.empty((64, 64, 3), np.float32)
    train(data, last.transpose(2, 0, 1), KEY)
    np.testing.assert_array_equal(last.transpose(2, 0, 1), plain)
    bits = torch.from_numpy(plain).to(torch.bfloat16).view(torch.uint16).numpy()
    np.testing.assert_array_equal(made(train, data, dtype=np.uint16), bits)
    pixels = made(train, data, dtype=np.uint8)
    columns = [np.reshape(value, (3, 1, 1)) for value in (IMAGENET_MEAN, IMAGENET_STD)]
    original = (plain * columns[1] + columns[0]) * 255
    assert np.abs(pixels - original.clip(0, 255)).max() < 0.501
    assert (plain == 0).all(axis=0).sum() >= 0.01 * 64 * 64  # the erased box has the mean colour


def test_the_epoch_decides_the_side():
    config = AugmentConfig(size=96, first_size=64, growth=(1, 3))
    train, data = TrainTransform(config), encoded(picture(90, 80))
    assert [made(train, data, (0, epoch, 5)).shape[1] for epoch in range(4)] == [64, 64, 64, 96]
    # Where batches of two epochs meet, the reader chooses: any side is filled.
    assert np.isfinite(made(train, data, (0, 0, 5), size=96)).all()


def test_threads_and_copies_make_the_same_images():
    train = TrainTransform(AugmentConfig(size=64, brightness=0.4, contrast=0.4, hue=0.1, lighting=0.1))
    images = [encoded(picture(100 + i, 120, seed=i)) for i in range(12)]
    alone = [made(train, data, (0, 0, i)) for i, data in enumerate(images)]
    copy = pickle.loads(pickle.dumps(train))
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda i: made(copy, images[i], (0, 0, i)), range(12)))
    np.testing.assert_array_equal(together, alone)


@pytest.mark.parametrize("decoder", [transform._with_torchvision, transform._with_pillow])
@pytest.mark.parametrize(
    ("mode", "kind"), [("L", "JPEG"), ("RGB", "PNG"), ("L", "PNG"), ("RGBA", "PNG"), ("CMYK", "JPEG")]
)
def test_other_colours_and_formats_become_rgb(monkeypatch, mode, kind, decoder):
    monkeypatch.setattr(transform, "_jpeg_decoder", lambda: decoder)
    image = picture(40, 50).convert(mode)
    pixels = decode(memoryview(encoded(image, kind)))
    assert pixels.shape == (40, 50, 3)
    expected = Image.open(io.BytesIO(encoded(image, kind))).convert("RGB")
    if mode != "RGBA":  # the colours under an alpha channel of 1 are the same by any rule
        assert np.abs(pixels.astype(int) - np.asarray(expected)).max() <= 3
    assert made(CentreTransform(32, 36), encoded(image, kind)).shape == (3, 32, 32)


JPEG = encoded(picture(64, 64))


@pytest.mark.parametrize("decoder", [transform._with_torchvision, transform._with_pillow])
@pytest.mark.parametrize(
    "data", [b"", b"not an image", JPEG[: len(JPEG) // 2], JPEG[:3], b"\xff\xd8" + bytes(500)]
)
def test_what_is_not_a_whole_image_is_said(monkeypatch, data, decoder):
    monkeypatch.setattr(transform, "_jpeg_decoder", lambda: decoder)
    with pytest.raises(ShoalError, match="not an image") as caught:
        decode(data)
    assert not isinstance(caught.value, UsageError)
    assert "\n" not in str(caught.value)


def test_a_small_image_is_no_padded_crop():
    with pytest.raises(UsageError, match="does not fit an image of 20 × 20"):
        made(TrainTransform(AugmentConfig(size=32, crop="padded")), encoded(picture(20, 20)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 0}, "size 0"),
        ({"size": 224, "resize": 200}, "size 224 must be at least 1 and at most resize, 200"),
        ({"fraction": 0.8}, "give one of the two"),
        ({"resize": None}, "give one of the two"),
        ({"resize": None, "fraction": 1.5}, "fraction 1.5"),
        ({"std": (0.0, 1.0, 1.0)}, "std"),
    ],
)
def test_centre_crops_out_of_range_are_refused(arguments, message):
    with pytest.raises(UsageError, match=message):
        CentreTransform(**arguments)
