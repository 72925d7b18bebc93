"""Estimates what a preparation would write, without writing it: counts, shards, bytes and time."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shoal.data.images.headers import BadImage
from shoal.data.images.prepare import ImagePrepareConfig, list_images
from shoal.data.images.reencode import check_pillow, reencode
from shoal.data.images.shard_worker import num_shards, read_image
from shoal.data.images.sources import TRAIN, ImageSource, Listing, Totals
from shoal.data.process_pool import num_cores

_TRIED = 64
_MEMBER_BYTES = 512 + 256
"""Header of a tar member, and half a block on average to pad its last one."""
_GIB, _MIB = 1 << 30, 1 << 20


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """The estimate. ``tried``, ``changed`` and ``bad`` are counts or names of training images."""

    totals: dict[str, Totals]
    num_shards: dict[str, int]
    shard_bytes: int
    seconds: float
    processes: int
    tried: int
    changed: int
    bad: list[str]

    def lines(self) -> Iterator[str]:
        """Yield the report, line by line."""
        for split, found in self.totals.items():
            yield (
                f"{split}: {found.num_images:,} images of {len(found.class_counts):,} classes, "
                f"{_size(found.num_bytes)}, {self.num_shards[split]:,} shards"
            )
        bad = f", {len(self.bad)} cannot be read (such as {self.bad[0]})" if self.bad else ""
        yield f"of {self.tried} training images tried, {self.changed} are encoded again{bad}"
        yield (
            f"about {_size(self.shard_bytes)} of shards, {max(self.seconds, 1):,.0f} s with {self.processes} "
            "processes, if the disk keeps up; nothing was written"
        )


def dry_run(source: ImageSource, config: ImagePrepareConfig) -> DryRun:
    """List the source, and read and re-encode some of its images.

    Raises:
        UsageError: the source cannot be used.
        ShoalError: it cannot be read.
    """
    check_pillow()
    with tempfile.TemporaryDirectory(prefix="shoal-dry-run-") as name:
        totals = list_images(source, Path(name))
        listing = Listing(Path(name), TRAIN)
        chosen = np.unique(np.linspace(0, len(listing) - 1, _TRIED).astype(int))
        images = [listing.image(number) for number in chosen]
        listing.close()
    after = changed = 0
    bad: list[str] = []
    begin_s = time.process_time()
    for image in images:
        try:
            data = read_image(image)
            jpeg = reencode(data, config.encoding).jpeg
        except BadImage:
            bad.append(image.name)
            continue
        after += len(jpeg) + 2 * _MEMBER_BYTES
        changed += jpeg is not data
    scale = sum(found.num_bytes for found in totals.values()) / max(sum(image.size for image in images), 1)
    processes = config.processes or num_cores()
    return DryRun(
        totals=totals,
        num_shards={s: num_shards(t.num_images, t.num_bytes, config.shard_bytes) for s, t in totals.items()},
        shard_bytes=round(after * scale),
        seconds=(time.process_time() - begin_s) * scale / processes,
        processes=processes,
        tried=len(images),
        changed=changed,
        bad=bad,
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:,.1f} GiB" if num_bytes >= _GIB else f"{num_bytes / _MIB:,.1f} MiB"
