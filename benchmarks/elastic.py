"""Time from the loss of a worker to the others' next completed step, the stall of a join, and cut networks.

The workers train a small model in a :class:`~shoal.train.crew.Crew`, as processes of this machine or one on
each of several emulated hosts (root). A lost step is taken again by those that are left; a newcomer gets
models and optimizer from the members. A step takes a few milliseconds, so the figures are what the change
itself takes. A network is cut in two between its hosts, while all can reach the job's store.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import Benchmark
from benchmarks.worker import TIMEOUT_S, command
from shoal.env.settings import INTERFACE as INTERFACE_VARIABLE
from shoal.launch.emulated import Cluster
from shoal.launch.emulated_network import INTERFACE

SIZE, WIDTH, AT = 4, 256, 100
HOSTS, PARTS_OF = 8, 6
PATIENCE_S = 4.0
RUNS, QUICK_RUNS = 10, 3
MOST_AFTER_KILL_S, MOST_AFTER_CUT_S, MOST_STALL_S = 1.0, 3.0, 0.5
STORE = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(1000)
"""

Spec = dict[str, Any]
Start = Callable[[int, list[str]], "subprocess.Popen[str]"]


def spec_of(rank: int, size: int, size_at_end: int, **more: Any) -> Spec:
    return {
        "rank": rank, "size": size, "size_at_end": size_at_end, "steps_at_end": 50, "signal_at": 0,
        "signal": 0, "starts_at": 0, "patience_s": 30, "width": WIDTH, "store_port": 0, "waits_at": 0,
    } | more  # fmt: skip


def start_here(_: int, argv: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(argv, text=True)


def run(
    specs: Sequence[Spec],
    *,
    start: Start = start_here,
    lose: Callable[[], None] | None = None,
    lost: Sequence[int] = (),
) -> list[Any]:
    """Run the workers to their end and return their results; ``None`` for those that have none.

    Args:
        start: starts the command of a worker.
        lose: called when all are at the step at which they wait.
        lost: workers that do not end by themselves.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        outs = [folder / f"{number}.json" for number in range(len(specs))]
        workers = [
            start(number, command("benchmarks.elastic_worker:train", spec, out))
            for number, (spec, out) in enumerate(zip(specs, outs, strict=True))
        ]
        try:
            if lose is not None:
                while not (folder / f"at-{AT}").exists():
                    time.sleep(0.001)
                began = time.time()
                lose()
                (folder / "lost").write_text(repr(began))
            for number, worker in enumerate(workers):
                if number not in lost:
                    worker.wait(TIMEOUT_S)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        return [json.loads(out.read_text()) if out.exists() else None for out in outs]


def seconds_after(results: Sequence[Any], survivor: int) -> float:
    """Return how long after the loss the first step of fewer workers had ended at a survivor."""
    result = results[survivor]
    if result is None:
        sys.exit(f"worker {survivor} failed")
    steps = zip(result["ends"], result["sizes"], strict=True)
    return float(min(end for end, size in steps if size < result["sizes"][0]) - result["lost"])


def seconds_after_signal(number: signal.Signals, patience_s: float = 30.0) -> float:
    """Return how long after ``kill`` of one of the workers the others' next step had ended."""
    specs = [
        spec_of(
            rank,
            SIZE,
            SIZE - 1,
            signal_at=AT if rank == 1 else 0,
            signal=int(number),
            patience_s=patience_s,
        )
        for rank in range(SIZE)
    ]
    return seconds_after(run(specs, lost=[1]), survivor=SIZE - 1)


def stall_of_join() -> float:
    """Return by how much the step of a join took longer than the median step before."""
    specs = [spec_of(rank, SIZE - 1, SIZE) for rank in range(SIZE - 1)]
    result = run([*specs, spec_of(SIZE - 1, SIZE, SIZE, starts_at=10)])[0]
    joined = result["sizes"].index(SIZE)
    steps = [end - begin for begin, end in pairwise(result["ends"])]
    return float(steps[joined - 1] - median(steps[: joined - 1]))


def longest_step_without_store() -> float:
    """Return the longest step after the process that serves the store was killed."""
    store = subprocess.Popen([sys.executable, "-c", STORE], stdout=subprocess.PIPE, text=True)
    assert store.stdout is not None
    port = int(store.stdout.readline())
    specs = [
        spec_of(rank, SIZE, SIZE, steps_at_end=2 * AT, store_port=port, waits_at=AT) for rank in range(SIZE)
    ]

    def kill() -> None:
        store.kill()
        store.wait()

    result = run(specs, lose=kill)[0]
    ends: list[float] = [end for end in result["ends"] if end > result["lost"]]
    if len(ends) < AT:
        sys.exit(f"{len(ends)} steps were taken without the store, of {AT}")
    return max(end - begin for begin, end in pairwise([float(result["lost"]), *ends]))


# ---- emulated hosts ---------------------------------------------------------------------------------------


@contextmanager
def hosts(number: int) -> Iterator[tuple[Cluster, Start]]:
    """Yield emulated hosts, and what starts a command on each."""
    with Cluster(hosts=number) as cluster:
        env = {INTERFACE_VARIABLE: INTERFACE}
        yield cluster, lambda host, argv: cluster.start(host, argv, env=env, cwd=Path.cwd())


def seconds_after_cut() -> float:
    """Return how long after the link of one of the hosts was set down the others' next step had ended."""
    with hosts(HOSTS) as (cluster, start):
        specs = [spec_of(rank, HOSTS, HOSTS - 1, waits_at=AT) for rank in range(HOSTS)]
        results = run(specs, start=start, lose=lambda: cluster.link(3, up=False), lost=[3])
    return seconds_after(results, survivor=HOSTS - 1)


def parts_that_train(sizes: Sequence[int]) -> int:
    """Return how many parts of a cut network go on, of these numbers of hosts."""
    with hosts(PARTS_OF) as (cluster, start):
        first = range(sizes[0])
        specs = [spec_of(rank, PARTS_OF, max(sizes), waits_at=AT) for rank in range(PARTS_OF)]
        results = run(specs, start=start, lose=lambda: cut(cluster, range(sizes[0], PARTS_OF)))
    went_on = [
        any(result is not None and min(result["sizes"]) < PARTS_OF for result in part)
        for part in (results[: len(first)], results[len(first) :])
    ]
    return sum(went_on)


def cut(cluster: Cluster, away: Sequence[int]) -> None:
    """Connect these hosts to a bridge of their own."""
    ip = [*cluster.enter_bridge(), "ip", "link"]
    subprocess.run([*ip, "add", "away", "type", "bridge"], check=True)
    subprocess.run([*ip, "set", "away", "up"], check=True)
    for host in away:
        port = cluster.plan[host].links()[0][1]
        subprocess.run([*ip, "set", port, "master", "away"], check=True)


def main() -> int:
    bench = Benchmark("elastic")
    runs = QUICK_RUNS if bench.quick else RUNS
    bench.limit(
        "kill -9 of 1 of 4 workers: until the next completed step",
        [seconds_after_signal(signal.SIGKILL) for _ in range(runs)],
        MOST_AFTER_KILL_S,
        unit="s",
        formula="at most a second",
    )
    bench.limit(
        "1 of 4 workers hangs: until the next completed step",
        [seconds_after_signal(signal.SIGSTOP, PATIENCE_S) for _ in range(QUICK_RUNS)],
        PATIENCE_S + MOST_AFTER_CUT_S,
        unit="s",
        formula=f"its patience of {PATIENCE_S:g} s, and 3 s",
    )
    bench.limit(
        "a worker joins 3 others: stall of a step",
        [stall_of_join() for _ in range(runs)],
        MOST_STALL_S,
        unit="s",
        formula="a step, and half a second",
    )
    bench.limit(
        "the process of the store is killed: longest of the next 100 steps",
        [longest_step_without_store() for _ in range(QUICK_RUNS)],
        MOST_AFTER_KILL_S,
        unit="s",
        formula="at most a second",
    )
    if os.geteuid() != 0:
        sys.exit("emulated hosts need root: run the benchmark as root")
    bench.limit(
        "1 of 8 emulated hosts is cut off: until the next completed step",
        [seconds_after_cut() for _ in range(QUICK_RUNS)],
        MOST_AFTER_CUT_S,
        unit="s",
        formula="at most 3 s",
    )
    for sizes in ((3, 3), (4, 2), (2, 4)):
        bench.limit(
            f"6 emulated hosts cut into {sizes[0]} and {sizes[1]}: parts that train on",
            [parts_that_train(sizes) for _ in range(QUICK_RUNS)],
            1,
            unit="parts",
            formula="at most one",
        )
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
