"""Changes inputs of a fuzzer by their form: a value of a JSON tree, a header of a tar, bytes before packing.

Changed bytes seldom pass a checksum or a parser; a change of the form itself reaches what comes after it.
"""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
import random
import tarfile
from collections.abc import Callable
from typing import Any

MOST_BYTES = 1 << 16
"""Of an input: findings should be small."""

_VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2**31,
    2**63,
    -(2**63) - 1,
    10**30,
    0.5,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "a",
    "1",
    "-1",
    "1e400",
    "\x00",
    "\ud800",
    "é" * 50,
    "../x",
    "/x",
    "nan",
    [],
    {},
    [[]],
    [{}],
    {"": 0},
    [None],
    [1, 2],
    ["a"],
    {"counts": "", "size": [1, 1]},
    {"size": [2**40, 2**40], "counts": [2**62]},
)
_TOKENS = (
    b"\t",
    b"\n",
    b"\r",
    b"\r\n",
    b'"',
    b",",
    b"<page>",
    b"</page>",
    b"<text>",
    b"</text>",
    b"[[",
    b"]]",
    b"{{",
    b"}}",
    b"{|",
    b"|}",
    b"<ref>",
    b"&lt;",
    b"&#0;",
    b"&x;",
    b"<!--",
    b"-->",
    b"\x00",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b" = x = \n",
    b"0",
    b"1e999",
    b"-",
    b"'''",
    b"==",
    "é".encode(),
    b"\xe9",
    b"[http://a",
    b"<![CDATA[",
    b"<!DOCTYPE",
)


def change_bytes(data: bytes, rng: random.Random) -> bytes:
    """Replace, remove, repeat or insert a piece."""
    at = rng.randrange(len(data) + 1)
    end = min(len(data), at + rng.choice((1, 1, 2, 4, 8, 64)))
    if rng.random() < 0.1:
        return data[:at]
    new = rng.choice(
        (rng.randbytes(end - at), b"", data[at:end] * 2, rng.choice(_TOKENS), b"\xff" * (end - at))
    )
    return data[:at] + new + data[end:]


def change_tree(tree: Any, rng: random.Random) -> Any:
    """Return a JSON value with one place changed; the value itself may be changed too."""
    places: list[tuple[Any, Any]] = []

    def collect(value: Any) -> None:
        keys = (
            value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        )
        for key in keys:
            places.append((value, key))
            collect(value[key])

    collect(tree)
    if not places or rng.random() < 0.02:
        return rng.choice((rng.choice(_VALUES), [tree], {"a": tree}))
    holder, key = rng.choice(places)
    other, name = rng.choice(places)
    kind = rng.randrange(7)
    if kind == 0:
        del holder[key]
    elif kind == 1 and isinstance(holder, list):
        holder.insert(key, json.loads(json.dumps(holder[key])))
    elif kind == 2:
        holder[key] = json.loads(json.dumps(other[name]))
    elif kind == 3:
        holder[key] = rng.choice(([holder[key]], {"a": holder[key]}, str(holder[key])))
    elif kind == 4 and isinstance(holder, dict):
        holder[rng.choice(("", "id", f"{key}s", "\ud800"))] = holder.pop(key)
    else:
        holder[key] = rng.choice(_VALUES)
    return tree


def _json(data: bytes, rng: random.Random) -> bytes:
    tree = json.loads(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        tree = change_tree(tree, rng)
    return json.dumps(tree, ensure_ascii=rng.random() < 0.7).encode("utf-8", "surrogatepass")


def _json_lines(data: bytes, rng: random.Random) -> bytes:
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    lines[at] = _json(lines[at], rng)
    return b"\n".join(lines)


def _tar(data: bytes, rng: random.Random) -> bytes:
    """Change a header, and make its checksum right."""
    block = bytearray(data)
    heads = [at for at in range(0, len(data) - 511, 512) if data[at + 257 : at + 262] == b"ustar"]
    at = rng.choice(heads)
    first, size = rng.choice(((0, 100), (124, 12), (156, 1), (265, 32), (345, 155)))
    value = rng.choice(
        (rng.randbytes(size), b"\xff" * size, b"\x80" + bytes(size - 1), b"x", b"L", b"7" * size)
    )
    block[at + first : at + first + min(size, len(value))] = value[:size]
    block[at + 148 : at + 156] = b" " * 8
    block[at + 148 : at + 156] = b"%06o\0 " % sum(block[at : at + 512])
    return bytes(block)


def pack(data: bytes, packing: str) -> bytes:
    """Compress ``data`` as the suffix says."""
    if packing == ".zst":
        import zstandard

        return zstandard.ZstdCompressor().compress(data)
    packers = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
    return packers[packing](data)


def _packed(packing: str) -> Callable[[bytes, random.Random], bytes]:
    def change(data: bytes, rng: random.Random) -> bytes:
        piece = rng.randbytes(1) * rng.choice((0, 1, 1000, 1 << 20))
        return rng.choice(
            (data + pack(piece, packing), pack(piece, packing) + data, data + data[: len(data) // 2])
        )

    return change


def _parquet(data: bytes, rng: random.Random) -> bytes:
    """Change the rows, and with them the types of columns."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [change_tree(row, rng) for row in pq.read_table(io.BytesIO(data)).to_pylist()]
    if not all(isinstance(row, dict) for row in rows):
        raise TypeError("a row of a table has names")
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), out, row_group_size=rng.choice((1, 100)))
    return out.getvalue()


FORMS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "bytes": change_bytes,
    "text": change_bytes,
    "json": _json,
    "jsonl": _json_lines,
    "tar": _tar,
    "parquet": _parquet,
    **{packing: _packed(packing) for packing in (".gz", ".bz2", ".xz", ".zst")},
}


def change(data: bytes, form: str, rng: random.Random) -> bytes:
    """Return an input like ``data``: mostly of its form, sometimes with changed bytes."""
    if rng.random() < 0.8:
        try:
            return FORMS[form](data, rng)[:MOST_BYTES]
        except (ValueError, TypeError, IndexError, OverflowError, RecursionError, tarfile.TarError, OSError):
            pass  # it is not of this form any more, or what is made has none
        except Exception as error:
            if type(error).__module__.partition(".")[0] != "pyarrow":
                raise
    return change_bytes(data, rng)[:MOST_BYTES]
