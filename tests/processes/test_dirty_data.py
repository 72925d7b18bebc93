"""Inputs with the flaws that other people's users reported: right, or one line with the remedy."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import finetune_made
from shoal.cli.app import app
from shoal.data.images.shards import ImageShards
from shoal.data.images.transform import decode
from shoal.data.manifest import Manifest
from shoal.env.settings import test_data_dir as data_dir
from shoal.errors import UsageError

REPORTS = data_dir() / "reports"
pytestmark = [
    pytest.mark.skipif(not REPORTS.is_dir(), reason="SHOAL_TEST_DATA has no reports"),
    pytest.mark.usefixtures("forked_pools"),
]


def prepare_coco(folder: Path, out: Path) -> list[dict[str, Any]]:
    """Prepare ``im`` and ``a.json`` of a folder; return the objects of its image."""
    command = ["prepare", "coco", "--images", folder / "im", "--annotations", folder / "a.json", "--out", out]
    app([*map(str, command), "--processes", "1"], result_action="return_value", exit_on_error=False)
    objects: list[dict[str, Any]] = json.loads(bytes(ImageShards(out, "train").extra(0)))["annotations"]
    return objects


@pytest.mark.parametrize(
    ("name", "ids", "said"),
    [
        pytest.param(
            "A1", [1], "left out 1: annotation whose box has no area inside its image: 1", id="COCO"
        ),
        pytest.param("A8/emptylist", [1, 2], "1 of the 2 objects", id="[[]]"),
        pytest.param("A8/flat", [1, 2], "", id="flat polygon"),
        pytest.param(
            "A8/mixed", [1, 2], "polygon of fewer than 3 points; its object has others: 1", id="point"
        ),
        pytest.param("A8/textids", [1, 2], "", id="text ids"),
        pytest.param("A8/crowdfalse", [1, 2], "", id="iscrowd false"),
        pytest.param("B45/lvis", [1], "", id="LVIS"),
        pytest.param("B46/backslash", [1], "", id="names of Windows"),
        pytest.param("B46/noarea", [1], "", id="area null"),
        pytest.param("B46/noseg", [1], "1 of the 1 objects", id="boxes only"),
    ],
)
def test_coco_as_it_is_written(
    name: str, ids: list[int], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert [one["id"] for one in prepare_coco(REPORTS / name, tmp_path / "out")] == ids
    errors = capsys.readouterr().err
    assert said in errors and errors.count("left out") == ("left out" in said or name == "A8/mixed")


def test_coco_without_sizes_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no entry of 'images' .* image without width and height"):
        prepare_coco(REPORTS / "B46" / "nosize", tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "is_turned", "is_said"),
    [
        pytest.param("e6_turned", True, False, id="JSON has the turned size"),
        pytest.param("e6_stored", False, False, id="JSON has the stored size"),
        pytest.param("e3", False, True, id="upside down"),
        pytest.param("e6_square", False, True, id="square"),
    ],
)
def test_photos_that_exif_turns_fit_their_boxes(
    name: str, is_turned: bool, is_said: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare_coco(REPORTS / "A7" / name, tmp_path / "out")
    assert ("as stored, as pycocotools does" in capsys.readouterr().err) == is_said
    red = decode(bytes(ImageShards(tmp_path / "out", "train").read(0)))[..., 0].astype(np.int64)
    grows_right = red[:, -1].mean() - red[:, 0].mean()  # as stored; with orientation 6 it grows downwards
    grows_down = red[-1].mean() - red[0].mean()
    assert (grows_down if is_turned else grows_right) > 150
    assert abs(grows_right if is_turned else grows_down) < 50


@pytest.mark.parametrize("name", ["/etc/hostname", "..\\..\\p.jpg", "../im/p.jpg", "C:\\photos\\none.jpg"])
def test_names_never_lead_out_of_the_folder(name: str, tmp_path: Path) -> None:
    tree = json.loads((REPORTS / "B46" / "noarea" / "a.json").read_text())
    tree["images"][0]["file_name"] = name
    (tmp_path / "a.json").write_text(json.dumps(tree))
    (tmp_path / "im").symlink_to(REPORTS / "B46" / "noarea" / "im")
    with pytest.raises(UsageError, match=r"leads out of the folder|file is missing"):
        prepare_coco(tmp_path, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (".", "is a folder, a pipe or a device"),
        ("a\0.jpg", "file_name no file can have"),
        ("\ud83d.jpg", "file_name no file can have"),
        ("x" * 5000 + ".jpg", "file_name no file can have"),
        ("P.JPG", r"no such file .*; .*im has 'p\.jpg'"),
        ("lost.jpg", "is a link to nowhere, where nothing is; mend"),
        ("round.jpg", "leads back to itself; remove it"),
        ("pipe.jpg", "is a folder, a pipe or a device"),
    ],
)
def test_names_of_no_file_are_left_out_with_the_reason(name: str, words: str, tmp_path: Path) -> None:
    tree = json.loads((REPORTS / "B46" / "noarea" / "a.json").read_text())
    tree["images"][0]["file_name"] = name
    (tmp_path / "a.json").write_text(json.dumps(tree))
    (tmp_path / "im").mkdir()
    (tmp_path / "im" / "p.jpg").symlink_to(REPORTS / "B46" / "noarea" / "im" / "p.jpg")
    if name != "P.JPG":
        (tmp_path / "im" / "lost.jpg").symlink_to("nowhere")
        (tmp_path / "im" / "round.jpg").symlink_to("round.jpg")
        os.mkfifo(tmp_path / "im" / "pipe.jpg")
    with pytest.raises(UsageError, match=rf"(?i)nothing can be used; left out 1: image whose .*{words}"):
        prepare_coco(tmp_path, tmp_path / "out")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda path: path.write_bytes(b"\x1f\x8b"),
            "is compressed by gzip, no folder .*; unpack it",
        ),
        (
            lambda path: path.write_bytes(b"P6"),
            "is a file, no folder .* of one; give the folder",
        ),
        (lambda path: path.symlink_to("nowhere"), "is a link to nowhere, where nothing is"),
        (lambda path: path, "No such file or directory; check the path"),
    ],
)
def test_images_are_a_folder_or_a_zip(make: Callable[[Path], object], words: str, tmp_path: Path) -> None:
    make(tmp_path / "im")
    (tmp_path / "a.json").symlink_to(REPORTS / "B46" / "noarea" / "a.json")
    with pytest.raises(UsageError, match=words):
        prepare_coco(tmp_path, tmp_path / "out")


def test_a_set_without_a_usable_object_says_how_to_keep_its_images(tmp_path: Path) -> None:
    tree = json.loads((REPORTS / "B46" / "noarea" / "a.json").read_text())
    tree["annotations"] = []
    (tmp_path / "a.json").write_text(json.dumps(tree))
    (tmp_path / "im").symlink_to(REPORTS / "B46" / "noarea" / "im")
    with pytest.raises(UsageError, match=r"a\.json: there is no image to train on, .* \(--keep-empty keeps"):
        prepare_coco(tmp_path, tmp_path / "out")


@pytest.mark.parametrize("names", [("a/p.jpg", "b/p.jpg"), ("p.jpg", "./p.jpg"), ("p.jpg", "p.jpg")])
def test_images_that_share_a_file_are_refused(names: tuple[str, str], tmp_path: Path) -> None:
    tree = json.loads((REPORTS / "B46" / "noarea" / "a.json").read_text())
    one = tree["images"][0]
    tree["images"] = [one | {"file_name": name, "id": one["id"] + n} for n, name in enumerate(names)]
    (tmp_path / "a.json").write_text(json.dumps(tree))
    (tmp_path / "im").symlink_to(REPORTS / "B46" / "noarea" / "im")
    words = f"an image whose file another one has: {names[1]} and {names[0]}; let one image have the objects"
    with pytest.raises(UsageError, match=re.escape(words)):
        app(
            ["prepare", "coco", "--images", str(tmp_path / "im"), "--annotations", str(tmp_path / "a.json"),
             "--out", str(tmp_path / "out"), "--keep-empty", "--on-bad", "refuse"],
            result_action="return_value", exit_on_error=False,
        )  # fmt: skip


def prepare_text(source: Path, out: Path) -> Manifest:
    tokenizer = REPORTS / "A11" / "good.txt"
    command = ["prepare", "text", source, "--out", out, "--tokenizer", tokenizer, "--processes", "1"]
    app([*map(str, command)], result_action="return_value", exit_on_error=False)
    return Manifest.load(out)


def test_text_with_nulls_and_of_other_tools(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("A10/view.parquet", "A10/dict.parquet", "B38/t.txt.xz", "B38/arr.json", "B38/null.jsonl"):
        assert prepare_text(REPORTS / name, tmp_path / Path(name).name).splits["train"]
    said = [line for line in capsys.readouterr().err.splitlines() if "left out" in line]
    assert len(said) == 1 and "null.jsonl: left out 12: row whose text is null: 12 (line " in said[0]


@pytest.mark.parametrize(
    ("name", "row", "kind"),
    [
        ("a.jsonl", b'{"text": null}', "row whose text is null: 30 (line 2 of "),
        ("a.txt", b"Caf\xe9. Bad.", "entry with bytes that are not UTF-8: 30 (line 2 of "),
    ],
)
def test_one_article_that_is_left_says_what_is_not(name: str, row: bytes, kind: str, tmp_path: Path) -> None:
    good = b"The ship sailed. It met a storm."
    good = b'{"text": "%b"}' % good if name == "a.jsonl" else good
    (tmp_path / name).write_bytes(b"\n".join([good] + [row] * 30))
    with pytest.raises(UsageError, match=rf"has only one article .*; left out 30: {re.escape(kind)}.*; add"):
        prepare_text(tmp_path / name, tmp_path / "out")


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (b"\xff\xd8\xff\xe0", "a JPEG image"),
        (b"\x89PNG\r\n\x1a\n", "a PNG image"),
        (b"\x93NUMPY\x01\x00", "an array of NumPy"),
        (b"\x80\x04\x95", "a pickle of Python"),
        (b"\x5d\x00\x00\x80\x00", "compressed by lzma"),
        (b"\x1f\x9d\x90", "compressed by compress"),
        (b"{\\rtf1 hello}", "an RTF document"),
    ],
)
def test_other_formats_are_named_as_what_they_are(head: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(head + b"\nThe ship sailed. It met a storm." * 30)
    with pytest.raises(UsageError, match=rf"a\.txt: its content is {words} and no text"):
        prepare_text(tmp_path / "a.txt", tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("t.tar.gz", "its content, compressed as .gz, is a tar and no text; unpack it"),
        ("t.zip", "its content is a zip and no text"),
        ("cr.txt", "its lines end in CR alone"),
    ],
)
def test_what_is_no_text_is_named(name: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        prepare_text(REPORTS / "B38" / name, tmp_path / "out")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finetune_made.write_model(tmp_path_factory.mktemp("model") / "bert")


@pytest.mark.parametrize(
    ("command", "data", "options", "said"),
    [
        pytest.param(
            "classify", "A2/q.tsv", "first question1 second question2 label is_duplicate",
            ["q.tsv: 24 examples", "left out 1: line with another number of columns", "(line 13: 3 for 6)"],
            id="QQP",
        ),
        pytest.param(
            "classify", "A3/t.jsonl", "first premise second hypothesis",
            ["labels       0, 1, 2\n", "left out 4: example without a label: 4 "], id="SNLI on the hub",
        ),
        pytest.param(
            "classify", "A3/null.jsonl", "first premise second hypothesis",
            ["labels       0, 1, 2\n", "example without a label"], id="null labels",
        ),
        pytest.param(
            "classify", "A5/b.jsonl", "first question second passage", ["labels       false, true\n"],
            id="BoolQ",
        ),
        pytest.param("squad", "A6/int.json", "", ["int.json: SQuAD 1.1, 20 questions"], id="COVID-QA"),
    ],
)  # fmt: skip
def test_finetuning_takes_sets_as_they_are_distributed(
    command: str, data: str, options: str, said: list[str], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = options.split()
    columns = [word for name, value in zip(words[::2], words[1::2], strict=True)
               for word in (f"--data.{name}", value)]  # fmt: skip
    path = str(REPORTS / data)
    length = f"--{'data' if columns else 'window'}.max-seq-length"
    arguments = ["--model", str(model), "--data", path, "--eval", path, length, "48", *columns]
    app(["finetune", command, *arguments, "--dry-run"], result_action="return_value", exit_on_error=False)
    printed = capsys.readouterr().out
    for words_said in said:
        assert words_said in printed


def test_scores_are_no_classes_for_a_finetuning(model: Path) -> None:
    path = str(REPORTS / "A4" / "s.tsv")
    command = ["finetune", "classify", "--model", str(model), "--data", path, "--eval", path]
    with pytest.raises(UsageError, match=r"labels such as 0\.1 are scores, which .*--data\.scores"):
        app(
            [*command, "--data.label", "score", "--dry-run"],
            result_action="return_value",
            exit_on_error=False,
        )


def test_names_that_are_not_utf8_are_read(tmp_path: Path) -> None:
    """Files from a system with another encoding; they ended in an error when all shards were written."""
    name = os.fsdecode(b"caf\xe9")
    source, said = tmp_path / name, io.StringIO()  # not pytest's stream, which has no "backslashreplace"
    (source / "one").mkdir(parents=True)
    (source / f"{name}.jsonl").write_text(
        "".join(json.dumps({"text": f"The hen saw {n} eggs. It left."}) + "\n" for n in range(30))
    )
    for file in (f"{name}.jpg", "p.jpg"):
        shutil.copy(REPORTS / "B46" / "noarea" / "im" / "p.jpg", source / "one" / file)
    with contextlib.redirect_stderr(said):
        text = prepare_text(source / f"{name}.jsonl", tmp_path / "text")
        for _ in range(2):  # the second one finds it prepared
            command = ["prepare", "images", source, "--out", tmp_path / "images", "--processes", "1"]
            app([*map(str, command)], result_action="return_value", exit_on_error=False)
        with pytest.raises(UsageError, match=r"--out '.*' is not UTF-8; choose a name that is"):
            prepare_text(source / f"{name}.jsonl", tmp_path / name / "out")
    assert text.splits["train"] and "is already prepared" in said.getvalue()
    assert len(ImageShards(tmp_path / "images", "train")) == 1
