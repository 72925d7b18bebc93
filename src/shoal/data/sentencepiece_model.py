"""Reads a sentencepiece ``.model`` file (protocol buffers) without the libraries that usually do.

Only what a tokenizer needs is decoded. Field numbers are those of ``sentencepiece_model.proto``:
ModelProto: 1 pieces, 2 trainer_spec, 3 normalizer_spec. SentencePiece: 1 piece, 2 score, 3 type.
TrainerSpec: 3 model_type. NormalizerSpec: 2 precompiled_charsmap.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import UsageError

NORMAL, UNKNOWN = 1, 2
UNIGRAM = 1
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True, kw_only=True)
class SentencepieceModel:
    """``pieces`` are (text, score, type) in the order of their ids; ``charsmap`` normalises characters."""

    pieces: tuple[tuple[str, float, int], ...]
    model_type: int
    charsmap: bytes


def read_sentencepiece(path: Path, data: bytes) -> SentencepieceModel:
    """Decode ``data``; ``path`` is only named in errors.

    Raises:
        UsageError: these bytes are no sentencepiece model.
    """
    pieces, charsmap = [], b""
    model_type: int | None = None
    try:
        for number, value in _fields(data):
            if number == 1 and isinstance(value, bytes):
                pieces.append(_piece(value))
            elif number == 2 and isinstance(value, bytes):
                model_type = next((v for n, v in _fields(value) if n == 3 and isinstance(v, int)), UNIGRAM)
            elif number == 3 and isinstance(value, bytes):
                charsmap = next((v for n, v in _fields(value) if n == 2 and isinstance(v, bytes)), b"")
    except (ValueError, IndexError, struct.error):
        pieces = []
    if not pieces or model_type is None:  # the trainer's part follows the pieces: without it the file is cut
        raise UsageError(f"{path}: is not a sentencepiece model, or it is damaged")
    return SentencepieceModel(pieces=tuple(pieces), model_type=model_type, charsmap=charsmap)


def _piece(data: bytes) -> tuple[str, float, int]:
    text, score, kind = "", 0.0, NORMAL
    for number, value in _fields(data):
        if number == 1 and isinstance(value, bytes):
            text = value.decode("utf-8")
        elif number == 2 and isinstance(value, bytes):
            (score,) = struct.unpack("<f", value)
        elif number == 3 and isinstance(value, int):
            kind = value
    return text, score, kind


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (field number, value) of one message; fixed-width values stay bytes."""
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        wire = key & 7
        if wire == _VARINT:
            value, position = _varint(data, position)
            yield key >> 3, value
            continue
        if wire == _BYTES:
            length, position = _varint(data, position)
        elif wire in (_FIXED64, _FIXED32):
            length = 8 if wire == _FIXED64 else 4
        else:
            raise ValueError(f"wire type {wire}")
        if position + length > len(data):
            raise ValueError("cut short")
        yield key >> 3, data[position : position + length]
        position += length


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
        if shift > 63:
            raise ValueError("number too long")
