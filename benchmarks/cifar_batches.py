"""Accuracy with large batches: CIFAR-10 with batches of 256, 4,096 and 16,384, SGD and LARS.

The command that a user gives, `shoal train resnet50 --preset cifar10`, with the rate in proportion to the
batch, or LARS's own; the same epochs for all, several seeds. IMAGES is a directory of `shoal prepare images`.
With ``--runs DIR`` finished runs are kept and read again, and interrupted ones go on, so a day's measurement
may be cut into parts; of a finished run its record is enough, so those in results/ may be given too.
``--lanes 2`` has two runs side by side, each with half of the processors, which ends sooner than one after
another; ``--report FILE`` writes the page with the curves of the first seed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from benchmarks.harness import Benchmark
from shoal import record
from shoal.record import read_record

MOST_S = 1_800.0
"""A run ends within half an hour on two processors, or within an hour on one."""


@dataclass(frozen=True)
class Case:
    """One line of the table: how a run differs from the preset, and the accuracy that it must reach."""

    name: str
    batch: int
    optimizer: str
    options: tuple[str, ...] = ()
    target: float | None = None

    @property
    def key(self) -> str:
        return f"{self.optimizer}-{self.batch}"


LARS = ("--optim.optimizer", "lars", "--optim.trust-coefficient", "0.04", "--optim.weight-decay", "5e-4")
CASES = (
    Case("SGD, batch 256", 256, "sgd", target=0.90),
    Case("SGD, batch 4,096", 4_096, "sgd", target=0.86),
    Case("SGD, batch 16,384", 16_384, "sgd"),
    Case("LARS, batch 4,096", 4_096, "lars", (*LARS, "--optim.learning-rate", "1.6")),
    Case("LARS, batch 16,384", 16_384, "lars", (*LARS, "--optim.learning-rate", "2.4")),
)


def train(case: Case, images: Path, run_dir: Path, seed: int, threads: int, more: Sequence[str]) -> None:
    """Train, or go on with what is there; nothing is done where the run has ended."""
    if (run_dir / record.FILE_NAME).is_file() and isinstance(read_record(run_dir)[-1], record.End):
        return
    command = [
        sys.executable, "-m", "shoal", "train", "resnet50", "--preset", "cifar10",
        "--data.path", str(images.absolute()), "--run.dir", str(run_dir), "--run.name", case.name,
        "--train.seed", str(seed), "--train.global-batch-size", str(case.batch),
        "--data.decode-threads", str(threads), *case.options, *more,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if result.returncode:
        raise SystemExit(f"{' '.join(command)}\n{result.stdout[-2000:]}\n{result.stderr[-2000:]}")


def outcome(run_dir: Path) -> tuple[float, float]:
    """Return the accuracy of the last evaluation, and the seconds of all steps and evaluations.

    They are added up, since a run that was interrupted knows no time from its beginning to its end.
    """
    rows = read_record(run_dir)
    evaluations = {row.step: row for row in rows if isinstance(row, record.Evaluation)}
    lines = {row.step: row for row in rows if isinstance(row, record.Step)}
    seconds, before = sum(row.seconds for row in evaluations.values()), 0
    for step, row in sorted(lines.items()):
        seconds += row.step_s * (step - before)
        before = step
    return evaluations[before].metrics["top1_accuracy"], seconds


def main() -> int:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("images", type=Path, metavar="IMAGES", help="prepared images of CIFAR-10")
    options.add_argument("--runs", type=Path, metavar="DIR", help="keep the runs here, and go on with them")
    options.add_argument("--report", type=Path, metavar="FILE", help="write the page with the curves")
    options.add_argument("--seeds", type=int, default=3, help="runs of each case (default: 3)")
    options.add_argument("--lanes", type=int, default=1, help="runs side by side (default: 1)")
    options.add_argument(
        "--only", nargs="+", metavar="CASE", help=f"some of {', '.join(case.key for case in CASES)}"
    )
    bench = Benchmark("cifar_batches", options=options)
    args = bench.args
    cases = [case for case in CASES if not args.only or case.key in args.only]
    seeds = range(1, 2 if bench.quick else args.seeds + 1)
    more = ("--train.total-epochs", "2", "--optim.warmup-epochs", "1") if bench.quick else ()
    threads = max(1, len(os.sched_getaffinity(0)) // args.lanes)
    with tempfile.TemporaryDirectory() as name:
        runs = args.runs or Path(name)
        with ThreadPoolExecutor(args.lanes) as lanes:
            started = [
                lanes.submit(train, case, args.images, runs / f"{case.key}-{seed}", seed, threads, more)
                for seed, case in product(seeds, cases)
            ]
            try:
                for run in started:
                    run.result()
            finally:
                lanes.shutdown(wait=False, cancel_futures=True)  # those not begun, where one has failed
        for case in cases:
            found = [outcome(runs / f"{case.key}-{seed}") for seed in seeds]
            accuracies, seconds = zip(*found, strict=True)
            reference = case.target or 0.1
            formula = "target" if case.target else "chance"
            bench.limit(
                f"{case.name}: top-1", accuracies, reference, unit="of 1", formula=formula, better="higher"
            )
            most_s = MOST_S * max(1, 2 / threads)
            bench.limit(f"{case.name}: time", seconds, most_s, unit="s", formula=f"{threads} threads")
        if args.report:
            chosen = [str(runs / f"{case.key}-1") for case in cases]
            command = [sys.executable, "-m", "shoal", "report", *chosen, "--out", str(args.report.absolute())]
            subprocess.run(command, check=True)
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
