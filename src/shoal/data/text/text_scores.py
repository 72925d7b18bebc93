"""Scores generated texts against their references: exact match, token F1, ROUGE and BLEU.

Exact match and token F1 compare normalised words, as the rules of SQuAD do. ROUGE is that of the package
rouge-score and BLEU that of sacrebleu, with the settings of T5's own evaluation (Raffel et al. 2020;
``t5/evaluation/metrics.py``). All scores are percentages.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, get_args

from shoal.errors import import_extra

Metric = Literal["exact_match", "f1", "rouge", "bleu"]
METRICS: tuple[Metric, ...] = get_args(Metric)

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ROUGE = ("rouge1", "rouge2", "rougeLsum")
NAMES: Mapping[str, tuple[str, ...]] = {
    "exact_match": ("exact_match",),
    "f1": ("f1",),
    "rouge": _ROUGE,
    "bleu": ("bleu",),
}
"""The names of the scores of each metric."""


def score_names(metrics: Collection[str]) -> tuple[str, ...]:
    """Return the names of the scores of these metrics."""
    return tuple(name for metric in METRICS if metric in metrics for name in NAMES[metric])


def require_packages(metrics: Collection[str]) -> None:
    """Import the packages of these metrics.

    Raises:
        UsageError: one is not installed.
    """
    for metric, load in (("rouge", _rouge_scorer), ("bleu", _sacrebleu)):
        if metric in metrics:
            load()


def score_texts(
    predictions: Sequence[str], references: Sequence[str], metrics: Collection[str] = METRICS
) -> dict[str, float]:
    """Return the scores of these metrics by name, in percent.

    ``exact_match``, ``f1`` and the F-measures ``rouge1``, ``rouge2`` and ``rougeLsum`` are means over the
    texts; ``bleu`` is that of the whole corpus.

    Args:
        predictions: one or more.
        references: one for each prediction.

    Raises:
        UsageError: a package is not installed.

    Example:
        >>> score_texts(["The cat sat."], ["a cat sat down"], ["exact_match", "f1"])
        {'exact_match': 0.0, 'f1': 80.0}
    """
    pairs = list(zip(predictions, references, strict=True))
    compute: dict[str, Callable[[], dict[str, float]]] = {
        "exact_match": lambda: {"exact_match": _mean([_is_same(*pair) for pair in pairs])},
        "f1": lambda: {"f1": _mean([_f1(*pair) for pair in pairs])},
        "rouge": lambda: _rouge(pairs),
        "bleu": lambda: {"bleu": _bleu(predictions, references)},
    }
    return {
        name: score for metric in METRICS if metric in metrics for name, score in compute[metric]().items()
    }


def normalise_answer(text: str) -> str:
    """Return the text in lower case, without ASCII punctuation, articles and superfluous white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def token_f1(prediction: Sequence[str], gold: Sequence[str]) -> float:
    """Return the F1 of two bags of words; 0 if they share none."""
    num_same = sum((Counter(prediction) & Counter(gold)).values())
    if num_same == 0:
        return 0.0
    precision, recall = num_same / len(prediction), num_same / len(gold)
    return 2 * precision * recall / (precision + recall)


def _mean(values: Sequence[float]) -> float:
    return 100.0 * sum(values) / len(values)


def _is_same(prediction: str, reference: str) -> float:
    return float(normalise_answer(prediction) == normalise_answer(reference))


def _f1(prediction: str, reference: str) -> float:
    """Return the F1 of the words; 1 of two empty texts, as by the rules of SQuAD 2.0."""
    words, expected = (normalise_answer(text).split() for text in (prediction, reference))
    return token_f1(words, expected) if words or expected else 1.0


def _rouge(pairs: Sequence[tuple[str, str]]) -> dict[str, float]:
    scorer = _rouge_scorer().RougeScorer(_ROUGE, use_stemmer=True)
    scores = [scorer.score(_sentences(reference), _sentences(prediction)) for prediction, reference in pairs]
    return {name: _mean([score[name].fmeasure for score in scores]) for name in _ROUGE}


def _sentences(text: str) -> str:
    """Return the text with each sentence on a line of its own, as rougeLsum reads them."""
    return text.replace(" . ", " .\n")


def _bleu(predictions: Sequence[str], references: Sequence[str]) -> float:
    score = _sacrebleu().corpus_bleu(list(predictions), [list(references)], tokenize="intl", force=True)
    return float(score.score)


def _rouge_scorer() -> Any:
    return import_extra("rouge_score.rouge_scorer", "scores", "ROUGE needs rouge-score")


def _sacrebleu() -> Any:
    return import_extra("sacrebleu", "scores", "BLEU needs sacrebleu")
