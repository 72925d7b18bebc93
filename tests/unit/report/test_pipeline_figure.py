"""``shoal pipeline show``: a run's recorded step, or the layout of a model to come, as text and as SVG."""

from __future__ import annotations

import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from forked import shoal
from shoal.errors import EXIT_USAGE, ShoalError, UsageError
from shoal.record import PipelineBox, PipelineStep
from shoal.report.page import write_figure
from shoal.report.runs import recorded_step
from shoal.train.reporting import RecordWriter

BOXES = [PipelineBox(0, 0, "F", 0, 0.0, 1.0), PipelineBox(1, 1, "F", 0, 1.0, 2.0),
         PipelineBox(1, 1, "B", 0, 2.0, 4.0), PipelineBox(0, 0, "B", 0, 4.0, 6.0)]  # fmt: skip


def row(step: int) -> PipelineStep:
    return PipelineStep(
        step=step, schedule="1f1b", placement=[0, 1], num_micro_batches=1, predicted=BOXES, traced=BOXES
    )


def show(*arguments: str) -> subprocess.CompletedProcess[str]:
    return shoal("pipeline", "show", *arguments)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    writer = RecordWriter(tmp_path)
    for step in (3, 40):
        writer.write(row(step))
    writer.close()
    return tmp_path


def test_the_last_step_or_the_one_asked_for(run_dir: Path) -> None:
    assert recorded_step(run_dir).step == 40
    found = recorded_step(run_dir, 3)
    assert (found.step, found.predicted, found.traced) == (3, BOXES, BOXES)
    with pytest.raises(UsageError, match=r"--step 4 was not recorded in .*; these were: 3, 40"):
        recorded_step(run_dir, 4)


def test_a_run_without_a_pipeline_is_refused(tmp_path: Path) -> None:
    (tmp_path / "record.jsonl").write_text("")
    with pytest.raises(UsageError, match="has no step of a pipeline"):
        recorded_step(tmp_path)


def test_the_command_draws_a_run(run_dir: Path) -> None:
    result = show(str(run_dir), "--step", "3")
    assert result.returncode == 0, result.stderr
    assert "Step 3 of a pipeline of 2 ranks, 1 micro-batch, schedule 1f1b" in result.stdout
    assert "traced 6,000 ms, 50.0 % idle" in result.stdout
    drawn = ElementTree.parse(run_dir / "pipeline.svg").getroot()
    assert drawn.tag.endswith("svg")
    missing = show(str(run_dir), "--step", "5")
    assert missing.returncode == EXIT_USAGE and "Traceback" not in missing.stderr


def test_the_command_explains_a_layout_to_come(tmp_path: Path) -> None:
    svg = tmp_path / "step.svg"
    tiny = ("t5", "--preset", "tiny", "--devices", "4", "--memory", "1GB", "--parallel.pipeline", "2")
    result = show(*tiny, "--svg", str(svg))
    assert result.returncode == 0, result.stderr
    for said in (
        "T5 on 4 A100-40GB of 1GB",
        "on 2 ranks, 2 replicas",
        "why: the fastest that fits",
        "predicted step",
    ):
        assert said in result.stdout
    assert ElementTree.parse(svg).getroot().tag.endswith("svg")


def test_a_figure_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(ShoalError, match="cannot be written"):
        write_figure(row(1), tmp_path / "missing" / "step.svg")
