"""Draws the timeline of a pipeline's step as SVG: a row per rank, a box per computation. No dependencies.

The figure has its own colours, for a light and a dark page, and uses no CSS variables, so that it works in a
page, alone, and in programs that typeset papers. The predicted step is above the traced one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from shoal.record import PipelineBox, PipelineStep
from shoal.report import formatting
from shoal.report.timeline import tick_step

_WIDTH, _LEFT, _RIGHT = 1000.0, 58.0, 88.0
_HEADER, _AXIS, _LEGEND, _GAP = 27.0, 40.0, 30.0, 14.0
_HIGHEST_ROW, _LOWEST_ROW, _ROWS_HEIGHT = 27.0, 12.0, 340.0
_FONT, _SMALLEST_FONT = 12.0, 7.0
_DIGIT = 0.62
"""Width of a digit in font sizes."""
_WORDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
_PALEST = 0.4
"""Fraction of its colour that the last of a rank's stages keeps; those between are spaced evenly."""


@dataclass(frozen=True)
class _Theme:
    ink: str
    muted: str
    grid: str
    lane: str
    card: str
    actions: dict[str, str]


_ORANGE, _DARK_ORANGE = "#e69f00", "#d99a1c"
_LIGHT = _Theme(
    ink="#1a1f24", muted="#5b6570", grid="#dfe3e7", lane="#f1f3f5", card="#ffffff",
    actions={"F": "#0072b2", "B": _ORANGE, "I": _ORANGE, "W": "#009e73"},
)  # fmt: skip
_DARK = _Theme(
    ink="#e8ecef", muted="#9aa5ae", grid="#363e45", lane="#20262b", card="#181d21",
    actions={"F": "#2f86c0", "B": _DARK_ORANGE, "I": _DARK_ORANGE, "W": "#27a981"},
)  # fmt: skip


def draw_pipeline_step(row: PipelineStep, *, background: bool = False) -> str:
    """Return the figure as an SVG element.

    Args:
        background: paint the background; for a separate file.
    """
    panels = _panels(row)
    longest = max((_span(boxes) for _, boxes, _ in panels), default=0.0) or 1.0
    frame = _frame(row, longest)
    top, parts = _LEGEND, _legend(row, panels)
    for name, boxes, peaks in panels:
        parts += _panel(name, boxes, peaks, frame, top)
        top += _HEADER + frame.num_ranks * frame.height + _GAP
    parts += _axis(longest, frame.scale, top=top - _GAP)
    total = top - _GAP + _AXIS
    card = f'<rect class="card" width="{_WIDTH:g}" height="{total:g}"/>' if background else ""
    label = escape(describe_pipeline_step(row), quote=True)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="pipeline" viewBox="0 0 {_WIDTH:g} {total:g}" '
        f'role="img" aria-label="{label}"><title>{label}</title>'
        f"<style>{_style(max(frame.chunks) + 1)}</style>"
        f"{card}{''.join(parts)}</svg>"
    )


def describe_pipeline_step(row: PipelineStep) -> str:
    """Describe the step in a sentence: ranks, schedule, predicted and measured time."""
    num_ranks = max(row.placement) + 1
    steps = [f"{name} {_cost(boxes, num_ranks, ',')}" for name, boxes, _ in _panels(row)]
    parts = "micro-batch" if row.num_micro_batches == 1 else "micro-batches"
    return (
        f"Step {row.step:,} of a pipeline of {formatting.plural(num_ranks, 'rank')}, "
        f"{row.num_micro_batches} {parts}, schedule {row.schedule}: {'; '.join(steps)}"
    )


def _cost(boxes: Sequence[PipelineBox], num_ranks: int, joint: str) -> str:
    idle = formatting.percent(idle_share(boxes, num_ranks))
    return f"{formatting.milliseconds(_span(boxes))}{joint} {idle} idle"


def idle_share(boxes: Sequence[PipelineBox], num_ranks: int) -> float:
    """Return the fraction of all ranks' time, from the first start to the last end, without a computation."""
    span = _span(boxes)
    busy = sum(box.end_s - box.begin_s for box in boxes)
    return 1 - busy / (num_ranks * span) if span else 0.0


_Panel = tuple[str, Sequence[PipelineBox], Sequence[int]]


def _panels(row: PipelineStep) -> list[_Panel]:
    panels = (
        ("predicted", row.predicted, row.predicted_peak_bytes),
        ("traced", row.traced, row.traced_peak_bytes),
    )
    return [panel for panel in panels if panel[1]]


def _span(boxes: Sequence[PipelineBox]) -> float:
    return max(box.end_s for box in boxes) - min(box.begin_s for box in boxes)


def _chunks(placement: Sequence[int]) -> list[int]:
    """Return for each stage its index among the stages of its rank."""
    return [list(placement[:stage]).count(rank) for stage, rank in enumerate(placement)]


@dataclass(frozen=True, kw_only=True)
class _Frame:
    """Geometry that the panels of a figure share."""

    num_ranks: int
    chunks: Sequence[int]
    """For each stage its index among the stages of its rank."""
    height: float
    """Height of a row."""
    scale: float
    """Width of one second."""
    fonts: dict[str, float]
    """Font size of the numbers in the boxes, per action; 0 if they do not fit into most boxes."""


def _frame(row: PipelineStep, longest: float) -> _Frame:
    num_ranks = max(row.placement) + 1
    height = min(_HIGHEST_ROW, max(_LOWEST_ROW, _ROWS_HEIGHT / num_ranks))
    scale = (_WIDTH - _LEFT - _RIGHT) / longest
    fonts: dict[str, float] = {}
    for action in _WORDS:
        seconds = sorted(b.end_s - b.begin_s for b in (*row.predicted, *row.traced) if b.action == action)
        if seconds:
            narrow = scale * seconds[len(seconds) // 10]
            size = min(_FONT, 0.62 * height, narrow / _text_width(row.num_micro_batches - 1))
            fonts[action] = size if size >= _SMALLEST_FONT else 0.0
    chunks = _chunks(row.placement)
    return _Frame(num_ranks=num_ranks, chunks=chunks, height=height, scale=scale, fonts=fonts)


def _text_width(number: int) -> float:
    """Return the width of a number, in font sizes."""
    return _DIGIT * len(str(number)) + 0.2


def _panel(
    name: str, boxes: Sequence[PipelineBox], peaks: Sequence[int], frame: _Frame, top: float
) -> list[str]:
    """Draw the ranks of one step under a line with its time, idle share and memory."""
    num_ranks, height, scale = frame.num_ranks, frame.height, frame.scale
    origin = min(box.begin_s for box in boxes)
    note = _cost(boxes, num_ranks, " per step,")
    if peaks:
        note += f", at most {formatting.size(max(peaks))} kept for backward"
    parts = [
        f'<text x="{_LEFT:g}" y="{top + 17:g}" class="head">{name}'
        f'<tspan class="muted" dx="9">{escape(note)}</tspan></text>'
    ]
    top += _HEADER
    size = min(_FONT, 0.62 * height)
    for rank in range(num_ranks):
        middle = top + (rank + 0.5) * height + 0.35 * size
        parts.append(
            f'<rect class="lane" x="{_LEFT:g}" y="{top + rank * height + 1:g}" '
            f'width="{_WIDTH - _LEFT - _RIGHT:g}" height="{height - 2:g}"/>'
            f'<text x="{_LEFT - 8:g}" y="{middle:.2f}" font-size="{size:g}" class="muted end">'
            f"rank {rank}</text>"
        )
        if rank < len(peaks):
            parts.append(
                f'<text x="{_WIDTH - 4:g}" y="{middle:.2f}" font-size="{size:g}" class="muted end">'
                f"{formatting.size(peaks[rank])}</text>"
            )
    for box in boxes:
        left, width = _LEFT + scale * (box.begin_s - origin), scale * (box.end_s - box.begin_s)
        parts.append(_box(box, frame, left, top + box.rank * height + 1, width, height - 2))
    return parts


def _box(box: PipelineBox, frame: _Frame, left: float, top: float, width: float, height: float) -> str:
    number, size = box.micro_batch, frame.fonts[box.action]
    title = (
        f"stage {box.stage}, {_WORDS.get(box.action, box.action)}, micro-batch {number}: "
        f"{formatting.milliseconds(box.begin_s)} to {formatting.milliseconds(box.end_s)}"
    )
    kind = f"{box.action}{frame.chunks[box.stage]}"
    text = ""
    if size and width >= 0.9 * size * _text_width(number):
        text = (
            f'<text class="on-{kind}" x="{left + width / 2:.2f}" y="{top + height / 2 + 0.36 * size:.2f}" '
            f'font-size="{size:.3g}">{number}</text>'
        )
    gap = min(0.8, 0.15 * width)  # between neighbours
    return (
        f'<g><title>{title}</title><rect class="{kind}" x="{left:.2f}" y="{top:.2f}" '
        f'width="{max(width - gap, 0.1):.2f}" height="{height:g}"/>{text}</g>'
    )


def _axis(longest: float, scale: float, *, top: float) -> list[str]:
    """Draw the time axis, in ms, under the last row."""
    step = tick_step(1000 * longest)
    parts = [f'<path class="grid" d="M{_LEFT:g} {top + 3:g}H{_WIDTH - _RIGHT:g}"/>']
    for tick in range(int(1000 * longest / step + 1e-9) + 1):
        x = _LEFT + scale * tick * step / 1000
        parts.append(
            f'<path class="grid" d="M{x:.2f} {top + 3:g}v4"/>'
            f'<text class="muted middle" x="{x:.2f}" y="{top + 20:g}">{formatting.number(tick * step)}</text>'
        )
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    return [*parts, f'<text class="muted middle" x="{middle:g}" y="{top + 36:g}">ms</text>']


def _legend(row: PipelineStep, panels: Sequence[_Panel]) -> list[str]:
    """Draw the legend of colours and shades, and the title of the right column."""
    kinds = dict.fromkeys(box.action for _, boxes, _ in panels for box in boxes)
    num_chunks = max(_chunks(row.placement), default=0) + 1
    parts, x = [], _LEFT
    for kind in sorted(kinds, key="FBIW".index):
        for chunk in range(num_chunks):
            parts.append(f'<rect class="{kind}{chunk}" x="{x:g}" y="7" width="12" height="12"/>')
            x += 13
        parts.append(f'<text class="muted" x="{x + 5:g}" y="17">{_WORDS[kind]}</text>')
        x += 24 + 6.6 * len(_WORDS[kind])
    parts.append(f'<rect class="lane edge" x="{x:g}" y="7.5" width="11" height="11"/>')
    parts.append(f'<text class="muted" x="{x + 18:g}" y="17">idle</text>')
    if num_chunks > 1:
        note = f"shades: the {num_chunks} stages of a rank, the first in full colour"
        parts.append(f'<text class="muted" x="{x + 62:g}" y="17">{note}</text>')
    if any(peaks for _, _, peaks in panels):
        parts.append(f'<text class="muted end" x="{_WIDTH - 4:g}" y="17">peak kept</text>')
    return parts


def _style(num_chunks: int) -> str:
    """Return the style sheet of one figure, for light and dark pages."""
    base = (
        ".pipeline text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif;"
        "font-variant-numeric:tabular-nums}"
        ".pipeline text:not([font-size]){font-size:12px}"
        ".pipeline .head{font-size:13px;font-weight:600}.pipeline .head .muted{font-weight:400}"
        ".pipeline .end{text-anchor:end}.pipeline .middle,.pipeline g text{text-anchor:middle}"
        ".pipeline .grid{fill:none;stroke-width:1}"
    )
    dark = _colours(_DARK, num_chunks)
    return f"{base}{_colours(_LIGHT, num_chunks)}@media (prefers-color-scheme:dark){{{dark}}}"


def _colours(theme: _Theme, num_chunks: int) -> str:
    rules = [
        f".pipeline .card{{fill:{theme.card}}}.pipeline .lane{{fill:{theme.lane}}}"
        f".pipeline .edge,.pipeline .grid{{stroke:{theme.grid}}}"
        f".pipeline .muted{{fill:{theme.muted}}}.pipeline .head{{fill:{theme.ink}}}"
    ]
    for action, colour in theme.actions.items():
        for chunk in range(num_chunks):
            part = 1 - (1 - _PALEST) * chunk / max(1, num_chunks - 1)
            shade = _mix(colour, theme.card, part)
            text = max(("#ffffff", "#0c0f12"), key=lambda ink: _contrast(ink, shade))
            rules.append(
                f".pipeline .{action}{chunk}{{fill:{shade}}}.pipeline .on-{action}{chunk}{{fill:{text}}}"
            )
    return "".join(rules)


def _channels(colour: str) -> list[int]:
    return [int(colour[i : i + 2], 16) for i in (1, 3, 5)]


def _mix(colour: str, other: str, part: float) -> str:
    pairs = zip(_channels(colour), _channels(other), strict=True)
    return "#" + "".join(f"{round(part * a + (1 - part) * b):02x}" for a, b in pairs)


def _contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours, 1 to 21 (WCAG 2.2)."""
    low, high = sorted((_luminance(one), _luminance(other)))
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4
              for c in (channel / 255 for channel in _channels(colour))]  # fmt: skip
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
