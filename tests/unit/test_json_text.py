"""JSON from outside: whatever is wrong with it, each reader says so in one line that names the place."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from shoal.data.coco.augment import Placement
from shoal.data.coco.source import read_categories
from shoal.data.coco.transform import placed_objects
from shoal.data.images.manifest import ImageManifest
from shoal.data.json_stream import top_level_entries
from shoal.data.manifest import Manifest
from shoal.data.prepare_dir import open_plan
from shoal.data.squad.dataset import read_squad
from shoal.data.text import chunk_worker
from shoal.data.text.classify import Columns, read_classify
from shoal.errors import ShoalError, UsageError
from shoal.json_text import parse_json
from shoal.launch.worker import read_errors
from shoal.models.directory import model_type_of
from shoal.planner.calibration import read_measured
from shoal.recipes.images import read_tree, reading
from shoal.recipes.model_source import read_model_config
from shoal.record import Stop, read_record
from shoal.train.checkpoint_files import find_damage, read_contents
from shoal.train.reporting import RecordWriter

WRONG = {
    "lists": b"[" * 100_000,
    "objects": b'{"a":' * 100_000,
    "digits": b'{"a": ' + b"9" * 5000 + b"}",
    "bytes": b'{"a": "\xff"}',
    "cut": b'{"a": 1',
}

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@hypothesis.given(VALUES)
def test_what_is_json_is_read(value: Any) -> None:
    for text in (json.dumps(value), json.dumps(value).encode(), bytearray(json.dumps(value).encode())):
        assert parse_json(text, "here") == value


@pytest.mark.parametrize("name", WRONG)
def test_what_is_none_names_place_and_remedy(name: str) -> None:
    problem = {
        "lists": "is nested too deeply",
        "objects": "is nested too deeply",
        "digits": "is not JSON: Exceeds the limit (4300 digits) for integer string conversion",
        "bytes": "is not JSON: 'utf-8' codec can't decode byte 0xff in position 7: invalid start byte",
        "cut": "is not JSON: Expecting ',' delimiter: line 1 column 8 (char 7)",
    }[name]
    with pytest.raises(ShoalError) as error:
        parse_json(WRONG[name], "here")
    assert str(error.value).startswith(f"here: {problem}") and type(error.value) is ShoalError
    with pytest.raises(UsageError, match=r"^there: is .*; get it again$") as usage:
        parse_json(WRONG[name], "there", error=UsageError, remedy="get it again")
    assert usage.value.__cause__ is None and usage.value.__context__ is None


def read_export(path: Path) -> None:
    with reading(path.parent):
        read_tree(path.parent, "resnet")


PLACE = Placement(resized=(4, 4), top=0, left=0, frame=(4, 4), flip=False)

READERS: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "text": ("manifest.json", lambda path: Manifest.load(path.parent), "{path}: is "),
    "images": ("manifest.json", lambda path: ImageManifest.load(path.parent), "{path}: is "),
    "plan": (
        "prepare.json",
        lambda path: open_plan(path.parent, {}),
        "{path} is damaged; run again",
    ),
    "piece": (
        "records/00007.json",
        lambda path: chunk_worker.finished_chunk(path.parent.parent, 7),
        "{path}: is ",
    ),
    "classes": ("a.jsonl", lambda path: read_classify(path, Columns(), labels=None), "{path}"),
    "squad": ("a.json", lambda path: read_squad(path, purpose="score"), "{path}"),
    "coco": ("a.json", lambda path: list(top_level_entries(path)), "{path}"),
    "categories": ("categories.json", lambda path: read_categories(path.parent), "{path}"),
    "objects": (
        "a",
        lambda path: placed_objects(path.read_bytes(), (4, 4), PLACE),
        "annotations of an image: ",
    ),
    "model": ("config.json", lambda path: model_type_of(path.parent), "{path}: is "),
    "source": ("config.json", lambda path: read_model_config(path.parent), "{path}: is "),
    "network": ("config.json", read_export, "{path}: is "),
    "measured": ("a.json", read_measured, "--measured {path}: is "),
    "worker": ("error-0.json", lambda path: read_errors(path.parent), "{path}: is "),
    "table": ("contents.json", lambda path: read_contents(path.parent), "{path}: is "),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("reader", READERS)
def test_every_reader_names_the_place(tmp_path: Path, reader: str, name: str) -> None:
    file, read, words = READERS[reader]
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(WRONG[name])
    with pytest.raises(ShoalError) as error:
        read(path)
    assert str(error.value).startswith(words.format(path=path)) and "\n" not in str(error.value)


@pytest.mark.parametrize("name", WRONG)
def test_a_checkpoint_with_such_a_mark_is_damaged(tmp_path: Path, name: str) -> None:
    (tmp_path / "step-7").mkdir()
    (tmp_path / "step-7" / "complete.json").write_bytes(WRONG[name])
    assert find_damage(tmp_path / "step-7") == "complete.json is malformed"


@pytest.mark.parametrize("name", WRONG)
def test_a_record_is_read_without_such_lines(tmp_path: Path, name: str) -> None:
    stop = Stop(step=3, reason="a signal", exit_code=75, time_s=1.0)
    writer = RecordWriter(tmp_path)
    writer.write(stop)
    writer.close()
    (path,) = tmp_path.iterdir()
    path.write_bytes(WRONG[name] + b"\n" + path.read_bytes())
    assert read_record(tmp_path) == [stop]


def test_a_record_of_a_piece_without_its_fields(tmp_path: Path) -> None:
    (tmp_path / "records").mkdir()
    path = tmp_path / "records" / "00007.json"
    for text in ("[]", '{"train": {}}', '{"train": 7}', "7"):
        path.write_text(text)
        with pytest.raises(ShoalError, match=rf"{path}: a field is missing or wrong .*; run again"):
            chunk_worker.finished_chunk(tmp_path, 7)


@pytest.mark.parametrize(
    "text", ['{"image_id": 1e999, "height": 4, "width": 4, "annotations": []}', "[]", "7"]
)
def test_annotations_that_cannot_be(text: str) -> None:
    with pytest.raises(ShoalError, match=r"annotations of an image cannot be read .*; prepare the images"):
        placed_objects(text.encode(), (4, 4), PLACE)
