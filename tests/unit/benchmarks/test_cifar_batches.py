"""The benchmark of large batches reads its figures from a run."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from benchmarks.cifar_batches import CASES, outcome, train

from shoal.record import End, Evaluation, Resume, Row, Step
from shoal.train.reporting import RecordWriter


def step(number: int, step_s: float) -> Step:
    return Step(
        step=number,
        samples=number,
        loss=1.0,
        metrics={},
        learning_rate=0.1,
        loss_scale=1.0,
        grad_norm=1.0,
        weight_norm=1.0,
        samples_per_s=1 / step_s,
        step_s=step_s,
        parts_s={},
    )


def evaluation(number: int, accuracy: float, seconds: float) -> Evaluation:
    metrics = {"top1_accuracy": accuracy}
    return Evaluation(step=number, split="validation", num_samples=10, metrics=metrics, seconds=seconds)


def test_the_time_of_an_interrupted_run_is_that_of_its_steps(tmp_path: Path) -> None:
    lost = [step(150, 9.0)]
    rows: list[Row] = [
        step(50, 2.0),
        evaluation(60, 0.5, 7.0),
        step(100, 3.0),
        evaluation(120, 0.6, 8.0),
        *lost,
    ]
    rows += [Resume(step=120, path="checkpoint"), step(150, 4.0), evaluation(150, 0.7, 9.0)]
    with closing(RecordWriter(tmp_path)) as writer:
        for row in rows:
            writer.write(row)
    accuracy, seconds = outcome(tmp_path)
    assert accuracy == 0.7
    assert seconds == 50 * 2 + 50 * 3 + 50 * 4 + 7 + 8 + 9


def test_a_run_whose_record_has_its_end_is_not_begun_again(tmp_path: Path) -> None:
    """There are no images, so to begin would fail."""
    with closing(RecordWriter(tmp_path)) as writer:
        writer.write(evaluation(60, 0.5, 7.0))
        writer.write(End(step=60, seconds=9.0, metrics={}))
    before = (tmp_path / "record.jsonl").read_bytes()
    train(CASES[0], tmp_path / "images", tmp_path, seed=1, threads=1, more=())
    assert (tmp_path / "record.jsonl").read_bytes() == before
