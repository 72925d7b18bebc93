"""Draws time and bandwidth over size, one panel pair a collective."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from shoal.bench.results import Network, Row, size_text
from shoal.errors import UsageError

_COLOURS = ("#777777", "#d9822b", "#2a6fbb", "#3a9d5d", "#b83b5e", "#6c4fa3")


def require_matplotlib() -> None:
    """Raise a UsageError when there is nothing to draw with."""
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise UsageError(f"--plot needs matplotlib ({error}): pip install 'shoal[report]'") from None


def draw(path: Path, rows: list[Row], network: Network) -> None:
    """Write the picture; the suffix of the name says which kind (.png, .svg, .pdf)."""
    from matplotlib.figure import Figure

    sized = [row for row in rows if row.num_bytes]
    if not sized:
        raise UsageError(f"{path}: nothing to draw; a barrier has no size")
    collectives = list(dict.fromkeys(row.collective for row in sized))
    figure = Figure(figsize=(10.0, 3.4 * len(collectives)), layout="constrained")
    figure.suptitle(network.describe(), fontsize=10)
    panels = figure.subplots(len(collectives), 2, squeeze=False)
    for (left, right), collective in zip(panels, collectives, strict=True):
        mine = [row for row in sized if row.collective == collective]
        _times(left, mine)
        _bandwidths(right, mine)
        left.set_title(f"{collective}: time", fontsize=9)
        right.set_title(f"{collective}: algbw", fontsize=9)
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:
        raise UsageError(f"--plot {path}: {error}") from None


def _lines(rows: list[Row]) -> list[tuple[str, str, list[Row]]]:
    backends = list(dict.fromkeys(row.backend for row in rows))
    return [
        (
            name,
            _COLOURS[i % len(_COLOURS)],
            sorted((r for r in rows if r.backend == name), key=lambda r: r.num_bytes),
        )
        for i, name in enumerate(backends)
    ]


def _times(axes: Any, rows: list[Row]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator

    for name, colour, line in _lines(rows):
        sizes = [row.num_bytes for row in line]
        axes.plot(sizes, [row.time_s * 1e3 for row in line], "o-", color=colour, markersize=3, label=name)
        low, high = [min(r.samples_s) * 1e3 for r in line], [max(r.samples_s) * 1e3 for r in line]
        axes.fill_between(sizes, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.set_ylabel("ms")
    _finish(axes, rows)


def _bandwidths(axes: Any, rows: list[Row]) -> None:
    for name, colour, line in _lines(rows):
        points = [(row.num_bytes, row.algbw_bytes_per_s / 1e6) for row in line if row.algbw_bytes_per_s]
        axes.plot(*zip(*points, strict=True), "o-", color=colour, markersize=3, label=name)
    limits = sorted({(r.num_bytes, r.num_bytes / r.limit_s / 1e6) for r in rows if r.limit_s})
    if limits:
        axes.plot(*zip(*limits, strict=True), color="black", linewidth=0.8, label="limit of the links")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("MB/s")
    _finish(axes, rows)


def _finish(axes: Any, rows: list[Row]) -> None:
    sizes = sorted({row.num_bytes for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [size_text(size) for size in sizes], fontsize=7)
    axes.minorticks_off()
    axes.grid(color="#dddddd", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
