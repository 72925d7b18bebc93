"""The source ``builtin``: real English out of the Python installation itself.

Documents are modules, manual topics and readme files: their docstrings in order, code and tables left out
(``prose``). Nothing is imported; string literals are found by a regular expression that knows comments
and strings, 15 times faster than parsing whole modules (47 s for the 220 MB of one installation), and
each docstring is then evaluated by ``ast.literal_eval``.

The order of folders and files is sorted, so one installation always gives the same bytes.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path

from shoal.data.files import write_atomically
from shoal.data.progress import Progress
from shoal.data.prose import prose_paragraphs
from shoal.data.workers import advance, run_tasks
from shoal.errors import ShoalError

_SKIPPED_FOLDERS = frozenset(
    ("test", "tests", "testing", "idle_test", "site-packages", "dist-packages", "_vendor", "__pycache__")
)
_TEXT_SUFFIXES = (".rst", ".md", ".txt")
_SKIPPED_TEXTS = re.compile(
    r"licen[sc]e|copying|notice|authors|contributors|third|top_level|entry_points|requires|sources|record|vocab"
    r"|cmake|changelog|news|history",
    re.IGNORECASE,
)
_FILES_A_TASK = 200
_MIN_DOCUMENT = 300
"""Characters; a document must be long enough to have sentences that follow each other."""
_LETTERS = re.compile(r"[a-z]+")
_SEQUENCE = 6
_MAX_KNOWN = 0.3
"""Share of a paragraph's sequences of six words that may have been seen; 0.5 kept 4 % more, all variants."""

# one alternative each for comments, triple-quoted strings (the only ones of interest) and short strings
_LITERAL = re.compile(
    r"""\#[^\n]*+
    |(?P<doc>[rRuU]?(?:
        \"\"\"[^"\\]*+(?:(?:\\.|\"(?!\"\"))[^"\\]*+)*+\"\"\"
       |\'\'\'[^'\\]*+(?:(?:\\.|\'(?!\'\'))[^'\\]*+)*+\'\'\'))
    |\"(?:\\.|[^"\\\n])*+\"
    |\'(?:\\.|[^'\\\n])*+\'""",
    re.VERBOSE | re.DOTALL,
)


def source_files() -> list[Path]:
    """Return the files of this installation that documents are made of, in a fixed order.

    The standard library comes first (its manual topics before the modules), then the installed packages.
    """
    paths = sysconfig.get_paths()
    roots = [Path(paths["stdlib"])]
    installed = [Path(entry) for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    roots += sorted(set(installed) | {Path(paths["purelib"]), Path(paths["platlib"])})
    return [file for root in roots for file in _walk(root)]


def document(file: Path) -> list[str]:
    """Return the paragraphs of English prose in ``file``; none if it has none or cannot be read."""
    try:
        data = file.read_bytes()
    except OSError:
        return []
    text = data.decode("utf-8", "replace")
    if file.suffix == ".py":
        return [paragraph for doc in docstrings(text) for paragraph in prose_paragraphs(doc)]
    if file.name == "METADATA":
        text = text.partition("\n\n")[2]
    return prose_paragraphs(text)


def docstrings(source: str) -> Iterator[str]:
    """Yield the triple-quoted strings of a module that begin a line, without their indentation.

    These are its docstrings, and the texts that functions like ``add_docstring`` attach to native code.
    """
    for match in _LITERAL.finditer(source):
        if match["doc"] is None or source[source.rfind("\n", 0, match.start()) + 1 : match.start()].strip():
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "\d" in somebody's docstring
            try:
                yield inspect.cleandoc(ast.literal_eval(match["doc"]))
            except (SyntaxError, ValueError):
                continue


def _walk(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED_FOLDERS)
        for name in sorted(names):
            is_text = name == "METADATA" or (
                name.endswith(_TEXT_SUFFIXES) and not _SKIPPED_TEXTS.search(name)
            )
            if name.endswith(".py") or is_text:
                yield Path(folder, name)


def write_snapshot(path: Path, *, processes: int, progress: Progress) -> None:
    """Write the English of this installation to ``path``, one document a line; the file is whole or absent.

    A paragraph most of whose word sequences were there before is left out: documentation repeats itself.

    Raises:
        ShoalError: the disk is full, or there is next to no documentation.
    """
    files = source_files()
    tasks = [files[start : start + _FILES_A_TASK] for start in range(0, len(files), _FILES_A_TASK)]
    progress.start("Collecting the English of this Python", sum(map(_num_bytes, files)))
    found: dict[int, list[list[str]]] = {}
    seen: set[bytes] = set()
    lines: list[str] = []
    following = 0
    for index, documents in run_tasks(_documents, tasks, processes=processes, show=progress.show):
        found[index] = documents
        while following in found:  # in the order of the files, whatever the order of arrival
            for paragraphs in found.pop(following):
                line = " ".join(paragraph for paragraph in paragraphs if _is_new(paragraph, seen))
                if len(line) >= _MIN_DOCUMENT:
                    lines.append(line)
            following += 1
    if not lines:
        raise ShoalError(
            "this Python comes without documentation (python -OO? stripped?); give a source of text"
        )
    write_atomically(path, ("\n".join(lines) + "\n").encode())


def _documents(files: list[Path]) -> list[list[str]]:
    documents = []
    for file in files:
        documents.append(document(file))
        advance(_num_bytes(file))
    return documents


def _num_bytes(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _is_new(paragraph: str, seen: set[bytes]) -> bool:
    """Tell whether most of a paragraph's sequences of words are new, and if so remember them in ``seen``."""
    words = _LETTERS.findall(paragraph.lower())
    hashes = [
        blake2b(" ".join(words[i : i + _SEQUENCE]).encode(), digest_size=8).digest()
        for i in range(max(1, len(words) - _SEQUENCE + 1))
    ]
    if sum(value in seen for value in hashes) > _MAX_KNOWN * len(hashes):
        return False
    seen.update(hashes)
    return True
