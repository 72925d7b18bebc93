"""COCO's figures of what all workers found: overlaps are measured by each, summed up by the main one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields

from shoal.data.coco.annotations import CocoAnnotations
from shoal.data.coco.results import Detection, Kind
from shoal.data.coco.score import CocoScore, Overlaps, overlaps_of, summarise
from shoal.train.gather import gather_flat
from shoal.train.world import World


def score_across_workers(
    world: World, annotations: CocoAnnotations, detections: Mapping[int, Sequence[Detection]], kind: Kind
) -> CocoScore | None:
    """Return the figures on the main worker, ``None`` on the others; to the last digit those of one worker.

    Masks stay where they are; scores, areas and overlaps travel, some 50 bytes a detection.

    Args:
        detections: what this worker found, by the id of the image. An image belongs to one worker.

    Raises:
        UsageError: two workers bring detections of the same image (on the main one); see
            :func:`~shoal.data.coco.score.overlaps_of` too.
    """
    own = overlaps_of(annotations, detections, kind)
    columns = {field.name: gather_flat(world, getattr(own, field.name)) for field in fields(Overlaps)}
    parts = [
        Overlaps(**{name: column[rank] for name, column in columns.items() if column is not None})
        for rank in range(world.num_workers)
        if world.is_main
    ]
    return summarise(annotations, parts, kind) if world.is_main else None
