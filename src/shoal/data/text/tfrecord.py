"""Writes documents as TFRecord, for ``tf.data.TFRecordDataset``: ``shoal prepare text --container tfrecord``.

A file is a sequence of records: the length as little-endian uint64, its masked CRC32C, the data, their masked
CRC32C. The data are a ``tf.train.Example`` in protobuf's wire format, with two features of int64:
``input_ids``, the token ids of a document, and ``sentence_lengths``, in tokens.
https://www.tensorflow.org/tutorials/load_data/tfrecord describes both.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.native import crc32c

_LENGTH, _CRC = struct.Struct("<Q"), struct.Struct("<I")
_MASK_DELTA = 0xA282EAD8
_VARINT_BYTES = 5
"""Bytes of the longest varint of 32 bits: seven bits in each."""
_FIRST, _SECOND, _THIRD = 0x0A, 0x12, 0x1A
"""Tags of length-delimited fields 1, 2 and 3."""


def document_record(tokens: npt.NDArray[Any], sentence_lengths: npt.NDArray[Any]) -> bytes:
    """Return the record of a document, given its token ids and the lengths of its sentences."""
    return record(example({"input_ids": tokens, "sentence_lengths": sentence_lengths}))


def record(data: bytes) -> bytes:
    """Return ``data`` as a record, with its length and checksums."""
    length = _LENGTH.pack(len(data))
    return length + _CRC.pack(masked_crc32c(length)) + data + _CRC.pack(masked_crc32c(data))


def masked_crc32c(data: bytes) -> int:
    """Return the CRC32C of ``data``, rotated by 15 bits and shifted, as TFRecord stores it."""
    value = crc32c(data)
    return ((value >> 15 | value << 17) + _MASK_DELTA) & 0xFFFFFFFF


def example(features: dict[str, npt.NDArray[Any]]) -> bytes:
    """Return a serialised ``tf.train.Example``.

    Args:
        features: lists of int64 by name; values are at least 0 and below 2**32.
    """
    entries = b""
    for name, values in features.items():
        numbers = _field(_THIRD, _field(_FIRST, varints(values)))  # Feature.int64_list, Int64List.value
        entries += _field(
            _FIRST, _field(_FIRST, name.encode()) + _field(_SECOND, numbers)
        )  # Features.feature
    return _field(_FIRST, entries)  # Example.features


def varints(values: npt.NDArray[Any]) -> bytes:
    """Return unsigned numbers below 2**32 in protobuf's variable-length form."""
    wide = values.astype(np.uint64)[:, None]
    shifts = 7 * np.arange(_VARINT_BYTES, dtype=np.uint64)
    rest = wide >> shifts
    begun = rest > 0
    begun[:, 0] = True  # a zero is one byte
    goes_on = np.zeros_like(begun)
    goes_on[:, :-1] = begun[:, 1:]
    digits = (rest & np.uint64(0x7F)).astype(np.uint8) | (goes_on.astype(np.uint8) << 7)
    return digits[begun].tobytes()


def _field(tag: int, data: bytes) -> bytes:
    return bytes([tag]) + varints(np.array([len(data)])) + data
