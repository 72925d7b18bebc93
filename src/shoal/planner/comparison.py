"""Compares one training on several clusters, with rates of computation from one source for all of them.

Published throughputs are those of different software, and what is assumed is a share of the peak. Side by
side they would rank software, not machines: two hosts with one chip would differ by what somebody published.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.errors import UsageError
from shoal.formatting import duration
from shoal.planner.api import Model, plan
from shoal.planner.goal import Aim
from shoal.planner.intervals import interval_of
from shoal.planner.prediction import ASSUMED_UTILISATION, Plan


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The best plan on each cluster that the training fits."""

    plans: tuple[Plan, ...]
    """In the order of the clusters."""
    refused: tuple[str, ...]
    """Clusters without a plan, with the reason."""
    basis: str
    """Source of all rates of computation."""
    aim: Aim = field(default_factory=Aim)

    @property
    def chosen(self) -> Plan:
        """The best plan within the limits.

        Raises:
            UsageError: none keeps them.
        """
        return self.aim.chosen(self.plans)

    @property
    def fastest(self) -> Plan:
        return min(self.plans, key=lambda each: each.total_s)

    @property
    def cheapest(self) -> Plan | None:
        """The plan with the lowest cost; none if a cluster has no price."""
        if any(each.dollars is None for each in self.plans):
            return None
        return min(self.plans, key=lambda each: each.dollars or 0.0)


def clusters_of(texts: Sequence[str]) -> list[str]:
    """Return the clusters of texts of which some are ranges: doublings, and the last.

    Raises:
        UsageError: a range begins with a larger number than it ends with.

    Example:
        >>> clusters_of(["1..6xp4d.24xlarge", "8xp5.48xlarge"])
        ['1xp4d.24xlarge', '2xp4d.24xlarge', '4xp4d.24xlarge', '6xp4d.24xlarge', '8xp5.48xlarge']
    """
    clusters: list[str] = []
    for text in texts:
        match = re.fullmatch(r"(\d+)\.\.(\d+)\s*[x×*]\s*(\S+)", text.strip())
        if match is None:
            clusters.append(text)
            continue
        first, last = int(match[1]), int(match[2])
        if not 1 <= first <= last:
            raise UsageError(f"{text!r} is not of the form 1..64xp4d.24xlarge, the smaller number first")
        clusters += [f"{count}x{match[3]}" for count in doublings(first, last)]
    return list(dict.fromkeys(clusters))


def doublings(first: int, last: int) -> list[int]:
    """Return first, twice that, ..., and the last."""
    return [*(first << k for k in range(last.bit_length()) if first << k < last), last]


def compare(
    model: Model,
    clusters: Sequence[str],
    helpers: str | None = None,
    *,
    aim: Aim | None = None,
    **options: Any,
) -> Comparison:
    """Predict one training on several clusters.

    Rates are published ones if all are from one publication, else the same share of each accelerator's peak.

    Args:
        model: as for :func:`shoal.planner.api.plan`.
        clusters: hosts that train, such as ``("8xp3dn.24xlarge", "8xp4d.24xlarge")``.
        aim: what the plan of each cluster is chosen by; default: the least time.
        options: further ones of :func:`shoal.planner.api.plan`.

    Raises:
        UsageError: there is no plan on any of them, or what was measured on one kind of host is to hold for
            several.
    """
    is_measured = bool(options.get("measured") or options.get("samples_per_s"))
    kinds = {text.lstrip("0123456789").lstrip("x") for text in clusters}
    if is_measured and len(kinds) > 1:
        raise UsageError(
            f"what was measured on one kind of host does not hold for {len(kinds)} of them "
            f"({', '.join(sorted(kinds))}): leave --throughput and --measured out, or compare numbers of "
            "hosts"
        )
    if re.match(r"[\d.]", str(options.get("price", ""))) and len(kinds) > 1:
        raise UsageError(
            f"--price {options['price']} is of one kind of host, and there are {len(kinds)} "
            f"({', '.join(sorted(kinds))}): name a market, or give prices with --catalog FILE"
        )
    aim = aim or Aim()
    plans, refused = _plans(model, clusters, helpers, aim, **options)
    sources = {_source(part.basis) for each in plans for part in each.training.parts}
    if len(sources) > 1:
        plans, refused = _plans(model, clusters, helpers, aim, published=False, **options)
        basis = (
            f"assumed for all: {100 * ASSUMED_UTILISATION:.0f} % of each accelerator's peak, since not all "
            "have a throughput from one source"
        )
    else:
        (basis,) = sources
    return Comparison(plans=tuple(plans), refused=tuple(refused), basis=basis, aim=aim)


def _plans(
    model: Model, clusters: Sequence[str], helpers: str | None, aim: Aim, **options: Any
) -> tuple[list[Plan], list[str]]:
    """Return the best plan of each cluster that has one, and why others have none.

    Raises:
        UsageError: none has one.
    """
    plans, refused = [], []
    for cluster in clusters:
        try:
            ranked = plan(model, cluster, helpers, **{"goal": aim.ranks_by, **options})
            plans.append(next(filter(aim.meets, ranked), ranked[0]))
        except UsageError as error:
            refused.append(f"{cluster}: {error}")
    if not plans:
        raise UsageError("; ".join(refused))
    return plans, refused


def _source(basis: str) -> str:
    """Return the source of a rate, without its value; of assumed ones without the accelerator."""
    kind, _, text = basis.partition(": ")
    if kind == "published":
        return f"published: {text.partition(', ')[2]}"
    return (
        f"assumed: {100 * ASSUMED_UTILISATION:.0f} % of each accelerator's peak"
        if kind == "assumed"
        else basis
    )


def _range(plan: Plan) -> str:
    """Return the bounds of the plan's time."""
    interval = interval_of(plan)
    return "none" if isinstance(interval, str) else " to ".join(map(duration, interval.bounds(plan.total_s)))


def table_of(comparison: Comparison) -> list[str]:
    """Return the plans as lines of a table, the fastest and the cheapest marked."""
    width = max(20, *(len(each.hosts) for each in comparison.plans))
    lines = [
        f"  {'hosts':<{width}} {'time':>12} {'80 %':>24} {'batch × accumulation':>22} "
        f"{'total batch':>12} {'steps/s':>9} {'precision':>9} {'cost':>12}"
    ]
    for each in comparison.plans:
        parts = list(zip(each.layouts, each.steps, strict=True))
        divided = ", ".join(f"{layout.micro_batch:g} × {step.micro_batches}" for layout, step in parts)
        total = ", ".join(f"{layout.global_batch:,}" for layout, _ in parts)
        steps_per_s = sum(run.num_steps for run in each.runs) / sum(run.steps_s for run in each.runs)
        cost = "unknown" if each.dollars is None else f"${each.dollars:,.0f}"
        precision = each.training.parts[0].precision
        marks = [
            name
            for name, chosen in (("fastest", comparison.fastest), ("cheapest", comparison.cheapest))
            if each is chosen
        ]
        lines.append(
            f"  {each.hosts:<{width}} {duration(each.total_s):>12} {_range(each):>24} {divided:>22} "
            f"{total:>12} {steps_per_s:>9.3g} {precision:>9} {cost:>12}  {', '.join(marks)}".rstrip()
        )
    return lines
