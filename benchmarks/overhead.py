"""Cost of metrics and asynchronous checkpoints, one each 50 steps of ALBERT-base.

Blocks of steps with one line of the record (TensorBoard included) and one checkpoint alternate with blocks
without. The checkpoint's thread works while the steps after it run, so a block is long enough for it to end.
The difference of two blocks, over the time of 50 plain steps, is what is added.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.harness import Benchmark
from benchmarks.machine import ForeignCores
from benchmarks.train_step_worker import opened, our_steps, settings
from shoal.recipes.prepared_text import write_synthetic_text
from shoal.train.run import Run

STEPS_BETWEEN = 50
BLOCK_STEPS = 6
LIMIT_PERCENT = 2.0


def block_s(run: Run, steps: Iterator[int], write: bool) -> float:
    """Return the seconds of a block, with its line and checkpoint if asked."""
    begin_s = time.perf_counter()
    for number in range(BLOCK_STEPS):
        run.lines = [run.step + 1] if write and number == 0 else []
        next(steps)
        if write and number == 0:
            run.save()
    return time.perf_counter() - begin_s


def main() -> int:
    bench = Benchmark("overhead")
    num_pairs = 4 if bench.quick else 8
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = settings("base", folder, compiled=False)
        write_synthetic_text(folder, config.model.vocab_size)
        added: list[float] = []
        foreign: list[float] = []
        with opened(config) as (run, reader):
            steps = our_steps(run, config, reader)
            block_s(run, steps, write=True)
            for _ in range(num_pairs):
                with ForeignCores() as watch:
                    plain_s = block_s(run, steps, write=False)
                    with_s = block_s(run, steps, write=True)
                foreign.append(watch.cores or 0.0)
                added.append(100 * (with_s - plain_s) / (STEPS_BETWEEN * plain_s / BLOCK_STEPS))
            steps.close()  # type: ignore[attr-defined]
            run.save(wait=True)
    bench.limit(
        "ALBERT-base, batch 8 × 128, 1 worker: a line and a checkpoint each 50 steps",
        added,
        LIMIT_PERCENT,
        unit="%",
        formula="2 % of the step time",
        foreign_cores=foreign,
    )
    return bench.finish()


if __name__ == "__main__":
    raise SystemExit(main())
