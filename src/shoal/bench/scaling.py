"""Defines the options of ``shoal bench scaling``, and writes its rows as a table, as JSON and as a chart."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from shoal import formatting
from shoal.bench.comm_options import COLOCATED, split_list
from shoal.bench.comm_results import time_text, write_chart
from shoal.errors import UsageError

KIND = "shoal bench scaling"
"""Value of ``kind`` in the files."""
_OWN = (
    *("--accumulate", "--json", "--on", "--hosts", "--nic", "--helpers", "--helper-nic", "--workers"),
    *("--nnodes", "--rdzv", "--distributed.backend", "--steps", "--warm-up", "--fill-memory", "--dry-run"),
)
"""Options of ``shoal bench train`` that this command sets itself."""


@dataclass(frozen=True, kw_only=True)
class ScalingBench:
    """Options of ``shoal bench scaling``."""

    hosts: str = "1,2,4,8"
    """Numbers of hosts, separated by commas."""
    accumulate: str = "1"
    """Micro-batches per optimizer step; several separated by commas."""
    backends: str = "gloo,shoal"
    """Backends of torch.distributed, and shoal-colocated for shoal without its helper hosts."""
    on: Literal["emulated", "launcher"] = "launcher"
    """emulated: hosts with a network of their own, made on this machine; launcher: real hosts, on which
    --launcher starts the workers."""
    launcher: str | None = None
    """Command that starts the workers on N hosts, with {hosts} for N, such as
    'srun --nodes={hosts} --ntasks-per-node=8'."""
    nic: str | None = None
    """Rate of each emulated host's link in each direction, such as 200mbit; default: not limited."""
    helpers: int = 0
    """Emulated helper hosts of backend shoal."""
    helper_nic: str | None = None
    """Rate of the helper hosts' links; default: --nic."""
    workers: int = 1
    """Workers on each emulated host."""
    steps: int = 5
    """Timed steps."""
    warm_up: int = 2
    """Steps before the timed ones."""
    price: str | None = None
    """Dollars per hour of a host, or an instance type that `shoal plan` knows, for the column of costs."""
    helper_price: str | None = None
    """The same of a helper host; default: that of a host."""
    timeout: Annotated[float, Parameter(name="--timeout-s")] = 3600.0
    """Seconds after which a run of one number of hosts is ended."""
    json: Path | None = None
    """File for the result; `shoal plan --measured` reads it."""
    plot: Path | None = None
    """File for the chart (.png, .svg, .pdf): a curve for each backend and accumulation."""

    def host_counts(self) -> list[int]:
        """Return the numbers of hosts, the smallest first."""
        return sorted(set(_numbers("--hosts", self.hosts)))

    def accumulations(self) -> list[int]:
        """Return the micro-batches per step, in the order given."""
        return list(dict.fromkeys(_numbers("--accumulate", self.accumulate)))

    def check(self, arguments: Iterable[str]) -> None:
        """Check the options and those for ``shoal bench train``.

        Raises:
            UsageError: a number is invalid, options do not go together, a folder is missing, or
                ``arguments`` has an option that this command sets.
        """
        self.host_counts(), self.accumulations()
        for name, least in (("helpers", 0), ("workers", 1), ("steps", 1), ("warm_up", 0)):
            if getattr(self, name) < least:
                option = f"--{name.replace('_', '-')} {getattr(self, name)}"
                raise UsageError(f"{option} must be at least {least}")
        if not split_list(self.backends):
            raise UsageError("--backends is empty: name one, such as gloo")
        emulation = [n for n in ("nic", "helper_nic", "helpers") if getattr(self, n)]
        if self.on == "launcher" and emulation:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in emulation)
            raise UsageError(f"{names} set up emulated hosts: add --on emulated")
        if self.on == "launcher" and "{hosts}" not in (self.launcher or ""):
            raise UsageError(
                "on real hosts --launcher names the command that starts the workers, with {hosts} for their "
                "number, such as 'srun --nodes={hosts} --ntasks-per-node=8'; or add --on emulated"
            )
        if self.on == "emulated" and self.launcher:
            raise UsageError("--launcher is for real hosts and does not go with --on emulated")
        if COLOCATED in split_list(self.backends) and self.on == "emulated" and not self.helpers:
            raise UsageError(
                f"--backends {COLOCATED} is shoal without helpers: give --helpers, or only shoal"
            )
        for path in filter(None, (self.json, self.plot)):
            if not path.parent.is_dir():
                raise UsageError(f"{path}: the folder {path.parent} is not there; make it first")
        for argument in arguments:
            if (name := argument.partition("=")[0]) in _OWN:
                raise UsageError(f"{name} is an option of shoal bench scaling itself: put it before --")


def _numbers(option: str, text: str) -> list[int]:
    parts = split_list(text)
    if not parts or not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UsageError(f"{option} {text!r} must be positive numbers separated by commas, such as 1,2,4,8")
    return [int(part) for part in parts]


@dataclass(frozen=True, kw_only=True)
class ScalingRow:
    """Steps of one number of hosts on one backend.

    Example:
        >>> row = ScalingRow(backend="gloo", accumulate=1, hosts=8, global_batch=8, step_s=(2.0,),
        ...           reference_hosts=1, reference_batch=1, reference_s=(1.5,))
        >>> row.efficiency, row.samples_per_s
        (0.75, 4.0)
    """

    backend: str
    accumulate: int
    hosts: int
    helpers: int = 0
    global_batch: int
    step_s: tuple[float, ...]
    """Seconds of each step."""
    reference_hosts: int
    """Hosts of the measurement that ``efficiency`` compares with."""
    reference_batch: int
    """Samples of a step of these hosts."""
    reference_s: tuple[float, ...]
    """Seconds of their steps."""
    dollars_per_hour: float | None = None

    @property
    def curve(self) -> str:
        """Name of the row's curve."""
        helped = f" with {formatting.plural(self.helpers, 'helper')}" if self.helpers else ""
        return f"{self.backend}{helped}, accumulation {self.accumulate}"

    @property
    def steps_per_s(self) -> float:
        return 1 / statistics.median(self.step_s)

    @property
    def samples_per_s(self) -> float:
        return self.global_batch * self.steps_per_s

    @property
    def efficiency(self) -> float:
        """Throughput per host relative to the reference's."""
        reference = self.reference_batch / statistics.median(self.reference_s) / self.reference_hosts
        return self.samples_per_s / self.hosts / reference

    @property
    def dollars_per_million(self) -> float | None:
        """Cost of a million samples, helper hosts included."""
        if self.dollars_per_hour is None:
            return None
        return self.dollars_per_hour / 3600 * 1e6 / self.samples_per_s

    def as_json(self) -> dict[str, Any]:
        """Return fields and derived figures."""
        derived = ("curve", "steps_per_s", "samples_per_s", "efficiency", "dollars_per_million")
        return asdict(self) | {name: getattr(self, name) for name in derived}


@dataclass(kw_only=True)
class Scaling:
    """All rows of a command, and the job that was measured."""

    title: str
    """Model, batch, precision and hosts, for people."""
    unit: str
    """Plural name of a sample."""
    emulated: bool
    settings: dict[str, Any]
    rows: list[ScalingRow] = field(default_factory=list)
    one_host: dict[str, Any] | None = None
    """The result of ``shoal bench train`` on one host."""

    def header(self) -> str:
        """Return the head of the table."""
        cost = f"  {'$ / million':>11}" if self.settings.get("price") else ""
        names = f"{'hosts':>5}  {'steps/s':>8}  {self.unit + '/s':>12}  {'step':>8}  {'efficiency':>10}{cost}"
        return f"{self.title}\n\n{'backend':<38} {names}"

    def line(self, row: ScalingRow) -> str:
        """Return a row of the table."""
        dollars = row.dollars_per_million
        cost = "" if dollars is None else f"  {dollars:>11,.2f}"
        return (
            f"{row.curve:<38} {row.hosts:>5}  {row.steps_per_s:>8.4g}  {row.samples_per_s:>12.4g}  "
            f"{time_text(statistics.median(row.step_s)):>8}  {100 * row.efficiency:>8.1f} %{cost}"
        )

    def legend(self) -> str:
        """Return a sentence about the efficiency."""
        if self.emulated:
            return (
                "efficiency: of the same hosts training at the same time, each by itself: emulated hosts "
                "share this machine's cores, which a comparison with one host alone would show."
            )
        fewest = min(row.reference_hosts for row in self.rows)
        return f"efficiency: throughput per host, of that of {formatting.plural(fewest, 'host')}."

    def write(self, path: Path) -> None:
        """Write ``{"kind", "settings", "one_host", "rows"}``; times in seconds."""
        whole = {
            "kind": KIND,
            "title": self.title,
            "unit": self.unit,
            "emulated": self.emulated,
            "settings": self.settings,
            "one_host": self.one_host,
            "rows": [row.as_json() for row in self.rows],
        }
        path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")

    def draw(self, path: Path) -> None:
        """Plot throughput and efficiency over the hosts, a curve for each backend and accumulation.

        Raises:
            UsageError: matplotlib does not know the suffix.
        """
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10.0, 4.0), layout="constrained")
        figure.suptitle(self.title, fontsize=10)
        rates, efficiencies = figure.subplots(1, 2)
        ideal: dict[int, dict[int, float]] = {}
        for key in dict.fromkeys((row.backend, row.accumulate) for row in self.rows):
            curve = [row for row in self.rows if (row.backend, row.accumulate) == key]
            name = max(curve, key=lambda row: row.helpers).curve  # one host alone has no helpers
            hosts = [row.hosts for row in curve]
            (drawn,) = rates.plot(hosts, _each(curve, "samples_per_s"), "o-", markersize=3, label=name)
            shares = [100 * share for share in _each(curve, "efficiency")]
            efficiencies.plot(hosts, shares, "o-", markersize=3, color=drawn.get_color(), label=name)
            for row in curve:
                ideal.setdefault(row.accumulate, {})[row.hosts] = row.samples_per_s / row.efficiency
        for accumulate, points in ideal.items():
            xs, ys = zip(*sorted(points.items()), strict=True)
            rates.plot(xs, ys, "--", color="#888888", linewidth=0.8)
            name = "by themselves" if self.emulated else "ideal"
            rates.annotate(f"{name}, accumulation {accumulate}", (xs[-1], ys[-1]), fontsize=7, ha="right")
        rates.set(title="throughput", ylabel=f"{self.unit}/s", ylim=(0, None))
        efficiencies.set(title="efficiency", ylabel="%", ylim=(0, 105))
        counts = sorted({row.hosts for row in self.rows})
        for axes in (rates, efficiencies):
            axes.set_xticks(counts, [str(count) for count in counts])
            axes.set_xlabel("hosts")
        write_chart(figure, path)


def _each(rows: Sequence[ScalingRow], name: str) -> list[float]:
    return [getattr(row, name) for row in rows]


def hourly(
    options: ScalingBench, price_of: Callable[[str], float], *, hosts: int, helpers: int
) -> float | None:
    """Return the dollars per hour of hosts and helper hosts; ``None`` without ``--price``.

    Args:
        price_of: returns the price of an instance type.

    Raises:
        UsageError: a price is neither a positive number nor a known instance type.
    """
    if options.price is None:
        return None
    each = _dollars(options.price, price_of)
    helping = _dollars(options.helper_price or options.price, price_of) if helpers else 0.0
    return hosts * each + helpers * helping


def _dollars(text: str, price_of: Callable[[str], float]) -> float:
    try:
        number = float(text)
    except ValueError:
        return price_of(text)
    if not 0 < number < float("inf"):
        raise UsageError(f"--price {text} must be a positive number of dollars per hour")
    return number
