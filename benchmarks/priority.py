"""Gain of urgent first layers and layer-wise steps for DDP on 8 emulated hosts.

BERT-base's weights on links of 200 Mbit/s with 8 helper hosts, plain DDP and ``shoal.comm.priority`` over
the same backend, by turns; each turn has processes of its own, or two sets of buckets would not fit. Plain
DDP hides communication behind the backward pass; with priorities it is hidden behind the next forward pass
too, so the gain depends on how long computing takes beside the sums: a case for each.

Computing is emulated, as an accelerator does it: time passes, in the proportions of BERT's layers and twice
as much backward as forward, and the processor is free for messages and sums. Eight workers that computed on
the 2 cores of this machine would keep them busy all the time, and then there is nothing to gain from doing
things at once. The weights are real, their gradients depend on all weights behind them, and both sides'
weights must be equal to the bit at the end.

A sample is the steady state: the seconds of a step between the ends of two ``step()``, after two that warm
up, so that each forward pass waits for the gradients of the step before.
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

NUM_HOSTS = NUM_HELPERS = 8
NIC, BITS_PER_S = "200mbit", 200e6
TARGET = 1.1

CASES = (0.5, 1.0)
"""Seconds of computing for each second of sums, as long as those take the link."""

SIDES = ("plain", "priority")


def measure(compute_s: float, num_layers: int, num_steps: int, side: str) -> dict[str, Any]:
    """Train on a cluster; return the seconds of ``num_steps`` steps and a digest of the weights then."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Cluster(hosts=NUM_HOSTS, helpers=NUM_HELPERS, nic=NIC, announce_rates=False) as cluster,
    ):
        out = Path(folder) / "result.json"
        spec = {
            "helpers": NUM_HELPERS, "layers": num_layers, "compute_s": compute_s, "steps": num_steps,
            "side": side,
        }  # fmt: skip
        run_on(cluster, [sys.executable, "-m", "benchmarks.priority_worker", json.dumps(spec), str(out)])
        result: dict[str, Any] = json.loads(out.read_text())
    return result


def add_row(bench: Benchmark, compute: float, num_layers: int) -> None:
    num_turns, num_steps = (1, 2) if bench.quick else (3, 4)
    num_bytes = bytes_of(parts_of_bert(num_layers))
    compute_s = compute * num_bytes * 8 / BITS_PER_S
    samples: dict[str, list[float]] = {side: [] for side in SIDES}
    weights, cores, num_retaken = set(), [], 0
    for turn in range(num_turns):
        for side in SIDES if turn % 2 == 0 else reversed(SIDES):
            result, foreign, again = watched(
                partial(measure, compute_s, num_layers, num_steps, side), most_retaken=0
            )
            samples[side] += [1 / s for s in result["seconds"]]
            weights.add(result["weights"])
            cores.append(foreign)
            num_retaken += again
    if len(weights) != 1:
        raise SystemExit(f"the weights are not the same after {num_steps} steps: {sorted(weights)}")
    bench.add(
        f"BERT-base ({num_layers} layers, {num_bytes / 1e6:.0f} MB), computing {compute_s:.1f} s a step",
        ours=samples["priority"],
        peer=samples["plain"],
        peer_name="plain DDP, same backend",
        unit="steps/s",
        better="higher",
        target=TARGET,
        foreign_cores=cores,
        num_retaken=num_retaken,
    )


def main() -> int:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--layers", type=int, default=12, help="of the model; BERT-base has 12")
    ratios = options.add_argument("--compute", type=float, nargs="+", default=CASES, metavar="RATIO")
    ratios.help = "seconds of computing for each second of sums"
    bench = Benchmark("priority", options=options)
    for compute in bench.args.compute[:1] if bench.quick else bench.args.compute:
        add_row(bench, compute, bench.args.layers)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
