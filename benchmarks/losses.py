"""Held-out losses of the tiny ALBERT whose steps do not wait for all workers, beside plain steps.

Four workers on as many emulated hosts pretrain on WikiText-2's validation and test files, by the recipe, with
three seeds. They share the cores of this machine, which makes them late by turns: with one backup a gradient
of four is dropped in every step. ``--steps N`` sets the length, 800 by default, a quarter of which warms up;
``--seeds`` and ``--modes`` choose among the runs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import mean

from benchmarks.comm_runs import run_on
from benchmarks.harness import Benchmark
from benchmarks.pretraining_gain import shoal
from shoal.env import test_data_dir
from shoal.launch.emulated import Cluster
from shoal.record import Contributions, Evaluation, read_record

HOSTS = 4
SEEDS = (1, 2, 3)
STEPS, QUICK_STEPS = 800, 200
MODES: dict[str, tuple[tuple[str, ...], float]] = {
    "one backup worker": (("--distributed.wait-for", str(HOSTS - 1)), 0.005),
    "staleness 2": (("--distributed.staleness", "2"), 0.01),
    "exchanges every 20 steps": (
        (
            *("--distributed.local-steps", "20"),
            *("--distributed.outer-rate", "1", "--distributed.outer-momentum", "0.3"),
        ),
        0.01,
    ),
}
"""By name: options of the recipe, and the largest loss above that of plain steps, relative to it."""


def train(text: Path, run: Path, seed: int, steps: int, options: tuple[str, ...]) -> float:
    """Pretrain and return the loss on held-out text after the last step."""
    argv = [
        sys.executable, "-m", "shoal.recipes.albert", "--preset", "tiny", "--data.path", str(text),
        "--train.total-steps", str(steps), "--optim.warmup-steps", str(steps // 4),
        "--train.seed", str(seed), "--run.dir", str(run), "--run.no-save",
        "--run.log-frequency", str(steps // 4), "--run.validation-frequency", str(steps),
        "--distributed.backend", "shoal", *options,
    ]  # fmt: skip
    with Cluster(hosts=HOSTS, helpers=0) as cluster:
        run_on(cluster, argv)
    rows = read_record(run)
    for row in rows:
        if isinstance(row, Contributions):
            print(f"  step {row.step}: used {row.used}, dropped {row.dropped}, staleness {row.staleness}")
    (last,) = [row for row in rows if isinstance(row, Evaluation)]
    return last.metrics["mlm_loss"] + last.metrics["sop_loss"]


def main() -> int:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--steps", type=int, help="optimizer steps of each run")
    options.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    options.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    bench = Benchmark("losses", options=options)
    data = test_data_dir()
    steps: int = bench.args.steps or (QUICK_STEPS if bench.quick else STEPS)
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "text"
        files = [data / "wikitext2" / f"{name}.txt" for name in ("valid", "test")]
        shoal("prepare", "text", *files, "--out", text, "--tokenizer", "wordpiece", "--vocab-size", "2048")
        modes = {"plain": (), **{name: MODES[name][0] for name in bench.args.modes}}
        losses: dict[str, list[float]] = {name: [] for name in modes}
        for seed in bench.args.seeds:
            for name, given in modes.items():
                losses[name].append(train(text, Path(folder) / f"{name}-{seed}", seed, steps, given))
                print(f"seed {seed}, {name}: {losses[name][-1]:.4f}", flush=True)
    for name in bench.args.modes:
        above = [loss / plain - 1 for loss, plain in zip(losses[name], losses["plain"], strict=True)]
        bench.limit(
            f"held-out loss after {steps} steps above that of plain steps, {name}",
            mean(above),
            MODES[name][1],
            unit="relative",
            formula=f"mean of {len(above)} seeds; {', '.join(f'{each:+.2%}' for each in above)}",
        )
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
