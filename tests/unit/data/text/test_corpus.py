"""Sources to files to pieces to articles, on real files."""

from __future__ import annotations

import bz2
import gzip
import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import zstandard
from pyarrow import parquet

from shoal.data.bad_entries import NO_TEXT, NOT_UTF8, BadEntries
from shoal.data.text import corpus, prepare
from shoal.data.text.corpus import cut_chunks, find_files, read_articles
from shoal.env.settings import test_data_dir as data_dir
from shoal.errors import UsageError

WIKITEXT = """ \n = First = \n \n One two . \n \n = = Part = = \n \n A 1 @.@ 5 @-@ metre 10 @,@ 000 <unk> . \n
 = Second of All = \n \n Three . \n = = = Deep = = = \n Four . \n = Third = \n Five . \n"""


def write(path: Path, data: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def articles_of(pieces: list[corpus.Chunk], errors: corpus.Errors = "strict") -> list[str]:
    return [article for piece in pieces for article in read_articles(piece, errors)]


def test_lines_are_articles_and_empty_ones_are_none(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "\ufeffOne  two.\r\n\n \t\nThree.\u00a0Four.\nlast without end")
    files = find_files([str(path)], "auto")
    assert [file.format for file in files] == ["lines"]
    assert articles_of(cut_chunks(files, 1 << 20)) == ["One two.", "Three. Four.", "last without end"]


@pytest.mark.parametrize("name", ["rows.csv", "rows.TSV", "rows.csv.gz"])
def test_a_table_is_not_taken_for_lines(tmp_path: Path, name: str) -> None:
    text = b'id,text\n1,"One, two."\n'
    path = write(tmp_path / name, gzip.compress(text) if name.endswith(".gz") else text)
    with pytest.raises(UsageError, match=r"rows\.\S+: of a table in \.[ct]sv .* by --format lines$"):
        find_files([str(path)], "auto")
    assert [file.format for file in find_files([str(path)], "lines")] == ["lines"]


@pytest.mark.parametrize("name", ["wiki_00", "a.txt"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_rows_of_json_are_known_by_their_content(tmp_path: Path, name: str, mark: str) -> None:
    """WikiExtractor's ``--json`` names its files ``AA/wiki_00``."""
    rows = [{"id": "1", "text": "One. Two."}, {"id": "2", "text": "Three."}]
    for text in (mark + "".join(json.dumps(row) + "\n" for row in rows), mark + json.dumps(rows, indent=1)):
        (tmp_path / name).write_text(text, encoding="utf-8")
        (file,) = find_files([str(tmp_path / name)], "auto")
        assert file.format == "jsonl" and file.is_array == ("\n " in text)


@pytest.mark.parametrize(
    "text",
    [
        "<!DOCTYPE html>\n<p>One.</p>",
        '\n<html lang="en"><p>One.</p>',
        '<?xml version="1.0"?>\n<TEI>One.</TEI>',
        '<doc id="12" url="https://en.wikipedia.org/wiki?curid=12" title="One">\nOne\n\nTwo.\n</doc>',
        "<DOC>\n<DOCNO>1</DOCNO>\nOne.\n</DOC>",
        "<feed>\n<doc><abstract>One.</abstract></doc>\n</feed>",
    ],
)
def test_tags_do_not_become_text(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(
        UsageError, match=r"a\.txt: begins with <.*>, and its tags would become .*--format lines"
    ):
        find_files([str(path)], "auto")
    assert find_files([str(path)], "lines")[0].format == "lines"
    path.write_text("<unk> One <s> two.\nThree.\n")  # as in texts of language models
    assert find_files([str(path)], "auto")[0].format == "lines"


def test_directory_is_sorted_and_each_file_an_article(tmp_path: Path) -> None:
    write(tmp_path / "b" / "2.txt", "Second.\n\nIts  other\nparagraph.\n")
    write(tmp_path / "a" / "9.txt", "First.")
    write(tmp_path / "a" / "empty.txt", "")
    write(tmp_path / "a" / "x.bin", b"\xff\xff")
    write(tmp_path / ".hidden.txt", "no")
    expected = ["First.", "Second.\nIts other paragraph."]
    assert articles_of(cut_chunks(find_files([str(tmp_path)], "auto"), 1 << 20)) == expected
    assert articles_of(cut_chunks(find_files([str(tmp_path / "*" / "*.txt")], "auto"), 1 << 20)) == expected
    lines = articles_of(cut_chunks(find_files([str(tmp_path)], "lines"), 1 << 20))
    assert lines == ["First.", "Second.", "Its other", "paragraph."]


def test_wikitext_is_found_and_cleaned(tmp_path: Path) -> None:
    path = write(tmp_path / "wiki.txt", WIKITEXT)
    files = find_files([str(path)], "auto")
    assert files[0].format == "wikitext"
    assert articles_of(cut_chunks(files, 1 << 20)) == [
        "First\nOne two .\nPart\nA 1.5-metre 10,000 <unk> .",
        "Second of All\nThree .\nDeep\nFour .",
        "Third\nFive .",
    ]


@pytest.mark.parametrize("text", [WIKITEXT, "One.\n\nTwo two two.\nThree\n" * 3])
def test_pieces_of_any_size_give_the_same_articles(tmp_path: Path, text: str) -> None:
    files = find_files([str(write(tmp_path / "a.txt", text)), str(write(tmp_path / "b.txt", text))], "auto")
    expected = articles_of(cut_chunks(files, 1 << 20))
    assert len(expected) in (6, 18)
    for chunk_bytes in range(1, 2 * len(text) + 2):
        assert articles_of(cut_chunks(files, chunk_bytes)) == expected, chunk_bytes


def test_a_source_is_more_than_a_sample_by_two_of_its_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [f"{{{{Infobox|a}}}} {'word ' * 20}{number:04}." for number in range(400)]
    pages = "".join(f"<page>\n<revision>\n<text>{line}</text>\n</revision>\n</page>\n" for line in lines)
    for name, text in (("a.txt", "\n".join(lines)), ("a.xml", f"<mediawiki>\n{pages}</mediawiki>\n")):
        pieces = cut_chunks(find_files([str(write(tmp_path / name, text))], "auto"), 2_000)
        characters = len("".join(articles_of(pieces)))
        read: list[corpus.Chunk] = []

        def noted(
            chunk: corpus.Chunk, errors: corpus.Errors, read: list[corpus.Chunk] = read
        ) -> Iterator[str]:
            read.append(chunk)
            return read_articles(chunk, errors)

        monkeypatch.setattr(prepare, "read_articles", noted)
        for part, is_more in ((0.5, True), (1.5, False)):
            monkeypatch.setattr(prepare, "_SAMPLE_CHARACTERS", int(part * characters))
            assert prepare.is_more_than_sample(pieces, "strict") == is_more
        assert all(chunk in (pieces[0], pieces[len(pieces) // 2]) for chunk in read)
        assert read or name == "a.txt"


def test_small_files_share_a_piece_and_large_ones_are_cut(tmp_path: Path) -> None:
    for number in range(10):
        write(tmp_path / f"{number}.txt", "x" * 100)
    assert [len(piece) for piece in cut_chunks(find_files([str(tmp_path)], "files"), 250)] == [2] * 5
    large = find_files([str(write(tmp_path / "large.txt", "y" * 1000))], "lines")
    assert [(s.start, s.end) for piece in cut_chunks(large, 400) for s in piece] == [
        (0, 400),
        (400, 800),
        (800, 1000),
    ]


def test_names_in_capitals(tmp_path: Path) -> None:
    write(tmp_path / "A.TXT", "One.")
    write(tmp_path / "B.JSONL", '{"text": "Two."}\n')
    (tmp_path / "C.JSONL.GZ").write_bytes(gzip.compress(b'[{"text": "Three."}]'))
    parquet.write_table(pa.table({"text": ["Four."]}), tmp_path / "D.PARQUET")
    write(tmp_path / "E.CSV", "text\nFive.\n")
    found = [
        (file.path.name, file.format, file.packing, file.is_array)
        for file in find_files([str(tmp_path)], "auto")
    ]
    assert found == [
        ("A.TXT", "files", "", False),
        ("B.JSONL", "jsonl", "", False),
        ("C.JSONL.GZ", "jsonl", ".gz", True),
        ("D.PARQUET", "parquet", "", False),
    ]


JSON_LINES = "".join(
    json.dumps({"id": number, "body": f"Row {number}.\n\nIts other\nparagraph."}) + "\n" + "\n" * (number % 3)
    for number in range(9)
)


def test_json_lines_in_pieces_of_any_size(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", "\ufeff" + JSON_LINES.rstrip("\n"))
    (file,) = find_files([f"{path}:body"], "auto")
    assert (file.format, file.field) == ("jsonl", "body")
    expected = [f"Row {number}.\nIts other paragraph." for number in range(9)]
    for chunk_bytes in range(1, 2 * len(JSON_LINES), 7):
        assert articles_of(cut_chunks([file], chunk_bytes)) == expected, chunk_bytes


@pytest.mark.parametrize(
    ("name", "good"),
    [("a.txt", "Good {}."), ("a.jsonl", '{{"text": "Good {}."}}'), ("a.raw", " = Good {} = \n")],
    ids=["lines", "jsonl", "wikitext"],
)
def test_articles_that_are_not_utf8_are_counted(tmp_path: Path, name: str, good: str) -> None:
    articles = [(good.format(number) + "\n").encode() for number in range(9)]
    wrong = [each.replace(b"Good", b"B\xe9") for each in articles[:5]]
    expected = articles_of(
        cut_chunks(find_files([str(write(tmp_path / "good" / name, b"".join(articles)))], "auto"), 99)
    )
    path = write(tmp_path / name, b"".join([*articles[:4], *wrong, *articles[4:]]))
    for chunk_bytes in (20, 1 << 20):
        bad = BadEntries("x")
        chunks = cut_chunks(find_files([str(path)], "auto"), chunk_bytes)
        assert [each for chunk in chunks for each in read_articles(chunk, "strict", bad)] == expected
        assert bad.counts == {NOT_UTF8: 5}
        assert len(articles_of(chunks, "replace")) == len(expected) + 5


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32"])
def test_wide_text_is_refused_with_its_remedy(tmp_path: Path, encoding: str) -> None:
    path = write(tmp_path / "a.txt.gz", gzip.compress("One sentence.\nAnother.\n".encode(encoding)))
    with pytest.raises(UsageError, match=f"is {encoding.upper().replace('6-BE', '6BE')}; convert it: iconv"):
        find_files([str(path)], "auto")


def test_json_of_broken_surrogates_becomes_utf8(tmp_path: Path) -> None:
    path = write(tmp_path / "a.json", r'{"text": "Half \ud83d of \ud83d\ude00."}')
    assert articles_of(cut_chunks(find_files([str(path)], "auto"), 1 << 20)) == ["Half \ufffd of 😀."]


def test_wrong_rows_are_counted_and_a_wrong_field_is_refused(tmp_path: Path) -> None:
    wrong = '{"bdy": "x"}\n{"body": null}\n{"body": 3}\n[1]\n{"bo\n{"body": "Last."}\n'
    path = write(tmp_path / "a.jsonl", JSON_LINES + wrong)
    line = JSON_LINES.count("\n") + 1
    expected = articles_of(
        cut_chunks(find_files([f"{write(tmp_path / 'b.jsonl', JSON_LINES)}:body"], "auto"), 99)
    )
    for chunk_bytes in (20, 200, 1 << 20):
        bad = BadEntries("a.jsonl")
        chunks = cut_chunks(find_files([f"{path}:body"], "auto"), chunk_bytes)
        found = [article for chunk in chunks for article in read_articles(chunk, "strict", bad)]
        assert found == [*expected, "Last."]
        assert list(bad.counts.values()) == [3, 1, 1] and bad.counts[NO_TEXT] == 1
        assert f"(line {line} of {path}: there is no text" in bad.lines()[0]
    with pytest.raises(UsageError, match=r"line 1 of .*/a\.jsonl:"):
        articles_of(cut_chunks(find_files([f"{path}:text"], "auto"), 200))


def old_tar() -> bytes:
    """Return the header of a text of four bytes in a tar from before POSIX, and the text."""
    header = tarfile.TarInfo("a.txt")
    header.size = 4
    unmarked = bytearray(header.tobuf(tarfile.USTAR_FORMAT))
    unmarked[257:] = bytes(len(unmarked) - 257)
    unmarked[148:156] = b" " * 8  # as the checksum counts itself
    unmarked[148:156] = b"%06o\0 " % sum(unmarked)
    return bytes(unmarked) + b"text".ljust(512, b"\0")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"PK\x03\x04 and more", "its content is a zip and no text; unpack it"),
        ("a.txt", b"a.txt".ljust(257, b"\0") + b"ustar  \0", "its content is a tar"),
        ("a.txt", old_tar(), "its content is a tar"),
        ("a.txt", b"070701" + b"0" * 104 + b"a.txt\0", "its content is a cpio archive"),
        ("a.tar.gz", gzip.compress(b"a.txt".ljust(257, b"\0") + b"ustar  \0"), "compressed as .gz, is a tar"),
        ("a.txt", gzip.compress(b"text"), "is compressed by gzip and no text; .*by its kind .*gz"),
        ("a.txt", b"\xfd7zXZ\x00...", "is compressed by xz"),
        ("a.pdf", b"%PDF-1.7 ...", "is a PDF"),
        ("a.txt", b"One.\rTwo.\rThree.", "its lines end in CR alone"),
    ],
    ids=["zip", "tar", "old tar", "cpio", "tar.gz", "gzip", "xz", "PDF", "CR"],
)
def test_archives_and_odd_line_ends_are_no_text(
    tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UsageError, match=words):
        find_files([str(tmp_path / name)], "auto")


def test_parquet_counts_nulls(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"text": ["One.", None, "Two.", None]}), tmp_path / "a.parquet")
    bad = BadEntries("a.parquet")
    (chunk,) = cut_chunks(find_files([str(tmp_path)], "auto"), 1 << 20)
    assert list(read_articles(chunk, "strict", bad)) == ["One.", "Two."]
    assert bad.counts == {NO_TEXT: 2} and "(row 2 from byte 0 of " in bad.lines()[0]


def test_parquet_is_cut_and_empty_rows_are_no_articles(tmp_path: Path) -> None:
    texts = [f"Row {number}." for number in range(50)] + [None, ""]
    parquet.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", row_group_size=20)
    files = find_files([str(tmp_path)], "auto")
    assert [file.format for file in files] == ["parquet"]
    for chunk_bytes in (1, 30, 100, 1 << 20):
        chunks = cut_chunks(files, chunk_bytes)
        assert articles_of(chunks) == texts[:50]
    assert len(chunks) == 1 and len(cut_chunks(files, 30)) > 10


def test_a_directory_holds_rows_and_compressed_files(tmp_path: Path) -> None:
    write(tmp_path / "1.jsonl", '{"text": "One."}')
    write(tmp_path / "2.txt.gz", gzip.compress(b"Two."))
    write(tmp_path / "3.txt.bz2", bz2.compress(b""))
    write(tmp_path / "4.jsonl.zst", zstandard.compress(b'{"text": "Four."}'))
    write(tmp_path / "5.raw.bz2", bz2.compress(WIKITEXT.encode()))
    write(tmp_path / "6.json", "{}")
    found = [(file.path.name, file.format, file.packing) for file in find_files([str(tmp_path)], "auto")]
    assert found == [
        ("1.jsonl", "jsonl", ""),
        ("2.txt.gz", "files", ".gz"),
        ("4.jsonl.zst", "jsonl", ".zst"),
        ("5.raw.bz2", "wikitext", ".bz2"),
    ]


def test_a_field_needs_rows_and_a_colon_may_be_in_a_name(tmp_path: Path) -> None:
    text = write(tmp_path / "a.txt", "One.")
    with pytest.raises(UsageError, match=r"a\.txt:body: a file that is read as lines has no fields"):
        find_files([f"{text}:body"], "auto")
    assert find_files([f"{text}:body"], "jsonl")[0].field == "body"
    other = write(tmp_path / "a:b.jsonl", '{"text": "One."}')
    assert articles_of(cut_chunks(find_files([str(other)], "auto"), 1 << 20)) == ["One."]
    with pytest.raises(UsageError, match=r"none\.jsonl:body: there is no such file"):
        find_files([str(tmp_path / "none.jsonl:body")], "auto")


def test_real_wikitext_has_its_articles(tmp_path: Path) -> None:
    path = data_dir() / "wikitext2" / "valid.txt"
    if not path.is_file():
        pytest.skip(f"no WikiText-2 in {data_dir()}; set SHOAL_TEST_DATA")
    files = find_files([str(path)], "auto")
    articles = articles_of(cut_chunks(files, 1 << 30))
    assert len(articles) == 60  # as its authors say
    assert articles[0].startswith("Homarus gammarus\nHomarus gammarus , known as the European lobster")
    assert not any(" @-@ " in article or " = = " in article for article in articles)
    assert articles_of(cut_chunks(files, 50_000)) == articles


@pytest.mark.parametrize(("form", "line"), [("lines", 5002), ("files", 1), ("wikitext", 1)])
def test_wrong_byte_is_named_with_file_line_and_byte(tmp_path: Path, form: corpus.Format, line: int) -> None:
    good = " = A = \n" + "Text é here .\n" * 5000
    path = write(tmp_path / "bad.txt", good.encode() + b"caf\xe9 is Latin-1 .\n")
    offset = len(good.encode()) + 4
    pieces = cut_chunks(find_files([str(path)], form), 1000)
    words = rf"line {line} of .*/bad\.txt is .* not UTF-8: 0xe9, byte {offset} of .*--errors replace"
    with pytest.raises(UsageError, match=words):
        for piece in pieces:
            list(read_articles(piece, "strict", BadEntries(path, "refuse")))
    assert "caf\ufffd is Latin-1 ." in articles_of(pieces, "replace")[-1]


def test_bad_sources_are_named(tmp_path: Path) -> None:
    empty = write(tmp_path / "empty.txt", "")
    (tmp_path / "broken.txt").symlink_to(tmp_path / "nowhere")
    (tmp_path / "bare").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for source, words in [
        (tmp_path / "missing.txt", "no such file"),
        (tmp_path / "*.none", "no file fits"),
        (tmp_path / "bare", "no file in this directory"),
        (tmp_path / "broken.txt", "it is a link to .*nowhere, where nothing is; mend the link"),
        (tmp_path / "pipe", "neither a file nor a directory"),
        (empty, "is empty"),
    ]:
        with pytest.raises(UsageError, match=words) as caught:
            find_files([str(source)], "auto")
        assert str(source) in str(caught.value)
    with pytest.raises(UsageError, match="no source"):
        find_files([], "auto")
    os.mkfifo(tmp_path / "bare" / "pipe.txt")
    for source in (tmp_path / "bare", tmp_path / "bare" / "*"):
        with pytest.raises(UsageError, match=r"pipe\.txt: is neither a file nor a directory; write"):
            find_files([str(source)], "auto")


def test_endless_line_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "MAX_ARTICLE_BYTES", 1000)
    path = write(tmp_path / "a.txt", "ok\n" + "x" * 1001)
    for form in ("lines", "files", "wikitext"):
        with pytest.raises(UsageError, match=f"longer than.*{form}"):
            articles_of(cut_chunks(find_files([str(path)], form), 1 << 20))
