"""The planner against published scaling: given the smallest scale of a family, predict the others.

    python -m benchmarks.plan_published --json FILE
    python -m benchmarks.plan_published --page docs/published.md     # five posts only

A family is model × hardware × NIC × metric × publication (``Row.family``). Its row at the smallest
scale gives one figure, the FLOP/s that the accelerators achieve; everything else is physics and published
facts, but for what several hosts cost beyond them. That is fitted for each publisher, then for each
generation of accelerators, without its rows, and so is the serial fraction of Amdahl's law, one a kind of
metric. Linear scaling stands beside both.

Every row that is not scored is listed with the reason. The families of the training split below are not.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks import plan_equal, plan_intervals, plan_posts
from benchmarks.harness import Benchmark
from benchmarks.plan_families import Prediction, predictions_of
from benchmarks.plan_intervals import Judged
from benchmarks.plan_rows import KINDS, ROWS, Row, read_rows
from shoal.errors import UsageError
from shoal.planner.hardware import Catalog

MEDIAN_TARGET, P90_TARGET = 0.08, 0.20


def percentile90(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[min(math.ceil(0.9 * len(ordered)) - 1, len(ordered) - 1)]


def main(argv: Sequence[str] | None = None) -> int:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--rows", type=Path, default=ROWS, help="the CSV file of published rows")
    options.add_argument("--only", metavar="REGEX", default="", help="systems to read; default: all")
    options.add_argument("--list", action="store_true", help="print every row, scored or not")
    options.add_argument(
        "--residuals", type=Path, help="write the residuals that the planner's intervals rest on"
    )
    options.add_argument("--page", type=Path, help="write the page of the posts' results and do no more")
    bench = Benchmark("plan_published", argv, options)
    if bench.args.page:
        bench.args.page.write_text(plan_posts.page(plan_posts.read_facts(), Catalog()), encoding="utf-8")
        return 0
    try:
        rows = read_rows(bench.args.rows)
        rows = [row for row in rows if re.search(bench.args.only, row.system)]
        found = predictions_of(rows, Catalog())
    except UsageError as error:
        raise SystemExit(f"plan_published: {error}") from None
    predictions, left_out = found.scored, found.left_out
    training = [p for p in predictions if p.training]
    scored = [p for p in predictions if not p.training]
    residuals = plan_intervals.residuals_of(scored, found.given)
    folds = {name: plan_intervals.judged(scored, residuals, name) for name in ("publisher", "generation")}
    for fold, judged in folds.items():
        for kind in KINDS:
            if of_kind := [each for each in judged if each.prediction.kind == kind]:
                _add_rows(bench, f"{kind}, {fold} left out", of_kind)
    _add_equal(bench, plan_equal.equals_of(folds["publisher"], rows))
    plan_intervals.score(bench, folds)
    print(
        f"\n{len(scored)} rows of {len({p.publisher for p in scored})} publishers and "
        f"{len({p.generation for p in scored})} generations in {len({p.family for p in scored})} families; "
        f"{len(residuals)} residuals. Parameters: a rate a family; in each fold the cost of several hosts, "
        f"{plan_intervals.NUM_WIDTHS} widths, a correlation and a quantile"
    )
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
    if bench.args.residuals:
        plan_intervals.write(bench.args.residuals, residuals)
    status = bench.finish()
    if bench.args.json:
        _append_rows(bench.args.json, predictions, left_out)
    return status


def _add_rows(bench: Benchmark, kind: str, judged: Sequence[Judged]) -> None:
    errors = [each.error for each in judged]
    name = f"{kind} ({len(errors)} rows)"
    bench.limit(f"{name}: median error", statistics.median(errors), MEDIAN_TARGET, unit="", formula="8 %")
    bench.limit(f"{name}: 90th percentile", percentile90(errors), P90_TARGET, unit="", formula="20 %")
    for peer, peer_errors in (
        ("linear scaling", [each.prediction.linear_error for each in judged]),
        ("Amdahl, fitted on the other rows", [each.amdahl_error for each in judged]),
    ):
        for text, figure in (("median error", statistics.median), ("90th percentile", percentile90)):
            bench.add(f"{name}: {text}", ours=[figure(errors)], peer=[figure(peer_errors)], peer_name=peer,
                      unit="", target=1.0)  # fmt: skip


def _add_equal(bench: Benchmark, equals: Sequence[plan_equal.Equal]) -> None:
    """Add how well other publications predict a row that they have measured on equal hardware."""
    for kind in KINDS:
        if not (of_kind := [each for each in equals if each.judged.prediction.kind == kind]):
            continue
        name = f"{kind}, published by others, too ({len(of_kind)} rows)"
        ours, others = [each.judged.error for each in of_kind], [each.by_others for each in of_kind]
        for text, figure in (("median error", statistics.median), ("90th percentile", percentile90)):
            bench.add(f"{name}: {text}", ours=[figure(ours)], peer=[figure(others)],
                      peer_name="another's equal run", unit="")  # fmt: skip


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
    result = json.loads(path.read_text(encoding="utf-8"))
    result["predictions"] = [{**asdict(p), "error": p.error} for p in predictions]
    result["not_scored"] = [
        {"line": row.number, "system": row.system, "reason": why} for row, why in left_out
    ]
    path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


if __name__ == "__main__":
    raise SystemExit(main())
