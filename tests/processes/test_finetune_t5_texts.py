"""T5 finetuned from text to text: what it writes by beam search, its scores, its use, and its layouts."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import job_workers as jobs
import pretrain_jobs
import pytest
import torch
import use_jobs
from transformers import PreTrainedTokenizerFast, T5ForConditionalGeneration

import finetune_made as made
from shoal.data.text.text_scores import score_texts
from shoal.errors import EXIT_OK
from shoal.recipes.t5_classify import T5ClassifyConfig
from shoal.record import Evaluation, read_record

BEAMS = 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.write_t5(tmp_path_factory.mktemp("model") / "t5")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.write_texts(tmp_path_factory.mktemp("data") / "texts.tsv", 24, seed=1)


@pytest.fixture(scope="module")
def run_dir(model: Path, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two workers that has begun to learn which words are long."""
    run_dir = tmp_path_factory.mktemp("run") / "run"
    config = made.texts_config(
        model, texts, run_dir, train={"total_steps": 12}, generation={"num_beams": BEAMS}
    )
    assert jobs.run(config, 2) == [EXIT_OK] * 2, (run_dir / "worker-0.log").read_text()
    return run_dir


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_outputs_are_those_of_transformers_beam_search(run_dir: Path, texts: Path) -> None:
    directory = run_dir / "transformers"
    model = T5ForConditionalGeneration.from_pretrained(directory).eval()
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"), pad_token="[PAD]")
    by_beams: dict[int, list[str]] = {1: [], BEAMS: []}
    found = rows(run_dir / "predictions-texts.jsonl")
    examples = [line.split("\t") for line in texts.read_text().splitlines()[1:]]
    assert [row["target"] for row in found] == [target for _, target in examples]
    for source, _ in examples:  # one at a time, without padding
        ids = [*tokenizer(f"longer: {source}", add_special_tokens=False).input_ids, model.config.eos_token_id]
        for beams, outputs in by_beams.items():
            written = model.generate(
                torch.tensor([ids]), max_new_tokens=8, do_sample=False, num_beams=beams, length_penalty=0.6
            )[0].tolist()
            outputs.append(tokenizer.decode(written, skip_special_tokens=True))
    assert [row["prediction"] for row in found] == by_beams[BEAMS]
    assert by_beams[BEAMS] != by_beams[1], "greedy outputs are the same: the test shows nothing"
    assert len(set(by_beams[BEAMS])) > 3


def test_scores_in_the_record_and_beside_the_outputs(run_dir: Path) -> None:
    (row,) = [row for row in read_record(run_dir) if isinstance(row, Evaluation)]
    found = rows(run_dir / "predictions-texts.jsonl")
    scores = score_texts([row["prediction"] for row in found], [row["target"] for row in found])
    assert row.metrics == json.loads((run_dir / "scores-texts.json").read_text()) == scores
    assert (row.split, row.num_samples, set(row.metrics)) == (
        "texts", 24, {"exact_match", "f1", "rouge1", "rouge2", "rougeLsum", "bleu"},
    )  # fmt: skip
    assert 0 < row.metrics["f1"] < 100


def test_the_finished_model_is_used_and_scored_by_command(run_dir: Path, texts: Path, tmp_path: Path) -> None:
    found = rows(run_dir / "predictions-texts.jsonl")
    predicted = partial(use_jobs.lines, tmp_path, "predict", "t5", texts)
    wanted = [
        {"id": number, "text": row["prediction"], "precision": "fp32"}
        for number, row in enumerate(found, start=1)
    ]
    assert predicted("--model", run_dir, workers=2) == wanted
    export = shutil.copytree(run_dir / "transformers", tmp_path / "moved")  # the search is in config.json
    columns = ("--data.source-column", "text", "--data.target-column", "longer")
    assert predicted("--model", export, *columns) == wanted
    assert predicted("--model", export, *columns, "--generation.num-beams", 1) != wanted
    said = use_jobs.said(tmp_path, "evaluate", "t5", texts, "--model", run_dir, "--out", tmp_path, workers=2)
    scores = json.loads((run_dir / "scores-texts.json").read_text())
    assert f"exact_match {scores['exact_match']:.2f}" in said and f"bleu {scores['bleu']:.2f}" in said
    for name in ("predictions-texts.jsonl", "scores-texts.json"):
        assert (tmp_path / name).read_bytes() == (run_dir / name).read_bytes()


def divided(model: Path, texts: Path, run_dir: Path, **parallel: Any) -> T5ClassifyConfig:
    return made.texts_config(
        model,
        texts,
        run_dir,
        model={"dropout": 0.1},
        train={"total_steps": 4, "global_batch_size": 8, "micro_batch_size": 2},
        generation={"metrics": ("exact_match",)},
        parallel=parallel,
    )


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"pipeline": 2}, id="2 stages", marks=pytest.mark.slow),
        pytest.param({"pipeline": 2, "data": 2}, id="2 stages, 2 replicas", marks=pytest.mark.slow),
        pytest.param({"shard": True, "data": 2}, id="2 shards", marks=pytest.mark.slow),
    ],
)
def test_every_layout_trains_what_one_worker_trains(
    layout: dict[str, Any], model: Path, texts: Path, tmp_path: Path
) -> None:
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    assert jobs.run(divided(model, texts, whole)) == [EXIT_OK], (whole / "worker-0.log").read_text()
    num_workers = layout.get("pipeline", 1) * layout.get("data", 1)
    codes = jobs.run(divided(model, texts, run_dir, **layout), num_workers, deadline_s=300.0)
    assert codes == [EXIT_OK] * num_workers, (run_dir / "worker-0.log").read_text()
    assert pretrain_jobs.losses(run_dir) == pytest.approx(pretrain_jobs.losses(whole), rel=1e-6)
    (row,) = [row for row in read_record(run_dir) if isinstance(row, Evaluation)]
    assert row.metrics["loss"] == pytest.approx(
        loss_by_transformers(run_dir / "transformers", texts), rel=1e-5
    )


@torch.no_grad()
def loss_by_transformers(directory: Path, texts: Path) -> float:
    """Return the cross-entropy per target token, one example at a time."""
    model = T5ForConditionalGeneration.from_pretrained(directory).eval()
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(directory / "tokenizer.json"))
    total, num_tokens = 0.0, 0
    for line in texts.read_text().splitlines()[1:]:
        source, target = line.split("\t")
        ids, wanted = (
            torch.tensor([[*tokenizer(text, add_special_tokens=False).input_ids, model.config.eos_token_id]])
            for text in (f"longer: {source}", target)
        )
        total += float(model(input_ids=ids, labels=wanted).loss) * wanted.numel()
        num_tokens += wanted.numel()
    return total / num_tokens
