"""The answer of ``shoal plan`` for a person: lines of text."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.planner.hardware import require_accelerators
from shoal.planner.prediction import Job, Plan
from shoal.planner.scaling_limits import breaks_first, strains
from shoal.planner.search import best_of_each, duration, helpers_sentence
from shoal.planner.step_time import Layout

_BAR = 46


def answer(
    job: Job, plans: Sequence[Plan], curve: Sequence[Plan], *, has_helpers: bool, compare: bool
) -> list[str]:
    """Return the answer: the best plan, where its time goes, the next best, helpers, limits, the curve.

    Args:
        plans: the best first.
        curve: the best on each number of hosts of a sweep.
    """
    lines = _best(job, plans[0]) + _bars(plans[0]) + _best_layouts(plans)
    if has_helpers:
        lines += ["", helpers_line(plans)]
    if compare:
        lines += _comparison(plans)
    lines += ["", limits_line(job, plans[0])]
    return lines + (_curve_table(curve) if curve else [])


def _best(job: Job, plan: Plan) -> list[str]:
    part, step, layout = job.parts[0], plan.steps[0], plan.layouts[0]
    hosts = f"{plan.workers}" + (f" + {plan.helpers}" if plan.helpers else "")
    room = require_accelerators(plan.workers).memory_bytes
    network = plan.workers.instance.network.source
    return [
        f"{job.recipe} on {hosts} ({plan.workers.num_accelerators:,} accelerators)",
        "",
        f"  time to train     {duration(plan.total_s)}  ({part.convergence.source})",
        f"  cost              {_money(plan)}",
        f"  throughput        {plan.samples_per_s:,.0f} {part.workload.unit}/s, "
        f"{1e3 * step.total_s:.4g} ms a step",
        f"  scaling           {100 * plan.efficiency:.1f} % of {plan.workers.count} single hosts",
        f"  global batch      {', '.join(f'{p.global_batch:,}' for p in job.parts)}"
        f" (a device {_share(layout, plan)})",
        f"  gradients         {'fp32' if layout.wire_bytes == 4 else 'bf16'}, buckets of "
        f"{layout.bucket_bytes / 2**20:.0f} MiB",
        f"  memory a device   {plan.memory.total_bytes / 2**30:.1f} of {room / 2**30:.0f} GiB",
        f"  basis             {part.basis}",
        *([f"  network           {network}"] if network.startswith("measured") else []),
        "",
        "where the time goes",
    ]


def _share(layout: Layout, plan: Plan) -> str:
    replicas = plan.workers.num_accelerators / layout.per_replica
    share = layout.global_batch / replicas
    return f"{share:g} samples, {plan.steps[0].micro_batches} × {share / plan.steps[0].micro_batches:g}"


def _bars(plan: Plan) -> list[str]:
    lines = []
    for name, seconds in plan.where.items():
        share = seconds / plan.total_s
        if share >= 0.0005:
            lines.append(f"  {name:<12} {100 * share:>5.1f} %  {'█' * round(_BAR * share)}")
    return lines


def _money(plan: Plan) -> str:
    if plan.dollars is None:
        return f"unknown: {plan.workers.instance.price_source}"
    return f"{plan.dollars:,.0f} dollars (prices: {plan.workers.instance.price_source})"


def _best_layouts(plans: Sequence[Plan]) -> list[str]:
    lines = [
        "",
        "the best layouts",
        f"  {'':<3}{'algorithm':<18} {'stages':>6} {'micro':>6} {'time':>12} {'cost':>10}  why",
    ]
    for place, ranked in enumerate(best_of_each(plans), start=1):
        plan, layout = ranked.plan, ranked.plan.layouts[0]
        money = "" if plan.dollars is None else f"${plan.dollars:,.0f}"
        micro = plan.layouts[0].global_batch * layout.per_replica / plan.workers.num_accelerators
        micro /= plan.steps[0].micro_batches
        lines.append(
            f"  {place}. {layout.algorithm:<18} {layout.stages:>6} {micro:>6.4g} "
            f"{duration(plan.total_s):>12} {money:>10}  {ranked.reason}"
        )
    return lines


def helpers_line(plans: Sequence[Plan]) -> str:
    """Return what the helpers bring in time and money."""
    with_helpers = next((plan for plan in plans if plan.helpers), None)
    without = next((plan for plan in plans if not plan.helpers), None)
    if with_helpers is None or without is None:
        return "Without --algorithm the plan would also say what the helpers bring."
    return helpers_sentence(with_helpers, without) + "."


def _comparison(plans: Sequence[Plan]) -> list[str]:
    lines = [
        "",
        "algorithms side by side",
        f"  {'':<18} {'ms a step':>10} {'network':>9} {'scaling':>8} {'time':>12}",
    ]
    seen: set[str] = set()
    for plan in plans:
        step, name = plan.steps[0], plan.layouts[0].algorithm
        if name in seen:
            continue
        seen.add(name)
        lines.append(
            f"  {name:<18} {1e3 * step.total_s:>10.4g} {100 * step.exposed_s / step.total_s:>7.1f} % "
            f"{100 * plan.efficiency:>6.1f} % {duration(plan.total_s):>12}"
        )
    return lines


def limits_line(job: Job, plan: Plan) -> str:
    """Return which assumption breaks first, on these hosts or on the way to more."""
    part, layout = job.parts[0], plan.layouts[0]
    first = breaks_first(part, plan.workers, layout, plan.helpers)
    if first:
        count, strain = first
        return f"From {count:,} hosts on, do not rely on: {strain.assumption} ({strain.detail})."
    strain = strains(part, plan.workers, layout, plan.helpers)[0]
    return f"The most stretched assumption holds: {strain.assumption} ({strain.detail})."


def _curve_table(curve: Sequence[Plan]) -> list[str]:
    lines = ["", f"  {'hosts':>7} {'samples/s':>14} {'scaling':>8} {'time':>12} {'cost':>12}  algorithm"]
    for plan in curve:
        money = "" if plan.dollars is None else f"${plan.dollars:,.0f}"
        lines.append(
            f"  {plan.workers.count:>7} {plan.samples_per_s:>14,.0f} {100 * plan.efficiency:>6.1f} % "
            f"{duration(plan.total_s):>12} {money:>12}  {plan.layouts[0].algorithm}"
        )
    return lines
