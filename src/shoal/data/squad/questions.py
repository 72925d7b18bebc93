"""Reads questions to answer: SQuAD's JSON, with or without answers, or a line of JSONL for each question."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.atomic_io import read_text
from shoal.data.squad.dataset import Question, SquadData, read_squad
from shoal.errors import UsageError
from shoal.json_text import parse_json

_NEEDED = ("question", "context")


def read_questions(path: Path) -> SquadData:
    """Read a file whose name ends in ``.json`` (SQuAD's form) or ``.jsonl``.

    A line of JSONL is an object with ``question``, ``context`` and, if there is one, ``id``, else the number
    of the line is the question's id.

    Raises:
        UsageError: the file cannot be read, a line is damaged, an id is there twice, or there is no question.
    """
    if path.suffix == ".json":
        return read_squad(path, misplaced="ignore")
    if path.suffix != ".jsonl":
        raise UsageError(
            f"{path}: is known by the end of its name: .json (SQuAD's form) or .jsonl (a question per line)"
        )
    return questions_of(path, list(_entries(path)))


def questions_of(path: Path, asked: list[tuple[str, str, str]]) -> SquadData:
    """Return questions without answers from (id, question, paragraph) each.

    Raises:
        UsageError: there is none, or an id is there twice.
    """
    if not asked:
        raise UsageError(f"{path}: holds no question")
    paragraphs = list(dict.fromkeys(paragraph for *_, paragraph in asked))
    number = {paragraph: index for index, paragraph in enumerate(paragraphs)}
    seen: set[str] = set()
    for name, *_ in asked:
        if name in seen:
            raise UsageError(f"{path}: the id {name!r} is there twice; each question needs its own")
        seen.add(name)
    return SquadData(
        path=path,
        version="1.1",
        paragraphs=tuple(paragraphs),
        questions=tuple(
            Question(name, text, number[paragraph], (), False) for name, text, paragraph in asked
        ),
        misplaced=(),
        num_dropped=0,
    )


def _entries(path: Path) -> Iterator[tuple[str, str, str]]:
    for line_number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {line_number}"
        entry: Any = parse_json(line, where, error=UsageError)
        if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in _NEEDED):
            raise UsageError(f'{where}: must be a JSON object with the strings "question" and "context"')
        name = entry.get("id", line_number)
        if isinstance(name, bool) or not isinstance(name, str | int):
            raise UsageError(f"{where}: the id must be a string or a whole number")
        yield str(name), entry["question"], entry["context"]
