"""Time until a small Llama predicts held-out text within a fixed number of bits per byte, on two cores.

The ``tiny`` preset of ``shoal train lm`` on WikiText-2's validation and test files, by AdamW and by Muon at
several rates. Each way trains once, with two workers, until the held-out text takes at most the target, or to
its last step. The quickest is repeated with other seeds: the row has its times, evaluations included.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.harness import Benchmark
from benchmarks.machine import ForeignCores
from benchmarks.pretraining_gain import shoal
from shoal.env.settings import test_data_dir
from shoal.record import Evaluation, Target, read_record

BITS, QUICK_BITS = 2.0, 2.5
MOST_S = 600.0
WAYS = {
    "AdamW, rate 4e-3": (),
    "AdamW, rate 8e-3": ("--optim.learning-rate", "8e-3"),
    "Muon, rate 4e-3": ("--optim.optimizer", "muon"),
    "Muon, rate 8e-3": ("--optim.optimizer", "muon", "--optim.learning-rate", "8e-3"),
}
SEEDS = (2, 3, 4)


def train(text: Path, run: Path, bits: float, seed: int, options: tuple[str, ...]) -> tuple[float, float]:
    """Train until the target; return the seconds, infinite if it was missed, and the last bits per byte."""
    shoal(
        "train", "lm", "--preset", "tiny", "--data.path", text, "--run.dir", run, "--run.no-save",
        "--run.validation-frequency", "25", "--run.until", f"bits_per_byte<={bits}",
        "--train.seed", str(seed), "--workers", "2", *options,
    )  # fmt: skip
    rows = read_record(run)
    reached = [row.seconds for row in rows if isinstance(row, Target)]
    last = [row.metrics["bits_per_byte"] for row in rows if isinstance(row, Evaluation)][-1]
    return (reached[0] if reached else float("inf")), last


def main() -> int:
    options = argparse.ArgumentParser(add_help=False)
    options.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), help="only these")
    bench = Benchmark("lm", options=options)
    bits = QUICK_BITS if bench.quick else BITS
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = [test_data_dir() / "wikitext2" / f"{part}.txt" for part in ("valid", "test")]
        shoal("prepare", "text", *files, "--out", folder / "text", "--vocab-size", "2048")
        seconds = {}
        for number, way in enumerate(bench.args.ways):
            seconds[way], last = train(folder / "text", folder / f"way-{number}", bits, 1, WAYS[way])
            print(f"{way}: {seconds[way]:.0f} s to {bits} bits per byte, {last:.3f} at the end", flush=True)
        best = min(seconds, key=seconds.__getitem__)
        samples, foreign = [seconds[best]], []
        for seed in SEEDS[: 1 if bench.quick else None]:
            with ForeignCores() as watch:
                samples.append(train(folder / "text", folder / f"seed-{seed}", bits, seed, WAYS[best])[0])
            foreign += [] if watch.cores is None else [watch.cores]
    bench.limit(
        f"Llama of 0.7 M parameters to {bits} bits per byte of held-out WikiText, {best}",
        samples,
        MOST_S,
        unit="s",
        formula="ten minutes, for the best of these ways with every seed",
        foreign_cores=foreign,
    )
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
