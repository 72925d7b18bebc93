"""Chooses what a command prints: one JSON document, nothing, or its text."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WITH_FILES = frozenset({"plan", "bench"})
"""Commands whose ``--json FILE`` writes a file; others have it as a flag."""
_JSON, _QUIET = "--json", "--quiet"


@contextmanager
def chosen_output(words: list[str], own: list[str]) -> Iterator[list[str]]:
    """Yield a command's words without ``--quiet``, with a file in place of the standard output.

    ``--quiet`` prints nothing but errors and a document that is asked for. ``--json`` without a file, or with
    ``-``, prints the document alone; the text goes to stderr.

    Args:
        words: of the command.
        own: those before ``--``, in which these options are looked for.
    """
    quiet = _QUIET in own
    end = len(own)
    if quiet:
        words = [word for word in words[:end] if word != _QUIET] + words[end:]
        end = len([word for word in own if word != _QUIET])
    index = _document_index(words[:end])
    if index is None:
        if quiet and _JSON not in own:
            _point_stdout_at(os.open(os.devnull, os.O_WRONLY))
        yield words
        return
    with tempfile.TemporaryDirectory(prefix="shoal-json-") as folder:
        document = Path(folder) / "document.json"
        words = [*words[:index], str(document), *words[index + (words[index : index + 1] == ["-"]) :]]
        sys.argv[1:] = words  # a command that starts workers gives them its words
        stdout = os.dup(1)
        _point_stdout_at(os.open(os.devnull, os.O_WRONLY) if quiet else os.dup(2))
        try:
            yield words
        finally:  # a worker of torchrun ends in SystemExit
            if document.is_file():
                with document.open("rb") as source, os.fdopen(stdout, "wb") as target:
                    shutil.copyfileobj(source, target)


def _document_index(own: list[str]) -> int | None:
    """Return the index of the file of ``--json`` if it is the standard output."""
    if not own or own[0] not in WITH_FILES or _JSON not in own:
        return None
    index = own.index(_JSON) + 1
    return index if index == len(own) or own[index].startswith("-") else None


def _point_stdout_at(descriptor: int) -> None:
    sys.stdout.flush()
    os.dup2(descriptor, 1)
    os.close(descriptor)
