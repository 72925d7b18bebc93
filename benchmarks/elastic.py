"""Time from ``kill -9`` of one of four workers to the others' next completed step, and the stall of a join.

The workers train a small model in a :class:`~shoal.train.crew.Crew` on this machine. A lost step is taken
again by those that are left; a newcomer gets models and optimizer from a member. A step takes a few
milliseconds, so the figures are what the change itself takes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import Benchmark
from benchmarks.worker import TIMEOUT_S, command

SIZE, WIDTH, AT = 4, 256, 100
RUNS, QUICK_RUNS = 10, 3
MOST_AFTER_KILL_S, MOST_STALL_S = 1.0, 0.5


def run(specs: list[dict[str, Any]]) -> dict[str, Any]:
    """Run the workers to their end and return the result of the last one that lives on from the beginning."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        outs = [folder / f"{number}.json" for number in range(len(specs))]
        workers = [
            subprocess.Popen(command("benchmarks.elastic_worker:train", spec, out))
            for spec, out in zip(specs, outs, strict=True)
        ]
        for worker in workers:
            worker.wait(TIMEOUT_S)
        last = max(number for number, spec in enumerate(specs) if not (spec["dies_at"] or spec["starts_at"]))
        if not outs[last].exists():
            sys.exit(f"worker {last} failed")
        result: dict[str, Any] = json.loads(outs[last].read_text())
    return result


def spec_of(
    rank: int, size: int, size_at_end: int, *, dies_at: int = 0, starts_at: int = 0
) -> dict[str, Any]:
    return {
        "rank": rank, "size": size, "size_at_end": size_at_end, "width": WIDTH,
        "dies_at": dies_at, "starts_at": starts_at,
    }  # fmt: skip


def seconds_after_kill() -> float:
    """Return how long after the kill the others' next step had ended."""
    specs = [spec_of(rank, SIZE, SIZE - 1, dies_at=AT if rank == 1 else 0) for rank in range(SIZE)]
    result = run(specs)
    return float(min(end for end in result["ends"] if end > result["died"]) - result["died"])


def stall_of_join() -> float:
    """Return by how much the step of a join took longer than the median step before."""
    specs = [spec_of(rank, SIZE - 1, SIZE) for rank in range(SIZE - 1)]
    result = run([*specs, spec_of(SIZE - 1, SIZE, SIZE, starts_at=10)])
    joined = result["sizes"].index(SIZE)
    steps = [end - begin for begin, end in pairwise(result["ends"])]
    return float(steps[joined - 1] - median(steps[: joined - 1]))


def main() -> int:
    bench = Benchmark("elastic")
    runs = QUICK_RUNS if bench.quick else RUNS
    bench.limit(
        "kill -9 of 1 of 4 workers: until the next completed step",
        [seconds_after_kill() for _ in range(runs)],
        MOST_AFTER_KILL_S,
        unit="s",
        formula="at most a second",
    )
    bench.limit(
        "a worker joins 3 others: stall of a step",
        [stall_of_join() for _ in range(runs)],
        MOST_STALL_S,
        unit="s",
        formula="a step, and half a second",
    )
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
