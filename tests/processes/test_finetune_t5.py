"""T5 finetuned on classifications, which it writes as words: files, transformers' view, what is learnt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import job_workers as jobs
import pretrain_jobs
import pytest
import torch
import use_jobs
from transformers import PreTrainedTokenizerFast, T5ForConditionalGeneration

import finetune_made as made
from shoal import record
from shoal.data.text.classify import Columns, read_classify
from shoal.errors import EXIT_OK, EXIT_USAGE
from shoal.recipes.t5_classify import T5ClassifyConfig
from shoal.record import read_record


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.write_t5(tmp_path_factory.mktemp("model") / "t5")


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.write_pairs(tmp_path_factory.mktemp("data") / "train.tsv", 48, seed=1)


@pytest.fixture(scope="module")
def short_run(model: Path, train: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two workers: enough steps to write labels, not to write the right ones."""
    folder = tmp_path_factory.mktemp("short")
    other = made.write_pairs(folder / "other.tsv", 20, seed=2)
    config = made.t5_config(model, train, (train, other), folder / "run", train={"total_steps": 30})
    assert jobs.run(config, 2) == [EXIT_OK] * 2, (folder / "run" / "worker-0.log").read_text()
    return folder / "run"


def test_what_a_finished_run_leaves(short_run: Path, train: Path) -> None:
    rows = [row for row in read_record(short_run) if isinstance(row, record.Evaluation)]
    assert [(row.split, row.num_samples) for row in rows] == [("train", 48), ("other", 20)]
    scores = json.loads((short_run / "scores-train.json").read_text())
    assert scores["labels"] == ["other", "same"]
    assert scores["accuracy"] == pytest.approx(100 * rows[0].metrics["accuracy"])
    data = read_classify(train, Columns(), labels=None)
    predicted = (short_run / "predictions-train.txt").read_text().splitlines()
    right = [name == data.labels[x.label] for name, x in zip(predicted, data.examples, strict=True)]
    assert sum(right) / len(right) == pytest.approx(rows[0].metrics["accuracy"])
    assert "worded as: mnli hypothesis: {second} premise: {first}" in (short_run / "worker-0.log").read_text()


def test_the_saved_model_finds_in_transformers_the_labels_of_the_files(short_run: Path) -> None:
    assert_likeliest(short_run, short_run.parent / "other.tsv")


def test_what_the_saved_model_generates_is_what_transformers_does(short_run: Path, tmp_path: Path) -> None:
    directory = short_run / "transformers"
    model = T5ForConditionalGeneration.from_pretrained(directory).eval()
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"), pad_token="[PAD]")
    data = read_classify(short_run.parent / "other.tsv", Columns(), labels=("other", "same"))
    found = []
    for example in data.examples:
        text = f"mnli hypothesis: {example.second} premise: {example.first}"
        ids = [*tokenizer(text, add_special_tokens=False).input_ids, model.config.eos_token_id]
        written = model.generate(torch.tensor([ids]), max_new_tokens=4, do_sample=False)[0]
        found.append(tokenizer.decode(written, skip_special_tokens=True).replace("[SEP]", "").strip())
    arguments = ("t5", short_run.parent / "other.tsv", "--model", short_run, "--data.labels-by", "generation")
    rows = use_jobs.lines(tmp_path, "predict", *arguments)
    written = [word if word in data.labels else None for word in found]
    assert [row["generated_label"] for row in rows] == written
    right = sum(word == data.labels[each.label] for word, each in zip(written, data.examples, strict=True))
    assert f"generated accuracy {100 * right / 20:.2f} % of 20" in use_jobs.said(
        tmp_path, "evaluate", *arguments
    )


@pytest.mark.slow
def test_a_run_scores_generated_labels_where_that_is_asked_for(
    short_run: Path, train: Path, tmp_path: Path
) -> None:
    changes: dict[str, Any] = {
        "model": {"from_scratch": False},
        "data": {"labels_by": "generation"},
        "train": {"total_steps": 1},
    }
    config = made.t5_config(short_run, train, (train,), tmp_path / "run", **changes)
    assert jobs.run(config) == [EXIT_OK], (tmp_path / "run" / "worker-0.log").read_text()
    (row,) = [row for row in read_record(tmp_path / "run") if isinstance(row, record.Evaluation)]
    tree = json.loads((tmp_path / "run" / "scores-train.json").read_text())
    assert tree["labels"] == ["other", "same", "(no label)"]
    assert row.metrics == {"generated_accuracy": pytest.approx(tree["generated_accuracy"] / 100)}
    rows = use_jobs.lines(tmp_path, "predict", "t5", train, "--model", tmp_path / "run")  # as the run does
    predicted = (tmp_path / "run" / "predictions-train.txt").read_text().splitlines()
    assert [row["generated_label"] or "(no label)" for row in rows] == predicted


def test_a_pretraining_of_shoal_is_finetuned(train: Path, tmp_path: Path) -> None:
    text = pretrain_jobs.prepare_small(tmp_path)
    source = pretrain_jobs.small_t5_config(text, tmp_path / "pretrained", train={"total_steps": 1})
    assert pretrain_jobs.run(source, 1) == [EXIT_OK]
    config = made.t5_config(
        tmp_path / "pretrained",
        train,
        (train,),
        tmp_path / "run",
        model={"from_scratch": False},
        train={"total_steps": 2},
    )
    assert jobs.run(config) == [EXIT_OK], (tmp_path / "run" / "worker-0.log").read_text()
    start = T5ForConditionalGeneration.from_pretrained(tmp_path / "run" / "start")
    pretrained = T5ForConditionalGeneration.from_pretrained(tmp_path / "pretrained" / "transformers")
    assert torch.equal(start.shared.weight, pretrained.shared.weight)


def test_a_directory_of_bert_is_refused(train: Path, tmp_path: Path) -> None:
    bert = made.write_model(tmp_path / "bert")
    assert jobs.run(made.t5_config(bert, train, (train,), tmp_path / "run")) == [EXIT_USAGE]
    assert "model_type 'bert' must be one of t5" in (tmp_path / "run" / "worker-0.log").read_text()


@pytest.fixture(scope="module")
def whole_run(model: Path, train: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one worker that has the whole model, with dropout."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    assert jobs.run(divided(model, train, run_dir)) == [EXIT_OK], (run_dir / "worker-0.log").read_text()
    return run_dir


def divided(model: Path, train: Path, run_dir: Path, **parallel: Any) -> T5ClassifyConfig:
    return made.t5_config(
        model,
        train,
        (train,),
        run_dir,
        model={"dropout": 0.1},
        train={"total_steps": 6, "global_batch_size": 16, "micro_batch_size": 2},
        optim={"learning_rate": 1e-3},  # too low to learn to write a label: it would generate none
        run={"checkpoint_frequency": 3},
        parallel=parallel,
    )


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"pipeline": 2, "data": 1}, id="2 stages"),
        pytest.param({"pipeline": 2, "data": 2}, id="2 stages, 2 replicas", marks=pytest.mark.slow),
        pytest.param({"pipeline": 4, "data": 1}, id="4 stages", marks=pytest.mark.slow),
        pytest.param({"shard": True, "data": 2}, id="2 shards", marks=pytest.mark.slow),
    ],
)
def test_every_layout_trains_what_one_worker_trains(
    layout: dict[str, Any], model: Path, train: Path, whole_run: Path, tmp_path: Path
) -> None:
    num_workers = layout.get("pipeline", 1) * layout["data"]
    config = divided(model, train, tmp_path / "run", **layout)
    codes = jobs.run(config, num_workers, deadline_s=300.0)  # every worker exports the model twice
    assert codes == [EXIT_OK] * num_workers, (tmp_path / "run" / "worker-0.log").read_text()
    assert pretrain_jobs.losses(tmp_path / "run") == pytest.approx(pretrain_jobs.losses(whole_run), rel=1e-6)
    found, wanted = (
        T5ForConditionalGeneration.from_pretrained(run / "transformers").state_dict()
        for run in (tmp_path / "run", whole_run)
    )
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (found[name] - value).abs().max() <= 1e-5 * value.abs().max(), name
    assert_likeliest(tmp_path / "run", train)
    for name in ("predictions-train.txt", "scores-train.json"):
        assert (tmp_path / "run" / name).read_bytes() == (whole_run / name).read_bytes()


@torch.no_grad()
def assert_likeliest(run_dir: Path, data_file: Path) -> None:
    """The predictions of a run are the labels to which transformers gives the least loss."""
    model = T5ForConditionalGeneration.from_pretrained(run_dir / "transformers").eval()
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(run_dir / "transformers" / "tokenizer.json"))
    data, end = read_classify(data_file, Columns(), labels=None), model.config.eos_token_id
    likeliest = []
    for example in data.examples:
        text = f"mnli hypothesis: {example.second} premise: {example.first}"
        ids = torch.tensor([[*tokenizer(text, add_special_tokens=False).input_ids, end]])
        losses = []
        for label in data.labels:
            words = torch.tensor([[*tokenizer(label, add_special_tokens=False).input_ids, end]])
            losses.append(float(model(input_ids=ids, labels=words).loss) * words.numel())
        likeliest.append(data.labels[losses.index(min(losses))])
    assert (run_dir / f"predictions-{data_file.stem}.txt").read_text().splitlines() == likeliest


@pytest.mark.slow
def test_a_toy_classification_is_learnt(model: Path, tmp_path: Path) -> None:
    train = made.write_pairs(tmp_path / "train.tsv", 2_000, seed=1)
    other = made.write_pairs(tmp_path / "other.tsv", 200, seed=2)
    config = made.t5_config(
        model,
        train,
        (other,),
        tmp_path / "run",
        train={"total_steps": 1_500, "global_batch_size": 32},
        run={"checkpoint_frequency": 500, "log_frequency": 50},
    )
    assert jobs.run(config, 2, deadline_s=280.0) == [EXIT_OK] * 2
    (row,) = [row for row in read_record(tmp_path / "run") if isinstance(row, record.Evaluation)]
    assert row.metrics["accuracy"] > 0.9
