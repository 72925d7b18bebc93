"""Image shards: what a tar holds is read by number, and each kind of damage is one clear error."""

import pickle
import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest

from shoal.atomic_io import sha256_of
from shoal.data.cache import CacheConfig
from shoal.data.images.manifest import ImageManifest
from shoal.data.images.shards import RECORD, ImageShards
from shoal.errors import ShoalError, UsageError
from synthetic_images import key_of, random_images, write_images

IMAGES = random_images(23)


@pytest.fixture
def prepared(tmp_path):
    write_images(tmp_path, IMAGES, num_shards=3)
    return tmp_path


def members(directory):
    """Return the members that Python's tarfile finds, the oracle: (name, bytes) in order."""
    found = []
    for path in sorted(directory.glob("*.tar")):
        with tarfile.open(path) as tar:
            found += [(member.name, tar.extractfile(member).read()) for member in tar]
    return found


@pytest.mark.parametrize("verify", ["sizes", "checksums"])
@pytest.mark.parametrize("num_shards", [1, 3, 23])
def test_every_image_is_what_the_tar_holds(tmp_path, num_shards, verify):
    write_images(tmp_path, IMAGES, num_shards=num_shards)
    shards = ImageShards(tmp_path, "train", verify=verify)
    found = members(tmp_path)
    assert len(shards) == len(IMAGES)
    assert [bytes(shards.read(i)) for i in range(23)] == [data for name, data in found[::2]] == IMAGES
    assert [bytes(shards.extra(i)) for i in range(23)] == [data for name, data in found[1::2]]
    assert shards.labels.tolist() == [i % 3 for i in range(23)]
    assert shards.sizes.tolist() == [[10 + i, 20] for i in range(23)]
    assert shards.name(22) == f"{tmp_path}/train-{num_shards - 1:05d}.tar: {key_of(22)}"
    assert shards.labels.dtype == shards.sizes.dtype == np.int64


@pytest.mark.parametrize("verify", ["sizes", "checksums"])
def test_images_in_tfrecords_are_those_of_tars(tmp_path, verify):
    write_images(tmp_path / "tars", IMAGES, num_shards=3)
    write_images(tmp_path / "records", IMAGES, num_shards=3, container="tfrecord")
    cache = CacheConfig(directory=tmp_path / "cache", num_bytes=1 << 20)
    tars = ImageShards(tmp_path / "tars", "train")
    for shards in (ImageShards(tmp_path / "records", "train", verify=verify, cache=c) for c in (None, cache)):
        assert [bytes(shards.read(i)) for i in range(23)] == IMAGES
        assert shards.labels.tolist() == tars.labels.tolist()
        assert shards.sizes.tolist() == tars.sizes.tolist()
        names = [
            tars.name(i).replace("/tars/", "/records/").replace(".tar:", ".tfrecord:") for i in range(23)
        ]
        assert [shards.name(i) for i in range(23)] == names
    assert shards.cache_counts.num_filled == 3


def test_a_tfrecord_of_another_preparation(tmp_path):
    write_images(tmp_path, IMAGES, num_shards=3, container="tfrecord")
    path = tmp_path / "train-00001.tfrecord"
    data = bytearray(path.read_bytes())
    data[8] ^= 1  # of the checksum of the first record's length
    path.write_bytes(data)
    assert "does not fit its index" in (message := refused(tmp_path))
    assert f"{path} " in message and "no record of its size" in message


@pytest.mark.parametrize("container", ["tar", "tfrecord"])
@pytest.mark.parametrize("head", [-1, 5, 1 << 30])
def test_an_index_with_another_head(tmp_path, head, container):
    write_images(tmp_path, IMAGES, num_shards=3, container=container)
    rewrite(tmp_path, "train-00001", lambda records: records["head"].__setitem__(4, head))
    assert f"image 4 has no head of a record of a {container}" in refused(tmp_path)


def test_a_split_without_images_and_numbers_beyond_the_end(tmp_path):
    write_images(tmp_path, [], split="validation")
    empty = ImageShards(tmp_path, "validation")
    assert len(empty) == 0 and empty.sizes.shape == (0, 2)
    for number in (0, -1):
        with pytest.raises(IndexError, match=f"image {number} of 0"):
            empty.read(number)
    with pytest.raises(UsageError, match="there is no split 'train'"):
        ImageShards(tmp_path, "train")
    with pytest.raises(UsageError, match=r"has no manifest.json"):
        ImageShards(tmp_path / "elsewhere", "train")


def test_only_the_place_is_pickled(prepared):
    cache = CacheConfig(directory=prepared / "cache", num_bytes=1 << 20)
    shards = ImageShards(prepared, "train", verify="checksums", cache=cache)
    data = pickle.dumps(shards)
    assert len(data) < 1000
    again = pickle.loads(data)
    assert [bytes(again.read(i)) for i in range(23)] == IMAGES
    assert again.cache_counts.num_filled == 3
    (prepared / "train-00001.tar").write_bytes(bytes((prepared / "train-00001.tar").stat().st_size))
    with pytest.raises(ShoalError, match="wrong checksum"):
        pickle.loads(data)


def test_asking_for_images_ahead_changes_nothing(prepared):
    shards = ImageShards(prepared, "train")
    shards.will_need([22, 0, 22, 7])
    assert bytes(shards.read(22)) == IMAGES[22]


# ---- damage ---------------------------------------------------------------------------------------------


def refused(directory, *, verify="sizes"):
    with pytest.raises(ShoalError) as error:
        ImageShards(directory, "train", verify=verify)
    message = str(error.value)
    assert "\n" not in message and "again" in message
    return message


def test_a_shard_that_was_cut_short_or_is_missing(prepared):
    path = prepared / "train-00001.tar"
    whole = path.read_bytes()
    path.write_bytes(whole[:-512])
    assert f"{path} was cut short: it has {len(whole) - 512:,} bytes, the manifest says" in refused(prepared)
    path.write_bytes(whole + b"x")
    assert f"{path} is too long" in refused(prepared)
    path.unlink()
    assert f"{path} is missing, though the manifest names it" in refused(prepared)


def test_an_index_that_was_cut_short_or_changed(prepared):
    path = prepared / "train-00002.index"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert f"{path} was cut short" in refused(prepared)
    path.write_bytes(whole[:-1] + b"\x01")
    assert f"{path} has the wrong checksum" in refused(prepared)


def test_one_changed_byte_is_found_by_checksums_only(prepared):
    path = prepared / "train-00000.tar"
    data = bytearray(path.read_bytes())
    data[700] ^= 1
    path.write_bytes(data)
    ImageShards(prepared, "train")
    assert f"{path} has the wrong checksum" in refused(prepared, verify="checksums")


def test_a_shard_of_another_preparation_with_the_same_size(prepared, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    write_images(other, random_images(23, size=(240, 860), seed=1), num_shards=3)
    for name in ("train-00000.tar", "train-00001.tar"):
        if (other / name).stat().st_size == (prepared / name).stat().st_size:
            shutil.copy(other / name, prepared / name)
            assert "does not fit its index" in (message := refused(prepared))
            assert str(prepared / name) in message
            return
    pytest.fail("the test needs two tars of one size")


def rewrite(directory, name, change):
    """Change the records of an index, and the manifest's checksum of it with them."""
    path = directory / f"{name}.index"
    records = np.fromfile(path, RECORD)
    change(records)
    records.tofile(path)
    text = (directory / "manifest.json").read_text()
    info = next(info for info in ImageManifest.load(directory).splits["train"] if info.name == name)
    (directory / "manifest.json").write_text(text.replace(info.files["index"]["sha256"], sha256_of(path)))


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("label", 3, r"image 4 has label 3 of 3 classes"),
        ("label", -2, r"image 4 has label -2 of 3 classes"),
        ("offset", 1 << 40, r"image 4 has .* bytes at 1,099,511,627,776 of a tar of"),
        ("offset", (1 << 63) - 1, r"image 4 has .* bytes at 9,223,372,036,854,775,807 of a tar of"),
        ("extra_offset", (1 << 63) - 1, r"image 4 has .* bytes at 9,223,372,036,854,775,807 of a tar of"),
        ("offset", 0, r"image 4 has .* bytes at 0 of a tar"),
        ("size", 0, r"image 4 has 0 bytes at"),
        ("extra_size", 1 << 30, r"image 4 has 1,073,741,824 bytes at"),
    ],
)
def test_an_index_that_cannot_be(prepared, field, value, words):
    def change(records):
        records[field][4] = value

    rewrite(prepared, "train-00001", change)
    with pytest.raises(ShoalError, match=words) as error:
        ImageShards(prepared, "train")
    assert str(prepared / "train-00001.index") in str(error.value)


def test_a_manifest_with_another_count(prepared):
    path = prepared / "manifest.json"
    path.write_text(path.read_text().replace('"num_images": 8', '"num_images": 9'))
    assert f"{8 * RECORD.itemsize} bytes are not the records of 9 images" in refused(prepared)


def test_no_boto3_is_said(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "boto3", None)
    with pytest.raises(ShoalError, match=r"pip install 'boto3>=1.40'"):
        ImageShards("s3://bucket/prefix", "train")


@pytest.mark.parametrize("location", ["s3://", "s3:", Path("s3://")])
def test_a_location_without_a_bucket(location):
    with pytest.raises(UsageError, match="names no bucket; write s3://bucket/prefix"):
        ImageShards(location, "train")
