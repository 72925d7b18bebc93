"""The page of ``shoal plan --page``: plain HTML with the curve as SVG, readable without a network."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from shoal.planner.prediction import Job, Plan
from shoal.planner.search import best_of_each, duration

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 720, 380, 80, 50
_COLOURS = {
    "compute": "#4c78a8",
    "bubble": "#e45756",
    "stragglers": "#b279a2",
    "network": "#f58518",
    "optimizer": "#72b7b2",
    "start": "#9d755d",
    "evaluation": "#54a24b",
    "checkpoints": "#bab0ac",
}


def page_of(job: Job, plans: Sequence[Plan], curve: Sequence[Plan], notes: Sequence[str] = ()) -> str:
    """Return the page: the best plan, where its time goes, the best layouts, and the curve of a sweep.

    Args:
        notes: sentences that matter beside the figures.
    """
    best, unit = plans[0], job.parts[0].workload.unit
    money = "" if best.dollars is None else f", ${best.dollars:,.0f}"
    rows = "".join(
        f"<tr><td>{html.escape(r.plan.layouts[0].algorithm)}</td><td>{duration(r.plan.total_s)}</td>"
        f"<td>{'' if r.plan.dollars is None else f'${r.plan.dollars:,.0f}'}</td>"
        f"<td>{100 * r.plan.efficiency:.1f} %</td><td>{html.escape(r.reason)}</td></tr>"
        for r in best_of_each(plans)
    )
    title = f"{html.escape(job.recipe)} on {html.escape(str(best.workers))}"
    helpers = f" with {html.escape(str(best.helpers))}" if best.helpers else ""
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title>"
        "<style>body{font:15px/1.5 system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem}"
        "td,th{padding:.2rem .8rem .2rem 0;text-align:left}</style>"
        f"<h1>{title}{helpers}</h1><p>{duration(best.total_s)}{money}, "
        f"{best.samples_per_s:,.0f} {html.escape(unit)}/s, "
        f"{100 * best.efficiency:.1f} % of single hosts. Basis: {html.escape(job.parts[0].basis)}.</p>"
        f"{''.join(f'<p>{html.escape(note)}</p>' for note in notes)}"
        f"<h2>Where the time goes</h2>{_bar(best)}"
        "<h2>The best layouts</h2><table><tr><th>algorithm<th>time<th>cost<th>scaling<th>why</tr>"
        f"{rows}</table>"
        + (f"<h2>Scaling: {html.escape(unit)}/s over hosts</h2>{curve_svg(curve)}" if len(curve) > 1 else "")
        + "</html>\n"
    )


def _bar(plan: Plan) -> str:
    parts, begin, names = [], 0.0, []
    for name, seconds in plan.where.items():
        width = 700 * seconds / plan.total_s
        if width < 0.5:
            continue
        parts.append(f'<rect x="{begin:.1f}" y="0" width="{width:.1f}" height="36" fill="{_COLOURS[name]}"/>')
        names.append(
            f'<span style="color:{_COLOURS[name]}">■</span> {name} {100 * seconds / plan.total_s:.1f} %'
        )
        begin += width
    return f'<svg viewBox="0 0 700 36" role="img">{"".join(parts)}</svg><p>{" &nbsp; ".join(names)}</p>'


def curve_svg(curve: Sequence[Plan]) -> str:
    """Return samples/s over hosts, both logarithmic, beside linear scaling of the first."""
    hosts = [plan.workers.count for plan in curve]
    rates = [plan.samples_per_s for plan in curve]
    linear = [rates[0] * count / hosts[0] for count in hosts]
    low_x, high_x = math.log(hosts[0]), math.log(hosts[-1])
    low_y, high_y = math.log(min(rates + linear)), math.log(max(rates + linear))

    def place(count: float, rate: float) -> tuple[float, float]:
        x = _LEFT + (_WIDTH - _LEFT - 20) * (math.log(count) - low_x) / max(high_x - low_x, 1e-9)
        y = (
            _HEIGHT
            - _BOTTOM
            - (_HEIGHT - _BOTTOM - 20) * (math.log(rate) - low_y) / max(high_y - low_y, 1e-9)
        )
        return x, y

    def line(values: Sequence[float], style: str) -> str:
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, hosts, values))
        return f'<polyline points="{points}" fill="none" {style}/>'

    marks = []
    for plan, count, rate in zip(curve, hosts, rates, strict=True):
        x, y = place(count, rate)
        marks.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#4c78a8"><title>{count} hosts: {rate:,.0f} '
            f"samples/s, {100 * plan.efficiency:.1f} %</title></circle>"
            f'<text x="{x:.1f}" y="{_HEIGHT - 28}" text-anchor="middle">{count}</text>'
            f'<text x="{x:.1f}" y="{y - 9:.1f}" text-anchor="middle">{100 * plan.efficiency:.0f} %</text>'
        )
    ends = "".join(
        f'<text x="{_LEFT - 8}" y="{place(hosts[0], rate)[1]:.1f}" text-anchor="end">{rate:,.0f}</text>'
        for rate in (rates[0], rates[-1])
    )
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" font-size="12" role="img">'
        + line(linear, 'stroke="#bbb" stroke-dasharray="5 4"')
        + line(rates, 'stroke="#4c78a8" stroke-width="2"')
        + "".join(marks)
        + ends
        + f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 8}" text-anchor="middle">'
        "hosts (dashed: linear scaling)</text></svg>"
    )
