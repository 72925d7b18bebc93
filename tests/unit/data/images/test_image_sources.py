"""A preparation's notes of its source, and the images of each shard."""

import os

import numpy as np
import pytest

from shoal.data.images.prepare import ShardTask, images_of, num_shards, read_image
from shoal.data.images.reencode import MAX_IMAGE_BYTES, BadImage
from shoal.data.images.sources import Listing, SourceImage, write_listing
from shoal.errors import ShoalError


def test_a_listing_comes_back_by_number(tmp_path):
    odd = os.fsdecode(b"caf\xe9")  # a name that is not UTF-8
    images = [
        SourceImage("a/1", tmp_path / "a" / "1.jpg", 0, 10, 1),
        SourceImage(f"b/{odd}", tmp_path / odd, 0, 20, 0),
        SourceImage("c", tmp_path / "x.tar", 1 << 40, 30, -1, "y.tar: c.jpg", '{"boxes": ["ä\\n"]}'),
    ]
    totals = write_listing(iter(images), tmp_path, "train", num_classes=3)
    assert (totals.num_images, totals.num_bytes, totals.class_counts) == (3, 60, (1, 1, 0))
    listing = Listing(tmp_path, "train")
    assert [listing.image(number) for number in range(len(listing))] == images
    assert images[2].name == f"{tmp_path}/x.tar: y.tar: c.jpg" and images[0].name == f"{tmp_path}/a/1.jpg"


def test_equal_keys_are_refused_by_the_names_of_their_files(tmp_path):
    images = [SourceImage(key, tmp_path / f"{i}.jpg", 0, 1) for i, key in enumerate("abcadea")]
    with pytest.raises(ShoalError, match=r"0\.jpg and .*/3\.jpg would have the same name"):
        write_listing(images, tmp_path, "train", num_classes=0)


@pytest.mark.parametrize(("num_images", "count"), [(1, 1), (10, 3), (1000, 7), (5000, 40)])
def test_shards_share_all_images_evenly(num_images, count):
    shards = [images_of(ShardTask("train", number, count), num_images, seed=3) for number in range(count)]
    assert sorted(number for shard in shards for number in shard) == list(range(num_images))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    if num_images >= 1000:  # each is spread over the whole source
        assert all(abs(np.mean(shard) / num_images - 0.5) < 0.1 for shard in shards)
        other = images_of(ShardTask("validation", 0, count), num_images, seed=3)
        assert other != shards[0] != images_of(ShardTask("train", 0, count), num_images, seed=4)


@pytest.mark.parametrize(
    ("num_images", "num_bytes", "expected"),
    [(0, 0, 0), (5, 0, 1), (5, 99, 1), (5, 100, 1), (5, 101, 2), (5, 10_000, 5)],
)
def test_the_number_of_shards(num_images, num_bytes, expected):
    assert num_shards(num_images, num_bytes, 100) == expected


def test_an_image_that_changed_since_it_was_listed(tmp_path):
    path = tmp_path / "1.jpg"
    path.write_bytes(b"0123456789")
    assert read_image(SourceImage("1", path, 0, 10)) == b"0123456789"
    assert read_image(SourceImage("1", path, 2, 3, member="m")) == b"234"
    for size in (9, 11):
        with pytest.raises(ShoalError, match=r"1\.jpg has another size since"):
            read_image(SourceImage("1", path, 0, size))
    with pytest.raises(BadImage, match="are not read as images"):
        read_image(SourceImage("1", path, 0, MAX_IMAGE_BYTES + 1))
    path.unlink()
    with pytest.raises(ShoalError, match=r"1\.jpg: cannot be read: No such file .*; check the path"):
        read_image(SourceImage("1", path, 0, 10))
