"""What do urgent first layers and layer-wise steps bring DDP on 8 emulated hosts?

BERT-base's shape on links of 200 Mbit/s, plain DDP and ``shoal.comm.priority`` over the same backend, by
turns; each turn has processes of its own, or two sets of buckets would not fit. Plain DDP hides communication
behind the backward pass; with priorities it is hidden behind the next forward pass too, so the gain depends
on how long a forward pass takes beside the sums. All hosts share the cores of this machine, and their forward
passes take as long as everybody's: 128 tokens on 2 cores take what 512 would with a core a host.

A sample is the steady state: the seconds of a step between the ends of two ``step()``, after one that warms
up, so that each forward pass waits for the gradients of the step before. Both sides' weights must be equal at
the end.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.comm_runs import run_on, watched
from benchmarks.harness import Benchmark
from shoal.launch.emulated import Cluster

NUM_HOSTS = 8
NIC = "200mbit"
TARGET = 1.1


@dataclass(frozen=True)
class Case:
    """``num_helpers`` helper hosts, and one sequence of so many tokens a worker."""

    num_helpers: int
    sequence: int
    has_target: bool


CASES = (Case(8, 128, has_target=True), Case(0, 128, has_target=False))
SIDES = ("plain", "priority")


def measure(case: Case, num_layers: int, num_steps: int, side: str) -> dict[str, Any]:
    """Train on a cluster; return the seconds of ``num_steps`` steps and a digest of the weights then."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Cluster(hosts=NUM_HOSTS, helpers=case.num_helpers, nic=NIC, announce_rates=False) as cluster,
    ):
        out = Path(folder) / "result.json"
        spec = {
            "helpers": case.num_helpers, "sequence": case.sequence, "layers": num_layers, "steps": num_steps,
            "side": side,
        }  # fmt: skip
        run_on(cluster, [sys.executable, "-m", "benchmarks.priority_worker", json.dumps(spec), str(out)])
        result: dict[str, Any] = json.loads(out.read_text())
    return result


def add_row(bench: Benchmark, case: Case, num_layers: int) -> None:
    num_turns, num_steps = (1, 2) if bench.quick else (3, 4)
    samples: dict[str, list[float]] = {side: [] for side in SIDES}
    weights, cores, num_retaken = set(), [], 0
    for turn in range(num_turns):
        for side in SIDES if turn % 2 == 0 else reversed(SIDES):
            result, foreign, again = watched(
                partial(measure, case, num_layers, num_steps, side), most_retaken=0
            )
            samples[side] += [1 / s for s in result["seconds"]]
            weights.add(result["weights"])
            cores.append(foreign)
            num_retaken += again
    if len(weights) != 1:
        raise SystemExit(f"the weights are not the same after {num_steps} steps: {sorted(weights)}")
    size = f"{num_layers} layers, {result['gradient_bytes'] / 1e6:.0f} MB"
    bench.add(
        f"BERT-base ({size}), 1 × {case.sequence} tokens, {case.num_helpers} helpers",
        ours=samples["priority"],
        peer=samples["plain"],
        peer_name="plain DDP, same backend",
        unit="steps/s",
        better="higher",
        target=TARGET if case.has_target else None,
        foreign_cores=cores,
        num_retaken=num_retaken,
    )


def main() -> int:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--layers", type=int, default=12, help="of the model; BERT-base has 12")
    options.add_argument("--sequence", type=int, help="tokens a worker instead of the cases'")
    bench = Benchmark("priority", options=options)
    for case in CASES[:1] if bench.quick else CASES:
        sequence = bench.args.sequence or case.sequence
        add_row(bench, Case(case.num_helpers, sequence, case.has_target), bench.args.layers)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
