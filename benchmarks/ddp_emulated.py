"""How many steps a second does DDP take on 8 emulated hosts, over gloo and over the two-hop backend?

Real models and gradients, random tokens, links of 200 Mbit/s. The batch is small, so that communication
dominates: all hosts share the cores of this machine, and their computation takes as long as everybody's.
A step of BERT-base sums 440 MB, which takes gloo half a minute: it gets fewer samples than ALBERT.
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
from benchmarks.ddp_emulated_worker import BATCH, SEQUENCE, memory_of
from benchmarks.harness import Benchmark
from shoal.launch.emulated import Cluster

NUM_HOSTS = 8
NIC = "200mbit"
MOST_MEMORY_GIB = 20.0
# The 4 helpers before the 8: a group measures helpers that no earlier group has measured.
BACKENDS: dict[str, int | None] = {"gloo": None, "colocated": 0, "4 helpers": 4, "8 helpers": 8}
TARGETS = {"8 helpers": 1.4}
REPEATS = {
    # model: (full, --quick)
    "albert-base": (5, 3),
    "bert-base": (3, 1),
}


def measure(model: str, repeats: int) -> dict[str, Any]:
    """Train on a cluster; return samples and memory, that of the helpers' servers included."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Cluster(hosts=NUM_HOSTS, helpers=8, nic=NIC, announce_rates=False) as cluster,
    ):
        out = Path(folder) / "result.json"
        spec = json.dumps({"model": model, "backends": BACKENDS, "repeats": repeats})
        run_on(cluster, [sys.executable, "-m", "benchmarks.ddp_emulated_worker", spec, str(out)])
        result: dict[str, Any] = json.loads(out.read_text())
        result["memory"] += [memory_of(helper.pid) for helper in cluster.helpers]
    return result


def main() -> int:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--model", choices=tuple(REPEATS), action="append", help="only these")
    bench = Benchmark("ddp_emulated", options=options)
    for model, (repeats, quick_repeats) in REPEATS.items():
        if bench.args.model and model not in bench.args.model:
            continue
        count = quick_repeats if bench.quick else repeats
        result, foreign, num_retaken = watched(partial(measure, model, count), most_retaken=0)
        samples = {name: [1 / s for s in seconds] for name, seconds in result["samples"].items()}
        size = f"{result['gradient_bytes'] / 1e6:.0f} MB"
        for name in list(BACKENDS)[1:]:
            bench.add(
                f"{model} ({size}), {BATCH} × {SEQUENCE}, {name}",
                ours=samples[name],
                peer=samples["gloo"],
                peer_name="DDP over gloo",
                unit="steps/s",
                better="higher",
                target=TARGETS.get(name),
                foreign_cores=[foreign],
                num_retaken=num_retaken,
            )
        own, shared = zip(*result["memory"], strict=True)
        bench.limit(
            f"{model}, peak memory of all processes",
            (sum(own) + max(shared)) / 2**30,
            MOST_MEMORY_GIB,
            unit="GiB",
            formula="20 GiB for 8 workers and 8 helpers; the libraries that they share are counted once",
            foreign_cores=[foreign],
        )
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
