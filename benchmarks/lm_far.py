"""Local steps of a small Llama on 8 emulated hosts with slow links, beside plain steps: tokens/s and loss.

Over links of 50 Mbit/s the gradients of GPT-2 with 124 million parameters cross in some 140 s, beside 0.4 s
in which 8 accelerators compute its batch of 480 blocks. The ``tiny`` preset has a 190th of the bytes and
computes for about 0.1 s on the cores that all hosts here share, so links have 5 Mbit/s: still four times as
fast, beside the computation, as those of GPT-2. Losses do not depend on links: those runs have none.
``--only`` chooses a part.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import mean

from benchmarks.harness import Benchmark
from benchmarks.pretraining_gain import shoal
from benchmarks.worker import run_command_on
from shoal.env.settings import test_data_dir
from shoal.launch.emulated import Cluster
from shoal.record import Evaluation, Step, read_record

HOSTS, BLOCK = 8, 128
RATE = "5mbit"
EVERY = 50
LOCAL = (
    *("--servers.mode", "local", "--servers.local-steps", str(EVERY)),
    *("--servers.outer-rate", "1", "--servers.outer-momentum", "0.3"),
)
SEEDS = (1, 2, 3)
STEPS, QUICK_STEPS = 800, 200
PLAIN_STEPS = 8
TARGET, MOST_LOSS = 20.0, 0.01


def train(text: Path, run: Path, *options: str, rate: str | None = None) -> Path:
    """Train by the recipe on a cluster; return the run."""
    argv = [
        sys.executable, "-m", "shoal.recipes.lm", "--preset", "tiny", "--data.path", str(text),
        "--run.dir", str(run), "--run.no-save", "--distributed.backend", "shoal", *options,
    ]  # fmt: skip
    with Cluster(hosts=HOSTS, helpers=0, nic=rate) as cluster:
        run_command_on(cluster, argv)
    return run


def tokens_per_s(text: Path, run: Path, steps: int, every: int, *options: str) -> list[float]:
    """Return the rates of a run over slow links, every so many steps, without the first."""
    numbers = (
        "--train.total-steps",
        str(steps),
        "--optim.warmup-steps",
        "1",
        "--run.log-frequency",
        str(every),
    )
    validation = ("--run.validation-frequency", str(steps), "--run.validation-samples", "8")
    train(text, run, *numbers, *validation, *options, rate=RATE)
    rows = [row for row in read_record(run) if isinstance(row, Step)]
    return [row.samples_per_s * BLOCK for row in rows[1:]]


def loss(text: Path, run: Path, steps: int, seed: int, *options: str) -> float:
    """Return the held-out loss after a run."""
    numbers = (
        "--train.total-steps",
        str(steps),
        "--train.seed",
        str(seed),
        "--run.log-frequency",
        str(EVERY),
    )
    train(text, run, *numbers, "--run.validation-frequency", str(steps), *options)
    return [row.metrics["lm_loss"] for row in read_record(run) if isinstance(row, Evaluation)][-1]


def main() -> int:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--only", choices=("speed", "loss"), help="this part")
    options.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    bench = Benchmark("lm_far", options=options)
    steps = QUICK_STEPS if bench.quick else STEPS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = folder / "text"
        files = [test_data_dir() / "wikitext2" / f"{part}.txt" for part in ("valid", "test")]
        shoal("prepare", "text", *files, "--out", text, "--vocab-size", "2048")
        if bench.args.only != "loss":
            bench.add(
                f"tokens/s of {HOSTS} hosts at 5 Mbit/s, exchanges every {EVERY} steps",
                ours=tokens_per_s(text, folder / "local", 3 * EVERY, EVERY, *LOCAL),
                peer=tokens_per_s(text, folder / "plain", PLAIN_STEPS, 2),
                peer_name="plain steps (DDP)",
                unit="tokens/s",
                target=TARGET,
                better="higher",
            )
        if bench.args.only != "speed":
            above = []
            for seed in bench.args.seeds:
                plain = loss(text, folder / f"plain-{seed}", steps, seed)
                local = loss(text, folder / f"local-{seed}", steps, seed, *LOCAL)
                above.append(local / plain - 1)
                print(f"seed {seed}: {plain:.4f}, with local steps {local:.4f}", flush=True)
            bench.limit(
                f"held-out loss after {steps} steps above that of plain steps",
                mean(above),
                MOST_LOSS,
                unit="relative",
                formula=f"mean of {len(above)} seeds; {', '.join(f'{each:+.2%}' for each in above)}",
            )
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
