"""Is anything slower than in an older commit? The same benchmarks in two checkouts, by turns.

    python -m benchmarks.against ../older "reduce --quick" "comm --quick --only native-group-2"

Each checkout runs its own benchmarks with the interpreter of its own ``.venv``. A row's figure of a turn is
the median of its samples. Rows of one case are compared, whatever their peer is. A row holds if the new
median is no worse than the old one by more than half the distance between the extremes of the older figures,
or by 3 % where these agree more closely: two runs of one commit differ by as much.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.harness import Benchmark

HERE = Path(__file__).resolve().parents[1]
LEAST_SPREAD = 0.03

Figures = dict[tuple[str, str, str], list[float]]
"""Medians of the turns, by benchmark, case and unit."""


def take_turn(checkout: Path, command: str, figures: Figures, better: dict[str, str]) -> None:
    """Run a benchmark once in a checkout and add the figures of its rows."""
    name, *options = shlex.split(command)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        argv = [str(checkout / ".venv/bin/python"), "-m", f"benchmarks.{name}", *options, "--json", str(out)]
        done = subprocess.run(argv, cwd=checkout, stdout=subprocess.DEVNULL, check=False)
        if not out.is_file():  # a row that misses its target ends with 1, too
            raise SystemExit(
                f"{shlex.join(argv)} in {checkout} ended with {done.returncode} and wrote no rows"
            )
        rows: list[dict[str, Any]] = json.loads(out.read_text(encoding="utf-8"))["rows"]
    for row in rows:
        figures[command, row["case"], row["unit"]].append(row["ours"])
        better[row["case"]] = row["better"]


def allowed(old: list[float]) -> float:
    """Return the least ratio that holds: 1 less the spread of the old figures."""
    return 1 - max(LEAST_SPREAD, (max(old) - min(old)) / 2 / max(old))


def main() -> int:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("older", type=Path, help="a checkout with its own environment, by `make setup`")
    options.add_argument("command", nargs="+", help="a benchmark with its options, such as 'reduce --quick'")
    options.add_argument("--turns", type=int, default=4, help="of each checkout")
    bench = Benchmark("against", options=options)
    older: Path = bench.args.older.resolve()
    better: dict[str, str] = {}
    for command in bench.args.command:
        old: Figures = defaultdict(list)
        new: Figures = defaultdict(list)
        for turn in range(bench.args.turns):
            sides = [(older, old), (HERE, new)]
            for checkout, figures in sides if turn % 2 == 0 else reversed(sides):
                take_turn(checkout, command, figures, better)
        for key in [key for key in new if key in old]:
            _, case, unit = key
            bench.add(
                f"{command.split()[0]}: {case}",
                ours=new[key],
                peer=old[key],
                peer_name="the older commit",
                unit=unit,
                target=allowed(old[key]),
                better="higher" if better[case] == "higher" else "lower",
            )
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
