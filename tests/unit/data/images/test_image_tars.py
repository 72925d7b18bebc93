"""Class folders and ImageNet in tars, compressed or not: the images of the folder; names are checked."""

import bz2
import gzip
import io
import lzma
import tarfile
import zipfile

import pytest

from image_files import encoded, photo, tar_of, write_folder
from shoal.data.images.detect_source import detect_source
from shoal.data.images.imagenet import TRAIN_TAR, VALIDATION_TAR
from shoal.data.images.sources import PackedSource
from shoal.data.images.tars import members, unpack
from shoal.errors import ShoalError, UsageError

LONG = "photo-" + "x" * 150
FILES = {
    f"{split}/{name}/{stem}.jpg": encoded(photo(seed=seed))
    for seed, (split, name, stem) in enumerate(
        [
            ("train", "cat", "1"),
            ("train", "cat", LONG),
            ("train", "dog", "gr\u00fcn/2"),
            ("train", "dog house", "a.b"),
            ("val", "cat", "3"),
            ("val", "dog", "4"),
            ("val", "dog house", "5"),
        ]
    )
}
OTHERS = {"train/notes.txt": b"x", "train/cat/._1.jpg": b"x", ".DS_Store": b"x"}


def packed(files, form=tarfile.PAX_FORMAT, around=""):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(around + name)
            member.size, member.mtime = len(data), 1.5
            tar.addfile(member, io.BytesIO(data))
    return out.getvalue()


def found(source):
    """Return what would be prepared: key, label and bytes of each image, by split."""

    def read(image):
        with image.path.open("rb") as file:
            file.seek(image.offset)
            return file.read(image.size)

    return {
        split: [(image.key, image.label, read(image)) for image in source.images(split)]
        for split in source.splits
    }


@pytest.mark.parametrize("around", ["", "./", "photos/", "./data/photos/"])
@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT], ids=["pax", "gnu"])
def test_a_tar_of_class_folders_is_the_folder(tmp_path, form, around):
    (tmp_path / "a.tar").write_bytes(packed(FILES | OTHERS, form, around))
    folder = detect_source(write_folder(tmp_path / "a", FILES | OTHERS))
    tar = detect_source(tmp_path / "a.tar")
    assert tar.classes == folder.classes == ("cat", "dog", "dog house")
    assert found(tar) == found(folder) and len(found(tar)["train"]) == 4
    assert "1 .txt" in "".join(tar.remarks)
    assert {image.member for image in tar.images("validation")} == {
        f"{around.removeprefix('./')}{name}" for name in FILES if name.startswith("val")
    }


def test_a_share_of_a_tar_is_held_out_as_of_the_folder(tmp_path):
    files = {f"{name}/{i}.png": b"x" for name in ("a", "b") for i in range(20)}
    (tmp_path / "a.tar").write_bytes(packed(files))
    folder = detect_source(write_folder(tmp_path / "a", files), validation=0.2)
    assert found(detect_source(tmp_path / "a.tar", validation=0.2)) == found(folder)


@pytest.mark.parametrize(
    ("name", "compress"),
    [
        ("a.tgz", gzip.compress),
        ("a.tar.xz", lzma.compress),
        ("A.TAR.GZ", gzip.compress),
        ("a.tbz2", bz2.compress),
        ("a.tar", gzip.compress),
        ("without an end", lzma.compress),
    ],
)
def test_a_compressed_tar_is_unpacked_once(tmp_path, name, compress):
    path = tmp_path / name
    path.write_bytes(compress(packed(FILES)))
    source = detect_source(path)
    assert isinstance(source, PackedSource)
    opened = source.unpack(tmp_path / "records")
    assert found(opened) == found(detect_source(write_folder(tmp_path / "a", FILES)))
    (unpacked,) = (tmp_path / "records").iterdir()
    before = unpacked.stat().st_mtime_ns
    source.unpack(tmp_path / "records")
    assert unpacked.stat().st_mtime_ns == before
    state = source.state()
    path.write_bytes(compress(packed(FILES | {"train/cat/9.jpg": b"x"})))
    assert detect_source(path).state() != state


def test_imagenet_s_tars_may_be_compressed(tmp_path):
    """The training tar is, the other is not."""
    classes = {f"{name}.tar": tar_of({f"{name}_1.JPEG": b"image " + name.encode()}) for name in ("n1", "n2")}
    (tmp_path / f"{TRAIN_TAR}.gz").write_bytes(gzip.compress(tar_of(classes)))
    (tmp_path / VALIDATION_TAR).write_bytes(tar_of({"ILSVRC2012_val_00000001.JPEG": b"held out"}))
    (tmp_path / "imagenet_2012_validation_synset_labels.txt").write_text("n2\n")
    for path in (tmp_path, tmp_path / f"{TRAIN_TAR}.gz"):
        source = detect_source(path).unpack(tmp_path / "records")
        assert source.classes == ("n1", "n2")
        assert found(source) == {
            "train": [("n1_1", 0, b"image n1"), ("n2_1", 1, b"image n2")],
            "validation": [("ILSVRC2012_val_00000001", 1, b"held out")],
        }
    (tmp_path / VALIDATION_TAR).unlink()
    with pytest.raises(UsageError, match=rf"{VALIDATION_TAR}: there is no such file, .* from both tars"):
        detect_source(tmp_path)


@pytest.mark.parametrize("name", ["/etc/passwd.jpg", "../a.jpg", "a/../../b.jpg", "a" * 70_000])
@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT], ids=["pax", "gnu"])
def test_names_that_lead_out_and_endless_ones_are_refused(tmp_path, name, form):
    (tmp_path / "a.tar").write_bytes(packed({"a/1.jpg": b"x", name: b"x"}, form))
    with pytest.raises(ShoalError, match=r"a name that leads out of it|extended header of 70,\d+ bytes"):
        detect_source(tmp_path / "a.tar")


def test_links_and_devices_are_left_alone(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number, kind in enumerate((tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE)):
            member = tarfile.TarInfo(f"a/{number}.jpg")
            member.type, member.linkname = kind, "/etc/passwd"
            tar.addfile(member)
        for name in ("a/9.jpg", "b/9.jpg"):
            member = tarfile.TarInfo(name)
            member.size = 1
            tar.addfile(member, io.BytesIO(b"x"))
    assert [member.name for member in members(tmp_path / "a.tar")] == ["a/9.jpg", "b/9.jpg"]
    (remark,) = detect_source(tmp_path / "a.tar").remarks
    assert remark.startswith("links and devices in the tar are left alone: 4 ('a/0.jpg', 'a/1.jpg', ")
    assert "--hard-dereference" in remark


@pytest.mark.parametrize(
    ("records", "words"),
    [
        (b"99 path=a.jpg\n", "is damaged at byte 0"),
        (b"x path=a.jpg\n", "is damaged at byte 0"),
        (b"0 path=a.jpg\n", "is damaged at byte 0"),
        (b"19 size=9999999999\n", "more than 8 GiB"),
    ],
)
def test_damaged_extended_headers(tmp_path, records, words):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        header = tarfile.TarInfo("x")
        header.type, header.size = tarfile.XHDTYPE, len(records)
        tar.addfile(header, io.BytesIO(records))
    with pytest.raises(ShoalError, match=words):
        list(members(tmp_path / "a.tar"))


@pytest.mark.parametrize("name", ["a.TAR", "a.zip", "a.tar.gz", "a"])
def test_a_tar_is_known_by_its_content(tmp_path, name):
    (tmp_path / name).write_bytes(packed(FILES))
    assert found(detect_source(tmp_path / name)) == found(detect_source(write_folder(tmp_path / "b", FILES)))


def zip_of(files):
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as packed_as_zip:
        for name, data in files.items():
            packed_as_zip.writestr(name, data)
    return out.getvalue()


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.tar", zip_of(FILES), r"a\.tar is a zip, neither .* unzip -q a\.tar -d a"),
        ("a.zip", zip_of({"set.zip": zip_of(FILES)}), r"a\.zip is a zip, neither .* unzip -q a\.zip -d a"),
        ("a.tar.gz", b"no gzip", r"a\.tar\.gz is a file, neither a folder nor a tar of one; give a folder"),
        ("a.tar", b"", r"a\.tar is an empty file, neither"),
        ("a.7z", b"7z\xbc\xaf\x27\x1c", r"a\.7z is a 7z archive, .*; unpack it and give its folder"),
        ("a.tar", packed({"set.tar": packed(FILES)}), r"There are archives; unpack .*: 'set\.tar'"),
        ("a.tar", packed({"x/train.tar.gz": b"x"}), r"a\.tar/x has no class .*: 'train\.tar\.gz'"),
        ("a.tar", packed({"1.jpg": b"x"}), r"There are images beside: '1\.jpg'"),
        ("a.tar", packed({"cat\\1.jpg": b"x"}), r"a backslash for each slash, .*: 'cat"),
    ],
)
def test_what_is_no_source_is_named_by_its_content(tmp_path, name, data, words):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UsageError, match=words):
        detect_source(tmp_path / name)


def test_a_compressed_file_that_is_no_tar_is_named(tmp_path):
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(b"no tar" * 100))
    with pytest.raises(ShoalError, match=r"a\.tar\.gz holds no tar"):
        detect_source(path).unpack(tmp_path / "records")
    path.write_bytes(gzip.compress(packed(FILES))[:-9])
    with pytest.raises(UsageError, match=r"a\.tar\.gz: was cut short"):
        unpack(path, tmp_path / "other")
    assert not list((tmp_path / "other").iterdir())
