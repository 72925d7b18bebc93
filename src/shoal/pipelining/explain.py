"""Formats a pipeline's layout: stages with cost and memory, the timeline of a step, and the reason."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.decide.layout_search import RankedLayout
from shoal.decide.partition import in_gb
from shoal.decide.pipeline_simulator import Timeline
from shoal.formatting import plural, table
from shoal.pipelining.pipeline_plan import PipelinePlan

_WIDTH = 96


def explain(
    plan: PipelinePlan,
    predicted: Timeline,
    traced: Timeline | None,
    *,
    title: str,
    num_replicas: int,
    reason: str | None = None,
) -> str:
    """Return a report of several lines of at most about 110 characters.

    Args:
        reason: for the layout; default: a comparison with the plan's alternatives.
    """
    parts = [_head(plan, predicted, title, num_replicas), _stages(plan), _ranks(plan, predicted)]
    parts += [reason or _reasons(plan), _drawn("predicted", predicted, plan)]
    if traced is not None:
        parts.append(_drawn("traced", traced, plan))
    return "\n\n".join(parts)


def explain_layouts(layouts: Sequence[RankedLayout], *, title: str) -> str:
    """Return the same report for the first of the layouts that were found, and the reasons for all."""
    best = layouts[0]
    choice = best.choice
    plan = PipelinePlan(
        schedule=choice.schedule,
        cuts=choice.cuts,
        stages=best.stages,
        link=None,
        rank_bytes=choice.rank_bytes,
        source="estimated",
        first_units=best.first_units,
        alternatives=(),
    )
    lines = [f"why: {best.reason}"]
    if best.averaging_s:
        lines.append(
            f"a whole step {_ms(best.step_s)}: behind the pipeline, {_ms(best.averaging_s)} of averaging "
            f"gradients over {best.data} replicas that nothing hides"
        )
    for other in layouts[1:]:
        lines += [f"next: {_ms(other.step_s)} a step, {other}", f"      {other.reason}"]
    reason = "\n".join(lines)
    return explain(plan, choice.timeline, None, title=title, num_replicas=best.data, reason=reason)


def _head(plan: PipelinePlan, predicted: Timeline, title: str, num_replicas: int) -> str:
    schedule = plan.schedule
    replicas = f", {num_replicas} replicas" if num_replicas > 1 else ""
    return (
        f"{title}: {plural(schedule.num_stages, 'stage')} on {plural(schedule.num_ranks, 'rank')}"
        f"{replicas}, {schedule.num_micro_batches} micro-batches, schedule {schedule.name}\n"
        f"predicted step {_ms(predicted.makespan_s)}, bubble {predicted.bubble:.1%} (costs {plan.source})"
    )


def _stages(plan: PipelinePlan) -> str:
    rows = [("stage", "rank", "begins at", "forward", "backward", "parameters", "saved", "sent on")]
    for index, (stage, rank, name) in enumerate(
        zip(plan.stages, plan.schedule.placement, plan.first_units, strict=True)
    ):
        rows.append(
            (
                str(index), str(rank), name, _ms(stage.forward_s), _ms(stage.backward_s),
                in_gb(stage.parameter_bytes), in_gb(stage.saved_bytes), in_gb(stage.relay_bytes),
            )
        )  # fmt: skip
    return table(rows, left={2}) + "\ntimes, saved and sent bytes are of one micro-batch"


def _ranks(plan: PipelinePlan, predicted: Timeline) -> str:
    rows = [("rank", "stages", "busy", "needs", "of it saved for backward")]
    for rank in range(plan.schedule.num_ranks):
        stages = [str(stage) for stage, owner in enumerate(plan.schedule.placement) if owner == rank]
        busy = sum(box.end_s - box.begin_s for box in predicted.boxes if box.rank == rank)
        share = busy / predicted.makespan_s if predicted.makespan_s else 1.0
        rows.append(
            (
                str(rank), " ".join(stages), f"{share:.0%}", in_gb(plan.rank_bytes[rank]),
                in_gb(predicted.peak_saved_bytes[rank]),
            )
        )  # fmt: skip
    return table(rows, left={1})


def _reasons(plan: PipelinePlan) -> str:
    if len(plan.alternatives) == 1:
        return "why: nothing else was asked for"
    rows = [("schedule", "stages per rank", "step", "bubble", "fullest rank")]
    rows += [
        (other.name, str(other.num_virtual), _ms(other.makespan_s), f"{other.bubble:.1%}",
         in_gb(other.largest_rank_bytes))
        for other in plan.alternatives[:7]
    ]  # fmt: skip
    return f"why: the best of {len(plan.alternatives)} that fit, by simulation\n{table(rows)}"


def _drawn(name: str, timeline: Timeline, plan: PipelinePlan) -> str:
    """Draw a step: one row per rank, forward as ``0123``, backward as ``[0]``, idle as dots."""
    scale = _WIDTH / timeline.makespan_s if timeline.makespan_s else 0.0
    lines = [
        f"{name} step, {_ms(timeline.makespan_s)}, bubble {timeline.bubble:.1%}: "
        "micro-batches forward (-), backward (=), idle (.)"
    ]
    for rank in range(plan.schedule.num_ranks):
        row = ["."] * _WIDTH
        for box in timeline.boxes:
            if box.rank == rank:
                begin = min(round(box.begin_s * scale), _WIDTH - 1)
                end = max(begin + 1, min(round(box.end_s * scale), _WIDTH))
                label = str(box.action.micro_batch)
                fill = "-" if box.action.kind == "F" else "="
                row[begin:end] = (label + fill * (end - begin))[: end - begin]
        lines.append(f"{rank:>3} {''.join(row)}")
    return "\n".join(lines)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
