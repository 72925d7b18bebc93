"""The record of a run: what is written is read, and what a kill or a resume left behind is settled."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import ShoalError
from shoal.record import (
    FILE_NAME,
    FORMAT,
    PARTS,
    Checkpoint,
    End,
    Evaluation,
    PipelineBox,
    PipelineStep,
    Reads,
    Resume,
    Row,
    Start,
    Step,
    Stop,
    read_record,
)
from shoal.train.reporting import RecordWriter


def start(**changes: Any) -> Start:
    values: dict[str, Any] = {
        "run": "first",
        "recipe": "albert",
        "command": ["shoal", "train", "albert"],
        "config": {"model": {"num_layers": 2, "dropout": None}, "data": {"path": "text"}},
        "num_workers": 2,
        "num_hosts": 1,
        "backend": "gloo",
        "device": "cpu",
        "precision": "fp32",
        "versions": {"torch": "2.15.0"},
        "num_parameters": 1_000,
        "total_steps": 100,
        "global_batch_size": 64,
        "micro_batch_size": 16,
        "accumulation_steps": 2,
        "references": {"mlm_loss": 7.1},
    }
    return Start(**{**values, **changes})


def step(number: int, **changes: Any) -> Step:
    values: dict[str, Any] = {
        "step": number,
        "samples": 64 * number,
        "loss": 9.0 - number / 100,
        "metrics": {"mlm_accuracy": 0.25},
        "learning_rate": 1e-3,
        "loss_scale": 1.0,
        "grad_norm": 2.5,
        "weight_norm": 30.0,
        "samples_per_s": 128.0,
        "step_s": 0.5,
        "parts_s": {part: 0.5 / len(PARTS) for part in PARTS},
        "num_skipped": 1,
        "peak_memory_bytes": 123,
    }
    return Step(**{**values, **changes})


def evaluation(number: int) -> Evaluation:
    return Evaluation(step=number, split="heldout", num_samples=10, metrics={"mlm_loss": 7.0}, seconds=0.1)


def checkpoint(number: int) -> Checkpoint:
    return Checkpoint(step=number, path=f"step-{number}", num_bytes=10, blocked_s=0.01, written_s=0.2)


def pipeline_step(number: int) -> PipelineStep:
    box = PipelineBox(rank=1, stage=3, action="F", micro_batch=2, begin_s=0.5, end_s=0.75)
    return PipelineStep(
        step=number,
        schedule="1f1b",
        placement=[0, 1],
        num_micro_batches=4,
        predicted=[box],
        traced=[box, box],
    )


def write(run_dir: Path, *rows: Row) -> Path:
    writer = RecordWriter(run_dir)
    for row in rows:
        writer.write(row)
    writer.close()
    return run_dir / FILE_NAME


def test_round_trip_of_every_kind(tmp_path: Path) -> None:
    rows = [
        start(),
        step(10),
        evaluation(10),
        checkpoint(10),
        pipeline_step(10),
        Reads(step=10, memory_bytes=3 << 40, peer_bytes=2 << 40, storage_bytes=1 << 40, peer_failures=1),
        Reads(
            step=10,
            memory_bytes=3,
            peer_bytes=2,
            storage_bytes=1,
            peer_failures=0,
            policy="own",
            without_room=2,
        ),
        Stop(step=10, reason="SIGTERM", exit_code=75),
        start(num_workers=3),
        Resume(step=10, path="step-10", damaged=["step-20: wrong checksum"]),
        step(20, loss=math.inf, grad_norm=-math.inf),
        End(step=20, seconds=3.5, metrics={"mlm_loss": 6.5}),
    ]
    write(tmp_path, *rows)
    assert read_record(tmp_path) == rows


def test_not_a_number_survives(tmp_path: Path) -> None:
    write(tmp_path, start(), step(10, loss=math.nan))
    (row,) = read_record(tmp_path)[1:]
    assert isinstance(row, Step)
    assert math.isnan(row.loss)


def test_each_line_is_on_its_way_before_write_returns(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path)
    for number in (1, 2, 3):
        writer.write(step(number))
        assert len(read_record(tmp_path)) == number
    writer.close()


def test_a_line_cut_anywhere_is_passed_over_and_its_neighbours_stay(tmp_path: Path) -> None:
    rows: list[Row] = [start(run="Zoë 🐟"), step(10), step(20)]
    path = write(tmp_path, *rows)
    whole = path.read_bytes()
    last = len(whole.splitlines(keepends=True)[-1])
    for size in range(len(whole) - last + 1, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert read_record(tmp_path) == rows[:2], size
    # The next process group goes on writing: the cut line must not swallow its first row.
    write(tmp_path, step(30))
    assert [row.step for row in read_record(tmp_path)[1:] if isinstance(row, Step)] == [10, 30]


def test_line_without_its_newline_is_whole(tmp_path: Path) -> None:
    path = write(tmp_path, start(), step(10))
    path.write_bytes(path.read_bytes()[:-1])
    write(tmp_path, step(20))
    assert [row.step for row in read_record(tmp_path) if isinstance(row, Step)] == [10, 20]


def test_zeros_left_by_a_power_cut_are_passed_over(tmp_path: Path) -> None:
    path = write(tmp_path, start(), step(10))
    path.write_bytes(path.read_bytes() + bytes(100) + b"\xff\xfe")
    write(tmp_path, step(20))
    assert [row.step for row in read_record(tmp_path) if isinstance(row, Step)] == [10, 20]


@pytest.mark.parametrize("resume_first", [False, True])
def test_resume_supersedes_what_was_said_of_later_steps(tmp_path: Path, resume_first: bool) -> None:
    before: list[Row] = [start(), step(10), checkpoint(10), evaluation(10), step(20), evaluation(20)]
    stop = Stop(step=25, reason="the loss is not finite", exit_code=1)
    again: list[Row] = [start(), Resume(step=10, path="step-10")]
    if resume_first:
        again.reverse()
    after: list[Row] = [step(20, loss=1.0), checkpoint(20)]
    write(tmp_path, *before, stop, *again, *after)
    assert read_record(tmp_path) == [*before[:4], stop, *again, *after]


def test_second_resume_supersedes_the_first_attempt_and_the_second(tmp_path: Path) -> None:
    first: list[Row] = [start(), *(step(number) for number in range(1, 10))]
    second: list[Row] = [start(), Resume(step=6, path="6"), *(step(n, loss=2.0) for n in (7, 8, 9))]
    third: list[Row] = [start(), Resume(step=3, path="3"), step(4, loss=3.0)]
    write(tmp_path, *first, *second, *third)
    steps = [(row.step, row.loss) for row in read_record(tmp_path) if isinstance(row, Step)]
    assert steps == [(1, 8.99), (2, 8.98), (3, 8.97), (4, 3.0)]


def test_start_without_resume_begins_again_from_nothing(tmp_path: Path) -> None:
    write(tmp_path, start(), step(1), step(2), step(3), start(), step(1, loss=5.0), step(2, loss=4.0))
    rows = read_record(tmp_path)
    assert [row.loss for row in rows if isinstance(row, Step)] == [5.0, 4.0]
    assert sum(isinstance(row, Start) for row in rows) == 2


def test_start_with_nothing_after_it_leaves_earlier_rows(tmp_path: Path) -> None:
    """A restart that has not said yet where it goes on from takes nothing away."""
    write(tmp_path, start(), step(1), step(2), start())
    assert [row.step for row in read_record(tmp_path) if isinstance(row, Step)] == [1, 2]


def test_kinds_and_fields_of_a_newer_version_are_passed_over(tmp_path: Path) -> None:
    path = write(tmp_path, start(), step(10))
    lines = path.read_text().splitlines()
    newer = {**json.loads(lines[1]), "step": 20, "temperature_c": 60}
    path.write_text("\n".join([*lines, '{"kind": "weather", "rain": true}', json.dumps(newer)]) + "\n")
    assert [row.step for row in read_record(tmp_path) if isinstance(row, Step)] == [10, 20]


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (None, "line 1: the record has format 0, of an older shoal, and this one has 1: use that version"),
        (2, "line 1: the record has format 2, of a newer shoal, and this one has 1: use that version"),
    ],
)
def test_a_record_of_another_format_is_neither_read_nor_continued(
    tmp_path: Path, number: int | None, said: str
) -> None:
    path = write(tmp_path, start(), step(10))
    lines = path.read_text().splitlines()
    first = json.loads(lines[0])
    assert first.pop("format") == FORMAT
    path.write_text(
        "\n".join([json.dumps(first | ({"format": number} if number else {})), *lines[1:]]) + "\n"
    )
    before = path.read_bytes()
    for use in (read_record, RecordWriter):
        with pytest.raises(ShoalError) as caught:
            use(tmp_path)
        assert str(caught.value).startswith(f"{path}, {said}")
        assert "another --run.dir" in str(caught.value)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"kind": "stop", "step": 3, "reason": "x"}', "exit_code"),
        ('{"kind": "stop", "step": "3", "reason": "x", "exit_code": 1}', "stop.step must be"),
        ('{"kind": "stop", "step": true, "reason": "x", "exit_code": 1}', "stop.step must be"),
        ('{"kind": "end", "step": 3, "seconds": 1, "metrics": {"a": "b"}}', "end.metrics must be"),
        ('{"kind": "resume", "step": 3, "path": "x", "damaged": [1]}', "resume.damaged must be"),
        (
            '{"kind": "pipeline_step", "step": 3, "schedule": "x", "placement": [0], "num_micro_batches": 1, '
            '"traced": [[0, 0, "F", 0, 1.5]]}',
            "pipeline_step.traced must be",
        ),
        ("[1, 2]", "a line is an object with a kind"),
        ("17", "a line is an object with a kind"),
        pytest.param(f'"{"é" * 60}"', "a line is an object with a kind", id="text of many bytes"),
    ],
)
def test_a_whole_line_of_the_wrong_form_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = write(tmp_path, start())
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ShoalError) as caught:
        read_record(tmp_path)
    assert str(caught.value).startswith(f"{path}, line 2: ")
    assert said in str(caught.value)


def test_not_the_directory_of_a_run(tmp_path: Path) -> None:
    with pytest.raises(ShoalError, match=r"holds no record\.jsonl: it is not the directory of a shoal run"):
        read_record(tmp_path)
    with pytest.raises(ShoalError, match=r"nowhere does not exist, so it has no record\.jsonl"):
        read_record(tmp_path / "nowhere")


def test_a_file_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ShoalError, match=r"record\.jsonl cannot be written: No such file or directory"):
        RecordWriter(tmp_path / "nowhere")
    (tmp_path / FILE_NAME).mkdir()
    with pytest.raises(ShoalError, match=r"record\.jsonl cannot be written: Is a directory"):
        RecordWriter(tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_one_error(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).symlink_to("/dev/full")
    writer = RecordWriter(tmp_path)
    with pytest.raises(ShoalError, match=r"record\.jsonl cannot be written: No space left on device"):
        writer.write(step(1))
    writer.close()
