"""Parses a large JSON text, one element of its arrays at a time.

``instances_train2017.json`` has 450 MB, and as a tree of Python objects ten times as much. Here only a window
of the text is in memory, and of the tree what the caller keeps.
"""

from __future__ import annotations

import codecs
import json
import re
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from shoal.atomic_io import MAX_WHOLE_BYTES, not_utf8, refuse_binary
from shoal.errors import UsageError, cannot_read

_BLOCK_CHARS = 1 << 22
_VISIBLE = re.compile(r"[^ \t\r\n]")
_NUMBER_GOES_ON = ("", ".", "e", "E")

Entry = tuple[str, int | None, Any]
"""Key, index and value of an element of an array in an object; see :func:`json_entries`."""


def top_level_entries(path: Path | zipfile.Path) -> Iterator[Entry]:
    """Yield the entries of a file of COCO, as :func:`json_entries` does.

    Raises:
        UsageError: the file cannot be read, or its content is none of COCO's.
    """
    try:
        with path.open("rb") as file:
            blocks: Iterator[bytes] = iter(partial(file.read, _BLOCK_CHARS), b"")
            yield from json_entries(blocks, str(path), form="a file of COCO")
    except OSError as error:
        raise UsageError(cannot_read(str(path), error)) from None
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise UsageError(f"{path}: the zip is damaged or was cut short ({error}); get it again") from None


def json_entries(
    blocks: Iterable[bytes], name: str, *, form: str, errors: Literal["strict", "replace"] = "strict"
) -> Iterator[Entry]:
    """Yield (key, index, value) of a JSON text that is an object or an array.

    Each element of an array in the object is yielded with its index. Another value, or an empty array, is
    yielded whole with the index ``None``. The elements of a text that is one array have the key "".

    Args:
        blocks: the text in UTF-8, cut anywhere.
        name: of its file, for messages.
        form: what the file is meant to be, for messages.
        errors: what bytes that are not UTF-8 are: an error, or U+FFFD.

    Raises:
        UsageError: it is not JSON in UTF-8, is neither an object nor an array, or has a key of the object
            twice.
    """
    yield from _Window(name, form, _decoded(blocks, name, errors)).entries()


def _decoded(blocks: Iterable[bytes], name: str, errors: str) -> Iterator[str]:
    """Yield the text of blocks of bytes, without a byte order mark."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")(errors)
    num_bytes = 0
    for block in chain(blocks, [b""]):
        if not num_bytes:
            refuse_binary(name, block)
        num_bytes += len(block)
        try:
            yield decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            at = num_bytes - len(error.object) + error.start
            raise not_utf8(name, error.object[error.start], at) from None


class _Window:
    """Parser state: the part of the text in memory; ``_at`` is the next character."""

    def __init__(self, name: str, form: str, pieces: Iterator[str]) -> None:
        self._name = name
        self._form = form
        self._pieces = pieces
        self._text = ""
        self._at = 0
        self._num_dropped = 0
        self._lines_dropped = 0
        self._at_end = False
        self._decode = json.JSONDecoder().raw_decode

    def entries(self) -> Iterator[Entry]:
        first = self._next_char()
        if first == "[":
            yield from self._elements("")
        elif first == "{":
            yield from self._members()
        elif not first:
            raise UsageError(f"{self._name}: the file is empty; it must be JSON")
        else:
            raise UsageError(
                f"{self._name}: begins with {first!r}, but must be a JSON object or array; is it "
                f"{self._form}?"
            )
        if self._next_char():
            raise self._wrong("text follows after the end")

    def _members(self) -> Iterator[Entry]:
        self._at += 1
        seen: set[str] = set()
        while self._next_char() != "}":
            if seen:
                self._expect(",")
            if self._next_char() != '"':
                raise self._wrong("a key in double quotes is expected")
            key = self._value()
            if key in seen:
                raise UsageError(f"{self._name}: the key {key!r} is there twice; join the two, or remove one")
            seen.add(key)
            self._expect(":")
            if self._next_char() == "[":
                yield from self._elements(key)
            else:
                yield key, None, self._value()
        self._at += 1

    def _elements(self, key: str) -> Iterator[Entry]:
        self._at += 1
        index = 0
        while self._next_char() != "]":
            if index:
                self._expect(",")
            yield key, index, self._value()
            index += 1
        self._at += 1
        if not index:
            yield key, None, []

    def _value(self) -> Any:
        self._next_char()
        while True:
            try:
                value, end = self._decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if not self._read():
                    raise self._wrong(error.msg, error.pos) from None
                continue
            except RecursionError:
                raise UsageError(f"{self._name}: is nested too deeply to be {self._form}") from None
            except ValueError as error:  # a number of too many digits
                raise self._wrong(str(error)) from None
            # a number may continue after the end of the window: 12|3, 12.|3
            if self._text[end : end + 1] not in _NUMBER_GOES_ON or not self._read():
                self._at = end
                return value

    def _expect(self, expected: str) -> None:
        if self._next_char() != expected:
            raise self._wrong(f"{expected!r} is expected")
        self._at += 1

    def _next_char(self) -> str:
        """Return the next character that is not white space, "" at the end."""
        while not (match := _VISIBLE.search(self._text, self._at)):
            self._at = len(self._text)
            if not self._read():
                return ""
        self._at = match.start()
        return match[0]

    def _read(self) -> bool:
        """Drop the parsed text and read more, as much as is left of a value that is incomplete."""
        if self._at_end:
            return False
        num_left = len(self._text) - self._at
        if num_left > MAX_WHOLE_BYTES:
            raise UsageError(
                f"{self._name}: has a value of more than {MAX_WHOLE_BYTES:,} characters, or no end of one; "
                f"is it {self._form}?"
            )
        more = self._next_pieces(max(num_left, _BLOCK_CHARS))
        self._at_end = not more
        if more:
            self._num_dropped += self._at
            self._lines_dropped += self._text.count("\n", 0, self._at)
            self._text = self._text[self._at :] + more
            self._at = 0
        return bool(more)

    def _next_pieces(self, num_chars: int) -> str:
        """Return at least so much of the text, less only at its end."""
        pieces, length = list[str](), 0
        while length < num_chars and (piece := next(self._pieces, None)) is not None:
            pieces.append(piece)
            length += len(piece)
        return "".join(pieces)

    def _wrong(self, problem: str, at: int | None = None) -> UsageError:
        at = self._at if at is None else at
        line = self._lines_dropped + self._text.count("\n", 0, at) + 1
        position = (
            "at its end" if at >= len(self._text) and self._at_end else f"character {self._num_dropped + at}"
        )
        return UsageError(f"{self._name}, line {line}, {position}: is not JSON: {problem}")
