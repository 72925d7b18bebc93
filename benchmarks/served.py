"""Steps per second with weights on servers, against DDP whose workers step, on emulated hosts.

BERT-base's weights, AdamW, 4 worker hosts and 4 helper hosts on links of 200 Mbit/s; both sides over the same
backend by turns, each turn in processes of its own. Computing is emulated as in ``priority``: time passes and
the processor is free. Both sides' weights must be equal to the bit at the end.

All hosts share the cores of this machine, so the workers' optimizer steps, which real hosts take at once,
wait for each other here. That would count for the servers, which take the step once for all. So a step on
workers is timed without their optimizers, plus what one of them takes while the others rest.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.comm_runs import run_on, watched
from benchmarks.harness import Benchmark
from benchmarks.priority_shapes import bytes_of, parts_of_bert
from shoal.launch.emulated import Cluster

NUM_HOSTS = NUM_HELPERS = 4
NIC, BITS_PER_S = "200mbit", 200e6
COMPUTE = 0.5
"""Seconds of computing for each second of sums, as long as those take the link."""
TARGET = 1.0
SIDES = ("workers", "servers")


def measure(compute_s: float, num_layers: int, num_steps: int, side: str) -> dict[str, Any]:
    """Train on a cluster; return the worker's measurements."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Cluster(hosts=NUM_HOSTS, helpers=NUM_HELPERS, nic=NIC, announce_rates=False) as cluster,
    ):
        out = Path(folder) / "result.json"
        spec = {
            "helpers": NUM_HELPERS, "layers": num_layers, "compute_s": compute_s, "steps": num_steps,
            "side": side,
        }  # fmt: skip
        run_on(cluster, [sys.executable, "-m", "benchmarks.served_worker", json.dumps(spec), str(out)])
        result: dict[str, Any] = json.loads(out.read_text())
    return result


def add_rows(bench: Benchmark, num_layers: int) -> None:
    num_turns, num_steps = (1, 2) if bench.quick else (3, 4)
    num_bytes = bytes_of(parts_of_bert(num_layers))
    compute_s = COMPUTE * num_bytes * 8 / BITS_PER_S
    results: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    cores, num_retaken = [], 0
    for turn in range(num_turns):
        for side in SIDES if turn % 2 == 0 else reversed(SIDES):
            result, foreign, again = watched(
                partial(measure, compute_s, num_layers, num_steps, side), most_retaken=0
            )
            results[side].append(result)
            cores.append(foreign)
            num_retaken += again
    weights = {result["weights"] for side in SIDES for result in results[side]}
    if len(weights) != 1:
        raise SystemExit(f"the weights are not the same after {num_steps} steps: {sorted(weights)}")
    samples = {side: [1 / s for result in results[side] for s in result["seconds"]] for side in SIDES}
    optimizer_s = [result["optimizer_s"] for result in results["workers"]]
    state_bytes = results["workers"][0]["state_bytes"]
    model = f"BERT-base ({num_layers} layers, {num_bytes / 1e6:.0f} MB)"
    bench.add(
        f"{model}, AdamW on {NUM_HELPERS} helpers, computing {compute_s:.1f} s a step",
        ours=samples["servers"],
        peer=samples["workers"],
        peer_name="DDP + shoal.optim.AdamW, same backend",
        unit="steps/s",
        better="higher",
        target=TARGET,
        foreign_cores=cores,
        num_retaken=num_retaken,
    )
    bench.add(
        f"{model}, the optimizer's step on a worker alone",
        ours=[0.0],
        peer=optimizer_s,
        peer_name="DDP + shoal.optim.AdamW",
        unit="s",
        foreign_cores=cores,
    )
    bench.limit(
        f"{model}, optimizer state on a worker",
        results["servers"][0]["state_bytes"],
        1.0,
        unit="bytes",
        formula=f"none; workers that step keep {state_bytes / 1e6:.0f} MB",
        foreign_cores=cores,
    )


def main() -> int:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--layers", type=int, default=12, help="of the model; BERT-base has 12")
    bench = Benchmark("served", options=options)
    add_rows(bench, bench.args.layers)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
