"""Finds the files of a source, cuts them into chunks, and reads the articles of a chunk.

There are three formats of text. ``lines``: one article per line, as the Wikipedia dump tools write them.
``files``: one article per file, paragraphs separated by empty lines. ``wikitext``: raw files of WikiText,
where a line `` = Title = `` begins an article and every other line is a paragraph. Two formats have rows,
each with an article in one of its fields, paragraphs separated by empty lines: ``jsonl`` and ``parquet``
(``rows``). ``mediawiki`` is a dump of a wiki (``mediawiki``).

A *chunk* is a bounded part of the source, cut by file sizes alone, so that planning reads nothing but the
beginning of each file and the footers of Parquet. A byte range of a file stands for the articles that *begin*
in it. Compressed files and JSON arrays are listed as they are, and cut after they were unpacked to lines
(``unpack``).
"""

from __future__ import annotations

import re
import stat
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from glob import glob, has_magic
from pathlib import Path
from typing import BinaryIO, Literal

from shoal.atomic_io import archive_of, refuse_binary
from shoal.data.bad_entries import NO_TEXT, NOT_UTF8, BadEntries, BadEntry
from shoal.data.text.hub import PREFIX, parse_hub
from shoal.data.text.mediawiki import PAGE, hidden_namespaces, is_dump, page_text
from shoal.data.text.packed import PACKINGS, peek, split_packing
from shoal.data.text.rows import TEXT, column_bytes, column_texts, json_line_text
from shoal.data.text.sentences import normalise
from shoal.errors import ShoalError, UsageError, cannot_read

Format = Literal["lines", "files", "wikitext", "jsonl", "parquet", "mediawiki"]
FORMATS: Mapping[Format, str] = {
    "lines": "one article per line",
    "files": "one article per file",
    "wikitext": "an article per title",
    "jsonl": "an article per JSON object",
    "parquet": "an article per row",
    "mediawiki": "an article per page",
}
"""The formats in words."""
TEXT_FORMATS: tuple[Format, ...] = ("lines", "files", "wikitext")
"""Formats that a file of text may have; which one it is meant to have is a guess."""
ROW_FORMATS: tuple[Format, ...] = ("jsonl", "parquet")
"""Formats with fields."""
Errors = Literal["strict", "replace"]

SUFFIXES = (".txt", ".raw", ".tokens", ".jsonl", ".ndjson", ".parquet")
"""Suffixes of the files that are read in a directory, compressed too; a file or glob may have any."""
_DUMP_NAME = re.compile(r"pages-articles[^/]*\.xml(-p\d+p\d+)?$")
"""Names of the dumps that are read in a directory: ``enwiki-…-pages-articles1.xml-p1p41242``."""
_DUMP_INDEX = "-multistream-index.txt"
_ROWS_OF: Mapping[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
}

_TABLES = (".csv", ".tsv")
"""Suffixes of files whose lines would be columns with their names and quotes, not text."""

MAX_ARTICLE_BYTES = 64 << 20
"""Limit of an article: bounds memory, and a file without line ends is most likely a mistake."""

_ROWS = re.compile(rb"(\xef\xbb\xbf)?\s*(\[\s*)?\{\s*\"")
"""Beginning of rows in JSON."""
_MARKUP = re.compile(rb"(\xef\xbb\xbf)?\s*<((!doctype|html|\?xml|docs?|feed|rss|tei)\b[^>]*)>", re.IGNORECASE)
"""Beginning of a text whose tags are no text: pages of the web, XML, articles as of WikiExtractor."""

_PEEK_BYTES = 64 << 10
_TITLE = re.compile(rb"^ ?= [^=\s](?:[^\n]*[^=\s])? = ?\r?$", re.MULTILINE)
_HEADING = re.compile(r"^\s*(?P<bars>=(?: ?=)*) (?P<title>.*?) (?P=bars)\s*$")
_WIKITEXT_JOINTS = re.compile(r" @([-,.])@ ")
_PARAGRAPH_END = re.compile(r"\n\s*\n")
_SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One file of a source, with its size in bytes and mtime in nanoseconds.

    Attributes:
        num_bytes: of the file if it is compressed, else of its content: :func:`content_bytes`.
        field: of the article in a row.
        packing: suffix of its compression; empty for none, ``hf:`` for a data set, which has no bytes yet.
        is_array: it is, or was before it was unpacked to lines, one JSON array.
        source: what it was unpacked from.
    """

    path: Path
    format: Format
    num_bytes: int
    changed_ns: int
    field: str = TEXT
    packing: str = ""
    is_array: bool = False
    source: str = ""

    @property
    def name(self) -> str:
        """The file that the user gave, for messages."""
        return self.source or str(self.path)


@dataclass(frozen=True, kw_only=True)
class FileRange:
    """The articles of a file that begin in the bytes ``[start, end)`` of its content."""

    file: SourceFile
    start: int
    end: int


Chunk = tuple[FileRange, ...]


def find_files(sources: Sequence[str], form: Format | Literal["auto"]) -> list[SourceFile]:
    """Return the files of ``sources`` (files, directories or globs) in reading order, empty ones left out.

    A source of rows may end in ``:FIELD``, and ``hf:NAME`` is a data set (``hub``), read when it is unpacked.
    ``auto`` goes by suffixes for ``jsonl`` and ``parquet``, and knows ``mediawiki`` by its first element,
    JSON by its first object. It reads a file with a WikiText title in its first 64 KiB as ``wikitext``,
    another that is named as such as ``lines``, and those of a directory or glob as ``files``.

    Raises:
        UsageError: a source does not exist, cannot be read, is a table in .csv or .tsv, HTML or XML, or
            all of them hold nothing.
    """
    if not sources:
        raise UsageError("no source is given; name files, directories, globs, or `builtin`")
    files = []
    for source in sources:
        if source.startswith(PREFIX):
            files.append(_data_set(source))
            continue
        location, field = _split_field(source)
        paths, alone = _paths_of(location)
        files += [_examine(path, form, field, alone) for path in paths]
    if not (readable := [file for file in files if file.num_bytes or file.packing == PREFIX]):
        raise UsageError(
            f"{', '.join(sources)}: every file of the source is empty; there is no article in it"
        )
    return readable


def _data_set(source: str) -> SourceFile:
    field = parse_hub(source).field
    return SourceFile(
        path=Path(source),
        format="jsonl",
        num_bytes=0,
        changed_ns=0,
        field=field,
        packing=PREFIX,
        source=source,
    )


def content_bytes(file: SourceFile) -> int:
    """Return the bytes by which a file that is not compressed is cut: its size, or the column's of Parquet.

    Raises:
        UsageError: it cannot be read.
    """
    try:
        num_bytes = file.path.stat().st_size
    except OSError as error:
        raise _unreadable(file.path, error) from error
    return (
        column_bytes(file.path, file.field, file.name)
        if num_bytes and file.format == "parquet"
        else num_bytes
    )


def _examine(path: Path, form: Format | Literal["auto"], field: str, alone: bool) -> SourceFile:
    """Return a file with its format and size; without bytes if its content is empty."""
    plain, packing = split_packing(path.name)
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # a pipe may be waited for without end
            raise UsageError(f"{path}: is neither a file nor a directory; write the text to a file first")
        head = peek(path, packing, _PEEK_BYTES)
    except OSError as error:
        raise _unreadable(path, error) from error
    guess: Format = "wikitext" if _TITLE.search(head) else "lines" if alone else "files"
    suffix = Path(plain).suffix.lower()
    if is_dump(head):
        guess = "mediawiki"
    elif _ROWS.match(head):
        guess = "jsonl"
    elif form == "auto" and suffix not in _ROWS_OF and (markup := _MARKUP.match(head)):
        tag = markup[2].decode(errors="replace")
        raise UsageError(
            f"{path}: begins with <{tag:.40}>, and its tags would become text; convert it to text "
            "(WikiExtractor: --json), or take its lines as they are by --format lines"
        )
    if form == "auto" and suffix in _TABLES:
        raise UsageError(
            f"{path}: of a table in {suffix} the column names, quotes and other columns would become text; "
            "convert it to .jsonl or .parquet and name the column as FILE:COLUMN, or take its lines as they "
            "are by --format lines"
        )
    if form != "parquet" and suffix != ".parquet":
        _refuse_binary(path, head, packing)
    file_format = _ROWS_OF.get(suffix, guess) if form == "auto" else form
    file = SourceFile(
        path=path,
        format=file_format,
        num_bytes=status.st_size if head else 0,
        changed_ns=status.st_mtime_ns,
        field=field or TEXT,
        packing=packing,
        is_array=file_format == "jsonl" and head.removeprefix(BOM_UTF8).lstrip().startswith(b"["),
    )
    if field and file.format not in ROW_FORMATS:
        raise UsageError(
            f"{path}:{field}: a file that is read as {file.format} has no fields; --format jsonl and parquet "
            "do"
        )
    return file if packing or not head else replace(file, num_bytes=content_bytes(file))


def _refuse_binary(path: Path, head: bytes, packing: str) -> None:
    """Raise if the content of a file is no text, but an archive, or has line ends that no reader knows."""
    if kind := archive_of(head):
        inside = f", compressed as {packing}," if packing else ""
        raise UsageError(
            f"{path}: its content{inside} is {kind} and no text; unpack it, or name a compressed file by its "
            f"kind ({', '.join(PACKINGS)})"
        )
    refuse_binary(path, head)
    if head.count(b"\r") > 1 and b"\n" not in head:
        raise UsageError(
            f"{path}: its lines end in CR alone, which would make it one line; convert it: tr '\\r' '\\n'"
        )


def _split_field(source: str) -> tuple[str, str]:
    """Return a source without its ``:FIELD``, and the field; empty if there is none."""
    location, _, field = source.rpartition(":")
    known = bool(location) and (Path(location).exists() or has_magic(location))
    if Path(source).exists() or not known or "/" in field:
        return source, ""
    return location, field


def cut_chunks(files: Sequence[SourceFile], chunk_bytes: int) -> list[Chunk]:
    """Cut ``files`` into chunks of about ``chunk_bytes``, in order; no article is in two of them."""
    chunks: list[Chunk] = []
    open_spans: list[FileRange] = []
    room = chunk_bytes
    for file in files:
        step = file.num_bytes if file.format == "files" else chunk_bytes
        for start in range(0, file.num_bytes, max(step, 1)):
            end = min(start + step, file.num_bytes)
            if end - start > room and open_spans:
                chunks.append(tuple(open_spans))
                open_spans, room = [], chunk_bytes
            open_spans.append(FileRange(file=file, start=start, end=end))
            room -= end - start
    if open_spans:
        chunks.append(tuple(open_spans))
    return chunks


def read_articles(chunk: Chunk, errors: Errors, bad: BadEntries | None = None) -> Iterator[str]:
    """Yield the articles of a chunk that are not empty; holds one at a time in memory.

    Paragraphs of an article are separated by a line end, and white space inside them is one blank.

    Args:
        errors: what bytes that are not UTF-8 are: a flaw of their article, or U+FFFD ("replace").
        bad: counts articles, rows and pages that cannot be used; default: they are left out.

    Raises:
        UsageError: an article longer than ``MAX_ARTICLE_BYTES``, a damaged page, or an entry that ``bad``
            refuses.
        ShoalError: a file can no longer be read.
    """
    for span in chunk:
        try:
            yield from filter(None, _articles(span, errors, bad or BadEntries(span.file.name)))
        except OSError as error:
            raise _unreadable(span.file.path, error) from error


def _articles(span: FileRange, errors: Errors, bad: BadEntries) -> Iterator[str]:
    file = span.file
    if file.format == "parquet":
        for number, row in enumerate(column_texts(file.path, file.field, file.name, span.start, span.end)):
            if row is None:
                bad.add(BadEntry(NO_TEXT, ""), f"row {number + 1} from byte {span.start:,} of {file.name}")
            else:
                yield _article(row, file.format)
        return
    take: Callable[..., str] | None = None
    if file.format == "jsonl":
        take = partial(json_line_text, field=file.field, is_first=span.start == 0)
    elif file.format == "mediawiki":
        take = partial(page_text, hidden=hidden_namespaces(peek(file.path, "", _PEEK_BYTES)))
    with file.path.open("rb") as stream:
        for offset, data in _read_span(stream, span):
            if offset and file.format == "jsonl":
                take = partial(json_line_text, field=file.field, is_first=False)
            try:
                text = _decode(data, offset, errors)
                yield _article(_taken(take, text, offset, file) if take else text, file.format)
            except BadEntry as error:
                bad.add(error, partial(_location_of, file, offset))


def _paths_of(source: str) -> tuple[list[Path], bool]:
    """Return the files of one source, and whether it names a single file."""
    path = Path(source)
    if path.is_dir():
        paths = sorted(
            file
            for file in path.rglob("*")
            if _is_named_as_text(split_packing(file.name)[0])
            and not file.is_dir()
            and not file.name.startswith(".")
        )
        if not paths:
            raise UsageError(
                f"{source}: no file in this directory ends in {', '.join(SUFFIXES)}, or in one of these and "
                f"{', '.join(PACKINGS)}"
            )
        return paths, False
    if path.exists() or path.is_symlink():
        return [path], True
    if has_magic(source):
        names = glob(source, recursive=True)  # noqa: PTH207  (Path.glob takes no absolute pattern)
        paths = sorted(Path(name) for name in names if not Path(name).is_dir())
        if not paths:
            raise UsageError(f"{source}: no file fits this pattern")
        return paths, False
    raise UsageError(
        f"{source}: there is no such file or directory (the English of this Python is `builtin`)"
    )


def _is_named_as_text(name: str) -> bool:
    name = name.lower()
    return bool(_DUMP_NAME.search(name)) or (name.endswith(SUFFIXES) and not name.endswith(_DUMP_INDEX))


def _read_span(file: BinaryIO, span: FileRange) -> Iterator[tuple[int, bytes]]:
    """Yield (offset in the file, bytes) of each article whose first line is in the span.

    The file's first line begins an article, and so does every line of ``lines`` and ``jsonl``, every title of
    ``wikitext``, and every page of ``mediawiki``.
    """
    offset = _seek_line(file, span)
    begin, lines, num_bytes = offset, list[bytes](), 0
    inside = span.start == 0
    form = span.file.format
    begins = {"wikitext": _TITLE, "mediawiki": PAGE}.get(form)
    while True:
        line = file.readline(MAX_ARTICLE_BYTES + 1)
        if not line or form in ("lines", "jsonl") or (begins and begins.match(line)):
            if inside and lines:
                yield begin, b"".join(lines)
            if not line or offset >= span.end:
                return
            begin, lines, num_bytes, inside = offset, [], 0, True
        offset += len(line)
        if inside:
            lines.append(line)
            num_bytes += len(line)
            if num_bytes > MAX_ARTICLE_BYTES:
                raise UsageError(
                    f"{span.file.name}: an article is longer than {MAX_ARTICLE_BYTES >> 20} MiB, so it is "
                    f"hardly one; it was read as --format {form}, choose another of {', '.join(FORMATS)}"
                )
        elif offset >= span.end:
            return


def _seek_line(file: BinaryIO, span: FileRange) -> int:
    """Seek to the first line that begins at or after the start of the span; return its offset."""
    if span.start == 0:
        return 0
    file.seek(span.start - 1)
    offset = span.start - 1
    while not (part := file.readline(1 << 20)).endswith(b"\n"):
        if not part:
            break
        offset += len(part)
    return offset + len(part)


def _article(text: str, form: Format) -> str:
    if form == "lines":
        paragraphs = [text]
    elif form != "wikitext":
        paragraphs = _PARAGRAPH_END.split(text)
    else:
        paragraphs = [
            _WIKITEXT_JOINTS.sub(r"\1", heading["title"] if (heading := _HEADING.match(line)) else line)
            for line in text.split("\n")
        ]
    return "\n".join(filter(None, map(normalise, paragraphs)))


def _taken(take: Callable[..., str], lines: str, offset: int, file: SourceFile) -> str:
    """Return the text that ``take`` finds in lines, with U+FFFD for surrogates, which have no UTF-8."""
    try:
        text = take(lines, location=file.name)
    except UsageError:  # the number of the line takes a look at all before it
        take(lines, location=_location_of(file, offset))
        raise
    return _SURROGATE.sub("\ufffd", text)


def _decode(data: bytes, offset: int, errors: Errors) -> str:
    try:
        return data.decode("utf-8" if offset else "utf-8-sig", errors)
    except UnicodeDecodeError as error:
        raise BadEntry(
            NOT_UTF8,
            f"{data[error.start]:#04x}, byte {offset + error.start + 1} of the file; convert the file, or "
            "pass --errors replace to put U+FFFD for such bytes",
        ) from None


def _location_of(file: SourceFile, position: int) -> str:
    """Return the line with the byte ``position``, or the entry of an array, by its number from 1."""
    number, start = 1, 0
    with file.path.open("rb") as lines:
        for text in lines:
            if start + len(text) > position:
                break
            number, start = number + 1, start + len(text)
    return f"{'entry' if file.is_array else 'line'} {number} of {file.name}"


def _unreadable(path: Path, error: OSError) -> ShoalError:
    return UsageError(cannot_read(path, error))
