"""What a preparation would do, without writing anything that stays: counts, shards, bytes and time."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shoal.data.images.headers import BadImage
from shoal.data.images.prepare import ImagePrepareConfig, check_totals
from shoal.data.images.reencode import check_pillow, reencode
from shoal.data.images.shard_worker import num_shards, read_image
from shoal.data.images.sources import TRAIN, ImageSource, Listing, Totals, write_listing
from shoal.data.process_pool import num_cores

_TRIED = 64
_MEMBER_BYTES = 512 + 256
"""Header of a member of a tar, and half a block on average to fill its last."""
_GIB, _MIB = 1 << 30, 1 << 20


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What would come out. Bytes and seconds are estimates from the images that were tried.

    ``tried``, ``changed`` and ``bad`` are counts of training images; the first bad one is named.
    """

    totals: dict[str, Totals]
    num_shards: dict[str, int]
    shard_bytes: int
    seconds: float
    processes: int
    tried: int
    changed: int
    bad: int
    bad_name: str

    def lines(self) -> Iterator[str]:
        """Yield the report, line by line."""
        for split, found in self.totals.items():
            yield (
                f"{split}: {found.num_images:,} images of {len(found.class_counts):,} classes, "
                f"{_size(found.num_bytes)}, {self.num_shards[split]:,} shards"
            )
        bad = f", {self.bad} cannot be read (such as {self.bad_name})" if self.bad else ""
        yield f"of {self.tried} training images tried, {self.changed} are encoded again{bad}"
        yield (
            f"about {_size(self.shard_bytes)} of shards, {max(self.seconds, 1):,.0f} s with {self.processes} "
            "processes, if the disk keeps up; nothing was written"
        )


def dry_run(source: ImageSource, config: ImagePrepareConfig) -> DryRun:
    """List the source and try some of its images.

    Raises:
        UsageError: the source cannot be used.
        ShoalError: it cannot be read.
    """
    check_pillow()
    with tempfile.TemporaryDirectory(prefix="shoal-dry-run-") as name:
        folder = Path(name)
        totals = {
            split: write_listing(source.images(split), folder, split, num_classes=len(source.classes))
            for split in source.splits
        }
        check_totals(source, totals)
        listing = Listing(folder, TRAIN)
        chosen = np.unique(np.linspace(0, len(listing) - 1, _TRIED).astype(int))
        images = [listing.image(number) for number in chosen]
        listing.close()
    before = after = changed = 0
    bad: list[str] = []
    begin_s = time.process_time()
    for image in images:
        before += image.size
        try:
            data = read_image(image)
            jpeg = reencode(data, config.encoding).jpeg
        except BadImage:
            bad.append(image.name)
            continue
        after += len(jpeg) + 2 * _MEMBER_BYTES
        changed += jpeg is not data
    total_bytes = sum(found.num_bytes for found in totals.values())
    scale = total_bytes / max(before, 1)
    processes = config.processes or num_cores()
    return DryRun(
        totals=totals,
        num_shards={
            split: num_shards(found.num_images, found.num_bytes, config.shard_bytes)
            for split, found in totals.items()
        },
        shard_bytes=round(after * scale),
        seconds=(time.process_time() - begin_s) * scale / processes,
        processes=processes,
        tried=len(images),
        changed=changed,
        bad=len(bad),
        bad_name=bad[0] if bad else "",
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:,.1f} GiB" if num_bytes >= _GIB else f"{num_bytes / _MIB:,.1f} MiB"
