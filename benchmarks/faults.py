"""Steps that 8 hosts keep when workers are killed and one is slow: local steps with a quorum, and plain DDP.

Each host has an emulated accelerator, on which a step takes a fixed time, in which the processor sleeps; the
model, the messages and the losses are real: a small model of the bytes of WikiText-2. At any time one of the
hosts takes twice as long; a worker is killed once in ``KILL_EVERY`` step times, and continues
``RESTART`` step times later. The rates were fixed after a trial with another seed. The trace of a seed is the
same for both. Workers are processes of this machine.

- Plain DDP waits for the slow host. After a kill all continue from the last checkpoint, at most
  ``SAVE_EVERY`` steps before. It runs for as long as the local steps have taken.
- Local steps are exchanged every ``EVERY`` steps; ``late="partial"``. A killed worker loses its steps since
  the last exchange and its optimizer's state, but its process stays (``away(keep=False)``).

What is kept is relative to the same training without faults. Losses are those after as many samples, plain
ones in one process with the batches of all workers: faults do not change them. All begin from a model that
has taken ``FIRST_STEPS`` plain steps, as DiLoCo's do: after 600 steps from random weights, exchanges of 100
were 11 % above the loss of plain steps in a trial, and 0.8 % after 1,500 plain steps.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from statistics import mean
from typing import Any

from benchmarks.harness import Benchmark
from benchmarks.worker import run_here
from shoal.env.settings import test_data_dir

HOSTS, EVERY, ROUNDS, QUICK_ROUNDS = 8, 100, 16, 6
STEP_S = 0.1
SLOW, KILL_EVERY, RESTART, SAVE_EVERY = 100, 400, 60, 200
"""In step times; ``SAVE_EVERY`` in steps."""
SEEDS = (11, 12, 13)
OPTIONS = {"every": EVERY, "wait_for": 5, "late": "partial", "grace_s": 8 * STEP_S}
OUTER = {"outer_rate": 1.0, "outer_momentum": 0.3}
RATE, FREE_STEPS, FIRST_STEPS, FIRST_RATE = 0.004, 200, 8000, 0.008
LIMIT_S = 5400.0
MOST_KEPT, LEAST_KEPT, MOST_ABOVE, MOST_BYTES = 0.30, 0.88, 0.005, 0.01

Spec = dict[str, Any]
FREE: Spec = {"step_s": STEP_S, "slow_s": 0.0, "order": [], "kills": [], "restart_s": 0.0}


def trace(seed: int, num_steps: int) -> Spec:
    """Return the faults of a seed."""
    draw, kills, at = random.Random(seed), [], 0.0
    while (at := at + draw.expovariate(1 / KILL_EVERY)) < 4 * num_steps:
        kills.append((at * STEP_S, draw.randrange(HOSTS)))
        at += RESTART
    order = [draw.randrange(HOSTS) for _ in range(4 * num_steps // SLOW)]
    return {
        "step_s": STEP_S, "order": order, "kills": kills, "slow_s": SLOW * STEP_S,
        "restart_s": RESTART * STEP_S,
    }  # fmt: skip


def add_rows(bench: Benchmark, free: Spec, faulty: Sequence[Spec]) -> None:
    """Add the rows of the results, without faults and with those of each seed."""

    def kept(kind: str, unit: str) -> list[float]:
        whole, *parts = (each[kind][unit] / each[kind]["seconds"] for each in (free, *faulty))
        return [part / whole for part in parts]

    bench.limit(
        "kept under kills and a slow host, plain DDP", kept("plain", "steps"), MOST_KEPT,
        unit="of fault-free", formula=f"at most {MOST_KEPT}, by the choice of faults",
    )  # fmt: skip
    bench.limit(
        "kept under kills and a slow host, local steps with a quorum", kept("local", "samples"), LEAST_KEPT,
        unit="of fault-free", formula=f"at least {LEAST_KEPT}", better="higher",
    )  # fmt: skip
    above = [each["local"]["loss"] / each["plain"]["loss"] - 1 for each in faulty]
    bench.limit(
        "held-out loss above that of plain steps, as many samples", mean(above), MOST_ABOVE, unit="relative",
        formula=f"mean of {len(above)} seeds; {', '.join(f'{each:+.2%}' for each in above)}",
    )  # fmt: skip
    redone = [each["plain"]["taken"] / each["plain"]["steps"] for each in faulty]
    once = [each["local"]["exchanges"] / each["as_many_steps"] for each in faulty]
    bench.limit(
        "bytes beside those of plain DDP under the same faults, as many samples",
        [one / more for one, more in zip(once, redone, strict=True)], MOST_BYTES, unit="of them",
        formula=f"an exchange sends what a step sends; of plain steps without faults it is {mean(once):.4f}",
    )  # fmt: skip


def main() -> int:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    bench = Benchmark("faults", options=options)
    texts = test_data_dir() / "wikitext2"
    steps = EVERY * (QUICK_ROUNDS if bench.quick else ROUNDS)
    traces = {str(seed): trace(seed, steps) for seed in bench.args.seeds}
    spec = {
        "text": str(texts / "test.txt"), "held_out": str(texts / "valid.txt"), "rate": RATE, "steps": steps,
        "free": FREE, "free_steps": FREE_STEPS, "traces": traces, "options": OPTIONS, **OUTER,
        "save_every": SAVE_EVERY, "first_steps": FIRST_STEPS, "first_rate": FIRST_RATE,
    }  # fmt: skip
    hosts = [f"host-{rank}" for rank in range(HOSTS)]
    free, *faulty = run_here("benchmarks.faults_worker:measure", spec, HOSTS, hosts=hosts, timeout_s=LIMIT_S)
    for each in (free, *faulty):
        print(each)
    add_rows(bench, free, faulty)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
