"""Runs that are defined in epochs: their axis, their unit, their scaling efficiency."""

from __future__ import annotations

import random
from pathlib import Path

import report_records as records

from shoal.record import Evaluation
from shoal.report import charts, tables
from shoal.report.page import render
from shoal.report.runs import RecordedRun, load_runs
from shoal.train.reporting import RecordWriter


def run_of(
    folder: Path, name: str, *, batch: int, workers: int, rate: float, epoch_samples: int
) -> RecordedRun:
    """Return a run of two steps with top-1 scores."""
    folder.mkdir()
    writer = RecordWriter(folder)
    writer.write(
        records.start(
            run=name,
            recipe="resnet50",
            unit="images",
            epoch_samples=epoch_samples,
            global_batch_size=batch,
            num_workers=workers,
            references={"top1_accuracy": 0.1},
        )
    )
    for number in (1, 2):
        row = records.step(
            number, records.BEGIN_S + number, random.Random(1), metrics={}, samples_per_s=rate, step_s=1.0
        )
        writer.write(row)
    metrics = {"top1_accuracy": 0.75, "loss": 1.0}
    writer.write(Evaluation(step=2, split="validation", num_samples=8, metrics=metrics, seconds=1.0))
    writer.close()
    return load_runs([folder])[0]


def test_curves_over_epochs_where_every_run_has_them(tmp_path: Path) -> None:
    small = run_of(tmp_path / "a", "a", batch=256, workers=1, rate=100, epoch_samples=1_024)
    large = run_of(tmp_path / "b", "b", batch=1_024, workers=4, rate=360, epoch_samples=1_024)
    assert charts.by_epoch([small, large])
    titles = {chart.title: chart for chart in charts.curve_charts([small, large])}
    assert ">epoch<" in titles["Top-1 accuracy"].svg and "chance 10.0 %" in titles["Top-1 accuracy"].svg
    assert charts.throughput_chart([small, large]).unit == "images/s"  # type: ignore[union-attr]
    other = run_of(tmp_path / "c", "c", batch=64, workers=1, rate=1, epoch_samples=0)
    assert not charts.by_epoch([small, other])
    assert "Over epochs." in render([small, large]) and "Over optimizer steps." in render([small, other])
    assert ">optimizer step<" in charts.curve_charts([small, other])[0].svg


def test_scaling_efficiency(tmp_path: Path) -> None:
    small = run_of(tmp_path / "a", "a", batch=256, workers=1, rate=100, epoch_samples=1_024)
    large = run_of(tmp_path / "b", "b", batch=1_024, workers=4, rate=360, epoch_samples=1_024)
    lines = {line.name: line.cells for line in tables.facts([small, large])}
    assert lines["scaling efficiency"] == ["–", "90.0 % (from 1 worker)"]
    assert lines["throughput"] == ["100 images/s", "360 images/s"]
    assert "scaling efficiency" not in {line.name for line in tables.facts([small])}
