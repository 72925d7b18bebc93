"""Gain of urgent first layers and layer-wise steps for DDP on 8 emulated hosts.

BERT-base's weights on links of 200 Mbit/s with 8 helper hosts, plain DDP and ``shoal.comm.priority`` over
the same backend, by turns. Plain DDP hides communication behind the backward pass; with priorities it is
hidden behind the next forward pass too, so the gain depends on how long computing takes beside the sums: a
case for each.

Computing is emulated (``emulated_bert``). The weights are real, their gradients depend on all weights behind
them, and both sides' weights must be equal to the bit at the end.

A sample is the steady state: the seconds of a step between the ends of two ``step()``, after two that warm
up, so that each forward pass waits for the gradients of the step before.
"""

from __future__ import annotations

import argparse

from benchmarks.emulated_bert import Setup, by_turns
from benchmarks.harness import Benchmark

NUM_HOSTS = 8
TARGET = 1.1

CASES = (0.5, 1.0)
"""Seconds of computing for each second of sums, as long as those take the link."""

SIDES = ("plain", "priority")


def add_row(bench: Benchmark, compute: float, num_layers: int) -> None:
    setup = Setup(
        worker="benchmarks.priority_worker:train", num_hosts=NUM_HOSTS, num_layers=num_layers, compute=compute
    )
    turns = by_turns(bench, setup, SIDES)
    turns.require_equal_weights(SIDES)
    turns.add_row(bench, str(setup), "priority", "plain", peer_name="plain DDP, same backend", target=TARGET)


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
