"""Draws the timeline of a pipeline's step as SVG: a row per rank, a box per computation.

The figure has its own colours, for a light and a dark page, and uses no CSS variables, so that it works in a
page, alone, and in programs that typeset papers. The predicted step is above the traced one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shoal import formatting
from shoal.record import PipelineBox, PipelineStep
from shoal.report.templates import fill_template
from shoal.report.timeline import tick_step

_WIDTH, _LEFT, _RIGHT = 1000.0, 58.0, 912.0
_HEADER, _AXIS, _LEGEND, _GAP = 27.0, 40.0, 30.0, 14.0
_HIGHEST_ROW, _LOWEST_ROW, _ROWS_HEIGHT = 27.0, 12.0, 340.0
_FONT, _SMALLEST_FONT = 12.0, 7.0
_DIGIT = 0.62
"""Width of a digit in font sizes."""
_ACTIONS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
_PALEST = 0.4
"""Fraction of its colour that the last of a rank's stages keeps; those between are spaced evenly."""
_LIGHT = {
    "ink": "#1a1f24", "muted": "#5b6570", "grid": "#dfe3e7", "lane": "#f1f3f5", "card": "#ffffff",
    "F": "#0072b2", "B": "#e69f00", "I": "#e69f00", "W": "#009e73",
}  # fmt: skip
_DARK = {
    "ink": "#e8ecef", "muted": "#9aa5ae", "grid": "#363e45", "lane": "#20262b", "card": "#181d21",
    "F": "#2f86c0", "B": "#d99a1c", "I": "#d99a1c", "W": "#27a981",
}  # fmt: skip

_Panel = tuple[str, Sequence[PipelineBox], Sequence[int]]


def draw_pipeline_step(row: PipelineStep, *, background: bool = False) -> str:
    """Return the figure as an SVG element.

    Args:
        background: paint the background; for a separate file.
    """
    panels, num_ranks = _panels(row), max(row.placement) + 1
    longest = max((_span(boxes) for _, boxes, _ in panels), default=0.0) or 1.0
    scale = (_RIGHT - _LEFT) / longest
    row_height = min(_HIGHEST_ROW, max(_LOWEST_ROW, _ROWS_HEIGHT / num_ranks))
    chunks = [row.placement[:stage].count(rank) for stage, rank in enumerate(row.placement)]
    num_chunks = max(chunks) + 1
    drawn, top = [], _LEGEND
    for name, boxes, peaks in panels:
        top += _HEADER
        note = _cost(boxes, num_ranks, " per step,")
        if peaks:
            note += f", at most {formatting.size(max(peaks))} kept for backward"
        origin = min(box.begin_s for box in boxes)
        placed = [_box(b, chunks, scale, origin, top + b.rank * row_height + 1, row_height) for b in boxes]
        sizes = [formatting.size(peak) for peak in peaks]
        width = scale * _span(boxes)  # of the lanes: time after the end of the step does not count as idle
        drawn.append(
            {"name": name, "note": note, "top": top, "width": width, "peaks": sizes, "boxes": placed}
        )
        top += num_ranks * row_height + _GAP
    axis = top - _GAP
    step = tick_step(1000 * longest)
    ticks = [i * step for i in range(int(1000 * longest / step + 1e-9) + 1)]
    actions = {box.action for _, boxes, _ in panels for box in boxes}
    legend, x = [], _LEFT
    for action in filter(actions.__contains__, _ACTIONS):
        legend.append(
            {"x": x, "kinds": [f"{action}{c}" for c in range(num_chunks)], "text": _ACTIONS[action]}
        )
        x += 13 * num_chunks + 24 + 6.6 * len(_ACTIONS[action])
    return fill_template(
        "pipeline.svg.jinja",
        width=_WIDTH,
        height=axis + _AXIS,
        left=_LEFT,
        right=_RIGHT,
        axis=axis,
        label=describe_pipeline_step(row),
        background=background,
        themes=[{**theme, "shades": _shades(theme, num_chunks)} for theme in (_LIGHT, _DARK)],
        legend=legend,
        legend_end=x,
        num_chunks=num_chunks,
        num_ranks=num_ranks,
        row_height=row_height,
        font=min(_FONT, 0.62 * row_height),
        panels=drawn,
        ticks=[(_LEFT + scale * tick / 1000, formatting.number(tick)) for tick in ticks],
    )


def describe_pipeline_step(row: PipelineStep) -> str:
    """Describe the step in a sentence: ranks, schedule, predicted and measured time."""
    num_ranks = max(row.placement) + 1
    steps = [f"{name} {_cost(boxes, num_ranks, ',')}" for name, boxes, _ in _panels(row)]
    return (
        f"Step {row.step:,} of a pipeline of {formatting.plural(num_ranks, 'rank')}, "
        f"{formatting.plural(row.num_micro_batches, 'micro-batch', 'micro-batches')}, "
        f"schedule {row.schedule}: {'; '.join(steps)}"
    )


def _cost(boxes: Sequence[PipelineBox], num_ranks: int, joint: str) -> str:
    idle = formatting.percent(idle_share(boxes, num_ranks))
    return f"{formatting.milliseconds(_span(boxes))}{joint} {idle} idle"


def idle_share(boxes: Sequence[PipelineBox], num_ranks: int) -> float:
    """Return the fraction of all ranks' time, from the first start to the last end, without a computation."""
    span = _span(boxes)
    busy = sum(box.end_s - box.begin_s for box in boxes)
    return 1 - busy / (num_ranks * span) if span else 0.0


def _panels(row: PipelineStep) -> list[_Panel]:
    panels = (
        ("predicted", row.predicted, row.predicted_peak_bytes),
        ("traced", row.traced, row.traced_peak_bytes),
    )
    return [panel for panel in panels if panel[1]]


def _span(boxes: Sequence[PipelineBox]) -> float:
    return max(box.end_s for box in boxes) - min(box.begin_s for box in boxes)


def _box(
    box: PipelineBox,
    chunks: Sequence[int],
    scale: float,
    origin: float,
    top: float,
    row_height: float,
) -> dict[str, Any]:
    left, width = _LEFT + scale * (box.begin_s - origin), scale * (box.end_s - box.begin_s)
    font = min(_FONT, 0.62 * row_height, width / (_DIGIT * len(str(box.micro_batch)) + 0.2))
    begin, end = formatting.milliseconds(box.begin_s), formatting.milliseconds(box.end_s)
    action = _ACTIONS.get(box.action, box.action)
    return {
        "title": f"stage {box.stage}, {action}, micro-batch {box.micro_batch}: {begin} to {end}",
        "kind": f"{box.action}{chunks[box.stage]}",
        "left": left,
        "middle": left + width / 2,
        "top": top,
        "width": max(width - min(0.8, 0.15 * width), 0.1),  # with a gap between neighbours
        "font": font if font >= _SMALLEST_FONT else 0.0,
        "number": box.micro_batch,
    }


def _shades(theme: Mapping[str, str], num_chunks: int) -> list[tuple[str, str, str]]:
    """Return name, colour and text colour of the boxes of each action and stage of a rank."""
    shades = []
    for action in _ACTIONS:
        for chunk in range(num_chunks):
            part = 1 - (1 - _PALEST) * chunk / max(1, num_chunks - 1)
            pairs = zip(_channels(theme[action]), _channels(theme["card"]), strict=True)
            fill = "#" + "".join(f"{round(part * a + (1 - part) * b):02x}" for a, b in pairs)
            ink = "#ffffff" if _luminance(fill) < 0.19 else "#0c0f12"  # the higher contrast by WCAG 2.2
            shades.append((f"{action}{chunk}", fill, ink))
    return shades


def _channels(colour: str) -> list[int]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def _luminance(colour: str) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
              for c in (channel / 255 for channel in _channels(colour))]  # fmt: skip
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
