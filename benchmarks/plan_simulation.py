"""Time and memory of the planner itself, for 8 to 131,072 workers.

Each size is a process of its own, which searches all algorithms and layouts with helpers, and asks which
assumption breaks first, for a model of 300 M parameters in 200 layers: what ``shoal plan`` does after it has
counted the model, which does not depend on the number of workers.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import replace

from benchmarks.harness import Benchmark
from shoal.decide.footprint import Activations, Numerics
from shoal.decide.workload import Layer, Workload
from shoal.planner.convergence import Convergence, at_any_batch
from shoal.planner.hardware import Catalog
from shoal.planner.prediction import Part, Training
from shoal.planner.scaling_limits import breaks_first
from shoal.planner.search import search

WORKERS_PER_HOST = 8
LIMITS_S = {8: 5.0, 256: 5.0, 2_048: 5.0, 16_384: 60.0, 131_072: 60.0}
MOST_MEMORY_MIB = 256.0
REPEATS = 5


def training_of(num_workers: int) -> Training:
    """Return a training of the model with 32 samples a worker."""
    layers = tuple(
        Layer(name=f"layer.{index}", num_parameters=1_500_000, forward_flops=5e8) for index in range(200)
    )
    kept = {Numerics.FP16: Activations(sample_bytes=1e8)}
    part = Part(
        workload=Workload(name="made", layers=layers, num_kernels=1200, activations=kept),
        convergence=Convergence(name="made", source="made", points=at_any_batch(1e8), largest_batch=1 << 16),
        global_batch=32 * num_workers,
        achieved_flops=4e13,
        basis="made",
    )
    return Training(recipe="made", parts=(part,))


def measure_here(num_workers: int) -> dict[str, float]:
    """Return processor seconds of the search and the process's peak of memory in MiB."""
    catalog = Catalog()
    workers = replace(catalog.machines("p3dn.24xlarge"), count=num_workers // WORKERS_PER_HOST)
    helpers = replace(catalog.machines("c5n.18xlarge"), count=max(workers.count // 4, 1))
    begin_s = time.process_time()
    best = search(training_of(num_workers), workers, [helpers])[0]
    breaks_first(training_of(num_workers).parts[0], workers, best.layouts[0], best.helpers)
    seconds = time.process_time() - begin_s
    return {"seconds": seconds, "mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def measure(num_workers: int) -> dict[str, float]:
    """Return what :func:`measure_here` gives in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.plan_simulation", "--here", str(num_workers)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[str, float] = json.loads(text)
    return found


def main() -> int:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--here", type=int, help="measure this number of workers in this process")
    if "--here" in sys.argv[1:]:
        print(json.dumps(measure_here(options.parse_args().here)))
        return 0
    bench = Benchmark("plan_simulation", options=options)
    for num_workers, limit_s in LIMITS_S.items():
        found = [measure(num_workers) for _ in range(2 if bench.quick else REPEATS)]
        name = f"{num_workers:,} workers"
        bench.limit(
            f"{name}: time", [run["seconds"] for run in found], limit_s, unit="s", formula="the design's"
        )
        bench.limit(
            f"{name}: peak memory",
            [run["mib"] for run in found],
            MOST_MEMORY_MIB,
            unit="MiB",
            formula="a small part of a laptop; most of it is Python and numpy",
        )
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
