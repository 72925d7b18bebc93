"""Decompresses ``.gz``, ``.bz2``, ``.xz`` and ``.zst`` in small pieces, whatever the size of the content.

A few compressed bytes may stand for gigabytes. No piece has more than 8 MiB, and a file whose content is out
of all proportion to its size is refused.

Files of several members, one after the other (``pigz``, ``lbzip2``, ``pzstd``, ``cat a.gz b.gz``), are read
to their end.
"""

from __future__ import annotations

import bz2
import lzma
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shoal.errors import UsageError, import_extra

_BLOCK_BYTES = 64 << 10
"""Compressed bytes that are read together."""
_PIECE_BYTES = 1 << 20
_ZSTD_INPUT_BYTES = 256
"""Compressed bytes that zstd gets at a time: it has no limit of its output, 128 KiB for 4 bytes at most."""
_ZSTD_WINDOW_BYTES = 128 << 20
"""As in the command zstd; a file's header asks for it."""
_XZ_MEMORY_BYTES = 256 << 20
"""Four times the memory that the command xz asks for at its highest level."""
_GZIP = 31
"""``wbits`` of zlib for a window of 32 KiB in gzip's format."""
_SUSPECT_BYTES, _MOST_RATIO = 256 << 20, 5_000
"""From this size on, content may not be larger than this many times the compressed bytes."""


def _zstd() -> Any:
    library = import_extra("zstandard", "corpora", "files in .zst need zstandard")
    return library.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES).decompressobj()


_DECODERS: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(_GZIP),
    ".bz2": bz2.BZ2Decompressor,
    ".xz": lambda: lzma.LZMADecompressor(memlimit=_XZ_MEMORY_BYTES),
    ".zst": _zstd,
}
PACKINGS = tuple(_DECODERS)
"""Suffixes of compressed files."""


def split_packing(name: str) -> tuple[str, str]:
    """Return ``name`` without the suffix of its compression, and this suffix in small letters.

    Example:
        >>> split_packing("dump.xml.bz2"), split_packing("verse.txt")
        (('dump.xml', '.bz2'), ('verse.txt', ''))
    """
    packing = next((suffix for suffix in PACKINGS if name.lower().endswith(suffix)), "")
    return name[: len(name) - len(packing)], packing


def unpacked_blocks(
    path: Path, packing: str, advance: Callable[[int], None] = lambda num_bytes: None
) -> Iterator[bytes]:
    """Yield the content of a file, compressed or not, in pieces.

    Args:
        path: the file.
        packing: one of :data:`PACKINGS`, or empty for none.
        advance: called with the number of bytes of each block as they are in the file.

    Raises:
        UsageError: the file is not in this format, is damaged or cut short, or its content is more than
            5,000 times as large; a package is missing.
        OSError: it cannot be read.
    """
    if not packing:
        with path.open("rb") as file:
            while data := file.read(_PIECE_BYTES):
                advance(len(data))
                yield data
        return
    decoder = _DECODERS[packing]()
    num_read = num_found = 0
    with path.open("rb") as file:
        while data := file.read(_ZSTD_INPUT_BYTES if packing == ".zst" else _BLOCK_BYTES):
            advance(len(data))
            num_read += len(data)
            while data:
                if decoder.eof:
                    decoder = _DECODERS[packing]()
                for piece in _pieces(path, packing, decoder, data):
                    num_found += len(piece)
                    if num_found > max(_SUSPECT_BYTES, _MOST_RATIO * num_read):
                        raise UsageError(
                            f"{path}: {num_read:,} compressed bytes have a content of more than "
                            f"{_MOST_RATIO:,} times as many, which no text has; unpack it if it is right"
                        )
                    yield piece
                data = decoder.unused_data if decoder.eof else b""
    if not decoder.eof and path.stat().st_size:
        raise UsageError(f"{path}: was cut short, its compressed data has no end; get it again")


def _pieces(path: Path, packing: str, decoder: Any, data: bytes) -> Iterator[bytes]:
    """Yield the content of compressed bytes, up to the end of their member."""
    limit = () if packing == ".zst" else (_PIECE_BYTES,)
    while True:
        try:
            piece = decoder.decompress(data, *limit)
        except Exception as error:  # noqa: BLE001  # OSError, zlib.error, ZstdError, …
            window = " with a window of at most 128 MiB" if packing == ".zst" else ""
            raise UsageError(
                f"{path}: is damaged, or not compressed as {packing}{window} ({error}); get it again, rename "
                "or unpack it"
            ) from None
        if piece:
            yield piece
        if decoder.eof or not limit or len(piece) < _PIECE_BYTES:
            return
        data = getattr(decoder, "unconsumed_tail", b"")  # of zlib; bz2 keeps its own


def peek(path: Path, packing: str, num_bytes: int) -> bytes:
    """Return at most the first ``num_bytes`` of the content of a file, compressed or (``""``) not.

    Raises:
        UsageError: as :func:`unpacked_blocks`.
        OSError: it cannot be read.
    """
    if not packing:
        with path.open("rb") as file:
            return file.read(num_bytes)
    content = b""
    for block in unpacked_blocks(path, packing):
        content += block
        if len(content) >= num_bytes:
            break
    return content[:num_bytes]
