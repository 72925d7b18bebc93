"""Pages of MediaWiki's dumps to articles: which pages, and what remains of their markup."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import pytest

from shoal.data.bad_entries import NOT_PARSED, BadEntries
from shoal.data.text import mediawiki
from shoal.data.text.corpus import cut_chunks, find_files, read_articles
from shoal.data.text.mediawiki import hidden_namespaces, is_dump, page_text, plain_text
from shoal.errors import UsageError

HEAD = """<mediawiki xmlns="http://www.mediawiki.org/xml/export-0.11/" version="0.11" xml:lang="de">
  <siteinfo>
    <sitename>Wikipedia</sitename>
    <namespaces>
      <namespace key="0" case="first-letter" />
      <namespace key="6" case="first-letter">Datei</namespace>
      <namespace key="14" case="first-letter">Kategorie</namespace>
    </namespaces>
  </siteinfo>
"""
HIDDEN = hidden_namespaces(HEAD.encode())


def page(title: str, text: str, ns: int = 0, extra: str = "") -> str:
    return f"""  <page>
    <title>{escape(title)}</title>
    <ns>{ns}</ns>
    <id>7</id>{extra}
    <revision>
      <id>8</id>
      <model>wikitext</model>
      <format>text/x-wiki</format>
      <text bytes="{len(text)}" xml:space="preserve">{escape(text)}</text>
    </revision>
  </page>
"""


def dump(*pages: str) -> str:
    return HEAD + "".join(pages) + "</mediawiki>\n"


def test_a_page_that_the_parser_refuses_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mwparserfromhell

    parse = mwparserfromhell.parse

    def with_bug(text: str, **options: bool) -> Any:
        if "TRIGGER" in text:
            raise mwparserfromhell.parser.ParserError("a bug")
        return parse(text, **options)

    monkeypatch.setattr(mwparserfromhell, "parse", with_bug)
    path = tmp_path / "a.xml"
    path.write_text(dump(page("One", "First."), page("Two", "TRIGGER."), page("Three", "Last.")))
    (chunk,) = cut_chunks(find_files([str(path)], "auto"), 1 << 30)
    bad = BadEntries(path)
    assert list(read_articles(chunk, "strict", bad)) == ["One\nFirst.", "Three\nLast."]
    assert bad.counts == {NOT_PARSED: 1}
    with pytest.raises(UsageError, match=r"a page that the parser of wikitext refuses: .*a bug"):
        list(read_articles(chunk, "strict", BadEntries(path, "refuse")))


@pytest.mark.parametrize(
    ("wikitext", "text"),
    [
        ("'''Bold''' and ''it''' 's", "Bold and it 's"),
        ("''&#39;x&#39;'' '' y", "'x'  y"),
        ("a [[political philosophy|philosophy]] of [[Plato]]", "a philosophy of Plato"),
        ("a<ref name=x>See {{cite|b}}</ref> b<ref name=x/>", "a b"),
        ("{{Infobox|a={{b|c}}}}After", "After"),
        (
            "[[File:A.jpg|thumb|A [[caption]]]]one[[datei:b.png]] [[Kategorie:Foo|bar]][[ Image : c]]two",
            "one two",
        ),
        ("[[:Kategorie:Foo]] stays", ":Kategorie:Foo stays"),
        (
            "== History ==\nText.\n=== ''Early'' days ===\nMore.",
            "\n\n History \n\n\nText.\n\n\n Early days \n\n\nMore.",
        ),
        ("Items:\n* one\n* two\n: three", "Items:\n\n\n one\n\n\n two\n\n\n three"),
        ('{| class="w"\n! head\n|-\n| cell\n|}\nAfter', "\nAfter"),
        ("[http://x.y label] and [http://x.y] and http://x.y", "label and  and "),
        ("a &amp; b&nbsp;&mdash; <!-- c -->d", "a & b\xa0— d"),
        ("H<sub>2</sub>O and <math>x^2</math> <nowiki>[[raw]]</nowiki> __NOTOC__", "H2O and  [[raw]] "),
        ("one<br />two<gallery>\nFile:x.jpg|y\n</gallery>", "one\ntwo"),
        ("{{unclosed [[link and {| table", "{{unclosed [[link and {| table"),
    ],
)
def test_markup_is_removed(wikitext: str, text: str) -> None:
    assert plain_text(wikitext, HIDDEN) == text


def test_only_articles_of_the_main_namespace_without_redirects(tmp_path: Path) -> None:
    path = tmp_path / "dewiki-latest-pages-articles.xml"
    path.write_text(
        dump(
            page("One", "First.\n\nSecond &amp; [[third]].\n== Part ==\n* item"),
            page("Two", "#REDIRECT [[One]]", extra='\n    <redirect title="One" />'),
            page("Talk:One", "Hello.", ns=1),
            page("Three & four", "A line <br> of\ntext. <page>\n  <page>\n"),
            page("Empty", ""),
            page("Five", "Last &#xD800;."),
        ),
        encoding="utf-8",
    )
    files = find_files([str(path)], "auto")
    assert [file.format for file in files] == ["mediawiki"]
    assert find_files([str(tmp_path)], "auto") == files
    expected = [
        "One\nFirst.\nSecond & third.\nPart\nitem",
        "Three & four\nA line of text. <page> <page>",
        "Five\nLast \ufffd.",
    ]
    for chunk_bytes in (1 << 20, *range(1, 2 * path.stat().st_size, 37)):
        chunks = cut_chunks(files, chunk_bytes)
        assert [text for chunk in chunks for text in read_articles(chunk, "strict")] == expected


@pytest.mark.timeout(60)
def test_a_page_that_would_take_hours_loses_its_markup_by_rules(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The parser goes back at each opening that nothing closes; the dump goes on."""
    costly = ["<ref", "[http://a", "<b>", "{|\n|-\n|a||<b>", "{{a|", '<b a="', "<!--", "[[a|", "  \n= ="]
    good = "See [[x|the x]]{{t}}.<ref name=a/>" * 300 + "\n== Part ==\n* item"
    pages = [page(f"Bad {n}", f"Begin [[y]]. {text * 10_000}") for n, text in enumerate(costly)]
    path = tmp_path / "a.xml"
    path.write_text(dump(page("Good", good), *pages, page("Last", "End.")))
    chunk = cut_chunks(find_files([str(path)], "auto"), 1 << 30)[0]
    first, *others, last = read_articles(chunk, "strict")
    assert first == "Good\n" + "See the x." * 300 + "\nPart\nitem"
    assert last == "Last\nEnd."
    assert all(text.startswith(f"Bad {n}\nBegin y.") for n, text in enumerate(others))
    assert len(others) == len(costly)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == len(costly) - 1, "headings are no trouble"
    assert f"{path}: the page 'Bad 0' has so much markup without an end" in said[0]
    assert said[-1].endswith("(page 8 of this process)")


@pytest.mark.parametrize(
    ("wikitext", "text"),
    [
        ("'''Bold''' a [[b|c]] [[File:a.jpg|x [[y]]]][[d]]", "Bold a c d"),
        ("a{{b|{{c}}}} d<!-- e -->f<ref name=g>h</ref>i", "a df" + "i"),
        ("== Part ==\n* item &amp; [http://x.y label]<br>z", "\n\n Part \n\n\n\n\n item & label\nz"),
        ('{| class="w"\n! head\n|-\n| cell\n|}\nAfter', "\n\n\n\n\nAfter"),
    ],
)
def test_rules_remove_markup_too(wikitext: str, text: str) -> None:
    assert mediawiki._text_by_rules(wikitext, HIDDEN) == text


def test_a_dump_is_known_by_its_beginning() -> None:
    assert is_dump(HEAD.encode()) and is_dump(b"\xef\xbb\xbf<?xml version='1.0'?>\n<mediawiki>")
    assert not is_dump(b"<mediawikis>") and not is_dump(b"See <mediawiki>")
    assert page_text(HEAD, HIDDEN, "dump") == ""


def test_a_page_that_was_cut_short_is_named(tmp_path: Path) -> None:
    text = dump(page("One", "First."), page("Two", "Second. " * 9))
    path = tmp_path / "a.xml"
    path.write_text(text[:-60])
    line = text[: text.index("Two")].count("\n")
    with pytest.raises(UsageError, match=rf"line {line} of .*a\.xml: a page of the dump is damaged"):
        list(read_articles(cut_chunks(find_files([str(path)], "auto"), 1 << 20)[0], "strict"))
