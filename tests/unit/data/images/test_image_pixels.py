"""The pass over the pixels against torchvision and its formula in NumPy; all levels and layouts."""

import itertools
import random

import numpy as np
import pytest
import torch
from torchvision.transforms.v2 import functional as F

from shoal import native
from shoal.data.images.pixels import finish
from shoal.errors import UsageError

ONE, ZERO = (1.0, 1.0, 1.0), (0.0, 0.0, 0.0)
PEERS = {
    "brightness": F.adjust_brightness,
    "contrast": F.adjust_contrast,
    "saturation": F.adjust_saturation,
    "hue": F.adjust_hue,
}
LEVELS = native.simd_levels()
GREY = np.array([0.2989, 0.587, 0.114], np.float32)  # weights of red, green, blue: ITU-R BT.601


def image_of(seed, height=37, width=53):
    """Noise, gradients, grey and saturated areas: every branch of the hue, clamps at both ends."""
    rng = np.random.default_rng(seed)
    image = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    image[: height // 4] = np.linspace(0, 255, width)[:, None].astype(np.uint8)
    image[height // 4 : height // 3] //= 8
    image[height // 3 : height // 2, : width // 2] = rng.choice([0, 255], (1, 1, 3))
    return image


def torchvisions(image, jitter, dtype=torch.float32):
    pixels = F.to_dtype(torch.from_numpy(image).permute(2, 0, 1), dtype, scale=True)
    for name, factor in jitter:
        pixels = PEERS[name](pixels, factor)
    return F.to_dtype(pixels, torch.float32, scale=True).numpy() * 255


def random_jitter(rng):
    factors = {"hue": rng.uniform(-0.5, 0.5), **{name: rng.uniform(0, 2) for name in list(PEERS)[:3]}}
    return rng.sample(sorted(factors.items()), k=rng.randint(0, 4))


def finished(image, jitter=(), *, out=None, **options):
    out = np.empty((3, *image.shape[:2]), np.float32) if out is None else out
    finish(image, out, jitter=jitter, **{"scale": ONE, "shift": ZERO, **options})
    return out


def numpys(image, jitter, *, flip, scale, shift):
    """Compute what ``finish`` does, in NumPy."""
    seen = image[:, ::-1] if flip else image
    rgb = np.ascontiguousarray(seen.transpose(2, 0, 1)).astype(np.float32)
    for name, factor in jitter:
        rgb = (shift_hue(rgb, factor) if name == "hue" else adjusted(rgb, name, factor)).clip(0, 255)
    columns = [np.array(values, np.float32).reshape(3, 1, 1) for values in (scale, shift)]
    return rgb * columns[0] + columns[1]


def adjusted(rgb, name, factor):
    moved = rgb * np.float32(factor)
    if name != "brightness":
        grey = np.einsum("c,chw->hw", GREY, rgb)
        other = np.full_like(grey, grey.mean(dtype=np.float64)) if name == "contrast" else grey
        moved += other * np.float32(1.0 - factor)
    return moved


def shift_hue(rgb, shift):
    red, green, blue = rgb
    largest = rgb.max(axis=0)
    chroma = largest - rgb.min(axis=0)
    divisor = np.where(chroma > 0, chroma, np.float32(1))
    sixths = np.where(
        largest == red,
        (green - blue) / divisor,
        np.where(largest == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
    )
    sixths += np.float32(6.0 * shift)
    out = np.empty_like(rgb)
    for channel, n in enumerate((5, 3, 1)):
        k = np.mod(sixths + np.float32(n), np.float32(6))
        out[channel] = largest - chroma * np.minimum(k, 4 - k).clip(0, 1)
    return out


@pytest.mark.parametrize("order", list(itertools.permutations(PEERS)))
def test_jitter_is_torchvisions_on_floats_in_any_order(order):
    rng = random.Random(str(order))
    for seed in range(4):
        image = image_of(seed)
        jitter = [(n, rng.uniform(-0.5, 0.5) if n == "hue" else rng.uniform(0, 2)) for n in order]
        # A thousandth of a pixel's step, where the issue asks for one step.
        assert np.abs(finished(image, jitter) - torchvisions(image, jitter)).max() < 1e-3


@pytest.mark.parametrize("shift", [-0.5, -0.2, 0.01, 0.3, 0.5])
def test_hue_is_within_one_step_of_torchvisions_on_uint8(shift):
    image = image_of(0)
    theirs = torchvisions(image, [("hue", shift)], torch.uint8)
    assert np.abs(finished(image, [("hue", shift)]) - theirs).max() < 1.01


def test_jitter_is_as_near_to_torchvisions_on_uint8_as_that_drops_fractions():
    """Each adjustment there drops a fraction, up to one step; contrast and saturation the grey's as well."""
    rng = random.Random(0)
    for seed in range(40):
        jitter = [(name, rng.uniform(0, 2)) for name in rng.sample(list(PEERS)[:3], k=rng.randint(1, 3))]
        bound = 0.0
        for name, factor in jitter:
            bound = factor * bound + (0 if name == "brightness" else abs(1 - factor) * (bound + 1)) + 1
        theirs = torchvisions(image_of(seed), jitter, torch.uint8)
        assert np.abs(finished(image_of(seed), jitter) - theirs).max() < bound + 0.01


@pytest.mark.parametrize("level", LEVELS)
def test_all_levels_give_the_same_bits(level):
    rng = random.Random(1)
    for seed in range(12):
        image = image_of(
            seed, height=rng.randint(1, 9), width=rng.choice([1, 15, 16, 17, 255, 256, 257, 600])
        )
        options = {"jitter": random_jitter(rng), "flip": rng.random() < 0.5, "scale": (0.5, 1.5, 2.0)}
        np.testing.assert_array_equal(finished(image, **options), finished(image, level=level, **options))


def test_the_native_pass_is_numpys():
    rng = random.Random(2)
    for seed in range(20):
        image = image_of(seed)
        options = {
            "jitter": random_jitter(rng),
            "flip": seed % 2 == 0,
            "scale": (0.5, 1, 2),
            "shift": (1, 2, 3),
        }
        assert np.abs(finished(image, **options) - numpys(image, **options)).max() < 2e-3


@pytest.mark.parametrize("dtype", [np.float32, np.uint16, np.uint8])
@pytest.mark.parametrize("flip", [True, False])
def test_types_and_layouts_hold_the_same_values(dtype, flip):
    image, options = image_of(5), {"flip": flip, "scale": (0.7, 1.1, 1.3), "shift": (-30.0, 0.25, 9.0)}
    seen = image[:, ::-1] if flip else image
    exact = seen.transpose(2, 0, 1).astype(np.float32) * np.float32(options["scale"])[:, None, None]
    exact = torch.from_numpy(exact + np.float32(options["shift"])[:, None, None])
    expected = {
        np.float32: exact,
        np.uint16: exact.to(torch.bfloat16).view(torch.uint16),
        np.uint8: exact.clamp(0, 255).round().to(torch.uint8),
    }[dtype].numpy()
    batch = np.zeros((2, 37, 60, 3), dtype)  # an image inside a batch, rows apart
    outs = [
        np.empty((3, 37, 53), dtype),
        np.empty((37, 53, 3), dtype).transpose(2, 0, 1),
        batch[1, :, :53].transpose(2, 0, 1),
    ]
    for out in outs:
        np.testing.assert_array_equal(finished(image, out=out, **options), expected)
    assert not batch[0].any() and not batch[1, :, 53:].any()


def test_strided_pixels_are_read_where_they_lie():
    image = image_of(6)
    planes = np.ascontiguousarray(image.transpose(2, 0, 1)).transpose(1, 2, 0)
    jitter = [("contrast", 1.5), ("hue", 0.2)]
    for view in (image[3:20, 5:40], image[::-1], image[:, ::2], planes):
        np.testing.assert_array_equal(finished(view, jitter), finished(np.ascontiguousarray(view), jitter))


@pytest.mark.parametrize(
    ("image", "out"),
    [
        (np.zeros((4, 4, 4), np.uint8), np.zeros((3, 4, 4), np.float32)),
        (np.zeros((4, 4, 3), np.float32), np.zeros((3, 4, 4), np.float32)),
        (np.zeros((4, 4, 3), np.uint8), np.zeros((3, 4, 5), np.float32)),
        (np.zeros((4, 4, 3), np.uint8), np.zeros((4, 4, 3), np.float32)),
        (np.zeros((4, 4, 3), np.uint8), np.zeros((3, 4, 4), np.float64)),
        (np.zeros((4, 4, 3), np.uint8), np.zeros((3, 4, 8), np.float32)[:, :, ::2]),
    ],
)
def test_other_shapes_types_and_strides_are_refused(image, out):
    with pytest.raises(UsageError, match="finish an image: "):
        finish(image, out, scale=ONE, shift=ZERO)
