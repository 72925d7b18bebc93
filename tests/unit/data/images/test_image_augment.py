"""Random draws for an image: pure, part by part, distributed as torchvision's, refused out of range."""

import dataclasses
import math
from collections import Counter

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from shoal.data.images.augment import _LIGHT_SCALES, _LIGHT_VECTORS, AugmentConfig, Box, draws
from shoal.errors import UsageError

ALL = AugmentConfig(brightness=0.4, contrast=0.3, saturation=0.2, hue=0.1, lighting=0.1, erase=0.5, blur=0.5)
SEED, NUM = 3, 4000


def drawn(config, num=NUM, height=480, width=640, size=224, epoch=0):
    return [draws(config, (SEED, epoch, index), height, width, size) for index in range(num)]


def distance(ours, theirs):
    """Kolmogorov and Smirnov's: the largest distance between two empirical distribution functions."""
    places = np.union1d(ours, theirs)
    below = [np.searchsorted(np.sort(values), places, "right") / len(values) for values in (ours, theirs)]
    return np.abs(below[0] - below[1]).max()


# Two samples of one distribution are farther apart once in ten thousand times; the seeds are fixed.
FARTHEST = 2.23 * math.sqrt(2 / NUM)


def test_draws_are_a_function_of_the_key_alone():
    first = drawn(ALL, 50)
    assert drawn(ALL, 50) == first
    assert len({d.crop for d in first}) > 45
    assert sum(a != b for a, b in zip(first, drawn(ALL, 50, epoch=1), strict=True)) == 50
    assert draws(ALL, (SEED + 1, 0, 0), 480, 640, 224) != first[0]


@pytest.mark.parametrize(
    ("off", "attributes"),
    [
        ({"flip": 0.0}, {"flip"}),
        ({"lighting": 0.0}, {"light"}),
        ({"erase": 0.0}, {"erased"}),
        ({"blur": 0.0}, {"blur"}),
        ({"hue": 0.0}, {"jitter"}),
        ({"crop": "padded", "padding": 200}, {"crop"}),
    ],
)
def test_switching_a_part_off_changes_no_other(off, attributes):
    for with_it, without in zip(drawn(ALL, 60), drawn(dataclasses.replace(ALL, **off), 60), strict=True):
        for field in dataclasses.fields(with_it):
            if field.name not in attributes:
                assert getattr(with_it, field.name) == getattr(without, field.name)
        if attributes == {"jitter"}:
            assert without.jitter == tuple(step for step in with_it.jitter if step[0] != "hue")


@pytest.mark.parametrize(
    ("height", "width", "area", "ratio"),
    [
        (480, 640, (0.08, 1.0), (3 / 4, 4 / 3)),
        (640, 427, (0.25, 0.5), (0.9, 1.1)),
        (100, 300, (0.3, 1.0), (3 / 4, 4 / 3)),  # most tries miss: 1 in 4 ends in the middle
    ],
)
def test_crops_are_distributed_as_torchvisions(height, width, area, ratio):
    config = AugmentConfig(area=area, ratio=ratio)
    ours = [d.crop for d in drawn(config, height=height, width=width)]
    torch.manual_seed(0)
    peer = v2.RandomResizedCrop(224, scale=area, ratio=ratio)
    image = torch.empty(3, height, width)
    theirs = [Box(**peer.make_params([image])) for _ in range(NUM)]
    for measure in (
        lambda b: b.height * b.width,
        lambda b: b.width / b.height,
        lambda b: b.top,
        lambda b: b.left,
        lambda b: b.top / (height - b.height + 1),
        lambda b: b.left / (width - b.width + 1),
    ):
        assert distance([measure(b) for b in ours], [measure(b) for b in theirs]) < FARTHEST
    assert all(b.top >= 0 and b.top + b.height <= height for b in ours)
    assert all(b.left >= 0 and b.left + b.width <= width for b in ours)


@pytest.mark.parametrize(("height", "width"), [(10, 1000), (1000, 10), (1, 1), (97, 311)])
def test_where_no_try_fits_the_middle_is_cut_as_by_torchvision(height, width):
    area, ratio = (4.0, 4.0), (3 / 4, 4 / 3)
    peer = v2.RandomResizedCrop(8, scale=area, ratio=ratio).make_params([torch.empty(3, height, width)])
    config = AugmentConfig(ratio=ratio)
    object.__setattr__(config, "area", area)  # four times the image: refused by the configuration
    assert draws(config, (SEED, 0, 0), height, width, 8).crop == Box(**peer)


def test_a_resized_crop_reaches_every_place():
    config = AugmentConfig(area=(1 / 6, 1 / 6), ratio=(1.0, 1.0))
    boxes = Counter(d.crop for d in drawn(config, 500, height=4, width=6))
    assert set(boxes) == {Box(top, left, 2, 2) for top in range(3) for left in range(5)}


def test_flips_say_nothing_about_crops():
    sample = drawn(AugmentConfig())
    for measure in (
        lambda b: b.height * b.width,
        lambda b: b.width / b.height,
        lambda b: b.left,
        lambda b: b.top,
    ):
        values = [measure(d.crop) for d in sample]
        assert abs(np.corrcoef(values, [d.flip for d in sample])[0, 1]) < 4 / math.sqrt(NUM)


def test_padded_crops_are_uniform_over_all_places():
    config = AugmentConfig(size=32, crop="padded", padding=4)
    places = Counter((d.crop.top, d.crop.left) for d in drawn(config, height=32, width=32, size=32))
    assert set(places) == {(top, left) for top in range(-4, 5) for left in range(-4, 5)}
    expected = NUM / 81
    assert (
        sum((n - expected) ** 2 / expected for n in places.values()) < 132
    )  # 80 degrees of freedom, p = 2e-4


def test_jitter_is_distributed_as_torchvisions():
    ours = [d.jitter for d in drawn(ALL)]
    orders = Counter(tuple(name for name, _ in jitter) for jitter in ours)
    assert len(orders) == 24
    assert sum((n - NUM / 24) ** 2 / (NUM / 24) for n in orders.values()) < 55  # 23 degrees, p = 2e-4
    torch.manual_seed(0)
    peer = v2.ColorJitter(0.4, 0.3, 0.2, 0.1)
    theirs = [peer.make_params([]) for _ in range(NUM)]
    for name in ("brightness", "contrast", "saturation", "hue"):
        factors = [dict(jitter)[name] for jitter in ours]
        assert distance(factors, [params[f"{name}_factor"] for params in theirs]) < FARTHEST


def test_factors_end_at_zero():
    factors = [dict(d.jitter)["saturation"] for d in drawn(AugmentConfig(saturation=1.5), 500)]
    assert 0 <= min(factors) < 0.05
    assert 2.45 < max(factors) <= 2.5


def test_flips_and_boxes_have_their_probabilities():
    sample = drawn(dataclasses.replace(ALL, flip=0.3, erase=0.2))
    assert abs(sum(d.flip for d in sample) / NUM - 0.3) < 0.03
    assert abs(sum(d.erased is not None for d in sample) / NUM - 0.2) < 0.03


def test_blurs_have_their_probability_and_a_uniform_deviation():
    blurs = np.array([d.blur for d in drawn(dataclasses.replace(ALL, blur=0.25))])
    assert abs((blurs > 0).mean() - 0.25) < 4 * math.sqrt(0.25 * 0.75 / NUM)
    uniform = np.linspace(0.1, 2.0, NUM)
    assert distance(blurs[blurs > 0], uniform) < 2.23 / math.sqrt((blurs > 0).sum())
    assert not any(d.blur for d in drawn(AugmentConfig(), 50))


def test_boxes_are_distributed_as_torchvisions():
    ours = [d.erased for d in drawn(AugmentConfig(erase=1.0), size=64)]
    torch.manual_seed(0)
    peer, image = v2.RandomErasing(p=1.0), torch.empty(3, 64, 64)
    params = [peer.make_params([image]) for _ in range(NUM)]
    theirs = [Box(p["i"], p["j"], p["h"], p["w"]) for p in params if p["v"] is not None]
    ours = [box for box in ours if box is not None]
    assert abs(len(ours) - len(theirs)) < 20
    for field in ("top", "left", "height", "width"):
        assert distance([getattr(b, field) for b in ours], [getattr(b, field) for b in theirs]) < FARTHEST


def test_lighting_noise_has_the_covariance_of_its_components():
    light = np.array([d.light for d in drawn(AugmentConfig(lighting=0.1), 20_000)])
    expected = 0.01 * _LIGHT_VECTORS @ np.diag(_LIGHT_SCALES**2) @ _LIGHT_VECTORS.T
    found = light.T @ light / len(light)
    assert np.abs(found - expected).max() < 0.03 * expected.max()
    assert np.abs(light.mean(axis=0)).max() < 4 * math.sqrt(expected.max() / len(light))
    # Each component by itself is normal: so is its fourth moment (3).
    parts = light @ _LIGHT_VECTORS / (0.1 * _LIGHT_SCALES)
    assert np.abs((parts**4).mean(axis=0) - 3).max() < 0.25


def test_lighting_vectors_are_orthonormal():
    assert np.abs(_LIGHT_VECTORS.T @ _LIGHT_VECTORS - np.eye(3)).max() < 1e-3


def test_the_side_grows_by_multiples_of_32():
    config = AugmentConfig(size=192, first_size=128, growth=(4, 12))
    assert [config.size_at(e) for e in range(14)] == [*[128] * 7, *[160] * 3, *[192] * 4]
    assert [config.size_at(e) for e in (0, 4, 1000)] == [128, 128, 192]
    assert {AugmentConfig(size=100).size_at(epoch) for epoch in range(5)} == {100}
    assert AugmentConfig(size=100, first_size=50, growth=(0, 2)).size_at(1) == 64
    assert AugmentConfig(size=100, first_size=50, growth=(0, 2)).size_at(2) == 100


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"size": 0}, "size 0 must be at least 1"),
        ({"first_size": -1}, "first_size -1"),
        ({"first_size": 16, "crop": "padded"}, "first_size needs crop 'resized'"),
        ({"area": (0.0, 1.0)}, "area 0.0 1.0 must be a range"),
        ({"area": (0.5, 1.5)}, "at most 1"),
        ({"area": (0.5, 0.1)}, "area 0.5 0.1"),
        ({"ratio": (2.0, 1.0)}, "ratio 2.0 1.0"),
        ({"ratio": (1.0, math.inf)}, "ratio 1.0 inf"),
        ({"padding": -1}, "padding -1"),
        ({"flip": 1.1}, "flip 1.1 must be from 0 to 1"),
        ({"flip": math.nan}, "flip nan"),
        ({"brightness": -0.1}, "brightness -0.1"),
        ({"contrast": math.inf}, "contrast inf"),
        ({"saturation": -1.0}, "saturation -1.0"),
        ({"hue": 0.6}, "hue 0.6 must be from 0 to 0.5"),
        ({"lighting": -1.0}, "lighting -1.0"),
        ({"erase": 2.0}, "erase 2.0"),
        ({"blur": 1.5}, "blur 1.5 must be from 0 to 1"),
        ({"growth": (3.0, 1.0)}, "growth 3.0 1.0"),
        ({"mean": (0.0, 0.0, math.nan)}, "mean"),
        ({"std": (0.0, 1.0, 1.0)}, "std"),
    ],
)
def test_values_out_of_their_range_are_refused(values, message):
    with pytest.raises(UsageError, match=message):
        AugmentConfig(**values)


@pytest.mark.parametrize(("height", "padding"), [(20, 4), (4, 4), (3, 20)])
def test_a_padded_crop_must_fit(height, padding):
    with pytest.raises(UsageError, match="does not fit an image of 40 × "):
        draws(AugmentConfig(size=32, crop="padded", padding=padding), (0, 0, 0), height, 40, 32)
