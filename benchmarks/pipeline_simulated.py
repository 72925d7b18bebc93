"""Rows of the pipeline benchmark that need no pipeline: simulated bubbles, and what a simulation takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from benchmarks.harness import Benchmark
from benchmarks.machine import ForeignCores
from shoal.decide.cost import Link, ModelCost, Unit, stage_costs
from shoal.decide.pipeline_schedules import make_schedule
from shoal.decide.pipeline_simulator import Schedule, simulate

NUM_LAYERS = 48
LIMIT_MS = 50.0
_ROUNDING = 1e-12


def layers(num_layers: int = NUM_LAYERS) -> ModelCost:
    """Return a model of equal layers whose backward takes twice the forward."""
    units = tuple(
        Unit(name=f"layer.{i}", forward_s=1e-3, backward_s=2e-3, saved_bytes=1 << 20)
        for i in range(num_layers)
    )
    return ModelCost(units=units, relay_bytes=(1 << 16,) * (num_layers - 1))


def idle_share(name: str, num_ranks: int, num_virtual: int, num_micro_batches: int) -> float:
    """Return the simulated bubble of equal stages with free relays."""
    schedule = make_schedule(
        name, num_ranks=num_ranks, num_virtual=num_virtual, num_micro_batches=num_micro_batches
    )
    cost = layers(num_ranks * num_virtual)
    return simulate(schedule, stage_costs(cost, range(1, num_ranks * num_virtual))).bubble


def add_bubbles(bench: Benchmark) -> None:
    """Add for each schedule with a formula how far its simulated bubble is from it, at the worst size."""
    for name, choices in (("gpipe", (1,)), ("1f1b", (1,)), ("interleaved", (2, 3, 4)), ("bfs", (2, 3, 4))):
        sizes = [(r, v, rounds * r) for r in (2, 3, 4, 8, 16) for v in choices for rounds in (1, 2, 4)]
        worst = max(abs(idle_share(name, r, v, m) - (r - 1) / (v * m + r - 1)) for r, v, m in sizes)
        bench.limit(
            f"bubble of {name}, {len(sizes)} sizes",
            worst,
            _ROUNDING,
            unit="idle share",
            formula="|simulated - (R-1)/(vM+R-1)|, rounding",
        )


def add_simulation_time(bench: Benchmark) -> None:
    """Add the time to simulate each schedule of 48 layers on 8 stages with 8 micro-batches.

    A greedy schedule is itself the best of a dozen that were simulated; making it is a row without a limit.
    """
    cost = layers()
    link = Link(bytes_per_s=1e10, latency_s=1e-5)
    stages = stage_costs(cost, [len(cost.units) * stage // 8 for stage in range(1, 8)])
    for name, num_ranks in (("1f1b", 8), ("interleaved", 4), ("bfs", 4), ("vee", 4), ("backward_first", 8)):
        schedules: list[Schedule] = []

        def make(name: str = name, num_ranks: int = num_ranks, made: list[Schedule] = schedules) -> None:
            made.append(
                make_schedule(
                    name,
                    num_ranks=num_ranks,
                    num_virtual=8 // num_ranks,
                    num_micro_batches=8,
                    costs=stages,
                    link=link,
                )
            )

        with ForeignCores() as watch:
            making_ms = _times_ms(make, 5 if bench.quick else 20)
            schedule = schedules[0]
            simulating_ms = _times_ms(partial(simulate, schedule, stages, link), 20 if bench.quick else 100)
        cores = [] if watch.cores is None else [watch.cores]
        case = f"{NUM_LAYERS} layers, 8 stages, 8 micro-batches, {name}"
        bench.limit(
            f"simulate {case}", simulating_ms, LIMIT_MS, unit="ms", formula="50 ms", foreign_cores=cores
        )
        bench.add(
            f"make {case}", ours=making_ms, peer=simulating_ms, peer_name="one simulation of it", unit="ms",
            foreign_cores=cores,
        )  # fmt: skip


def _times_ms(call: Callable[[], object], number: int) -> list[float]:
    times = []
    for _ in range(number):
        begin_s = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - begin_s))
    return times
