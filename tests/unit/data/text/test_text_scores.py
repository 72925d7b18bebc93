"""Scores of texts against hand-made figures and against the packages."""

from __future__ import annotations

import pytest
import sacrebleu
from rouge_score.rouge_scorer import RougeScorer

from shoal.data.text.text_scores import (
    METRICS,
    normalise_answer,
    require_packages,
    score_names,
    score_texts,
    token_f1,
)
from shoal.errors import UsageError

WRITTEN = ["The cat sat on the mat.", "a storm ended . many trees fell", "", "Nothing of it"]
WANTED = ["the cat sat on a mat", "the storm has ended . trees fell", "", "quite another text"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Quick, brown\tfox!", "quick brown fox"),
        ("an a the", ""),
        ("U.S. $5-a-day", "us 5aday"),
        ("théâtre—A", "théâtre—"),  # a dash that is not ASCII stays, and is a word boundary for the article
        ("“the”", "“ ”"),
        ("", ""),
        ("İstanbul", "i̇stanbul"),
        ("\u00a0x\u2003y\u3000", "x y"),
    ],
)
def test_normalisation(text: str, expected: str) -> None:
    assert normalise_answer(text) == expected


def test_f1_counts_repeated_words() -> None:
    assert token_f1(["a", "b", "b", "c"], ["b", "b", "d"]) == pytest.approx(
        2 * (2 / 4) * (2 / 3) / (2 / 4 + 2 / 3)
    )
    assert token_f1(["x"], ["y"]) == token_f1([], []) == token_f1([], ["x"]) == 0.0


def test_exact_match_and_f1_follow_the_rules_of_squad() -> None:
    scores = score_texts(WRITTEN, WANTED, ["exact_match", "f1"])
    assert scores["exact_match"] == 50.0  # the first (articles and case do not count) and the empty one
    second = 2 * 4 / (5 + 5)  # storm, ended, trees, fell of five words each
    assert scores["f1"] == pytest.approx(100 * (1 + second + 1 + 0) / 4)


def test_rouge_and_bleu_are_those_of_the_packages() -> None:
    scores = score_texts(WRITTEN, WANTED, ["bleu", "rouge"])
    assert tuple(scores) == score_names(("bleu", "rouge")) == ("rouge1", "rouge2", "rougeLsum", "bleu")
    wanted = sacrebleu.corpus_bleu(WRITTEN, [WANTED], tokenize="intl", force=True).score
    assert scores["bleu"] == wanted > 0
    scorer = RougeScorer(["rougeLsum"], use_stemmer=True)
    lines = [[text.replace(" . ", " .\n") for text in texts] for texts in (WANTED, WRITTEN)]
    each = [scorer.score(*pair)["rougeLsum"].fmeasure for pair in zip(*lines, strict=True)]
    assert scores["rougeLsum"] == pytest.approx(100 * sum(each) / 4)
    assert scores["rouge1"] > scores["rouge2"] > 0


def test_right_texts_have_all_points() -> None:
    same = ["one two three four five", "six seven eight nine ten"]
    assert score_texts(same, same) == pytest.approx(dict.fromkeys(score_names(METRICS), 100.0))


def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "sacrebleu", None)
    require_packages(["rouge", "f1"])
    with pytest.raises(
        UsageError, match=r"BLEU needs sacrebleu.*pip install 'rouge-score>=0.1.2' 'sacrebleu>=2.5'"
    ):
        require_packages(["bleu"])
