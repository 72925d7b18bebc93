"""Chooses answers from the logits of windows: n-best lists, null odds, predictions.

The rules are those of Google's run_squad of BERT. A span is a candidate if its ends are among the ``n_best``
starts and ends of its window, it is not too long, and no other window has more context around its first token
(which excludes windows that truncate the text before it). The score of "no answer" is the lowest score of CLS
in the windows of a question; it is the answer if it exceeds the best span by more than ``null_threshold``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal.data.squad.config import AnswerConfig
from shoal.data.squad.features import SquadFeatures
from shoal.errors import ShoalError, UsageError

FloatArray = npt.NDArray[np.floating[Any]]

_LENGTH_COUNTS = 0.01
"""Weight of a token of a window's length relative to one of context, in Google's rule."""


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Answers in the official formats, by question id."""

    predictions: dict[str, str]
    """The answer; empty for "no answer"."""
    nbest: dict[str, list[dict[str, Any]]]
    """Distinct texts of each question, best first: ``text``, ``probability`` among them, ``start_logit``,
    ``end_logit``."""
    null_odds: dict[str, float]
    """The score of "no answer" minus that of the best span (0 without any); in 2.0 only."""


@dataclass(frozen=True, slots=True)
class _Span:
    score: float
    start_logit: float
    end_logit: float
    first: int
    """Its first and last token in the paragraph."""
    last: int


def choose_answers(
    features: SquadFeatures, start_logits: FloatArray, end_logits: FloatArray, config: AnswerConfig
) -> Answers:
    """Choose an answer for every question; in 1.1 always a span if there is one.

    Args:
        start_logits, end_logits: of every token of every window, ``[T]`` like ``features.tokens``.

    Raises:
        UsageError: the number of logits is not that of the tokens.
        ShoalError: a logit is not finite.
    """
    for name, logits in (("start_logits", start_logits), ("end_logits", end_logits)):
        if logits.shape != features.tokens.shape:
            raise UsageError(f"{name} {logits.shape} must be one for each of {features.tokens.shape} tokens")
        if not np.isfinite(logits).all():
            window = int(np.searchsorted(features.bounds, np.argmin(np.isfinite(logits)), side="right")) - 1
            question = features.data.questions[features.question[window]]
            raise ShoalError(
                f"{name} of question {question.id!r} are not finite; the model has diverged or overflowed: "
                "evaluate an earlier checkpoint, or in a wider precision"
            )
    with_null = features.data.version == "2.0"
    first_window = np.searchsorted(features.question, np.arange(len(features.data.questions) + 1))
    predictions: dict[str, str] = {}
    nbest: dict[str, list[dict[str, Any]]] = {}
    null_odds: dict[str, float] = {}
    for k, question in enumerate(features.data.questions):
        windows = range(first_window[k], first_window[k + 1])
        spans = _spans(features, windows, start_logits, end_logits, config)
        listed = _with_texts(features, k, spans, config.n_best)
        best = listed[0][0] if listed else ""
        if with_null:
            at = features.bounds[first_window[k] : first_window[k + 1]]
            cls = at[int(np.argmin(start_logits[at] + end_logits[at]))]
            start, end = float(start_logits[cls]), float(end_logits[cls])
            null = _Span(start + end, start, end, -1, -1)
            odds = null.score - (listed[0][1].score if listed else 0.0)
            null_odds[question.id] = odds
            if odds > config.null_threshold:
                best = ""
            listed = sorted([*listed, ("", null)], key=lambda entry: -entry[1].score)
        predictions[question.id] = best
        nbest[question.id] = _described(listed)
    return Answers(predictions=predictions, nbest=nbest, null_odds=null_odds)


def _spans(
    features: SquadFeatures,
    windows: Sequence[int],
    start_logits: FloatArray,
    end_logits: FloatArray,
    config: AnswerConfig,
) -> list[_Span]:
    """Return the candidates of one question, best first; ties go to the earlier window and token."""
    kept = _windows_of_starts(features, windows)
    candidates: list[_Span] = []
    for w in windows:
        begin = int(features.bounds[w]) + int(features.context_begin[w])
        length, first = int(features.context_length[w]), int(features.context_first[w])
        starts, ends = start_logits[begin : begin + length], end_logits[begin : begin + length]
        best_starts = np.argsort(-starts, kind="stable")[: config.n_best]
        best_ends = np.argsort(-ends, kind="stable")[: config.n_best]
        best_starts = best_starts[kept[best_starts + first] == w]
        tokens = best_ends[None, :] - best_starts[:, None] + 1
        rows, columns = np.nonzero((tokens > 0) & (tokens <= config.max_answer_length))
        for s, e in zip(best_starts[rows].tolist(), best_ends[columns].tolist(), strict=True):
            start, end = float(starts[s]), float(ends[e])
            candidates.append(_Span(start + end, start, end, first + s, first + e))
    return sorted(candidates, key=lambda span: -span.score)


def _windows_of_starts(features: SquadFeatures, windows: Sequence[int]) -> npt.NDArray[np.int64]:
    """Return, for each token of a paragraph, the window in which it has the most context."""
    first, length = features.context_first[windows, None], features.context_length[windows, None]
    token = np.arange(int((first + length).max()))[None, :]
    left, right = token - first, first + length - 1 - token
    context = np.minimum(left, right) + _LENGTH_COUNTS * length
    best: npt.NDArray[np.int64] = np.argmax(np.where((left >= 0) & (right >= 0), context, -np.inf), axis=0)
    return best + windows[0]


def _with_texts(
    features: SquadFeatures, question: int, spans: Sequence[_Span], n_best: int
) -> list[tuple[str, _Span]]:
    """Return the best spans with distinct texts."""
    paragraph = features.data.questions[question].paragraph
    context = features.data.paragraphs[paragraph]
    offsets = features.offsets[features.paragraph_bounds[paragraph] :]
    listed: dict[str, _Span] = {}
    for span in spans:
        text = context[int(offsets[span.first, 0]) : int(offsets[span.last, 1])]
        if text and text not in listed:
            listed[text] = span
            if len(listed) == n_best:
                break
    return list(listed.items())


def _described(listed: Sequence[tuple[str, _Span]]) -> list[dict[str, Any]]:
    weights = [math.exp(span.score - listed[0][1].score) for _, span in listed]
    return [
        {
            "text": text,
            "probability": weight / sum(weights),
            "start_logit": span.start_logit,
            "end_logit": span.end_logit,
        }
        for (text, span), weight in zip(listed, weights, strict=True)
    ]
