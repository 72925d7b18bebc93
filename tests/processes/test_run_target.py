"""Trains up to a target: every recipe and own scripts end at the first evaluation that reaches it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import image_jobs
import job_workers
import mask_rcnn_jobs
import pretrain_jobs as jobs
import pytest
import test_pretrain_finetune
import torch
import torch.nn.functional as F
from test_run import Points, Sizes, net, same

import finetune_made as made
from forked import shoal
from shoal.env.worker import WorkerEnv
from shoal.errors import EXIT_OK, EXIT_USAGE
from shoal.recipes.finetuning import FinetuneConfig
from shoal.record import End, Evaluation, Phase, Target, read_record
from shoal.train.config import LoopConfig, RunConfig, required
from shoal.train.run import Run

questions = test_pretrain_finetune.questions


def script(directory: Path, worker: WorkerEnv, *, until: str | None, die_at: int = 0) -> int:
    """Train 8 steps; the score, which the first worker alone has, is a tenth of the step."""
    settings = RunConfig(
        log_frequency=1, checkpoint_frequency=3, until=until, mlperf_log=directory / "mlperf.log"
    )
    scores = {"validation": ["accuracy"], "other": ["f1"]}
    loop = LoopConfig(seed=5)
    with Run.open(directory, settings=settings, loop=loop, scores=scores, worker=worker) as run:
        module = net()
        model = run.data_parallel(module)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        run.keep(model=module, optimizer=optimizer)
        for step in run.steps(Points(), Sizes(12), until=8):
            with step:
                for points, inside in step:
                    loss = F.cross_entropy(model(points), inside, reduction="sum")
                    step.backward(loss / step.num_samples)
                step.update(optimizer, max_norm=1.0)
            if run.due(2):
                run.evaluation("validation", {"accuracy": run.step / 10 * run.world.is_main}, num_samples=50)
                if run.step == die_at:
                    raise ZeroDivisionError("killed")
        reached, num_steps = run.reached, run.step
        code = run.finish(lambda directory: torch.save(module.state_dict(), directory / "model.pt"))
        (directory / f"reached-{worker.ranks.rank}.json").write_text(json.dumps([reached, num_steps]))
        return code


def train(directory: Path, until: str | None, die_at: int = 0) -> list[int | None]:
    return job_workers.run_script(script, directory, until=until, die_at=die_at)


def rows_of(directory: Path, kind: type[Any]) -> list[Any]:
    return [row for row in read_record(directory) if isinstance(row, kind)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whole") / "run"
    assert train(directory, None) == [EXIT_OK, EXIT_OK]
    return directory


def test_all_workers_end_at_the_first_evaluation_that_reaches_it(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(run, "accuracy>=0.35") == [EXIT_OK, EXIT_OK]
    for rank in range(2):
        assert json.loads((run / f"reached-{rank}.json").read_text()) == [True, 4]
        assert json.loads((whole / f"reached-{rank}.json").read_text()) == [False, 8]
    (target,) = rows_of(run, Target)
    assert (target.step, target.until, target.metrics) == (4, "accuracy>=0.35", {"validation/accuracy": 0.4})
    evaluations = rows_of(run, Evaluation)
    assert [row.step for row in evaluations] == [2, 4]
    assert target.evaluation_s == sum(row.seconds for row in evaluations)
    begin_s = read_record(run)[0].time_s
    assert target.seconds == pytest.approx(evaluations[-1].time_s - begin_s, abs=1e-6)
    (end,) = rows_of(run, End)
    assert (end.step, end.metrics) == (4, {"accuracy": 0.4}) and not rows_of(whole, Target)
    assert "step 4 has the target accuracy>=0.35 (validation/accuracy 0.4):" in said(run)

    block, evaluation = ["block_start", "block_stop"], ["eval_start", "eval_accuracy", "eval_stop"]
    assert [key for key, _ in mlperf_lines(run) if key.endswith(("start", "stop", "accuracy"))] == [
        *("init_start", "init_stop", "run_start"),
        *(block + evaluation) * 2,
        "run_stop",
    ]
    assert [score for key, score in mlperf_lines(run) if key == "eval_accuracy"] == [0.2, 0.4]

    assert train(run, "accuracy>=35%") == [EXIT_OK, EXIT_OK]  # again: it says so and trains nothing
    assert "has reached its target accuracy>=0.35 (validation/accuracy 0.4): 4 of 8 steps" in said(run)
    assert len(rows_of(run, End)) == 1

    assert train(run, None) == [EXIT_OK, EXIT_OK]  # on from there, with the bits of a run without a target
    assert same(run, whole)


def mlperf_lines(directory: Path) -> list[tuple[str, Any]]:
    """Return key and value of each log line of MLPerf."""
    found = [json.loads(line[8:]) for line in (directory / "mlperf.log").read_text().splitlines()]
    return [(line["key"], line["value"]) for line in found]


def said(directory: Path) -> str:
    return (directory / "worker-0.log").read_text()


def test_a_target_of_the_last_step_and_one_that_is_missed(tmp_path: Path) -> None:
    assert train(tmp_path / "last", "accuracy>=0.8") == [EXIT_OK, EXIT_OK]
    assert json.loads((tmp_path / "last" / "reached-1.json").read_text()) == [True, 8]
    assert [row.step for row in rows_of(tmp_path / "last", Target)] == [8]
    assert train(tmp_path / "missed", "accuracy>=0.81") == [EXIT_OK, EXIT_OK]
    assert not rows_of(tmp_path / "missed", Target)
    assert "the target accuracy>=0.81 was not reached: validation/accuracy 0.8" in said(tmp_path / "missed")


def test_a_run_that_died_at_its_target_goes_back_and_reaches_it_again(whole: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert EXIT_OK not in train(run, "accuracy>=0.35", die_at=4)
    assert not rows_of(run, Target)
    assert train(run, "accuracy>=0.35") == [EXIT_OK, EXIT_OK]
    assert [row.step for row in rows_of(run, Target)] == [4]
    assert train(run, "accuracy>=0.7") == [EXIT_OK, EXIT_OK]
    assert [row.step for row in rows_of(run, Target)] == [4, 8]
    assert same(run, whole)


def test_an_unknown_score_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    assert train(tmp_path / "run", "acuracy>=0.3") == [EXIT_USAGE, EXIT_USAGE]
    assert (
        "no score acuracy. Did you mean 'accuracy'? Its scores by split are validation: accuracy; other: f1"
        in (said(tmp_path / "run"))
    )
    assert not (tmp_path / "run" / "record.jsonl").exists()


# ---- recipes ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.prepare_small(tmp_path_factory.mktemp("text"))


def test_bert_ends_in_its_first_phase(text: Path, tmp_path: Path) -> None:
    config = jobs.small_bert_config(text, tmp_path / "run", run={"until": "nsp_loss<=99"})
    for _ in range(2):
        assert jobs.run(config) == [EXIT_OK, EXIT_OK], said(tmp_path / "run")
        assert [row.step for row in rows_of(tmp_path / "run", Target)] == [6]
        assert [row.name for row in rows_of(tmp_path / "run", Phase)] == ["phase1"]
    assert (tmp_path / "run" / "transformers" / "config.json").is_file()
    assert len(rows_of(tmp_path / "run", End)) == 1


def test_albert_ends_at_a_score_of_squad(text: Path, questions: Path, tmp_path: Path) -> None:
    config = jobs.small_config(
        text,
        tmp_path / "run",
        run={"until": "squad_f1>=0", "validation_frequency": 12},
        finetune=test_pretrain_finetune.settings(questions, 4, 8),
    )
    assert jobs.run(config) == [EXIT_OK, EXIT_OK], said(tmp_path / "run")
    assert [(row.step, row.split) for row in rows_of(tmp_path / "run", Evaluation)] == [
        (4, "squad"),
        (4, "validation"),  # for the summary
    ]
    assert max(jobs.losses(tmp_path / "run")) == 4 and [
        r.step for r in rows_of(tmp_path / "run", Target)
    ] == [4]
    assert known(config) == {"validation": {"mlm_loss", "mlm_accuracy", "sop_loss", "sop_accuracy"}} | {
        "squad": {"exact_match", "f1"}
    }


def known(config: Any) -> dict[str, set[str]]:
    """Return the names of scores that a recipe declares, which must be those of its record."""
    declared = {split: set(names) for split, names in config.scores.items()}
    found = {row.split: set(row.metrics) for row in rows_of(config.run.dir, Evaluation)}
    assert declared == found
    return declared


@pytest.mark.slow
def test_t5_and_the_image_recipes_end_at_theirs(text: Path, tmp_path: Path) -> None:
    t5 = jobs.small_t5_config(text, tmp_path / "t5", run={"until": "span_loss<=99"})
    resnet = image_jobs.small_config(image_jobs.prepare_small(tmp_path), tmp_path / "resnet")
    resnet = replace(resnet, run=replace(resnet.run, until="top1>=0"))
    detector = mask_rcnn_jobs.small_config(mask_rcnn_jobs.prepare_small(tmp_path), tmp_path / "detector")
    run = replace(detector.run, until="bbox>=0,segm>=0", validation_frequency=2)
    for config, step in ((t5, 3), (resnet, 3), (replace(detector, run=run), 2)):
        assert jobs.run(config) == [EXIT_OK, EXIT_OK], said(config.run.dir)
        assert [row.step for row in rows_of(config.run.dir, Target)] == [step]
        assert known(config)


def test_finetuning_ends_when_all_files_have_the_score(tmp_path: Path) -> None:
    """Files are scored one after the other; the run ends when those of the step are all there."""
    model, t5 = made.write_model(tmp_path / "bert"), made.write_t5(tmp_path / "t5-model")
    pairs = [made.write_pairs(tmp_path / f"{name}.tsv", 24, seed=1) for name in ("train", "easy", "hard")]
    run: dict[str, Any] = {"validation_frequency": 2, "until": "acc>=0"}
    questions = made.write_questions(tmp_path / "made-v2.0.json")
    run_squad = {**run, "until": "exact>=0,made-v2.0/squad_f1>=0"}
    configs: list[FinetuneConfig] = [
        made.classify_config(model, pairs[0], (*pairs,), tmp_path / "classify", run=run),
        made.t5_config(t5, pairs[0], (*pairs[1:],), tmp_path / "t5", run=run),
        made.squad_config(model, questions, tmp_path / "squad", run=run_squad),
    ]
    for config in configs:
        directory = required(config.run.dir)
        assert job_workers.run(config, 2) == [EXIT_OK, EXIT_OK], said(directory)
        assert [row.step for row in rows_of(directory, Target)] == [2]
        (end,) = rows_of(directory, End)
        assert end.step == 2 and {row.split for row in rows_of(directory, Evaluation)} == set(config.scores)
    assert set(configs[0].scores) == {"train", "easy", "hard"}


def test_the_command_refuses_what_its_recipe_does_not_score(text: Path, tmp_path: Path) -> None:
    options = ("--data.path", str(text), "--run.dir", str(tmp_path / "run"), "--dry-run")
    found = shoal("train", "albert", "--preset", "tiny", *options, "--run.until", "top1>=0.7")
    assert found.returncode == EXIT_USAGE and "no score top1" in found.stderr, found.stderr
    found = shoal("train", "albert", "--preset", "tiny", *options, "--run.until", "mlm_loss<=2")
    assert found.returncode == EXIT_OK and 'until = "mlm_loss<=2"' in found.stdout, found.stderr
    never = ("--run.until", "mlm_loss<=2", "--run.validation-frequency", "0")
    found = shoal("train", "albert", "--preset", "tiny", *options, *never)
    assert (
        found.returncode == EXIT_USAGE
        and "needs evaluations: set --run.validation-frequency N" in found.stderr
    )
