"""Whole finetunings on made questions: what they leave, on any number of workers, interrupted or not."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import job_workers as jobs
import numpy as np
import pretrain_jobs
import pytest
import torch
from transformers import AutoModelForQuestionAnswering

import finetune_made as made
from forked import fork_process, free_port
from shoal import record
from shoal.data.squad.answers import AnswerConfig, choose_answers
from shoal.data.squad.dataset import read_null_odds, read_predictions, read_squad
from shoal.data.squad.features import make_features
from shoal.data.squad.score import score_squad
from shoal.errors import EXIT_OK, EXIT_STOPPED, EXIT_USAGE
from shoal.recipes.source_tokenizer import read_source_tokenizer
from shoal.record import read_record


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.write_questions(tmp_path_factory.mktemp("data") / "made-v2.0.json")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made.write_model(tmp_path_factory.mktemp("model") / "bert")


@pytest.fixture(scope="module")
def whole_run(model: Path, questions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one worker that nothing interrupted."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    config = made.squad_config(model, questions, run_dir, run={"validation_frequency": made.STEPS // 2})
    assert jobs.run(config) == [EXIT_OK], (run_dir / "worker-0.log").read_text()
    return run_dir


def losses(run_dir: Path) -> dict[int, float]:
    return {row.step: row.loss for row in read_record(run_dir) if isinstance(row, record.Step)}


def grad_norms(run_dir: Path) -> dict[int, float]:
    return {row.step: row.grad_norm for row in read_record(run_dir) if isinstance(row, record.Step)}


def test_what_a_finished_run_leaves(whole_run: Path, questions: Path) -> None:
    rows = read_record(whole_run)
    assert isinstance(rows[0], record.Start) and rows[0].recipe == "squad"
    assert sorted(losses(whole_run)) == list(range(1, made.STEPS + 1))
    assert losses(whole_run)[made.STEPS] < losses(whole_run)[1]
    evaluations = [row for row in rows if isinstance(row, record.Evaluation)]
    assert [(row.step, row.split, row.num_samples) for row in evaluations] == [
        (made.STEPS // 2, "made-v2.0", 24),
        (made.STEPS, "made-v2.0", 24),
    ]
    (end,) = [row for row in rows if isinstance(row, record.End)]
    scores = json.loads((whole_run / "scores.json").read_text())
    assert end.metrics == {name: value for name, value in scores.items() if not name.endswith("total")}
    assert {"exact", "f1", "HasAns_f1", "NoAns_f1", "best_f1", "best_f1_thresh"} <= end.metrics.keys()
    data = read_squad(questions, purpose="score")
    predictions = read_predictions(whole_run / "predictions.json")
    assert predictions.keys() == {question.id for question in data.questions}
    again = score_squad(data, predictions)
    assert (again.official["exact"], again.official["f1"]) == (scores["exact"], scores["f1"])
    odds = read_null_odds(whole_run / "null_odds.json")
    assert {name for name, text in predictions.items() if not text} == {n for n in odds if odds[n] > 0}


def test_predictions_are_those_of_transformers_on_padded_windows(whole_run: Path, questions: Path) -> None:
    config = made.squad_config(whole_run / "transformers", questions, whole_run)
    data = read_squad(questions, purpose="score")
    features = make_features(data, read_source_tokenizer(whole_run / "transformers"), config.window)
    theirs = AutoModelForQuestionAnswering.from_pretrained(whole_run / "transformers").eval()
    lengths = np.diff(features.bounds)
    assert len(features) > 24 and len(set(lengths.tolist())) > 3  # windows slide, and differ
    inside = np.arange(lengths.max()) < lengths[:, None]
    ids, types = (np.zeros(inside.shape, dtype=np.int64) for _ in range(2))
    ids[inside], types[inside] = features.tokens, features.types
    with torch.no_grad():
        out = theirs(
            input_ids=torch.from_numpy(ids),
            token_type_ids=torch.from_numpy(types),
            attention_mask=torch.from_numpy(inside.astype(np.int64)),
        )
    starts, ends = (logits.numpy()[inside] for logits in (out.start_logits, out.end_logits))
    answers = choose_answers(features, starts, ends, AnswerConfig(null_threshold=0.0))
    assert answers.predictions == read_predictions(whole_run / "predictions.json")
    assert answers.null_odds == pytest.approx(read_null_odds(whole_run / "null_odds.json"), abs=1e-5)


def test_two_workers_answer_like_one(model: Path, questions: Path, whole_run: Path, tmp_path: Path) -> None:
    config = made.squad_config(model, questions, tmp_path / "run", train={"micro_batch_size": 2})
    assert jobs.run(config, 2) == [EXIT_OK] * 2
    assert losses(tmp_path / "run") == pytest.approx(losses(whole_run), rel=1e-3)
    assert grad_norms(tmp_path / "run") == pytest.approx(grad_norms(whole_run), rel=1e-2)
    found, wanted = (read_predictions(run / "predictions.json") for run in (tmp_path / "run", whole_run))
    assert found == wanted and len(set(wanted.values())) > 3


@pytest.mark.slow
def test_stopped_and_continued_with_another_number_of_workers(
    model: Path, questions: Path, whole_run: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    slow = made.squad_config(model, questions, run_dir, train={"micro_batch_size": 1})
    workers = jobs.start(slow, 2)
    end = time.monotonic() + 60
    while time.monotonic() < end and not ((run_dir / "record.jsonl").is_file() and losses(run_dir)):
        time.sleep(0.01)
    pid = workers[1].pid
    assert pid is not None
    os.kill(pid, signal.SIGTERM)
    assert jobs.wait_for(workers) == [EXIT_STOPPED] * 2
    stopped = read_record(run_dir)[-1]
    assert isinstance(stopped, record.Stop) and 1 <= stopped.step < made.STEPS
    assert not (run_dir / "predictions.json").exists()
    assert jobs.run(slow, 1) == [EXIT_OK]
    assert any(isinstance(row, record.Resume) for row in read_record(run_dir))
    assert losses(run_dir) == pytest.approx(losses(whole_run), rel=1e-3)
    found, wanted = (read_predictions(run / "predictions.json") for run in (run_dir, whole_run))
    assert found == wanted
    before = (run_dir / "record.jsonl").read_bytes()
    assert jobs.run(slow, 1) == [EXIT_OK]
    assert f"is finished: {made.STEPS} of {made.STEPS} steps" in (run_dir / "worker-0.log").read_text()
    assert (run_dir / "record.jsonl").read_bytes() == before


def test_a_killed_run_continues_bitwise(
    model: Path, questions: Path, whole_run: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    config = made.squad_config(model, questions, run_dir)
    workers = jobs.start(config, 1)
    pretrain_jobs.wait_for_checkpoint(run_dir, 10, workers)
    pretrain_jobs.kill(workers)
    assert jobs.run(config) == [EXIT_OK]
    (resume,) = [row for row in read_record(run_dir) if isinstance(row, record.Resume)]
    assert 10 <= resume.step < made.STEPS
    assert losses(run_dir) == losses(whole_run)
    for name in ("predictions.json", "nbest.json", "null_odds.json", "scores.json"):
        assert (run_dir / name).read_bytes() == (whole_run / name).read_bytes()


def test_a_run_killed_before_its_end_ends(
    model: Path, questions: Path, whole_run: Path, tmp_path: Path
) -> None:
    run_dir = pretrain_jobs.copy_without_end(whole_run, tmp_path / "run")
    assert jobs.run(made.squad_config(model, questions, run_dir), 2) == [EXIT_OK] * 2
    found, wanted = (read_record(run)[-1] for run in (run_dir, whole_run))
    assert isinstance(found, record.End) and isinstance(wanted, record.End)
    assert (found.step, found.metrics) == (wanted.step, wanted.metrics)
    assert (run_dir / "transformers" / "config.json").is_file()


def test_a_run_without_scores_of_its_last_step_evaluates(
    model: Path, questions: Path, whole_run: Path, tmp_path: Path
) -> None:
    """A run stopped at a step that is the last one when it continues with fewer steps."""
    run_dir = pretrain_jobs.copy_without_end(whole_run, tmp_path / "run", scores=False)
    (run_dir / "predictions.json").unlink()
    assert jobs.run(made.squad_config(model, questions, run_dir), 2) == [EXIT_OK] * 2
    found, wanted = (read_predictions(run / "predictions.json") for run in (run_dir, whole_run))
    assert found == wanted and (run_dir / "transformers" / "config.json").is_file()


def test_misplaced_answers_are_counted_or_refused(model: Path, questions: Path, tmp_path: Path) -> None:
    tree = json.loads(questions.read_text())
    tree["data"][0]["paragraphs"][0]["qas"][0]["answers"][0]["answer_start"] += 1
    shifted = tmp_path / "shifted.json"
    shifted.write_text(json.dumps(tree))
    data = {"path": shifted, "eval": questions}
    config = made.squad_config(model, questions, tmp_path / "run", data=data, train={"total_steps": 1})
    assert jobs.run(config) == [EXIT_OK]
    said = (tmp_path / "run" / "worker-0.log").read_text()
    assert "training: 23 questions" in said
    answer = "answer that does not stand at its answer_start"
    assert f"left out 1: {answer}: 1 (data[0].paragraphs[0].qas[0].answers[0]: '" in said
    assert said.count(answer) == 1
    refused = made.squad_config(
        model, questions, tmp_path / "other", data={**data, "on_bad": "refuse"}, train={"total_steps": 1}
    )
    assert jobs.run(refused) == [EXIT_USAGE]
    assert f"is an {answer}" in (tmp_path / "other" / "worker-0.log").read_text()


def test_squad_1_1_has_its_own_scores_and_no_null_odds(model: Path, tmp_path: Path) -> None:
    questions = made.write_questions(tmp_path / "made-v1.1.json", version="1.1")
    assert jobs.run(made.squad_config(model, questions, tmp_path / "run", train={"total_steps": 1})) == [
        EXIT_OK
    ]
    assert json.loads((tmp_path / "run" / "scores.json").read_text()).keys() == {"exact_match", "f1"}
    assert not (tmp_path / "run" / "null_odds.json").exists()
    assert all(read_predictions(tmp_path / "run" / "predictions.json").values())


def test_a_pretraining_run_is_a_model_to_start_from(questions: Path, tmp_path: Path) -> None:
    text = pretrain_jobs.prepare_small(tmp_path)
    pretrained = tmp_path / "pretrained"
    config = pretrain_jobs.small_config(text, pretrained, train={"total_steps": 4})
    assert pretrain_jobs.run(config, 1) == [EXIT_OK]
    window = {"max_seq_length": 32, "doc_stride": 8, "max_question_length": 6}
    changes = {"model": {"path": pretrained, "from_scratch": False}, "window": window}
    tuned = made.squad_config(
        pretrained,
        questions,
        tmp_path / "tuned",
        train={"total_steps": 2},
        optim={"learning_rate": 0.0},
        **changes,
    )
    assert jobs.run(tuned, 2) == [EXIT_OK] * 2
    from transformers import AutoModel

    ours, theirs = (
        AutoModel.from_pretrained(run / "transformers").state_dict()
        for run in (tmp_path / "tuned", pretrained)
    )
    name = "encoder.embedding_hidden_mapping_in.weight"
    assert ours[name].equal(theirs[name])
    again = made.squad_config(
        tmp_path / "tuned",
        questions,
        tmp_path / "again",
        train={"total_steps": 1},
        **{**changes, "model": {"path": tmp_path / "tuned", "from_scratch": False}},
    )
    assert jobs.run(again, 1) == [EXIT_OK]  # and so is a finetuned run
    assert not (tmp_path / "again" / "start").exists()


def _short_finetuning(
    rank: int, num_workers: int, port: int, model: Path, questions: Path, out: Path
) -> None:
    """Finetune inside a run that trains something else, and look what it leaves of the random numbers."""
    from shoal.recipes.squad import finetune_copy
    from shoal.train.run import Run

    worker = jobs.joined(rank, num_workers, port)
    with Run.open(out / "outer", worker=worker) as run:
        torch.manual_seed(3)
        wanted = torch.rand(4)
        torch.manual_seed(3)
        scores = finetune_copy(model, made.squad_config(model, questions, out / "never"), run)
        assert torch.rand(4).equal(wanted)
    (out / f"scores-{rank}.json").write_text(json.dumps(scores))


def test_a_short_finetuning_inside_a_run_scores_as_the_command_does(
    model: Path, questions: Path, whole_run: Path, tmp_path: Path
) -> None:
    port = free_port()
    workers = [
        fork_process(_short_finetuning, rank, 2, port, model, questions, tmp_path) for rank in range(2)
    ]
    assert jobs.wait_for(workers) == [0, 0]
    found = [json.loads((tmp_path / f"scores-{rank}.json").read_text()) for rank in range(2)]
    assert found[0] == found[1]
    wanted = json.loads((whole_run / "scores.json").read_text())
    assert found[0] == pytest.approx({n: v for n, v in wanted.items() if not n.endswith("total")}, abs=1e-4)
    assert not (tmp_path / "never").exists() and not (tmp_path / "outer" / "predictions.json").exists()
