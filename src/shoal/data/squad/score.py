"""Computes exact match and F1 of SQuAD by the official rules.

The rules are those of the organisers' evaluate-v1.1.py and evaluate-v2.0.py (Rajpurkar et al., arXiv
1606.05250 and 1806.03822). They differ: 2.0 ignores gold answers that are empty once normalised and takes
"" as the only gold if none is left; its F1 of two empty texts is 1 (in 1.1 it is 0). A question that a file
of predictions lacks counts as wrong in 1.1; 2.0 leaves it out (its script then fails where it counts
questions with and without answers). In the scores of a run it counts as wrong.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shoal.atomic_io import write_json
from shoal.data.bad_entries import BadEntries
from shoal.data.squad.dataset import (
    Question,
    SquadData,
    Version,
    read_null_odds,
    read_predictions,
    read_squad,
    shorten,
)
from shoal.data.text.text_scores import normalise_answer, token_f1
from shoal.errors import UsageError

Missing = Literal["wrong", "left out"]


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Scores of a file of predictions."""

    official: dict[str, Any]
    """The object that the official script prints, with its keys."""
    missing: tuple[str, ...]
    """Questions without a prediction."""
    unknown: tuple[str, ...]
    """Predictions for questions that the data does not have; they do not count."""


def score_squad(
    data: SquadData,
    predictions: Mapping[str, str],
    *,
    null_odds: Mapping[str, float] | None = None,
    null_threshold: float = 1.0,
    version: Version | None = None,
    missing_are: Missing = "wrong",
) -> Scores:
    """Score predictions.

    Args:
        null_odds: for each question, the odds that it has no answer; gives the best thresholds.
        null_threshold: questions with higher odds count as unanswered, as in the official script; 2.0 only.
        version: the rules; default: those of the data.
        missing_are: how questions without a prediction count.

    Raises:
        UsageError: the predictions are for other data, null odds are missing or come with the rules of 1.1,
            or these rules meet a question without an answer.
    """
    version = version or data.version
    known = {question.id for question in data.questions}
    missing = tuple(q.id for q in data.questions if q.id not in predictions)
    if len(missing) == len(data.questions):
        raise UsageError(
            f"{data.path}: none of its {len(data.questions)} questions is among the {len(predictions)} "
            "predictions; their ids must be those of the data"
        )
    unknown = tuple(name for name in predictions if name not in known)
    questions = [q for q in data.questions if missing_are == "wrong" or q.id in predictions]
    raw = {
        question.id: _compare(data, question, predictions.get(question.id), version) for question in questions
    }
    if version == "1.1":
        if null_odds is not None:
            raise UsageError("null odds count by the rules of 2.0 only; leave them out")
        part = _part(raw, list(raw))
        official = {"exact_match": part["exact"], "f1": part["f1"]}
        return Scores(official=official, missing=missing, unknown=unknown)
    final, best = dict(raw), dict[str, float]()
    if null_odds is not None:
        if absent := [name for name in known & predictions.keys() if name not in null_odds]:
            raise UsageError(
                f"the null odds lack questions that have a prediction: {shorten(sorted(absent))}"
            )
        for question in questions:
            if question.id in predictions and null_odds[question.id] > null_threshold:
                final[question.id] = (float(not question.answers),) * 2
        for metric, name in enumerate(("best_exact", "best_f1")):
            best[name], best[f"{name}_thresh"] = _best_threshold(
                questions, predictions, null_odds, raw, metric
            )
    official = _part(final, list(final))
    for prefix, has_answer in (("HasAns_", True), ("NoAns_", False)):
        if names := [question.id for question in questions if bool(question.answers) == has_answer]:
            official |= {prefix + key: value for key, value in _part(final, names).items()}
    return Scores(official=official | best, missing=missing, unknown=unknown)


def _compare(
    data: SquadData, question: Question, prediction: str | None, version: Version
) -> tuple[float, float]:
    """Return exact match and F1 of one prediction."""
    golds = [normalise_answer(answer.text) for answer in question.answers]
    if version == "2.0":
        golds = [gold for gold in golds if gold] or [""]
    if not golds:
        raise UsageError(
            f"{data.path}: question {question.id!r} has no answer, which the rules of 1.1 do not know; "
            "score by those of 2.0"
        )
    if prediction is None:
        return 0.0, 0.0
    words = normalise_answer(prediction)
    f1 = max(token_f1(words.split(), gold.split()) for gold in golds)
    if version == "2.0" and not words:
        f1 = float(words in golds)
    return float(words in golds), f1


def _part(scores: Mapping[str, tuple[float, float]], names: Sequence[str]) -> dict[str, Any]:
    """Return the scores of some questions, in percent."""
    total = len(names)
    exact, f1 = (100.0 * sum(scores[name][k] for name in names) / total for k in (0, 1))
    return {"exact": exact, "f1": f1, "total": total}


def _best_threshold(
    questions: Sequence[Question],
    predictions: Mapping[str, str],
    null_odds: Mapping[str, float],
    scores: Mapping[str, tuple[float, float]],
    metric: int,
) -> tuple[float, float]:
    """Return the best score of any threshold, in percent, and the threshold.

    Tries them from all unanswered upwards.
    """
    # questions of equal odds keep the order of their file, as in the official script
    file_order = {name: k for k, name in enumerate(null_odds)}
    answered = [question for question in questions if question.id in predictions]
    answered.sort(key=lambda question: (null_odds[question.id], file_order[question.id]))
    score = best = float(sum(not question.answers for question in answered))
    threshold = 0.0
    for question in answered:
        if question.answers:
            score += scores[question.id][metric]
        elif predictions[question.id]:
            score -= 1
        if score > best:
            best, threshold = score, null_odds[question.id]
    return 100.0 * best / len(questions), threshold


def evaluate(
    data: Path,
    predictions: Path,
    *,
    null_odds: Path | None,
    null_threshold: float,
    version: Version | None,
    out: Path | None,
    bad: BadEntries | None = None,
) -> str:
    """Return the scores as the official script's JSON; print remarks about the files on stderr.

    Raises:
        UsageError: a file is not what it should be, or the files do not belong together.
        ShoalError: ``out`` cannot be written.
    """
    squad = read_squad(data, purpose="score", bad=bad)
    rules = version or squad.version
    missing_are: Missing = "wrong" if rules == "1.1" else "left out"
    scores = score_squad(
        squad,
        read_predictions(predictions),
        null_odds=read_null_odds(null_odds) if null_odds is not None else None,
        null_threshold=null_threshold,
        version=rules,
        missing_are=missing_are,
    )
    official = scores.official
    if scores.missing:
        official = {**official, f"missing_{missing_are.replace(' ', '_')}": len(scores.missing)}
    for line in squad.remarks():
        print(f"shoal: {line}", file=sys.stderr)
    for names, remark in (
        (scores.missing, f"questions have no prediction and are {missing_are}, by the rules of {rules}"),
        (scores.unknown, "predictions are for questions that the data does not have and do not count"),
    ):
        if names:
            print(f"shoal: {predictions}: {len(names)} {remark} ({shorten(names)})", file=sys.stderr)
    if out is not None:
        write_json(out, official)
    return json.dumps(official, indent=2)
