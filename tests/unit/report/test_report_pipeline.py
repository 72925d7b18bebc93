"""The timeline of a pipeline's step: every box where its time says, readable, and in the page."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import report_records as records
from test_report_browser import BROWSER, open_page

from shoal.decide.cost import StageCost
from shoal.decide.pipeline_schedules import make_schedule
from shoal.decide.pipeline_simulator import recorded, simulate
from shoal.record import PipelineBox, PipelineStep
from shoal.report.page import write_report
from shoal.report.pipeline_timeline import _luminance, draw_pipeline_step, idle_share

SVG = "{http://www.w3.org/2000/svg}"


def pipeline_step(
    name: str = "interleaved", num_ranks: int = 2, num_virtual: int = 2, **changes: Any
) -> PipelineStep:
    """A step as a run writes it: predicted, and traced a tenth slower, a little later."""
    costs = [StageCost(forward_s=0.01, backward_s=0.02, saved_bytes=3 << 20)] * (num_ranks * num_virtual)
    schedule = make_schedule(
        name, num_ranks=num_ranks, num_virtual=num_virtual, num_micro_batches=4, costs=costs
    )
    timeline = simulate(schedule, costs)
    predicted = recorded(timeline)
    values: dict[str, Any] = {
        "step": 20,
        "schedule": name,
        "placement": list(schedule.placement),
        "num_micro_batches": 4,
        "predicted": predicted,
        "traced": [b._replace(begin_s=1.1 * b.begin_s + 0.5, end_s=1.1 * b.end_s + 0.5) for b in predicted],
        "predicted_peak_bytes": list(timeline.peak_saved_bytes),
        "time_s": records.BEGIN_S + 5,
    }
    return PipelineStep(**{**values, **changes})


def boxes(svg: str) -> list[tuple[str, dict[str, float], str, str]]:
    """Return title, place, class and number of each box."""
    found = []
    for group in ElementTree.fromstring(svg).iter(f"{SVG}g"):
        title, rect, *text = group
        place = {name: float(rect.attrib[name]) for name in ("x", "y", "width", "height")}
        found.append((str(title.text), place, rect.attrib["class"], str(text[0].text) if text else ""))
    return found


def test_only_the_step_itself_can_be_idle() -> None:
    root = ElementTree.fromstring(draw_pipeline_step(pipeline_step()))
    lanes = [rect.attrib for rect in root.iter(f"{SVG}rect") if rect.attrib.get("class") == "lane"]
    predicted, traced = lanes[:2], lanes[2:]
    assert {float(lane["width"]) for lane in traced} == {912.0 - 58.0}
    assert {float(lane["width"]) for lane in predicted} == {round((912.0 - 58.0) / 1.1, 2)}


def test_every_box_is_drawn_where_its_time_and_rank_say() -> None:
    row = pipeline_step()
    drawn = boxes(draw_pipeline_step(row))
    assert len(drawn) == len(row.predicted) + len(row.traced) == 64
    longest = max(box.end_s for box in row.traced) - 0.5
    scale = (1000 - 58 - 88) / longest
    tops: dict[tuple[bool, int], set[float]] = {}
    for index, (box, (title, place, kind, number)) in enumerate(
        zip([*row.predicted, *row.traced], drawn, strict=True)
    ):
        traced = index >= 32
        assert place["x"] == pytest.approx(58 + scale * (box.begin_s - 0.5 * traced), abs=0.01)
        assert place["width"] == pytest.approx(scale * (box.end_s - box.begin_s), abs=0.9)
        assert kind == f"{box.action}{box.stage // 2}"
        assert number == str(box.micro_batch)
        word = {"F": "forward", "B": "backward"}[box.action]
        assert title.startswith(f"stage {box.stage}, {word}, micro-batch {box.micro_batch}: ")
        tops.setdefault((traced, box.rank), set()).add(place["y"])
    assert all(len(found) == 1 for found in tops.values())
    order = [min(tops[key]) for key in ((False, 0), (False, 1), (True, 0), (True, 1))]
    assert order == sorted(order)


def test_lines_say_time_idle_share_and_bytes() -> None:
    svg = draw_pipeline_step(pipeline_step())
    texts = " ".join("".join(text.itertext()) for text in ElementTree.fromstring(svg).iter(f"{SVG}text"))
    # (vM + R - 1) (f + b) = 9 x 30 ms, of which 1/9 idle; rank 0 keeps 5 x 3 MiB, rank 1 3 x.
    assert "predicted270 ms per step, 11.1 % idle, at most 15 MiB kept for backward" in texts
    assert "traced297 ms per step, 11.1 % idle" in texts
    assert "shades: the 2 stages of a rank, the first in full colour" in texts
    assert [
        words for words in ("15 MiB", "9 MiB", "rank 0", "rank 1", "peak kept") if words not in texts
    ] == []
    label = "Step 20 of a pipeline of 2 ranks, 4 micro-batches, schedule interleaved: predicted 270 ms"
    assert f'aria-label="{label}' in svg


def test_a_step_that_was_only_predicted_has_one_panel() -> None:
    svg = draw_pipeline_step(pipeline_step("1f1b", 4, 1, traced=[], predicted_peak_bytes=[]))
    assert "traced" not in svg
    assert "kept" not in svg
    assert "shades" not in svg
    assert len(boxes(svg)) == 32


def test_split_backwards_have_colours_of_their_own() -> None:
    drawn = boxes(draw_pipeline_step(pipeline_step("zbv")))
    assert {kind for _, _, kind, _ in drawn} == {"F0", "F1", "I0", "I1", "W0", "W1"}
    assert any("weight gradient" in title for title, *_ in drawn)


def test_numbers_that_do_not_fit_are_left_out() -> None:
    """One size for all boxes of an action: one that is too narrow has no number; if most are, none has."""
    wide = [PipelineBox(0, 0, "F", batch, 1.0 * batch, batch + 1.0) for batch in range(19)]
    narrow = [
        PipelineBox(0, 0, "B", batch, 19 + 0.01 * batch, 19 + 0.01 * (batch + 1)) for batch in range(20)
    ]
    alone = PipelineBox(0, 0, "F", 19, 19.2, 19.21)
    row = PipelineStep(
        step=1, schedule="1f1b", placement=[0], num_micro_batches=20, predicted=[*wide, alone, *narrow]
    )
    numbers = [number for _, _, _, number in boxes(draw_pipeline_step(row))]
    assert numbers == [*map(str, range(19)), "", *[""] * 20]


def test_numbers_stand_out_from_every_shade_in_both_themes() -> None:
    for num_virtual in (1, 2, 4):
        svg = draw_pipeline_step(pipeline_step("bfs", 2, num_virtual))
        style = svg[svg.index("<style>") : svg.index("</style>")]
        for theme in style.split("@media"):
            fills = dict(re.findall(r"\.pipeline \.([a-zA-Z0-9-]+)\{fill:(#[0-9a-f]{6})\}", theme))
            for action in "FBIW":
                for chunk in range(num_virtual):
                    shade, ink = fills[f"{action}{chunk}"], fills[f"on-{action}{chunk}"]
                    low, high = sorted((_luminance(shade), _luminance(ink)))
                    assert (high + 0.05) / (low + 0.05) >= 4.5
    assert (_luminance("#000000"), _luminance("#ffffff")) == (0, pytest.approx(1))


def test_idle_share_counts_from_the_first_begin() -> None:
    assert idle_share([PipelineBox(0, 0, "F", 0, 5.0, 6.0), PipelineBox(1, 1, "F", 0, 6.0, 7.0)], 2) == 0.5
    assert idle_share([PipelineBox(0, 0, "F", 0, 5.0, 5.0)], 1) == 0.0


def test_a_file_of_its_own_paints_its_card() -> None:
    assert 'class="card"' in draw_pipeline_step(pipeline_step(), background=True)
    assert 'class="card"' not in draw_pipeline_step(pipeline_step())


def test_the_page_shows_the_last_recorded_step_of_each_run(tmp_path: Path) -> None:
    early, late = pipeline_step(step=20), pipeline_step("1f1b", 2, 1, step=40)
    rows = [*records.RUNS["one-step"](), early, late]
    runs = [
        records.write_run(tmp_path / "a", rows),
        records.write_run(tmp_path / "b", records.RUNS["one-step"]()),
    ]
    page = write_report(runs[:1]).read_text(encoding="utf-8")
    assert page.count('class="pipeline"') == 1
    assert "<h3>Pipeline</h3>" in page
    assert "step 40, schedule 1f1b" in page
    assert "<h3>Pipeline of one-step" in write_report(runs).read_text(encoding="utf-8")
    assert 'class="pipeline"' not in write_report(runs[1:]).read_text(encoding="utf-8")


@pytest.mark.skipif(BROWSER is None, reason="no Chromium found: install chromium to run this")
def test_the_figure_scrolls_in_a_narrow_window(tmp_path: Path) -> None:
    run = records.write_run(tmp_path / "run", [*records.RUNS["one-step"](), pipeline_step()])
    measured, console = open_page(write_report([run]).read_text(encoding="utf-8"), tmp_path, 420)
    assert console == []
    assert measured["width"] <= 420
    assert measured["small"] == 0
