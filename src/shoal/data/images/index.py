"""The index of an image shard: where in the tar each image lies, its label and its size in pixels.

``NAME.index`` is nothing but records of ``RECORD``, one an image, in the order of the tar. It is all that
random access needs: a reader maps or fetches the bytes ``[offset, offset + size)`` of ``NAME.tar``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.data.files import write_atomically
from shoal.errors import ShoalError

RECORD = np.dtype(
    [
        ("offset", "<i8"),
        ("size", "<i4"),
        ("label", "<i4"),
        ("width", "<i4"),
        ("height", "<i4"),
        ("extra_offset", "<i8"),
        ("extra_size", "<i4"),
        ("reserved", "<i4"),
    ]
)
"""``offset`` and ``size``: the bytes of the JPEG within the tar; ``width`` and ``height`` in pixels.

``label`` is -1 where there is none. ``extra_*`` is the image's last other member: its annotations (``.json``)
where it has some, else its label (``.cls``)."""

Records = npt.NDArray[np.void]


def read_index(path: Path) -> Records:
    """Return the records of an index, ``RECORD[num_images]``.

    Raises:
        ShoalError: the file cannot be read, or is not a whole number of records.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ShoalError(f"{path}: the index of the shard cannot be read: {error.strerror}") from error
    if len(data) % RECORD.itemsize:
        raise ShoalError(
            f"{path} is not a whole number of records of {RECORD.itemsize} bytes: it has {len(data):,}; "
            "copy it again or prepare the images again"
        )
    return np.frombuffer(data, dtype=RECORD)


def write_index(path: Path, records: npt.NDArray[Any]) -> None:
    """Write records of ``RECORD`` atomically.

    Raises:
        ShoalError: the disk is full or the folder cannot be written.
    """
    write_atomically(path, records.astype(RECORD, copy=False).tobytes())
