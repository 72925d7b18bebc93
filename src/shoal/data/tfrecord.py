"""Writes documents and images as TFRecord, for ``tf.data.TFRecordDataset``: ``--container tfrecord``.

A file is a sequence of records: the length as little-endian uint64, its masked CRC32C, the data, their masked
CRC32C. The data are a ``tf.train.Example`` in protobuf's wire format:
https://www.tensorflow.org/tutorials/load_data/tfrecord describes both.

A document has two features of int64: ``input_ids``, its token ids, and ``sentence_lengths``, in tokens. An
image has those that TensorFlow's ImageNet has (:func:`image_record`). Its bytes end the example, so a reader
that knows where they are maps them, and does not parse the rest.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.native import crc32c

_LENGTH, _CRC = struct.Struct("<Q"), struct.Struct("<I")
_MASK_DELTA = 0xA282EAD8
HEAD_BYTES = _LENGTH.size + _CRC.size
"""Bytes of a record before its data."""
_VARINT_BYTES = 5
"""Bytes of the longest varint of 32 bits: seven bits in each."""
_FIRST, _SECOND, _THIRD = 0x0A, 0x12, 0x1A
"""Tags of length-delimited fields 1, 2 and 3."""


def document_record(tokens: npt.NDArray[Any], sentence_lengths: npt.NDArray[Any]) -> bytes:
    """Return the record of a document, given its token ids and the lengths of its sentences."""
    return record(example({"input_ids": tokens, "sentence_lengths": sentence_lengths}))


def image_record(
    name: str,
    data: bytes,
    *,
    label: int | None,
    width: int,
    height: int,
    annotations: bytes | None,
) -> tuple[bytes, int, int]:
    """Return the record of an image, and where in it its bytes and its annotations begin.

    The features are ``image/filename``, ``image/height``, ``image/width``, ``image/class/label`` if there is
    one, from 0, ``image/annotations`` if there are some, as JSON, and ``image/encoded``.
    """
    features: dict[str, npt.NDArray[Any] | bytes] = {
        "image/filename": name.encode("utf-8", "surrogateescape"),
        "image/height": np.array([height]),
        "image/width": np.array([width]),
    }
    if label is not None:
        features["image/class/label"] = np.array([label])
    if annotations is not None:
        features["image/annotations"] = annotations
    encoded = _entry("image/encoded", data)
    made = record(_field(_FIRST, b"".join([_entry(*each) for each in features.items()]) + encoded))
    end = len(made) - _CRC.size
    return made, end - len(data), end - len(encoded) - len(annotations or b"")


def check_head(head: bytes, num_bytes: int) -> bool:
    """Return whether ``head`` begins a record with so many bytes of data, and has the checksum of that."""
    wanted = _LENGTH.pack(num_bytes)
    return head == wanted + _CRC.pack(masked_crc32c(wanted))


def name_in(data: bytes) -> str:
    """Return the file's name in the beginning of the data of an image's record."""
    value = data
    for _ in range(2):  # Example.features, Features.feature
        value = _fields(value)[_FIRST]
    for tag in (_SECOND, _FIRST, _FIRST):  # the entry's value, Feature.bytes_list, BytesList.value
        value = _fields(value)[tag]
    return value.decode("utf-8", "surrogateescape")


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
    return _field(_FIRST, b"".join([_entry(*each) for each in features.items()]))  # Example.features


def _entry(name: str, values: npt.NDArray[Any] | bytes) -> bytes:
    """Return an entry of Features.feature: a name, and a list of int64 or of one text of bytes."""
    if isinstance(values, bytes):
        feature = _field(_FIRST, _field(_FIRST, values))  # Feature.bytes_list, BytesList.value
    else:
        feature = _field(_THIRD, _field(_FIRST, varints(values)))  # Feature.int64_list, Int64List.value
    return _field(_FIRST, _field(_FIRST, name.encode()) + _field(_SECOND, feature))


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


def _fields(data: bytes) -> dict[int, bytes]:
    """Return the first length-delimited field of each tag; the last one may be cut short."""
    found: dict[int, bytes] = {}
    at = 0
    while at < len(data):
        tag, at, size, shift = data[at], at + 1, 0, 0
        while at < len(data):
            digit, at = data[at], at + 1
            size |= (digit & 0x7F) << shift
            shift += 7
            if digit < 0x80:
                break
        found.setdefault(tag, data[at : at + size])
        at += size
    return found


def _field(tag: int, data: bytes) -> bytes:
    return bytes([tag]) + varints(np.array([len(data)])) + data
