"""Is a pretraining step faster than transformers' ``Trainer`` on the same sequences and processors?

Both sides train the same ALBERT in fp32 with torch's fused AdamW and clipping, in the same processes, by
turns: after each step of the Trainer comes one of shoal's. A step is everything from one batch to the next:
reading, forward, backward, averaging over the workers, clipping, optimizer. The Trainer's examples lie in
memory; ours are read and masked on the way. The global batch stays the same at 1 and 2 workers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.harness import Benchmark, peer_module
from benchmarks.machine import ForeignCores
from benchmarks.worker import command

TARGETS = {
    # (preset, compiled): ratio
    ("tiny", False): 2.0,
    ("tiny", True): 2.5,
    ("base", False): 1.05,
    ("base", True): 1.1,
}
GLOBAL_BATCH = {"tiny": 32, "base": 8}
SEQUENCE = {"tiny": 128, "base": 128}
MAX_FOREIGN = 0.3
MOST_RETAKEN = 2


def measure(
    preset: str, compiled: bool, num_workers: int, num_steps: int
) -> tuple[dict[str, list[float]], float]:
    """Run one case in processes of its own; return both sides' milliseconds a step, and foreign cores."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "samples.json"
        spec = {"preset": preset, "num_steps": num_steps, "compiled": compiled}
        argv = command("benchmarks.train_step_worker:main", spec, out)
        if num_workers > 1:
            argv = [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--nproc-per-node", str(num_workers), *argv[1:]),
            ]
        threads = str(max((os.cpu_count() or 1) // num_workers, 1))
        with ForeignCores() as watch:
            subprocess.run(argv, check=True, env={**os.environ, "OMP_NUM_THREADS": threads})
        return json.loads(out.read_text()), watch.cores or 0.0


def main() -> int:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--preset", choices=("tiny", "base"), action="append", help="only these")
    bench = Benchmark("train_step", options=options)
    peer_module("accelerate")
    for (preset, compiled), target in TARGETS.items():
        if bench.args.preset and preset not in bench.args.preset:
            continue
        for num_workers in (1, 2):
            num_steps = {"tiny": 24, "base": 8}[preset] // (2 if bench.quick else 1)
            samples, foreign = measure(preset, compiled, num_workers, num_steps)
            num_retaken = 0
            while foreign > MAX_FOREIGN and num_retaken < MOST_RETAKEN:
                samples, foreign = measure(preset, compiled, num_workers, num_steps)
                num_retaken += 1
            bench.add(
                f"ALBERT-{preset}, batch {GLOBAL_BATCH[preset]} × {SEQUENCE[preset]}, {num_workers} workers"
                + (", compiled" if compiled else ""),
                ours=samples["ours"],
                peer=samples["peer"],
                peer_name="transformers.Trainer",
                unit="ms",
                target=target,
                foreign_cores=[foreign],
                num_retaken=num_retaken,
            )
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
