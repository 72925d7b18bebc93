"""Reading SQuAD's JSON files, good and bad."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from shoal.atomic_io import write_json
from shoal.data.bad_entries import BadEntries
from shoal.data.squad.dataset import (
    Answer,
    Purpose,
    read_null_odds,
    read_predictions,
    read_squad,
)
from shoal.data.squad.questions import one_question, read_questions
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
    data = read_squad(path, purpose="train")
    assert data.version == "1.1" and data.paragraphs == ("Ada met Bob.",) and not data.misplaced
    assert [(q.id, q.text, q.paragraph) for q in data.questions] == [
        ("a", "Who is a?", 0),
        ("b", "Who is b?", 0),
    ]
    assert data.questions[0].answers == (Answer("Ada", 0), Answer("Bob", 8))


def test_the_mark_or_a_question_without_answers_makes_it_2_0(tmp_path: Path) -> None:
    marked = squad_file(tmp_path, question("a", ("Ada", 0), is_impossible=False))
    assert read_squad(marked, purpose="train").version == "2.0"
    assert read_squad(squad_file(tmp_path, question("a")), purpose="train").version == "2.0"
    impossible = read_squad(squad_file(tmp_path, question("a", is_impossible=True)), purpose="train")
    assert impossible.questions[0].is_impossible and impossible.questions[0].answers == ()


def test_misplaced_answers_are_kept_left_out_or_refused(tmp_path: Path) -> None:
    path = squad_file(
        tmp_path,
        question("good", ("Ada", 0)),
        question("half", ("Ada", 1), ("Bob", 8)),
        question("bad", ("Eve", 0), ("Bob", -4)),
    )
    keys = tuple(f"data[0].paragraphs[0].qas[{q}].answers[{a}]" for q, a in ((1, 0), (2, 0), (2, 1)))
    kept = read_squad(path, purpose="score")
    assert [len(q.answers) for q in kept.questions] == [1, 2, 2] and kept.misplaced == keys
    assert kept.remarks() == [f"{path}: 3 answers do not stand at answer_start ({', '.join(keys)})"]
    skipped = read_squad(path, purpose="train")
    assert [(q.id, q.answers) for q in skipped.questions] == [
        ("good", (Answer("Ada", 0),)),
        ("half", (Answer("Bob", 8),)),
    ]
    assert skipped.version == "1.1" and not skipped.misplaced
    first = f"{keys[0]}: 'Ada' at 1, where 'da ' stands"
    assert skipped.remarks() == [
        f"{path}: left out 3: answer that does not stand at its answer_start: "
        f"3 ({first}, {keys[1]}, {keys[2]})"
    ]
    with pytest.raises(UsageError, match=r"qas\[1\]\.answers\[0\] is an answer that .*: 'Ada' at 1, where"):
        read_squad(path, purpose="train", bad=BadEntries(path, "refuse"))


def test_characters_outside_the_basic_plane_count_as_one(tmp_path: Path) -> None:
    path = squad_file(tmp_path, question("a", ("cafe\u0301", 3)), context="😀—\u00a0cafe\u0301!")
    assert read_squad(path, purpose="train").questions[0].answers[0].text == "cafe\u0301"


def test_only_a_scored_file_may_lack_answer_start(tmp_path: Path) -> None:
    entry = {**question("a"), "answers": [{"text": "Ada"}]}
    path = squad_file(tmp_path, entry)
    assert read_squad(path, purpose="score").questions[0].answers == (Answer("Ada", -1),)
    with pytest.raises(UsageError, match=r"qas\[0\]: answers\[0\] has no key 'answer_start'"):
        read_squad(path, purpose="train")


def changed(**changes: Any) -> dict[str, Any]:
    entry = {**question("a", ("Ada", 0)), **changes}
    return {"data": [{"paragraphs": [{"context": "Ada met Bob.", "qas": [entry]}]}]}


QAS = r"data\[0\]\.paragraphs\[0\]\.qas\[0\]"


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ([1, 2], r"data\[0\]: is 1, but must be an object with the key 'paragraphs'"),
        (7, r"must be an object with the key 'data', a list of articles\. Is it a file of SQuAD\?"),
        ({"date": []}, r"must be an object with the key 'data', .*\. Did you mean 'date'\?"),
        ({"data": {}}, r"must be an object with the key 'data', a list"),
        ({"data": []}, r"holds no question"),
        ({"data": ["x"]}, r"data\[0\]: is \"x\", but must be an object with the key 'paragraphs'"),
        ({"data": [{"paragraphs": [{"qas": []}]}]}, r"data\[0\]\.paragraphs\[0\]: has no key 'context'"),
        (changed(id=7.5), QAS + r": id is 7.5, but must be a string or a whole number"),
        (changed(id=True), QAS + r": id is true, but must be a string or a whole number"),
        (changed(question=None), QAS + r": question is null, but must be a string"),
        (changed(answers={}), QAS + r": answers is an object of 0, but must be a list"),
        (changed(is_impossible=2), QAS + r": is_impossible is 2, but must be true or false"),
        (changed(answers=[], is_impossible=False), QAS + r": 'a'\); correct the file"),
        (changed(answers=[{"text": " ", "answer_start": 3}]), QAS + r"\.answers\[0\]\); correct the file"),
        (changed(answers=[{"answer_start": 0}]), QAS + r": answers\[0\] has no key 'text'"),
        (
            changed(answers=[{"text": "Ada", "answer_start": True}]),
            QAS + r": answers\[0\]\.answer_start is true, but must be a whole number",
        ),
    ],
)
def test_json_that_is_not_squad_is_named_by_its_key(tmp_path: Path, tree: Any, message: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(tree), encoding="utf-8")
    with pytest.raises(UsageError, match=r"wrong\.json: .*" + message):
        read_squad(path, purpose="train")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (b" \n", "the file is empty"),
        (b'{"data": [\n  1,,', "is not JSON: Expecting value: line 2 column 5"),
        (b'{"data": "\xff"}', "line 1: 0xff, byte 11 of the file, is not UTF-8; .*iconv"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"data": [], "data": []}', "the key 'data' is there twice"),
        (b'{"id": "a"}\n{"id": "b"}\n', r"is not JSON: .*; .* an object on each line are named \.jsonl"),
    ],
)
def test_files_that_are_not_json(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "wrong.json"
    path.write_bytes(content)
    for read in (lambda p: read_squad(p, purpose="train"), read_predictions, read_null_odds):
        with pytest.raises(UsageError, match=message):
            read(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"answers": {"text": "Ada", "answer_start": 0}},
        {"answers": [{"text": "Ada", "answer_start": "0"}]},
        {"is_impossible": 0},
        {"is_impossible": 0.0},
    ],
)
def test_forms_of_tools_are_read(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = tmp_path / "data.json"
    path.write_text(json.dumps(changed(**changes)))
    (one,) = read_squad(path, purpose="train").questions
    assert one.answers == (Answer("Ada", 0),) and not one.is_impossible


def test_a_missing_file_and_a_repeated_id(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_squad(tmp_path / "none.json", purpose="train")
    path = squad_file(tmp_path, question("a", ("Ada", 0)), question("b"), question("a"))
    data = read_squad(path, purpose="score")
    assert [one.id for one in data.questions] == ["a", "b"]
    assert (
        "left out 1: question whose id another one has: 1 (data[0].paragraphs[0].qas[2]: 'a')"
        in (data.remarks()[0])
    )


def test_all_questions_left_out_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nothing can be used; left out 1: answer that does not stand"):
        read_squad(squad_file(tmp_path, question("a", ("Eve", 0))), purpose="train")


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
    with pytest.raises(UsageError, match=rf"left out 2: answer that does not stand.*{re.escape(hint)}$"):
        read_squad(path, purpose="train")
    (remark,) = read_squad(path, purpose="score").remarks()
    assert remark.endswith(hint or "answers[0])")


def test_ids_that_are_numbers_or_missing(tmp_path: Path) -> None:
    path = squad_file(tmp_path, {**question("a", ("Ada", 0)), "id": 51870}, {**question("b"), "id": 7})
    purposes: tuple[Purpose, ...] = ("score", "train", "ask")
    for purpose in purposes:
        assert [one.id for one in read_squad(path, purpose=purpose).questions] == ["51870", "7"]
    nameless = [question("a"), question("b")]
    for one in nameless:
        del one["id"]
    path = squad_file(tmp_path, *nameless)
    assert [one.id for one in read_squad(path, purpose="ask").questions] == ["1", "2"]
    with pytest.raises(UsageError, match="has no key 'id'"):
        read_squad(path, purpose="score")


ROWS = [
    {
        "id": "a",
        "title": "t",
        "context": "Ada met Bob.",
        "question": "Who?",
        "answers": {"text": ["Ada"], "answer_start": [0]},
    },
    {
        "id": 7,
        "context": "Ada met Bob.",
        "question": "Whom?",
        "answers": [{"text": "Bob", "answer_start": 8}],
    },
    {"id": "c", "context": "It rains.", "question": "When?", "answers": {"text": [], "answer_start": []}},
]


@pytest.mark.parametrize("form", ["lines", "array", "data", "parquet"])
def test_rows_as_the_hub_has_them(tmp_path: Path, form: str) -> None:
    path = tmp_path / {"lines": "a.jsonl", "parquet": "a.parquet"}.get(form, "a.json")
    if form == "parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        rows = [{**row, "id": str(row["id"])} for row in ROWS]
        rows[1]["answers"] = {"text": ["Bob"], "answer_start": [8]}
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif form == "lines":  # with a mark, lines of Windows and a blank one
        path.write_bytes(
            "\ufeff".encode() + b"\r\n".join(json.dumps(row).encode() for row in ROWS) + b"\r\n \n"
        )
    else:
        path.write_text(json.dumps({"data": ROWS} if form == "data" else ROWS))
    for purpose in ("train", "score", "ask"):
        data = read_squad(path, purpose=purpose)
        assert [(q.id, q.text, q.paragraph) for q in data.questions] == [
            ("a", "Who?", 0), ("7", "Whom?", 0), ("c", "When?", 1)
        ]  # fmt: skip
        assert [q.answers for q in data.questions] == [(Answer("Ada", 0),), (Answer("Bob", 8),), ()]
        assert data.version == "2.0" and data.paragraphs == ("Ada met Bob.", "It rains.")


def test_starts_that_a_table_made_floats_are_whole(tmp_path: Path) -> None:
    path = squad_file(tmp_path, {**question("a"), "answers": [{"text": "Bob", "answer_start": 8.0}]})
    assert read_squad(path, purpose="train").questions[0].answers == (Answer("Bob", 8),)
    with pytest.raises(UsageError, match=r"a\.csv: questions are read from \.json, \.jsonl or \.parquet"):
        read_squad(tmp_path / "a.csv", purpose="train")


def test_rows_that_cannot_be_used_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    odd = {"question": "Who?", "context": "Ada.", "answers": {"text": ["Ada"], "answer_start": []}}
    bad = ["{", "[]", json.dumps({"question": "Who?"}), json.dumps(odd), json.dumps(odd | {"question": None})]
    path.write_text("\n".join([json.dumps(ROWS[0]), *bad]))
    data = read_squad(path, purpose="train")
    assert [q.id for q in data.questions] == ["a"] and data.bad is not None
    assert list(data.bad.counts.values()) == [1, 1, 3]
    assert "line 4: context is null, but must be a string" in data.remarks()[0]
    assert [q.id for q in read_squad(path, purpose="ask").questions] == [
        "a",
        "5",
    ]  # asked in spite of answers


def test_questions_to_ask_are_known_by_their_file_s_name(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        '\n{"question": "Who?", "context": "Ada."}\n{"question": "Who?", "context": "Ada.", "id": 9}\n'
    )
    assert [(q.id, q.paragraph) for q in read_questions(path).questions] == [("2", 0), ("9", 0)]
    with pytest.raises(UsageError, match=r"a\.csv: is known by the end of its name: \.json .*, \.jsonl"):
        read_questions(tmp_path / "a.csv")
    assert one_question(Path("--question"), "Who?", "Ada.").paragraphs == ("Ada.",)


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
