"""Class folders as a source: labels, splits, keys, and one clear error for each way to get them wrong."""

import os

import pytest

from image_files import encoded, photo, write_folder
from shoal.data.images.detect_source import detect_source
from shoal.data.images.folder import FolderSource, unique_keys
from shoal.errors import UsageError

JPEG = encoded(photo())


def folder(tmp_path, *names):
    return write_folder(tmp_path / "data", dict.fromkeys(names, JPEG))


def listed(source, split):
    return [(image.key, image.label) for image in source.images(split)]


@pytest.mark.parametrize("name", ["val", "validation", "test"])
def test_two_splits(tmp_path, name):
    path = folder(
        tmp_path, "train/dog/b.jpg", "train/cat/a.JPEG", "train/cat/deep/c.png", f"{name}/cat/x.jpg"
    )
    (path / name / "dog").mkdir()
    source = detect_source(path)
    assert source.classes == ("cat", "dog") and source.splits == ("train", "validation")
    assert listed(source, "train") == [("cat/a", 0), ("cat/deep/c", 0), ("dog/b", 1)]
    assert listed(source, "validation") == [("cat/x", 0)]
    assert [image.path.name for image in source.images("train")] == ["a.JPEG", "c.png", "b.jpg"]
    assert {image.size for image in source.images("train")} == {len(JPEG)}


def test_one_folder_holds_out_a_share_of_each_class(tmp_path):
    path = folder(
        tmp_path,
        *(f"{name}/{i}.jpg" for name in ("a", "b") for i in range(20)),
        "c/only.jpg",
        "d/1.jpg",
        "d/2.jpg",
    )
    source = FolderSource(path, validation=0.2)
    held_out, kept = listed(source, "validation"), listed(source, "train")
    assert sorted(held_out + kept) == sorted(listed(FolderSource(path, validation=0), "train"))
    labels = [label for _, label in held_out]
    assert [labels.count(label) for label in range(4)] == [4, 4, 0, 1]
    assert held_out == listed(FolderSource(path, validation=0.2), "validation")
    assert held_out != listed(FolderSource(path, validation=0.2, seed=1), "validation")
    assert FolderSource(path, validation=0).splits == ("train",)
    assert len(listed(FolderSource(path), "validation")) == 3  # 0.05 of 20 is one


def test_keys_are_unique_and_have_no_dot_behind_the_last_slash():
    names = ["001.bird/a.b.jpg", "001.bird/a_b.png", "001.bird/a_b.jpg", "x/y.z/1.jpg"]
    assert unique_keys(names) == ["001.bird/a_b", "001.bird/a_b~2", "001.bird/a_b~3", "x/y.z/1"]


def test_other_files_are_left_alone_and_told(tmp_path):
    path = folder(
        tmp_path, "train/a/1.jpg", "train/a/notes.txt", "train/a/.hidden.jpg", "val/a/2.jpg", "test/a/3.jpg"
    )
    write_folder(path, {"train/.git/x.jpg": JPEG})
    source = detect_source(path)
    assert listed(source, "train") == [("a/1", 0)] and source.classes == ("a",)
    assert source.remarks == (
        "validation images are those of val; test is left alone",
        "files that are no images by their suffix are left alone: 1 .txt",
    )


def test_splits_of_other_names_and_loose_images_are_told(tmp_path):
    path = folder(tmp_path, "train/a/1.jpg", "train/a/2.jpg", "valid/a/3.jpg", "test/a/4.jpg", "train/5.jpg")
    source = detect_source(path)
    assert listed(source, "validation") == [("a/3", 0)] and source.classes == ("a",)
    assert source.remarks == (
        "validation images are those of valid; test is left alone",
        "images beside the class folders are left alone: '5.jpg'",
    )
    (path / "valid").rename(path / "dev")
    (path / "test").rename(path / "eval")
    assert detect_source(path).remarks[0] == "validation images are held out; dev, eval is left alone"


@pytest.mark.parametrize("target", ["../b", "..", "../..", "sub"])
def test_links_that_lead_back_are_left_alone(tmp_path, target):
    path = folder(tmp_path, "a/1.jpg", "b/1.jpg", "b/2.jpg", "b/sub/3.jpg")
    (path / "b" / "zloop").symlink_to(target)
    source = FolderSource(path, validation=0)
    assert listed(source, "train") == [("a/1", 0), ("b/1", 1), ("b/2", 1), ("b/sub/3", 1)]
    (line,) = source.remarks
    assert line.endswith(f"or that lead back, are left alone: {path / 'b' / 'zloop'}")


def test_a_link_to_a_folder_elsewhere_is_followed(tmp_path):
    path = folder(tmp_path, "a/1.jpg", "b/1.jpg")
    write_folder(tmp_path / "elsewhere", {"2.jpg": JPEG})
    (path / "b" / "more").symlink_to(tmp_path / "elsewhere")
    source = FolderSource(path, validation=0)
    assert listed(source, "train") == [("a/1", 0), ("b/1", 1), ("b/more/2", 1)] and source.remarks == ()


@pytest.mark.parametrize("around", ["data", "data/photos", "data/photos/train"])
def test_one_folder_around_all_others_is_no_class(tmp_path, around):
    path = folder(tmp_path, *(f"{around}/{name}/{n}.jpg" for name in ("cat", "dog") for n in range(4)))
    source = FolderSource(path, validation=0)
    assert source.classes == ("cat", "dog") and len(listed(source, "train")) == 8
    alone = folder(tmp_path / "alone", "cat/1.jpg", "cat/old/2.jpg")
    assert FolderSource(alone, validation=0).classes == ("cat",)


def test_classes_that_differ_in_capitals_are_told(tmp_path):
    source = FolderSource(folder(tmp_path, "a/1.jpg", "A/1.jpg", "b/1.jpg"))
    assert source.classes == ("A", "a", "b")  # letters may be classes
    assert source.remarks == (
        "the classes A and a differ in capitals alone; join their folders if they are one",
    )


def test_the_state_changes_with_the_source(tmp_path):
    path = folder(tmp_path, "train/a/1.jpg", "val/a/2.jpg")
    states = [detect_source(path).state(), detect_source(path).state()]
    assert states[0] == states[1]
    os.utime(path / "val" / "a" / "2.jpg", ns=(1, 1))
    states.append(detect_source(path).state())
    (path / "train" / "a" / "1.jpg").rename(path / "train" / "a" / "3.jpg")
    states.append(detect_source(path).state())
    assert len(set(states)) == 3


@pytest.mark.parametrize(
    ("names", "options", "words"),
    [
        (
            ["train/cat/1.jpg", "train/dog/1.jpg", "val/cat/1.jpg", "val/dogs/1.jpg"],
            {},
            "no class 'dogs'.*Did you mean 'dog'",
        ),
        (["train/cat/1.jpg", "train/dog/1.jpg", "val/cat/1.jpg"], {}, "val has no class 'dog'.*empty one"),
        (["train/a/1.jpg", "val/a/1.jpg"], {"validation": 0.1}, "--validation 0.1 holds out"),
        (["val/a/1.jpg"], {}, "has val, but no train"),
        (
            ["Train/a/1.jpg", "Val/a/2.jpg"],
            {},
            "has Train, Val, but no train; name the training images train",
        ),
        (["training/a/1.jpg", "testing/a/2.jpg"], {}, "has testing, training, but no train"),
        (["1.jpg"], {}, "has no class folders"),
        (
            ["caf\u00e9/1.jpg", "cafe\u0301/1.jpg"],
            {},
            r"folders 'cafe\\u0301' and 'caf\\xe9' differ in .* join",
        ),
        (["cat/1.jpg", "cat /1.jpg"], {}, "the class folders 'cat' and 'cat ' differ in blanks"),
        (["train/1.jpg"], {}, "train has no class folders"),
        (["a/1.jpg"], {"validation": 1.0}, "validation=1.0 must be"),
        (["a/1.jpg"], {"synsets": "meta.mat"}, "--synsets meta.mat is for ImageNet"),
    ],
)
def test_what_cannot_be_used_is_one_clear_error(tmp_path, names, options, words):
    with pytest.raises(UsageError, match=words):
        detect_source(folder(tmp_path, *names), **options)


def test_a_pipe_with_the_name_of_an_image_is_not_waited_for(tmp_path):
    path = folder(tmp_path, "a/1.jpg")
    os.mkfifo(path / "a" / "2.jpg")
    with pytest.raises(UsageError, match=r"a/2\.jpg has an image's name but is no file: remove"):
        detect_source(path).state()


def test_a_path_that_is_no_folder(tmp_path):
    path = folder(tmp_path, "a/1.jpg")
    with pytest.raises(UsageError, match=r"there is no such folder\. Did you mean 'data'"):
        detect_source(tmp_path / "daat")
    with pytest.raises(
        UsageError, match=r"1\.jpg is a JPEG image, neither a folder nor a tar of one; give a folder"
    ):
        detect_source(path / "a" / "1.jpg")
