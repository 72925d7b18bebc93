"""The planner against published scaling: given the smallest scale of a family, predict the others.

    python -m benchmarks.plan_published --rows FILE --json FILE
    python -m benchmarks.plan_published --page docs/published.md     # five posts only; needs no rows

A family is model × hardware × NIC × metric × publication (``plan_rows.family_of``). Its row at the smallest
scale gives one figure, the FLOP/s that the accelerators achieve; everything else is physics and published
facts. The same rows are predicted by linear scaling and by Amdahl's law with one serial fraction a kind of
metric, which is fitted on the scored rows themselves: the best that any such fraction can do.

Every row that is not scored is listed with the reason. The families of the training split below are not.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks import plan_posts
from benchmarks.harness import Benchmark
from benchmarks.plan_predict import achieved_of, in_samples, predict_row
from benchmarks.plan_rows import (
    KINDS,
    PER_GPU_METRICS,
    TIME,
    Row,
    contradicts,
    family_of,
    machines_of,
    read_rows,
    recipe_of,
    with_batch,
)
from shoal.errors import UsageError
from shoal.planner.hardware import Catalog

TRAINING = r"^MLPerf v(0\.6|0\.7|1\.0|1\.1) |TF2\.1\+Horovod LAMB"
"""Publications on which constants were settled; their families are predicted too, and shown apart."""
MEDIAN_TARGET, P90_TARGET = 0.08, 0.20


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A row with what three models say of it."""

    family: tuple[str, ...]
    kind: str
    line: int
    system: str
    nodes: int
    gpus: int
    times_the_gpus: float
    """Of the given row's."""
    published: float
    planned: float
    linear: float

    @property
    def error(self) -> float:
        return abs(self.planned / self.published - 1)

    @property
    def linear_error(self) -> float:
        return abs(self.linear / self.published - 1)

    def amdahl_error(self, serial: float) -> float:
        """Of Amdahl's law: time is serial + (1 - serial) / x."""
        slower = (serial + (1 - serial) / self.times_the_gpus) * self.times_the_gpus
        value = self.linear * slower if self.kind == TIME else self.linear / slower
        return abs(value / self.published - 1)


def predictions_of(rows: Sequence[Row], catalog: Catalog) -> tuple[list[Prediction], list[tuple[Row, str]]]:
    """Return the predictions, and each other row with the reason why it has none."""
    families: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    left_out: list[tuple[Row, str]] = []
    for row in rows:
        if row.kind is None:
            left_out.append((row, f"{row.metric} compares two systems; it is no figure of one"))
        elif recipe_of(row) is None:
            left_out.append((row, f"the planner knows no recipe for {row.model}"))
        elif machines_of(row, catalog) is None:
            left_out.append((row, f"no catalog has {row.hardware}"))
        else:
            families[family_of(row)].append(row)
    predictions: list[Prediction] = []
    for family, members in families.items():
        found, without = _predict_family(family, members, catalog)
        predictions += found
        left_out += without
    return predictions, left_out


def _predict_family(
    family: tuple[str, ...], members: list[Row], catalog: Catalog
) -> tuple[list[Prediction], list[tuple[Row, str]]]:
    fewest = min(row.gpus for row in members)
    at_fewest = [row for row in members if row.gpus == fewest]
    larger = [row for row in members if row.gpus > fewest]
    if not larger:
        return [], [(row, "its family has one scale") for row in members]
    left_out = [(row, "the family's smallest scale: given") for row in at_fewest]
    recipe = recipe_of(at_fewest[0])
    assert recipe
    predictions = []
    try:
        given = _given(at_fewest, recipe, catalog)
    except UsageError as error:
        return [], [(row, str(error)) for row in members]
    for row in larger:
        if contradicts(row, at_fewest):
            left_out.append(
                (
                    row,
                    "its log contradicts itself: above twice the throughput per device of the smallest scale",
                )
            )
            continue
        try:
            predictions.append(_predict(family, row, given, recipe, catalog))
        except UsageError as error:
            left_out.append((row, str(error)))
    return predictions, left_out


@dataclass(frozen=True)
class _Given:
    row: Row
    value: float
    achieved: float


def _given(at_fewest: list[Row], recipe: str, catalog: Catalog) -> _Given:
    """Return the smallest scale; of several rows there (variants of a host) the mean."""
    value = statistics.fmean(row.value for row in at_fewest)
    row = with_batch(replace(at_fewest[0], value=value), at_fewest[0], recipe)
    machines = machines_of(row, catalog)
    assert machines
    return _Given(row, value, achieved_of(in_samples(row, machines), machines))


def _predict(family: tuple[str, ...], row: Row, given: _Given, recipe: str, catalog: Catalog) -> Prediction:
    machines = machines_of(row, catalog)
    assert machines and row.kind
    full = with_batch(row, given.row, recipe)
    in_units = row.value / in_samples(full, machines).value
    planned = predict_row(full, machines, given.achieved) * in_units
    times = row.gpus / given.row.gpus
    if row.kind == TIME:
        linear = given.value / times
    else:
        # Iterations a second do not grow with the hosts: each brings a batch of its own.
        constant = row.metric in PER_GPU_METRICS or row.metric == "iterations_per_s"
        linear = given.value * (1.0 if constant else times)
    return Prediction(
        family=family,
        kind=row.kind,
        line=row.number,
        system=row.system,
        nodes=row.nodes,
        gpus=row.gpus,
        times_the_gpus=times,
        published=row.value,
        planned=planned,
        linear=linear,
    )


def best_serial_fraction(predictions: Sequence[Prediction]) -> float:
    """Return the serial fraction with the least median error on these very rows."""
    grid = [0.0] + [math.exp(-12 + 0.05 * step) for step in range(230)]
    return min(grid, key=lambda s: statistics.median(p.amdahl_error(s) for p in predictions))


def percentile90(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[min(math.ceil(0.9 * len(ordered)) - 1, len(ordered) - 1)]


def main(argv: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--rows", type=Path, help="the CSV file of published rows")
    options.add_argument("--only", metavar="REGEX", default="", help="systems to read; default: all")
    options.add_argument("--list", action="store_true", help="print every row, scored or not")
    options.add_argument("--page", type=Path, help="write the page of the posts' results and do no more")
    bench = Benchmark("plan_published", argv, options)
    if bench.args.page:
        bench.args.page.write_text(plan_posts.page(plan_posts.read_facts(), Catalog()), encoding="utf-8")
        return 0
    try:
        rows = read_rows(bench.args.rows or Path(_from_environment()))
        rows = [row for row in rows if re.search(bench.args.only, row.system)]
        predictions, left_out = predictions_of(rows, Catalog())
    except UsageError as error:
        raise SystemExit(f"plan_published: {error}") from None
    training = [p for p in predictions if re.search(TRAINING, p.system)]
    scored = [p for p in predictions if not re.search(TRAINING, p.system)]
    for kind in KINDS:
        if of_kind := [p for p in scored if p.kind == kind]:
            _add_rows(bench, kind, of_kind)
    _print_families(scored)
    if training:
        errors = [p.error for p in training]
        print(
            f"\ntraining split ({len(training)} rows): median {_percent(statistics.median(errors))}, "
            f"90th percentile {_percent(percentile90(errors))}"
        )
    _print_left_out(left_out, training)
    if bench.args.list:
        _print_rows(predictions)
    status = bench.finish()
    if bench.args.json:
        _append_rows(bench.args.json, predictions, left_out)
    return status


def _add_rows(bench: Benchmark, kind: str, of_kind: list[Prediction]) -> None:
    errors = [p.error for p in of_kind]
    linear = [p.linear_error for p in of_kind]
    serial = best_serial_fraction(of_kind)
    amdahl = [p.amdahl_error(serial) for p in of_kind]
    name = f"{kind} ({len(of_kind)} rows)"
    median, p90 = statistics.median, percentile90
    bench.limit(f"{name}: median error", median(errors), MEDIAN_TARGET, unit="", formula="8 %")
    bench.limit(f"{name}: 90th percentile", p90(errors), P90_TARGET, unit="", formula="20 %")
    fitted = f"Amdahl, serial {serial:.2g} fitted on these rows"
    for peer, peer_errors in (("linear scaling", linear), (fitted, amdahl)):
        bench.add(f"{name}: median error", ours=[median(errors)], peer=[median(peer_errors)], peer_name=peer,
                  unit="", target=1.0)  # fmt: skip
        bench.add(f"{name}: 90th percentile", ours=[p90(errors)], peer=[p90(peer_errors)], peer_name=peer,
                  unit="", target=1.0)  # fmt: skip


def _print_families(scored: Sequence[Prediction]) -> None:
    by_family: dict[tuple[str, ...], list[Prediction]] = defaultdict(list)
    for prediction in scored:
        by_family[prediction.family].append(prediction)
    print(f"\n{'family':<108} {'rows':>4} {'median':>7} {'90 %':>7} {'linear':>7}")
    worst: Callable[[list[Prediction]], float] = lambda ps: -statistics.median(p.error for p in ps)  # noqa: E731
    for family, members in sorted(by_family.items(), key=lambda item: worst(item[1])):
        errors = [p.error for p in members]
        linear = statistics.median(p.linear_error for p in members)
        text = " | ".join(part for part in family if part)
        print(
            f"{text[:108]:<108} {len(members):>4} {_percent(statistics.median(errors)):>7} "
            f"{_percent(percentile90(errors)):>7} {_percent(linear):>7}"
        )


def _print_left_out(left_out: Sequence[tuple[Row, str]], training: Sequence[Prediction]) -> None:
    reasons: dict[str, list[int]] = defaultdict(list)
    for row, reason in left_out:
        reasons[reason].append(row.number)
    if training:
        reasons["training split"] = [p.line for p in training]
    print("\nrows that are not scored (line of the file):")
    for reason, lines in sorted(reasons.items(), key=lambda item: -len(item[1])):
        print(f"  {len(lines):>4}  {reason}: {', '.join(map(str, sorted(lines)))}")


def _print_rows(predictions: Sequence[Prediction]) -> None:
    print(f"\n{'line':>4} {'error':>7} {'linear':>7} {'published':>12} {'planned':>12} {'nodes':>5}  row")
    for p in sorted(predictions, key=lambda p: p.line):
        signed, linear = p.planned / p.published - 1, p.linear / p.published - 1
        print(
            f"{p.line:>4} {100 * signed:>+6.1f}% {100 * linear:>+6.1f}% {p.published:>12.5g} "
            f"{p.planned:>12.5g} {p.nodes:>5}  {p.system[:60]} | {p.family[0][:22]} | {p.family[3]}"
        )


def _append_rows(path: Path, predictions: Sequence[Prediction], left_out: Sequence[tuple[Row, str]]) -> None:
    import json

    result = json.loads(path.read_text(encoding="utf-8"))
    result["predictions"] = [
        {**asdict(p), "error": p.error, "training": bool(re.search(TRAINING, p.system))} for p in predictions
    ]
    result["not_scored"] = [
        {"line": row.number, "system": row.system, "reason": why} for row, why in left_out
    ]
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _from_environment() -> str:
    import os

    return os.environ.get("SHOAL_PUBLISHED_SCALING", "published_scaling.csv")


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


if __name__ == "__main__":
    raise SystemExit(main())
