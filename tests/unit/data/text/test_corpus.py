"""Sources to files to pieces to articles, on real files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shoal.data.text import corpus
from shoal.data.text.corpus import cut_chunks, find_files, read_articles
from shoal.env import test_data_dir as data_dir
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


@pytest.mark.parametrize("form", ["lines", "files", "wikitext"])
def test_wrong_byte_is_named_with_file_line_and_byte(tmp_path: Path, form: corpus.Format) -> None:
    good = " = A = \n" + "Text é here .\n" * 5000
    path = write(tmp_path / "bad.txt", good.encode() + b"caf\xe9 is Latin-1 .\n")
    offset = len(good.encode()) + 4
    pieces = cut_chunks(find_files([str(path)], form), 1000)
    with pytest.raises(UsageError, match=rf"bad\.txt, line 5002, byte 4 \(byte {offset} of .*0xe9.*--errors"):
        articles_of(pieces)
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
        (tmp_path / "broken.txt", "cannot be read: No such file"),
        (tmp_path / "pipe", "neither a file nor a directory"),
        (empty, "is empty"),
    ]:
        with pytest.raises(UsageError, match=words) as caught:
            find_files([str(source)], "auto")
        assert str(source) in str(caught.value)
    with pytest.raises(UsageError, match="no source"):
        find_files([], "auto")


def test_endless_line_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "MAX_ARTICLE_BYTES", 1000)
    path = write(tmp_path / "a.txt", "ok\n" + "x" * 1001)
    for form in ("lines", "files", "wikitext"):
        with pytest.raises(UsageError, match=f"longer than.*{form}"):
            articles_of(cut_chunks(find_files([str(path)], form), 1 << 20))
