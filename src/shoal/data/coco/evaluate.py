"""Scores files of results: what ``shoal evaluate coco`` does."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shoal.data.coco.annotations import CocoAnnotations, read_annotations
from shoal.data.coco.bad import OnBad
from shoal.data.coco.results import KINDS, CocoResults, Kind, read_results
from shoal.data.coco.score import CocoScore, overlaps_of, summarise
from shoal.data.files import write_atomically
from shoal.errors import UsageError

_WORDS: dict[Kind, str] = {"bbox": "boxes", "segm": "masks"}


def evaluate(annotations: Path, results: Sequence[Path], *, on_bad: OnBad, out: Path | None) -> str:
    """Return the official tables of boxes, of masks or of both, over all images of the annotations.

    What was skipped goes to stderr, one line a kind.

    Raises:
        UsageError: a file is not what it should be, or the files do not belong together.
        ShoalError: faster-coco-eval is not installed, or ``out`` cannot be written.
    """
    if not results:
        raise UsageError("no file of results is given (--results FILE...)")
    truth = read_annotations(annotations, on_bad=on_bad, boxes="keep")
    found = read_results(results, truth, on_bad=on_bad)
    if not found.detections:
        raise UsageError(
            f"{', '.join(map(str, results))}: no result that can be scored, so it cannot be told whether "
            "boxes or masks are meant (all figures of a model that finds nothing are 0)"
        )
    bad = [truth.bad, *found.bad]
    for line in (line for entries in bad for line in entries.lines()):
        print(f"shoal: {line}", file=sys.stderr)
    scores = [score_results(truth, found, kind) for kind in KINDS if kind in found.detections]
    if out is not None:
        tree = as_tree(truth, scores)
        tree["skipped"] = {str(entries.path): entries.counts for entries in bad if entries.counts}
        write_atomically(out, json.dumps(tree, indent=2).encode() + b"\n")
    return "\n\n".join(f"{_WORDS[score.kind]} ({score.kind})\n{score.table()}" for score in scores)


def score_results(truth: CocoAnnotations, found: CocoResults, kind: Kind) -> CocoScore:
    """Return the figures of one kind, in this process alone."""
    return summarise(truth, [overlaps_of(truth, found.detections.get(kind, {}), kind)], kind)


def as_tree(truth: CocoAnnotations, scores: Sequence[CocoScore]) -> dict[str, Any]:
    """Return the figures of boxes and masks, in full precision and by category, as JSON can hold them."""
    tree: dict[str, Any] = {score.kind: dict(score.figures) for score in scores}
    tree["by_category"] = [_of_category(truth, scores, category) for category in truth.categories]
    return tree


def _of_category(truth: CocoAnnotations, scores: Sequence[CocoScore], category: int) -> dict[str, Any]:
    figures = {score.kind: score.by_category[category] for score in scores if category in score.by_category}
    return {"id": category, "name": truth.categories[category], "AP": figures}
