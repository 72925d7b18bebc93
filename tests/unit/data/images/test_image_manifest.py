"""Manifest, index and tar of image shards: what is written is read by us and by others, damage is named."""

import json
import subprocess
import sys
import tarfile

import numpy as np
import pytest

from shoal.data.images.manifest import ImageManifest
from shoal.data.images.shards import RECORD, ImageShardWriter
from shoal.errors import ShoalError, UsageError

IMAGES = [
    {"key": "cat/1", "data": b"one", "label": 3, "width": 5, "height": 4},
    {"key": "lang/" + "ä" * 120, "data": b"x" * 1536, "label": 0, "width": 7, "height": 6},
    {"key": "000042", "data": b"y" * 513, "width": 70_000, "height": 1, "annotations": b'{"boxes": []}'},
    {"key": "both", "data": b"", "label": 12, "width": 1, "height": 1, "annotations": b"[1]"},
]


def write(path, name="train-00000", images=IMAGES):
    with ImageShardWriter(path, name) as writer:
        for image in images:
            writer.add(**image)
        return writer.finish()


def prepare(path):
    manifest = ImageManifest(
        classes=("Katze", "dog"), source="made by hand", splits={"train": (write(path),)}, skipped=2
    )
    manifest.save(path)
    return manifest


def test_the_index_finds_what_the_tar_holds(tmp_path):
    info = write(tmp_path)
    data, records = (
        (tmp_path / "train-00000.tar").read_bytes(),
        np.fromfile(tmp_path / "train-00000.index", RECORD),
    )
    assert (info.name, info.num_images, len(records)) == ("train-00000", 4, 4)
    expected = []
    for image, record in zip(IMAGES, records, strict=True):
        label = image.get("label", -1)
        assert data[record["offset"] :][: record["size"]] == image["data"]
        assert data[record["extra_offset"] :][: record["extra_size"]] == image.get(
            "annotations", str(label).encode()
        )
        assert [record[name] for name in ("label", "width", "height", "head")] == [
            label, image["width"], image["height"], 0,
        ]  # fmt: skip
        expected.append((f"{image['key']}.jpg", image["data"]))
        if label >= 0:
            expected.append((f"{image['key']}.cls", str(label).encode()))
        if "annotations" in image:
            expected.append((f"{image['key']}.json", image["annotations"]))
    with tarfile.open(tmp_path / "train-00000.tar") as tar:
        assert [(member.name, tar.extractfile(member).read()) for member in tar] == expected


def test_gnu_tar_reads_it_without_a_word(tmp_path):
    write(tmp_path)
    done = subprocess.run(
        ["tar", "tf", str(tmp_path / "train-00000.tar")], capture_output=True, text=True, check=True
    )
    assert done.stderr == "" and len(done.stdout.splitlines()) == 9


def test_records_are_flat_and_little_endian(tmp_path):
    assert RECORD.itemsize == 40
    records = np.array([(1, 2, -1, 3, 4, 1 << 40, 5, 0)], dtype=RECORD)
    assert records.tobytes() == b"".join(
        value.to_bytes(size, "little", signed=True)
        for value, size in ((1, 8), (2, 4), (-1, 4), (3, 4), (4, 4), (1 << 40, 8), (5, 4), (0, 4))
    )


def test_the_manifest_comes_back(tmp_path):
    manifest = prepare(tmp_path)
    assert ImageManifest.load(tmp_path) == manifest
    assert manifest.num_images("train") == 4
    with pytest.raises(UsageError, match=r"no split 'trian'.*Did you mean 'train'"):
        manifest.shards("trian")


@pytest.mark.parametrize("suffix", ["tar", "index"])
@pytest.mark.parametrize("damage", ["bit", "cut", "gone", "another"])
def test_a_changed_shard_is_caught_by_its_checksum(tmp_path, suffix, damage):
    manifest = prepare(tmp_path)
    (info,) = manifest.shards("train")
    info.check(tmp_path)
    path = tmp_path / f"train-00000.{suffix}"
    data = bytearray(path.read_bytes())
    if damage == "bit":
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    elif damage == "cut":
        path.write_bytes(data[:-40])
    elif damage == "gone":
        path.unlink()
    else:
        (tmp_path / "other").mkdir()
        write(tmp_path / "other", images=[{**IMAGES[0], "key": "cat/2", "width": 6}, *IMAGES[1:]])
        path.write_bytes((tmp_path / "other" / path.name).read_bytes())
    words = "cannot be read: No such file" if damage == "gone" else "has the wrong checksum"
    with pytest.raises(ShoalError, match=rf"train-00000\.{suffix}.* {words}"):
        info.check(tmp_path)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (
            lambda value: value.update(version=2),
            ShoalError,
            "format version 2; .* only: update shoal, or run",
        ),
        (
            lambda value: value.update(version=0),
            ShoalError,
            "version 0; .* `shoal prepare images SOURCE --out",
        ),
        (lambda value: value.pop("version"), ShoalError, "has format version None; .* --overwrite`"),
        (lambda value: value.update(format="shoal-text"), ShoalError, "format is not 'shoal-images'"),
        (lambda value: value.pop("classes"), ShoalError, "a field is missing or wrong"),
        (lambda value: value["splits"]["train"][0].pop("files"), ShoalError, "a field is missing or wrong"),
        (lambda value: value.update(surprise=1), ShoalError, "a field is missing or wrong"),
    ],
)
def test_a_wrong_manifest_is_one_clear_error(tmp_path, change, error, words):
    prepare(tmp_path)
    path = tmp_path / "manifest.json"
    value = json.loads(path.read_bytes())
    change(value)
    path.write_text(json.dumps(value))
    with pytest.raises(error, match=words):
        ImageManifest.load(tmp_path)
    path.write_bytes(b"{")
    with pytest.raises(ShoalError, match="is not JSON: Expecting"):
        ImageManifest.load(tmp_path)
    path.unlink()
    with pytest.raises(
        UsageError, match=r"no prepared images.*`shoal prepare images.*, or for detection `shoal prepare coco"
    ):
        ImageManifest.load(tmp_path)


NO_FILE_NAMES = [
    "../train-00000", "/etc/train-00000", "a/b", ".train", "..", "",
    "train 0", "train\n", "tr\0ain", 7, None, ["a"],
]  # fmt: skip


def changed(path, change):
    value = json.loads((path / "manifest.json").read_bytes())
    change(value)
    (path / "manifest.json").write_text(json.dumps(value))


@pytest.mark.parametrize("name", NO_FILE_NAMES)
def test_a_name_that_is_none_of_a_file_in_the_folder(tmp_path, name):
    prepare(tmp_path)
    changed(tmp_path, lambda value: value["splits"]["train"][0].update(name=name))
    with pytest.raises(ShoalError) as error:
        ImageManifest.load(tmp_path)
    assert str(error.value) == (
        f"{tmp_path}/manifest.json: a field is missing or wrong (the file name {name!r} must be of letters, "
        "digits, '_', '-' and '.', and not begin with '.'); prepare the images again"
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda shard: shard.update(num_images=-1), "the counts of the shard 'train-00000' must be whole"),
        (lambda shard: shard.update(num_images="4"), "the counts of the shard 'train-00000' must be whole"),
        (lambda shard: shard["files"].pop("index"), "'train-00000' must have the files index"),
        (lambda shard: shard["files"].update({"../x": {}}), "'train-00000' must have the files index"),
        (lambda shard: shard["files"].pop("tar"), "'train-00000' must have one of the files tar, tfrecord"),
        (lambda shard: shard.update(files=[]), "'train-00000' must have the files index"),
        (lambda shard: shard["files"]["tar"].update(bytes=-1), "train-00000.tar must have a number of bytes"),
        (
            lambda shard: shard["files"]["tar"].update(bytes="9"),
            "train-00000.tar must have a number of bytes",
        ),
        (lambda shard: shard["files"]["tar"].update(sha256="../" * 8), "tar must have .* a SHA-256 of 64"),
        (lambda shard: shard["files"].update(tar=None), "train-00000.tar must have a number of bytes"),
    ],
)
def test_facts_that_cannot_be(tmp_path, change, words):
    prepare(tmp_path)
    changed(tmp_path, lambda value: change(value["splits"]["train"][0]))
    with pytest.raises(ShoalError, match=rf"manifest\.json: a field is missing or wrong \(.*{words}"):
        ImageManifest.load(tmp_path)


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from shoal.data.images.shards import ImageShardWriter
from shoal.errors import ShoalError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
limit = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
writer = ImageShardWriter(Path(sys.argv[1]), "train-00001")
try:
    for number in range(3_000):
        writer.add(str(number), bytes(50), label=1, width=1, height=1)
    writer.finish()
except ShoalError as error:
    print(error)
    sys.exit(error.exit_code)
"""


@pytest.mark.parametrize(
    ("limit", "path"),
    [
        (2 << 20, "train-00001.tar"),  # while images are added
        (6_144_500, "train-00001.tar"),  # in the last flush
    ],
)
def test_a_full_disk_loses_nothing(tmp_path, limit, path):
    """A limit on file size stands for the full disk: the same write fails, with an errno of the same kind."""
    write(tmp_path)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    result = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path), str(limit)],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 1, result.stderr
    assert f"{path}: no space left" in result.stdout and not result.stderr
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before
