"""Scores during pretraining: ``--finetune.at`` adds a score to the record and changes nothing else."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pretrain_jobs as jobs
import pytest

from shoal import record
from shoal.errors import EXIT_OK, EXIT_STOPPED, UsageError
from shoal.record import read_record


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.prepare_small(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16 questions of SQuAD's form on paragraphs of four words."""
    words = jobs.WORDS
    paragraphs = []
    for k, word in enumerate(words):
        context = f"the {word} the {words[k - 1]}"
        answer = {"text": word, "answer_start": context.index(word)}
        paragraphs.append(
            {"context": context, "qas": [{"id": f"q{k}", "question": "the", "answers": [answer]}]}
        )
    path = tmp_path_factory.mktemp("squad") / "train.json"
    path.write_text(json.dumps({"version": "1.1", "data": [{"title": "t", "paragraphs": paragraphs}]}))
    return path


def settings(questions: Path, *at: int) -> dict[str, object]:
    return {
        "at": at,
        "data": questions,
        "eval": questions,
        "total_steps": 3,
        "global_batch_size": 4,
        "max_seq_length": 24,
        "doc_stride": 8,
        "max_question_length": 4,
    }


def scores(run_dir: Path) -> list[record.Evaluation]:
    rows = read_record(run_dir)
    return [row for row in rows if isinstance(row, record.Evaluation) and row.split == "squad"]


def test_scores_at_chosen_steps_and_the_same_losses(data: Path, questions: Path, tmp_path: Path) -> None:
    plain = jobs.small_bert_config(data, tmp_path / "plain")
    assert jobs.run(plain) == [EXIT_OK, EXIT_OK]
    config = jobs.small_bert_config(data, tmp_path / "run", finetune=settings(questions, 4, 14))
    assert jobs.run(config) == [EXIT_OK, EXIT_OK], (tmp_path / "run" / "worker-0.log").read_text()
    found = scores(tmp_path / "run")
    assert [(row.step, row.num_samples) for row in found] == [(4, 16), (14, 16)]
    assert all(0 <= row.metrics["f1"] <= 100 for row in found)
    assert jobs.losses(tmp_path / "run") == jobs.losses(tmp_path / "plain")
    (end,) = [row for row in read_record(tmp_path / "run") if isinstance(row, record.End)]
    assert set(end.metrics) == {"mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy"}
    assert not list((tmp_path / "run" / "finetune").iterdir())


def test_tensorboard_shows_those_of_a_pre_norm_model(data: Path, questions: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    finetune, model = settings(questions, 3), {"pre_layer_norm": True}
    config = jobs.small_config(data, tmp_path / "run", finetune=finetune, model=model)
    assert jobs.run(config, 1) == [EXIT_OK], (tmp_path / "run" / "worker-0.log").read_text()
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    (event,) = events.Scalars("squad/f1")
    (row,) = scores(tmp_path / "run")
    assert (event.step, event.value) == (3, pytest.approx(row.metrics["f1"]))


def test_a_run_that_ends_before_its_score_makes_up_for_it(
    data: Path, questions: Path, tmp_path: Path
) -> None:
    """A checkpoint of the step is there and its score is not: continuing begins with the score."""
    short = jobs.small_config(data, tmp_path / "run", train={"total_steps": 6})
    assert jobs.run(short, 1) == [EXIT_OK]
    config = jobs.small_config(data, tmp_path / "run", finetune=settings(questions, 6))
    assert jobs.run(config, 1) == [EXIT_OK], (tmp_path / "run" / "worker-0.log").read_text()
    assert [row.step for row in scores(tmp_path / "run")] == [6]


@pytest.mark.parametrize("at", [4, pytest.param(12, marks=pytest.mark.slow)])
def test_a_signal_in_between_stops_and_the_score_is_made_up_for(
    data: Path, questions: Path, tmp_path: Path, at: int
) -> None:
    """A finetuning that would take hours is stopped; the continued run has a shorter one."""
    plain = jobs.small_config(data, tmp_path / "plain")
    assert jobs.run(plain) == [EXIT_OK, EXIT_OK]
    run_dir = tmp_path / "run"
    long = {**settings(questions, at), "total_steps": 1_000_000}
    workers = jobs.start(jobs.small_config(data, run_dir, finetune=long), 2)
    end = time.monotonic() + 60
    while time.monotonic() < end and not (run_dir / "finetune" / f"step-{at:08}").is_dir():
        time.sleep(0.01)
    time.sleep(0.5)
    pid = workers[1].pid
    assert pid is not None
    os.kill(pid, signal.SIGTERM)
    assert jobs.wait(workers) == [EXIT_STOPPED, EXIT_STOPPED]
    assert max(jobs.losses(run_dir)) == at and not scores(run_dir)
    config = jobs.small_config(data, run_dir, finetune=settings(questions, at))
    assert jobs.run(config) == [EXIT_OK, EXIT_OK], (run_dir / "worker-0.log").read_text()
    assert [row.step for row in scores(run_dir)] == [at]
    assert jobs.losses(run_dir) == jobs.losses(tmp_path / "plain")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"at": (15,)}, r"finetune\.at 15 is not one of the steps 1 to 14"),
        ({"at": (0,)}, r"finetune\.at 0 is not one of the steps"),
        ({"eval": None}, r"finetune\.at needs finetune\.data and finetune\.eval"),
        ({"max_seq_length": 49}, r"finetune\.max_seq_length 49 is more than model\.max_position_embeddings"),
        ({"total_steps": 0}, r"finetune\.total_steps 0 must be at least 1"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)
def test_settings_that_cannot_be(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        jobs.small_bert_config(
            tmp_path, tmp_path, finetune={**settings(tmp_path / "train.json", 4), **changes}
        )
