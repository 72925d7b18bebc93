"""Reads and writes the JSON files of SQuAD: data, predictions, null odds. Standard library only.

Another file is refused with its path and the invalid key. Real files have answers whose text is not at
``answer_start`` in the paragraph; the caller chooses to keep, skip or refuse them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shoal.data.atomic_io import write_atomically
from shoal.errors import UsageError, did_you_mean
from shoal.json_text import parse_json

Misplaced = Literal["keep", "skip", "refuse"]
Version = Literal["1.1", "2.0"]

_SHOWN = 3
"""Number of ids or places that a message names."""
_KINDS = {list: "a list", dict: "an object", str: "a string", int: "a whole number", bool: "true or false"}


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
    """2.0 if any question is marked ``is_impossible`` (true or false) or has no answer."""
    paragraphs: tuple[str, ...]
    questions: tuple[Question, ...]
    misplaced: tuple[str, ...]
    """Keys of the answers that are not at ``answer_start``."""
    num_dropped: int
    """Questions that were skipped because all their answers were misplaced."""


def read_squad(path: Path, *, misplaced: Misplaced) -> SquadData:
    """Read a data file of SQuAD 1.1 or 2.0.

    Args:
        misplaced: ``keep`` answers whose text is not at ``answer_start``, as the official scorers do, which
            compare texts only; ``skip`` them, and questions without another answer; or ``refuse`` the file.

    Raises:
        UsageError: the file cannot be read, is not SQuAD, holds an id twice or no question; or holds a
            misplaced answer, which is refused.
    """
    return _Reader(path, misplaced).read()


def describe_misplaced(data: SquadData) -> str | None:
    """Return one line about misplaced answers, or ``None`` if there are none."""
    if not data.misplaced:
        return None
    dropped = f"; {data.num_dropped} questions without another answer left out" if data.num_dropped else ""
    return (
        f"{data.path}: {len(data.misplaced)} answers do not stand at answer_start "
        f"({shorten(data.misplaced)}){dropped}"
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


def write_json(path: Path, tree: Mapping[str, Any]) -> None:
    """Write predictions, n-best lists, null odds or scores.

    Raises:
        ShoalError: the disk is full or the folder cannot be written.
    """
    write_atomically(path, json.dumps(tree, indent=2).encode() + b"\n")


def shorten(names: tuple[str, ...] | list[str]) -> str:
    """Return the first few of ``names``, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


class _Reader:
    """Reads the tree of a data file; ``place`` is the path of keys to the current node."""

    def __init__(self, path: Path, misplaced: Misplaced) -> None:
        self._path = path
        self._policy = misplaced
        self._paragraphs: list[str] = []
        self._questions: list[Question] = []
        self._place_of: dict[str, str] = {}
        self._misplaced: list[str] = []
        self._num_dropped = 0
        self._marked = False

    def read(self) -> SquadData:
        tree = _load(self._path)
        if not isinstance(tree, dict):
            raise self._wrong(f"is {_shown(tree)}, not an object with the key 'data'; is it a file of SQuAD?")
        for a, article in enumerate(self._get(tree, "data", list, "")):
            for p, paragraph in enumerate(self._get(article, "paragraphs", list, f"data[{a}]")):
                self._read_paragraph(paragraph, f"data[{a}].paragraphs[{p}]")
        if not self._questions:
            dropped = f" ({self._num_dropped} were left out: misplaced answers)" if self._num_dropped else ""
            raise self._wrong(f"holds no question{dropped}")
        return SquadData(
            path=self._path,
            version="2.0" if self._marked or not all(q.answers for q in self._questions) else "1.1",
            paragraphs=tuple(self._paragraphs),
            questions=tuple(self._questions),
            misplaced=tuple(self._misplaced),
            num_dropped=self._num_dropped,
        )

    def _read_paragraph(self, paragraph: Any, place: str) -> None:
        context = self._get(paragraph, "context", str, place)
        self._paragraphs.append(context)
        for q, entry in enumerate(self._get(paragraph, "qas", list, place)):
            here = f"{place}.qas[{q}]"
            name = self._get(entry, "id", str, here)
            if name in self._place_of:
                raise self._wrong(
                    f"{here}.id {name!r} is that of {self._place_of[name]} too; each question needs its own"
                )
            self._place_of[name] = here
            found = self._get(entry, "answers", list, here)
            answers = self._read_answers(found, context, f"{here}.answers")
            is_impossible = False
            if "is_impossible" in entry:
                self._marked = True
                is_impossible = self._get(entry, "is_impossible", bool, here)
            text = self._get(entry, "question", str, here)
            if found and not answers:
                self._num_dropped += 1
                continue
            self._questions.append(Question(name, text, len(self._paragraphs) - 1, answers, is_impossible))

    def _read_answers(self, entries: list[Any], context: str, place: str) -> tuple[Answer, ...]:
        answers = []
        for k, entry in enumerate(entries):
            here = f"{place}[{k}]"
            text = self._get(entry, "text", str, here)
            # the official scorers do not need it, so a file that is only scored may lack it
            if "answer_start" in entry or self._policy != "keep":
                start = self._get(entry, "answer_start", int, here)
            else:
                start = -1
            if not stands_at(context, text, start):
                if self._policy == "refuse":
                    stands = context[max(start, 0) : max(start, 0) + len(text)]
                    raise self._wrong(
                        f"{here}: {text!r} does not stand at answer_start {start}, {stands!r} does; correct "
                        "the file, or let such answers be skipped"
                    )
                self._misplaced.append(here)
                if self._policy == "skip":
                    continue
            answers.append(Answer(text, start))
        return tuple(answers)

    def _get(self, node: Any, key: str, kind: type, place: str) -> Any:
        if not isinstance(node, dict):
            raise self._wrong(f"{place} is {_shown(node)}, but must be an object with the key {key!r}")
        if key not in node:
            raise self._wrong(
                f"{place or 'the file'} has no key {key!r}.{did_you_mean(key, map(str, node))} "
                "Is it a file of SQuAD?"
            )
        value = node[key]
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            where = f"{place}.{key}" if place else key
            raise self._wrong(f"{where} is {_shown(value)}, but must be {_KINDS[kind]}")
        return value

    def _wrong(self, what: str) -> UsageError:
        return UsageError(f"{self._path}: {what}")


def stands_at(context: str, text: str, start: int) -> bool:
    """Return whether ``context`` has ``text`` at character ``start``."""
    return start >= 0 and context.startswith(text, start) and start <= len(context)


def _load(path: Path) -> Any:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{path}: byte {error.start + 1} is not UTF-8; it must be a JSON file in UTF-8"
        ) from None
    if not text.strip():
        raise UsageError(f"{path}: the file is empty; it must be JSON")
    try:
        return parse_json(text, str(path), error=UsageError, object_pairs_hook=_without_repeats)
    except _Repeated as error:
        raise UsageError(f"{path}: the key {error.args[0]!r} is there twice in one object") from None


class _Repeated(Exception):
    """Raised for a key that a JSON object has twice, of which Python would silently take the last."""


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) != len(pairs):
        seen: set[str] = set()
        raise _Repeated(next(key for key, _ in pairs if key in seen or seen.add(key)))  # type: ignore[func-returns-value]
    return tree


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
