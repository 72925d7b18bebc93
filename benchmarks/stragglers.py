"""Samples per second of 8 emulated hosts, one of which is slow, or each of which pauses now and then.

Each host has an emulated accelerator: a sample takes it 32 ms, or 64 ms on the slow host, in which the
processor sleeps. Gradients, messages and shares are real; all hosts share the cores of this machine, which
add some 50 ms to a step of 2.2 s. What the accelerators could do together is the sum of their speeds; shares
are whole samples, which makes the best possible step a little longer than that.

Pauses: a gradient takes 0.2 s, and one in a hundred, by a seeded schedule, five times as long. What is
possible is that no worker ever waits. A step that does not wait for all counts for the gradients that it
takes. ``--only`` chooses among the parts: ``shares``, and ways to wait, always beside plain DDP.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from benchmarks.comm_runs import watched
from benchmarks.harness import Benchmark
from benchmarks.worker import run_on_hosts
from shoal.decide.bounded_waiting import WaitingRule, simulate
from shoal.decide.shares import balanced_shares
from shoal.launch.emulated import Cluster

SAMPLES_PER_S = 31.25
SPEEDS = [SAMPLES_PER_S] * 7 + [SAMPLES_PER_S / 2]
BATCH, MICRO_BATCH = 512, 16
STEPS, QUICK_STEPS = {"equal": 20, "by-speed": 40}, {"equal": 12, "by-speed": 20}
TARGET = 0.95
MOST_DIFFERENCE = 1e-6

STEP_S, PAUSE, PAUSE_SHARE = 0.2, 5.0, 0.01
NUM_PAUSED, QUICK_NUM_PAUSED = 500, 200
"""Steps with pauses."""
WAITING: dict[str, tuple[dict[str, Any] | None, float | None]] = {
    "plain DDP": (None, None),
    "drop one": ({"wait_for": 7, "grace_s": 0.02}, 0.86),
    "drop one, half the grace": ({"wait_for": 7, "grace_s": 0.01}, 0.86),
    "late ones in a later step": ({"wait_for": 7, "late": "next", "staleness": 4, "grace_s": 0.02}, None),
    "staleness 4": ({"staleness": 4}, 0.93),
}
"""By name: options of ``bound_waiting``, and the target."""


def measure(shares: str, steps: int) -> dict[str, Any]:
    """Train on a cluster; return the losses, when each step ended, and the changes of shares."""
    spec = {"batch": BATCH, "micro_batch": MICRO_BATCH, "steps": steps, "shares": shares, "speeds": SPEEDS}
    with Cluster(hosts=len(SPEEDS), helpers=0) as cluster:
        result: dict[str, Any] = run_on_hosts(cluster, "benchmarks.stragglers_worker:share", spec)
    return result


def rates(result: dict[str, Any]) -> list[float]:
    """Return the samples per second of each step of the last half, as a part of what is possible."""
    ends = result["ends"][len(result["ends"]) // 2 :]
    possible = sum(SPEEDS)
    return [BATCH / (end - begin) / possible for begin, end in pairwise(ends)]


def add_shares(bench: Benchmark) -> None:
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


def with_pauses(options: dict[str, Any] | None, seconds: list[list[float]], num_steps: int) -> float:
    """Train on a cluster; return the gradients per second, as a part of what is possible."""
    spec = {"steps": num_steps, "seconds": seconds, "options": options}
    with Cluster(hosts=len(seconds), helpers=0) as cluster:
        result = run_on_hosts(cluster, "benchmarks.stragglers_worker:wait", spec)
    (begin_s, begin), (end_s, end) = result["ends"][1], result["ends"][-1]
    used: int = sum(result["used"][begin:end])
    took_s: float = end_s - begin_s
    return used / took_s / possible_rate(seconds)


def possible_rate(seconds: list[list[float]]) -> float:
    """Return the gradients per second of all workers, if none ever waits."""
    return sum(len(of_worker) / sum(of_worker) for of_worker in seconds)


def simulated(options: dict[str, Any] | None, seconds: list[list[float]], num_steps: int) -> float:
    given = {"wait_for": len(seconds), **(options or {})}
    step_s, used = simulate(WaitingRule(len(seconds), **given), seconds, num_steps)
    return used / step_s / possible_rate(seconds)


def add_pauses(bench: Benchmark, chosen: Sequence[str]) -> None:
    num_steps = QUICK_NUM_PAUSED if bench.quick else NUM_PAUSED
    draw = random.Random(0)
    seconds = [
        [STEP_S * (PAUSE if draw.random() < PAUSE_SHARE else 1) for _ in range(num_steps)] for _ in SPEEDS
    ]
    found, cores = {}, []
    waiting = {name: WAITING[name] for name in WAITING if name in ("plain DDP", *chosen)}
    for name, (options, _) in waiting.items():
        found[name], foreign, _ = watched(partial(with_pauses, options, seconds, num_steps), most_retaken=0)
        cores.append(foreign)
    for name, (options, target) in waiting.items():
        if target is not None:
            bench.limit(
                f"pauses of 5 steps in 1 %, {name}",
                found[name],
                target,
                unit="of possible",
                formula=f"at least {target}; simulated {simulated(options, seconds, num_steps):.3f}",
                better="higher",
                foreign_cores=cores,
            )
        if options is not None:
            bench.add(
                f"pauses of 5 steps in 1 %, {name}, beside plain DDP",
                ours=[found[name]],
                peer=[found["plain DDP"]],
                peer_name=f"plain DDP; simulated {simulated(None, seconds, num_steps):.3f}",
                unit="of possible",
                better="higher",
                foreign_cores=cores,
            )


def main() -> int:
    options = argparse.ArgumentParser(add_help=False)
    parts = ["shares", *(name for name in WAITING if name != "plain DDP")]
    options.add_argument("--only", nargs="+", choices=parts, default=parts)
    bench = Benchmark("stragglers", options=options)
    chosen = bench.args.only
    if "shares" in chosen:
        add_shares(bench)
    if chosen != ["shares"]:
        add_pauses(bench, chosen)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
