"""Rows of JSON lines and Parquet: every row once for any cuts, and an error for what is no text."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from shoal.data.bad_entries import NO_TEXT, BadEntry
from shoal.data.text.rows import array_lines, column_bytes, column_texts, json_line_text
from shoal.errors import UsageError


def write_rows(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    parquet.write_table(pa.table(columns), path, **options)
    return path


TEXTS = ["One.", None, "", "Two two.", "Ü" * 50, *(f"Text {number}. " * number for number in range(40))]


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
)
@pytest.mark.parametrize("rows_per_group", [1, 7, 1000])
def test_every_row_once_for_any_cuts(tmp_path: Path, kind: pa.DataType, rows_per_group: int) -> None:
    columns = {"id": list(range(len(TEXTS))), "body": pa.array(TEXTS, pa.string()).cast(kind)}
    path = write_rows(tmp_path / "a.parquet", columns, row_group_size=rows_per_group)
    num_bytes = column_bytes(path, "body", "a")
    assert num_bytes > 1000 or rows_per_group > 1
    for step in (num_bytes // 60, num_bytes // 7, num_bytes // 2 + 1, num_bytes):
        found = [
            list(column_texts(path, "body", "a", start, min(start + step, num_bytes)))
            for start in range(0, num_bytes, step)
        ]
        assert list(chain.from_iterable(found)) == TEXTS
    assert rows_per_group < 1000 or sum(map(bool, found)) == 1


def test_a_large_row_group_is_cut(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.parquet", {"text": [f"Row {number}." for number in range(10_000)]})
    middle = column_bytes(path, "text", "a") // 2
    assert parquet.ParquetFile(path).num_row_groups == 1
    halves = [
        len(list(column_texts(path, "text", "a", *edges))) for edges in ((0, middle), (middle, 2 * middle))
    ]
    assert halves == [5000, 5000]


def test_no_rows(tmp_path: Path) -> None:
    assert (
        column_bytes(write_rows(tmp_path / "a.parquet", {"text": pa.array([], pa.string())}), "text", "a")
        == 0
    )


def test_wrong_parquet_is_named(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "a.parquet", {"content": ["x"], "title": ["y"], "id": [1]})
    with pytest.raises(
        UsageError, match=r"corpus: .*'contents'; its texts are content, title.*Did you mean 'con"
    ):
        column_bytes(path, "contents", "corpus")
    with pytest.raises(UsageError, match=r"'id' is int64, but texts are read; .* FILE:FIELD: content, title"):
        column_bytes(path, "id", "corpus")
    lists = write_rows(tmp_path / "l.parquet", {"text": [["x"]]})
    with pytest.raises(UsageError, match=r"'text' is list<.*>, but texts are read; convert it to strings"):
        column_bytes(lists, "text", "corpus")
    twice = pa.Table.from_arrays([pa.array(["t"]), pa.array(["u"])], names=["text", "text"])
    parquet.write_table(twice, tmp_path / "twice.parquet")
    with pytest.raises(UsageError, match=r"corpus: there are several columns 'text'; rename all but one"):
        column_bytes(tmp_path / "twice.parquet", "text", "corpus")
    for wrong in (b"PAR1 and more", path.read_bytes()[:-9]):
        (tmp_path / "b.parquet").write_bytes(wrong)
        with pytest.raises(UsageError, match="corpus: cannot be read as Parquet"):
            column_bytes(tmp_path / "b.parquet", "text", "corpus")
    (tmp_path / "c.parquet").symlink_to("nowhere")
    for name, words in [
        ("c.parquet", "it is a link to nowhere, where nothing is; mend"),
        ("d.parquet", "No such file or directory; check the path"),
        ("", "Is a directory; name a file"),
    ]:
        with pytest.raises(UsageError, match=rf"^{tmp_path / name}: cannot be read: {words}"):
            column_bytes(tmp_path / name, "text", "corpus")


def test_json_lines() -> None:
    line = '{"id": 1, "text": "One.\\n\\nTwo."}\n'
    assert json_line_text(line, "text", "a", is_first=True) == "One.\n\nTwo."
    assert json_line_text(" \n", "text", "a", is_first=True) == ""
    with pytest.raises(BadEntry) as null:
        json_line_text('{"text": null}', "text", "a", is_first=True)
    assert null.value.args == (NO_TEXT, "")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"text": "x"', "is not JSON.*or one array of objects"),
        ('[{"text": "x"}]', "holds list, and not an object with texts; .*or one array of objects"),
        ('{"body": "x", "id": 1}', "'text'; its texts are body. Name one as FILE:FIELD"),
        ('{"id": 1}', "it has no texts"),
    ],
)
def test_wrong_lines_are_refused_first_and_counted_later(line: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        json_line_text(line, "text", "a, line 3", is_first=True)
    with pytest.raises(BadEntry, match=words):
        json_line_text(line, "text", "a, line 3", is_first=False)


ENTRIES = [{"text": "Ü" * 9, "n": [1, {}]}, {"text": "Line\n\nend."}, 7, {"text": "\ud83d"}, "word"]


@pytest.mark.parametrize("indent", [None, 2], ids=["dense", "indented"])
@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "mark"])
@pytest.mark.parametrize("size", [1, 3, 1 << 20])
def test_an_array_becomes_lines(indent: int | None, mark: str, size: int) -> None:
    text = (mark + json.dumps(ENTRIES, indent=indent)).encode()
    blocks = [text[start : start + size] for start in range(0, len(text), size)]
    lines = b"".join(array_lines(blocks, "a.json", "strict"))
    assert [json.loads(line) for line in lines.splitlines()] == ENTRIES


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b'[{"text": "a"}, {"text": "caf\xe9"}]', "a.json: 0xe9, byte 30 of the file, is not UTF-8; .*iconv"),
        (b'[{"text": "a"}', "a.json, line 1, at its end: is not JSON"),
        (b'[1]\n{"text": "a"}', "a.json, line 2, character 4: is not JSON: text follows after the end"),
        ('[{"text": "a"}]'.encode("utf-16-le"), "a.json: its content is UTF-16LE; convert it: iconv"),
    ],
    ids=["latin-1", "cut", "lines", "utf-16"],
)
def test_what_is_no_array_is_named(text: bytes, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        list(array_lines([text], "a.json", "strict"))
    assert text[:1] != b"[" or b"\xe9" not in text or list(array_lines([text], "a.json", "replace"))


def test_rows_in_columns_are_refused() -> None:
    line = '{"text": {"0": "One.", "1": "Two."}}'
    with pytest.raises(UsageError, match=r"^a: the object has all rows in 'text'; .*orient=\"records\""):
        json_line_text(line, "text", "a", is_first=True)
    with pytest.raises(BadEntry, match="a row whose text is no string"):
        json_line_text(line, "text", "a", is_first=False)


def test_a_text_that_is_a_number_is_counted() -> None:
    with pytest.raises(BadEntry) as number:
        json_line_text('{"text": 1}', "text", "a", is_first=True)
    assert number.value.args == ("a row whose text is no string", "1")
