"""Draws one figure as SVG that stands inside a page and takes its colours from the page's style sheet.

Every colour is drawn as a placeholder and replaced by a CSS variable afterwards, so that the same figure
is right in a light and in a dark page. Text stays text: it can be selected, searched and read aloud.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from io import StringIO
from typing import Any

from shoal.errors import ShoalError
from shoal.report import words
from shoal.report.curves import Series

try:
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
except ImportError as error:
    raise ShoalError(f"a report needs matplotlib ({error}): pip install 'shoal[report]'") from None

INK, MUTED, GRID, CARD = "#fd0000", "#fd0001", "#fd0002", "#fd0003"
NUM_RUN_COLOURS = 8
_NAMED = {INK: "--ink", MUTED: "--muted", GRID: "--grid", CARD: "--card"}
_WIDTH_IN, _HEIGHT_IN = 5.2, 2.55
_FONT_PT = 9.5

_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "shoal",
    "font.family": ["DejaVu Sans"],
    "font.size": _FONT_PT,
    "text.color": MUTED,
    "axes.edgecolor": GRID,
    "axes.facecolor": "none",
    "axes.linewidth": 0.8,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.major.pad": 5,
    "ytick.major.pad": 5,
    "lines.solid_capstyle": "round",
    "lines.solid_joinstyle": "round",
    "axes.unicode_minus": True,
}


def run_colour(index: int) -> str:
    """Placeholder of the colour of a page's run ``index``; they repeat after eight."""
    return f"#fe00{index % NUM_RUN_COLOURS:02x}"


def part_colour(index: int) -> str:
    """Placeholder of the colour of part ``index`` of a step; the sixth serves all further ones."""
    return f"#ff00{min(index, 5):02x}"


def css_colour(placeholder: str) -> str:
    """Return the style sheet's name of a placeholder, e.g. ``var(--run-0)``."""
    if placeholder in _NAMED:
        return f"var({_NAMED[placeholder]})"
    family = {"fe": "run", "ff": "part"}[placeholder[1:3]]
    return f"var(--{family}-{int(placeholder[5:7], 16)})"


@dataclass(frozen=True, kw_only=True)
class Line:
    """One curve: a line, faint raw values behind it, or (``dots``) points on a thin line."""

    series: Series
    colour: str
    faint: bool = False
    dots: str | None = None
    """Marker of a held-out split: ``o``, ``s``, ``^`` or ``D``."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A horizontal line to compare with, and its label; empty: none."""

    y: float
    label: str


@dataclass(frozen=True, kw_only=True)
class Mark:
    """Something that happened at step ``x``: ``resume`` and ``stop`` are lines, ``checkpoint`` a tick."""

    x: float
    what: str
    colour: str


@dataclass(frozen=True, kw_only=True)
class Axes:
    """How a figure of curves is drawn; ``x_name`` stands under the axis."""

    description: str
    x_name: str
    metric: str = ""
    last_x: float | None = None
    """Where the x axis ends, so that all figures of a page compare; ``None``: with the data."""
    log: bool = False
    from_zero: bool = False
    top: float | None = None
    """Where to cut the y axis; higher values become triangles at the edge."""
    marks: Sequence[Mark] = field(default_factory=tuple)
    rules: Sequence[Rule] = field(default_factory=tuple)


def draw_curves(lines: Sequence[Line], axes: Axes) -> str:
    """Draw curves over a common x axis and return the SVG element."""
    with _figure() as (figure, plot):
        for line in lines:
            _draw_line(plot, line)
        _format_y(plot, axes)
        _draw_rules(plot, axes.rules)
        _draw_lost(plot, lines, axes.top)
        _draw_marks(plot, axes.marks)
        if axes.last_x:
            plot.set_xlim(-0.02 * axes.last_x, 1.02 * axes.last_x)
        _format_x(plot, axes.x_name)
        return _svg(figure, axes.description)


def draw_stack(xs: Sequence[float], layers: Sequence[Sequence[float]], description: str) -> str:
    """Draw the parts of a step as stacked areas, ``layers`` in ms over the optimizer step."""
    with _figure() as (figure, plot):
        colours = [part_colour(i) for i in range(len(layers))]
        if len(xs) == 1:  # an area needs a width
            xs, layers = [xs[0] - 0.5, xs[0] + 0.5], [[*layer, *layer] for layer in layers]
        plot.stackplot(xs, layers, colors=colours, linewidth=0.5, edgecolor=CARD)
        plot.set_xlim(min(xs), max(xs))
        _format_y(plot, Axes(description="", x_name="", from_zero=True))
        _format_x(plot, "optimizer step")
        return _svg(figure, description)


@contextmanager
def _figure() -> Iterator[tuple[Any, Any]]:
    """Give a figure and its only axes in the page's style; equal margins keep all figures in line."""
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH_IN, _HEIGHT_IN), facecolor="none")
        left, bottom = 0.56 / _WIDTH_IN, 0.46 / _HEIGHT_IN
        yield figure, figure.add_axes((left, bottom, 0.985 - left, 1 - 0.1 / _HEIGHT_IN - bottom))


def _draw_line(plot: Any, line: Line) -> None:
    xs, ys = line.series.xs, line.series.ys
    if line.dots:
        plot.plot(xs, ys, "-", color=line.colour, linewidth=1.0, alpha=0.7)
        style: dict[str, Any] = {"markersize": 5.5, "markeredgewidth": 1.3, "color": line.colour}
        plot.plot(xs, ys, line.dots, markerfacecolor=CARD, **style)
    elif line.faint:
        plot.plot(xs, ys, color=line.colour, linewidth=0.8, alpha=0.3)
    else:
        plot.plot(xs, ys, color=line.colour, linewidth=1.7)
        if len(xs) == 1:
            plot.plot(xs, ys, "o", color=line.colour, markersize=5)


def _draw_rules(plot: Any, rules: Sequence[Rule]) -> None:
    for rule in rules:
        plot.axhline(rule.y, color=INK, linewidth=1.0, linestyle=(0, (5, 3)), alpha=0.75)
    low, high = plot.get_ylim()
    for rule in rules:
        below = (rule.y - low) > 0.85 * (high - low)
        plot.annotate(
            rule.label, (1.0, rule.y), xycoords=("axes fraction", "data"), xytext=(0, -3 if below else 3),
            textcoords="offset points", ha="right", va="top" if below else "bottom", color=INK,
        )  # fmt: skip


def _draw_lost(plot: Any, lines: Sequence[Line], top: float | None) -> None:
    """Put a triangle at the upper edge for each value that is not finite or is beyond the axis."""
    for line in lines:
        lost = list(line.series.not_finite_xs)
        if top is not None:
            lost += [x for x, y in zip(line.series.xs, line.series.ys, strict=True) if y > top]
        if lost:
            edge = plot.get_xaxis_transform()
            style: dict[str, Any] = {"markeredgecolor": CARD, "markeredgewidth": 0.5, "clip_on": False}
            plot.plot(lost, [0.98] * len(lost), "^", color=line.colour, markersize=6, transform=edge, **style)


def _draw_marks(plot: Any, marks: Sequence[Mark]) -> None:
    edge = plot.get_xaxis_transform()
    for mark in marks:
        if mark.what == "checkpoint":
            plot.plot([mark.x] * 2, [0, 0.035], color=mark.colour, linewidth=1.2, transform=edge)
        else:
            style: Any = (0, (1, 2)) if mark.what == "resume" else "-"
            plot.axvline(mark.x, color=mark.colour, linewidth=1.1, linestyle=style, alpha=0.7)


def _format_y(plot: Any, axes: Axes) -> None:
    plot.grid(axis="y")
    if axes.log:
        plot.set_yscale("log")
        plot.yaxis.set_major_locator(LogLocator(numticks=5))
        plot.yaxis.set_minor_locator(NullLocator())
    else:
        plot.yaxis.set_major_locator(MaxNLocator(5))
        low, high = plot.get_ylim()
        levels = [rule.y for rule in axes.rules]
        margin = 0.06 * (high - low)
        low, high = min([low, *(y - margin for y in levels)]), max([high, *(y + margin for y in levels)])
        plot.set_ylim(0.0 if axes.from_zero else low, axes.top or high)
    percent = words.is_fraction(axes.metric)

    def text(value: float, _: int) -> str:
        return f"{words.number(100 * value, 3)} %" if percent else words.number(value, 4)

    plot.yaxis.set_major_formatter(FuncFormatter(text))


def _format_x(plot: Any, name: str) -> None:
    plot.xaxis.set_major_locator(MaxNLocator(6, integer=name == "optimizer step"))
    plot.xaxis.set_major_formatter(FuncFormatter(lambda value, _: words.number(value, 6)))
    plot.set_xlabel(name, fontsize=_FONT_PT, color=MUTED, labelpad=3)


def _svg(figure: Any, description: str) -> str:
    """Return the figure as an SVG element without ids, fonts, sizes or names of its own."""
    buffer = StringIO()
    figure.savefig(
        buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
    )
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    (view_box,) = re.findall(r'viewBox="([^"]*)"', svg)[:1]
    label = escape(description, quote=True)
    head = f'<svg viewBox="{view_box}" role="img" aria-label="{label}"><title>{escape(description)}</title>'
    svg = head + svg[svg.index(">") + 1 :]
    svg = svg.replace("xlink:href", "href")
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)
    return re.sub(r"#f[def]00[0-9a-f]{2}", lambda match: css_colour(match[0]), svg)


def number_ids(svg: str, prefix: str) -> str:
    """Make the ids of one figure differ from those of every other on the page; drop those nobody uses."""
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', svg))
    svg = re.sub(
        r' id="([^"]+)"', lambda match: f' id="{prefix}-{match[1]}"' if match[1] in used else "", svg
    )
    return re.sub(r'(url\(#|href="#)', rf"\g<1>{prefix}-", svg)
