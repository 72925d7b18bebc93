"""Locks of files, also where the file system has none."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from shoal.atomic_io import archive_of, read_text, take_lock, wide_encoding
from shoal.errors import ShoalError, UsageError


def test_a_lock_is_held_until_the_file_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    first, second = (os.open(path, os.O_RDWR | os.O_CREAT) for _ in range(2))
    assert take_lock(first, path, wait=False)
    assert not take_lock(second, path, wait=False)
    os.close(first)
    assert take_lock(second, path, wait=False)
    os.close(second)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_said(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert take_lock(0, Path("out/prepare.lock"), wait=False)
    said = capsys.readouterr().err
    assert said.startswith("out/prepare.lock: not locked") and os.strerror(number) in said
    assert said.count("\n") == 1


def test_other_failures_are_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ShoalError, match=r"out/prepare.lock: cannot be written: Input/output error"):
        take_lock(0, Path("out/prepare.lock"), wait=True)


@pytest.mark.parametrize(
    "text",
    ["ab", "A line of text.\nAnother.\n" * 50, "Слово за словом, и ещё одно слово.\n" * 9],
    ids=["short", "ascii", "cyrillic"],
)
@pytest.mark.parametrize("encoding", ["UTF-16LE", "UTF-16BE", "UTF-32LE", "UTF-32BE"])
def test_wide_text_is_known_with_and_without_a_mark(tmp_path: Path, encoding: str, text: str) -> None:
    assert wide_encoding(text.encode(encoding)) == encoding
    marked = f"\ufeff{text}".encode(encoding)
    assert wide_encoding(marked) == encoding[:6]
    path = tmp_path / "a.tsv"
    path.write_bytes(marked)
    with pytest.raises(UsageError, match=f"a.tsv: its content is {encoding[:6]}; convert it: iconv -f"):
        read_text(path)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"a",
        b"\0\0",
        b"A word.\n" * 9,
        "Слово.".encode(),
        b"A null\0 here and \0there.\n" * 9,
        b"\xe9t\xe9",
    ],
    ids=["empty", "short", "nulls", "ascii", "cyrillic", "some-nulls", "latin-1"],
)
def test_other_text_is_not_taken_for_wide(data: bytes) -> None:
    assert wide_encoding(data) == ""


@pytest.mark.parametrize(
    ("head", "words"),
    [
        (b"\xff\xff\xff\xff\x10\0\0\0", "an Arrow stream, as datasets saves it"),
        (b"Obj\x01\x04\x14avro.codec", "an Avro file"),
        (b"ORC\x0a\x00", "an ORC file"),
        (b"\x7fELF\x02\x01\x01" + bytes(9) + b"\xe8\x03", "binary data"),
        (b"RIFF\x24\x80\0\0WAVEfmt \x10\0\0\0\xff\xfe", "binary data"),
        ("Ships\0 \u2013 ".encode() * 60, ""),  # UTF-8 may have nulls; its sample ends inside a character
        (b"caf\xe9", ""),
    ],
)
def test_binary_data_are_no_text(head: bytes, words: str) -> None:
    assert archive_of(head) == words
