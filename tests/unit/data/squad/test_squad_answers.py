"""Answers against a plain transcription of the rules, over all pairs of tokens."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from squad_cases import make_data, words_tokenizer

from shoal.data.squad.answers import choose_answers
from shoal.data.squad.config import AnswerConfig, WindowConfig
from shoal.data.squad.features import SquadFeatures, make_features
from shoal.data.squad.score import score_squad
from shoal.errors import ShoalError, UsageError


def make_windows(**config: int) -> SquadFeatures:
    texts = ["a b c d e f g h i j k l m", "n o p", "q r s t u v w x y z a b", "", "c c c c"]
    data = make_data(*((text, "z z", None) for text in texts))
    return make_features(data, words_tokenizer(), WindowConfig(max_seq_length=11, doc_stride=2, **config))


def as_1_1(features: SquadFeatures) -> SquadFeatures:
    questions = tuple(replace(question, is_impossible=False) for question in features.data.questions)
    return replace(features, data=replace(features.data, version="1.1", questions=questions))


def by_the_rules(
    features: SquadFeatures, starts: np.ndarray, ends: np.ndarray, config: AnswerConfig
) -> tuple[dict[str, str], dict[str, list[str]], dict[str, float]]:
    """Every pair of tokens of every window, one after the other."""
    predictions, nbest, odds = {}, {}, {}
    for k, question in enumerate(features.data.questions):
        windows = [w for w in range(len(features)) if features.question[w] == k]
        words = features.data.paragraphs[question.paragraph].split()
        seen: dict[str, float] = {}
        found, null = [], math.inf
        for w in windows:
            at, begin = int(features.bounds[w]), int(features.context_begin[w])
            first, length = int(features.context_first[w]), int(features.context_length[w])
            null = min(null, float(starts[at]) + float(ends[at]))
            here_starts, here_ends = (
                [float(x[at + begin + t]) for t in range(length)] for x in (starts, ends)
            )
            best_starts = sorted(range(length), key=lambda t: -here_starts[t])[: config.n_best]
            best_ends = sorted(range(length), key=lambda t: -here_ends[t])[: config.n_best]
            for s in best_starts:
                for e in best_ends:
                    token = first + s

                    def context(v: int, token: int = token) -> float:
                        f, n = int(features.context_first[v]), int(features.context_length[v])
                        return min(token - f, f + n - 1 - token) + 0.01 * n if f <= token < f + n else -1.0

                    if max(windows, key=context) != w:
                        continue
                    if s <= e < s + config.max_answer_length:
                        text = " ".join(words[token : first + e + 1])
                        found.append((here_starts[s] + here_ends[e], text))
        for score, text in sorted(found, key=lambda entry: -entry[0]):
            if text not in seen and len(seen) < config.n_best:
                seen[text] = score
        best = next(iter(seen), "")
        odds[question.id] = null - seen.get(best, 0.0)
        predictions[question.id] = best
        nbest[question.id] = list(seen)
        if features.data.version == "2.0":
            predictions[question.id] = "" if odds[question.id] > config.null_threshold else best
            nbest[question.id] = sorted({**seen, "": null}, key=lambda t: -{**seen, "": null}[t])
    return predictions, nbest, odds


@pytest.mark.parametrize(("n_best", "max_answer_length"), [(20, 30), (3, 2), (1, 1)])
@pytest.mark.parametrize("version", ["1.1", "2.0"])
def test_all_pairs(version: str, n_best: int, max_answer_length: int) -> None:
    features = make_windows() if version == "2.0" else as_1_1(make_windows())
    config = AnswerConfig(n_best=n_best, max_answer_length=max_answer_length)
    outcomes = set()
    for seed in range(10):
        starts, ends = np.random.default_rng(seed).normal(size=(2, len(features.tokens))).astype(np.float32)
        starts[features.bounds[:-1]] += 2.0
        ours = choose_answers(features, starts, ends, config)
        predictions, nbest, odds = by_the_rules(features, starts, ends, config)
        assert ours.predictions == predictions
        assert {name: [entry["text"] for entry in listed] for name, listed in ours.nbest.items()} == nbest
        assert ours.null_odds == (odds if version == "2.0" else {})
        for name, listed in ours.nbest.items():
            scores = [entry["start_logit"] + entry["end_logit"] for entry in listed]
            weights = np.exp(np.array(scores) - max(scores, default=0.0))
            assert [e["probability"] for e in listed] == pytest.approx((weights / weights.sum()).tolist()), (
                name
            )
        outcomes |= {(bool(text), name) for name, text in ours.predictions.items()}
    if version == "2.0":
        assert {found for found, _ in outcomes} == {True, False}
    assert (False, "q3") in outcomes and (True, "q3") not in outcomes  # an empty paragraph has no span


def logits_for(features: SquadFeatures, window: int, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
    starts, ends = np.zeros((2, len(features.tokens)), dtype=np.float32)
    starts[features.bounds[window] + first], ends[features.bounds[window] + last] = 5.0, 4.0
    return starts, ends


def test_the_null_threshold_is_a_bound_that_may_be_reached() -> None:
    data = make_data(("a b c", "z", "b"))
    features = make_features(data, words_tokenizer(), WindowConfig())
    starts, ends = logits_for(features, 0, 4, 4)
    starts[0] = 11.0  # no answer: 11, the best span: 9
    for threshold, answer in ((2.0, "b"), (1.9, ""), (0.0, "")):
        chosen = choose_answers(features, starts, ends, AnswerConfig(null_threshold=threshold))
        assert chosen.predictions == {"q0": answer}
        assert chosen.null_odds == {"q0": 2.0}
    assert AnswerConfig().null_threshold == 0  # as Google's and transformers' scripts


def test_question_and_special_tokens_are_no_answers() -> None:
    data = make_data(("a b c", "z", "b"))
    features = make_features(data, words_tokenizer(), WindowConfig())
    starts, ends = logits_for(features, 0, 1, 6)  # the question, the last [SEP]
    starts[5], ends[5] = 1.0, 1.0
    answers = choose_answers(features, starts, ends, AnswerConfig())
    assert answers.predictions == {"q0": "c"}


def test_right_logits_score_100() -> None:
    texts = ("a b c d e f g h", "i j k l m n o p q", "r s t")
    data = make_data(*zip(texts, "zzz", ("c d", "p", None), strict=True))
    features = make_features(data, words_tokenizer(), WindowConfig(max_seq_length=9, doc_stride=2))
    starts, ends = np.zeros((2, len(features.tokens)))
    starts[features.bounds[:-1] + features.start] = ends[features.bounds[:-1] + features.end] = 9.0
    answers = choose_answers(features, starts, ends, AnswerConfig())
    scores = score_squad(data, answers.predictions, null_odds=answers.null_odds, null_threshold=2.0)
    assert (scores.official["exact"], scores.official["f1"]) == (100.0, 100.0)


def test_wrong_values() -> None:
    features = make_windows()
    good, bad = np.zeros((2, len(features.tokens)))
    bad[features.bounds[-2]] = np.nan
    with pytest.raises(ShoalError, match="end_logits of question 'q4' are not finite; the model"):
        choose_answers(features, good, bad, AnswerConfig())
    with pytest.raises(UsageError, match=r"start_logits \(3,\) must be one for each of"):
        choose_answers(features, good[:3], good, AnswerConfig())
    options: list[tuple[dict[str, Any], str]] = [
        ({"n_best": 0}, "n_best 0 must be at least 1"),
        ({"max_answer_length": 0}, "max_answer_length 0 must be at least 1"),
        ({"null_threshold": math.nan}, "null_threshold must be a number"),
    ]
    for settings, message in options:
        with pytest.raises(UsageError, match=message):
            AnswerConfig(**settings)
