"""Every value of a small file replaced by odd ones: readers give a result, or one line that names the file.

The readers are those of COCO, SQuAD, labelled texts and conversations.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from shoal.data.bad_entries import BadEntries
from shoal.data.coco.annotations import read_annotations
from shoal.data.coco.results import read_results
from shoal.data.coco.source import CocoSource, CocoSplit
from shoal.data.squad.dataset import read_null_odds, read_squad
from shoal.data.text.classify import Columns, read_classify, read_scores
from shoal.data.text.conversations import read_conversations
from shoal.errors import ShoalError

ODD: list[Any] = [
    None, True, -1, float("inf"), float("nan"), "", "5", "\ud83d", "\0", [], {}, [[]], [None], {"a": 1},
    10**400, 10**19, 1e308, ["a"], [[[[5]]]], [[1, 2], [3]],
]  # fmt: skip
RUN_LENGTHS = {"size": [48, 64], "counts": [5, 5, 48 * 64 - 10]}
OBJECT = {"image_id": 1, "category_id": 1, "bbox": [5, 5, 9, 9]}
COCO = {
    "images": [{"id": 1, "file_name": "p.jpg", "width": 64, "height": 48}],
    "categories": [{"id": 1, "name": "hen"}],
    "annotations": [
        {"id": 1, **OBJECT, "area": 81, "iscrowd": 0, "segmentation": [[5, 5, 14, 5, 14, 14]]},
        {"id": 2, **OBJECT, "area": 81, "iscrowd": 1, "segmentation": RUN_LENGTHS},
    ],
}
RESULTS = [
    {**OBJECT, "score": 0.5},
    {"image_id": 1, "category_id": 1, "score": 0.5, "segmentation": RUN_LENGTHS},
    {"image_id": 1, "category_id": 1, "score": 0.5, "segmentation": [[5, 5, 14, 5, 14, 14]]},
]
ANSWERS = [{"text": "Ada", "answer_start": 0}]
QUESTION = {"id": "a", "question": "Who?", "answers": ANSWERS, "is_impossible": False}
SQUAD = {"version": "2.0", "data": [{"paragraphs": [{"context": "Ada met Bob.", "qas": [QUESTION]}]}]}
ROWS = [{**QUESTION, "context": "Ada", "answers": {"text": ["Ada"], "answer_start": [0]}}] * 2
LABELLED = [{"sentence1": "a", "sentence2": "b", "label": label} for label in (0, 1)]
CHATS = [
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    {"prompt": "a", "response": "b"},
]


def variants(tree: Any) -> Iterator[Any]:
    """Yield the tree with each node in turn replaced by each odd value, and left out."""
    for place in places(tree, ()):
        for value in ODD:
            changed = copy.deepcopy([tree])
            node: Any = changed
            for key in (0, *place)[:-1]:
                node = node[key]
            node[(0, *place)[-1]] = value
            yield changed[0]
            if place and value is None:
                del node[place[-1]]
                yield changed[0]


def places(tree: Any, above: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    yield above
    below = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in below:
        yield from places(value, (*above, key))


def prepare(path: Path) -> None:
    source = CocoSource(
        CocoSplit(path.parent / "im", path), keep_empty=True, run_lengths=True, boxes_only="fill"
    )
    list(source.images("train"))


def score(path: Path) -> None:
    (path.parent / "truth").write_text(json.dumps(COCO))
    read_results([path], read_annotations(path.parent / "truth"))


READERS: dict[str, tuple[Any, Callable[[Path], object]]] = {
    "coco.json": (COCO, prepare),
    "results.json": (RESULTS, score),
    "squad.json": (SQUAD, lambda path: read_squad(path, purpose="train")),
    "rows.json": (ROWS, lambda path: read_squad(path, purpose="ask")),
    "odds.json": ({"a": 0.5}, read_null_odds),
    "labels.json": (LABELLED, lambda path: read_classify(path, Columns(), labels=None)),
    "scores.json": (LABELLED, lambda path: read_scores(path, Columns())),
    "chats.json": (CHATS, lambda path: read_conversations(path, BadEntries(path))),
}


@pytest.mark.parametrize("name", READERS)
def test_odd_values_are_read_or_refused_in_one_line(name: str, tmp_path: Path) -> None:
    tree, read = READERS[name]
    path = tmp_path / name
    (tmp_path / "im").mkdir()
    Image.new("RGB", (64, 48)).save(tmp_path / "im" / "p.jpg")
    path.write_text(json.dumps(tree))
    read(path)
    refused = 0
    for changed in variants(tree):
        path.write_text(json.dumps(changed))
        try:
            read(path)
        except ShoalError as error:
            refused += 1
            assert name in str(error) and "\n" not in str(error), error
    assert refused
