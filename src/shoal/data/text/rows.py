"""Takes the texts of rows: of JSON lines, and of Parquet files.

A Parquet file is cut by *virtual bytes*, which are those of the text's column, uncompressed, as the file's
footer counts them. Row *i* of a row group with *n* rows and *b* bytes begins at virtual byte ``i b // n`` of
the group. So a part of a large row group is one piece of work, and planning reads footers alone.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from shoal.atomic_io import read_text
from shoal.data.bad_entries import NO_TEXT, BadEntries, BadEntry, wrong_byte
from shoal.data.json_stream import json_entries
from shoal.errors import UsageError, cannot_read, did_you_mean, import_extra
from shoal.json_text import parse_json

TEXT = "text"
"""The field that is read if none is named."""

_OBJECTS = "there must be a JSON object on each line, or one array of objects"
_NO_OBJECT = "a line that is no JSON object"
_BATCH_BYTES = 1 << 20
"""Text that is decoded together, about."""
_READ_BYTES = 1 << 20
_ROWS_AT_ONCE = 1024
"""Rows that become Python's objects together."""


def json_line_text(line: str, field: str, location: str, *, is_first: bool) -> str:
    """Return the string ``field`` of a line with a JSON object; empty for an empty line.

    Raises:
        BadEntry: it is not JSON, not an object, or has no such string.
        UsageError: it is the first line of the file, and no object with such a field.
    """
    if not line or line.isspace():
        return ""
    try:
        row = parse_json(line, location, error=UsageError, remedy=_OBJECTS)
        if not isinstance(row, dict):
            raise UsageError(
                f"{location}: holds {type(row).__name__}, and not an object with texts; {_OBJECTS}"
            )
        if field not in row:
            raise _no_field(location, field, [key for key, value in row.items() if isinstance(value, str)])
    except UsageError as error:
        if is_first:
            raise
        raise BadEntry(
            "a line without a JSON object with the text", str(error).removeprefix(f"{location}: ")
        ) from None
    text = row[field]
    if is_first and isinstance(text, dict):
        raise UsageError(
            f"{location}: the object has all rows in {field!r}; write an object on each line, as "
            'DataFrame.to_json(..., orient="records", lines=True), or one array of objects'
        )
    if text is None:
        raise BadEntry(NO_TEXT, "")
    if not isinstance(text, str):
        raise BadEntry("a row whose text is no string", f"{text!r:.60}")
    return text


def array_lines(blocks: Iterable[bytes], name: str, errors: Literal["strict", "replace"]) -> Iterator[bytes]:
    """Yield the entries of a text that is one JSON array, one a line, in pieces of about 1 MiB.

    Args:
        blocks: the text in UTF-8, cut anywhere.
        name: of its file, for messages.
        errors: what bytes that are not UTF-8 are: an error, or U+FFFD.

    Raises:
        UsageError: it is not one JSON array in UTF-8.
    """
    lines = bytearray()
    for _, index, entry in json_entries(blocks, name, form="an array of objects with texts", errors=errors):
        if index is not None:
            lines += json.dumps(entry).encode() + b"\n"
        if len(lines) >= _BATCH_BYTES:
            yield bytes(lines)
            lines.clear()
    yield bytes(lines)


def lines_of(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines that are not empty with their numbers; only \\n and \\r\\n end a line."""
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip("\r"):
            yield number, line.removesuffix("\r")


def json_rows(path: Path, bad: BadEntries) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yield number, location and object of each line, or of each entry of a file that is one JSON array.

    Blank lines do not count; what is no object is counted.

    Raises:
        UsageError: the file cannot be read, is an array with bytes that are not UTF-8, or ``bad`` refuses a
            line.
    """
    text = read_text(path, keep_wrong=True)
    array = None
    if text.lstrip().startswith("["):
        with contextlib.suppress(UsageError):  # else lines, the first of which is no object
            array = parse_json(text, "", error=UsageError)
    if array is None:
        if text.count("\r") > 1 and "\n" not in text:
            raise UsageError(f"{path}: its lines end in CR alone; convert them, as by `tr '\\r' '\\n'`")
        yield from _json_lines(text, bad)
        return
    read_text(path)  # the entries of one document are not told apart by lines
    for number, entry in enumerate(array, start=1):
        if isinstance(entry, dict):
            yield number, f"entry {number}", entry
        else:
            bad.add(BadEntry(_NO_OBJECT, f"{entry!s:.60}"), f"entry {number}")


def _json_lines(text: str, bad: BadEntries) -> Iterator[tuple[int, str, dict[str, Any]]]:
    for number, line in lines_of(text):
        location = f"line {number}"
        if line.isspace():
            continue
        if wrong := wrong_byte([line]):
            bad.add(wrong, location)
            continue
        try:
            row = parse_json(line, "", error=UsageError)
        except UsageError as error:
            reason = f"{str(error).lstrip(': ')}; write an object on each line, or one array of objects"
            bad.add(BadEntry("a line that is not JSON", reason), location)
            continue
        if isinstance(row, dict):
            yield number, location, row
        else:
            bad.add(BadEntry(_NO_OBJECT, f"{row!s:.60}"), location)


def column_bytes(path: Path, field: str, name: str) -> int:
    """Return the virtual bytes of a Parquet file: those of the column ``field``; 0 if there is no row.

    Raises:
        UsageError: it is no Parquet file, or has no such column of strings; ``name`` names it.
    """
    with _opened(path, name) as file:
        _check_column(file, field, name)
        return sum(size for size, _ in _groups(file.metadata, field))


def column_texts(path: Path, field: str, name: str, start: int, end: int) -> Iterator[str | None]:
    """Yield the texts of the rows that begin in the virtual bytes ``[start, end)``.

    Raises:
        UsageError: as :func:`column_bytes`, or the file is damaged.
    """
    with _opened(path, name) as file:
        _check_column(file, field, name)
        base = 0
        for group, (size, rows) in enumerate(_groups(file.metadata, field)):
            if base < end and start < base + size:
                first, last = (-(-(edge - base) * rows // size) for edge in (max(start, base), end))
                yield from _rows(file, group, field, first, min(last, rows), max(size // rows, 1))
            base += size


def field_names(path: Path, name: str) -> list[str]:
    """Return the names of the columns of a Parquet file.

    Raises:
        UsageError: it is no Parquet file; ``name`` names it.
    """
    with _opened(path, name) as file:
        return list(file.schema_arrow.names)


def field_rows(path: Path, fields: Sequence[str], name: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file with these of its columns.

    Raises:
        UsageError: as :func:`field_names`, or the file is damaged.
    """
    with _opened(path, name) as file:
        for batch in file.iter_batches(_ROWS_AT_ONCE, columns=list(fields), use_threads=False):
            yield from batch.to_pylist()


def _groups(metadata: Any, field: str) -> Iterator[tuple[int, int]]:
    """Yield the virtual bytes and the number of rows of each row group."""
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        columns = (group.column(index) for index in range(group.num_columns))
        size = next(one.total_uncompressed_size for one in columns if one.path_in_schema == field)
        yield (max(size, 1) if group.num_rows else 0), group.num_rows


def _rows(file: Any, group: int, field: str, first: int, last: int, row_bytes: int) -> Iterator[str | None]:
    """Yield the texts of the rows ``[first, last)`` of a row group."""
    batch_size = min(max(_BATCH_BYTES // row_bytes, 1), 4096)
    begin = 0
    for batch in file.iter_batches(batch_size, row_groups=[group], columns=[field], use_threads=False):
        end = begin + batch.num_rows
        if end > first:
            some = batch.column(0).slice(max(first - begin, 0), min(last, end) - max(first, begin))
            yield from some.to_pylist()
        if end >= last:
            return
        begin = end


@contextlib.contextmanager
def _opened(path: Path, name: str) -> Iterator[Any]:
    parquet = import_extra("pyarrow.parquet", "corpora", "Parquet files need pyarrow")
    try:
        # buffered and not fetched ahead: a row group may be larger than memory
        with parquet.ParquetFile(path, pre_buffer=False, buffer_size=_READ_BYTES) as file:
            yield file
    except UsageError:
        raise
    except (OSError, ValueError, NotImplementedError) as error:  # pyarrow's own errors are among these
        if isinstance(error, OSError) and not path.is_file():
            number = errno.EISDIR if path.is_dir() else errno.ENOENT
            raise UsageError(cannot_read(path, OSError(number, os.strerror(number)))) from None
        raise UsageError(f"{name}: cannot be read as Parquet: {error}; get it again") from None


def _check_column(file: Any, field: str, name: str) -> None:
    import pyarrow as pa

    def is_text(kind: Any) -> bool:
        plain = kind.value_type if pa.types.is_dictionary(kind) else kind
        tests = pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view
        return any(test(plain) for test in tests)

    schema = file.schema_arrow
    texts = [column.name for column in schema if is_text(column.type)]
    if schema.names.count(field) > 1:
        raise UsageError(f"{name}: there are several columns {field!r}; rename all but one")
    if field in schema.names and field not in texts:
        raise UsageError(
            f"{name}: the column {field!r} is {schema.field(field).type}, but texts are read; convert it to "
            f"strings, or name another as FILE:FIELD: {', '.join(texts[:8]) or 'there is none'}"
        )
    if field not in texts:
        raise _no_field(name, field, texts)


def _no_field(source: str, field: str, texts: list[str]) -> UsageError:
    listed = f"its texts are {', '.join(texts[:8])}" if texts else "it has no texts"
    return UsageError(
        f"{source}: there is no text in a field {field!r}; {listed}. Name one as FILE:FIELD."
        + did_you_mean(field, texts)
    )
