"""Data sets as the tools of people write them: taken as they are, by the first command.

The texts are what pandas 3.1.1 (``to_csv``, ``to_json``), datasets 5.2.0 (``to_csv``, ``to_json``) and
labelme2coco 0.2.6 wrote from examples made for these tests.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

import finetune_made
from shoal.cli.app import app
from shoal.data.images.shards import ImageShards
from shoal.data.text.classify import Columns, read_classify

PANDAS_CSV = (
    ",text,label\n"
    '0,"She said ""good"",\nthen left; 0",good\n'
    '1,"She said ""bad"",\nthen left; 1",bad\n'
    '2,"She said ""good"",\nthen left; 2",good\n'
)
PANDAS_RECORDS = (
    '[{"text":"She said \\"good\\",\\nthen left; 0","label":"good"},'
    '{"text":"She said \\"bad\\",\\nthen left; 1","label":"bad"}]'
)
DATASETS_TSV = (
    "sentence1\tsentence2\tlabel\tidx\nthe cat 0 sat\tdogs 0 run\t0\t0\nthe cat 1 sat\ta cat 1 sits\t1\t1\n"
)
DATASETS_SQUAD = (
    '{"id":"q0","title":"t","context":"Ada met a friend in town 0.","question":"Who met a friend?",'
    '"answers":{"text":["Ada"],"answer_start":[0]}}\n'
    '{"id":"q1","title":"t","context":"Zo\\u00eb met a friend in town 1.","question":"Who met a friend?",'
    '"answers":{"text":["Zo\\u00eb"],"answer_start":[0]}}\n'
)
LABELME2COCO = (
    '{"images":[{"height":48,"width":64,"id":1,"file_name":"/home/ada/labelme/train/photo 0.jpg"}],'
    '"annotations":[{"iscrowd":0,"image_id":1,"bbox":[5.0,4.0,20.0,18.0],'
    '"segmentation":[[5,4,25,7,13,22]],"category_id":0,"id":1,"area":168},'
    '{"iscrowd":0,"image_id":1,"bbox":[35.0,26.0,12.0,10.0],"segmentation":[],"category_id":1,"id":2,'
    '"area":120}],'
    '"categories":[{"id":0,"name":"kite","supercategory":"kite"},{"id":1,"name":"box","supercategory":"box"}]}'
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finetune_made.write_model(tmp_path_factory.mktemp("model") / "bert")


@pytest.mark.parametrize(
    ("command", "name", "text", "options", "said"),
    [
        ("classify", "reviews.csv", PANDAS_CSV, "--data.first text --data.second=", "3 examples"),
        ("classify", "reviews.json", PANDAS_RECORDS, "--data.first text --data.second=", "2 examples"),
        ("classify", "glue.tsv", DATASETS_TSV, "", "2 examples"),
        ("squad", "questions.jsonl", DATASETS_SQUAD, "", "SQuAD 1.1, 2 questions"),
    ],
    ids=["csv of pandas", "records of pandas", "tsv of datasets", "jsonl of datasets"],
)
def test_finetuning_takes_what_tools_write(
    command: str,
    name: str,
    text: str,
    options: str,
    said: str,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    length = f"--{'data' if command == 'classify' else 'window'}.max-seq-length"
    arguments = ["--model", str(model), "--data", str(path), "--eval", str(path), length, "48"]
    app(
        ["finetune", command, *arguments, *options.split(), "--dry-run"],
        result_action="return_value",
        exit_on_error=False,
    )
    printed = capsys.readouterr().out
    assert f"{name}: {said}" in printed and "left out" not in printed


def test_labelme_by_its_converter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Paths of another machine, and rectangles beside polygons."""
    (tmp_path / "train").mkdir()
    Image.new("RGB", (64, 48)).save(tmp_path / "train" / "photo 0.jpg")
    (tmp_path / "dataset.json").write_text(LABELME2COCO)
    command = ["prepare", "coco", "--images", str(tmp_path / "train")]
    command += ["--annotations", str(tmp_path / "dataset.json"), "--out", str(tmp_path / "out")]
    app([*command, "--processes", "1"], result_action="return_value", exit_on_error=False)
    objects = json.loads(bytes(ImageShards(tmp_path / "out", "train").extra(0)))["annotations"]
    assert [bool(one["segmentation"]) for one in objects] == [True, False]
    assert "1 of the 2 objects" in capsys.readouterr().err


def made_by_pandas(folder: Path, suffix: str) -> Path:
    """Write what pandas makes of a column with missing labels, a categorical one, and booleans."""
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame(
        {
            "text": [f'she said "{word}",\nthen left' for word in ("good", "bad", "odd", "good")],
            "label": pd.Categorical(["pos", "neg", None, "pos"]),
            "flag": [True, False, True, False],
            "count": [1, 2, None, 1],
        }
    )
    path = folder / f"reviews{suffix}"
    if suffix == ".csv":
        frame.to_csv(path, na_rep="NA")
    elif suffix == ".json":
        frame.to_json(path, orient="records")
    elif suffix == ".jsonl":
        frame.to_json(path, orient="records", lines=True)
    else:
        frame.to_parquet(path)
    return path


def made_by_datasets(folder: Path, suffix: str) -> Path:
    """Write what datasets makes of a class of names, which it keeps as numbers."""
    datasets = pytest.importorskip("datasets")
    names = datasets.Features(
        text=datasets.Value("string"),
        label=datasets.ClassLabel(names=["neg", "pos"]),
        flag=datasets.Value("bool"),
    )
    rows = {"text": ["a", "b, c", 'd "e"', "f"], "label": [1, 0, -1, 1], "flag": [True, False, True, False]}
    made = datasets.Dataset.from_dict(rows, features=names)
    path = folder / f"reviews{suffix}"
    {".csv": made.to_csv, ".jsonl": made.to_json, ".parquet": made.to_parquet}[suffix](str(path))
    return path


@pytest.mark.parametrize("suffix", [".csv", ".json", ".jsonl", ".parquet"])
@pytest.mark.parametrize(
    ("column", "labels", "count"),
    [("label", ("neg", "pos"), 3), ("flag", ("false", "true"), 4), ("count", ("1", "2"), 3)],
)
def test_files_written_by_pandas_now(
    suffix: str, column: str, labels: tuple[str, ...], count: int, tmp_path: Path
) -> None:
    path = made_by_pandas(tmp_path, suffix)
    read = read_classify(path, Columns(first="text", second=None, label=(column,)), labels=None)
    found = {float(label) if column == "count" else label.lower() for label in read.labels}
    assert found == ({float(label) for label in labels} if column == "count" else set(labels))
    assert len(read.examples) == count and read.examples[0].first == 'she said "good",\nthen left'


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
@pytest.mark.parametrize(
    ("column", "labels", "count"), [("label", {"0", "1"}, 3), ("flag", {"false", "true"}, 4)]
)
def test_files_written_by_datasets_now(
    suffix: str, column: str, labels: set[str], count: int, tmp_path: Path
) -> None:
    path = made_by_datasets(tmp_path, suffix)
    read = read_classify(path, Columns(first="text", second=None, label=(column,)), labels=None)
    assert {label.lower() for label in read.labels} == labels and len(read.examples) == count
