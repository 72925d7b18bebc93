"""Ranks all layouts that fit by predicted time or cost."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from shoal.decide.batch import StagesConfig
from shoal.decide.server_assignment import recommended_bucket_bytes
from shoal.errors import UsageError
from shoal.planner.device_memory import RESERVED, device_memory
from shoal.planner.hardware import Machines, require_accelerators
from shoal.planner.network import ALGORITHMS
from shoal.planner.prediction import Part, Plan, Training, predict
from shoal.planner.step_time import Layout

Goal = Literal["time", "cost"]
_STAGES = (1, 2, 4, 8, 16, 32, 64)


def layouts_of(part: Part, workers: Machines, *, algorithm: str, wire_bytes: int = 4) -> list[Layout]:
    """Return the layouts of a part that fit, at most one per number of stages.

    A model that fits on one device is not split; another is tried with the fewest stages and twice as many.
    The batch is divided as in ``shoal train``; where its micro-batch does not fit, the largest divisor that
    does is taken.

    Raises:
        UsageError: the batch does not divide, or nothing fits: names the nearest layout and how much memory
            it lacks.
    """
    room = require_accelerators(workers).memory_bytes * (1 - RESERVED)
    layouts: list[Layout] = []
    tried: list[tuple[int, Layout]] = []
    for stages in _STAGES:
        if workers.num_accelerators % stages or stages > len(part.workload.layers):
            continue
        if layouts and stages > layouts[0].stages * (1 if layouts[0].stages == 1 else 2):
            break  # more stages than the model needs only add bubbles
        for layout in _candidates(part, workers, stages=stages, algorithm=algorithm, wire_bytes=wire_bytes):
            assert layout.micro_batch is not None
            needed = device_memory(
                part.workload, layout, micro_batch=layout.micro_batch, precision=part.precision
            )
            tried.append((needed, layout))
            if needed <= room:
                layouts.append(layout)
                break
    if not layouts:
        needed, layout = min(tried, key=lambda pair: pair[0])
        raise UsageError(
            f"{part.workload.name} fits on no layout of {workers}: the nearest, {layout.stages} stages with "
            f"micro-batches of {layout.micro_batch:g}, needs {needed / 2**30:.1f} GiB a device, "
            f"{(needed - room) / 2**30:.1f} GiB more than there are; take more or larger devices"
        )
    return layouts


@dataclass(frozen=True)
class _Sizes:
    global_batch_size: int
    micro_batch_size: int | None


def _candidates(
    part: Part, workers: Machines, *, stages: int, algorithm: str, wire_bytes: int
) -> Iterator[Layout]:
    """Yield the layouts with a number of stages, with the micro-batch of ``shoal train`` and smaller ones."""
    sizes = _Sizes(part.global_batch, part.micro_batch)
    batch = StagesConfig(pipeline=stages).plan(sizes, workers.num_accelerators, section=part.section)
    share, most = batch.worker_batch_size, batch.micro_batch_size
    for micro in range(most, 0, -1):
        if share % micro:
            continue
        yield Layout(
            global_batch=part.global_batch,
            micro_batch=micro,
            stages=stages,
            virtual=2 if stages > 1 else 1,
            algorithm=algorithm,
            wire_bytes=wire_bytes,
            bucket_bytes=recommended_bucket_bytes(
                workers.count,
                ranks_per_host=max(workers.instance.num_accelerators, 1),
                gradient_bytes=4 * part.workload.num_parameters // stages,  # fp32, as DDP's buckets hold them
            ),
        )


def search(
    training: Training,
    workers: Machines,
    helpers: Machines | None = None,
    *,
    goal: Goal = "time",
    algorithms: Sequence[str] | None = None,
    wire_bytes: int = 4,
) -> list[Plan]:
    """Predict all layouts and algorithms; return the plans, the best first.

    Args:
        goal: rank by ``"time"`` or by ``"cost"``.
        algorithms: default: all that the hosts allow, with helpers only where there are some.
        wire_bytes: bytes of a gradient element on the network.

    Raises:
        UsageError: the model fits on no layout, or a ranking by cost lacks the price of a host.
    """
    plans: list[Plan] = []
    for algorithm in algorithms or ALGORITHMS:
        used = helpers if algorithm == "two-hop-helpers" else None
        if algorithm == "two-hop-helpers" and helpers is None:
            continue
        choices = [
            layouts_of(part, workers, algorithm=algorithm, wire_bytes=wire_bytes) for part in training.parts
        ]
        plans += [
            predict(training, workers, layouts, used)
            for layouts in itertools.product(*choices)
            if len({layout.stages for layout in layouts}) == 1  # a run has one layout
        ]
    if not plans:
        raise UsageError("no algorithm is left to plan with; two-hop-helpers needs --helpers")
    if goal == "cost" and any(plan.dollars is None for plan in plans):
        raise UsageError(
            f"{workers.instance.name} has no price per hour in the catalog to rank by cost; "
            "use --goal time, or give it a price with --catalog FILE"
        )
    return sorted(plans, key=lambda plan: ((plan.dollars or 0.0) if goal == "cost" else 0.0, plan.total_s))
