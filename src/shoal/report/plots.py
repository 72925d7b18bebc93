"""Draws figures as SVG elements that take their colours from the page's style sheet.

Colours are drawn as placeholders and replaced by CSS variables, so that a figure suits a light and a dark
page. Text stays text: it can be selected, searched and read aloud.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from io import StringIO
from typing import Any, NamedTuple

from shoal import formatting
from shoal.errors import import_extra
from shoal.report.curves import Series

matplotlib = import_extra("matplotlib", "report", "a report needs matplotlib")
ticker = import_extra("matplotlib.ticker", "report", "a report needs matplotlib")
Figure = import_extra("matplotlib.figure", "report", "a report needs matplotlib").Figure

OPTIMIZER_STEP = "optimizer step"
_INK, _MUTED, _GRID, _CARD = "#fd0000", "#fd0001", "#fd0002", "#fd0003"
_NUM_RUN_COLOURS = 8
_NAMED = {_INK: "--ink", _MUTED: "--muted", _GRID: "--grid", _CARD: "--card"}
_WIDTH_IN, _HEIGHT_IN = 5.2, 2.55
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.family": ["DejaVu Sans"],
    "font.size": 9.5,
    "text.color": _MUTED,
    "axes.edgecolor": _GRID,
    "axes.labelcolor": _MUTED,
    "axes.labelpad": 3,
    "axes.labelsize": 9.5,
    "axes.facecolor": "none",
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "grid.color": _GRID,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "xtick.major.pad": 5,
    "ytick.major.pad": 5,
}


def run_colour(index: int) -> str:
    """Return the placeholder of a run's colour; colours repeat after eight runs."""
    return f"#fe00{index % _NUM_RUN_COLOURS:02x}"


def part_colour(index: int) -> str:
    """Return the placeholder of the colour of a step's part; parts from the sixth share one."""
    return f"#ff00{min(index, 5):02x}"


def css_colour(placeholder: str) -> str:
    """Return the CSS variable of a placeholder, e.g. ``var(--run-0)``."""
    if placeholder in _NAMED:
        return f"var({_NAMED[placeholder]})"
    family = {"fe": "run", "ff": "part"}[placeholder[1:3]]
    return f"var(--{family}-{int(placeholder[5:7], 16)})"


@dataclass(frozen=True, kw_only=True)
class Line:
    """A curve: a line, a ``faint`` line of raw values, or points with the marker ``dots`` on a thin line."""

    series: Series
    colour: str
    faint: bool = False
    dots: str = ""


class Mark(NamedTuple):
    """An event at ``x``: a line for ``resume`` and ``stop``, a tick for ``checkpoint``."""

    x: float
    kind: str
    colour: str


@dataclass(frozen=True, kw_only=True)
class Axes:
    """Settings of the axes of a figure."""

    description: str
    x_name: str
    metric: str = ""
    last_x: float | None = None
    """End of the x axis, the same for all figures of a page; ``None``: the end of the data."""
    log: bool = False
    from_zero: bool = False
    top: float | None = None
    """Upper end of the y axis; higher values become triangles at the edge."""
    marks: Sequence[Mark] = ()
    rules: Mapping[float, str] = field(default_factory=dict)
    """Horizontal reference lines: the label at each height, or an empty text."""


def draw_curves(lines: Sequence[Line], axes: Axes) -> str:
    """Draw curves over a common x axis and return the SVG element."""
    with _figure(axes.description) as (figure, plot):
        for line in lines:
            _draw_line(plot, line)
        _format_axes(plot, axes)
        _draw_rules(plot, axes.rules)
        _draw_outside(plot, lines, axes.top)
        _draw_marks(plot, axes.marks)
        if axes.last_x:
            plot.set_xlim(-0.02 * axes.last_x, 1.02 * axes.last_x)
        return _svg(figure, axes.description)


def draw_stack(xs: Sequence[float], layers: Sequence[Sequence[float]], description: str) -> str:
    """Draw the parts of a step as stacked areas, ``layers`` in ms over the optimizer step."""
    with _figure(description) as (figure, plot):
        colours = [part_colour(i) for i in range(len(layers))]
        if len(xs) == 1:  # an area needs a width
            xs, layers = [xs[0] - 0.5, xs[0] + 0.5], [[*layer, *layer] for layer in layers]
        plot.stackplot(xs, layers, colors=colours, linewidth=0.5, edgecolor=_CARD)
        plot.set_xlim(min(xs), max(xs))
        _format_axes(plot, Axes(description="", x_name=OPTIMIZER_STEP, from_zero=True))
        return _svg(figure, description)


@contextmanager
def _figure(description: str) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its only axes in the page's style, with the same margins for all figures.

    The description makes the ids that the figure refers to differ from those of the page's other figures.
    """
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": description}):
        figure = Figure(figsize=(_WIDTH_IN, _HEIGHT_IN), facecolor="none")
        left, bottom = 0.56 / _WIDTH_IN, 0.46 / _HEIGHT_IN
        yield figure, figure.add_axes((left, bottom, 0.985 - left, 1 - 0.1 / _HEIGHT_IN - bottom))


def _draw_line(plot: Any, line: Line) -> None:
    xs, ys = line.series.xs, line.series.ys
    if line.dots:
        plot.plot(xs, ys, color=line.colour, linewidth=1.0, alpha=0.7)
        plot.plot(xs, ys, line.dots, color=line.colour, markerfacecolor=_CARD, markersize=5.5)
    elif line.faint:
        plot.plot(xs, ys, color=line.colour, linewidth=0.8, alpha=0.3)
    else:
        plot.plot(xs, ys, "o-" if len(xs) == 1 else "-", color=line.colour, linewidth=1.7, markersize=5)


def _draw_rules(plot: Any, rules: Mapping[float, str]) -> None:
    low, high = plot.get_ylim()
    for y, label in rules.items():
        plot.axhline(y, color=_INK, linewidth=1.0, linestyle=(0, (5, 3)), alpha=0.75)
        below = (y - low) > 0.85 * (high - low)
        plot.annotate(
            label, (1.0, y), xycoords=("axes fraction", "data"), xytext=(0, -3 if below else 3),
            textcoords="offset points", ha="right", va="top" if below else "bottom", color=_INK,
        )  # fmt: skip


def _draw_outside(plot: Any, lines: Sequence[Line], top: float | None) -> None:
    """Draw a triangle at the upper edge for each value that is not finite or is beyond the axis."""
    edge = plot.get_xaxis_transform()
    for line in lines:
        xs = list(line.series.not_finite_xs)
        if top is not None:
            xs += [x for x, y in zip(line.series.xs, line.series.ys, strict=True) if y > top]
        if xs:
            style: Any = {"color": line.colour, "markeredgecolor": _CARD, "markersize": 6, "clip_on": False}
            plot.plot(xs, [0.98] * len(xs), "^", transform=edge, **style)


def _draw_marks(plot: Any, marks: Sequence[Mark]) -> None:
    edge = plot.get_xaxis_transform()
    for mark in marks:
        if mark.kind == "checkpoint":
            plot.plot([mark.x] * 2, [0, 0.035], color=mark.colour, linewidth=1.2, transform=edge)
        else:
            style: Any = (0, (1, 2)) if mark.kind == "resume" else "-"
            plot.axvline(mark.x, color=mark.colour, linewidth=1.1, linestyle=style, alpha=0.7)


def _format_axes(plot: Any, axes: Axes) -> None:
    plot.grid(axis="y")
    if axes.log:
        plot.set_yscale("log")
        plot.yaxis.set_major_locator(ticker.LogLocator(numticks=5))
        plot.yaxis.set_minor_locator(ticker.NullLocator())
    else:
        plot.yaxis.set_major_locator(ticker.MaxNLocator(5))
        low, high = plot.get_ylim()
        margin = 0.06 * (high - low)
        low = min([low, *(y - margin for y in axes.rules)])
        high = max([high, *(y + margin for y in axes.rules)])
        if axes.top is not None:
            high = axes.top + 0.06 * (axes.top - low)  # room for the marker of a value at the top
        plot.set_ylim(0.0 if axes.from_zero else low, high)
    percent = formatting.is_fraction(axes.metric)

    def text(value: float, _: int) -> str:
        return f"{formatting.number(100 * value, 3)} %" if percent else formatting.number(value, 4)

    plot.yaxis.set_major_formatter(ticker.FuncFormatter(text))
    plot.xaxis.set_major_locator(ticker.MaxNLocator(6, integer=axes.x_name == OPTIMIZER_STEP))
    plot.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: formatting.number(value, 6)))
    plot.set_xlabel(axes.x_name)


def _svg(figure: Any, description: str) -> str:
    """Return the figure as an SVG element without metadata, fonts, sizes and ids to which nothing refers."""
    buffer = StringIO()
    figure.savefig(buffer, format="svg")
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", buffer.getvalue(), flags=re.DOTALL)
    svg = re.sub(r' id="[^"]*_\d+"', "", svg[svg.index("<svg") :])
    (view_box,) = re.findall(r'viewBox="([^"]*)"', svg)[:1]
    label = escape(description, quote=True)
    head = f'<svg viewBox="{view_box}" role="img" aria-label="{label}"><title>{escape(description)}</title>'
    svg = head + svg[svg.index(">") + 1 :].replace("xlink:href", "href")
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)
    return re.sub(r"#f[def]00[0-9a-f]{2}", lambda match: css_colour(match[0]), svg)
