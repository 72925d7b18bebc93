"""Extracts English prose from this Python installation: the source ``builtin``.

Documents are modules (their docstrings in order) and topics of the manual, without code and tables
(:func:`prose_paragraphs`). No module is imported; string literals are found by a regular expression that
knows comments and strings, 15 times faster than parsing whole modules (47 s for the 220 MB of one
installation), and each docstring is then evaluated by ``ast.literal_eval``.

Folders and files are sorted, so an installation always gives the same bytes. Thresholds were set by reading
samples: a lost paragraph costs little, a table that is kept teaches the model nothing.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from hashlib import blake2b
from itertools import chain
from pathlib import Path
from pydoc_data.topics import topics

from shoal.atomic_io import write_atomically
from shoal.data.process_pool import advance, run_tasks
from shoal.data.progress import PreparationProgress
from shoal.data.text.sentences import split_sentences, word_set
from shoal.errors import ShoalError

_MIN_WORDS = 7
_MIN_PLAIN = 0.86
"""Least fraction of words of letters and ordinary punctuation."""
_MIN_SMALL = 0.24
"""Least fraction of function words; English prose has 0.35 to 0.5, lists of names have less than 0.15."""
_MAX_SUSPECT = 0.012
"""Most signs of code per character of the paragraph."""

_FENCED = re.compile(r"^\s*(```|~~~).*?^\s*\1", re.MULTILINE | re.DOTALL)
_UNDERLINE = re.compile(r"([=\-~^\"'`#*+.:_])\1{2,}$")
_ITEM = re.compile(
    r"""(?:[-*+•]|\(?(?:\d{1,2}|[a-z])[.)]|@\w+)\ +   # a bullet, a number, a tag
       |:\w[^:`]*:\ *                                 # :param name:""",
    re.VERBOSE,
)
# "name (type, *optional*, defaults to 3): text", "name: text", "name : type", "type -- text"
_ARGUMENT = re.compile(
    r"[`*\"]{0,2}[\w.*/\[\]-]{1,40}[`*\"]{0,2}(?:, [`*]{0,2}\w+[`*]{0,2})?"
    r"(?: ?\([^()]*(?:\([^()]*\))?[^()]*\))?(?: ?: | ?:$| -- | — | - )"
)
_MARKED = re.compile(r"[`<*_\[|]|://|\( *\)| [.,;:!?)]")
_MARKUP = (
    (re.compile(r"<https?://[^>]*>|\bhttps?://[^\s)>\]]+"), ""),
    (re.compile(r"!\[[^\]]*\]\([^)]*\)"), ""),
    (re.compile(r"\[([^\]]+)\]\([^)]*\)"), r"\1"),
    (re.compile(r":[\w:.+-]+:`([^`<]*?)\s*<[^`]*>`"), r"\1"),
    (re.compile(r":[\w:.+-]+:`[~!.]?(?:[\w.]*\.(?=\w))?([^`]*)`"), r"\1"),
    (re.compile(r"`([^`<]+?)\s*<[^`>]*>`_{0,2}"), r"\1"),
    (re.compile(r"\[`~?(?:\w+\.)*([^`]+)`\]"), r"\1"),
    (re.compile(r"`{1,2}([^`]+)`{1,2}_{0,2}"), r"\1"),
    (re.compile(r" ?\[[\d, ]+\]_?|\[#\w*\]_"), ""),
    (re.compile(r"(?<!\w)(\*{1,3}|_{1,2})(\w[^*\n]*?\w|\w)\1(?!\w)"), r"\2"),
    (re.compile(r"\|([\w ]+)\|_?"), r"\1"),
    (re.compile(r"</?\w+[^>]{0,80}>"), ""),
    (re.compile(r"\(\s*\)"), ""),
    (re.compile(r" +([.,;:!?)])(?!\w)"), r"\1"),
)
_PLAIN = re.compile(
    r"""[\"'(“‘]*(?:[A-Za-z]?[a-z]+(?:[-'’/][A-Za-z]?[a-z]+)*|[AI]|[A-Z]{2,6}s?|\d[\d.,]*%?)
        [)\"'”’]*[.,;:!?…]*[)\"'”’]*$|[–—-]+$""",
    re.VERBOSE,
)
_SMALL = word_set(
    "the of and a an to in is are was were be been being it its this that these those for with as on by at"
    " from or not no if when which who whose what where how will would can could may might must should"
    " shall do does did done has have had but then than so such also there their they them he she we you"
    " your our my i his her into over under between after before while until because since only any all"
    " some each every other more most same both about out up one two very just like even without"
)
_SENTENCE_START = re.compile(r"[\"'(“‘]*[A-Z]")
_SENTENCE_END = re.compile(r"[.!?][\"')”’]*$")
_SUSPECT = re.compile(r"[=<>{}\\^~@#$&|*`]|\w\(|_\w|\w_|\w\.\w+\.|[^\x00-\u024f\u2010-\u2027]")
_REFUSED = re.compile(
    r"\[(?:CLS|SEP|MASK|PAD|UNK)\]|copyright|licen[sc]e|warrant|all rights reserved|redistribut|©",
    re.IGNORECASE,
)


def prose_paragraphs(text: str) -> list[str]:
    """Return the paragraphs of English prose in a dedented docstring, reStructuredText or Markdown."""
    paragraphs: list[str] = []
    if text.count(" ") < _MIN_WORDS - 1:
        return paragraphs
    for block in _blocks(text):
        if block.count(" ") < _MIN_WORDS - 1 or block[0].islower():  # rejects most blocks cheaply
            continue
        paragraph = clean_markup(block)
        if paragraph.endswith(":"):  # it introduces code or a list, which was dropped
            paragraph = " ".join(split_sentences(paragraph)[:-1])
        if is_prose(paragraph):
            paragraphs.append(paragraph)
    return paragraphs


def clean_markup(text: str) -> str:
    """Return one paragraph as running text: no roles, links, emphasis, URLs or line ends."""
    text = " ".join(text.split())
    if _MARKED.search(text):
        for pattern, replacement in _MARKUP:
            text = pattern.sub(replacement, text)
        text = " ".join(text.split())
    return text


def is_prose(paragraph: str) -> bool:
    """Return whether a cleaned paragraph consists of English sentences."""
    words = paragraph.split()
    if len(words) < _MIN_WORDS or not (_SENTENCE_START.match(paragraph) and _SENTENCE_END.search(paragraph)):
        return False
    if _REFUSED.search(paragraph) or len(_SUSPECT.findall(paragraph)) > _MAX_SUSPECT * len(paragraph):
        return False
    if sum(map(bool, map(_PLAIN.match, words))) < _MIN_PLAIN * len(words):
        return False
    small = sum(word.strip("\"'().,;:!?") in _SMALL for word in paragraph.lower().split())
    return small >= _MIN_SMALL * len(words)


def _blocks(text: str) -> list[str]:
    """Split text into raw paragraphs without titles, fenced code, and markers of list items and arguments.

    Other code and tables stay: no paragraph of them is prose.
    """
    blocks: list[list[str]] = [[]]
    indent: int | None = None  # of the last line; the line after a marker may have any
    for line in _FENCED.sub("", text).splitlines():
        content = line.strip()
        if _UNDERLINE.match(content):
            blocks[-1].clear()
            continue
        marker = _ITEM.match(content) or _ARGUMENT.match(content)
        own_indent = len(line) - len(line.lstrip())
        if not content or marker or (indent is not None and own_indent != indent):
            blocks.append([])
        if marker:  # behind numpy's "name : type" the text begins below
            content = "" if marker.group().endswith(" : ") else content[marker.end() :]
        blocks[-1].append(content)
        indent = None if marker else own_indent
    return [" ".join(block).strip() for block in blocks if block]


_SKIPPED_FOLDERS = frozenset(
    ("test", "tests", "testing", "idle_test", "site-packages", "dist-packages", "_vendor", "__pycache__")
)
_FILES_PER_TASK = 200
_MIN_DOCUMENT = 300
"""Characters; a document must be long enough to have sentences that follow each other."""
_LETTERS = re.compile(r"[a-z]+")
_SEQUENCE = 6
_MAX_KNOWN = 0.3
"""Most of a paragraph's sequences of six words that occurred before; 0.5 kept 4 % more, all variants."""

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
    """Return the files of this installation to make documents of, in a fixed order.

    The standard library comes first, then the installed packages.
    """
    paths = sysconfig.get_paths()
    roots = [Path(paths["stdlib"])]
    installed = [Path(entry) for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    roots += sorted(set(installed) | {Path(paths["purelib"]), Path(paths["platlib"])})
    return [
        file
        for root in roots
        for file in sorted(root.rglob("*.py"))
        if _SKIPPED_FOLDERS.isdisjoint(file.relative_to(root).parts)
    ]


def documents(file: Path) -> list[list[str]]:
    """Return the documents in ``file``, each the list of its paragraphs of English prose.

    A file is one document, except for the manual topics of ``pydoc``, which are one each. An unreadable file
    has none.
    """
    if file.parts[-2:] == ("pydoc_data", "topics.py"):
        return [prose_paragraphs(topic) for topic in topics.values()]
    try:
        text = file.read_bytes().decode("utf-8", "replace")
    except OSError:
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "\d" in a docstring
        return [[paragraph for doc in docstrings(text) for paragraph in prose_paragraphs(doc)]]


def docstrings(source: str) -> Iterator[str]:
    """Yield the triple-quoted strings of a module that begin a line, dedented.

    These are its docstrings, and the texts of calls like ``add_docstring`` for native code.
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


def write_snapshot(path: Path, *, processes: int, progress: PreparationProgress) -> None:
    """Write the prose of this installation to ``path``, one document per line, atomically.

    A paragraph of which most word sequences occurred before is dropped: documentation repeats itself.

    Raises:
        ShoalError: the disk is full, or there is next to no documentation.
    """
    files = source_files()
    tasks = [files[start : start + _FILES_PER_TASK] for start in range(0, len(files), _FILES_PER_TASK)]
    progress.start("Collecting the English of this Python", sum(map(_num_bytes, files)))
    seen: set[bytes] = set()
    lines: list[str] = []
    for paragraphs in chain.from_iterable(
        run_tasks(_documents, tasks, processes=processes, show=progress.show)
    ):
        line = " ".join(paragraph for paragraph in paragraphs if _is_new(paragraph, seen))
        if len(line) >= _MIN_DOCUMENT:
            lines.append(line)
    if not lines:
        raise ShoalError(
            "this Python comes without documentation (python -OO? stripped?); give a source of text"
        )
    write_atomically(path, ("\n".join(lines) + "\n").encode())


def _documents(files: list[Path]) -> list[list[str]]:
    texts = []
    for file in files:
        texts += documents(file)
        advance(_num_bytes(file))
    return texts


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
