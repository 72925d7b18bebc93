"""What ``shoal plan`` does: the job from the recipe's real model, the search, and the answer for a person."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shoal.cli import workloads
from shoal.errors import ShoalError, UsageError
from shoal.plan.convergence import Convergence, convergence_of
from shoal.plan.hardware import Catalog, Machines, require_accelerators
from shoal.plan.measured import MeasuredComm, MeasuredTrain, read_measured
from shoal.plan.predict import Job, Part, Plan, achieved, check_throughput
from shoal.plan.scale import breaks_first, strains
from shoal.plan.search import Goal, best_of_each, duration, helpers_sentence, search
from shoal.plan.workload import Workload

_BAR = 46


@dataclass(frozen=True, kw_only=True)
class Request:
    """The options of ``shoal plan``."""

    recipe: str
    cluster: str
    helpers: str | None
    goal: Goal
    global_batch: int | None
    sequence_length: int | None
    model: str | None
    algorithm: str | None
    throughput: float | None
    start_s: float
    compare: bool
    sweep: str | None
    page: Path | None
    trace: Path | None
    json: Path | None
    catalog: tuple[Path, ...]
    measured: tuple[Path, ...] = ()


def run(request: Request) -> int:
    """Print the answer, write the files, return the exit status.

    Raises:
        UsageError: something asked for is not known or cannot be.
    """
    catalog = Catalog(request.catalog)
    workers = catalog.machines(request.cluster)
    helpers = catalog.machines(request.helpers) if request.helpers else None
    require_accelerators(workers)
    check_throughput(request.throughput)
    trained, networks = _measured(request)
    if networks:
        workers, helpers = _with_network(networks[-1], workers, helpers)
    counts = _sweep_counts(request.sweep) if request.sweep else []
    job = make_job(request, workers, catalog, trained)
    algorithms = [request.algorithm] if request.algorithm else None
    plans = search(job, workers, helpers, goal=request.goal, algorithms=algorithms)
    best = plans[0]
    print("\n".join(_answer(job, best, request)))
    print("\n".join(_best_layouts(plans)))
    if helpers is not None:
        print("\n" + _helpers_line(plans, request))
    if request.compare:
        print("\n".join(_comparison(plans)))
    print("\n".join(_limits(job, best)))
    curve = [_at(job, request, workers, helpers, count) for count in counts]
    if curve:
        print("\n".join(_curve_table(curve)))
    if request.json:
        _write(request.json, json.dumps(_as_json(job, plans, curve), indent=1) + "\n")
    if request.page:
        from shoal.cli.plan_page import page_of

        _write(request.page, page_of(job, plans, curve))
    if request.trace:
        _write(request.trace, json.dumps(_trace(best)) + "\n")
    return 0


# ---- the job ---------------------------------------------------------------------------------------------


def _measured(request: Request) -> tuple[list[MeasuredTrain], list[MeasuredComm]]:
    """Return what the files of ``--measured`` say of steps and of the network."""
    files = [read_measured(path) for path in request.measured]
    trained = [file for file in files if isinstance(file, MeasuredTrain)]
    if trained and request.throughput is not None:
        raise UsageError(f"--throughput and --measured {trained[0].path} say the same: leave one of them out")
    return trained, [file for file in files if isinstance(file, MeasuredComm)]


def _with_network(
    measured: MeasuredComm, workers: Machines, helpers: Machines | None
) -> tuple[Machines, Machines | None]:
    """Return the hosts with the measured network, helpers too where theirs is of the same kind."""
    same = helpers is not None and helpers.instance.network == workers.instance.network
    if helpers is not None and same:
        helpers = measured.applied(helpers)
    return measured.applied(workers), helpers


def make_job(
    request: Request, workers: Machines, catalog: Catalog, trained: Sequence[MeasuredTrain] = ()
) -> Job:
    """Return what the request trains: the recipe's phases, or one part with a batch."""
    if bool(request.recipe) == bool(request.model):
        raise UsageError(
            "name a recipe (shoal plan bert-large ...) or a model of yours with --model, one of both"
        )
    if request.model:
        if not request.global_batch:
            raise UsageError("--model needs --global-batch: the planner cannot know the batch of your recipe")
        workload = workloads.workload_of_function(request.model)
        table = Convergence(
            name=request.model, source="one million samples", points=((1, 1e6), (1 << 40, 1e6))
        )
        parts = [_part(request, workload, table, request.global_batch, workers, catalog, trained)]
    else:
        parts = _recipe_parts(request, workers, catalog, trained)
    return Job(recipe=request.recipe or str(request.model), parts=tuple(parts), start_s=request.start_s)


def _recipe_parts(
    request: Request, workers: Machines, catalog: Catalog, trained: Sequence[MeasuredTrain]
) -> list[Part]:
    if request.recipe not in workloads.recipe_names():
        workloads.workload(request.recipe)  # says which there are
    table = _convergence(request.recipe)
    if not table.phases:
        workload = workloads.workload(request.recipe, request.sequence_length)
        batch = request.global_batch or _batch(table, workers)
        return [_part(request, workload, table, batch, workers, catalog, trained)]
    parts = []
    for phase in table.phases:
        workload = workloads.workload(request.recipe, request.sequence_length or phase.sequence_length)
        samples = float(phase.steps * phase.batch)
        fixed = replace(table, phases=(), points=((1, samples), (1 << 40, samples)))
        batch = request.global_batch or phase.batch
        parts.append(_part(request, workload, fixed, batch, workers, catalog, trained))
    return parts


def _part(
    request: Request,
    workload: Workload,
    table: Convergence,
    batch: int,
    workers: Machines,
    catalog: Catalog,
    trained: Sequence[MeasuredTrain],
) -> Part:
    if batch < 1:
        raise UsageError(f"--global-batch is {batch}; it must be at least 1")
    if trained:
        flops, basis = _calibrated(request, workload, workers, trained)
    else:
        flops, basis = achieved(
            workload,
            request.recipe,
            workers.instance,
            catalog,
            samples_per_s=request.throughput,
            global_batch=batch,
        )
    return Part(workload=workload, convergence=table, global_batch=batch, achieved_flops=flops, basis=basis)


def _calibrated(
    request: Request, workload: Workload, workers: Machines, trained: Sequence[MeasuredTrain]
) -> tuple[float, str]:
    """Return FLOP/s and basis from the file with the workload's sequence length, else from the first."""
    same_length = [file for file in trained if file.sequence_length == workload.tokens_per_sample]
    chosen = (same_length or trained)[0]
    recipe = request.recipe or str(request.model)
    own = workload
    if chosen.recipe == recipe and chosen.sequence_length != workload.tokens_per_sample:
        own = workloads.workload(recipe, chosen.sequence_length)
    return chosen.achieved_flops(recipe, own, workers.instance), chosen.basis


def _convergence(recipe: str) -> Convergence:
    if recipe == "faster-rcnn":
        return convergence_of("mask-rcnn")
    try:
        return convergence_of(recipe)
    except UsageError:
        # How far to train such a model is the user's: the answer is for a million samples.
        samples = 1e6
        return Convergence(
            name=recipe, source="one million samples", points=((1, samples), (1 << 40, samples))
        )


def _batch(table: Convergence, workers: Machines) -> int:
    """Return the largest batch known to converge that gives each accelerator the same, at most 256 each."""
    count = workers.num_accelerators
    most = max(table.largest_batch // count, 1)
    return count * min(most, 256)


def _at(job: Job, request: Request, workers: Machines, helpers: Machines | None, count: int) -> Plan:
    """Return the best plan on ``count`` hosts, with as many helpers a host."""
    fewer = replace(workers, count=count)
    side = (
        None
        if helpers is None
        else replace(helpers, count=max(1, round(helpers.count * count / workers.count)))
    )
    algorithms = [request.algorithm] if request.algorithm else None
    return search(job, fewer, side, goal=request.goal, algorithms=algorithms)[0]


def _sweep_counts(text: str) -> list[int]:
    """Return the numbers of hosts of ``nodes=1..256``: doublings, and the last."""
    match = re.fullmatch(r"(?:nodes|hosts)=(\d+)\.\.(\d+)", text.replace(" ", ""))
    if not match or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(f"--sweep {text!r} is not of the form nodes=1..256, the smaller number first")
    first, last = int(match[1]), int(match[2])
    counts = [first]
    while counts[-1] * 2 < last:
        counts.append(counts[-1] * 2)
    return [*counts, last] if last > first else counts


# ---- the answer ------------------------------------------------------------------------------------------


def _answer(job: Job, plan: Plan, request: Request) -> list[str]:
    part, step, layout = job.parts[0], plan.steps[0], plan.layouts[0]
    hosts = f"{plan.workers}" + (f" + {plan.helpers}" if plan.helpers else "")
    room = require_accelerators(plan.workers).memory_bytes
    network = plan.workers.instance.network.source
    lines = [
        f"{job.recipe} on {hosts} ({plan.workers.num_accelerators:,} accelerators)",
        "",
        f"  time to train     {duration(plan.total_s)}  ({part.convergence.source})",
        f"  cost              {_money(plan)}",
        f"  throughput        {plan.samples_per_s:,.0f} {part.workload.unit}/s, "
        f"{1e3 * step.total_s:.4g} ms a step",
        f"  scaling           {100 * plan.efficiency:.1f} % of {plan.workers.count} single hosts",
        f"  global batch      {', '.join(f'{p.global_batch:,}' for p in job.parts)}"
        f" (a device {_share(layout, plan)})",
        f"  memory a device   {plan.memory.total_bytes / 2**30:.1f} of {room / 2**30:.0f} GiB",
        f"  basis             {part.basis}",
        *([f"  network           {network}"] if network.startswith("measured") else []),
        "",
        "where the time goes",
    ]
    return lines + _bars(plan)


def _share(layout: Any, plan: Plan) -> str:
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


def _helpers_line(plans: Sequence[Plan], request: Request) -> str:
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


def _limits(job: Job, plan: Plan) -> list[str]:
    """Say which assumption breaks first, on these hosts or on the way to more."""
    part, layout = job.parts[0], plan.layouts[0]
    first = breaks_first(part, plan.workers, layout, plan.helpers)
    if first:
        count, strain = first
        return ["", f"from {count:,} hosts on, do not rely on: {strain.assumption} ({strain.detail})"]
    strain = strains(part, plan.workers, layout, plan.helpers)[0]
    return ["", f"the most stretched assumption holds: {strain.assumption} ({strain.detail})"]


def _curve_table(curve: Sequence[Plan]) -> list[str]:
    lines = ["", f"  {'hosts':>7} {'samples/s':>14} {'scaling':>8} {'time':>12} {'cost':>12}  algorithm"]
    for plan in curve:
        money = "" if plan.dollars is None else f"${plan.dollars:,.0f}"
        lines.append(
            f"  {plan.workers.count:>7} {plan.samples_per_s:>14,.0f} {100 * plan.efficiency:>6.1f} % "
            f"{duration(plan.total_s):>12} {money:>12}  {plan.layouts[0].algorithm}"
        )
    return lines


# ---- files -----------------------------------------------------------------------------------------------


def _as_json(job: Job, plans: Sequence[Plan], curve: Sequence[Plan]) -> dict[str, Any]:
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


def _trace(plan: Plan) -> dict[str, Any]:
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


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ShoalError(f"{path} cannot be written: {error.strerror}") from error
    print(f"\n{path}")
