"""Are automatic pipelines right, and as fast and as small as they can be on this machine?

Two ranks of one thread each. The rows are those of the issue: models trained with every gradient equal to one
process; idle shares simulated and traced against their formulas; bytes kept for backward against GPipe; step
times of the automatic split against equal layers, balanced parameters and every other boundary of blocks;
predicted against measured stage times; T5-3B planned on the meta device; checkpoints opened in other layouts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from typing import Any

from benchmarks.harness import MAX_FOREIGN_CORES, Benchmark
from benchmarks.machine import ForeignCores
from benchmarks.pipeline_checkpoints import loss_differences
from benchmarks.pipeline_simulated import add_bubbles, add_simulation_time
from benchmarks.pipeline_workers import NUM_MICRO_BATCHES, run_ranks, saved_bytes, split_times, traced_bubbles

WITHIN = 0.15
MOST_ERROR = 1e-6
PLAN_LIMIT_S, PLAN_LIMIT_GB, DEVICE_GB = 90.0, 4.0, 40.0
_MOST_RETAKEN = 3
PARTS = ("coverage", "simulated", "traced", "memory", "split", "plan", "checkpoint")


def watched(measure: Any, bench: Benchmark) -> tuple[Any, list[float], int]:
    """Call ``measure`` until nobody else used the machine, a bounded number of times."""
    retaken = 0
    for retaken in range(_MOST_RETAKEN + 1):  # noqa: B007
        with ForeignCores() as watch:
            found = measure()
        if bench.args.small or watch.cores is None or watch.cores <= MAX_FOREIGN_CORES:
            break
    return found, [] if watch.cores is None else [watch.cores], retaken


def add_traced_bubbles(bench: Benchmark) -> None:
    """Compare traced idle shares of equal stages on two ranks with (R-1)/(vM+R-1)."""
    steps = 3 if bench.quick else 12
    found, foreign, _ = watched(lambda: run_ranks(traced_bubbles, 2, bench.args.small, steps), bench)
    for name, num_virtual in (("gpipe", 1), ("1f1b", 1), ("interleaved", 2)):
        formula = 1 / (num_virtual * NUM_MICRO_BATCHES + 1)
        traced = statistics.median(found[0][name])
        bench.limit(
            f"traced bubble of {name}, 2 ranks x {num_virtual}: {traced:.4f}",
            abs(traced - formula) / formula,
            WITHIN,
            unit="of formula",
            formula=f"|traced - {formula:.4f}|, median of {steps} steps",
            foreign_cores=foreign,
        )


def add_memory(bench: Benchmark) -> None:
    """Compare the bytes that 1F1B keeps for backward with GPipe's: (R - r) / M of them on rank r."""
    for rank, found in enumerate(run_ranks(saved_bytes, 2, bench.quick or bench.args.small)):
        expected = (2 - rank) / NUM_MICRO_BATCHES
        part = found["1f1b"] / found["gpipe"]
        bench.limit(
            f"peak saved bytes, T5, rank {rank}: {part:.4f} of GPipe's {found['gpipe'] / 2**20:.1f} MiB",
            abs(part / expected - 1),
            0.01,
            unit="of formula",
            formula=f"{2 - rank}/{NUM_MICRO_BATCHES}",
        )


def add_split(bench: Benchmark) -> None:
    """Compare step times of T5's automatic split with those of other cuts."""
    repetitions = 3 if bench.quick else 12
    (first, _), foreign, retaken = watched(
        lambda: run_ranks(split_times, 2, bench.args.small, repetitions), bench
    )
    times = {name: [1000 * each for each in samples] for name, samples in first["times_s"].items()}
    ours = times["automatic"]
    spread = _spread(ours)
    for name, said in (("layers", "equal layers"), ("parameters", "parameter-balanced")):
        slack = (spread + _spread(times[name])) / statistics.median(times[name])
        bench.add(
            f"T5 step, cut {first['cuts']['automatic']} against {said} {first['cuts'][name]}",
            ours=ours,
            peer=times[name],
            peer_name=f"{said}, never behind within the spread",
            unit="ms",
            target=1 - slack,
            foreign_cores=foreign,
            num_retaken=retaken,
        )
    best = min(
        (name for name in times if name.startswith("block")), key=lambda n: statistics.median(times[n])
    )
    bench.add(
        f"T5 step against the best of {sum(n.startswith('block') for n in times)} boundaries, {best}",
        ours=ours,
        peer=times[best],
        peer_name="best cut found by trying all, within 5 %",
        unit="ms",
        target=0.95,
        foreign_cores=foreign,
        num_retaken=retaken,
    )
    for stage in range(2):
        predicted, measured = first["predicted_s"][stage], statistics.median(first["measured_s"][stage])
        bench.limit(
            f"time of stage {stage}: predicted {predicted * 1e3:.2f} ms, measured {measured * 1e3:.2f} ms",
            abs(predicted / measured - 1),
            WITHIN,
            unit="of measured",
            formula="of one micro-batch, forward and backward",
            foreign_cores=foreign,
        )


def _spread(samples: list[float]) -> float:
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return (high - low) / 2


def add_coverage(bench: Benchmark) -> None:
    """Count the models that train with every gradient equal to one process, and those of torch's tracer."""
    from benchmarks.pipeline_coverage import MODELS, traced_by_torch, trained_by_us

    models = MODELS[:2] if bench.args.small else MODELS
    ours = trained_by_us(models)
    theirs = traced_by_torch(models)
    print("ours: " + ", ".join(f"{name} {error:.1e}" for name, error in ours.items()))
    print("torch's pipeline(): " + "; ".join(f"{name}: {said}" for name, said in theirs.items()))
    num_ours = sum(error <= MOST_ERROR for error in ours.values())
    num_theirs = sum(said == "equal" for said in theirs.values())
    bench.limit(
        "models trained with every gradient equal",
        num_ours,
        len(models),
        unit="models",
        formula=f"all {len(models)}, fp32, 1e-6, interleaved 1F1B",
        better="higher",
    )
    bench.add(
        "models trained with every gradient equal, against the tracer",
        ours=[num_ours],
        peer=[num_theirs],
        peer_name="torch.distributed.pipelining.pipeline()",
        unit="models",
        better="higher",
    )


def add_plan(bench: Benchmark) -> None:
    """Plan T5-3B for 8 x 256 devices in a process of its own: seconds, memory, and what each stage needs."""
    command = [sys.executable, "-m", "benchmarks.pipeline_plan"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    rows = (
        ("seconds", PLAN_LIMIT_S, "s"),
        ("memory", PLAN_LIMIT_GB, "GB"),
        ("fullest stage", DEVICE_GB, "GB"),
    )
    for name, limit, unit in rows:
        bench.limit(
            f"T5-3B on meta, {found['layout']}: {name}",
            found[name],
            limit,
            unit=unit,
            formula="export, estimate, layout and schedule of 8 x 256 devices of 40 GB",
        )


def add_checkpoints(bench: Benchmark) -> None:
    """Add how far the losses are from the uninterrupted run's after a change of layout."""
    for layout, difference in loss_differences().items():
        bench.limit(
            f"losses after a checkpoint of 2 x 2 goes on as {layout}",
            difference,
            MOST_ERROR,
            unit="of loss",
            formula="largest difference from the uninterrupted run",
        )


def main() -> int:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--only", choices=PARTS, action="append", help="only these rows")
    options.add_argument("--small", action="store_true", help="tiny models, to try the benchmark itself")
    bench = Benchmark("pipeline", options=options)
    wanted = bench.args.only or PARTS
    steps = {
        "coverage": [add_coverage],
        "simulated": [add_bubbles, add_simulation_time],
        "traced": [add_traced_bubbles],
        "memory": [add_memory],
        "split": [add_split],
        "plan": [add_plan],
        "checkpoint": [add_checkpoints],
    }
    for name in PARTS:
        if name in wanted:
            for add in steps[name]:
                add(bench)
    return bench.finish()


if __name__ == "__main__":
    sys.exit(main())
