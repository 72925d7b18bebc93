"""Estimates what a preparation would write, without writing it: counts, shards, bytes and time."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import numpy as np

from shoal.data.images.headers import BadImage
from shoal.data.images.prepare import ImagePrepareConfig, list_images, num_shards, read_image
from shoal.data.images.reencode import check_pillow, reencode
from shoal.data.images.sources import TRAIN, ImageSource, Listing, PackedSource
from shoal.env.machine import num_cores
from shoal.errors import UsageError
from shoal.formatting import plural, size

_TRIED = 64
_MEMBER_BYTES = 512 + 256
"""Header of a tar member, and half a block on average to pad its last one."""


def dry_run(source: ImageSource | PackedSource, config: ImagePrepareConfig) -> list[str]:
    """List the source, read and re-encode some of its images, and return the lines of the report.

    Raises:
        UsageError: the source cannot be used, or is packed.
        ShoalError: it cannot be read.
    """
    check_pillow()
    if isinstance(source, PackedSource):
        names = ", ".join(str(path) for path in source.files)
        raise UsageError(f"{names}: a dry run does not unpack; unpack it, or leave --dry-run out")
    with tempfile.TemporaryDirectory(prefix="shoal-dry-run-") as name:
        totals = list_images(source, Path(name))
        listing = Listing(Path(name), TRAIN)
        chosen = np.unique(np.linspace(0, len(listing) - 1, _TRIED).astype(int))
        images = [listing.image(number) for number in chosen]
    after = changed = 0
    bad: list[str] = []
    begin_s = time.process_time()
    for image in images:
        try:
            data = read_image(image)
            encoded = reencode(data, config, image.annotated_size).data
        except BadImage:
            bad.append(image.name)
            continue
        after += len(encoded) + 2 * _MEMBER_BYTES
        changed += encoded is not data
    scale = sum(total.num_bytes for total in totals.values()) / max(sum(image.size for image in images), 1)
    processes = config.processes or num_cores()
    seconds = max((time.process_time() - begin_s) * scale / processes, 1)
    unreadable = f", {len(bad)} cannot be read (such as {bad[0]})" if bad else ""
    return [
        *(
            f"{split}: {total.num_images:,} images of {len(total.class_counts):,} classes, "
            f"{size(total.num_bytes)}, "
            f"{plural(num_shards(total.num_images, total.num_bytes, config.shard_bytes), 'shard')}"
            for split, total in totals.items()
        ),
        f"of {len(images)} training images tried, {changed} are encoded again{unreadable}",
        f"about {size(after * scale)} of shards, {seconds:,.0f} s with {processes} processes, if the disk "
        "keeps up; nothing was written",
    ]
