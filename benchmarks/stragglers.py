"""Samples per second of 8 emulated hosts, one of which has half the speed of the others.

Each host has an emulated accelerator: a sample takes it 32 ms, or 64 ms on the slow host, in which the
processor sleeps. Gradients, messages and shares are real; all hosts share the cores of this machine, which
add some 50 ms to a step of 2.2 s. What the accelerators could do together is the sum of their speeds; shares
are whole samples, which makes the best possible step a little longer than that.
"""

from __future__ import annotations

import json
import sys
import tempfile
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.comm_runs import run_on, watched
from benchmarks.harness import Benchmark
from shoal.decide.shares import balanced_shares
from shoal.launch.emulated import Cluster

SAMPLES_PER_S = 31.25
SPEEDS = [SAMPLES_PER_S] * 7 + [SAMPLES_PER_S / 2]
BATCH, MICRO_BATCH = 512, 16
STEPS, QUICK_STEPS = {"equal": 20, "by-speed": 40}, {"equal": 12, "by-speed": 20}
TARGET = 0.95
MOST_DIFFERENCE = 1e-6


def measure(shares: str, steps: int) -> dict[str, Any]:
    """Train on a cluster; return the losses, when each step ended, and the changes of shares."""
    spec = {"batch": BATCH, "micro_batch": MICRO_BATCH, "steps": steps, "shares": shares, "speeds": SPEEDS}
    with tempfile.TemporaryDirectory() as folder, Cluster(hosts=len(SPEEDS), helpers=0) as cluster:
        out = Path(folder) / "result.json"
        run_on(cluster, [sys.executable, "-m", "benchmarks.stragglers_worker", json.dumps(spec), str(out)])
        result: dict[str, Any] = json.loads(out.read_text())
    return result


def rates(result: dict[str, Any]) -> list[float]:
    """Return the samples per second of each step of the last half, as a part of what is possible."""
    ends = result["ends"][len(result["ends"]) // 2 :]
    possible = sum(SPEEDS)
    return [BATCH / (end - begin) / possible for begin, end in pairwise(ends)]


def main() -> int:
    bench = Benchmark("stragglers")
    steps = QUICK_STEPS if bench.quick else STEPS
    found, foreign = {}, {}
    for shares, count in steps.items():
        found[shares], foreign[shares], _ = watched(partial(measure, shares, count), most_retaken=0)
    cores = list(foreign.values())
    best = balanced_shares([1 / speed for speed in SPEEDS], BATCH)
    bound = BATCH / max(n / speed for n, speed in zip(best, SPEEDS, strict=True)) / sum(SPEEDS)
    bench.limit(
        "1 of 8 hosts at half speed, shares by speed",
        rates(found["by-speed"]),
        TARGET,
        unit="of possible",
        formula=f"at least {TARGET}; whole samples allow {bound:.3f}",
        better="higher",
        foreign_cores=cores,
    )
    bench.add(
        "the same, beside equal shares",
        ours=rates(found["by-speed"]),
        peer=rates(found["equal"]),
        peer_name="equal shares",
        unit="of possible",
        better="higher",
        foreign_cores=cores,
    )
    pairs = zip(
        found["by-speed"]["losses"], found["equal"]["losses"], strict=False
    )  # fewer with equal shares
    bench.limit(
        "largest difference of a loss to equal shares",
        max(abs(one - other) / abs(other) for one, other in pairs),
        MOST_DIFFERENCE,
        unit="relative",
        formula="the same samples, added in another order",
    )
    for step, shares in found["by-speed"]["shares"]:
        print(f"step {step}: shares {shares}")
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
