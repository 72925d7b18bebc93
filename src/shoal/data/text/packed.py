"""Decompresses ``.gz``, ``.bz2`` and ``.zst`` in blocks, whatever the size of the file.

Files of several members, one after the other (``pigz``, ``lbzip2``, ``pzstd``, ``cat a.gz b.gz``), are read
to their end.
"""

from __future__ import annotations

import bz2
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shoal.errors import UsageError, import_extra

_BLOCK_BYTES = 64 << 10
"""Compressed bytes that are decompressed together: with them grows what is in memory."""
_GZIP = 31
"""``wbits`` of zlib for a window of 32 KiB in gzip's format."""


def _zstd() -> Any:
    library = import_extra("zstandard", "corpora", "files in .zst need zstandard")
    return library.ZstdDecompressor(max_window_size=1 << 31).decompressobj()


_DECODERS: dict[str, Callable[[], Any]] = {
    ".gz": lambda: zlib.decompressobj(_GZIP),
    ".bz2": bz2.BZ2Decompressor,
    ".zst": _zstd,
}
PACKINGS = tuple(_DECODERS)
"""Suffixes of compressed files."""


def split_packing(name: str) -> tuple[str, str]:
    """Return ``name`` without the suffix of its compression, and this suffix.

    Example:
        >>> split_packing("dump.xml.bz2"), split_packing("verse.txt")
        (('dump.xml', '.bz2'), ('verse.txt', ''))
    """
    packing = next((suffix for suffix in PACKINGS if name.endswith(suffix)), "")
    return name.removesuffix(packing), packing


def unpacked_blocks(
    path: Path, packing: str, advance: Callable[[int], None] = lambda num_bytes: None
) -> Iterator[bytes]:
    """Yield the content of a compressed file, some blocks of it at a time.

    Args:
        path: the compressed file.
        packing: one of :data:`PACKINGS`.
        advance: called with the number of compressed bytes of each block.

    Raises:
        UsageError: the file is not in this format, is damaged or cut short; a package is missing.
        OSError: it cannot be read.
    """
    decoder = _DECODERS[packing]()
    with path.open("rb") as file:
        while data := file.read(_BLOCK_BYTES):
            advance(len(data))
            while data:
                if decoder.eof:
                    decoder = _DECODERS[packing]()
                try:
                    content = decoder.decompress(data)
                except Exception as error:  # OSError, zlib.error, ZstdError: each library has its own
                    raise UsageError(
                        f"{path}: is damaged, or not compressed as {packing} ({error}); get it again, or "
                        "rename it"
                    ) from None
                if content:
                    yield content
                data = decoder.unused_data if decoder.eof else b""
    if not decoder.eof and path.stat().st_size:
        raise UsageError(f"{path}: was cut short, its compressed data has no end; get it again")


def peek(path: Path, packing: str, num_bytes: int) -> bytes:
    """Return at most the first ``num_bytes`` of the content of a file, compressed or (``""``) not.

    Raises:
        UsageError: as :func:`unpacked_blocks`.
        OSError: it cannot be read.
    """
    if not packing:
        with path.open("rb") as file:
            return file.read(num_bytes)
    found = b""
    for block in unpacked_blocks(path, packing):
        found += block
        if len(found) >= num_bytes:
            break
    return found[:num_bytes]
