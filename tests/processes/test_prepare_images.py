"""`shoal prepare images` as real processes: any number of them, killed, out of space, given bad input."""

from __future__ import annotations

import io
import json
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import prepare_jobs
import pytest
from PIL import Image

from forked import shoal
from forked_programs import FORKING
from image_files import announcing, encoded, photo, pixels, tar_of, turned, write_folder
from shoal.data.images.detect_source import detect_source
from shoal.data.images.dry_run import dry_run
from shoal.data.images.manifest import ImageManifest
from shoal.data.images.prepare import ImagePrepareConfig, prepare_images
from shoal.data.images.shards import RECORD, ImageShards
from shoal.data.images.synthetic import make_images
from shoal.env.settings import test_data_dir as data_dir
from shoal.errors import UsageError

# what a command line does with the errors of the package; `shoal` itself is started once, below
DRIVER = """
import json, sys
from pathlib import Path
from shoal.data.images.detect_source import detect_source
from shoal.data.images.prepare import ImagePrepareConfig, prepare_images
from shoal.errors import ShoalError
if __name__ == "__main__":
    source, out, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
    try:
        share = options.pop("validation", None)
        found = detect_source(Path(source), validation=share, seed=options.get("seed", 0))
        prepare_images(found, Path(out), config=ImagePrepareConfig(**options))
    except ShoalError as error:
        print("error:", error, file=sys.stderr)
        sys.exit(error.exit_code)
"""
pytestmark = pytest.mark.usefixtures("forked_pools")
DEADLINE_S = 240
CLASSES = ("ant", "bee", "cat", "dog")
NUM_TRAIN, NUM_VALIDATION = 120, 10


def command(source: Path, out: Path, **options: Any) -> list[str]:
    values = {"shard_bytes": 8_192, "processes": 2, **options}
    return [sys.executable, "-c", DRIVER, str(source), str(out), json.dumps(values)]


def prepare(
    source: Path, out: Path, *, most_bytes: int | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    return prepare_jobs.run(command(source, out, **options), most_bytes=most_bytes)


def contents(out: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(out.iterdir())}


def stored(out: Path, split: str) -> dict[str, tuple[bytes, int]]:
    """Image and label of each key, as the index has them."""
    found: dict[str, tuple[bytes, int]] = {}
    for info in ImageManifest.load(out).shards(split):
        info.check(out)
        data = (out / f"{info.name}.tar").read_bytes()
        with tarfile.open(out / f"{info.name}.tar") as tar:
            names = [name[:-4] for name in tar.getnames() if name.endswith((".jpg", ".png"))]
        for name, record in zip(names, np.fromfile(out / f"{info.name}.index", RECORD), strict=True):
            assert name not in found
            image = data[record["offset"] : record["offset"] + record["size"]]
            assert pixels(image).shape[:2] == (record["height"], record["width"])
            found[name] = (image, int(record["label"]))
    return found


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of every kind in four classes; the second of each ten is no plain JPEG."""
    kinds: list[Callable[[int], bytes]] = [
        lambda i: encoded(photo(seed=i), "PNG"),
        lambda i: encoded(photo(seed=i, mode="CMYK")),
        lambda i: encoded(photo(seed=i, mode="L")),
        lambda i: turned(6, seed=i),
    ]
    files = {}
    for number in range(NUM_TRAIN + NUM_VALIDATION):
        split = "train" if number < NUM_TRAIN else "val"
        kind = kinds[number // 10 % 4] if number % 10 == 1 else (lambda i: encoded(photo(seed=i)))
        files[f"{split}/{CLASSES[number % 4]}/{number:03d}.JPEG"] = kind(number)
    return write_folder(tmp_path_factory.mktemp("source") / "images", files)


@pytest.fixture(scope="module")
def whole(source: Path) -> Path:
    """The source, prepared without interruption."""
    done = prepare(source, out := source.parent / "whole")
    assert done.returncode == 0, done.stderr
    return out


def test_tfrecords_have_the_images_of_tars(source: Path, whole: Path, tmp_path: Path) -> None:
    done = prepare(source, out := tmp_path / "records", container="tfrecord")
    assert done.returncode == 0, done.stderr
    assert {path.suffix for path in out.glob("train-*")} == {".tfrecord", ".index"}
    for split in ("train", "validation"):
        tars, records = ImageShards(whole, split), ImageShards(out, split, verify="checksums")
        assert len(tars) == len(records)
        for number in range(len(tars)):
            assert records.read(number) == tars.read(number)
            assert records.name(number).partition(":")[2] == tars.name(number).partition(":")[2]
        assert np.array_equal(records.labels, tars.labels) and np.array_equal(records.sizes, tars.sizes)
    refused = prepare(source, out)
    assert "container was 'tfrecord' and is now 'tar'" in refused.stderr


def test_every_image_is_there_once_with_its_label(source: Path, whole: Path) -> None:
    manifest = ImageManifest.load(whole)
    assert manifest.classes == CLASSES and manifest.skipped == 0
    assert set(contents(whole)) - {"manifest.json", "prepare.json", "prepare.lock"} == {
        f"{info.name}.{suffix}"
        for infos in manifest.splits.values()
        for info in infos
        for suffix in ("tar", "index")
    }
    for split, folder in (("train", "train"), ("validation", "val")):
        found = stored(whole, split)
        files = sorted((source / folder).rglob("*.JPEG"))
        assert sorted(found) == sorted(f"{file.parent.name}/{file.stem}" for file in files)
        for file in files:
            image, label = found[f"{file.parent.name}/{file.stem}"]
            assert CLASSES[label] == file.parent.name
            number = int(file.stem)
            if number % 10 != 1 or number // 10 % 4 in (0, 2):  # plain, PNG or greyscale: nothing to change
                assert image == file.read_bytes()
            elif number // 10 % 4 != 3:
                assert abs(pixels(image) - pixels(file.read_bytes())).max() <= 24
            else:
                assert pixels(image).shape == (40, 30, 3)


def test_a_shard_is_a_mix_of_classes(whole: Path) -> None:
    infos = ImageManifest.load(whole).shards("train")
    assert len(infos) >= 8
    for info in infos:
        assert NUM_TRAIN // len(infos) <= info.num_images <= NUM_TRAIN // len(infos) + 1
        labels = np.fromfile(whole / f"{info.name}.index", RECORD)["label"].tolist()
        assert len(set(labels)) >= 3 and labels != sorted(labels)


# a process of its own, since webdataset leaves files open, which here is a warning and so an error
WEBDATASET = """
import json, sys, webdataset
samples = webdataset.WebDataset(sys.argv[1:], shardshuffle=False, empty_check=False)
print(json.dumps([[s["__key__"], s["jpg" if "jpg" in s else "png"].hex(), int(s["cls"])] for s in samples]))
"""


def test_webdataset_reads_the_same(whole: Path) -> None:
    urls = [str(whole / f"{info.name}.tar") for info in ImageManifest.load(whole).shards("train")]
    done = FORKING.run([sys.executable, "-c", WEBDATASET, *urls], capture_output=True)
    assert done.returncode == 0, done.stderr
    found = {key: (bytes.fromhex(jpeg), label) for key, jpeg, label in json.loads(done.stdout)}
    assert found == stored(whole, "train")


def test_the_number_of_processes_does_not_matter_and_the_seed_does(
    source: Path, whole: Path, tmp_path: Path
) -> None:
    assert prepare(source, tmp_path / "out", processes=1).returncode == 0
    assert contents(tmp_path / "out") == contents(whole)
    assert prepare(source, tmp_path / "seed", processes=3, seed=1).returncode == 0
    assert list(stored(tmp_path / "seed", "train")) != list(stored(whole, "train"))
    assert stored(tmp_path / "seed", "train") == stored(whole, "train")


def test_killed_and_started_again_it_makes_the_same_bytes(source: Path, whole: Path, tmp_path: Path) -> None:
    out, kept, kills = tmp_path / "out", {}, 0
    for finished in (0, 1, 4):
        process = subprocess.Popen(command(source, out), stderr=subprocess.DEVNULL)
        ends = time.monotonic() + DEADLINE_S
        while len(list(out.glob("records/*-*.json"))) < finished + 1 and process.poll() is None:
            assert time.monotonic() < ends
            time.sleep(0.001)
        process.kill()
        process.wait()
        kills += process.returncode == -signal.SIGKILL
        kept = {
            out / f"{record.stem}.tar": (out / f"{record.stem}.tar").stat().st_ino
            for record in out.glob("records/*-*.json")
        }
    assert kills >= 2
    done = prepare(source, out)
    assert done.returncode == 0 and ("finished before" in done.stderr or not kept)
    assert contents(out) == contents(whole)
    assert {path: path.stat().st_ino for path in kept} == kept  # what was finished was not made again


def test_bad_images_are_named_and_refused_or_skipped_and_listed(
    source: Path, whole: Path, tmp_path: Path
) -> None:
    bad = write_folder(
        tmp_path / "bad", {str(f.relative_to(source)): f.read_bytes() for f in source.rglob("*.JPEG")}
    )
    short, text = bad / "train" / "ant" / "004.JPEG", bad / "train" / "cat" / "page.jpg"
    short.write_bytes(short.read_bytes()[:-20])
    text.write_text("<html>404</html>")
    done = prepare(bad, tmp_path / "out", on_bad="refuse")
    assert done.returncode == 2 and "Traceback" not in done.stderr and done.stderr.count("error:") == 1
    assert f"{short} is damaged or cut short" in done.stderr or f"{text} is not an image" in done.stderr
    assert "--on-bad skip" in done.stderr and not (tmp_path / "out" / "manifest.json").exists()

    done = prepare(bad, tmp_path / "out")
    assert done.returncode == 0 and "left out 2: image that cannot be used: 2 (" in done.stderr
    assert done.stderr.count("left out") == 1
    lines = sorted(
        line.split("\t")[:2] for line in (tmp_path / "out" / "skipped.txt").read_text().splitlines()
    )
    assert lines == [["train", str(short)], ["train", str(text)]]
    assert ImageManifest.load(tmp_path / "out").skipped == 2
    expected = stored(whole, "train")
    del expected["ant/004"]
    assert stored(tmp_path / "out", "train") == expected
    # once more without having been refused first; and the skipped are refused when that is asked for
    assert prepare(bad, tmp_path / "new", processes=1).returncode == 0
    assert contents(tmp_path / "out") == contents(tmp_path / "new")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (
            b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EOF\n",
            "is not an image of a known format (JPEG, ",
        ),
        (announcing("JPEG", 60_000, 60_000), "has more than 89,478,485 pixels"),
    ],
    ids=["EPS", "bomb"],
)
def test_what_must_not_be_decoded_is_named_with_a_remedy(tmp_path: Path, data: bytes, words: str) -> None:
    folder = write_folder(tmp_path / "in", {"train/a/1.JPEG": encoded(photo()), "train/a/2.JPEG": data})
    bad = folder / "train" / "a" / "2.JPEG"
    done = prepare(folder, tmp_path / "out", processes=1, on_bad="refuse")
    assert done.returncode == 2 and done.stderr.count("error:") == 1 and "Traceback" not in done.stderr
    assert f"error: {bad} {words}" in done.stderr
    assert "replace or remove it, or go on without such images: --on-bad skip" in done.stderr
    assert prepare(folder, tmp_path / "out", processes=1).returncode == 0
    assert stored(tmp_path / "out", "train").keys() == {"a/1"}


def test_imagenet_from_its_tars(tmp_path: Path) -> None:
    wnids = ("n01440764", "n02100735", "n02119789")
    train = {
        w: {f"{w}_{i}.JPEG": encoded(photo(seed=9 * n + i)) for i in range(6)} for n, w in enumerate(wnids)
    }
    train["n02100735"]["n02100735_2.JPEG"] = encoded(photo(seed=1), "PNG")  # as one of ImageNet's is
    train["n02100735"]["n02100735_3.JPEG"] = encoded(photo(seed=1, mode="CMYK"))  # and 22
    validation = {f"ILSVRC2012_val_{i:08d}.JPEG": encoded(photo(seed=50 + i)) for i in range(1, 5)}
    write_folder(
        tmp_path / "in",
        {
            "ILSVRC2012_img_train.tar": tar_of({f"{w}.tar": tar_of(files) for w, files in train.items()}),
            "ILSVRC2012_img_val.tar": tar_of(validation),
            "imagenet_2012_validation_synset_labels.txt": "\n".join([*wnids, wnids[0]]).encode(),
        },
    )
    # the command line itself, once
    command = ("prepare", "images", str(tmp_path / "in"), "--out", str(tmp_path / "out"))
    done = shoal(*command, "--dry-run")
    assert done.returncode == 0 and "train: 18 images of 3 classes" in done.stdout, done.stderr
    assert "1 are encoded again" in done.stdout and not (tmp_path / "out").exists()
    done = shoal(*command, "--processes", "1")
    assert done.returncode == 0, done.stderr
    found = stored(tmp_path / "out", "train")
    cmyk = found.pop("n02100735_3")
    assert cmyk[1] == 1 and Image.open(io.BytesIO(cmyk[0])).mode == "RGB"
    expected = {name: data for files in train.values() for name, data in files.items()}
    assert found == {
        name.removesuffix(".JPEG"): (data, wnids.index(name.split("_")[0]))
        for name, data in expected.items()
        if name != "n02100735_3.JPEG"
    }
    names = [name.removesuffix(".JPEG") for name in validation]
    assert stored(tmp_path / "out", "validation") == {
        name: (data, label)
        for name, data, label in zip(names, validation.values(), (0, 1, 2, 0), strict=True)
    }
    assert ImageManifest.load(tmp_path / "out").classes == wnids


def test_a_full_disk_keeps_what_is_finished(source: Path, whole: Path, tmp_path: Path) -> None:
    """A limit on file size stands for the full disk."""
    out = tmp_path / "out"
    done = prepare(source, out, most_bytes=18_000)
    assert done.returncode == 1 and "no space left" in done.stderr and "Traceback" not in done.stderr
    assert not list(out.glob("*.partial")) and not (out / "manifest.json").exists()
    assert prepare(source, out).returncode == 0
    assert contents(out) == contents(whole)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 5}, "seed was 0 and is now 5"),
        ({"resize": 16}, "resize was 0 and is now 16"),
        ({"shard_bytes": 1}, "shard_bytes=1 must be at least"),
    ],
)
def test_another_configuration_is_refused(
    source: Path, whole: Path, change: dict[str, Any], words: str
) -> None:
    before = contents(whole)
    with pytest.raises(UsageError, match=words):
        prepare_images(
            detect_source(source), whole, config=ImagePrepareConfig(**{"shard_bytes": 8_192, **change})
        )
    assert contents(whole) == before


def test_a_changed_source_and_text_in_the_directory_are_refused(
    source: Path, whole: Path, tmp_path: Path
) -> None:
    other = write_folder(
        tmp_path / "in", {"train/ant/1.jpg": encoded(photo()), "val/ant/1.jpg": encoded(photo())}
    )
    with pytest.raises(UsageError, match="source_state was"):
        prepare_images(detect_source(other), whole, config=ImagePrepareConfig(shard_bytes=8_192))
    text = tmp_path / "text"
    text.mkdir()
    (text / "prepare.json").write_text('{"kind": "text"}')
    (text / "manifest.json").write_text("{}")
    for overwrite in (False, True):
        with pytest.raises(UsageError, match="holds prepared text, not images"):
            prepare_images(detect_source(source), text, config=ImagePrepareConfig(overwrite=overwrite))
    assert (text / "manifest.json").exists()


def test_an_unfinished_preparation_of_another_format_version_is_refused(source: Path, whole: Path) -> None:
    path = whole / "prepare.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 0'))
    with pytest.raises(UsageError, match=r"version was 0 and is now 1.* or --overwrite to remove"):
        prepare_images(detect_source(source), whole, config=ImagePrepareConfig(shard_bytes=8_192))
    path.write_text(path.read_text().replace('"version": 0', '"version": 1'))


def test_a_compressed_tar_gives_the_shards_of_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {f"{name}/{n}.jpg": encoded(photo(seed=n)) for name in ("a", "b") for n in range(12)}
    folder = write_folder(tmp_path / "photos", files)
    archive = tmp_path / "photos.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder, "photos")
    config = ImagePrepareConfig(processes=1)
    prepare_images(detect_source(folder), tmp_path / "plain", config=config)
    manifest = prepare_images(detect_source(archive), tmp_path / "packed", config=config)
    assert manifest.source.startswith(f"{archive}, 2 classes")
    assert f"unpacking {archive} to {tmp_path / 'packed' / 'records'}" in capsys.readouterr().err
    for split in ("train", "validation"):
        shard = f"{split}-00000.tar"
        assert (tmp_path / "packed" / shard).read_bytes() == (tmp_path / "plain" / shard).read_bytes()
    assert not (tmp_path / "packed" / "records").exists()
    with pytest.raises(UsageError, match="a dry run does not unpack"):
        dry_run(detect_source(archive), config)


def test_an_empty_class_is_named(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "in", {"a/1.jpg": encoded(photo()), "a/2.jpg": encoded(photo())})
    (source / "b").mkdir()
    with pytest.raises(UsageError, match="class 'b' has no image to train on"):
        prepare_images(detect_source(source), tmp_path / "out")
    with pytest.raises(UsageError, match="class 'b' has no image to train on"):
        dry_run(detect_source(source), ImagePrepareConfig())


def test_a_dry_run_counts_what_would_be_written(source: Path, whole: Path) -> None:
    *splits, tried, total = dry_run(detect_source(source), ImagePrepareConfig(shard_bytes=8_192))
    manifest = ImageManifest.load(whole)
    for line, (split, infos) in zip(splits, manifest.splits.items(), strict=True):
        assert line.startswith(f"{split}: {manifest.num_images(split)} images of")
        assert line.endswith(f", {len(infos)} shards")
    written = sum(info.files["tar"]["bytes"] for infos in manifest.splits.values() for info in infos)
    _, number, unit, *_ = total.split()
    expected = float(number.replace(",", "")) * {"KiB": 1 << 10, "MiB": 1 << 20}[unit]
    assert 0.6 * written < expected < 1.2 * written  # tars of 10 images are largely padding
    changed = re.fullmatch(r"of 64 training images tried, (\d+) are encoded again", tried)
    assert changed and 0 < int(changed[1]) < 16


def test_made_images_are_the_same_again_and_refuse_another_seed(tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_train": 40, "num_validation": 10, "size": 24}
    manifest = make_images(tmp_path / "out", **options)
    before = contents(tmp_path / "out")
    assert len(manifest.classes) == 10 and list(tmp_path.iterdir()) == [tmp_path / "out"]
    for split, each in (("train", 4), ("validation", 1)):
        found = stored(tmp_path / "out", split)
        assert Counter(label for _, label in found.values()) == dict.fromkeys(range(10), each)
        for key, (image, label) in found.items():
            assert key.split("/")[0] == manifest.classes[label]
            red, _, blue = pixels(image)[8:16, 8:16].reshape(-1, 3).mean(0)
            if key.startswith(("red-disc", "blue-disc")):
                assert (red > blue) == key.startswith("red")
    assert make_images(tmp_path / "out", **options) == manifest
    with pytest.raises(UsageError, match=r"source was 'made images .* seed 0' and is now .* seed 1'"):
        make_images(tmp_path / "out", **options, seed=1)
    # one that was killed before its manifest is repeated, and ends in the same bytes
    again = tmp_path / "again"
    make_images(again, **options)
    (again / "manifest.json").unlink()
    (again / "validation-00000.index").unlink()
    assert make_images(again, **options) == manifest and contents(again) == before


def test_overwrite_begins_anew_and_spares_the_files_of_others(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert prepare(source, out, resize=16, processes=1).returncode == 0
    assert max(min(pixels(image).shape[:2]) for image, _ in stored(out, "train").values()) == 16
    (out / "notes.txt").write_text("mine")
    done = prepare(source, out, overwrite=True)
    assert done.returncode == 2 and "holds other files (notes.txt)" in done.stderr
    assert (out / "notes.txt").read_text() == "mine"


@pytest.mark.slow
def test_real_images(tmp_path: Path) -> None:
    """CIFAR-10's own files: all bytes pass through, and every label is that of the folder."""
    path = data_dir() / "cifar10" / "cifar10_jpg_60000.tar.gz"
    if not path.is_file():
        pytest.skip(f"no {path}; set SHOAL_TEST_DATA")
    with tarfile.open(path) as tar:
        some = [m for m in tar if m.isfile() and m.name.endswith("0.jpg") and m.name.split("/")[-1] < "0400"]
        tar.extractall(tmp_path / "in", members=some, filter="data")
    assert prepare(tmp_path / "in", tmp_path / "out", shard_bytes=100_000).returncode == 0
    classes = ImageManifest.load(tmp_path / "out").classes
    for split, folder in (("train", "train"), ("validation", "test")):
        found = stored(tmp_path / "out", split)
        files = list((tmp_path / "in" / folder).rglob("*.jpg"))
        assert len(found) == len(files) == 400
        for file in files:
            assert found[f"{file.parent.name}/{file.stem}"] == (
                file.read_bytes(),
                classes.index(file.parent.name),
            )


@pytest.mark.slow
def test_memory_does_not_grow_with_the_source(tmp_path: Path) -> None:
    measure = (
        "\nimport resource, re\n"
        "if __name__ == '__main__':\n"
        "    print(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1])\n"
        "    print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)\n"
    )
    image = encoded(photo(400, 300, seed=3), quality=100, subsampling=0)
    peaks = []
    for count in (100, 2_000):
        source = tmp_path / str(count)
        write_folder(source, {f"{name}/{i}.jpg": image for name in "ab" for i in range(count // 2)})
        arguments = command(source, tmp_path / f"{count}-out", shard_bytes=1 << 20)
        arguments[2] += measure
        done = subprocess.run(arguments, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
        peaks.append([int(line) / 1024 for line in done.stdout.split()])  # MiB: parent, largest worker
    grown_by = 1_900 * len(image) / (1 << 20)
    for small, large in zip(*peaks, strict=True):
        assert large < small + min(4, grown_by / 4), (peaks, grown_by)
