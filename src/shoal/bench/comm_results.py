"""Compares measured collectives with the limits of the links; writes table, JSON and plot."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal import formatting
from shoal.bench.comm_options import COLOCATED
from shoal.decide.server_assignment import ring_seconds, two_hop_seconds
from shoal.errors import UsageError
from shoal.formatting import plural

HEADER = (
    f"{'collective':<15}{'size':>10}  {'backend':<16}{'median':>10}{'min':>10}{'max':>10}"
    f"{'algbw':>12}{'of limit':>10}{'formula':>10}{'speed':>8}"
)


@dataclass(frozen=True, kw_only=True)
class HostNetwork:
    """The hosts, as far as the limits depend on them."""

    num_workers: int
    num_hosts: int
    helper_bandwidths: tuple[float, ...] = ()
    """Each as a multiple of a worker host's."""
    link_bytes_per_s: float | None = None
    """In each direction; ``None``: unknown."""

    def describe(self) -> str:
        parts = [f"{plural(self.num_workers, 'worker')} on {plural(self.num_hosts, 'host')}"]
        if self.helper_bandwidths:
            parts.append(plural(len(self.helper_bandwidths), "helper host"))
        if self.link_bytes_per_s:
            parts.append(f"links of {self.link_bytes_per_s * 8 / 1e6:,g} Mbit/s")
        return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class CollectiveRow:
    """Samples of one collective of one size on one backend: seconds on the slowest rank."""

    collective: str
    num_bytes: int
    backend: str
    samples_s: list[float]
    limit_s: float | None
    """Lower bound for any scheme on these links; ``None`` within one host or for unknown links."""
    formula_s: float | None
    """Lower bound for this backend's scheme on these links; ``None`` without a formula."""

    @property
    def time_s(self) -> float:
        """The median."""
        return statistics.median(self.samples_s)

    @property
    def algbw_bytes_per_s(self) -> float | None:
        return self.num_bytes / self.time_s if self.num_bytes else None

    def line(self, first: CollectiveRow | None) -> str:
        """Return the row of the table; ``first`` is the first backend's, for the speed-up."""
        cells = [
            f"{self.collective:<15}",
            f"{formatting.size(self.num_bytes):>10}  " if self.num_bytes else f"{'':>12}",
            f"{self.backend:<16}",
            *(f"{time_text(t):>10}" for t in (self.time_s, min(self.samples_s), max(self.samples_s))),
            f"{self.algbw_bytes_per_s / 1e6:>7,.4g} MB/s" if self.algbw_bytes_per_s else f"{'':>12}",
            f"{100 * self.limit_s / self.time_s:>8.1f} %" if self.limit_s else f"{'':>10}",
            f"{time_text(self.formula_s):>10}" if self.formula_s else f"{'':>10}",
            f"{first.time_s / self.time_s:>7.2f}×" if first is not None else "",
        ]
        return "".join(cells).rstrip()

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "time_s": self.time_s, "algbw_bytes_per_s": self.algbw_bytes_per_s}


def limit_seconds(collective: str, num_bytes: int, network: HostNetwork) -> float | None:
    """Return the time in which all bytes that must cross a host's link can cross it.

    An all-reduce must send M bytes from each host and bring M back; a reduce-scatter and an all-gather
    (M: the whole tensor) leave the host's own 1/n out; a broadcast and a reduce move M over the root's link.
    """
    if network.link_bytes_per_s is None or network.num_hosts == 1:
        return None
    seconds = num_bytes / network.link_bytes_per_s
    if collective in ("reduce_scatter", "all_gather"):
        return seconds * (network.num_hosts - 1) / network.num_hosts
    return seconds if num_bytes else None


def formula_seconds(collective: str, backend: str, num_bytes: int, network: HostNetwork) -> float | None:
    """Return the time of an all-reduce by the formulas of ``decide.server_assignment``, without latency."""
    if network.link_bytes_per_s is None or network.num_hosts == 1 or collective != "all_reduce":
        return None
    links = [network.link_bytes_per_s] * network.num_hosts
    if backend == "gloo":
        return ring_seconds(num_bytes, links)
    if backend.startswith("shoal"):
        factors = () if backend == COLOCATED else network.helper_bandwidths
        return two_hop_seconds(num_bytes, links, [f * network.link_bytes_per_s for f in factors])
    return None


def explain(network: HostNetwork, first_backend: str) -> str:
    """Return a legend of the table's columns."""
    lines = [
        "size: of the whole tensor, M. algbw: M / median. Times are the slowest rank's. "
        f"speed: relative to {first_backend}."
    ]
    if network.num_hosts > 1 and network.link_bytes_per_s:
        lines.append(
            "of limit: of what any scheme can reach, M / B for an all-reduce. formula: what the backend's "
            "scheme takes at least."
        )
    elif network.num_hosts > 1:
        lines.append("Give the rate of a host's link (--link 10gbit) to see the limit.")
    return "\n".join(lines)


def write_json(path: Path, rows: list[CollectiveRow], network: HostNetwork, settings: dict[str, Any]) -> None:
    """Write ``{"settings", "network", "rows"}``; times in seconds, rates in bytes per second."""
    whole = {"settings": settings, "network": asdict(network), "rows": [row.as_json() for row in rows]}
    path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")


def draw(path: Path, rows: list[CollectiveRow], network: HostNetwork) -> None:
    """Plot time and bandwidth over size, two panels per collective; the suffix chooses the format.

    Raises:
        UsageError: there are only barriers, or matplotlib does not know the suffix.
    """
    from matplotlib.figure import Figure

    sized = [row for row in rows if row.num_bytes]
    if not sized:
        raise UsageError(f"{path}: nothing to draw; a barrier has no size")
    collectives = list(dict.fromkeys(row.collective for row in sized))
    figure = Figure(figsize=(10.0, 3.4 * len(collectives)), layout="constrained")
    figure.suptitle(network.describe(), fontsize=10)
    for panels, collective in zip(
        figure.subplots(len(collectives), 2, squeeze=False), collectives, strict=True
    ):
        times, bandwidths = panels
        shown = sorted((row for row in sized if row.collective == collective), key=lambda row: row.num_bytes)
        for name in dict.fromkeys(row.backend for row in shown):
            line = [row for row in shown if row.backend == name]
            sizes = [row.num_bytes for row in line]
            (drawn,) = times.plot(sizes, [row.time_s * 1e3 for row in line], "o-", markersize=3, label=name)
            colour = drawn.get_color()
            low, high = ([pick(row.samples_s) * 1e3 for row in line] for pick in (min, max))
            times.fill_between(sizes, low, high, color=colour, alpha=0.15, linewidth=0)
            rates = [row.num_bytes / row.time_s / 1e6 for row in line]
            bandwidths.plot(sizes, rates, "o-", color=colour, markersize=3, label=name)
        if limits := {row.num_bytes: row.num_bytes / row.limit_s / 1e6 for row in shown if row.limit_s}:
            bandwidths.plot(
                *zip(*limits.items(), strict=True), "k", linewidth=0.8, label="limit of the links"
            )
        times.set(title=f"{collective}: time", ylabel="ms", yscale="log")
        bandwidths.set(title=f"{collective}: algbw", ylabel="MB/s", ylim=(0, None))
        sizes = sorted({row.num_bytes for row in shown})
        for axes in panels:
            axes.set_xscale("log", base=2)
            axes.set_xticks(sizes, [formatting.size(size) for size in sizes], fontsize=7)
    write_chart(figure, path)


def write_chart(figure: Any, path: Path) -> None:
    """Draw a grid and a legend in each panel of matplotlib's figure; the suffix chooses the file's format.

    Raises:
        UsageError: matplotlib does not know the suffix.
    """
    for axes in figure.axes:
        axes.grid(color="#dddddd", linewidth=0.6)
        axes.legend(frameon=False, fontsize=8)
    try:
        figure.savefig(path, dpi=120)
    except ValueError as error:
        raise UsageError(f"--plot {path}: {error}") from None


def time_text(seconds: float) -> str:
    """Return a time with three digits: ``25.1 ms``."""
    unit, name = next(
        ((unit, name) for unit, name in ((1.0, "s"), (1e-3, "ms")) if seconds >= unit), (1e-6, "µs")
    )
    return f"{formatting.number(seconds / unit, 3)} {name}"
