"""Steps per second with weights on servers, against DDP whose workers step, on emulated hosts.

BERT-base's weights, AdamW, 4 worker hosts and 4 helper hosts on links of 200 Mbit/s; all sides over the same
backend by turns (``emulated_bert``). The weights of workers that step and of servers must be equal to the bit
at the end.

All hosts share the cores of this machine, so the workers' optimizer steps, which real hosts take at once,
wait for each other here. That would count for the servers, which take the step once for all. So a step on
workers is timed without their optimizers, plus what one of them takes while the others rest.

With clipping, weights come back after the backward pass, when links have nothing else to carry: there bf16
halves what is waited for.

``--copies`` measures instead what ``replicas=2`` costs: helpers send each sum to a worker that keeps a copy.
``--unclipped`` leaves the clipped sides out, half of the time.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.emulated_bert import Setup, by_turns
from benchmarks.harness import Benchmark

NUM_HOSTS = 4
COMPUTE = 0.5
TARGET, HALF_TARGET = 1.0, 1.15
LAYERS, QUICK_LAYERS = 12, 2
SIDES = ("workers", "servers", "clipped", "clipped, bf16")
COPIES = ("servers", "servers, copies", "clipped", "clipped, copies")
COPIES_TARGET = 0.95


def add_rows(bench: Benchmark, num_layers: int, sides: Sequence[str] = SIDES) -> None:
    setup = Setup(
        worker="benchmarks.served_worker:train", num_hosts=NUM_HOSTS, num_layers=num_layers, compute=COMPUTE
    )
    turns = by_turns(bench, setup, sides)
    turns.require_equal_weights([side for side in sides if side != "clipped, bf16"])
    turns.add_row(
        bench,
        f"{setup}, AdamW on {NUM_HOSTS} helpers",
        "servers",
        "workers",
        peer_name="DDP + shoal.optim.AdamW, same backend",
        target=TARGET,
    )
    if "clipped" in sides:
        turns.add_row(
            bench,
            f"{setup}, clipped, weights back in bf16",
            "clipped, bf16",
            "clipped",
            peer_name="the same, weights back in fp32",
            target=HALF_TARGET,
        )
    on_workers, on_servers = turns.results["workers"], turns.results["servers"]
    state_mb, seconds = on_workers[0]["state_bytes"] / 1e6, on_workers[0]["optimizer_s"]
    bench.limit(
        f"{setup}, optimizer state on a worker",
        max(result["state_bytes"] for result in on_servers),
        1.0,
        unit="bytes",
        formula=f"none; DDP's workers keep {state_mb:.0f} MB, and one alone steps {seconds:.2f} s",
        foreign_cores=turns.foreign_cores,
    )


def add_copies(bench: Benchmark, num_layers: int) -> None:
    setup = Setup(
        worker="benchmarks.served_worker:train", num_hosts=NUM_HOSTS, num_layers=num_layers, compute=COMPUTE
    )
    turns = by_turns(bench, setup, COPIES)
    turns.require_equal_weights(COPIES)
    for side in ("servers", "clipped"):
        turns.add_row(
            bench,
            f"{setup}, {side}, workers have copies",
            f"{side}, copies",
            side,
            peer_name="the same without copies",
            target=COPIES_TARGET,
        )


def main() -> int:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--layers", type=int, help=f"of the model; {LAYERS}, or {QUICK_LAYERS} with --quick")
    options.add_argument("--copies", action="store_true", help="what replicas=2 costs, and nothing else")
    options.add_argument("--unclipped", action="store_true", help="nothing clipped, in half of the time")
    bench = Benchmark("served", options=options)
    num_layers = bench.args.layers or (QUICK_LAYERS if bench.quick else LAYERS)
    if bench.args.copies:
        add_copies(bench, num_layers)
    else:
        add_rows(bench, num_layers, SIDES[:2] if bench.args.unclipped else SIDES)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
