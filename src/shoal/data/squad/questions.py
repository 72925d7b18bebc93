"""Reads questions to answer: SQuAD's JSON, with or without answers, or a row of JSONL or Parquet for each."""

from __future__ import annotations

from pathlib import Path

from shoal.data.bad_entries import BadEntries
from shoal.data.squad.dataset import Question, SquadData, read_squad
from shoal.errors import UsageError


def read_questions(path: Path, bad: BadEntries | None = None) -> SquadData:
    """Read a file whose name ends in ``.json`` (SQuAD's form), ``.jsonl`` or ``.parquet``.

    A row is an object with ``question``, ``context`` and, if there is one, ``id``, else the number of the
    line or row is the question's id.

    Args:
        bad: counts invalid entries; default: they are left out.

    Raises:
        UsageError: the file cannot be read, has too many invalid entries, or no question.
    """
    if path.suffix.lower() not in (".json", ".jsonl", ".parquet"):
        raise UsageError(
            f"{path}: is known by the end of its name: .json (SQuAD's form), .jsonl (a question per line) or "
            ".parquet"
        )
    return read_squad(path, purpose="ask", bad=bad)


def one_question(path: Path, question: str, context: str) -> SquadData:
    """Return a question of the command line."""
    only = Question("1", question, 0, (), False)
    return SquadData(path=path, version="1.1", paragraphs=(context,), questions=(only,))
