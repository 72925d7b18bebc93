"""Held-out losses of the tiny ALBERT whose steps do not wait for all workers, beside plain steps.

Four workers on as many emulated hosts pretrain on WikiText-2's validation and test files, by the recipe, with
three seeds. They share the cores of this machine, which makes them late by turns: with one backup a gradient
of four is dropped in every step. ``--steps N`` sets the length, 800 by default, a quarter of which warms up;
``--seeds`` and ``--modes`` choose among the runs. With ``--runs FOLDER`` they are kept there, and those that
have ended there are not made again: it takes about an hour, and can be taken in pieces.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from statistics import mean

from benchmarks.harness import Benchmark
from benchmarks.pretraining_gain import shoal
from benchmarks.worker import run_command_on
from shoal.env.settings import test_data_dir
from shoal.launch.emulated import Cluster
from shoal.record import FILE_NAME, Contributions, Evaluation, read_record

HOSTS = 4
SEEDS = (1, 2, 3)
STEPS, QUICK_STEPS = 800, 200
MODES: dict[str, tuple[tuple[str, ...], float]] = {
    "one backup worker": (("--servers.mode", "bounded", "--servers.wait-for", str(HOSTS - 1)), 0.005),
    "staleness 2, extrapolated": (
        ("--servers.mode", "bounded", "--servers.staleness", "2", "--servers.extrapolation", "1"),
        0.01,
    ),
    "staleness 2": (("--servers.mode", "bounded", "--servers.staleness", "2"), 0.01),
    "exchanges every 20 steps": (
        (
            *("--servers.mode", "local", "--servers.local-steps", "20"),
            *("--servers.outer-rate", "1", "--servers.outer-momentum", "0.3"),
        ),
        0.01,
    ),
    "the same in 4 fragments, 2 steps late": (
        (
            *("--servers.mode", "local", "--servers.local-steps", "20"),
            *("--servers.fragments", "4", "--servers.delay", "2"),
            *("--servers.outer-rate", "1", "--servers.outer-momentum", "0.3"),
        ),
        0.01,
    ),
}
"""By name: options of the recipe, and the largest loss above that of plain steps, relative to it."""
DEFAULT = [name for name in MODES if name != "staleness 2"]


def train(text: Path, run: Path, seed: int, steps: int, options: tuple[str, ...]) -> float:
    """Pretrain, if the run has not ended, and return the loss on held-out text after the last step."""
    if (loss := loss_of(run)) is not None:
        return loss
    if run.exists():
        shutil.rmtree(run)  # it was cut off
    argv = [
        sys.executable, "-m", "shoal.recipes.albert", "--preset", "tiny", "--data.path", str(text),
        "--train.total-steps", str(steps), "--optim.warmup-steps", str(steps // 4),
        "--train.seed", str(seed), "--run.dir", str(run), "--run.no-save",
        "--run.log-frequency", str(steps // 4), "--run.validation-frequency", str(steps),
        "--distributed.backend", "shoal", *options,
    ]  # fmt: skip
    with Cluster(hosts=HOSTS, helpers=0) as cluster:
        run_command_on(cluster, argv)
    loss = loss_of(run)
    assert loss is not None
    return loss


def loss_of(run: Path) -> float | None:
    """Print whose gradients a run has used, and return its last loss; ``None`` if it has not ended."""
    rows = read_record(run) if (run / FILE_NAME).exists() else []
    last = [row for row in rows if isinstance(row, Evaluation)]
    if not last:
        return None
    for row in rows:
        if isinstance(row, Contributions):
            print(f"  step {row.step}: used {row.used}, dropped {row.dropped}, staleness {row.staleness}")
    return last[-1].metrics["mlm_loss"] + last[-1].metrics["sop_loss"]


def main() -> int:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--steps", type=int, help="optimizer steps of each run")
    options.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    options.add_argument("--modes", nargs="+", choices=list(MODES), default=DEFAULT)
    options.add_argument("--runs", type=Path, help="folder that keeps the runs")
    bench = Benchmark("losses", options=options)
    data = test_data_dir()
    steps: int = bench.args.steps or (QUICK_STEPS if bench.quick else STEPS)
    with tempfile.TemporaryDirectory() as temporary:
        folder = bench.args.runs or Path(temporary)
        text = folder / "text"
        if not text.exists():
            files = [data / "wikitext2" / f"{name}.txt" for name in ("valid", "test")]
            shoal(
                "prepare", "text", *files, "--out", text, "--tokenizer", "wordpiece", "--vocab-size", "2048"
            )
        modes = {"plain": (), **{name: MODES[name][0] for name in bench.args.modes}}
        losses: dict[str, list[float]] = {name: [] for name in modes}
        for seed in bench.args.seeds:
            for name, given in modes.items():
                run = folder / f"{name.replace(',', '').replace(' ', '-')}-{steps}-{seed}"
                losses[name].append(train(text, run, seed, steps, given))
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
