"""Rows that several publications have measured, and how well one predicts another."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmarks.plan_equal import equals_of
from benchmarks.plan_families import Prediction
from benchmarks.plan_intervals import Judged
from benchmarks.plan_rows import THROUGHPUT, Row


def judged(line: int, publication: str, published: float, gpus: int = 16) -> Judged:
    prediction = Prediction(
        family=("resnet50", "host", "", "images_per_s", publication),
        kind=THROUGHPUT,
        line=line,
        system="made",
        nodes=2,
        gpus=gpus,
        times_the_gpus=2.0,
        published=published,
        planned=100.0,
        linear=200.0,
        training=False,
        publisher=publication,
        generation="A100",
        doubts=(),
    )
    return Judged(
        prediction=prediction, log_center=0.0, log_factor=None, linear_log_factor=0.1, amdahl_error=0.0
    )


def row(number: int, gpus: int = 16) -> Row:
    return Row(
        number=number, system="made", model="resnet50", hardware="", nic_gbps=None, nodes=2, gpus=gpus,
        global_batch=64, metric="images_per_s", value=1.0, source="made", accelerator="A100-80GB",
    )  # fmt: skip


def test_a_row_is_predicted_by_the_median_of_the_other_publications() -> None:
    runs = [judged(2, "a", 150.0), judged(3, "b", 160.0), judged(4, "b", 180.0), judged(5, "c", 90.0, gpus=8)]
    rows = [row(2), row(3), row(4), row(5, gpus=8)]
    found = equals_of(runs, rows)
    assert [each.judged.prediction.line for each in found] == [2, 3, 4], "nobody else measured 8 devices"
    assert [each.by_others for each in found] == pytest.approx([170 / 150 - 1, 1 - 150 / 160, 1 - 150 / 180])
    other = [replace(each, global_batch=32) if each.number == 2 else each for each in rows]
    assert not equals_of(runs, other), "the two of one publication say nothing about each other"
