"""Writes files that are either complete or absent: temporary name, fsync, rename.

It also locks files, and opens folders that only this user may write to, for what is trusted by its name.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import fcntl
import hashlib
import json
import os
import re
import stat
import sys
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from shoal.errors import ShoalError, UsageError, cannot_read

PARTIAL = ".partial"
"""Suffix of a file that is being written; one left behind by a kill is overwritten by the next run."""

MAX_WHOLE_BYTES = 64 << 20
"""Limit of what is read or decompressed into memory as a whole."""

TO_UTF8 = "convert the file from its encoding, such as Windows': iconv -f WINDOWS-1252 -t UTF-8 OLD > NEW"
"""Remedy for a text in another encoding."""

_BUFFER_BYTES = 1 << 20
_HEAD_BYTES = 64 << 10
_SAMPLE_BYTES = 512
_ORDER_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",  # before that of UTF-16, which it begins with
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
_NULLS_OF_UTF16 = 0.03
"""Share of nulls in UTF-16 at least, of the blanks alone; and at most among nulls at the other places."""
_ARCHIVES = {
    b"PK\x03\x04": "a zip",
    b"PK\x05\x06": "an empty zip",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"Rar!\x1a\x07": "a rar archive",
    b"\x1f\x8b": "compressed by gzip",
    b"BZh": "compressed by bzip2",
    b"\xfd7zXZ\x00": "compressed by xz",
    b"\x28\xb5\x2f\xfd": "compressed by zstd",
    b"\x5d\x00\x00": "compressed by lzma",
    b"\x04\x22\x4d\x18": "compressed by lz4",
    b"\x1f\x9d": "compressed by compress",
    b"%PDF-": "a PDF",
    b"\x89HDF": "an HDF5 file",
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"\xff\xff\xff\xff": "an Arrow stream, as datasets saves it",
    b"ORC": "an ORC file",
    b"Obj\x01": "an Avro file",
    b"SQLite format 3": "a database of SQLite",
    b"{\\rtf": "an RTF document",
    b"\xd0\xcf\x11\xe0": "a document of Microsoft Office",
    b"\xff\xd8\xff": "a JPEG image",
    b"\x89PNG": "a PNG image",
    b"\x93NUMPY": "an array of NumPy",
    b"\x80\x04\x95": "a pickle of Python",
    b"\x80\x05\x95": "a pickle of Python",
}
_POINTER = b"version https://git-lfs"
_TAR_MAGIC = slice(257, 262), b"ustar"
_CPIO = re.compile(rb"07070[127][0-9A-Fa-f]{70}")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


def write_error(path: Path, error: OSError) -> ShoalError:
    """Return the error to raise when writing ``path`` failed, with a remedy if the disk is full."""
    if error.errno in _FULL:
        return ShoalError(
            f"{path}: no space left to write it ({error.strerror}); its unfinished part was removed and "
            "finished files were kept: free some space or choose another folder, then run the command again"
        )
    return ShoalError(f"{path}: cannot be written: {error.strerror or error}")


def publish(partial: Path, final: Path) -> None:
    """Rename a finished temporary file so that a crash leaves either no file or the whole one.

    The caller has already flushed and fsynced ``partial``.
    """
    partial.replace(final)
    sync_folder(final.parent)


def sync_folder(path: Path) -> None:
    """Flush the names of a folder's files to disk."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def write_atomically(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path``; the old file stays until the new one is on the disk.

    Raises:
        ShoalError: the disk is full or the folder cannot be written.
    """
    with AtomicFile(path) as file:
        file.write(data)
        file.close()
        file.publish()


def write_json(path: Path, tree: Mapping[str, Any]) -> None:
    """Write ``tree`` to ``path`` as :func:`write_atomically` does, for readers too.

    Raises:
        ShoalError: the disk is full or the folder cannot be written.
    """
    write_atomically(path, json.dumps(tree, indent=2).encode() + b"\n")


def read_whole(path: Path) -> bytes:
    """Return the bytes of a small file; refuse a large one, which was given by mistake.

    Raises:
        OSError: it cannot be read.
        ShoalError: it has more than ``MAX_WHOLE_BYTES``.
    """
    with path.open("rb") as file:
        data = file.read(MAX_WHOLE_BYTES + 1)
    if len(data) > MAX_WHOLE_BYTES:
        raise ShoalError(
            f"{path} has more than {MAX_WHOLE_BYTES:,} bytes, which is too large for such a file; is it the "
            "one that was meant?"
        )
    return data


def read_text(path: Path, *, keep_wrong: bool = False) -> str:
    """Return the text of a user's file in UTF-8, without a byte order mark.

    Args:
        path: the file.
        keep_wrong: keep bytes that are not UTF-8 as Python's ``surrogateescape`` does, for a reader of rows
            that leaves out those rows (:func:`shoal.data.bad_entries.wrong_byte`).

    Raises:
        UsageError: it cannot be read, is an archive or UTF-16, is not UTF-8 and must be, or is empty.
    """
    try:
        data = path.read_bytes()
        refuse_binary(path, data)
        text = data.decode("utf-8-sig", "surrogateescape" if keep_wrong else "strict")
    except OSError as error:
        raise UsageError(cannot_read(path, error)) from None
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        at = len(data) - len(error.object) + error.start  # a mark at the beginning was cut off
        raise not_utf8(f"{path}, line {line}", data[at], at) from None
    if not text.strip():
        raise UsageError(f"{path}: the file is empty")
    return text


def not_utf8(location: str, byte: int, position: int) -> UsageError:
    """Return the error for a byte that is not UTF-8, at an offset in bytes."""
    return UsageError(f"{location}: {byte:#04x}, byte {position + 1} of the file, is not UTF-8; {TO_UTF8}")


def refuse_binary(path: Path | str, head: bytes) -> None:
    """Check that a file is a text in which UTF-8 may be expected: no archive, and no UTF-16 or UTF-32.

    Characters of two or four bytes could pass as UTF-8 with nulls.

    Args:
        path: the file, for the message.
        head: the first bytes of its content; a longer text is looked at in part.

    Raises:
        UsageError: it is an archive, another binary format, or by its byte order mark or the places of its
            nulls UTF-16 or UTF-32.
    """
    refuse_pointer(path, head)
    if kind := archive_of(head):
        raise UsageError(f"{path}: its content is {kind} and no text; unpack or convert it")
    if encoding := wide_encoding(head[:_HEAD_BYTES]):
        raise UsageError(
            f"{path}: its content is {encoding}; convert it: iconv -f {encoding} -t UTF-8 OLD > NEW"
        )


def is_pointer(head: bytes) -> bool:
    """Return whether a file is the pointer that Git LFS leaves in its place, by its first bytes."""
    return head.startswith(_POINTER)


def refuse_pointer(path: Path | str, head: bytes) -> None:
    """Check that a file is itself there, and not the pointer that Git LFS leaves in its place.

    Raises:
        UsageError: it is such a pointer.
    """
    if is_pointer(head):
        raise UsageError(f"{path}: is the pointer of Git LFS to the file; get the file: git lfs pull")


def archive_of(head: bytes) -> str:
    """Return in words what the content of a file is if it is an archive or a binary format, else ``""``.

    Example:
        >>> archive_of(b"PK\\x03\\x04..."), archive_of(b"Packed once.")
        ('a zip', '')
    """
    span, magic = _TAR_MAGIC
    if head[span] == magic or _is_old_tar(head):
        return "a tar"
    if _CPIO.match(head):
        return "a cpio archive"
    known = next((words for magic, words in _ARCHIVES.items() if head.startswith(magic)), "")
    return known or ("binary data" if _is_binary(head[:_SAMPLE_BYTES]) else "")


def _is_binary(head: bytes) -> bool:
    """Return whether bytes have nulls and are of no encoding: UTF-8 may have either, other text no nulls."""
    if b"\0" not in head or wide_encoding(head):
        return False
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return True
    return False


def _is_old_tar(head: bytes) -> bool:
    """Return whether a tar begins so by its checksum: those from before POSIX have no magic number."""
    try:
        tarfile.TarInfo.frombuf(head[: tarfile.BLOCKSIZE], "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return False
    return True


def wide_encoding(head: bytes) -> str:
    """Return the encoding of a text that begins with ``head`` if it is UTF-16 or UTF-32, else ``""``.

    Example:
        >>> wide_encoding("Word.".encode("utf-16-le")), wide_encoding(b"Word.")
        ('UTF-16LE', '')
    """
    marked = next((name for mark, name in _ORDER_MARKS.items() if head.startswith(mark)), "")
    if marked:
        return marked
    nulls = [head[offset::4].count(0) for offset in range(4)]
    most = 0.9 * (len(head) // 4)
    if 0 < most < min(nulls[2:]) and nulls[0] < most / 2:
        return "UTF-32LE"
    if 0 < most < min(nulls[:2]) and nulls[3] < most / 2:
        return "UTF-32BE"
    even, odd = nulls[0] + nulls[2], nulls[1] + nulls[3]
    few, many = sorted((even, odd))
    if many < 2 or many < _NULLS_OF_UTF16 * len(head) or few > many * _NULLS_OF_UTF16:
        return ""
    return "UTF-16LE" if odd > even else "UTF-16BE"


def take_lock(file: int, path: Path, *, wait: bool) -> bool:
    """Lock an open file until it is closed, among threads and processes; return whether it is held.

    Some file systems of clusters have no locks (NFS without a lock daemon, Lustre without ``flock``). There
    nothing is locked, which is said, and the lock counts as held.

    Args:
        file: its descriptor.
        path: its name.
        wait: whether to wait for another process that holds it.

    Raises:
        ShoalError: it cannot be locked for another reason.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise write_error(path, error) from error
        print(
            f"{path}: not locked, since its file system has no locks ({error.strerror}); let no other "
            "process write there",
            file=sys.stderr,
        )
    return True


def open_private_folder(folder: Path, remedy: str) -> int:
    """Return a descriptor of a folder that only this user may write to; make the folder if there is none.

    What is in it is accessed through ``/proc/self/fd``, so that a user who may write to the folder above
    cannot replace it. A link is refused.

    Args:
        remedy: end of the error's message.

    Raises:
        UsageError: as :func:`check_private`.
        OSError: it cannot be made or opened.
    """
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        check_private(folder, os.fstat(descriptor), remedy)
    except UsageError:
        os.close(descriptor)
        raise
    return descriptor


def check_private(path: Path, state: os.stat_result, remedy: str) -> None:
    """Check that no other user may write to a file or folder.

    Raises:
        UsageError: it belongs to another user, or others may write to it.
    """
    mode = stat.S_IMODE(state.st_mode)
    if state.st_uid != os.geteuid() or mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UsageError(
            f"{path} has the mode {mode:04o} and belongs to the user with the id {state.st_uid}, but only "
            f"this one ({os.geteuid()}) may write there; {remedy}"
        )


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class AtomicFile:
    """Writes a file under a temporary name, and computes its size and SHA-256.

    ``close`` and then ``publish`` give it its name; leaving a ``with`` block before that (an exception)
    removes the temporary file.
    """

    def __init__(self, path: Path) -> None:
        """Create the temporary file beside ``path``.

        Raises:
            ShoalError: it cannot be created.
        """
        self.path = path
        self.num_bytes = 0
        self._partial = path.with_name(path.name + PARTIAL)
        self._hash = hashlib.sha256()
        try:
            self._file = self._partial.open("wb", buffering=_BUFFER_BYTES)
        except OSError as error:
            raise write_error(path, error) from error

    def write(self, data: bytes | memoryview) -> None:
        """Append ``data``.

        Raises:
            ShoalError: the disk is full; the temporary file is removed.
        """
        with self._removed_on_error():
            self._file.write(data)
        self._hash.update(data)
        self.num_bytes += len(data)

    def close(self) -> dict[str, Any]:
        """Fsync the file and return its ``{"bytes": int, "sha256": str}``.

        Raises:
            ShoalError: the disk is full; the temporary file is removed.
        """
        with self._removed_on_error():
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
        return {"bytes": self.num_bytes, "sha256": self._hash.hexdigest()}

    def publish(self) -> None:
        """Give the closed file its name.

        Raises:
            ShoalError: the folder cannot be written; the temporary file is removed.
        """
        with self._removed_on_error():
            publish(self._partial, self.path)

    def discard(self) -> None:
        """Remove the temporary file; does nothing after ``publish``."""
        with contextlib.suppress(OSError):  # closing flushes, and the disk may be full
            self._file.close()
        with contextlib.suppress(OSError):
            self._partial.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _removed_on_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.discard()
            raise write_error(self.path, error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.discard()
