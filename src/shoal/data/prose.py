"""English prose out of docstrings, reStructuredText and Markdown.

Documentation mixes sentences with code, tables, signatures and lists of names. :func:`prose_paragraphs`
cuts it into blocks, drops what is not prose, cleans the markup of the rest and keeps a paragraph only if
it reads like English: it begins like a sentence and ends like one, most of it is plain words, and enough
of these are the small words that no English sentence does without. The thresholds were set by reading
samples; a paragraph lost costs little, a table kept teaches the model nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from shoal.data.sentences import split_sentences


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_MIN_WORDS = 7
_MIN_PLAIN = 0.86
"""Share of a paragraph's words that are letters and ordinary punctuation."""
_MIN_SMALL = 0.24
"""Share of function words; English prose has 0.35 to 0.5, lists of names have less than 0.15."""
_MAX_SUSPECT = 0.012
"""Signs of code for each character of the paragraph."""

_FENCE = re.compile(r"```|~~~")
_DOCTEST = re.compile(r">>>|\.\.\.|\$ |In \[|Out\[|%\w")
_RULE = re.compile(r"\s*([=\-~^\"'`#*+.:_])\1{2,}\s*$")
_DIRECTIVE = re.compile(r"\.\. (?:(?P<name>[\w-]+)::|\S)|\.\.$")
# the rows of tables, rules, headings of Markdown
_LEFT_OUT = re.compile(r"[|+]|.*\S {3,}\S.* {3,}\S|.*\t.*\t|=+ +=+|([=\-~^\"'`#*+.:_])\1{2,}\s*$|\#{1,6} ")
_ORDINARY = re.compile(r"(?!In \[|Out\[)(?:\S+ {0,2})*+$")
_PROSE_DIRECTIVES = _words("note warning versionadded versionchanged deprecated tip important caution")
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
_SMALL = _words(
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
    """Return the paragraphs of ``text`` (a docstring without its indentation) that are English prose."""
    found: list[str] = []
    if text.count(" ") < _MIN_WORDS - 1:
        return found
    for block in _blocks(text):
        if block.count(" ") < _MIN_WORDS - 1 or block[0].islower():  # most of what is left out, cheaply
            continue
        paragraph = clean_markup(block)
        if paragraph.endswith(":"):  # it introduces code or a list, which is gone
            paragraph = " ".join(split_sentences(paragraph)[:-1])
        if is_prose(paragraph):
            found.append(paragraph)
    return found


def clean_markup(text: str) -> str:
    """Return one paragraph as running text: no roles, links, emphasis, URLs or line ends."""
    text = " ".join(text.split())
    if _MARKED.search(text):
        for pattern, replacement in _MARKUP:
            text = pattern.sub(replacement, text)
        text = " ".join(text.split())
    return text


def is_prose(paragraph: str) -> bool:
    """Decide whether a cleaned paragraph reads like English sentences."""
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
    """Cut text into raw paragraphs; the marker of a list item or an argument is left out."""
    blocks: list[list[str]] = [[]]
    last_indent, is_item = 0, False
    for line in _lines_outside_code(text):
        content = line.strip()
        if not content:
            blocks.append([])
            continue
        indent = len(line) - len(line.lstrip())
        is_plain = content[0].isalpha() and content[1:2] not in (".", ")")
        marker = None if is_plain else _ITEM.match(content)
        moved = not blocks[-1] or indent != last_indent
        if marker is None and (moved or is_item):
            marker = _ARGUMENT.match(content)
            if marker and marker.group().endswith(" : "):  # numpy's "name : type": the text begins below
                blocks.append([])
                continue
        hanging = is_item and len(blocks[-1]) == 1 and indent > last_indent
        if marker or (moved and not hanging):
            blocks.append([])
            is_item = marker is not None
        blocks[-1].append(content[marker.end() :] if marker else content)
        last_indent = indent
    return [" ".join(block) for block in blocks if block]


def _lines_outside_code(text: str) -> Iterator[str]:
    """Yield the lines of ``text``; an empty one stands for code, a doctest, a table, a title, a directive."""
    skipped_indent: int | None = None  # lines indented deeper than this belong to what is left out
    fenced = in_doctest = False
    for line, following in pairwise([*text.splitlines(), ""]):
        content = line.lstrip()
        indent = len(line) - len(content)
        if not content:
            in_doctest = False
            yield ""
            continue
        if _FENCE.match(content):
            fenced = not fenced
        elif not (fenced or in_doctest or (skipped_indent is not None and indent > skipped_indent)):
            skips = content.rstrip().endswith("::")
            left_out = False
            if not (content[0].isalpha() and _ORDINARY.match(content)):
                directive = _DIRECTIVE.match(content)
                if directive:
                    skips = directive["name"] not in _PROSE_DIRECTIVES
                in_doctest = _DOCTEST.match(content) is not None
                left_out = bool(directive or in_doctest or _LEFT_OUT.match(content))
            skipped_indent = indent if skips else None
            yield "" if left_out or _RULE.match(following) else line
            continue
        yield ""
