"""Formats plans: as text, as an HTML page, as JSON, and the predicted step as a Chrome trace."""

from __future__ import annotations

import html
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from shoal.decide.layout import Layout
from shoal.formatting import duration, percent
from shoal.planner.comparison import Comparison, table_of
from shoal.planner.hardware import Accelerator, require_accelerators
from shoal.planner.intervals import LEVEL, interval_of, shipped_intervals
from shoal.planner.prediction import Part, Plan
from shoal.planner.scaling_limits import breaks_first, strains
from shoal.planner.step_time import num_replicas
from shoal.planner.unequal_hosts import Division, recommended

_BAR = 46


# ---- text -------------------------------------------------------------------------------------------------


def text_of(
    plans: Sequence[Plan],
    curve: Sequence[Plan] = (),
    *,
    compare: bool = False,
    unequal: Sequence[Division] = (),
) -> str:
    """Describe plans: the best, its time by cause, the next best, helpers, limits, the scaling curve.

    Args:
        plans: as :func:`shoal.planner.search.search` returns them, the best first.
        curve: the best plan on each number of hosts of a sweep.
        compare: whether to add a table of the algorithms.
        unequal: how the best plan fares on hosts of unequal speed, as divisions() returns it.
    """
    lines = [*_best(plans[0]), *_how_sure(plans[0]), *_best_layouts(plans)]
    with_helpers = next((plan for plan in plans if plan.helpers), None)
    without = next((plan for plan in plans if not plan.helpers), None)
    if with_helpers and without:
        lines += ["", helpers_sentence(with_helpers, without) + "."]
    if compare:
        lines += ["", "algorithms side by side"]
        lines.append(f"  {'':<18} {'ms per step':>12} {'network':>9} {'scaling':>8} {'time':>12}")
        for plan in _firsts(plans, lambda layout: layout.algorithm):
            step, name = plan.steps[0], plan.layouts[0].algorithm
            lines.append(
                f"  {name:<18} {1e3 * step.total_s:>12.4g} {100 * step.exposed_s / step.total_s:>7.1f} % "
                f"{100 * plan.efficiency:>6.1f} % {duration(plan.total_s):>12}"
            )
    lines += _unequal_lines(unequal)
    lines += ["", _limits_line(plans[0])]
    if curve:
        lines.append("")
        lines.append(f"  {'hosts':>7} {'samples/s':>14} {'scaling':>8} {'time':>12} {'cost':>12}  algorithm")
        lines += [
            f"  {plan.workers.count:>7} {plan.samples_per_s:>14,.0f} {100 * plan.efficiency:>6.1f} % "
            f"{duration(plan.total_s):>12} {_dollars(plan):>12}  {plan.layouts[0].algorithm}"
            for plan in curve
        ]
    if command := command_of(plans[0]):
        lines += ["", "to train so, on each host and with your data", f"  {shlex.join(command)}"]
    return "\n".join(lines)


def comparison_text(comparison: Comparison) -> str:
    """Describe one training on several clusters: a table, the source of the rates, the fastest's command."""
    training = comparison.plans[0].training
    until = training.parts[0].convergence
    lines = [
        f"{training.recipe} ({until.target or until.source}) on {len(comparison.plans)} clusters",
        "",
        *table_of(comparison),
        "",
        f"  basis              {comparison.basis}",
        *comparison.refused,
    ]
    chosen, name = comparison.fastest, "the fastest"
    if comparison.aim.is_limited:
        chosen, name = comparison.chosen, comparison.chosen.hosts
        kept = sum(map(comparison.aim.meets, comparison.plans))
        best = "fastest" if comparison.aim.ranks_by == "time" else "cheapest"
        lines.append(f"  chosen             {name}, the {best} of {kept} that {comparison.aim}")
    if command := command_of(chosen):
        lines += ["", f"to train on {name}, on each host and with your data", f"  {shlex.join(command)}"]
    return "\n".join(lines)


def command_of(plan: Plan) -> list[str]:
    """Return the command that trains as planned, without its data; empty if no recipe does."""
    training, layout = plan.training, plan.layouts[0]
    if not training.command:
        return []
    words = [*training.command]
    for part, each in zip(training.parts, plan.layouts, strict=True):
        words += [f"--{part.section}.global-batch-size", f"{part.global_batch}"]
        words += [f"--{part.section}.micro-batch-size", f"{each.micro_batch}"]
    if layout.stages > 1:
        words += ["--parallel.pipeline", f"{layout.stages}"]
        words += ["--parallel.virtual-stages", f"{layout.virtual}"]
    if layout.tensor > 1:
        words += ["--parallel.tensor", f"{layout.tensor}"]
    if layout.shard:
        words += ["--parallel.shard"]
    if layout.sharded_optimizer and not training.shard_optimizer:
        words += ["--train.shard-optimizer"]
    if layout.wire_bytes == 2:
        words += ["--distributed.wire", "bf16"]
    if layout.algorithm.startswith("two-hop"):
        words += ["--distributed.backend", "shoal"]
    elif plan.workers.instance.is_cpu and plan.workers.count > 1:
        words += ["--distributed.backend", "gloo"]
    words += ["--workers", f"{plan.workers.instance.num_accelerators}"]
    if (num_hosts := plan.workers.count + training.validation_hosts) > 1:
        words += ["--nnodes", f"{num_hosts}", "--rdzv", "HOST:PORT"]
    return words


def _best(plan: Plan) -> list[str]:
    training, step, layout = plan.training, plan.steps[0], plan.layouts[0]
    part = training.parts[0]
    device = require_accelerators(plan.workers)
    room = device.memory_bytes
    replicas = num_replicas(plan.workers, layout)
    share = layout.global_batch / replicas
    prices = plan.workers.instance.price_source
    cost = f"unknown: {prices}" if plan.dollars is None else f"{plan.dollars:,.0f} dollars (prices: {prices})"
    network = plan.workers.instance.network.source
    lines = [
        f"{training.recipe} on {plan.hosts} ({plan.workers.num_accelerators:,} accelerators)",
        "",
        _time_line(plan),
        f"  cost               {cost}",
        _range_line(plan),
        f"  throughput         {plan.samples_per_s:,.0f} {part.workload.unit}/s, "
        f"{1e3 * step.total_s:.4g} ms per step",
        f"  scaling            {100 * plan.efficiency:.1f} % of {plan.workers.count} single hosts",
        f"  global batch       {', '.join(f'{p.global_batch:,}' for p in training.parts)} (per device "
        f"{share:g} samples, {step.micro_batches} × {share / step.micro_batches:g})",
        f"  gradients          {'fp32' if layout.wire_bytes == 4 else 'bf16'}, buckets of "
        f"{layout.bucket_bytes / 2**20:.0f} MiB",
        *([f"  layers             over {layout.tensor} devices"] if layout.tensor > 1 else []),
        *([f"  optimizer          sharded over {replicas:,} replicas"] if layout.sharded_optimizer else []),
        *([f"  state              sharded over {replicas:,} replicas"] if layout.shard else []),
        f"  precision          {_precision(device, part)}",
        f"  memory             {plan.memory}, of {room / 2**30:.0f} GiB",
        f"  basis              {part.basis}",
        *([f"  network            {network}"] if network.startswith("measured") else []),
        "",
        "where the time goes",
    ]
    for name, seconds in plan.seconds_by_cause.items():
        if (share := seconds / plan.total_s) >= 0.0005:
            lines.append(f"  {name:<12} {100 * share:>5.1f} %  {'█' * round(_BAR * share)}")
    return lines


def _precision(device: Accelerator, part: Part) -> str:
    """Return the precision of the model on the device, its reason, and which torch the device needs."""
    precision = part.precision
    if precision == "fp32" and (model := part.workload.refuses_fp16):
        precision = f"fp32, since {model} overflows in {device.precision}, the device's 16-bit type"
    if not device.capability:
        return precision
    needed = f"sm_{device.capability.replace('.', '')}"
    return f"{precision}; needs a torch built for {needed}, such as 2.11 to 2.14 for CUDA 12.6"


def _unequal_lines(divisions: Sequence[Division]) -> list[str]:
    if not divisions:
        return []
    width = max(28, *(len(each.name) for each in divisions))
    return [
        "",
        "on hosts of unequal speed",
        f"  {'mode':<{width}} {'ms per step':>12} {'of possible':>12} {'time':>12}",
        *(
            f"  {each.name:<{width}} {1e3 * each.step_s:>12.4g} {100 * each.of_possible:>10.1f} % "
            f"{duration(each.total_s):>12}"
            for each in divisions
        ),
        f"  {_advice(divisions)}",
    ]


def _advice(divisions: Sequence[Division]) -> str:
    """Return the recommended division, and the reason."""
    shares = [each for each in divisions if each.kind == "shares"]
    best, other, chosen = shares[0], shares[-1], recommended(divisions)
    if len(shares) == 1:
        return "the parts of a pipeline cannot follow the speed of its hosts"
    if chosen.kind == "loose":
        saved = duration(best.total_s - chosen.total_s)
        options = f"mode={chosen.name}".replace("_", "-").replace("=", " ").split(", ")
        return (
            f"keep {best.name} shares for plain training. With another algorithm\n  "
            f"{' '.join(f'--servers.{option}' for option in options)} would save {saved}, since\n  "
            f"{chosen.why}.\n  Its rate may have to be lower, and it is for CPUs only so far"
        )
    if best.name == "equal":
        advice = "keep equal shares: dividing by speed would save next to nothing"
        if best.of_possible < 0.95:
            advice += ", since every host is late now and then, and none is slow"
        return advice
    return f"train with --distributed.shares by-speed: it saves {duration(other.total_s - best.total_s)}"


def _time_line(plan: Plan) -> str:
    """Return the time of the run; where a target is published, with and without evaluation."""
    convergence, whole = plan.training.parts[0].convergence, duration(plan.total_s)
    if not convergence.target:
        return f"  time to train      {whole}  ({convergence.source})"
    pure, to = duration(plan.total_s - plan.seconds_by_cause["evaluation"]), convergence.target
    return f"  time to target     {whole}, {pure} without evaluation: {to}  ({convergence.source})"


def _range_line(plan: Plan) -> str:
    """Return the interval of time and cost, or why there is none."""
    interval, name = interval_of(plan), f"  {100 * LEVEL:.0f} %               "
    if isinstance(interval, str):
        return f"{name}none: {interval}"
    low, high = map(duration, interval.bounds(plan.total_s))
    if plan.dollars is None:
        return f"{name}{low} to {high}"
    least, most = interval.bounds(plan.dollars)
    return f"{name}{low} to {high}, {least:,.0f} to {most:,.0f} dollars"


_SHOWN = 0.005
"""Share of the width below which a cause is not listed."""


def _how_sure(plan: Plan) -> list[str]:
    """Return what the plan was given and assumed, and which share of the interval's width each makes."""
    part, instance = plan.training.parts[0], plan.workers.instance
    interval, known = interval_of(plan), shipped_intervals()
    rests_on = f"{known.num_residuals} published figures by {known.num_publishers} publishers"
    given = f"{plan.workers}, {8e-9 * instance.nic_bytes_per_s:g} Gbit/s a host; {part.convergence.source}"
    lines = ["", "how sure", f"  given              {given}"]
    lines.append(f"  assumed            {plan.training.start_s:g} s of start, and prices")
    lines += _fill(plan)
    if isinstance(interval, str):
        return [*lines, "  measure with       shoal bench train and shoal bench comm; then --measured"]
    return [
        *lines,
        f"  width              times or over {interval.factor:.3g}, by the errors on {rests_on}",
        "  of the width       "
        + ", ".join(
            f"{name} {100 * share:.0f} %"
            for name, share in sorted(interval.shares.items(), key=lambda item: -item[1])
            if share >= _SHOWN
        ),
    ]


def _fill(plan: Plan) -> list[str]:
    """Return a line about the data that are read from a store before the first step, if there are any."""
    data, workers = plan.training.data, plan.workers
    if data is None:
        return []
    once, held, takes = data.read_once(workers.count), data.held(workers.count), data.fill_s(workers)
    if data.store_s(workers) == takes:
        limit = f"{data.store_bytes_per_s / 1e9:.3g} GB/s of the store"
    else:
        limit = f"{workers.instance.effective_nic / 1e9:.3g} GB/s of a host's network"
    lines = [f"  data read once     {once / 1e9:.4g} GB, {duration(takes)} before the first step: {limit}"]
    if workers.count > 1 and takes:
        lines.append(f"  from peers         {percent(data.network_share(workers))} of a host's network then")
    if held < data.num_bytes:
        lines.append(
            f"  data on a host     {held / 1e9:.4g} of {data.num_bytes / 1e9:.4g} GB then; the rest comes as "
            "it is used, and what has no room in each epoch again"
        )
    return lines


def interval_json(plan: Plan) -> dict[str, Any]:
    """Return a plan's interval for programs: bounds and causes, or why there is none."""
    interval = interval_of(plan)
    if isinstance(interval, str):
        return {"level": LEVEL, "refused": interval}
    return {
        "level": LEVEL,
        "total_s": interval.bounds(plan.total_s),
        "dollars": None if plan.dollars is None else interval.bounds(plan.dollars),
        "shares": dict(interval.shares),
    }


def _best_layouts(plans: Sequence[Plan]) -> list[str]:
    lines = [
        "",
        "the best layouts",
        f"  {'':<3}{'algorithm':<18} {'stages':>6} {'tensor':>6} {'sharded':>9} {'micro':>6} {'time':>12} "
        f"{'cost':>10}  why",
    ]
    for number, plan in enumerate(best_of_each(plans), start=1):
        layout = plan.layouts[0]
        micro = layout.global_batch * layout.per_replica / plan.workers.num_accelerators
        micro /= plan.steps[0].micro_batches
        lines.append(
            f"  {number}. {layout.algorithm:<18} {layout.stages:>6} {layout.tensor:>6} "
            f"{_sharded(layout):>9} {micro:>6.4g} "
            f"{duration(plan.total_s):>12} {_dollars(plan):>10}  {reason(plan, plans[0])}"
        )
    return lines


def best_of_each(plans: Sequence[Plan], count: int = 5) -> list[Plan]:
    """Return the best ``count`` plans that differ in algorithm, stages, width of tensors or sharding."""
    return _firsts(plans, lambda layout: (layout.algorithm, layout.stages, layout.tensor, _sharded(layout)))[
        :count
    ]


def _sharded(layout: Layout) -> str:
    """Return what the replicas divide among them."""
    return "all" if layout.shard else "optimizer" if layout.sharded_optimizer else "nothing"


def _firsts(plans: Sequence[Plan], key: Callable[[Layout], object]) -> list[Plan]:
    """Return the first of the plans with each key of their layout."""
    firsts: dict[object, Plan] = {}
    for plan in plans:
        firsts.setdefault(key(plan.layouts[0]), plan)
    return list(firsts.values())


def reason(plan: Plan, best: Plan) -> str:
    """Return the largest difference in time of a plan to the best one; of the best, its largest loss."""
    by_cause, of_best = plan.seconds_by_cause, best.seconds_by_cause
    if plan is best:
        waits = {name: seconds for name, seconds in by_cause.items() if name not in ("compute", "start")}
        name = max(waits, key=lambda n: waits[n])
        return f"the best; it loses most to {name}, {100 * waits[name] / plan.total_s:.1f} % of the time"
    differences = {name: by_cause[name] - of_best[name] for name in by_cause}
    name = max(differences, key=lambda n: abs(differences[n]))
    if abs(differences[name]) < 0.001 * plan.total_s:
        return "as fast as the best"
    more = "more" if differences[name] > 0 else "less"
    return f"{duration(abs(differences[name]))} {more} {name} than the best"


def helpers_sentence(with_helpers: Plan, without: Plan) -> str:
    """Return the time and money that helpers save or cost."""
    saved_s = without.total_s - with_helpers.total_s
    name = str(with_helpers.helpers).replace("x", " ", 1)
    if abs(saved_s) < 1:
        text = f"{name} helpers change the time by less than a second"
    else:
        text = f"{name} helpers {'save' if saved_s > 0 else 'lose'} {duration(abs(saved_s))}"
    if with_helpers.dollars is None or without.dollars is None:
        return text
    saved = without.dollars - with_helpers.dollars
    if saved < 0:
        return f"{text} and cost {-saved:,.0f} dollars more"
    return f"{text} and {'' if saved_s >= 1 and saved else 'save '}{saved:,.0f} dollars"


def _limits_line(plan: Plan) -> str:
    """Return the assumption that breaks first, on these hosts or on the way to more."""
    part, layout = plan.training.parts[0], plan.layouts[0]
    if first := breaks_first(part, plan.workers, layout, plan.helpers):
        count, strain = first
        return f"From {count:,} hosts on, do not rely on: {strain.assumption} ({strain.detail})."
    strain = strains(part, plan.workers, layout, plan.helpers)[0]
    return f"The most stretched assumption holds: {strain.assumption} ({strain.detail})."


def _dollars(plan: Plan) -> str:
    return "" if plan.dollars is None else f"${plan.dollars:,.0f}"


# ---- files ------------------------------------------------------------------------------------------------


def json_of(
    plans: Sequence[Plan], curve: Sequence[Plan] = (), unequal: Sequence[Division] = ()
) -> dict[str, Any]:
    """Return everything for programs: the basis, all plans with the best first, and those of a sweep."""
    return {
        "recipe": plans[0].training.recipe,
        "target": plans[0].training.parts[0].convergence.target,
        "basis": [part.basis for part in plans[0].training.parts],
        "network": plans[0].workers.instance.network.source,
        "command": command_of(plans[0]),
        "best": _plan_json(plans[0]),
        "plans": [_plan_json(plan) for plan in plans],
        "sweep": [_plan_json(plan) for plan in curve],
        "unequal_hosts": [asdict(division) for division in unequal],
    }


def _plan_json(plan: Plan) -> dict[str, Any]:
    return {
        "cluster": str(plan.workers),
        "helpers": str(plan.helpers) if plan.helpers else None,
        "layouts": [asdict(layout) for layout in plan.layouts],
        "step_s": [step.total_s for step in plan.steps],
        "exposed_s": [step.exposed_s for step in plan.steps],
        "num_steps": [run.num_steps for run in plan.runs],
        **{name: getattr(plan, name) for name in ("samples_per_s", "efficiency", "total_s", "dollars")},
        "memory_bytes": plan.memory.total_bytes,
        "where_s": plan.seconds_by_cause,
        "interval": interval_json(plan),
    }


def comparison_json(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison of clusters for programs."""
    return {
        "recipe": comparison.plans[0].training.recipe,
        "basis": comparison.basis,
        "fastest": str(comparison.fastest.workers),
        "cheapest": None if comparison.cheapest is None else str(comparison.cheapest.workers),
        "chosen": comparison.chosen.hosts if comparison.aim.is_limited else None,
        "clusters": [{**_plan_json(each), "command": command_of(each)} for each in comparison.plans],
        "refused": list(comparison.refused),
    }


def trace_of(plan: Plan) -> dict[str, Any]:
    """Return the predicted step as a Chrome trace with one row per phase, as ``shoal bench comm --trace``."""
    step = plan.steps[0]
    spans, begin = [], 0.0
    for name in ("forward", "backward", "bubble"):
        if seconds := getattr(step, f"{name}_s"):
            spans.append(("compute", name, begin, seconds))
            begin += seconds
    spans += [(s.phase, f"bucket {s.bucket}", s.begin_s, s.end_s - s.begin_s) for s in step.exchange.spans]
    spans.append(("compute", "optimizer", step.total_s - step.optimizer_s, step.optimizer_s))
    events = [
        {"name": name, "ph": "X", "pid": "predicted", "tid": row, "ts": 1e6 * begin, "dur": 1e6 * seconds}
        for row, name, begin, seconds in spans
    ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def page_of(
    plans: Sequence[Plan],
    curve: Sequence[Plan] = (),
    curves: Mapping[str, Sequence[Plan]] | None = None,
    *,
    compare: bool = False,
    unequal: Sequence[Division] = (),
) -> str:
    """Return an HTML page with the text and, for a sweep, scaling curves as SVG; it loads nothing.

    Args:
        curves: the best plan of each algorithm on each number of hosts of the sweep.
    """
    title = html.escape(f"{plans[0].training.recipe} on {plans[0].workers}")
    pictures = f"<h2>Scaling: samples/s over hosts</h2>{_curve_svg(curve)}" if len(curve) > 1 else ""
    if several := {name: best for name, best in (curves or {}).items() if len(best) > 1}:
        pictures += f"<h2>Scaling by algorithm: % of single hosts</h2>{_efficiency_svg(several)}"
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>"
        "<style>body{font:15px/1.5 system-ui;margin:2rem}pre{font-size:13px}</style>"
        f"<h1>{title}</h1><pre>{html.escape(text_of(plans, curve, compare=compare, unequal=unequal))}</pre>"
        f"{pictures}</html>\n"
    )


_WIDTH, _HEIGHT, _MARGIN = 720, 380, 60
_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#e45756", "#72b7b2", "#b279a2")


def _logarithmic(values: Sequence[float], begin: float, end: float) -> dict[float, float]:
    """Return the position of each value on a logarithmic axis."""
    low, high = math.log(min(values)), math.log(max(values))
    scale = (end - begin) / max(high - low, 1e-9)
    return {value: begin + scale * (math.log(value) - low) for value in values}


def _svg(body: str, below: str) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" font-size="12" text-anchor="middle" role="img">{body}'
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 8}">{below}</text></svg>'
    )


def _line(points: Sequence[tuple[float, float]], style: str) -> str:
    text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{text}" fill="none" stroke-width="2" {style}/>'


def _curve_svg(curve: Sequence[Plan]) -> str:
    """Draw samples/s over hosts, both axes logarithmic, beside linear scaling of the first (dashed)."""
    hosts = [plan.workers.count for plan in curve]
    rates = [plan.samples_per_s for plan in curve]
    linear = [rates[0] * count / hosts[0] for count in hosts]
    x = _logarithmic(hosts, _MARGIN, _WIDTH - 20)
    y = _logarithmic([*rates, *linear], _HEIGHT - _MARGIN, 20)
    lines = "".join(
        _line([(x[n], y[rate]) for n, rate in zip(hosts, values, strict=True)], style)
        for values, style in ((linear, 'stroke="#bbb" stroke-dasharray="5 4"'), (rates, 'stroke="#4c78a8"'))
    )
    marks = "".join(
        f'<circle cx="{x[n]:.1f}" cy="{y[rate]:.1f}" r="4" fill="#4c78a8"/>'
        f'<text x="{x[n]:.1f}" y="{y[rate] - 9:.1f}">{rate:,.0f} ({100 * plan.efficiency:.0f} %)</text>'
        f'<text x="{x[n]:.1f}" y="{_HEIGHT - 28}">{n}</text>'
        for plan, n, rate in zip(curve, hosts, rates, strict=True)
    )
    return _svg(lines + marks, "hosts (dashed: linear scaling)")


def _efficiency_svg(curves: Mapping[str, Sequence[Plan]]) -> str:
    """Draw the scaling efficiency of each algorithm over hosts, with a logarithmic axis of hosts."""
    hosts = sorted({plan.workers.count for curve in curves.values() for plan in curve})
    x = _logarithmic(hosts, _MARGIN, _WIDTH - 150)

    def y(share: float) -> float:
        return _HEIGHT - _MARGIN - (_HEIGHT - _MARGIN - 20) * share

    body = "".join(f'<text x="{x[n]:.1f}" y="{_HEIGHT - 28}">{n}</text>' for n in hosts)
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        body += _line([(_MARGIN, y(share)), (_WIDTH - 150, y(share))], 'stroke="#eee"')
        body += f'<text x="{_MARGIN - 22}" y="{y(share) + 4:.1f}">{100 * share:.0f} %</text>'
    for row, (name, curve) in enumerate(curves.items()):
        colour = _COLOURS[row % len(_COLOURS)]
        body += _line([(x[p.workers.count], y(p.efficiency)) for p in curve], f'stroke="{colour}"')
        body += (
            f'<text x="{_WIDTH - 140}" y="{30 + 18 * row}" text-anchor="start" fill="{colour}">'
            f"{name}, {100 * curve[-1].efficiency:.0f} %</text>"
        )
    return _svg(body, "hosts; beside each name, the last of its line")
