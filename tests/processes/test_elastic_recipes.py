"""Tests each recipe that goes on without a lost worker: its losses are those of a run whose worker stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import image_jobs
import mask_rcnn_jobs
import pretrain_jobs as jobs
import pytest
from job_workers import run
from test_elastic import KILLED, NUM_WORKERS, changes, logs
from test_elastic import pytestmark as pytestmark
from test_elastic import start as start_one

import finetune_made as made
from shoal import record

SHORT = {"total_steps": 8}


def pretraining_lm(folder: Path, run_dir: Path) -> Any:
    source = made.write_causal(folder / "model")
    text = jobs.prepare_small(folder)
    return jobs.small_lm_config(text, source / "config.json", run_dir, train=SHORT)


def finetuning_lm(folder: Path, run_dir: Path) -> Any:
    model = made.write_causal(folder / "model")
    chats = [made.write_chats(folder / f"{name}.jsonl", 24, seed=1) for name in ("train", "held_out")]
    return made.lm_config(model, chats[0], (chats[1],), run_dir, train=SHORT)


def squad(folder: Path, run_dir: Path) -> Any:
    model, questions = made.write_model(folder / "model"), made.write_questions(folder / "questions.json")
    return made.squad_config(model, questions, run_dir, train=SHORT)


def classify(folder: Path, run_dir: Path) -> Any:
    model, pairs = made.write_model(folder / "model"), made.write_pairs(folder / "pairs.tsv", 40, seed=1)
    return made.classify_config(model, pairs, (pairs,), run_dir, train=SHORT)


def t5_classify(folder: Path, run_dir: Path) -> Any:
    model, pairs = made.write_t5(folder / "model"), made.write_pairs(folder / "pairs.tsv", 40, seed=1)
    return made.t5_config(model, pairs, (pairs,), run_dir, train=SHORT)


def resnet50(folder: Path, run_dir: Path) -> Any:
    train = {"global_batch_size": 24, "total_steps": 8, "norm_images": 16}
    return image_jobs.small_config(image_jobs.prepare_small(folder), run_dir, train=train)


def mask_rcnn(folder: Path, run_dir: Path) -> Any:
    train = {"global_batch_size": 6, "total_steps": 8}
    return mask_rcnn_jobs.small_config(mask_rcnn_jobs.prepare_small(folder), run_dir, train=train)


SLOW = [pytest.param(each, marks=pytest.mark.slow) for each in (finetuning_lm, squad, t5_classify, mask_rcnn)]


@pytest.mark.parametrize("config_of", [pretraining_lm, classify, resnet50, *SLOW])
def test_a_worker_is_lost_and_comes_back(config_of: Any, tmp_path: Path) -> None:
    fixed = config_of(tmp_path, tmp_path / "fixed")
    assert run(fixed) == [0], logs(fixed)
    config = jobs.changed(
        fixed,
        {"run": {"dir": tmp_path / "run"}, "distributed": {"elastic": "1:3", "worker_patience_s": 30}},
    )
    workers = [
        start_one(config, rank, dies=(3, "backward") if rank == 1 else (0, ""), awaits=(5, 1))
        for rank in range(NUM_WORKERS)
    ]
    workers[1].join()
    again = start_one(config, 1)
    codes = jobs.wait([*workers, again])
    assert codes == [0, KILLED, 0, 0], logs(config)
    assert changes(config) == [(3, 2), (2, 3)]
    losses, expected = (jobs.losses(each.run.dir) for each in (config, fixed))
    if config_of is mask_rcnn:  # its choices of regions grow the differences of roundings
        assert losses.keys() == expected.keys() and scores(config).keys() == scores(fixed).keys()
        assert [losses[step] for step in (1, 2, 3)] == pytest.approx(
            [expected[step] for step in (1, 2, 3)], rel=1e-4
        )
        return
    assert losses == pytest.approx(expected, rel=1e-5)
    assert scores(config) == pytest.approx(scores(fixed), rel=1e-4)


def scores(config: Any) -> dict[str, float]:
    rows = record.read_record(config.run.dir)
    return {
        f"{row.step} {row.split} {name}": value
        for row in rows
        if isinstance(row, record.Evaluation)
        for name, value in row.metrics.items()
    }
