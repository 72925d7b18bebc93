"""Scores a file of predictions: what ``shoal evaluate squad`` does."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from shoal.data.squad.files import (
    Version,
    describe_misplaced,
    read_null_odds,
    read_predictions,
    read_squad,
    shorten,
    write_json,
)
from shoal.data.squad.score import score_squad


def evaluate(
    data: Path,
    predictions: Path,
    *,
    null_odds: Path | None,
    null_threshold: float,
    version: Version | None,
    out: Path | None,
) -> str:
    """Return the scores as the official script's JSON; what is odd about the files goes to stderr.

    Raises:
        UsageError: a file is not what it should be, or the files do not belong together.
        ShoalError: ``out`` cannot be written.
    """
    squad = read_squad(data, misplaced="keep")
    scores = score_squad(
        squad,
        read_predictions(predictions),
        null_odds=read_null_odds(null_odds) if null_odds is not None else None,
        null_threshold=null_threshold,
        version=version,
    )
    if line := describe_misplaced(squad):
        print(f"shoal: {line}", file=sys.stderr)
    for names, what in (
        (scores.missing, "questions have no prediction and count as wrong"),
        (scores.unknown, "predictions are for questions that the data does not have and do not count"),
    ):
        if names:
            print(f"shoal: {predictions}: {len(names)} {what} ({shorten(names)})", file=sys.stderr)
    if out is not None:
        write_json(out, scores.official())
    return json.dumps(scores.official(), indent=2)
