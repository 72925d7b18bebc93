"""Draws ``docs/images/helpers.png``: when helper hosts pay, by ``shoal.decide.server_assignment``.

python -m benchmarks.plot_helpers [--out FILE]
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes

from shoal.decide import server_assignment

DEFAULT_OUT = Path(__file__).resolve().parents[1] / "docs" / "images" / "helpers.png"
BLUE, ORANGE, GREEN, RED, GREY = "#2a6fbb", "#d9822b", "#3a9d5d", "#b83b5e", "#777777"


def draw_times(axes: Axes, num_hosts: int) -> None:
    """Draw the time of an all-reduce over the number of helpers, in units of M / B."""
    counts = list(range(num_hosts + 5))
    ring = server_assignment.ring_seconds(1, [1.0] * num_hosts)
    axes.axhline(ring, color=GREY, linestyle="--", linewidth=1.2)
    axes.text(counts[-1], ring + 0.03, "ring, no helpers", ha="right", color=GREY)
    for bandwidth, colour, label in (
        (2.0, GREEN, "helpers with twice a host's bandwidth"),
        (1.0, BLUE, "helpers like the hosts"),
        (0.5, ORANGE, "helpers with half of it"),
    ):
        times = [server_assignment.two_hop_seconds(1, [1.0] * num_hosts, [bandwidth] * k) for k in counts]
        axes.plot(counts, times, "o-", color=colour, markersize=4, label=label)
    alone = [max(1.0, num_hosts / k) for k in counts[5:]]
    axes.plot(
        counts[5:], alone, ":", color=RED, linewidth=1.5, label="helpers like the hosts, which sum nothing"
    )
    axes.axhline(1, color="black", linewidth=0.8)
    axes.text(0, 0.93, "limit: every byte leaves its host once, M / B", va="top")
    axes.set(xlabel=f"helper hosts beside {num_hosts} worker hosts", ylabel="time of an all-reduce, × M / B")
    axes.set(ylim=(0.8, 2.35), title=f"{num_hosts} hosts")
    axes.legend(frameon=False, loc="upper right", borderaxespad=0.0)


def draw_gains(axes: Axes) -> None:
    """Draw the gain over a ring over the helpers' bandwidth, for several sizes of the cluster."""
    for num_hosts, colour in ((3, RED), (4, ORANGE), (8, BLUE), (32, GREEN)):
        fractions = [i / 32 for i in range(41)]
        gains = [server_assignment.gain_over_ring(num_hosts, [f * num_hosts] if f else []) for f in fractions]
        axes.plot(fractions, gains, color=colour, label=f"{num_hosts} hosts")
        axes.text(1.26, gains[-1], f"{num_hosts} hosts", color=colour, va="center")
    axes.axhline(1, color=GREY, linewidth=0.8)
    axes.text(0.0, 0.985, "2 hosts: helpers bring nothing", color=GREY, va="top")
    axes.set(
        xlabel="bandwidth of all helpers / bandwidth of all hosts (κ / n)", ylabel="times as fast as a ring"
    )
    axes.set(xlim=(0, 1.5), ylim=(0.9, 2.05), title="Gain: 1 + κ/n − 2κ/n², up to κ = n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, metavar="FILE")
    out = parser.parse_args().out
    pyplot.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10.5, 4.2), layout="constrained")
    for axes in (left, right):
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    draw_times(left, 8)
    draw_gains(right)
    figure.savefig(out, dpi=110, metadata={"Software": None})
    print(out)


if __name__ == "__main__":
    main()
