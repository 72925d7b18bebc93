"""Finds the files of a source, cuts them into chunks, and reads the articles of a chunk.

There are three formats. ``lines``: one article per line, as the Wikipedia dump tools write them. ``files``:
one article per file, paragraphs separated by empty lines. ``wikitext``: raw files of WikiText, where a line
`` = Title = `` begins an article and every other line is a paragraph.

A *chunk* is a bounded part of the source, cut by file sizes alone, so that planning reads nothing. A byte
range of a file stands for the articles that *begin* in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path
from typing import BinaryIO, Literal

from shoal.data.text.sentences import normalise
from shoal.errors import ShoalError, UsageError

Format = Literal["lines", "files", "wikitext"]
FORMATS: Mapping[Format, str] = {
    "lines": "one article per line",
    "files": "one article per file",
    "wikitext": "an article per title",
}
"""The formats in words."""
Errors = Literal["strict", "replace"]

SUFFIXES = (".txt", ".raw", ".tokens")
"""Suffixes of the files that are read in a directory; a file or glob may have any."""

MAX_ARTICLE_BYTES = 64 << 20
"""Limit of an article: bounds memory, and a file without line ends is most likely a mistake."""

_PEEK_BYTES = 64 << 10
_TITLE = re.compile(rb"^ ?= [^=\s](?:[^\n]*[^=\s])? = ?\r?$", re.MULTILINE)
_HEADING = re.compile(r"^\s*(?P<bars>=(?: ?=)*) (?P<title>.*?) (?P=bars)\s*$")
_WIKITEXT_JOINTS = re.compile(r" @([-,.])@ ")
_PARAGRAPH_END = re.compile(r"\n\s*\n")


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """One file of a source, with its size in bytes and mtime in nanoseconds."""

    path: Path
    format: Format
    num_bytes: int
    changed_ns: int


@dataclass(frozen=True, kw_only=True)
class Span:
    """The articles of a file that begin in the bytes ``[start, end)``."""

    path: Path
    format: Format
    start: int
    end: int


Chunk = tuple[Span, ...]


def find_files(sources: Sequence[str], form: Format | Literal["auto"]) -> list[SourceFile]:
    """Return the files of ``sources`` (files, directories or globs) in reading order, empty ones left out.

    ``auto`` reads a file with a WikiText title in its first 64 KiB as ``wikitext``, another that is named as
    such as ``lines``, and those of a directory or glob as ``files``.

    Raises:
        UsageError: a source does not exist, cannot be read, or all of them hold nothing.
    """
    if not sources:
        raise UsageError("no source is given; name files, directories, globs, or `builtin`")
    files = []
    for source in sources:
        paths, alone = _paths_of(source)
        for path in paths:
            try:
                with path.open("rb") as file:
                    head = file.read(_PEEK_BYTES)
                status = path.stat()
            except OSError as error:
                raise _unreadable(path, error) from error
            guess: Format = "wikitext" if _TITLE.search(head) else "lines" if alone else "files"
            if head:
                files.append(
                    SourceFile(
                        path=path,
                        format=guess if form == "auto" else form,
                        num_bytes=status.st_size,
                        changed_ns=status.st_mtime_ns,
                    )
                )
    if not files:
        raise UsageError(
            f"{', '.join(sources)}: every file of the source is empty; there is no article in it"
        )
    return files


def cut_chunks(files: Sequence[SourceFile], chunk_bytes: int) -> list[Chunk]:
    """Cut ``files`` into chunks of about ``chunk_bytes``, in order; no article is in two of them."""
    chunks: list[Chunk] = []
    open_spans: list[Span] = []
    room = chunk_bytes
    for file in files:
        step = file.num_bytes if file.format == "files" else chunk_bytes
        for start in range(0, file.num_bytes, max(step, 1)):
            end = min(start + step, file.num_bytes)
            if end - start > room and open_spans:
                chunks.append(tuple(open_spans))
                open_spans, room = [], chunk_bytes
            open_spans.append(Span(path=file.path, format=file.format, start=start, end=end))
            room -= end - start
    if open_spans:
        chunks.append(tuple(open_spans))
    return chunks


def read_articles(chunk: Chunk, errors: Errors) -> Iterator[str]:
    """Yield the articles of a chunk that are not empty; holds one at a time in memory.

    Paragraphs of an article are separated by a line end, and white space inside them is one blank.

    Raises:
        UsageError: bytes that are not UTF-8 (unless ``errors`` is "replace", which puts U+FFFD for them), or
            an article longer than ``MAX_ARTICLE_BYTES``.
        ShoalError: a file can no longer be read.
    """
    for span in chunk:
        try:
            with span.path.open("rb") as file:
                for offset, data in _read_span(file, span):
                    article = _article(_decode(data, offset, span.path, errors), span.format)
                    if article:
                        yield article
        except OSError as error:
            raise _unreadable(span.path, error) from error


def _paths_of(source: str) -> tuple[list[Path], bool]:
    """Return the files of one source, and whether it names a single file."""
    path = Path(source)
    if path.is_dir():
        found = sorted(
            file
            for file in path.rglob("*")
            if file.suffix in SUFFIXES and not file.is_dir() and not file.name.startswith(".")
        )
        if not found:
            raise UsageError(f"{source}: no file in this directory ends in {', '.join(SUFFIXES)}")
        return found, False
    if path.exists() and not path.is_file():
        raise UsageError(f"{source}: is neither a file nor a directory; write the text to a file first")
    if path.exists() or path.is_symlink():
        return [path], True
    if has_magic(source):
        names = glob(source, recursive=True)  # noqa: PTH207  (Path.glob takes no absolute pattern)
        found = sorted(Path(name) for name in names if not Path(name).is_dir())
        if not found:
            raise UsageError(f"{source}: no file fits this pattern")
        return found, False
    raise UsageError(
        f"{source}: there is no such file or directory (the English of this Python is `builtin`)"
    )


def _read_span(file: BinaryIO, span: Span) -> Iterator[tuple[int, bytes]]:
    """Yield (offset in the file, bytes) of each article whose first line is in the span.

    The file's first line begins an article, and so does every line of ``lines``, and every title of
    ``wikitext``.
    """
    offset = _seek_line(file, span)
    begin, lines, num_bytes = offset, list[bytes](), 0
    inside = span.start == 0
    while True:
        line = file.readline(MAX_ARTICLE_BYTES + 1)
        if not line or span.format == "lines" or (span.format == "wikitext" and _TITLE.match(line)):
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
                    f"{span.path}: an article is longer than {MAX_ARTICLE_BYTES >> 20} MiB, so it is hardly "
                    f"one; it was read as --format {span.format}, choose another of lines, files and wikitext"
                )
        elif offset >= span.end:
            return


def _seek_line(file: BinaryIO, span: Span) -> int:
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
    elif form == "files":
        paragraphs = _PARAGRAPH_END.split(text)
    else:
        paragraphs = [
            _WIKITEXT_JOINTS.sub(r"\1", heading["title"] if (heading := _HEADING.match(line)) else line)
            for line in text.split("\n")
        ]
    return "\n".join(filter(None, map(normalise, paragraphs)))


def _decode(data: bytes, offset: int, path: Path, errors: Errors) -> str:
    try:
        return data.decode("utf-8" if offset else "utf-8-sig", errors)
    except UnicodeDecodeError as error:
        place = offset + error.start
        with path.open("rb") as file:
            line, start = 1, 0
            for text in file:
                if start + len(text) > place:
                    break
                line, start = line + 1, start + len(text)
        raise UsageError(
            f"{path}, line {line}, byte {place - start + 1} (byte {place + 1} of the file): "
            f"{data[error.start]:#04x} is not UTF-8; convert the file, or pass --errors replace to put "
            "U+FFFD for such bytes"
        ) from None


def _unreadable(path: Path, error: OSError) -> ShoalError:
    return UsageError(f"{path}: cannot be read: {error.strerror or error}")
