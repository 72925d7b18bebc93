"""The form of every benchmark: ours and the peer in the same run, alternating, on a quiet machine.

    bench = Benchmark("reduce")
    bench.compare("8 x 25 MiB", ours=..., peer=..., peer_name="torch.add", target=1.8)
    raise SystemExit(bench.finish())

A ratio above 1 is in our favour. It is the ratio of the medians of the raw samples, which the JSON file
keeps. A repetition during which other processes used more than 0.3 processors is thrown away and taken
again, a bounded number of times: a first, unwatched run once showed 3.0x where 1.09x was true.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from benchmarks.machine import ForeignCores, current_commit, describe_machine
from shoal.errors import install_command

MAX_FOREIGN_CORES = 0.3
MIN_REPETITION_S = 0.3
"""A shorter repetition cannot be watched: processor time is counted in ticks of 10 ms."""
_SETTLE_S = 0.5
_THREADS_REST_S = 0.01
"""The threads of torch's last operation spin for some milliseconds."""
_UNITS_PER_S = {"s": 1.0, "ms": 1e3, "us": 1e6}

Better = Literal["lower", "higher"]
Measured = Callable[[], float | None]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One case. ``ours`` and ``peer`` are medians of the samples, in ``unit``."""

    case: str
    unit: str
    ours: float
    peer: float
    peer_name: str
    ratio: float
    target: float | None
    holds: bool
    better: Better
    ours_samples: list[float]
    peer_samples: list[float]
    foreign_cores: list[float] = field(default_factory=list)
    """Processors that others used, one figure for each kept repetition; empty where it was not measured."""
    num_retaken: int = 0
    noisy: bool = False
    """Repetitions above the limit of foreign processors were kept because the retries ran out."""


class Benchmark:
    """Collects rows, prints them as they come, writes the files and decides the exit status.

    ``name`` is the module's name below ``benchmarks``. ``options`` may hold further arguments of the
    benchmark (made with ``add_help=False``); the parsed values are in ``args``.
    """

    def __init__(
        self, name: str, argv: Sequence[str] | None = None, options: argparse.ArgumentParser | None = None
    ) -> None:
        parser = argparse.ArgumentParser(
            prog=f"python -m benchmarks.{name}", parents=[options] if options else [], allow_abbrev=False
        )
        parser.add_argument("--quick", action="store_true", help="every target, fewer repetitions")
        parser.add_argument("--json", type=Path, metavar="FILE", help="write rows and raw samples as JSON")
        parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table for people")
        self.name = name
        self.args = parser.parse_args(argv)
        self.quick: bool = self.args.quick
        self.rows: list[Row] = []
        self._command = _reproducing_command(parser.prog, sys.argv[1:] if argv is None else argv)

    def compare(
        self,
        case: str,
        *,
        ours: Measured,
        peer: Measured,
        peer_name: str,
        unit: str = "ms",
        target: float | None = None,
        better: Better = "lower",
        repetitions: int = 12,
        quick_repetitions: int = 4,
        warmup: int = 2,
    ) -> Row:
        """Measure both sides by turns and add the row.

        A callable that returns ``None`` is timed (``unit`` is then "s", "ms" or "us"); one that returns a
        number has measured itself, in ``unit``: seconds a step inside child processes, examples a second.
        A repetition calls both sides by turns, the first one alternating, for at least
        ``MIN_REPETITION_S``; every call is a sample.
        """
        for _ in range(warmup):
            ours()
            peer()
        num_wanted = quick_repetitions if self.quick else repetitions
        num_retries = num_wanted
        ours_samples: list[float] = []
        peer_samples: list[float] = []
        foreign: list[float] = []
        num_taken = num_retaken = 0
        while num_taken < num_wanted:
            with ForeignCores() as watch:
                ours_part, peer_part = _repetition(ours, peer, unit)
            if watch.cores is not None and watch.cores > MAX_FOREIGN_CORES and num_retaken < num_retries:
                num_retaken += 1
                time.sleep(_SETTLE_S)
                continue
            num_taken += 1
            ours_samples += ours_part
            peer_samples += peer_part
            foreign += [] if watch.cores is None else [watch.cores]
        return self.add(
            case,
            ours=ours_samples,
            peer=peer_samples,
            peer_name=peer_name,
            unit=unit,
            target=target,
            better=better,
            foreign_cores=foreign,
            num_retaken=num_retaken,
        )

    def add(
        self,
        case: str,
        *,
        ours: Sequence[float],
        peer: Sequence[float],
        peer_name: str,
        unit: str,
        target: float | None = None,
        better: Better = "lower",
        foreign_cores: Sequence[float] = (),
        num_retaken: int = 0,
    ) -> Row:
        """Add a row from samples that were measured elsewhere; without a target it only informs."""
        ours_median, peer_median = statistics.median(ours), statistics.median(peer)
        above, below = (peer_median, ours_median) if better == "lower" else (ours_median, peer_median)
        ratio = above / below if below else float("inf" if above else "nan")
        row = Row(
            case=case,
            unit=unit,
            ours=ours_median,
            peer=peer_median,
            peer_name=peer_name,
            ratio=ratio,
            target=target,
            holds=target is None or ratio >= target,
            better=better,
            ours_samples=list(ours),
            peer_samples=list(peer),
            foreign_cores=list(foreign_cores),
            num_retaken=num_retaken,
            noisy=any(cores > MAX_FOREIGN_CORES for cores in foreign_cores),
        )
        if not self.rows:
            print(_HEADER)
        self.rows.append(row)
        print(_line(row), flush=True)
        return row

    def limit(
        self,
        case: str,
        value: float | Sequence[float],
        limit: float,
        *,
        unit: str,
        formula: str,
        better: Better = "lower",
        foreign_cores: Sequence[float] = (),
    ) -> Row:
        """Add a row without a peer: ``value`` must stay within ``limit``, which ``formula`` explains."""
        samples = [value] if isinstance(value, int | float) else list(value)
        return self.add(
            case,
            ours=samples,
            peer=[limit],
            peer_name=f"limit: {formula}",
            unit=unit,
            target=1.0,
            better=better,
            foreign_cores=foreign_cores,
        )

    def finish(self) -> int:
        """Write the files that were asked for; return the exit status: 0 when every row holds."""
        result: dict[str, Any] = {
            "benchmark": self.name,
            "command": self._command,
            "commit": current_commit(),
            "machine": describe_machine(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "quick": self.quick,
            "rows": [asdict(row) | {"ratio": _finite(row.ratio)} for row in self.rows],
        }
        if self.args.json:
            text = json.dumps(result, indent=1, allow_nan=False)
            self.args.json.write_text(text + "\n", encoding="utf-8")
        if self.args.markdown:
            self.args.markdown.write_text(_markdown(result, self.rows), encoding="utf-8")
        if any(row.noisy for row in self.rows):
            print(f"~ other processes used more than {MAX_FOREIGN_CORES} processors: run it again when quiet")
        return 0 if self.rows and all(row.holds for row in self.rows) else 1


def settled_ms(call: Callable[[], object]) -> Callable[[], float]:
    """Return a measurement of ``call`` in ms, which first waits until torch's threads have come to rest."""

    def measure() -> float:
        time.sleep(_THREADS_REST_S)
        begin_s = time.perf_counter()
        call()
        return (time.perf_counter() - begin_s) * 1e3

    return measure


def peer_module(name: str) -> ModuleType:
    """Import a library that we compare with.

    Raises:
        SystemExit: it is not installed; the message says what to install.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise SystemExit(
            f"this benchmark compares with {name}, which cannot be imported ({error}); "
            f"{install_command('bench')}"
        ) from None


def _repetition(ours: Measured, peer: Measured, unit: str) -> tuple[list[float], list[float]]:
    sides: tuple[tuple[Measured, list[float]], ...] = ((ours, []), (peer, []))
    begin_s = time.perf_counter()
    turn = 0
    while turn == 0 or time.perf_counter() - begin_s < MIN_REPETITION_S:
        for call, samples in sides if turn % 2 == 0 else reversed(sides):
            call_s = time.perf_counter()
            value = call()
            call_s = time.perf_counter() - call_s
            samples.append(call_s * _UNITS_PER_S[unit] if value is None else float(value))
        turn += 1
    return sides[0][1], sides[1][1]


def _reproducing_command(prog: str, argv: Sequence[str]) -> str:
    """Return the command without the names of the result files, which do not change the figures."""
    kept: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        if argument in ("--json", "--markdown"):
            next(arguments, None)
        elif not argument.startswith(("--json=", "--markdown=")):
            kept.append(argument)
    return " ".join([prog, *map(shlex.quote, kept)])


_HEADER = f"{'case':<44} {'ours':>18} {'peer':>18} {'ratio':>7} {'target':>7}      peer"


def _line(row: Row) -> str:
    target = "" if row.target is None else f"{row.target:.2f}"
    verdict = "" if row.target is None else "ok" if row.holds else "LOW"
    return (
        f"{row.case:<44} {_with_spread(row.ours_samples, row.unit):>18} "
        f"{_with_spread(row.peer_samples, row.unit):>18} {row.ratio:>7.2f} {target:>7} {verdict:<3}"
        f"{'~' if row.noisy else ' '} {row.peer_name}"
    )


def _finite(ratio: float) -> float | None:
    """Return the ratio, or None where it divides by zero: JSON has no infinity."""
    return ratio if math.isfinite(ratio) else None


def _with_spread(samples: Sequence[float], unit: str) -> str:
    """Median and half the distance between the quartiles."""
    text = f"{statistics.median(samples):.4g}"
    if len(samples) > 1:
        low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
        text += f" ±{(high - low) / 2:.2g}"
    return f"{text} {unit}"


def _markdown(result: dict[str, Any], rows: Sequence[Row]) -> str:
    machine = result["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    hardware = [f"{machine['processor']}, {machine['cores']} cores", *machine["accelerators"]]
    lines = [
        f"# {result['benchmark']}",
        "",
        f"- command: `{result['command']}`",
        f"- commit: {result['commit']}",
        f"- machine: {'; '.join(hardware)}; {machine['memory_bytes'] / 2**30:.0f} GiB; {machine['system']}",
        f"- versions: {versions}",
        f"- date: {result['date']}",
        "",
        "Medians ± half the distance between the quartiles; a ratio above 1 is in our favour.",
        "",
        "| case | ours | peer | peer is | ratio | target | holds | foreign cores |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [
            row.case,
            _with_spread(row.ours_samples, row.unit),
            _with_spread(row.peer_samples, row.unit),
            row.peer_name,
            f"{row.ratio:.2f}",
            "" if row.target is None else f"{row.target:.2f}",
            "" if row.target is None else "yes" if row.holds else "**no**",
            f"{statistics.median(row.foreign_cores):.2f}{' noisy' if row.noisy else ''}"
            if row.foreign_cores
            else "not measured",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "Raw samples:", ""]
    for row in rows:
        for side, samples in (("ours", row.ours_samples), ("peer", row.peer_samples)):
            figures = " ".join(f"{sample:.4g}" for sample in samples)
            lines.append(f"- {row.case}, {side}, {row.unit}: {figures}")
    return "\n".join(lines) + "\n"
