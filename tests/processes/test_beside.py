"""Evaluation beside training: scores of a copy of the weights, under its step; targets; weights left over."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import job_workers as jobs
import pytest
import use_jobs

import finetune_made as made
from forked import fork_process, free_port, wait_for
from forked_programs import fork_programs
from shoal.cli.train import work_as_host
from shoal.env.worker import WorkerEnv, WorkerRanks, part_of_training
from shoal.errors import EXIT_OK, EXIT_STOPPED, UsageError
from shoal.recipes.classify import ClassifyConfig
from shoal.record import End, Evaluation, Start, Target, read_record
from shoal.train import beside
from shoal.train.beside import FOLDER
from shoal.train.checkpoint_files import list_checkpoints
from shoal.train.config import RunOutputConfig


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and pairs."""
    folder = tmp_path_factory.mktemp("beside")
    made.write_model(folder / "bert")
    made.write_pairs(folder / "train.tsv", 60, seed=1)
    return folder


@pytest.fixture(scope="module")
def plain(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 60 steps that evaluates within training."""
    run_dir = tmp_path_factory.mktemp("plain") / "run"
    assert jobs.run(config(folder, run_dir, total_steps=60, every=30)) == [EXIT_OK]
    return run_dir


def config(folder: Path, run_dir: Path, *, total_steps: int, every: int, **run: Any) -> ClassifyConfig:
    train = folder / "train.tsv"
    return made.classify_config(
        folder / "bert",
        train,
        (train,),
        run_dir,
        train={"total_steps": total_steps},
        run={"validation_frequency": every, "checkpoint_frequency": every, **run},
    )


def rows_of(run_dir: Path, kind: type[Any]) -> list[Any]:
    return [row for row in read_record(run_dir) if isinstance(row, kind)]


def test_scores_have_the_bits_of_an_evaluation_within_training(
    folder: Path, plain: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    beside = config(folder, run_dir, total_steps=60, every=30, validation_beside=1)
    assert jobs.run(beside) == [EXIT_OK], (run_dir / "worker-0.log").read_text()
    found = sorted(rows_of(run_dir, Evaluation), key=lambda row: row.step)
    log = run_dir / FOLDER / "log.txt"
    assert [(row.step, row.beside) for row in found] == [(30, True), (60, False)], log.read_text()
    for row, wanted in zip(found, rows_of(plain, Evaluation), strict=True):
        assert (row.split, row.num_samples, row.samples) == (wanted.split, wanted.num_samples, wanted.samples)
        assert row.metrics == wanted.metrics
    assert found[0].metrics != found[1].metrics
    assert list_checkpoints(run_dir / FOLDER) == list((run_dir / FOLDER).glob("scores-*")) == []


@pytest.mark.slow
def test_a_target_ends_the_run_with_the_step_of_its_weights(folder: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    settings = config(
        folder, run_dir, total_steps=100_000, every=20, validation_beside=1, until="accuracy>=0"
    )
    assert jobs.run(settings, 2, deadline_s=240.0) == [EXIT_OK] * 2, (run_dir / "worker-0.log").read_text()
    (target,), (end,) = rows_of(run_dir, Target), rows_of(run_dir, End)
    first = next(row for row in rows_of(run_dir, Evaluation) if row.beside)
    assert target.step == first.step == 20 < end.step < 100_000
    assert target.metrics == {"train/accuracy": first.metrics["accuracy"]}
    assert target.evaluation_s == 0  # training did not wait
    assert rows_of(run_dir, Evaluation)[-1].step == end.step  # what is exported has scores, too
    assert "step-00000020" in [path.name for path in list_checkpoints(run_dir / FOLDER)]
    assert jobs.run(settings, 2) == [EXIT_OK] * 2
    assert "has reached its target accuracy>=0" in (run_dir / "worker-0.log").read_text()


@pytest.mark.slow
def test_weights_that_are_left_are_evaluated_by_the_next_process_group(folder: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    settings = config(folder, run_dir, total_steps=3_000, every=1_000, validation_beside=1)
    (worker,) = jobs.start(settings, 1)
    deadline = time.monotonic() + 100
    while not list_checkpoints(run_dir / FOLDER) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGTERM)
    worker.join(60)
    assert worker.exitcode == EXIT_STOPPED, (run_dir / "worker-0.log").read_text()
    assert rows_of(run_dir, Evaluation) == [] and len(list_checkpoints(run_dir / FOLDER)) == 1
    assert jobs.run(settings, 1, deadline_s=240.0) == [EXIT_OK], (run_dir / "worker-0.log").read_text()
    assert sorted(row.step for row in rows_of(run_dir, Evaluation)) == [1_000, 2_000, 3_000]
    assert list_checkpoints(run_dir / FOLDER) == []


@pytest.mark.slow
def test_an_evaluation_that_fails_does_not_end_training(folder: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    settings = config(folder, run_dir, total_steps=60, every=30, validation_beside=7)  # 12 do not divide by 7
    assert jobs.run(settings, 1) == [EXIT_OK]
    assert [row.step for row in rows_of(run_dir, Evaluation)] == [60]
    said = (run_dir / "worker-0.log").read_text()
    assert "the evaluation of step 30 beside training failed (exit code 2)" in said
    assert "7" in (run_dir / FOLDER / "log.txt").read_text()


def on_hosts(
    settings: ClassifyConfig, hosts: tuple[int, ...], patience_s: float = 1e9, *, forks: bool = True
) -> list[int | None]:
    """Run these hosts of a job of two with a worker each, and return their exit codes."""
    port = free_port()
    processes = [fork_process(be_host, settings, host, port, patience_s, forks) for host in hosts]
    return wait_for(processes, 500.0)


def be_host(settings: ClassifyConfig, host: int, port: int, patience_s: float, forks: bool) -> None:
    ranks = WorkerRanks(rank=host, num_workers=2, local_rank=0, num_local_workers=1)
    worker = WorkerEnv(ranks=ranks, master_addr="127.0.0.1", master_port=port, launcher="test")
    assert settings.run.dir is not None
    log = (settings.run.dir.parent / f"host-{host}.log").open("a")
    os.dup2(log.fileno(), sys.stderr.fileno())
    os.dup2(log.fileno(), sys.stdout.fileno())
    beside.SILENT_S = patience_s
    if forks:
        fork_programs()
    sys.exit(work_as_host("classify", settings, worker))


@pytest.mark.parametrize(
    "forks", [pytest.param(False, id="programs", marks=pytest.mark.slow), pytest.param(True, id="forked")]
)
def test_a_host_of_its_own_gives_the_scores_of_an_evaluation_within_training(
    forks: bool, folder: Path, plain: Path, tmp_path: Path
) -> None:
    """The slow case has real programs; those of the other tests are forked."""
    run_dir = tmp_path / "run"
    settings = config(folder, run_dir, total_steps=60, every=30, validation_hosts=1)
    assert on_hosts(settings, (0, 1), forks=forks) == [EXIT_OK] * 2, (tmp_path / "host-0.log").read_text()
    found = sorted(rows_of(run_dir, Evaluation), key=lambda row: row.step)
    assert [(row.step, row.beside) for row in found] == [(30, True), (60, False)]
    assert [row.metrics for row in found] == [row.metrics for row in rows_of(plain, Evaluation)]
    assert rows_of(run_dir, Start)[0].num_workers == 1
    (log,) = (run_dir / FOLDER).glob("log*")
    assert log.name == "log-0.txt" and "step 30" in log.read_text()  # by that host
    left = [path.name for path in (run_dir / FOLDER).iterdir()]
    assert sorted(left) == ["checkpoints", "log-0.txt", "owner"] and not list_checkpoints(run_dir / FOLDER)


def test_a_host_that_is_silent_costs_the_run_no_scores(folder: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    settings = config(folder, run_dir, total_steps=60, every=30, validation_hosts=1)
    assert on_hosts(settings, (0,), patience_s=0.0) == [EXIT_OK], (tmp_path / "host-0.log").read_text()
    found = sorted(rows_of(run_dir, Evaluation), key=lambda row: row.step)
    assert [(row.step, row.beside) for row in found] == [(30, True), (60, False)]
    assert "has given no sign of life for 0 s" in (tmp_path / "host-0.log").read_text()


def test_a_job_without_a_host_that_trains_is_refused_before_it_starts(folder: Path, tmp_path: Path) -> None:
    words = ["finetune", "classify", "--model", folder / "bert", "--data", folder / "train.tsv"]
    words += ["--eval", folder / "train.tsv", "--run.dir", tmp_path / "run", "--run.validation-hosts", 1]
    words += ["--run.validation-frequency", 30, "--dry-run"]
    assert "leaves none of 1 hosts to train" in use_jobs.refused(*words)
    ranks = WorkerRanks(rank=1, num_workers=4, local_rank=0, num_local_workers=2)
    worker = WorkerEnv(ranks=ranks, master_addr="127.0.0.1", master_port=1, launcher="mpirun")
    with pytest.raises(UsageError, match="needs ranks host by host"):
        part_of_training(worker, 1)


def test_settings_that_do_not_go_together() -> None:
    with pytest.raises(UsageError, match="two ways to evaluate beside training"):
        RunOutputConfig(validation_beside=1, validation_hosts=1)
    with pytest.raises(UsageError, match=r"run\.validation_beside needs weights on disk"):
        RunOutputConfig(validation_beside=1, save=False)
