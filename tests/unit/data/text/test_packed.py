"""Compressed files of every kind give their bytes, and damaged ones one error."""

from __future__ import annotations

import bz2
import gzip
import lzma
import random
import struct
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from shoal.data.text import packed
from shoal.data.text.packed import PACKINGS, peek, split_packing, unpacked_blocks
from shoal.errors import UsageError

PACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": lambda data: gzip.compress(data, mtime=0),
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
}


def some_bytes(count: int) -> bytes:
    return random.Random(count).randbytes(count // 2) + b"to be or not to be\n" * (count // 38)


def test_every_packing_is_tested() -> None:
    assert set(PACK) == set(PACKINGS)
    assert split_packing("a.b.txt.gz") == ("a.b.txt", ".gz")
    assert split_packing("zst") == ("zst", "")
    assert split_packing("A.JSONL.GZ") == ("A.JSONL", ".gz")


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("num_members", [1, 2, 5])
def test_all_members_are_read_and_every_byte_is_reported(
    tmp_path: Path, packing: str, num_members: int
) -> None:
    parts = [some_bytes(70_000 * number) for number in range(num_members)]
    path = tmp_path / f"a{packing}"
    path.write_bytes(b"".join(map(PACK[packing], parts)))
    seen: list[int] = []
    assert b"".join(unpacked_blocks(path, packing, seen.append)) == b"".join(parts)
    assert sum(seen) == path.stat().st_size
    assert peek(path, packing, 1000) == b"".join(parts)[:1000]
    assert peek(path, "", 7) == path.read_bytes()[:7]
    assert b"".join(unpacked_blocks(path, "", seen.append)) == path.read_bytes()
    assert sum(seen) == 2 * path.stat().st_size


@pytest.mark.parametrize("packing", PACKINGS)
def test_a_member_that_ends_with_a_block(
    tmp_path: Path, packing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = PACK[packing](b"first " * 9), PACK[packing](b"second")
    path = tmp_path / f"a{packing}"
    path.write_bytes(first + second)
    monkeypatch.setattr(packed, "_BLOCK_BYTES", len(first))
    assert b"".join(unpacked_blocks(path, packing)) == b"first " * 9 + b"second"


@pytest.mark.parametrize("packing", PACKINGS)
def test_damage_is_one_error_that_names_the_file(tmp_path: Path, packing: str) -> None:
    data = PACK[packing](some_bytes(300_000))
    path = tmp_path / f"a{packing}"
    for wrong, words in [(data[:-20], "cut short"), (b"plain text, no more", "not compressed as")]:
        path.write_bytes(wrong)
        with pytest.raises(UsageError, match=words) as caught:
            list(unpacked_blocks(path, packing))
        assert str(path) in str(caught.value)
    path.write_bytes(b"")
    assert list(unpacked_blocks(path, packing)) == []


def bombs() -> dict[str, bytes]:
    """Return 48 MiB of zeros in a few bytes."""
    zeros = bytes(1 << 20)
    gz, bz = zlib.compressobj(9, zlib.DEFLATED, 31), bz2.BZ2Compressor()
    gzipped = b"".join(gz.compress(zeros) for _ in range(48)) + gz.flush()
    block = struct.pack("<I", (128 << 10 << 3) | 2)[:3] + b"\0"  # of zstd: one byte, 128 KiB times
    last = struct.pack("<I", (128 << 10 << 3) | 3)[:3] + b"\0"
    return {
        ".gz": gzipped,
        ".bz2": b"".join(bz.compress(zeros) for _ in range(48)) + bz.flush(),
        ".zst": b"\x28\xb5\x2f\xfd\x00\x38" + block * 383 + last,  # a window of 128 KiB
    }


def test_a_few_bytes_that_stand_for_many_megabytes_take_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "_SUSPECT_BYTES", 32 << 20)
    for packing, bomb in bombs().items():
        path = tmp_path / f"a{packing}"
        path.write_bytes(bomb)
        tracemalloc.start()
        try:
            assert peek(path, packing, 4096) == bytes(4096)
            if packing != ".gz":
                with pytest.raises(UsageError, match=rf"^{path}: [\d,]+ compressed .* more than 5,000 times"):
                    sum(map(len, unpacked_blocks(path, packing)))
            else:
                assert sum(map(len, unpacked_blocks(path, packing))) == 48 << 20
            assert tracemalloc.get_traced_memory()[1] < 20 << 20, packing
        finally:
            tracemalloc.stop()


def test_a_window_that_takes_gigabytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.zst"
    path.write_bytes(b"\x28\xb5\x2f\xfd\x00" + bytes([(31 - 10) << 3]) + b"\x01\0\0")
    with pytest.raises(UsageError, match=rf"^{path}: .*window of at most 128 MiB .*unpack it"):
        peek(path, ".zst", 10)


def test_blocks_stay_small(tmp_path: Path) -> None:
    """Text is never in memory as a whole."""
    text = some_bytes(4 << 20)
    for packing, pack in PACK.items():
        path = tmp_path / f"a{packing}"
        path.write_bytes(pack(text))
        assert max(map(len, unpacked_blocks(path, packing))) < 3 << 20
