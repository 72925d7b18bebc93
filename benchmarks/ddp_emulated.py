"""Steps per second of DDP on 8 emulated hosts, over gloo and over the two-hop backend.

Real models and gradients, random tokens, links of 200 Mbit/s. All hosts share the cores of this machine, and
their computation takes as long as everybody's; what it takes alone is shown. Where communication dominates,
8 helpers have a target: one sequence of 32 tokens for BERT, of 8 for ALBERT, which computes twelve times with
each weight that it sums (with 32 tokens a third of its step is computation). A step of BERT-base sums 440 MB,
which takes gloo half a minute: it gets fewer samples than ALBERT.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.comm_runs import watched
from benchmarks.ddp_emulated_worker import BATCH, COMPUTATION, memory_of
from benchmarks.harness import Benchmark
from benchmarks.worker import run_on_hosts
from shoal.launch.emulated import Cluster

NUM_HOSTS = 8
NIC = "200mbit"
MOST_MEMORY_GIB = 20.0
# The 4 helpers before the 8: a group measures helpers that no earlier group has measured.
BACKENDS: dict[str, int | None] = {"gloo": None, "colocated": 0, "4 helpers": 4, "8 helpers": 8}
TARGET = 1.4


@dataclass(frozen=True)
class Case:
    model: str
    sequence: int
    repeats: int
    quick_repeats: int
    has_target: bool


CASES = (
    Case("albert-base", 8, 5, 3, has_target=True),
    Case("albert-base", 32, 5, 1, has_target=False),
    Case("bert-base", 32, 3, 1, has_target=True),
)


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """Train on a cluster; return samples and memory, that of the helpers' servers included."""
    spec = {"model": case.model, "sequence": case.sequence, "backends": BACKENDS, "repeats": repeats}
    with Cluster(hosts=NUM_HOSTS, helpers=8, nic=NIC, announce_rates=False) as cluster:
        result: dict[str, Any] = run_on_hosts(cluster, "benchmarks.ddp_emulated_worker:measure", spec)
        result["memory"] += [memory_of(helper.pid) for helper in cluster.helpers]
    return result


def add_rows(bench: Benchmark, case: Case) -> None:
    count = case.quick_repeats if bench.quick else case.repeats
    result, foreign, num_retaken = watched(partial(measure, case, count), most_retaken=0)
    samples = {name: [1 / s for s in seconds] for name, seconds in result["samples"].items()}
    size = f"{result['gradient_bytes'] / 1e6:.0f} MB"
    for name in [*list(BACKENDS)[1:], COMPUTATION]:
        bench.add(
            f"{case.model} ({size}), {BATCH} × {case.sequence}, {name}",
            ours=samples[name],
            peer=samples["gloo"],
            peer_name="DDP over gloo",
            unit="steps/s",
            better="higher",
            target=TARGET if case.has_target and name == "8 helpers" else None,
            foreign_cores=[foreign],
            num_retaken=num_retaken,
        )
    own, shared = zip(*result["memory"], strict=True)
    bench.limit(
        f"{case.model}, {BATCH} × {case.sequence}, peak memory of all processes",
        (sum(own) + max(shared)) / 2**30,
        MOST_MEMORY_GIB,
        unit="GiB",
        formula="20 GiB for 8 workers and 8 helpers; the libraries that they share are counted once",
        foreign_cores=[foreign],
    )


def main() -> int:
    options = argparse.ArgumentParser(add_help=False)
    models = sorted({case.model for case in CASES})
    options.add_argument("--model", choices=models, action="append", help="only these")
    bench = Benchmark("ddp_emulated", options=options)
    for case in CASES:
        if not bench.args.model or case.model in bench.args.model:
            add_rows(bench, case)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
