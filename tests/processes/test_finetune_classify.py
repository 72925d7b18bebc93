"""Whole classifications: what is learnt, what is left, on any number of workers, with real files too."""

from __future__ import annotations

import json
from pathlib import Path

import job_workers as jobs
import pretrain_jobs  # noqa: F401  # the processes that are forked have its imports
import pytest
import torch
import use_jobs
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import finetune_made as made
from shoal import record
from shoal.data.text.classify import MNLI_LABELS, Columns, read_classify
from shoal.env.settings import test_data_dir as data_dir
from shoal.errors import EXIT_OK, EXIT_USAGE
from shoal.record import read_record

NLI = data_dir() / "nli"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.write_model(tmp_path_factory.mktemp("model") / "bert")


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.write_pairs(tmp_path_factory.mktemp("data") / "train.tsv", 96, seed=1)


@pytest.fixture(scope="module")
def whole_run(model: Path, train: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one worker, evaluated on what it learnt and on other pairs."""
    folder = tmp_path_factory.mktemp("whole")
    other = made.write_pairs(folder / "other.tsv", 40, seed=2)
    config = made.classify_config(model, train, (train, other), folder / "run", train={"total_steps": 250})
    assert jobs.run(config) == [EXIT_OK], (folder / "run" / "worker-0.log").read_text()
    return folder / "run"


def test_a_learnable_set_is_learnt(whole_run: Path) -> None:
    rows = [row for row in read_record(whole_run) if isinstance(row, record.Evaluation)]
    assert [row.split for row in rows] == ["train", "other"]
    assert rows[0].metrics == {"accuracy": 1.0}
    (end,) = [row for row in read_record(whole_run) if isinstance(row, record.End)]
    assert end.metrics == {"train/accuracy": 1.0, "other/accuracy": rows[1].metrics["accuracy"]}


def test_what_a_finished_run_leaves(whole_run: Path, train: Path) -> None:
    data = read_classify(train, Columns(), labels=None)
    predicted = (whole_run / "predictions-train.txt").read_text().splitlines()
    assert predicted == [data.labels[example.label] for example in data.examples]
    scores = json.loads((whole_run / "scores-train.json").read_text())
    assert scores["labels"] == ["other", "same"] and scores["accuracy"] == 100.0
    counts = [predicted.count(label) for label in scores["labels"]]
    assert scores["counts"] == [[counts[0], 0], [0, counts[1]]]
    said = (whole_run / "worker-0.log").read_text()
    assert "recall %" in said and "train.tsv: 96 examples, 0 cut" in said


def predicted_by_transformers(directory: Path, file: Path) -> list[str]:
    """Return the labels that transformers predicts for a file with a run's saved model."""
    model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    assert model.config.id2label == {0: "other", 1: "same"}
    tokenizer = AutoTokenizer.from_pretrained(directory)
    data = read_classify(file, Columns(), labels=("other", "same"))
    batch = tokenizer(
        [example.first for example in data.examples],
        [example.second for example in data.examples],
        padding=True,
        return_tensors="pt",
    )
    with torch.no_grad():
        return [data.labels[label] for label in model(**batch).logits.argmax(-1).tolist()]


def test_the_saved_model_predicts_in_transformers_what_the_files_say(whole_run: Path) -> None:
    predicted = predicted_by_transformers(whole_run / "transformers", whole_run.parent / "other.tsv")
    assert predicted == (whole_run / "predictions-other.txt").read_text().splitlines()


@pytest.mark.slow
def test_two_workers_predict_what_their_model_says(
    model: Path, train: Path, whole_run: Path, tmp_path: Path
) -> None:
    """Weights of two workers differ from one worker's in their last bits; the files follow the weights."""
    other = whole_run.parent / "other.tsv"
    config = made.classify_config(
        model, train, (train, other), tmp_path, train={"total_steps": 250, "micro_batch_size": 3}
    )
    assert jobs.run(config, 2) == [EXIT_OK] * 2
    for file in (train, other):
        said = (tmp_path / f"predictions-{file.stem}.txt").read_text().splitlines()
        assert said == predicted_by_transformers(tmp_path / "transformers", file)


def test_single_texts_and_jsonl(model: Path, tmp_path: Path) -> None:
    rows = [{"text": f"{word} {word}", "kind": number % 2} for number, word in enumerate(made.WORDS)]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = {"first": "text", "second": "", "label": ("kind",)}
    config = made.classify_config(
        model, path, (path,), tmp_path / "run", data=names, train={"total_steps": 60}
    )
    assert jobs.run(config) == [EXIT_OK]
    assert json.loads((tmp_path / "run" / "scores-rows.json").read_text())["accuracy"] == 100.0


def scores_by_transformers(directory: Path, file: Path) -> tuple[list[float], list[float], float]:
    """Return the scores of a file, those that transformers predicts with a saved model, and its own loss."""
    model = AutoModelForSequenceClassification.from_pretrained(directory).eval()
    rows = [line.split("\t") for line in file.read_text().splitlines()[1:]]
    gold = [float(row[2]) for row in rows]
    tokenizer = AutoTokenizer.from_pretrained(directory)
    first, second = ([row[column] for row in rows] for column in (0, 1))
    batch = tokenizer(first, second, padding=True, return_tensors="pt")
    with torch.no_grad():
        out = model(**batch, labels=torch.tensor(gold))
    assert model.config.problem_type == "regression" and model.config.num_labels == 1
    return gold, out.logits[:, 0].tolist(), out.loss.item()


def test_scores_are_learnt_and_measured_as_glue_does(model: Path, tmp_path: Path) -> None:
    train = made.write_scored_pairs(tmp_path / "train.tsv", 64, seed=1)
    run = tmp_path / "run"
    config = made.classify_config(
        model, train, (train,), run, data={"label": ("score",), "scores": True}, train={"total_steps": 120}
    )
    assert jobs.run(config) == [EXIT_OK], (run / "worker-0.log").read_text()
    gold, predicted, loss = scores_by_transformers(run / "transformers", train)
    steps = [row for row in read_record(run) if isinstance(row, record.Step)]
    assert steps[0].loss > 4 > 1 > loss
    lines = (run / "predictions-train.txt").read_text().splitlines()
    assert [float(line) for line in lines] == pytest.approx(predicted, abs=1e-4)
    stats = pytest.importorskip("scipy.stats")
    known = {"pearson": stats.pearsonr(gold, predicted)[0], "spearman": stats.spearmanr(gold, predicted)[0]}
    assert json.loads((run / "scores-train.json").read_text()) == pytest.approx(known, abs=1e-5)
    (row,) = [row for row in read_record(run) if isinstance(row, record.Evaluation)]
    assert row.metrics == pytest.approx(known, abs=1e-5) and known["pearson"] > 0.7
    rows = use_jobs.lines(tmp_path, "predict", "classify", train, "--model", run)
    assert [f"{row['score']:.7g}" for row in rows] == lines and rows[5]["id"] == 6
    said = use_jobs.said(tmp_path, "evaluate", "classify", train, "--model", run, "--data.label", "score")
    assert f"Pearson {known['pearson']:.4f}, Spearman {known['spearman']:.4f} of 64 examples" in said


def test_labels_outside_the_set_are_named(model: Path, train: Path, tmp_path: Path) -> None:
    odd = tmp_path / "odd.tsv"
    odd.write_text("sentence1\tsentence2\tgold_label\nsun\tmoon\tsamme\n")
    config = made.classify_config(model, train, (odd,), tmp_path / "run")
    assert jobs.run(config) == [EXIT_USAGE]
    said = (tmp_path / "run" / "worker-0.log").read_text()
    assert "odd.tsv, line 2: the label 'samme' is not one of other, same. Did you mean 'same'?" in said


@pytest.mark.skipif(not NLI.is_dir(), reason="needs the NLI files of SHOAL_TEST_DATA")
def test_files_in_the_format_of_mnli(tmp_path: Path) -> None:
    train, other = NLI / "mnli_dev_matched_sample51.tsv", NLI / "xnli.en.dev.tsv"
    texts = [example.first for example in read_classify(train, Columns(), labels=MNLI_LABELS).examples]
    model = made.write_model(tmp_path / "model", texts, vocab_size=400)
    config = made.classify_config(
        model,
        train,
        (train, other),
        tmp_path / "run",
        data={"labels": MNLI_LABELS},
        train={"total_steps": 120},
    )
    assert jobs.run(config) == [EXIT_OK]
    accuracies = {
        row.split: row.metrics["accuracy"]
        for row in read_record(tmp_path / "run")
        if isinstance(row, record.Evaluation)
    }
    assert accuracies["mnli_dev_matched_sample51"] > 0.9
    assert 0.2 < accuracies["xnli.en.dev"] < 0.6
    assert len((tmp_path / "run" / "predictions-xnli.en.dev.txt").read_text().splitlines()) == 2_490
