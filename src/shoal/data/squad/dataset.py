"""Reads and writes the JSON files of SQuAD: data, predictions, null odds. Standard library only.

Another file is refused with its path and the invalid key. Real files have answers whose text is not at
``answer_start`` in the paragraph; the caller chooses to keep, skip or refuse them.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shoal.atomic_io import read_text
from shoal.errors import UsageError, did_you_mean
from shoal.json_text import parse_json

Misplaced = Literal["keep", "skip", "refuse", "ignore"]
Version = Literal["1.1", "2.0"]

_SHOWN = 3
"""Number of ids or places that a message names."""
_KINDS = {
    list: "a list",
    dict: "an object",
    str: "a string",
    int: "a whole number",
    bool: "true or false",
    (str, int): "a string or a whole number",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """A gold answer: its text, and the index of its first character in the paragraph (-1: not given)."""

    text: str
    start: int


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a paragraph."""

    id: str
    text: str
    paragraph: int
    """Index in :attr:`SquadData.paragraphs`."""
    answers: tuple[Answer, ...]
    is_impossible: bool
    """Marked as unanswerable; in 2.0 only."""


@dataclass(frozen=True, kw_only=True)
class SquadData:
    """The contents of a data file, in its order."""

    path: Path
    version: Version
    """2.0 if any question is marked ``is_impossible`` (true or false), or has no answer where others have."""
    paragraphs: tuple[str, ...]
    questions: tuple[Question, ...]
    misplaced: tuple[str, ...]
    """Keys of the answers that are not at ``answer_start``."""
    num_dropped: int
    """Questions that were skipped because all their answers were misplaced."""
    hint: str = ""
    """Explanation of misplaced answers, if it is the same for all."""


def read_squad(path: Path, *, misplaced: Misplaced) -> SquadData:
    """Read a data file of SQuAD 1.1 or 2.0.

    Ids may be whole numbers, as tools write them.

    Args:
        misplaced: ``keep`` answers whose text is not at ``answer_start``, as the official scorers do, which
            compare texts only; ``skip`` them, and questions without another answer; ``refuse`` the file; or
            ``ignore`` answers, which the file may lack altogether; ids too, questions are then numbered.

    Raises:
        UsageError: the file cannot be read, is not SQuAD, holds an id twice or no question; or holds a
            misplaced answer, which is refused.
    """
    tree = _load(path)
    # the official scorers do not need answer_start, so a file that is only scored may lack it
    optional = ["is_impossible", *_OPTIONAL.get(misplaced, ())]
    _check_shape(path, tree, _FILE, "", optional)
    _complete_ids(tree)
    listed = [
        (f"data[{a}].paragraphs[{p}]", paragraph)
        for a, article in enumerate(tree["data"])
        for p, paragraph in enumerate(article["paragraphs"])
    ]
    questions: list[Question] = []
    place_of: dict[str, str] = {}
    misplaced_at: list[str] = []
    off: list[tuple[str, Answer]] = []
    num_dropped, is_marked = 0, False
    for number, (place, paragraph) in enumerate(listed):
        for q, entry in enumerate(paragraph["qas"]):
            here, name = f"{place}.qas[{q}]", entry["id"]
            if name in place_of:
                raise UsageError(
                    f"{path}: {here}.id {name!r} is that of {place_of[name]} too; each question needs its own"
                )
            place_of[name] = here
            is_marked |= "is_impossible" in entry
            listed_answers = entry.get("answers", [])
            context = paragraph["context"]
            answers, wrong = _read_answers(path, listed_answers, context, here, misplaced)
            misplaced_at += [place for place, _ in wrong]
            off += [(context, answer) for _, answer in wrong]
            if listed_answers and not answers:
                num_dropped += 1
                continue
            is_impossible = entry.get("is_impossible", False)
            questions.append(Question(name, entry["question"], number, answers, is_impossible))
    if not questions:
        dropped = f" ({num_dropped} were left out: misplaced answers{_hint(off)})" if num_dropped else ""
        raise UsageError(f"{path}: holds no question{dropped}")
    has_answers = misplaced != "ignore" or any(question.answers for question in questions)
    lacks_some = has_answers and not all(question.answers for question in questions)
    return SquadData(
        path=path,
        version="2.0" if is_marked or lacks_some else "1.1",
        paragraphs=tuple(paragraph["context"] for _, paragraph in listed),
        questions=tuple(questions),
        misplaced=tuple(misplaced_at),
        num_dropped=num_dropped,
        hint=_hint(off),
    )


def _hint(off: Sequence[tuple[str, Answer]]) -> str:
    """Return how the answers are off that do not stand in their contexts, if it is the same for all."""
    if not off:
        return ""
    for unit, encoding, size in (("bytes of UTF-8", "utf-8", 1), ("units of UTF-16", "utf-16-le", 2)):
        encoded = [
            (context.encode(encoding, "surrogatepass"), one.text.encode(encoding, "surrogatepass"), one.start)
            for context, one in off
        ]
        if all(start >= 0 and context.startswith(text, size * start) for context, text, start in encoded):
            return f"; all stand there in {unit}, but answer_start counts characters"
    for shift in (-1, 1, -2, 2):
        if all(stands_at(context, one.text, one.start + shift) for context, one in off):
            return f"; all stand {abs(shift)} {'before' if shift < 0 else 'behind'} their answer_start"
    return ""


def describe_misplaced(data: SquadData) -> str | None:
    """Return one line about misplaced answers, or ``None`` if there are none."""
    if not data.misplaced:
        return None
    dropped = f"; {data.num_dropped} questions without another answer left out" if data.num_dropped else ""
    return (
        f"{data.path}: {len(data.misplaced)} answers do not stand at answer_start "
        f"({shorten(data.misplaced)}){dropped}{data.hint}"
    )


def read_predictions(path: Path) -> dict[str, str]:
    """Read predictions: an object of question id and answer text, empty for "no answer".

    Raises:
        UsageError: the file cannot be read, is not such an object, or holds an id twice.
    """
    tree = _object_of_ids(path, "an answer")
    for key, value in tree.items():
        if not isinstance(value, str):
            raise UsageError(f"{path}: {key!r} is {_shown(value)}; the answer must be a string")
    return tree


def read_null_odds(path: Path) -> dict[str, float]:
    """Read the odds, or probabilities, that questions have no answer: an object of question id and number.

    Raises:
        UsageError: the file cannot be read, is not such an object, or holds an id twice.
    """
    tree = _object_of_ids(path, "a number")
    for key, value in tree.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
            raise UsageError(f"{path}: {key!r} is {_shown(value)}; it must be a number")
    return {key: float(value) for key, value in tree.items()}


def shorten(names: tuple[str, ...] | list[str]) -> str:
    """Return the first few of ``names``, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


_ANSWER = {"text": str, "answer_start": int}
_QUESTION = {"id": (str, int), "question": str, "answers": [_ANSWER], "is_impossible": bool}
_OPTIONAL = {"keep": ("answer_start",), "ignore": ("answer_start", "answers", "id")}
"""Keys that a file may lack, by what is done with misplaced answers."""
_FILE = {"data": [{"paragraphs": [{"context": str, "qas": [_QUESTION]}]}]}


def _check_shape(path: Path, node: Any, shape: Any, place: str, optional: Sequence[str]) -> None:
    """Check that the node at ``place``, the keys that lead to it, has the types and keys of ``shape``.

    Raises:
        UsageError: names the first that is wrong.
    """
    kind: Any = shape if isinstance(shape, type | tuple) else type(shape)
    if not isinstance(node, kind) or (kind is not bool and isinstance(node, bool)):
        keys = f" with the key {next(iter(shape))!r}" if kind is dict else ""
        raise UsageError(f"{path}: {place or 'the file'} is {_shown(node)}, but must be {_KINDS[kind]}{keys}")
    if isinstance(shape, list):
        for number, entry in enumerate(node):
            _check_shape(path, entry, shape[0], f"{place}[{number}]", optional)
    elif isinstance(shape, dict):
        for key, inner in shape.items():
            if key in node:
                _check_shape(path, node[key], inner, f"{place}.{key}".lstrip("."), optional)
            elif key not in optional:
                raise UsageError(
                    f"{path}: {place or 'the file'} has no key {key!r}.{did_you_mean(key, map(str, node))} "
                    "Is it a file of SQuAD?"
                )


def _complete_ids(tree: Any) -> None:
    """Make texts of ids that are numbers, and number questions without one, in a tree of the right shape."""
    entries = [one for article in tree["data"] for each in article["paragraphs"] for one in each["qas"]]
    for number, entry in enumerate(entries, start=1):
        entry["id"] = str(entry.get("id", number))


def _read_answers(
    path: Path, entries: list[Any], context: str, place: str, policy: Misplaced
) -> tuple[tuple[Answer, ...], list[tuple[str, Answer]]]:
    """Return the answers to keep, and those that are not at ``answer_start`` with their places."""
    answers: list[Answer] = []
    misplaced: list[tuple[str, Answer]] = []
    for number, entry in enumerate(entries):
        text, start = entry["text"], entry.get("answer_start", -1)
        if not stands_at(context, text, start):
            here = f"{place}.answers[{number}]"
            if policy == "refuse":
                stands = context[max(start, 0) : max(start, 0) + len(text)]
                raise UsageError(
                    f"{path}: {here}: {text!r} does not stand at answer_start {start}, {stands!r} does; "
                    "correct the file, or let such answers be skipped"
                )
            misplaced.append((here, Answer(text, start)))
            if policy == "skip":
                continue
        answers.append(Answer(text, start))
    return tuple(answers), misplaced


def stands_at(context: str, text: str, start: int) -> bool:
    """Return whether ``context`` has ``text`` at character ``start``."""
    return start >= 0 and context.startswith(text, start) and start <= len(context)


def _load(path: Path) -> Any:
    """Return the JSON; refuse a key that an object has twice, since Python would silently take the last."""

    def as_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        tree = dict(pairs)
        if len(tree) != len(pairs):
            key = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise UsageError(f"{path}: the key {key!r} is there twice in one object")
        return tree

    return parse_json(read_text(path), str(path), error=UsageError, object_pairs_hook=as_dict)


def _object_of_ids(path: Path, of: str) -> dict[str, Any]:
    tree = _load(path)
    if not isinstance(tree, dict):
        raise UsageError(f"{path}: is {_shown(tree)}, but must be an object with {of} for each question id")
    return tree


def _shown(value: Any) -> str:
    """Return a JSON value, shortened for a message."""
    if isinstance(value, list | dict):
        return f"{_KINDS[type(value)]} of {len(value)}"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else text[:37] + "..."
