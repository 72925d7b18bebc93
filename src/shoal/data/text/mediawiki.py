"""Takes the articles of MediaWiki's dumps: ``pages-articles.xml``, as Wikipedia publishes it.

An article is a page of namespace 0 that is no redirect: its title, then its text without markup. Templates,
comments, tables, references, formulas, files and categories are left out; of links their text stays. Headings
and items of lists are paragraphs of their own.

The parser's time grows with the length of a page times its openings that nothing closes: 146 KiB of ``<ref``
would take hours. Of such a page the markup is removed by rules, in one pass each, and its name is printed.
Which pages these are depends on their text alone, so that each preparation gives the same articles.
"""

from __future__ import annotations

import html
import re
import sys
from collections import Counter
from typing import Any
from xml.etree import ElementTree

from shoal.data.bad_entries import NOT_PARSED, BadEntry
from shoal.data.text.sentences import word_set
from shoal.errors import UsageError, import_extra

PAGE = re.compile(rb"^\s*<page>\s*$")
"""A line that begins a page. In wikitext ``<`` is escaped, so no other line is like it."""

_DUMP = re.compile(rb"\A(?:\xef\xbb\xbf)?\s*(?:<\?xml[^>]*>\s*)?<mediawiki[\s>]")
_NAMESPACE = re.compile(rb'<namespace key="(-?\d+)"[^>]*>([^<]*)</namespace>')
_PAGE_END = "</page>"
_MAIN = "0"
_FILE, _CATEGORY = b"6", b"14"
_ALWAYS_HIDDEN = ("file", "image", "category")
"""English names of these namespaces, which every wiki knows beside its own."""
_HIDDEN_TAGS = word_set(
    "categorytree ce chem gallery graph hiero imagemap indicator inputbox mapframe maplink math pagelist ref"
    " references score section source style syntaxhighlight table templatedata templatestyles timeline"
)
_ITEMS = ("li", "dd", "dt")
_PARAGRAPH = "\n\n"
_LEFT_OVER = re.compile(r"'{2,5}|__[A-Z]+__")
"""Bold and italic, and words like ``__NOTOC__``."""
_MAX_COST = 5_000_000
"""Limit of openings times characters; the parser takes up to about 2 s for that many."""
_PAIRS = tuple(
    re.compile(f"({opening})|{closing}")
    for opening, closing in (
        (r"\{\{", r"\}\}"),
        (r"\{\|", r"\|\}"),
        (r"\[\[", r"\]\]"),
        (r"\[(?=(?:\w{1,16}:)?//|mailto:)", r"\]"),
        (r"<!--", r"-->"),
    )
)
_TAG = re.compile(r"<(/?)([A-Za-z][^\s<>/]{0,32})[^<>]*>?")
_NEVER_CLOSED = word_set("br wbr hr meta link img li dt dd th td tr")
_RULES: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(?m)^[ \t]*(?:\{\||\|\}|[|!]).*"), ""),  # lines of tables
    *[(re.compile(r"\{\{[^{}]*\}\}"), "")] * 4,  # templates in templates
    (re.compile(r"(?i)<ref\b[^<>]*>[^<]*</ref\s*>"), ""),
    (re.compile(r"(?i)<br\s*/?>"), "\n"),
    (re.compile(r"</?[A-Za-z!][^<>]*>?"), ""),
    (re.compile(r"\[(?:\w{1,16}:)?//[^\s\[\]]*\s?([^\[\]]*)\]?"), r"\1"),
    (re.compile(r"(?m)^=+([^=\n]*)=*"), rf"{_PARAGRAPH}\1{_PARAGRAPH}"),
    (re.compile(r"(?m)^[*#:;]+"), _PARAGRAPH),
    (re.compile(r"\{+\|?|\|?\}+|\[+|\]+"), ""),
    (_LEFT_OVER, ""),
)
_LINK = re.compile(r"\[\[([^\[\]|]*)(?:\|([^\[\]]*))?\]\]")
_num_simplified = 0


def is_dump(head: bytes) -> bool:
    """Return whether a file that begins with ``head`` is a dump."""
    return bool(_DUMP.match(head))


def hidden_namespaces(head: bytes) -> frozenset[str]:
    """Return the names, in lower case, of files and categories, from the beginning of a dump.

    Example:
        >>> sorted(hidden_namespaces(b'<namespace key="6" case="first-letter">Datei</namespace>'))
        ['category', 'datei', 'file', 'image']
    """
    own = (
        name.decode("utf-8", "replace") for key, name in _NAMESPACE.findall(head) if key in (_FILE, _CATEGORY)
    )
    return frozenset((*_ALWAYS_HIDDEN, *map(str.lower, own)))


def page_text(page: str, hidden: frozenset[str], location: str) -> str:
    """Return the article of a page, its paragraphs separated by empty lines; empty for other pages.

    Args:
        page: the lines from ``<page>`` to before the next one; other lines hold no article.
        hidden: what :func:`hidden_namespaces` returned.
        location: of the page, for messages.

    Raises:
        BadEntry: the parser of wikitext gives up.
        UsageError: the page is cut short or no XML; mwparserfromhell is missing.
    """
    if not page.lstrip().startswith("<page>"):
        return ""
    try:
        tree = ElementTree.fromstring(page[: page.rfind(_PAGE_END) + len(_PAGE_END)])
    except ElementTree.ParseError as error:
        raise UsageError(
            f"{location}: a page of the dump is damaged or was cut short ({error}); get the file again"
        ) from None
    if tree.findtext("ns", _MAIN) != _MAIN or tree.find("redirect") is not None:
        return ""
    revisions = tree.findall("revision")
    text = revisions[-1].findtext("text") if revisions else None
    if not text or revisions[-1].findtext("model", "wikitext") != "wikitext":
        return ""
    title = tree.findtext("title", "")
    if not _costs_too_much(text):
        return title + _PARAGRAPH + plain_text(text, hidden)
    _tell_simplified(title, location)
    return title + _PARAGRAPH + _text_by_rules(text, hidden)


def _costs_too_much(wikitext: str) -> bool:
    """Return whether so many openings are not closed that the parser would take seconds or hours."""
    length = len(wikitext)
    if length * length // 2 <= _MAX_COST:
        return False
    num_open = 0
    for pair in _PAIRS:
        pending = 0
        for match in pair.finditer(wikitext):
            pending = pending + 1 if match[1] else max(pending - 1, 0)
        num_open += pending
    tags = Counter[str]()
    for tag in _TAG.finditer(wikitext):
        name = tag[2].lower()
        if not tag[0].endswith(">"):
            num_open += 1
        elif tag[1]:
            tags[name] = max(tags[name] - 1, 0)
        elif not tag[0].endswith("/>") and name not in _NEVER_CLOSED:
            tags[name] += 1
    return (num_open + tags.total()) * length > _MAX_COST


def _tell_simplified(title: str, location: str) -> None:
    global _num_simplified
    _num_simplified += 1
    print(
        f"{location}: the page {title!r:.100} has so much markup without an end that it is not parsed: its "
        f"markup is removed by rules (page {_num_simplified} of this process)",
        file=sys.stderr, flush=True,
    )  # fmt: skip


def _text_by_rules(wikitext: str, hidden: frozenset[str]) -> str:
    """Return wikitext without markup, in time that grows with its length."""

    def shown(link: re.Match[str]) -> str:
        namespace, colon, _ = link[1].partition(":")
        return "" if colon and namespace.strip().lower() in hidden else link[2] or link[1]

    kept, at = [], 0
    while (begin := wikitext.find("<!--", at)) >= 0 and (end := wikitext.find("-->", begin)) >= 0:
        kept.append(wikitext[at:begin])
        at = end + len("-->")
    text = "".join(kept) + wikitext[at:]
    for _ in range(3):  # links in captions
        text = _LINK.sub(shown, text)
    for rule, replacement in _RULES:
        text = rule.sub(replacement, text)
    return html.unescape(text)


def plain_text(wikitext: str, hidden: frozenset[str]) -> str:
    """Return ``wikitext`` without markup; links into the namespaces ``hidden`` are left out.

    Raises:
        BadEntry: mwparserfromhell gives up.
        UsageError: it is missing.
    """
    parser = import_extra("mwparserfromhell", "corpora", "MediaWiki's dumps need mwparserfromhell")
    parts: list[str] = []
    try:
        # quotes of bold and italic are removed from the text: unbalanced ones cost the parser much time
        code = parser.parse(wikitext, skip_style_tags=True)
    except parser.parser.ParserError as error:  # of single pages in real dumps
        raise BadEntry(NOT_PARSED, f"{error!s:.60}") from None
    _collect(code, hidden, parts)
    return "".join(parts)


def _collect(code: Any, hidden: frozenset[str], parts: list[str]) -> None:
    """Append the visible text of parsed wikitext to ``parts``."""
    for node in code.nodes if code is not None else ():
        kind = type(node).__name__
        if kind == "Text":
            text = node.value
            parts.append(_LEFT_OVER.sub("", text) if "''" in text or "__" in text else text)
        elif kind == "HTMLEntity":
            parts.append(node.normalize())
        elif kind == "Wikilink":
            namespace, colon, _ = str(node.title).partition(":")
            if not (colon and namespace.strip().lower() in hidden):
                _collect(node.text if node.text is not None else node.title, hidden, parts)
        elif kind == "ExternalLink":
            _collect(node.title, hidden, parts)
        elif kind == "Heading":
            parts.append(_PARAGRAPH)
            _collect(node.title, hidden, parts)
            parts.append(_PARAGRAPH)
        elif kind == "Tag":
            _collect_tag(node, hidden, parts)


def _collect_tag(node: Any, hidden: frozenset[str], parts: list[str]) -> None:
    name = str(node.tag).strip().lower()
    if name in _ITEMS:
        parts.append(_PARAGRAPH)
    elif name == "br":
        parts.append("\n")
    if name not in _HIDDEN_TAGS:
        _collect(node.contents, hidden, parts)
