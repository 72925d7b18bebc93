"""Takes the articles of MediaWiki's dumps: ``pages-articles.xml``, as Wikipedia publishes it.

An article is a page of namespace 0 that is no redirect: its title, then its text without markup. Templates,
comments, tables, references, formulas, files and categories are left out; of links their text stays. Headings
and items of lists are paragraphs of their own.
"""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

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


def page_text(page: str, hidden: frozenset[str], where: str) -> str:
    """Return the article of a page, paragraphs separated by empty lines; empty for what is no article.

    Args:
        page: the lines from ``<page>`` to before the next one; other lines hold no article.
        hidden: what :func:`hidden_namespaces` returned.
        where: name of the page's place, for messages.

    Raises:
        UsageError: the page is cut short or no XML; mwparserfromhell is missing.
    """
    if not page.lstrip().startswith("<page>"):
        return ""
    try:
        tree = ElementTree.fromstring(page[: page.rfind(_PAGE_END) + len(_PAGE_END)])
    except ElementTree.ParseError as error:
        raise UsageError(
            f"{where}: a page of the dump is damaged or was cut short ({error}); get the file again"
        ) from None
    if tree.findtext("ns", _MAIN) != _MAIN or tree.find("redirect") is not None:
        return ""
    revisions = tree.findall("revision")
    text = revisions[-1].findtext("text") if revisions else None
    if not text or revisions[-1].findtext("model", "wikitext") != "wikitext":
        return ""
    return tree.findtext("title", "") + _PARAGRAPH + plain_text(text, hidden)


def plain_text(wikitext: str, hidden: frozenset[str]) -> str:
    """Return ``wikitext`` without markup; links into the namespaces ``hidden`` are left out.

    Raises:
        UsageError: mwparserfromhell is missing.
    """
    parser = import_extra("mwparserfromhell", "corpora", "MediaWiki's dumps need mwparserfromhell")
    parts: list[str] = []
    # quotes of bold and italic are removed from the text: unbalanced ones cost the parser much time
    _collect(parser.parse(wikitext, skip_style_tags=True), hidden, parts)
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
