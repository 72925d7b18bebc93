"""The page of five posts: what they published beside what the planner says, from ``plan_posts.toml``.

Given is one host's figure of each result. Throughput efficiency is the rate of n hosts over n times the rate
of one; the time ratio is the time of one host over n times that of n. They differ by start, evaluations and
the epochs that a larger batch needs.
"""

from __future__ import annotations

import textwrap
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.plan_predict import achieved_of, counted, layout_of, predict_row
from benchmarks.plan_rows import TIME, Row, machines_of, with_batch
from shoal.decide.layout import Layout
from shoal.decide.workload import Workload
from shoal.planner.hardware import Catalog, Machines, require_accelerators
from shoal.planner.prediction import ASSUMED_UTILISATION, achieved
from shoal.planner.recipe_workloads import workload
from shoal.planner.step_time import step_time
from shoal.recipes.workloads import count_recipe

FACTS = Path(__file__).with_suffix(".toml")
IMAGENET = 1281167
_COLUMNS = ("recipe", "accelerator", "network", "local_gbyte_per_s", "flow_gbps", "overlap", "connections",
            "two_hops", "sequence_length", "length", "clock")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """One published result on n hosts beside its prediction; ratios as the module says, None: not known."""

    section: str
    what: str
    hosts: int
    unit: str
    given: float
    published: float
    planned: float
    claimed_efficiency: float | None
    published_efficiency: float | None
    planned_efficiency: float
    published_time_ratio: float | None
    planned_time_ratio: float | None
    published_minutes: float | None = None
    planned_minutes: float | None = None
    derived: str = ""


def read_facts(path: Path = FACTS) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


def scaled(facts: dict[str, Any], catalog: Catalog) -> list[Scaled]:
    """Return each result on more than one host with its prediction from one host."""
    return [
        _scaled(entry, larger, facts["source"][entry["source"]], catalog)
        for entry in facts["scaling"]
        for larger in entry["larger"]
    ]


def _scaled(entry: dict[str, Any], larger: dict[str, Any], source: str, catalog: Catalog) -> Scaled:
    one = _row(entry, source, 1, entry["one_host"], entry.get("one_batch"))
    one = with_batch(one, one)
    hosts = larger["hosts"]
    batch = entry["one_batch"] * hosts if "one_batch" in entry else None
    many = with_batch(_row(entry, source, hosts, larger["value"], batch), one)
    few_machines, machines = machines_of(one, catalog), machines_of(many, catalog)
    assert few_machines and machines
    flops = achieved_of(one, few_machines)
    helpers = catalog.machines(entry["helpers"]) if "helpers" in entry else None
    planned = (
        _with_helpers(many, machines, helpers, flops) if helpers else predict_row(many, machines, flops).value
    )
    by_time = one.kind == TIME
    if not by_time:
        efficiency = planned / hosts / one.value
    elif one.length == "preset":  # the same steps at every scale: time is throughput
        efficiency = one.value / hosts / planned
    else:
        rates = [replace(row, metric="images_per_s") for row in (one, many)]
        each = predict_row(rates[1], machines, flops).value / hosts
        efficiency = each / predict_row(rates[0], few_machines, flops).value
    images = entry.get("epochs", 0) * IMAGENET
    return Scaled(
        section=entry["section"],
        what=entry["what"],
        hosts=hosts,
        unit={"time_to_train_min": "min"}.get(one.metric, one.metric.replace("_per_s", "/s")),
        given=one.value,
        published=many.value,
        planned=planned,
        claimed_efficiency=larger.get("claimed_efficiency"),
        published_efficiency=None if by_time or "epochs" in entry else many.value / hosts / one.value,
        planned_efficiency=efficiency,
        published_time_ratio=one.value / hosts / many.value if by_time else None,
        planned_time_ratio=one.value / hosts / planned if by_time else None,
        published_minutes=larger.get("minutes"),
        planned_minutes=images / planned / 60 if images else None,
        derived=entry.get("derived", ""),
    )


def _row(entry: dict[str, Any], source: str, hosts: int, value: float, batch: int | None) -> Row:
    return Row(
        number=0,
        system=entry["system"],
        model=entry["model"],
        hardware=entry["hardware"],
        nic_gbps=entry["nic_gbps"],
        nodes=hosts,
        gpus=8 * hosts,
        global_batch=batch,
        metric=entry["metric"],
        value=value,
        source=source,
        **{name: entry[name] for name in _COLUMNS if name in entry},
    )


def _with_helpers(row: Row, workers: Machines, helpers: Machines, flops: float) -> float:
    """Return samples/s with servers on helper hosts too, as ``decide.server_assignment`` shares them out."""
    model = counted(row)
    layout = replace(layout_of(row, model, workers), algorithm="two-hop-helpers")
    step = step_time(model, workers, layout, achieved_flops=flops, helpers=helpers)
    return layout.global_batch / step.total_s


@dataclass(frozen=True, kw_only=True)
class Rented:
    """ALBERT's training on one kind of machine."""

    recipe: str
    cluster: str
    hours: float
    hours_by_steps: float | None
    planned_hours: float
    dollars: float
    planned_dollars: float
    basis: str


def rented(facts: dict[str, Any], catalog: Catalog) -> list[Rented]:
    """Return the trainings on three instance types; one figure of one p3dn host is given for all."""
    return [_rented(entry, catalog) for entry in facts["rented"]]


def _rented(entry: dict[str, Any], catalog: Catalog) -> Rented:
    machines = catalog.machines(entry["cluster"])
    model = workload(entry["recipe"], 512, count_recipe)
    p3dn = catalog.machines("1xp3dn.24xlarge").instance
    flops, _ = achieved(model, entry["recipe"], p3dn)
    own, given = (require_accelerators(Machines(count=1, instance=i)) for i in (machines.instance, p3dn))
    # Of another accelerator: the same share of its peak.
    flops *= own.peak("fp16") / given.peak("fp16")
    layout = Layout(
        global_batch=entry["batch"], micro_batch=entry["micro_batch"], overlap=False, connections=1
    )
    step_s = step_time(model, machines, layout, achieved_flops=flops).total_s
    hours = entry["steps"] * step_s / 3600
    price = machines.price_per_hour
    assert price is not None
    rate = entry.get("steps_per_s")
    return Rented(
        recipe=entry["recipe"],
        cluster=entry["cluster"],
        hours=entry["hours"],
        hours_by_steps=entry["steps"] / rate / 3600 if rate else None,
        planned_hours=hours,
        dollars=entry["hours"] * price,
        planned_dollars=hours * price,
        basis="given" if own.name == given.name else f"{own.name} at the same share of its peak",
    )


@dataclass(frozen=True, kw_only=True)
class T5:
    """T5-3B at an assumed utilisation, and the utilisation that each published time would need."""

    planned_days: float
    efficiency: float
    needed: tuple[tuple[float, float], ...]
    """(published days, share of the accelerators' peak)."""


def t5(facts: dict[str, Any], catalog: Catalog) -> T5:
    entry = facts["t5"]
    machines = catalog.machines(entry["cluster"])
    model = workload("t5-3b", 512)
    peak = require_accelerators(machines).peak("bf16")
    flops = ASSUMED_UTILISATION * peak
    planned = _t5_step_s(model, machines, entry["stages"], entry["batch"], flops)
    one = _t5_step_s(
        model, replace(machines, count=1), entry["stages"], entry["batch"] // machines.count, flops
    )
    total = entry["steps"] * entry["batch"] * model.training_flops
    needed = [(days, total / (days * 86400 * machines.num_accelerators * peak)) for days in entry["days"]]
    return T5(planned_days=entry["steps"] * planned / 86400, efficiency=one / planned, needed=tuple(needed))


def _t5_step_s(model: Workload, machines: Machines, stages: int, batch: int, flops: float) -> float:
    layout = Layout(
        global_batch=batch,
        micro_batch=1,
        stages=stages,
        virtual=2,
        algorithm="two-hop" if machines.count > 1 else "hierarchical-ring",
    )
    return step_time(model, machines, layout, achieved_flops=flops).total_s


# ---- the page --------------------------------------------------------------------------------------------

_HEAD = """# Published results and the planner's predictions

Made by `python -m benchmarks.plan_published --page docs/published.md` from `benchmarks/plan_posts.toml`.

**One host's figure of each result is given**, the rest is predicted. These figures were known when the
planner was built, so this is no blind test ([plan.md](plan.md)). Throughput efficiency is the rate of n hosts
over n times the rate of one host; the time ratio is one host's time over n times that of n hosts. A dash: not
published."""
_RENTED_NOTE = """\
One p3dn.24xlarge at 931 (base) or 322 (large) sequences/s is given for all. Predictions of other
kinds of host without a measurement of their own are far too fast. p3.16xlarge has the same chip and
half the batch per device; the reason why it took 1.7 times as long is unknown. The peak of
g4dn.12xlarge is the rate of cuBLAS on a T4 (41.6 TFLOP/s, recalled), not the data sheet's 65; an
equal share of the peak ignores work bound by memory, at 320 GB/s against 900. Give
`--throughput` or `--measured`. Prices are the catalog's, of lists of 2023 to 2026: look them up.
The post names no costs, only that g4dn.12xlarge is the most cost-efficient."""
_T5_NOTE = """\
No host's figure is published, so this starts from no measurement: {assumed:.0f} % of the peak is
assumed. Nor are steps and batch: {steps:,} steps of {batch:,} sequences of 512 tokens are those of
Raffel et al. 2020 (arXiv 1910.10683), section 3.1.2 and table 14. Had the posts trained just as
long, their times would mean {needed} of the peak: that they trained longer is likelier, and the
prediction cannot be judged. The gradients travel in 16 bits here, in buckets of 25 MiB: those of
16-bit weights. `shoal plan t5-3b --cluster 256xp4d.24xlarge` plans the preset's million steps with fp32
on the wire, as `shoal train` does, and so answers 9.0 days; with `--wire bf16` it answers 5.3 days."""


def page(facts: dict[str, Any], catalog: Catalog) -> str:
    """Return the page as Markdown."""
    lines = [_HEAD]
    results = scaled(facts, catalog)
    for section, note in facts["note"].items():
        lines += _section(section, note, [result for result in results if result.section == section])
    lines += _rented_lines(rented(facts, catalog)) + _t5_lines(facts["t5"], t5(facts, catalog))
    lines += ["", "## Where the sources contradict each other", ""]
    lines += [_wrapped(f"- {entry['text']}") for entry in facts["contradiction"]]
    lines += ["", "## Sources", ""]
    lines += [_wrapped(f"- {text}") for text in facts["source"].values()]
    return "\n".join(lines) + "\n"


def _wrapped(text: str) -> str:
    """Return a paragraph or an item of a list in lines of at most 140 characters."""
    indent = "  " if text.startswith("- ") else ""
    return textwrap.fill(text, 140, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    return ["", lines[0], "|" + "---|" * len(header), *lines[1:]]


def _section(name: str, note: str, results: Sequence[Scaled]) -> list[str]:
    header = ["what", "one host (given)", "hosts", "published", "predicted", "error"]
    header += ["throughput efficiency: published", "predicted", "time ratio: published", "predicted"]
    has_minutes = any(result.published_minutes for result in results)
    if has_minutes:
        header += ["90 epochs: published", "predicted"]
    rows = []
    for r in results:
        published = r.claimed_efficiency if r.published_efficiency is None else r.published_efficiency
        cells = [r.what, _value(r.given, r.unit) + (" \\*" if r.derived else ""), str(r.hosts)]
        cells += [_value(r.published, r.unit), _value(r.planned, r.unit), _error(r.planned, r.published)]
        ratios = (published, r.planned_efficiency, r.published_time_ratio, r.planned_time_ratio)
        cells += [_share(ratio) for ratio in ratios]
        if has_minutes:
            cells += [f"{r.published_minutes:g} min", f"{r.planned_minutes:.0f} min"]
        rows.append(cells)
    derived = dict.fromkeys(r.derived for r in results if r.derived)
    lines = ["", f"## {name}", *_table(header, rows), "", _wrapped(note)]
    return [*lines, "", f"\\* {'; '.join(derived)}."] if derived else lines


def _rented_lines(trainings: Sequence[Rented]) -> list[str]:
    header = ["model", "hosts", "published", "by its own steps/s", "predicted", "error"]
    header += ["cost of the published", "cost of the predicted", "basis"]
    rows = []
    for r in trainings:
        by_steps = "–" if r.hours_by_steps is None else f"{r.hours_by_steps:.1f} h"
        cells = [r.recipe, r.cluster.replace("x", " ", 1), f"{r.hours:g} h", by_steps]
        cells += [f"{r.planned_hours:.1f} h", _error(r.planned_hours, r.hours)]
        rows.append([*cells, f"${r.dollars:,.0f}", f"${r.planned_dollars:,.0f}", r.basis])
    return [
        "",
        "## ALBERT on three instance types, 125,000 steps of 4,096",
        *_table(header, rows),
        "",
        _RENTED_NOTE,
    ]


def _t5_lines(entry: dict[str, Any], found: T5) -> list[str]:
    days = " or ".join(f"{day:g}" for day in entry["days"])
    needed = " and ".join(f"{100 * share:.1f} %" for _, share in found.needed)
    header = ["published", "predicted", "throughput efficiency: published", "predicted"]
    rows = [[f"{days} days", f"{found.planned_days:.2f} days", "–", _share(found.efficiency)]]
    note = _T5_NOTE.format(**entry, assumed=100 * ASSUMED_UTILISATION, needed=needed)
    return ["", "## T5-3B on 256 p4d.24xlarge: 8 stages × 256 replicas", *_table(header, rows), "", note]


def _error(planned: float, published: float) -> str:
    return f"{100 * (planned / published - 1):+.0f} %"


def _value(value: float, unit: str) -> str:
    if unit != "min":
        return f"{value:,.0f} {unit}"
    if value >= 1440:
        return f"{value / 1440:.1f} days"
    return f"{value / 60:.1f} h" if value >= 120 else f"{value:.3g} min"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
