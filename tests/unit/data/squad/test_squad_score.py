"""The scorers: published figures, and the places where the official rules surprise."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from forked import shoal
from shoal.atomic_io import write_json
from shoal.data.squad.dataset import (
    Answer,
    Question,
    SquadData,
    Version,
    read_predictions,
    read_squad,
)
from shoal.data.squad.score import score_squad
from shoal.data.text.text_scores import normalise_answer, token_f1
from shoal.env.settings import test_data_dir as data_dir
from shoal.errors import UsageError


def real(name: str) -> Path:
    path = data_dir() / "squad" / name
    if not path.is_file():
        pytest.skip(f"no {name} in {data_dir()}/squad; set SHOAL_TEST_DATA")
    return path


def make_data(golds: dict[str, list[str]], version: Version = "2.0") -> SquadData:
    questions = tuple(
        Question(name, "?", 0, tuple(Answer(text, -1) for text in texts), not texts)
        for name, texts in golds.items()
    )
    return SquadData(
        path=Path("d.json"),
        version=version,
        paragraphs=("",),
        questions=questions,
    )


@pytest.mark.parametrize(
    ("system", "exact", "f1"), [("bert_ensemble", "74.8739", "86.3248"), ("match_lstm", "61.0924", "72.6672")]
)
def test_published_answers_to_1_1(system: str, exact: str, f1: str) -> None:
    """The published F1 was summed in float32, which shows in its last digit."""
    data = read_squad(real("xquad.en.json"), purpose="train")
    predictions = read_predictions(real(f"system_predictions/{system}.json"))
    scores = score_squad(data, predictions)
    assert data.version == "1.1" and len(data.questions) == 1190
    assert f"{scores.official['exact_match']:.4f}" == exact
    total, total32 = 0.0, np.float32(0)
    for question in data.questions:
        ours = normalise_answer(predictions.get(question.id, "")).split()
        best = max(token_f1(ours, normalise_answer(a.text).split()) for a in question.answers)
        total, total32 = total + best, total32 + np.float32(best)
    assert scores.official["f1"] == 100.0 * total / 1190
    assert f"{np.float32(100) * total32 / np.float32(1190):.4f}" == f1
    assert scores.official["f1"] == pytest.approx(float(f1), abs=1e-4)


def test_published_figures_of_2_0() -> None:
    data = read_squad(real("cs224n-dev-v2.0.json"), purpose="train")
    empty = score_squad(data, {q.id: "" for q in data.questions})
    assert f"{empty.official['exact']:.9f}" == f"{empty.official['f1']:.9f}" == "52.122408687"
    assert empty.official["NoAns_total"] == 3168 and empty.official["HasAns_f1"] == 0.0
    first = score_squad(data, {q.id: q.answers[0].text if q.answers else "" for q in data.questions})
    assert (first.official["exact"], first.official["f1"]) == (100.0, 100.0)


def test_the_best_of_several_golds_counts() -> None:
    data = make_data({"q": ["one two three", "two", "two"]}, "1.1")
    scores = score_squad(data, {"q": "the Two!"})
    assert scores.official == {"exact_match": 100.0, "f1": 100.0}
    assert score_squad(data, {"q": "one two"}).official == {"exact_match": 0.0, "f1": pytest.approx(80.0)}


def test_empty_texts_differ_between_the_rules() -> None:
    golds, answer = {"q": ["The", "x y"]}, {"q": "a"}  # both articles: empty once normalised
    old = score_squad(make_data(golds), answer, version="1.1").official
    new = score_squad(make_data(golds), answer, version="2.0").official
    assert (old["exact_match"], old["f1"]) == (100.0, 0.0)  # 1.1: equal, but no word in common
    assert (new["exact"], new["f1"]) == (0.0, 0.0)  # 2.0: that gold does not count beside another
    alone = score_squad(make_data({"q": ["The"]}), answer, version="2.0").official
    assert (alone["exact"], alone["f1"]) == (100.0, 100.0)
    assert "HasAns_f1" in alone and "NoAns_f1" not in alone  # it has an answer all the same


def test_missing_predictions_are_wrong_and_unknown_ones_do_not_count() -> None:
    data = make_data({"a": ["x"], "b": ["y"], "c": [], "d": []})
    scores = score_squad(data, {"a": "x", "c": "", "z": "?"})
    assert scores.missing == ("b", "d") and scores.unknown == ("z",)
    assert (scores.official["exact"], scores.official["total"]) == (50.0, 4)
    old = score_squad(make_data({"a": ["x"], "b": ["y"]}, "1.1"), {"a": "x"})
    assert old.official == {"exact_match": 50.0, "f1": 50.0}


def test_predictions_left_out_are_as_if_nobody_had_asked() -> None:
    golds = {"a": ["x y"], "b": ["y"], "c": [], "d": ["z"], "e": [], "f": ["w"]}
    predictions, odds = {"a": "x", "c": "no", "d": "z", "e": ""}, {"a": 0.5, "c": 0.7, "d": -2.0, "e": 1.0}
    asked = make_data({name: texts for name, texts in golds.items() if name in predictions}, "2.0")
    found = score_squad(make_data(golds), predictions, null_odds=odds, missing_are="left out")
    wanted = score_squad(asked, predictions, null_odds=odds)
    assert found.official == wanted.official and found.official["total"] == 4
    assert found.missing == ("b", "f")


def test_thresholds() -> None:
    """By hand: in the order of odds d(-2, right 1), a(0.5, f1 2/3), c(0.7, answered: -1), b(3, right)."""
    data = make_data({"a": ["x y"], "b": ["y"], "c": [], "d": ["z"], "e": []})
    predictions = {"a": "x", "b": "y", "c": "no", "d": "z", "e": ""}
    odds = {"d": -2.0, "a": 0.5, "c": 0.7, "e": 1.0, "b": 3.0}
    tree = score_squad(data, predictions, null_odds=odds).official
    assert tree["exact"] == pytest.approx(100 * 2 / 5)  # b is above 1.0: not answered, wrong
    assert tree["f1"] == pytest.approx(100 * (1 + 2 / 3 + 1) / 5)
    assert (tree["best_exact"], tree["best_exact_thresh"]) == (pytest.approx(100 * 3 / 5), -2.0)
    assert (tree["best_f1"], tree["best_f1_thresh"]) == (pytest.approx(100 * (2 + 1 + 2 / 3) / 5), 0.5)
    strict = score_squad(data, predictions, null_odds=odds, null_threshold=0.6)
    assert strict.official["f1"] == pytest.approx(100 * (1 + 2 / 3 + 1 + 1) / 5)
    reached = score_squad(data, predictions, null_odds=odds, null_threshold=3.0)
    assert reached.official["exact"] == pytest.approx(100 * 3 / 5)  # odds equal to the threshold: answered
    best = score_squad(data, predictions, null_odds={**odds, "b": 0.6}).official
    assert (best["best_f1_thresh"], best["best_exact_thresh"]) == (0.6, 0.6)


def test_no_threshold_helps_leaves_the_threshold_at_0() -> None:
    scores = score_squad(
        make_data({"a": ["x"], "b": []}), {"a": "?", "b": ""}, null_odds={"a": 0.1, "b": 0.2}
    )
    assert (scores.official["best_exact"], scores.official["best_exact_thresh"]) == (50.0, 0.0)


def test_files_that_do_not_belong_together() -> None:
    data = make_data({"a": ["x"], "b": []})
    with pytest.raises(UsageError, match="none of its 2 questions is among the 1 predictions"):
        score_squad(data, {"z": "x"})
    with pytest.raises(UsageError, match="null odds lack questions that have a prediction: b"):
        score_squad(data, {"a": "x", "b": ""}, null_odds={"a": 0.0})
    with pytest.raises(UsageError, match=r"question 'b' has no answer, which the rules of 1\.1 do not know"):
        score_squad(data, {"a": "x"}, version="1.1")
    with pytest.raises(UsageError, match=r"null odds count by the rules of 2\.0 only"):
        score_squad(make_data({"a": ["x"]}, "1.1"), {"a": "x"}, null_odds={"a": 0.0})


def test_the_command(tmp_path: Path) -> None:
    def score(*more: str) -> subprocess.CompletedProcess[str]:
        return shoal("evaluate", "squad", "--data", "d.json", *more, cwd=tmp_path)

    qas = [
        {"id": "a", "question": "?", "answers": [{"text": "Ada", "answer_start": 3}], "is_impossible": False},
        {"id": "b", "question": "?", "answers": [], "is_impossible": True},
    ]
    write_json(tmp_path / "d.json", {"data": [{"paragraphs": [{"context": "Ada", "qas": qas}]}]})
    write_json(tmp_path / "p.json", {"a": "ada", "z": ""})
    write_json(tmp_path / "o.json", {"a": -1.0})
    result = score("--predictions", "p.json", "--null-odds", "o.json", "--json", "out.json")
    assert result.returncode == 0, result.stderr
    tree = json.loads(result.stdout)
    assert tree == json.loads((tmp_path / "out.json").read_text())
    assert (tree["exact"], tree["HasAns_exact"], tree["best_f1_thresh"]) == (100, 100, -1)
    assert (tree["total"], tree["missing_left_out"]) == (1, 1) and "NoAns_exact" not in tree
    assert "1 answers do not stand at answer_start" in result.stderr
    assert "1 questions have no prediction and are left out, by the rules of 2.0 (b)" in result.stderr
    assert "1 predictions are for questions that the data does not have and do not count (z)" in result.stderr
    (tmp_path / "p.json").write_text('{"a": "x", "a": "y"}')
    wrong = score("--predictions", "p.json")
    assert wrong.returncode == 2 and "the key 'a' is there twice" in wrong.stderr
    assert "Traceback" not in wrong.stderr
