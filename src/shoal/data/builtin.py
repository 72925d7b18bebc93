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

# what comes before a triple-quoted string: other code, comments, short strings
_BEFORE = re.compile(
    r"""(?:[^"'\#]++|\#[^\n]*+|\"(?!\"\")(?:\\.|[^"\\\n])*+\"|\'(?!\'\')(?:\\.|[^'\\\n])*+\')*+""", re.DOTALL
)
_TRIPLE_QUOTED = re.compile(
    r"""\"\"\"[^"\\]*+(?:(?:\\.|\"(?!\"\"))[^"\\]*+)*+\"\"\"|\'\'\'[^'\\]*+(?:(?:\\.|\'(?!\'\'))[^'\\]*+)*+\'\'\'""",
    re.DOTALL,
)
_LINE_START = re.compile(r"\n[ \t]*(?P<prefix>[rRuU]?)\Z")


def source_files() -> list[Path]:
    """Return the files of this installation that documents are made of, in a fixed order.

    The standard library comes first (its manual topics before the modules), then the installed packages.
    """
    paths = sysconfig.get_paths()
    roots = [Path(paths["stdlib"])]
    installed = [Path(entry) for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    roots += sorted(set(installed) | {Path(paths["purelib"]), Path(paths["platlib"])})
    return [file for root in roots for file in _walk(root)]


def documents(file: Path) -> list[list[str]]:
    """Return the documents in ``file``, each the list of its paragraphs of English prose.

    A file is one document, but for the manual topics of ``pydoc``, which are one each. A file that cannot be
    read has none.
    """
    try:
        text = file.read_bytes().decode("utf-8", "replace")
    except OSError:
        return []
    if file.suffix != ".py":
        return [prose_paragraphs(text.partition("\n\n")[2] if file.name == "METADATA" else text)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "\d" in somebody's docstring
        if file.parts[-2:] == ("pydoc_data", "topics.py"):
            return [prose_paragraphs(topic) for topic in _topics(text)]
        return [[paragraph for doc in docstrings(text) for paragraph in prose_paragraphs(doc)]]


def docstrings(source: str) -> Iterator[str]:
    """Yield the triple-quoted strings of a module that begin a line, without their indentation.

    These are its docstrings, and the texts that functions like ``add_docstring`` attach to native code.
    """
    source = "\n" + source
    end = 0
    while literal := _TRIPLE_QUOTED.match(source, start := _BEFORE.match(source, end).end()):  # type: ignore[union-attr]
        end = literal.end()
        line_start = _LINE_START.search(source, source.rfind("\n", 0, start), start)
        if line_start is None:
            continue
        try:
            yield inspect.cleandoc(ast.literal_eval(line_start["prefix"] + literal.group()))
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
    for index, result in run_tasks(_documents, tasks, processes=processes, show=progress.show):
        found[index] = result
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


def _topics(source: str) -> list[str]:
    """Return the texts of ``topics = {name: text, ...}``."""
    dictionaries = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Dict))
    return [
        value.value
        for node in dictionaries
        for value in node.values
        if isinstance(value, ast.Constant) and isinstance(value.value, str)
    ]


def _documents(files: list[Path]) -> list[list[str]]:
    found = []
    for file in files:
        found += documents(file)
        advance(_num_bytes(file))
    return found


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
