"""The files that ``shoal plan`` writes for programs: JSON, and the predicted step as a Chrome trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from shoal.planner.prediction import Job, Plan


def as_json(job: Job, plans: Sequence[Plan], curve: Sequence[Plan]) -> dict[str, Any]:
    """Return everything: the basis, all plans with the best first, and those of a sweep."""
    return {
        "recipe": job.recipe,
        "basis": [part.basis for part in job.parts],
        "network": plans[0].workers.instance.network.source,
        "best": _plan_json(plans[0]),
        "plans": [_plan_json(plan) for plan in plans],
        "sweep": [_plan_json(plan) for plan in curve],
    }


def _plan_json(plan: Plan) -> dict[str, Any]:
    return {
        "cluster": str(plan.workers),
        "helpers": str(plan.helpers) if plan.helpers else None,
        "layouts": [asdict(layout) for layout in plan.layouts],
        "step_s": [step.total_s for step in plan.steps],
        "exposed_s": [step.exposed_s for step in plan.steps],
        "num_steps": [run.num_steps for run in plan.runs],
        "samples_per_s": plan.samples_per_s,
        "efficiency": plan.efficiency,
        "total_s": plan.total_s,
        "dollars": plan.dollars,
        "memory_bytes": plan.memory.total_bytes,
        "where_s": plan.where,
    }


def trace_of(plan: Plan) -> dict[str, Any]:
    """Return the predicted step in the form of ``shoal bench comm --trace``: one process, a row a phase."""
    step = plan.steps[0]
    begin = 0.0
    events: list[dict[str, Any]] = []
    for name, seconds in (
        ("forward", step.forward_s),
        ("backward", step.backward_s),
        ("bubble", step.bubble_s),
    ):
        if seconds:
            events.append(_event("compute", name, begin, seconds))
            begin += seconds
    events += [
        _event(span.phase, f"bucket {span.bucket}", span.begin_s, span.end_s - span.begin_s)
        for span in step.exchange.spans
    ]
    end = step.total_s - step.optimizer_s
    events.append(_event("compute", "optimizer", end, step.optimizer_s))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event(row: str, name: str, begin_s: float, seconds: float) -> dict[str, Any]:
    return {
        "name": name,
        "ph": "X",
        "pid": "predicted",
        "tid": row,
        "ts": 1e6 * begin_s,
        "dur": 1e6 * seconds,
    }
