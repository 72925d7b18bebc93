"""Events of a run in the report."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import report_records as records
import torch

from shoal.errors import ShoalError, UsageError
from shoal.record import PARTS, End, Evaluation, Members, Resume, Row, Step, Stop, read_planned, target_row
from shoal.report import runs, tables, timeline
from shoal.report.page import render
from shoal.report.runs import RecordedRun, load_runs
from shoal.train.reporting import device_name


def load(folder: Path, rows: list[Row]) -> RecordedRun:
    return load_runs([records.write_run(folder, rows)])[0]


def steps(*numbers: int, **changes: object) -> list[Row]:
    noise = random.Random(0)
    return [records.step(number, records.BEGIN_S + number, noise, **changes) for number in numbers]


def test_states(tmp_path: Path) -> None:
    later = records.BEGIN_S + 100
    stop = Stop(step=2, reason="SIGUSR1", exit_code=75, time_s=later)
    resume = Resume(step=2, path="c", time_s=later)
    end = End(step=3, seconds=1.0, metrics={}, time_s=later)
    cases: list[tuple[list[Row], str, str]] = [
        ([], "open", "running or killed"),
        ([stop], "stopped", "stopped: SIGUSR1"),
        ([stop, records.start(), resume], "open", "running or killed"),
        ([stop, records.start(), resume, *steps(3), end], "finished", "finished"),
    ]
    for index, (more, state, text) in enumerate(cases):
        run = load(tmp_path / str(index), [records.start(), *steps(1, 2), *more])
        assert (run.state, tables.state_text(run)) == (state, text)


def test_averages_weigh_each_line_by_its_steps(tmp_path: Path) -> None:
    """Lines at steps 10, 20, then a resume at 25 and lines at 30 and 50: weights 10, 10, 5, 20."""
    parts = [dict.fromkeys(PARTS, 0.0) | {"forward": seconds} for seconds in (1.0, 1.0, 2.0, 3.0)]
    made = [
        records.step(
            n, records.BEGIN_S + n, random.Random(0), parts_s=p, step_s=p["forward"], samples_per_s=r
        )
        for n, p, r in zip((10, 20, 30, 50), parts, (64.0, 64.0, 32.0, 21.0), strict=True)
    ]
    rows: list[Row] = [records.start(), *made[:2], records.start(), Resume(step=25, path="c"), *made[2:]]
    run = load(tmp_path, rows)
    assert runs.steps_per_row(run) == [10, 10, 5, 20]
    assert runs.mean_step_s(run) == pytest.approx((20 * 1.0 + 5 * 2.0 + 20 * 3.0) / 45, rel=1e-12)
    assert runs.mean_parts_s(run)["forward"] == pytest.approx(runs.mean_step_s(run), rel=1e-12)
    assert runs.mean_rate(run) == pytest.approx((20 * 64 + 10 * 32 + 60 * 21) / 90, rel=1e-12)


def test_killed_and_resumed_run(tmp_path: Path) -> None:
    run = load(tmp_path, records.finished_run())
    assert [step.step for step in run.steps] == list(range(10, 1001, 10))
    assert run.last_step == 1000
    resumed = [[row.step for row in group.rows if isinstance(row, Resume)] for group in run.groups]
    assert resumed == [[], [400], [700]]
    assert [group.stop is not None for group in run.groups] == [False, True, False]
    pauses = run.rows[-1].time_s - run.groups[0].start.time_s - run.seconds
    assert pauses > 95 + 40 - 6  # what the kill lost is a pause too
    assert [event.kind for event in tables.events(run)].count("checkpoint") == 6


def test_last_scores_are_held_out_ones_else_the_last_step(tmp_path: Path) -> None:
    made = load(tmp_path / "a", records.finished_run())
    (mlm, _, sop) = runs.final_scores(made)
    assert (mlm.metric, mlm.split, mlm.step, mlm.reference) == (
        "mlm_loss",
        "held-out",
        1000,
        records.UNIGRAM_ENTROPY,
    )
    assert sop.reference == 0.5
    without = load(tmp_path / "b", [records.start(), *steps(1, 2)])
    assert {(score.split, score.step) for score in runs.final_scores(without)} == {("training", 2)}
    assert runs.final_scores(without)[0].metric == "loss"


def test_tiles_compare_with_the_reference_in_the_right_direction(tmp_path: Path) -> None:
    cases = [
        (6.12, 0.62, "good", "0.50 below unigram entropy", "12.0 points above chance"),
        (7.12, 0.45, "warn", "0.50 above unigram entropy", "5.0 points below chance"),
    ]
    for index, (mlm, sop, tone, loss, accuracy) in enumerate(cases):
        metrics = {"mlm_loss": mlm, "sop_accuracy": sop}
        last = Evaluation(step=2, split="held-out", num_samples=1, metrics=metrics, seconds=0.1)
        made = tables.tiles(load(tmp_path / str(index), [records.start(), *steps(1, 2), last]))
        assert [tile.notes[-1] for tile in made[-2:]] == [loss, accuracy]
        assert [tile.tone for tile in made[-2:]] == [tone, tone]


def test_time_to_target_without_pauses_with_and_without_evaluation(tmp_path: Path) -> None:
    """100 s, a pause of 500 s, then 60 s up to the scores; evaluations of 12 s and 8 s, one too late."""
    begin = records.BEGIN_S
    resume = Resume(step=1, path="c", time_s=begin + 600)

    def scored(step: int, seconds: float, time_s: float) -> Evaluation:
        metrics = {"top1_accuracy": 0.1 * step}
        return Evaluation(
            step=step, split="v", num_samples=1, metrics=metrics, seconds=seconds, time_s=time_s
        )

    first = [records.start(), *steps(1), scored(1, 12.0, begin + 100)]
    second = [records.start(time_s=begin + 600), resume, scored(2, 8.0, begin + 660)]
    late = scored(3, 5.0, begin + 700)
    row = target_row([*first, *second, late], 2, "top1_accuracy>=0.2", {"v/top1_accuracy": 0.2})
    assert (row.seconds, row.evaluation_s) == (pytest.approx(160.0), 20.0)
    run = load(tmp_path / "run", [*first, *second, row])
    tile = next(tile for tile in tables.tiles(run) if tile.label == "Time to target")
    assert (tile.value, tile.notes[0]) == ("2 min 40 s", "2 min 20 s without evaluation")
    (line,) = [line for line in tables.facts([run]) if line.name == "time to target"]
    assert line.cells == ["2 min 40 s (2 min 20 s without evaluation), at step 2: top1_accuracy>=0.2"]
    assert tables.events(run)[-1].detail == "top1_accuracy>=0.2 after 2 min 40 s"

    missed = load(tmp_path / "missed", [records.start(config={"run": {"until": "top1>=0.7"}}), *steps(1)])
    (line,) = [line for line in tables.facts([missed]) if line.name == "time to target"]
    assert line.cells == ["top1>=0.7: not reached"]


def test_batch_arithmetic() -> None:
    assert tables.batch_arithmetic(records.start()) == "64 = 16 × 2 workers × 2 accumulation"
    uneven = records.start(global_batch_size=60)
    assert tables.batch_arithmetic(uneven) == "60 ≤ 16 × 2 workers × 2 accumulation"


def test_skipped_steps_are_counted_with_their_place(tmp_path: Path) -> None:
    run = load(tmp_path, records.diverged_run())
    assert tables.skipped(run) == "4 (reported at step 30, 60, 90, 120)"


def test_config_is_flat_and_differences_are_marked(tmp_path: Path) -> None:
    made = load_runs(
        [
            records.write_run(tmp_path / "a", records.finished_run()),
            records.write_run(tmp_path / "b", records.faster_run()),
        ]
    )
    lines = {line.name: line for line in tables.config_lines(made)}
    assert lines["optimizer.betas"].cells == ["0.9, 0.999", "0.9, 0.999"]
    assert lines["optimizer.clip"].cells == ["none", "1.0"]
    assert {name for name, line in lines.items() if line.differs} == {
        "model.dropout",
        "optimizer.name",
        "optimizer.learning_rate",
        "optimizer.clip",
    }


def test_bars_share_one_scale_and_percents_add_up(tmp_path: Path) -> None:
    made = load_runs(
        [
            records.write_run(tmp_path / "a", records.finished_run()),
            records.write_run(tmp_path / "b", records.faster_run()),
        ]
    )
    slow, fast = tables.step_shares(made)
    assert sum(segment.width for segment in slow) == pytest.approx(100)
    assert sum(segment.width for segment in fast) == pytest.approx(100 / 1.5, rel=0.02)
    assert sum(float(segment.share.split()[0]) for segment in fast) == pytest.approx(100, abs=0.3)
    assert [segment.title for segment in slow][3] == "gradient wait"


def test_parts_of_either_run_have_a_row_and_one_colour(tmp_path: Path) -> None:
    other = [
        replace(row, parts_s={"send": 0.1, **row.parts_s}) if isinstance(row, Step) else row
        for row in records.faster_run()
    ]
    shares = tables.step_shares(
        load_runs(
            [
                records.write_run(tmp_path / "a", records.finished_run()),
                records.write_run(tmp_path / "b", other),
            ]
        )
    )
    rows = {one.title: row for row in tables.part_rows(shares) if (one := row[0] or row[1])}
    assert rows["send"][0] is None and rows["send"][1] is not None
    both = [row for row in rows.values() if None not in row]
    assert len(both) == len(shares[0]) == len(rows) - 1
    assert all(first.colour == second.colour for first, second in both if first and second)
    assert "–" in render(load_runs([tmp_path / "a", tmp_path / "b"]))


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    rows = [records.start()]
    paths = [records.write_run(tmp_path / name, rows) for name in ("a", "b")]
    assert [run.name for run in load_runs(paths)] == [f"first-light ({path})" for path in paths]


def test_record_without_a_start_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ShoalError, match="has no start: nothing has been trained there yet"):
        load(tmp_path, steps(1))


@pytest.mark.parametrize("name", list(records.RUNS))
def test_timeline_stays_on_its_axis(tmp_path: Path, name: str) -> None:
    laid = timeline.timeline([load(tmp_path, records.RUNS[name]())])
    assert 2 <= len(laid.ticks) <= 9
    places = [place for place, _ in laid.ticks]
    places += [mark.left for lane in laid.lanes for mark in lane.marks]
    places += [span.left + span.width for lane in laid.lanes for span in lane.spans]
    assert all(-1e-9 <= place <= 100 + 1e-9 for place in places)
    assert len(laid.lanes[0].marks) <= timeline.MAX_CHECKPOINT_MARKS + 5


def test_workers_that_are_lost_and_come_are_events_and_marks(tmp_path: Path) -> None:
    changes = [(3, 2), (2, 3)]
    rows: list[Row] = [records.start()]
    rows += [
        Members(step=step, num_before=before, num_workers=after, time_s=records.BEGIN_S + step)
        for step, (before, after) in enumerate(changes, start=4)
    ]
    run = load(tmp_path, rows)
    listed = [(event.kind, event.step, event.detail) for event in tables.events(run)[1:]]
    assert listed == [
        ("members", "4", "3 workers before, 2 from here on"),
        ("members", "5", "2 workers before, 3 from here on"),
    ]
    (lane,) = timeline.timeline([run]).lanes
    assert [(mark.kind, mark.title) for mark in lane.marks] == [
        ("lost", "lost at step 4"),
        ("joined", "joined at step 5"),
    ]


def test_a_long_list_of_events_is_cut_in_the_middle(tmp_path: Path) -> None:
    rows: list[Row] = [records.start()]
    rows += [records.checkpoint(n, records.BEGIN_S + n) for n in range(1, 1001)]
    made = tables.events(load(tmp_path, rows))
    assert len(made) == tables.MAX_EVENTS + 1
    assert made[tables.MAX_EVENTS // 2].detail == "601 rows left out"
    assert made[-1].step == "1,000"


def test_a_plan_beside_what_was_measured(tmp_path: Path) -> None:
    """Planned are 8 steps of 3 s and an hour in all, for 10 dollars."""
    file = tmp_path / "plan.json"
    best = {
        "cluster": "2xmine", "num_steps": [6, 2], "step_s": [2.0, 6.0], "samples_per_s": 64.0,
        "total_s": 3600.0, "dollars": 10.0, "memory_bytes": 1 << 30,
    }  # fmt: skip
    file.write_text(json.dumps({"best": best}))
    planned = read_planned(file)
    assert (planned["step_s"], planned["num_steps"], planned["dollars_per_h"]) == (3.0, 8, 10.0)
    begun = replace(records.start(), planned=planned, total_steps=8, device=device_name(torch.device("cpu")))
    run = load(
        tmp_path / "run", [begun, *steps(1, 2, step_s=1.5, samples_per_s=32.0, peak_memory_bytes=2 << 30)]
    )
    lines = {line.name: line.cells[0] for line in tables.facts([run])}
    assert lines["plan for"] == "2xmine"
    assert lines["planned step"] == "3,000 ms; measured 1,500 ms, 50.0 % less"
    assert lines["planned throughput"].endswith("50.0 % less")
    assert lines["planned memory"] == "1 GiB of tensors; measured 2 GiB of the whole process"
    of_gpu = [replace(begun, device="Tesla V100"), *steps(1, 2, peak_memory_bytes=2 << 30)]
    assert tables.planned_memory(load(tmp_path / "gpu", of_gpu)) == "1 GiB; measured 2 GiB, 100.0 % more"
    assert lines["planned time"] == "1 h 00 min" and lines["planned cost"].startswith("10.00 dollars; 0.0")
    longer = load(tmp_path / "longer", [replace(begun, total_steps=9), *steps(1, 9)])
    of_longer = {line.name: line.cells[0] for line in tables.facts([longer])}
    assert of_longer["planned time"] == "1 h 00 min for 8 steps"
    plain = load(tmp_path / "plain", [records.start(), *steps(1, 2)])
    assert "planned step" not in {line.name for line in tables.facts([plain])}
    assert {line.name: line.cells for line in tables.facts([run, plain])}["planned step"][1] == "–"
    for text, message in (("{}", "no file of `shoal plan --json`"), ("[", "run.plan .*plan.json")):
        file.write_text(text)
        with pytest.raises(UsageError, match=message):
            read_planned(file)
