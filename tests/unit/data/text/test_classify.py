"""Classification files, good and bad, and their scores."""

from __future__ import annotations

import csv
import json
import random
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from shoal.data.bad_entries import NO_LABEL, NOT_UTF8, BadEntries
from shoal.data.text.classify import (
    MNLI_LABELS,
    ClassifyData,
    Columns,
    Example,
    correlate,
    read_classify,
    read_scores,
    read_texts,
    score_classify,
)
from shoal.env.settings import test_data_dir as data_dir
from shoal.errors import UsageError

HEAD = "gold_label\tsentence1\tsentence2\n"


def num_unlabelled(data: ClassifyData) -> int:
    return data.bad.counts.get(NO_LABEL, 0) if data.bad else 0


def write(folder: Path, text: str, name: str = "x.tsv") -> Path:
    path = folder / name
    path.write_bytes(text.encode())
    return path


@pytest.mark.parametrize(
    ("name", "total"), [("xnli.en.dev.tsv", 2490), ("mnli_dev_matched_sample51.tsv", 51)]
)
def test_real_files(name: str, total: int) -> None:
    path = data_dir() / "nli" / name
    if not path.is_file():
        pytest.skip(f"no {name} in {data_dir()}/nli; set SHOAL_TEST_DATA")
    data = read_classify(path, Columns(), labels=MNLI_LABELS)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(data.examples) + num_unlabelled(data) == total == len(lines) - 1
    names = lines[0].split("\t")
    for line, example in zip(lines[1:], data.examples, strict=True):
        row = dict(zip(names, line.split("\t"), strict=True))
        assert (example.first, example.second) == (row["sentence1"], row["sentence2"])
        assert MNLI_LABELS[example.label] == row["label"]
    golds = [example.label for example in data.examples]
    scores = score_classify(data.labels, golds, [1] * total)
    assert scores.accuracy == pytest.approx(100 * golds.count(1) / total)


def test_odd_text_is_kept_as_it_is(tmp_path: Path) -> None:
    odd = 'He said: "hi\u2028\u0085 there'  # quotes open, and line ends that are none here
    path = write(tmp_path, f"\ufeff{HEAD}neutral\t{odd}\t 😀 \r\n\nentailment\t\tb\n-\tx\ty\n")
    data = read_classify(path, Columns(), labels=MNLI_LABELS)
    assert data.examples == (Example(odd, " 😀 ", 1), Example("", "b", 0)) and num_unlabelled(data) == 1


def test_jsonl_single_texts_and_labels_of_the_file(tmp_path: Path) -> None:
    rows = [{"text": "a", "stars": 5, "more": None}, {"text": "b", "stars": 1}, {"text": "c", "stars": 5}]
    path = write(tmp_path, "\n".join(map(json.dumps, rows)), "x.jsonl")
    columns = Columns(first="text", second=None, label=("stars",))
    data = read_classify(path, columns, labels=None)
    assert data.labels == ("1", "5")
    assert data.examples == (Example("a", None, 1), Example("b", None, 0), Example("c", None, 1))
    again = read_classify(path, columns, labels=("5", "3", "1"))
    assert [example.label for example in again.examples] == [0, 2, 0]


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("", "x.tsv", "x.tsv: the file is empty"),
        (HEAD, "x.tsv", "x.tsv: holds no example with a label"),
        (f"{HEAD}-\ta\tb\n", "x.tsv", "nothing can be used; left out 1: example without a label: 1 .line 2"),
        ("a\n", "x.xlsx", r"x.xlsx: is known by the end of its name: .tsv .* or .parquet"),
        ('a,"b', "x.csv", "line 1: there is no column 'sentence1', only 'a', 'b'"),
        (
            f"{HEAD}neutral\ta\tb\n\nnetural\ta\tb\nx\ta\tb\n",
            "x.tsv",
            r"line 4: the label 'netural' is not one of entailment, neutral, contradiction "
            r"\(2 lines have such labels\)\. Did you mean 'neutral'\?",
        ),
        (f"{HEAD}neutral\ta\n", "x.tsv", r"nothing can be used; .* first line: 1 \(line 2: 2 for 3\)"),
        (
            "label\tsentence1\tsentense2\nneutral\ta\tb\n",
            "x.tsv",
            "line 1: there is no column 'sentence2', only 'label', .*Did you mean 'sentense2'",
        ),
        ('{"label": "neutral"}\n', "x.jsonl", "line 1: there is no column 'sentence1', only 'label'"),
        ("{}\n", "x.jsonl", "line 1: there is no column 'sentence1', only"),
        ("\n[1]\n", "x.jsonl", r"line that is no JSON object: 1 \(entry 1: 1\)"),
        ('{"label": \n', "x.jsonl", r"line that is not JSON: 1 \(line 1: "),
        ('{"label": "-", "sentence1": 1, "sentence2": ""}', "x.jsonl", r"text is no string: 1 \(line 1: 1\)"),
        ('{"label": "-", "sentence1": "", "sentence2": null}', "x.jsonl", r"text is null: 1 \(line 1\)"),
        ('{"label": [], "sentence1": "", "sentence2": ""}', "x.jsonl", r"whole number: 1 \(line 1: \[\]\)"),
    ],
)
def test_bad_files_are_named_with_the_line(tmp_path: Path, text: str, name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_classify(write(tmp_path, text, name), Columns(), labels=MNLI_LABELS)


def a_line(**values: object) -> str:
    return json.dumps({"sentence1": "a", "sentence2": "b", **values}) + "\n"


def labels_of(tmp_path: Path, text: str, name: str = "x.jsonl") -> tuple[tuple[str, ...], int]:
    data = read_classify(write(tmp_path, text, name), Columns(), labels=None)
    return data.labels, num_unlabelled(data)


def test_labels_of_other_types_and_missing_ones(tmp_path: Path) -> None:
    booleans = a_line(label=True) + a_line(label=False) + a_line(label=None)
    assert labels_of(tmp_path, booleans) == (("false", "true"), 1)
    numbers = a_line(label=0) + a_line(label=1.0) + a_line(label=2) + a_line(label=-1) + a_line(label=None)
    assert labels_of(tmp_path, numbers) == (("0", "1", "2"), 2)  # as SNLI on the hub
    assert labels_of(tmp_path, a_line(label=-1) + a_line(label="yes")) == (("-1", "yes"), 0)
    table = HEAD + "".join(f"{label}\ta\tb\n" for label in ("0", "1", "-1"))
    assert labels_of(tmp_path, table, "x.tsv") == (("0", "1"), 1)
    again = read_classify(write(tmp_path, table), Columns(), labels=("0", "1", "2"))
    assert num_unlabelled(again) == 1
    kept = read_classify(write(tmp_path, table), Columns(), labels=("-1", "0", "1"))
    assert num_unlabelled(kept) == 0 and len(kept.examples) == 3


@pytest.mark.parametrize("scores", [["0.0", "1.3"], ["2.50", "2.75"], ["-0.5", "1"]])
def test_scores_are_no_classes(tmp_path: Path, scores: list[str]) -> None:
    text = HEAD + "".join(f"{score}\ta\tb\n" for score in scores)
    with pytest.raises(UsageError, match=r"x\.tsv: labels such as .* are scores, which .* --data\.scores"):
        labels_of(tmp_path, text, "x.tsv")
    listed = read_classify(write(tmp_path, text), Columns(), labels=scores)
    assert [example.label for example in listed.examples] == [0, 1]
    whole = HEAD + "1.0\ta\tb\n2.0\ta\tb\n"
    assert labels_of(tmp_path, whole, "x.tsv") == (("1.0", "2.0"), 0)


def test_lines_of_another_width_are_left_out(tmp_path: Path) -> None:
    text = f"{HEAD}x\ta\tb\ny\ta\ny\ta\tb\tc\ny\ta\tb\n"
    data = read_classify(write(tmp_path, text), Columns(), labels=None)
    assert data.labels == ("x", "y") and len(data.examples) == 2 and data.bad is not None
    (line,) = data.bad.lines()
    assert line.endswith("columns than the first line: 2 (line 3: 2 for 3, line 4)")
    with pytest.raises(UsageError, match=r"x\.tsv: line 3 is a line with another .* \(--on-bad skip\)"):
        path = tmp_path / "x.tsv"
        read_classify(path, Columns(), labels=None, bad=BadEntries(path, "refuse"))


def test_cells_in_quotes(tmp_path: Path) -> None:
    rows = [("label", "sentence1", "sentence2"), ("x", 'a "b"', "c, d"), ("y", "e\nf", "g\th")]
    for name, delimiter in (("x.csv", ","), ("x.tsv", "\t")):
        with (tmp_path / name).open("w", newline="") as file:
            csv.writer(file, delimiter=delimiter, quoting=csv.QUOTE_ALL).writerows(rows)
    data = read_classify(tmp_path / "x.csv", Columns(), labels=None)
    assert data.labels == ("x", "y")
    assert data.examples == (Example('a "b"', "c, d", 0), Example("e\nf", "g\th", 1))
    with pytest.raises(UsageError, match="there is no column 'sentence1', only '\"label\"'"):
        read_classify(tmp_path / "x.tsv", Columns(), labels=None)
    text = (tmp_path / "x.tsv").read_text().replace('"label"\t"sentence1"\t"sentence2"', HEAD.strip())
    with pytest.raises(UsageError, match=r"x\.tsv: cells are in quotes, .* write it as \.csv, or as \.jsonl"):
        labels_of(tmp_path, text, "x.tsv")


def test_a_later_line_without_a_column_is_left_out(tmp_path: Path) -> None:
    text = a_line(label="x") + '{"label": "y"}\n' + a_line(label="y")
    data = read_classify(write(tmp_path, text, "x.jsonl"), Columns(), labels=None)
    assert len(data.examples) == 2 and data.bad is not None
    assert data.bad.counts == {"a line without a column that others have": 1}


def test_missing_files_wrong_bytes_and_wrong_label_sets(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_classify(tmp_path / "none.tsv", Columns(), labels=MNLI_LABELS)
    path = tmp_path / "bytes.tsv"
    path.write_bytes(HEAD.encode() + b"neutral\ta\tb\nneutral\t\xff\tb\n")
    with pytest.raises(UsageError, match=r"line 3 is an entry with bytes that are not UTF-8: 0xff; .*iconv"):
        read_classify(path, Columns(), labels=MNLI_LABELS, bad=BadEntries(path, "refuse"))
    one = write(tmp_path, f"{HEAD}x\ta\tb\n")
    with pytest.raises(UsageError, match="the labels x must be two or more different ones"):
        read_classify(one, Columns(), labels=None)


@pytest.mark.parametrize(
    ("name", "head", "row"),
    [
        ("a.tsv", HEAD, "{label}\t{text}\tb\n"),
        ("a.csv", HEAD.replace("\t", ";"), '{label};"{text}\nmore";b\n'),
        ("a.jsonl", "", '{{"label": "{label}", "sentence1": "{text}", "sentence2": "b"}}\n'),
    ],
    ids=["tsv", "csv", "jsonl"],
)
def test_rows_with_bytes_that_are_not_utf8_are_left_out(
    tmp_path: Path, name: str, head: str, row: str
) -> None:
    """Rows in Latin-1 among others in UTF-8, with a mark at the beginning: the one rule of all readers."""
    good, wrong = (row.format(label="neutral", text=text) for text in ("é", "caf\xe9"))
    path = tmp_path / name
    mark, rows = b"\xef\xbb\xbf" + head.encode(), [good.encode(), wrong.encode("latin-1"), good.encode()]
    path.write_bytes(mark + b"".join(rows))
    data = read_classify(path, Columns(), labels=MNLI_LABELS)
    assert len(data.examples) == 2 and {example.first[0] for example in data.examples} == {"é"}
    assert data.bad is not None and data.bad.counts == {NOT_UTF8: 1}
    assert "0xe9; convert the file from its encoding" in data.bad.lines()[0]
    path.write_bytes(mark + good.encode() * 400 + wrong.encode("latin-1") * 30)
    with pytest.raises(UsageError, match=r"30 of 430 entries are invalid, .*0xe9; .*iconv -f WINDOWS-1252"):
        read_classify(path, Columns(), labels=MNLI_LABELS)
    path.write_bytes(mark + wrong.encode("latin-1") * 3)
    with pytest.raises(UsageError, match=r"nothing can be used; left out 3: entry with bytes .*iconv"):
        read_classify(path, Columns(), labels=MNLI_LABELS)


def test_only_the_cells_that_are_read_must_be_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    rows = b"author\tgold_label\tsentence1\tsentence2\n" + b"Ren\xe9\tneutral\ta\tb\n"
    path.write_bytes(rows)
    assert len(read_classify(path, Columns(), labels=MNLI_LABELS).examples) == 1
    path.write_bytes(rows.replace(b"author", b"auteur pr\xe9f\xe9r\xe9"))
    with pytest.raises(UsageError, match=r"a.tsv, line 1: a name of a column is an entry with bytes"):
        read_classify(path, Columns(), labels=MNLI_LABELS)


def test_an_array_is_one_document_whose_bytes_must_be_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    row = b'{"label": "neutral", "sentence1": "a", "sentence2": "b"}'
    path.write_bytes(b"\xef\xbb\xbf[" + row + b",\n" + row.replace(b'"a"', b'"caf\xe9"') + b"]")
    at = path.read_bytes().index(b"\xe9") + 1
    with pytest.raises(UsageError, match=rf"a.json, line 2: 0xe9, byte {at} of the file, is not .*iconv -f"):
        read_classify(path, Columns(), labels=MNLI_LABELS)


def test_scores_by_hand() -> None:
    scores = score_classify(("no", "yes", "perhaps"), [0, 0, 0, 1, 1], [0, 0, 1, 1, 2])
    assert scores.counts == ((2, 1, 0), (0, 1, 1), (0, 0, 0))
    assert scores.accuracy == pytest.approx(60.0)
    assert scores.table().splitlines() == [
        "         no  yes  perhaps  recall %",
        "no        2    1        0      66.7",
        "yes       0    1        1      50.0",
        "perhaps   0    0        0         -",
    ]


def test_texts_to_predict_keep_the_numbers_of_their_rows(tmp_path: Path) -> None:
    path = write(tmp_path, "a\tb\none\tx\n\nodd\ntwo\ty\n\todd\todd\nthree\tz\n")
    data = read_texts(path, Columns(first="a", second=None), labels=("0", "1"))
    assert [example.first for example in data.examples] == ["one", "two", "three"]
    assert data.numbers == (1, 3, 5) and data.bad is not None and data.bad.total == 2
    with pytest.raises(UsageError, match=r"x\.tsv: line 4 is a line with another .*: 1 for 2;"):
        read_texts(path, Columns(first="a", second=None), labels=(), bad=BadEntries(path, "refuse"))


TEXTS = Columns(first="a", second=None, label=("label",))
TABLE = "a,label\n" + "".join(f"text {number},{number % 2}\n" for number in range(30))


@pytest.mark.parametrize(
    ("name", "text", "last"),
    [
        pytest.param("x.csv", TABLE.replace(",", ";"), "text 29", id="semicolons"),
        pytest.param("x.csv", TABLE.replace(",", "\t"), "text 29", id="tabs"),
        pytest.param("x.csv", "\ufeffsep=|\r\n" + TABLE.replace(",", "|"), "text 29", id="sep of Excel"),
        pytest.param("x.csv", "\n\r\n" + TABLE.replace(",", ";"), "text 29", id="blank lines first"),
        pytest.param("x.csv", TABLE.replace(",", ";").replace("\n", "\r"), "text 29", id="CR"),
        pytest.param("x.csv", "\ufeff" + TABLE.replace("text 29", '"a\r\nb"'), "a\r\nb", id="CRLF in a cell"),
        pytest.param(
            "x.tsv",
            TABLE.replace(",", "\t").replace("text 29", "a\u2028b\x85\x0b\x0cc"),
            "a\u2028b\x85\x0b\x0cc",
            id="line ends of Unicode",
        ),
        pytest.param("X.CSV", "\ufeff" + TABLE.replace("\n", "\r\n"), "text 29", id="capitals, mark, CRLF"),
        pytest.param(
            "x.csv", TABLE + '"he said ""so"",\nand left",1', 'he said "so",\nand left', id="quotes"
        ),
        pytest.param("x.csv", TABLE + "x" * 200_000 + ",1\n", "x" * 200_000, id="long cell"),
        pytest.param("x.csv", TABLE + 'of 5" and 7",1\n', 'of 5" and 7"', id="inches"),
        pytest.param(
            "x.json",
            json.dumps([{"a": f"t {n}", "label": n % 2} for n in range(30)], indent=1),
            "t 29",
            id="array",
        ),
        pytest.param(
            "x.jsonl", json.dumps([{"a": f"t {n}", "label": n % 2} for n in range(3)]), "t 2", id="line"
        ),
    ],
)
def test_tables_as_tools_write_them(tmp_path: Path, name: str, text: str, last: str) -> None:
    data = read_classify(write(tmp_path, text, name), TEXTS, labels=None)
    assert data.labels == ("0", "1") and data.examples[-1].first == last
    assert data.bad is not None and not data.bad.total


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.csv", TABLE + "none,\nnor here, NaN\n"),
        ("x.csv", TABLE.replace(",0", ",0.0") + "t,-1.0\nt,-1\n"),
        ("x.tsv", TABLE.replace(",", "\t") + "none\t\nnor here\t \n"),
        ("x.csv", TABLE + "t,NA\nt,<NA>\n"),
        ("x.csv", TABLE + "t,None\nt,n/a\n"),
        ("x.tsv", TABLE.replace(",", "\t") + "t\tNULL\nt\t#N/A\n"),
        ("x.json", '[{"a": "t", "label": 0}, {"a": "t", "label": 1.0}, {"a": "t", "label": NaN}, '
                   '{"a": "t", "label": null}]'),
    ],
)  # fmt: skip
def test_empty_cells_and_nan_are_no_labels(tmp_path: Path, name: str, text: str) -> None:
    data = read_classify(write(tmp_path, text, name), TEXTS, labels=None)
    assert {float(label) for label in data.labels} == {0, 1} and num_unlabelled(data) == 2


def test_words_of_tables_for_no_label_are_labels_where_they_are_listed(tmp_path: Path) -> None:
    path = write(tmp_path, TABLE + "t,NA\nt,None\n", "x.csv")
    data = read_classify(path, TEXTS, labels=["0", "1", "NA"])
    assert [example.label for example in data.examples[-2:]] == [1, 2] and num_unlabelled(data) == 1
    rows = [{"a": "t", "label": label} for label in ("NA", "SA", "None")]
    of_json = read_classify(write(tmp_path, json.dumps(rows), "x.json"), TEXTS, labels=None)
    assert of_json.labels == ("NA", "None", "SA")  # JSON has null for what is missing
    scores = read_scores(write(tmp_path, "a,label\nt,2.5\nt,NA\n", "x.csv"), TEXTS)
    assert [example.score for example in scores.examples] == [2.5] and num_unlabelled(scores) == 1


def test_decimals_of_parquet_are_numbers(tmp_path: Path) -> None:
    labels = pa.array([Decimal("0"), Decimal("1"), None]).cast(pa.decimal128(3, 1))
    parquet.write_table(pa.table({"a": ["t", "u", "v"], "label": labels}), tmp_path / "x.parquet")
    data = read_classify(tmp_path / "x.parquet", TEXTS, labels=None)
    assert data.labels == ("0", "1") and num_unlabelled(data) == 1


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("x.csv", "a,label\n" + "".join(f"t,i{n}\n" for n in range(21)), r"each of the 21 rows has a label"),
        ("x.csv", 'a,label\nt,"[1, 2]"\nt,[1]\n', r"labels such as \[1, 2\] are lists, .* a row for each"),
        ("x.csv", "a,label\nt,1\nt,1.0\nt,2\n", r"the labels '1' and '1\.0' differ in .* a number"),
        ("x.csv", "a,label\nt,01\nt,1\n", r"the labels '01' and '1' differ in"),
        ("x.csv", "a,label\nt,caf\u00e9\nt,cafe\u0301\n", r"differ in .* form of a letter"),
        ("x.json", '{"a": {"0": "t"}, "label": {"0": 1}}', r"all rows in 'a', 'label'; .*orient=.records"),
        ("x.json", '{"data": [{"a": "t", "label": 1}]}', r"line 1: the object has all rows in 'data'; write"),
        ("x.csv", TABLE + '"open,1\n' + "t,1\n" * 50, r"a quote in line 32 is not closed"),
        ("x.csv", "a,a,label\nt,u,1\n", r"line 1: there are several columns 'a'; rename all but one"),
        ("x.tsv", "a\tlabel\rt\t1\rt\t0\r", r"its lines end in CR alone; convert them"),
        ("x.tsv", "a\tlabel\n" + '"one ""x"",\nmore"\t1\n' * 9, r"cells are in quotes, .* write it as \.csv"),
        ("x.jsonl", '{"a": "t", "label": 1}\r' * 9, r"x.jsonl: its lines end in CR alone; convert them"),
        ("x.tsv", "a\tlabel\nt\tyes\nt\tno\nt\tyes \n", r"the labels 'yes' and 'yes ' differ in blanks, in"),
        ("x.tsv", "a\tlabel\nt\tPos\nt\tneg\nt\tpos\n", r"the labels 'Pos' and 'pos' differ in .* capitals"),
        ("x.csv", "a;label\nt;1,5\nt;2,0\n", r"labels such as 1,5 are scores"),
        (
            "x.jsonl",
            '{"a": "t", "label": true}\n{"a": "t", "label": 0}\n{"a": "t", "label": 1}\n',
            r"the labels '1' and 'true' differ in .* a number or true",
        ),
        ("x.jsonl", '{\n "data": []\n}\n', r"not JSON: .*; write an object on each line, or one array"),
        (
            "x.jsonl",
            "version https://git-lfs.github.com/",
            r"pointer of Git LFS .*: git lfs pull",
        ),
        ("x.csv", "a,label\nt,1e-3\nt,2e-3\nt,2e-3\n", r"labels such as 1e-3 are scores"),
        ("x.csv", "a,label\nt,50%\nt,7%\nt,7%\n", r"labels such as 50% are scores"),
        ("x.csv", "a,label\nt,yes\nt,no\nt,yes\u200b\n", r"labels 'yes' and 'yes\\u200b' differ in"),
        (
            "x.csv",
            "a|label\nt|1\n",
            r"only 'a\|label'; name one .* first line must name the columns; cells of",
        ),
        (
            "x.json",
            '{"v": 1, "rows": [{"a": "t", "label": 1}]}',
            r"line 1: the object has all rows in 'rows'",
        ),
        ("x.csv", "PK\x03\x04 and more", r"x.csv: its content is a zip and no text; unpack or convert it"),
        ("x.csv.gz", "", r"is known by the end of its name: .*; unpack compressed files"),
    ],
)
def test_tables_that_would_be_misread_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_classify(write(tmp_path, text, name), TEXTS, labels=None)


def test_a_folder_is_named_with_the_way_to_a_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is a folder; name a file in it\. .*\.load_from_disk"):
        read_classify(tmp_path, TEXTS, labels=None)


def test_a_parquet_file_with_a_column_twice(tmp_path: Path) -> None:
    texts, labels = pa.array(["t", "u"]), pa.array([0, 1])
    twice = pa.Table.from_arrays([texts, texts, labels], names=["a", "a", "label"])
    parquet.write_table(twice, tmp_path / "x.parquet")
    with pytest.raises(UsageError, match=r"x.parquet: there are several columns 'a'; rename all but one"):
        read_classify(tmp_path / "x.parquet", TEXTS, labels=None)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()], ids=str)
def test_columns_of_parquet_that_are_dictionaries(tmp_path: Path, kind: pa.DataType) -> None:
    labels = pa.array(["yes", "no", None, "yes"]).dictionary_encode()
    texts = pa.array(["t", "u", "v", "w"], pa.string()).dictionary_encode()
    columns = {"a": texts.cast(pa.dictionary(pa.int16(), kind)), "label": labels}
    parquet.write_table(pa.table(columns), tmp_path / "x.parquet")
    data = read_classify(tmp_path / "x.parquet", TEXTS, labels=None)
    assert data.labels == ("no", "yes") and [example.first for example in data.examples] == ["t", "u", "w"]
    assert num_unlabelled(data) == 1


def test_scores_are_numbers_of_any_form(tmp_path: Path) -> None:
    text = a_line(label=3) + a_line(label=0.25) + a_line(label="1e-1") + a_line(label=None)
    data = read_scores(write(tmp_path, text, "x.jsonl"), Columns())
    assert [example.score for example in data.examples] == [3, 0.25, 0.1] and num_unlabelled(data) == 1
    assert data.has_scores and data.labels == ("score",)


def test_what_is_no_score_is_named(tmp_path: Path) -> None:
    for value in ("high", True, "inf", 1e300):
        path = write(tmp_path, a_line(label=value), "x.jsonl")
        with pytest.raises(UsageError, match=r"nothing can be used; .* whose score is no number: 1 \(line 1"):
            read_scores(path, Columns())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,label\n" + "t,-1\n" * 9, r"each of the 9 scores is -1, .*; name the column of the scores"),
        ("a,label\n" + ",2.5\n,3.5\n", r"the column 'a' is empty in each of the 2 rows; name another"),
    ],
)
def test_scores_and_texts_that_say_nothing_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_scores(write(tmp_path, text, "x.csv"), TEXTS)


@pytest.mark.parametrize(("name", "end"), [("x.csv", ","), ("x.tsv", "\t")])
def test_names_of_columns_between_rows_are_no_example(tmp_path: Path, name: str, end: str) -> None:
    table = TABLE.replace(",", end)
    plain = read_classify(write(tmp_path, table, name), TEXTS, labels=None)
    data = read_classify(write(tmp_path, table * 3, name), TEXTS, labels=None)
    assert data.labels == plain.labels and data.examples == plain.examples * 3
    assert data.bad is not None
    assert data.bad.counts == {"a line that repeats the names of the columns": 2}


def test_rows_without_a_text_are_left_out_at_any_share(tmp_path: Path) -> None:
    lines = [{"a": None if n % 2 else f"t {n}", "label": n % 4 // 2} for n in range(60)]
    lines[1]["a"] = float("nan")  # of pandas
    data = read_classify(write(tmp_path, json.dumps(lines), "x.json"), TEXTS, labels=None)
    assert len(data.examples) == 30 and data.bad is not None
    assert data.bad.counts == {"a row whose text is null": 30}


def test_correlations_are_those_of_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    draw = random.Random(5)
    for _ in range(20):
        gold = [draw.choice((0, 0.5, 2, 5)) for _ in range(30)]  # with ties
        predicted = [score + draw.choice((-1, 0, 0, 1.5)) for score in gold]
        found = correlate(gold, predicted)
        assert found.pearson == pytest.approx(stats.pearsonr(gold, predicted)[0], abs=1e-12)
        assert found.spearman == pytest.approx(stats.spearmanr(gold, predicted)[0], abs=1e-12)
    constant = correlate([1, 2, 3], [4, 4, 4])
    assert (constant.pearson, constant.spearman) == (0, 0)
