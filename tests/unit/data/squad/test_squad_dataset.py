"""Reading SQuAD's JSON files, good and bad."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from shoal.atomic_io import write_json
from shoal.data.squad.dataset import (
    Answer,
    Misplaced,
    describe_misplaced,
    read_null_odds,
    read_predictions,
    read_squad,
)
from shoal.errors import UsageError


def question(name: str, *answers: tuple[str, int], **more: Any) -> dict[str, Any]:
    listed = [{"text": text, "answer_start": start} for text, start in answers]
    return {"id": name, "question": f"Who is {name}?", "answers": listed, **more}


def squad_file(folder: Path, *qas: dict[str, Any], context: str = "Ada met Bob.") -> Path:
    path = folder / "data.json"
    tree = {"version": "x", "data": [{"title": "t", "paragraphs": [{"context": context, "qas": qas}]}]}
    path.write_text(json.dumps(tree), encoding="utf-8")
    return path


def test_what_is_read(tmp_path: Path) -> None:
    path = squad_file(tmp_path, question("a", ("Ada", 0), ("Bob", 8)), question("b", ("met", 4)))
    data = read_squad(path, misplaced="refuse")
    assert data.version == "1.1" and data.paragraphs == ("Ada met Bob.",) and not data.misplaced
    assert [(q.id, q.text, q.paragraph) for q in data.questions] == [
        ("a", "Who is a?", 0),
        ("b", "Who is b?", 0),
    ]
    assert data.questions[0].answers == (Answer("Ada", 0), Answer("Bob", 8))


def test_the_mark_or_a_question_without_answers_makes_it_2_0(tmp_path: Path) -> None:
    marked = squad_file(tmp_path, question("a", ("Ada", 0), is_impossible=False))
    assert read_squad(marked, misplaced="refuse").version == "2.0"
    assert read_squad(squad_file(tmp_path, question("a")), misplaced="refuse").version == "2.0"
    impossible = read_squad(squad_file(tmp_path, question("a", is_impossible=True)), misplaced="refuse")
    assert impossible.questions[0].is_impossible and impossible.questions[0].answers == ()


def test_misplaced_answers_are_kept_skipped_or_refused(tmp_path: Path) -> None:
    path = squad_file(
        tmp_path,
        question("good", ("Ada", 0)),
        question("half", ("Ada", 1), ("Bob", 8)),
        question("bad", ("Eve", 0), ("Bob", -4)),
    )
    keys = tuple(f"data[0].paragraphs[0].qas[{q}].answers[{a}]" for q, a in ((1, 0), (2, 0), (2, 1)))
    kept = read_squad(path, misplaced="keep")
    assert [len(q.answers) for q in kept.questions] == [1, 2, 2] and kept.misplaced == keys
    skipped = read_squad(path, misplaced="skip")
    assert [(q.id, q.answers) for q in skipped.questions] == [
        ("good", (Answer("Ada", 0),)),
        ("half", (Answer("Bob", 8),)),
    ]
    assert skipped.misplaced == keys and skipped.num_dropped == 1 and skipped.version == "1.1"
    told = describe_misplaced(skipped)
    assert told is not None
    assert "3 answers do not stand at answer_start" in told and "1 questions without another" in told
    with pytest.raises(UsageError, match=r"qas\[1\]\.answers\[0\]: 'Ada' does not stand.*1, 'da ' does"):
        read_squad(path, misplaced="refuse")


def test_characters_outside_the_basic_plane_count_as_one(tmp_path: Path) -> None:
    path = squad_file(tmp_path, question("a", ("cafe\u0301", 3)), context="😀—\u00a0cafe\u0301!")
    assert read_squad(path, misplaced="refuse").questions[0].answers[0].text == "cafe\u0301"


def test_only_a_scored_file_may_lack_answer_start(tmp_path: Path) -> None:
    entry = {**question("a"), "answers": [{"text": "Ada"}]}
    path = squad_file(tmp_path, entry)
    assert read_squad(path, misplaced="keep").questions[0].answers == (Answer("Ada", -1),)
    with pytest.raises(UsageError, match=r"qas\[0\]\.answers\[0\] has no key 'answer_start'"):
        read_squad(path, misplaced="skip")


def changed(**changes: Any) -> dict[str, Any]:
    entry = {**question("a", ("Ada", 0)), **changes}
    return {"data": [{"paragraphs": [{"context": "Ada met Bob.", "qas": [entry]}]}]}


QAS = r"data\[0\]\.paragraphs\[0\]\.qas\[0\]"


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ([1, 2], r"the file is a list of 2, but must be an object with the key 'data'"),
        ({"date": []}, r"the file has no key 'data'\. Did you mean 'date'\?"),
        ({"data": {}}, r"data is an object of 0, but must be a list"),
        ({"data": []}, r"holds no question"),
        ({"data": ["x"]}, r"data\[0\] is \"x\", but must be an object with the key 'paragraphs'"),
        ({"data": [{"paragraphs": [{"qas": []}]}]}, r"data\[0\]\.paragraphs\[0\] has no key 'context'"),
        (changed(id=7.5), QAS + r"\.id is 7.5, but must be a string or a whole number"),
        (changed(id=True), QAS + r"\.id is true, but must be a string or a whole number"),
        (changed(question=None), QAS + r"\.question is null, but must be a string"),
        (changed(answers={}), QAS + r"\.answers is an object of 0, but must be a list"),
        (changed(is_impossible=1), QAS + r"\.is_impossible is 1, but must be true or false"),
        (changed(answers=[{"answer_start": 0}]), QAS + r"\.answers\[0\] has no key 'text'"),
        (
            changed(answers=[{"text": "Ada", "answer_start": True}]),
            QAS + r"\.answers\[0\]\.answer_start is true, but must be a whole number",
        ),
    ],
)
def test_json_that_is_not_squad_is_named_by_its_key(tmp_path: Path, tree: Any, message: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(tree), encoding="utf-8")
    with pytest.raises(UsageError, match=r"wrong\.json: " + message):
        read_squad(path, misplaced="skip")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b" \n", "the file is empty"),
        (b'{"data": [\n  1,,', "is not JSON: Expecting value: line 2 column 5"),
        (b'{"data": "\xff"}', "byte 11 is not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"data": [], "data": []}', "the key 'data' is there twice"),
    ],
)
def test_files_that_are_not_json(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_bytes(content)
    for read in (lambda p: read_squad(p, misplaced="skip"), read_predictions, read_null_odds):
        with pytest.raises(UsageError, match=message):
            read(path)


def test_a_missing_file_and_a_repeated_id(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_squad(tmp_path / "none.json", misplaced="skip")
    path = squad_file(tmp_path, question("a", ("Ada", 0)), question("b"), question("a"))
    with pytest.raises(UsageError, match=r"qas\[2\]\.id 'a' is that of data\[0\]\.paragraphs\[0\]\.qas\[0\]"):
        read_squad(path, misplaced="skip")


def test_all_questions_left_out_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no question \(1 were left out: misplaced answers\)"):
        read_squad(squad_file(tmp_path, question("a", ("Eve", 0))), misplaced="skip")


@pytest.mark.parametrize(
    ("starts", "hint"),
    [
        ((14, 15), "; all stand there in bytes of UTF-8, but answer_start counts characters"),
        ((10, 11), "; all stand there in units of UTF-16, but answer_start counts characters"),
        ((8, 9), "; all stand 1 behind their answer_start"),
        ((0, 3), ""),
    ],
)
def test_answers_that_are_off_alike_are_explained(tmp_path: Path, starts: tuple[int, int], hint: str) -> None:
    contexts = zip(("éé😀 here Bo", "éé😀 there Bo"), starts, strict=True)
    paragraphs = [{"context": text, "qas": [question(text, ("Bo", start))]} for text, start in contexts]
    path = tmp_path / "off.json"
    path.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    with pytest.raises(UsageError, match=re.escape(f"(2 were left out: misplaced answers{hint})")):
        read_squad(path, misplaced="skip")
    described = describe_misplaced(read_squad(path, misplaced="keep"))
    assert described is not None and described.endswith(hint or "answers[0])")


def test_ids_that_are_numbers_or_missing(tmp_path: Path) -> None:
    path = squad_file(tmp_path, {**question("a", ("Ada", 0)), "id": 51870}, {**question("b"), "id": 7})
    policies: tuple[Misplaced, ...] = ("keep", "skip", "ignore")
    for misplaced in policies:
        assert [one.id for one in read_squad(path, misplaced=misplaced).questions] == ["51870", "7"]
    nameless = [question("a"), question("b")]
    for one in nameless:
        del one["id"]
    path = squad_file(tmp_path, *nameless)
    assert [one.id for one in read_squad(path, misplaced="ignore").questions] == ["1", "2"]
    with pytest.raises(UsageError, match="has no key 'id'"):
        read_squad(path, misplaced="skip")


def test_predictions_and_odds_come_back(tmp_path: Path) -> None:
    answers = {"a": "Ada 😀", "b": "", "c": "half a pair: \ud83d"}
    write_json(tmp_path / "p.json", answers)
    assert read_predictions(tmp_path / "p.json") == answers
    write_json(tmp_path / "o.json", {"a": -1.5, "b": 3, "c": float("inf")})
    assert read_null_odds(tmp_path / "o.json") == {"a": -1.5, "b": 3.0, "c": float("inf")}


@pytest.mark.parametrize(
    ("tree", "predictions", "odds"),
    [
        ({"a": None}, "'a' is null; the answer must be a string", "'a' is null; it must be a number"),
        ({"a": True}, "'a' is true; the answer must be a string", "'a' is true; it must be a number"),
        ({"a": float("nan")}, "'a' is NaN; the answer", "'a' is NaN; it must be a number"),
        (["x"], "a list of 1, but must be an object with an answer", "must be an object with a number"),
    ],
)
def test_wrong_predictions_and_odds(tmp_path: Path, tree: Any, predictions: str, odds: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(tree), encoding="utf-8")
    with pytest.raises(UsageError, match=predictions):
        read_predictions(path)
    with pytest.raises(UsageError, match=odds):
        read_null_odds(path)
