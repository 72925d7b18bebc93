"""Reads and writes the files of SQuAD: data, predictions, null odds.

Data is the official JSON, or a row for each question as the hub's sets have them: JSON lines, a JSON array,
or Parquet. Entries of another form are counted and left out by the rule of :mod:`shoal.data.bad_entries`, as
are answers to learn that do not stand at ``answer_start`` in their paragraph.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shoal.atomic_io import read_text
from shoal.data.bad_entries import BadEntries, BadEntry
from shoal.data.text.rows import field_names, field_rows, json_rows
from shoal.errors import UsageError, did_you_mean
from shoal.json_text import parse_json

Purpose = Literal["train", "evaluate", "score", "ask"]
"""In training answers must stand at their place; others compare texts. Scores of a file of predictions need
ids, as the evaluation of a model does not; a file to ask needs no answers."""
Version = Literal["1.1", "2.0"]

MISPLACED = "an answer that does not stand at its answer_start"
NO_TEXT = "an answer whose text is empty"
UNANSWERED = "a question without an answer whose is_impossible is false"
NOT_SQUAD = "an entry of another form than SQuAD's"
SAME_ID = "a question whose id another one has"

_NO_ANSWER = {"text": "", "answer_start": -1}
"""As some tools write that there is none."""
_MOST_ODDS = 10**300
"""Larger whole numbers are no floats."""
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
    bad: BadEntries | None = None
    """Counts of what was left out."""
    misplaced: tuple[str, ...] = ()
    """Places of answers that were kept although they are not at ``answer_start``."""
    hint: str = ""
    """Explanation of misplaced answers, if it is the same for all."""

    def remarks(self) -> list[str]:
        """Return a line about left-out entries and one about misplaced answers, if there are any."""
        lines = [f"{line}{self.hint}" for line in (self.bad.lines() if self.bad else ())]
        if self.misplaced:
            lines.append(
                f"{self.path}: {len(self.misplaced)} answers do not stand at answer_start "
                f"({shorten(self.misplaced)}){self.hint}"
            )
        return lines


def read_squad(path: Path, *, purpose: Purpose, bad: BadEntries | None = None) -> SquadData:
    """Read the questions of a file of SQuAD 1.1 or 2.0, or of rows with the same fields.

    Its name ends in ``.jsonl``, ``.parquet``, or is that of the official JSON, or of a JSON array of rows.
    Answers are a list of ``text`` and ``answer_start``, or an object with one or a list of each. Ids may be
    whole numbers, and are the number of the question, line or row where the file has none; scores need them.

    Args:
        purpose: what the file is for; decides which keys it may lack, and whether answers are checked.
        bad: counts invalid entries; default: they are left out.

    Raises:
        UsageError: the file cannot be read, is not SQuAD, holds no question, or too many invalid entries.
    """
    reader = _Reader(purpose, bad or BadEntries(path))
    for number, location, context, entry in _entries(path, reader.bad):
        try:
            reader.take(location, context, entry, number)
        except BadEntry as error:
            reader.bad.add(error, location)
    return reader.finish(path)


class _Reader:
    """Collects the questions of a file."""

    def __init__(self, purpose: Purpose, bad: BadEntries) -> None:
        self.bad = bad
        self._purpose = purpose
        self._questions: list[Question] = []
        self._paragraphs: dict[str, int] = {}
        self._ids: set[str] = set()
        self._misplaced: list[str] = []
        self._off: list[tuple[str, Answer]] = []
        """Misplaced answers with their paragraphs."""
        self._is_marked = False

    def take(self, location: str, context: Any, entry: Any, number: int) -> None:
        """Add a question.

        Raises:
            BadEntry: it cannot be used.
        """
        _check_shape(context, str, "context")
        entry = _official(entry, self._purpose)
        _check_shape(entry, _QUESTION, "", _OPTIONAL[self._purpose])
        name = str(entry.get("id", number))
        if name in self._ids:
            raise BadEntry(SAME_ID, repr(name))
        if self._purpose == "train" and entry.get("is_impossible") is False and not entry["answers"]:
            raise BadEntry(UNANSWERED, repr(name))
        answers = self._placed(entry.get("answers", []), context, location)
        self._ids.add(name)
        self._is_marked |= "is_impossible" in entry
        if entry.get("answers") and not answers:
            return
        paragraph = self._paragraphs.setdefault(context, len(self._paragraphs))
        is_impossible = entry.get("is_impossible", False)
        self._questions.append(Question(name, entry["question"], paragraph, answers, is_impossible))

    def _placed(self, entries: list[Any], context: str, location: str) -> tuple[Answer, ...]:
        """Return the answers to keep; those of a training file stand at ``answer_start``."""
        answers = []
        for number, entry in enumerate(entries):
            answer = Answer(entry["text"], entry.get("answer_start", -1))
            if self._purpose == "train" and not answer.text.strip():
                self.bad.add(BadEntry(NO_TEXT, ""), f"{location}.answers[{number}]")
                continue
            if not stands_at(context, answer.text, answer.start):
                here, first = f"{location}.answers[{number}]", max(answer.start, 0)
                self._off.append((context, answer))
                if self._purpose == "train":
                    stands = context[first : first + len(answer.text)]
                    value = f"{answer.text!r:.40} at {answer.start}, where {stands!r:.40} stands"
                    self.bad.add(BadEntry(MISPLACED, value), here)
                    continue
                self._misplaced.append(here)
            answers.append(answer)
        return tuple(answers)

    def finish(self, path: Path) -> SquadData:
        """Return the questions.

        Raises:
            UsageError: there is none, or too much was left out.
        """
        questions, hint = self._questions, _hint(self._off)
        try:
            self.bad.check(len(questions))
        except UsageError as error:
            raise UsageError(f"{error}{hint}") from None
        if not questions:
            raise UsageError(f"{path}: holds no question")
        has_answers = self._purpose != "ask" or any(question.answers for question in questions)
        lacks_some = has_answers and not all(question.answers for question in questions)
        return SquadData(
            path=path,
            version="2.0" if self._is_marked or lacks_some else "1.1",
            paragraphs=tuple(self._paragraphs),
            questions=tuple(questions),
            bad=self.bad,
            misplaced=tuple(self._misplaced),
            hint=hint,
        )


def _entries(path: Path, bad: BadEntries) -> Iterator[tuple[int, str, Any, Any]]:
    """Yield the number, the place, the paragraph and the question of each entry, which may be of any form."""
    suffix = path.suffix.lower()
    if suffix in (".csv", ".tsv"):
        raise UsageError(
            f"{path}: questions are read from .json, .jsonl or .parquet; convert the table, as by "
            'DataFrame.to_json(..., orient="records", lines=True)'
        )
    if suffix == ".parquet":
        rows = enumerate(field_rows(path, field_names(path, str(path)), str(path)), start=1)
        yield from ((number, f"row {number}", row.get("context"), row) for number, row in rows)
    elif suffix == ".jsonl":
        for number, location, row in json_rows(path, bad):
            yield number, location, row.get("context"), row
    else:
        for number, entry in enumerate(_nested(path, bad), start=1):
            yield number, *entry


def _nested(path: Path, bad: BadEntries) -> Iterator[tuple[str, Any, Any]]:
    """Yield the entries of one JSON value: articles with paragraphs and their questions, or rows.

    Raises:
        UsageError: it is of another form.
    """
    tree = _load(path)
    if not isinstance(tree, list):
        keys = list(map(str, tree)) if isinstance(tree, dict) else []
        if "data" not in keys or not isinstance(tree["data"], list):
            raise UsageError(
                f"{path}: must be an object with the key 'data', a list of articles."
                f"{did_you_mean('data', set(keys) - {'data'})} Is it a file of SQuAD?"
            )
        tree = tree["data"]
    for a, article in enumerate(tree):
        if isinstance(article, dict) and "question" in article:
            yield f"data[{a}]", article.get("context"), article
        elif _is_valid(article, {"paragraphs": []}, f"data[{a}]", bad):
            for p, paragraph in enumerate(article["paragraphs"]):
                location = f"data[{a}].paragraphs[{p}]"
                if _is_valid(paragraph, {"context": str, "qas": []}, location, bad):
                    for q, entry in enumerate(paragraph["qas"]):
                        yield f"{location}.qas[{q}]", paragraph["context"], entry


def _official(entry: Any, purpose: Purpose) -> Any:
    """Return a question with the official form of its answers, without keys of no value."""
    if not isinstance(entry, dict):
        return entry
    entry = {key: value for key, value in entry.items() if value is not None or key not in _MAY_BE_NULL}
    if type(mark := entry.get("is_impossible")) in (int, float) and mark in (0, 1):
        entry["is_impossible"] = bool(mark)
    answers = entry.get("answers")
    if isinstance(answers, dict) and isinstance(answers.get("text"), str):
        entry["answers"] = [answers]
    elif isinstance(answers, dict) and isinstance(texts := answers.get("text"), list):
        starts = answers.get("answer_start")
        if isinstance(starts, list) and len(starts) == len(texts):
            pairs = zip(texts, starts, strict=True)
            entry["answers"] = [{"text": text, "answer_start": start} for text, start in pairs]
        elif purpose != "train":
            entry["answers"] = [{"text": text} for text in texts]
    if isinstance(entry.get("answers"), list):
        entry["answers"] = [_with_whole_start(one) for one in entry["answers"]]
    if entry.get("is_impossible") is True and entry.get("answers") in ([_NO_ANSWER], [{"text": ""}]):
        entry["answers"] = []
    if purpose == "ask":  # a question is asked whatever its answers are
        try:
            _check_shape(entry.get("answers", []), [_ANSWER], "", _OPTIONAL[purpose])
        except BadEntry:
            del entry["answers"]
    return entry


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
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or value != value or (isinstance(value, int) and abs(value) > _MOST_ODDS):
            raise UsageError(f"{path}: {key!r} is {_shown(value)}; it must be a number")
    return {key: float(value) for key, value in tree.items()}


def shorten(names: tuple[str, ...] | list[str]) -> str:
    """Return the first few of ``names``, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _with_whole_start(answer: Any) -> Any:
    """Return an answer whose start is a whole number, where a table has made a float or a text of it."""
    start = answer.get("answer_start") if isinstance(answer, dict) else None
    if isinstance(start, str) and re.fullmatch("[0-9]{1,9}", start):
        start = float(start)
    return (
        {**answer, "answer_start": int(start)} if isinstance(start, float) and start.is_integer() else answer
    )


_ANSWER = {"text": str, "answer_start": int}
_QUESTION = {"id": (str, int), "question": str, "answers": [_ANSWER], "is_impossible": bool}
_MAY_BE_NULL = ("id", "answers", "is_impossible")
_OPTIONAL = {
    "train": ("id", "is_impossible"),
    "evaluate": ("answer_start", "id", "is_impossible"),
    "score": ("answer_start", "is_impossible"),
    "ask": ("answer_start", "answers", "id", "is_impossible"),
}
"""Keys that a question may lack, by what the file is for."""


def _check_shape(node: Any, shape: Any, location: str, optional: Sequence[str] = ()) -> None:
    """Check that the node at ``location``, the keys that lead to it, has the types and keys of ``shape``.

    Raises:
        BadEntry: names the first that is wrong.
    """
    kind: Any = shape if isinstance(shape, type | tuple) else type(shape)
    if not isinstance(node, kind) or (kind is not bool and isinstance(node, bool)):
        keys = f" with the key {next(iter(shape))!r}" if kind is dict else ""
        raise BadEntry(NOT_SQUAD, f"{location} is {_shown(node)}, but must be {_KINDS[kind]}{keys}".lstrip())
    if isinstance(shape, list):
        for number, entry in enumerate(node if shape else ()):
            _check_shape(entry, shape[0], f"{location}[{number}]", optional)
    elif isinstance(shape, dict):
        for key, inner in shape.items():
            if key in node:
                _check_shape(node[key], inner, f"{location}.{key}".lstrip("."), optional)
            elif key not in optional:
                raise BadEntry(
                    NOT_SQUAD, f"{location} has no key {key!r}.{did_you_mean(key, map(str, node))}".lstrip()
                )


def _is_valid(node: Any, shape: Any, location: str, bad: BadEntries) -> bool:
    """Return whether a node has the keys of ``shape``; count it if not."""
    try:
        _check_shape(node, shape, "")
    except BadEntry as error:
        bad.add(error, location)
        return False
    return True


def stands_at(context: str, text: str, start: int) -> bool:
    """Return whether ``context`` has ``text`` at character ``start``."""
    return start >= 0 and context.startswith(text, start) and start <= len(context)


def _load(path: Path) -> Any:
    """Return the JSON; refuse a key that an object has twice, since Python would silently take the last."""

    def as_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        tree = dict(pairs)
        if len(tree) != len(pairs):
            key = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise UsageError(f"the key {key!r} is there twice in one object")
        return tree

    remedy = "write one value; files with an object on each line are named .jsonl"
    return parse_json(read_text(path), str(path), error=UsageError, remedy=remedy, object_pairs_hook=as_dict)


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
