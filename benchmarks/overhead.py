"""What do metrics and asynchronous checkpoints add to training, one each 50 steps of ALBERT-base?

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
from benchmarks.train_step_worker import our_steps, place, settings, write_text
from shoal.models.pretraining import AlbertPretraining
from shoal.recipes.masked_lm.job import Job, build
from shoal.recipes.masked_lm.losses import NUM_SUMS
from shoal.recipes.masked_lm.model import make_model
from shoal.recipes.masked_lm.step import warm_up
from shoal.recipes.masked_lm.telling import write_line
from shoal.train.config import required
from shoal.train.progress import Progress
from shoal.train.run_log import RunLog
from shoal.train.window import Meter
from shoal.train.world import join_world

STEPS_BETWEEN = 50
BLOCK_STEPS = 6
LIMIT_PERCENT = 2.0


def block_s(job: Job, meter: Meter, steps: Iterator[int], log: RunLog | None, number: int) -> float:
    """Return the seconds of a block, with its line and checkpoint if there is a log."""
    begin_s = time.perf_counter()
    for step in range(BLOCK_STEPS):
        next(steps)
        if step == 0 and log is not None:
            write_line(job, meter, number, log)
            job.checkpointer.save(number, job.state(number))
    return time.perf_counter() - begin_s


def main() -> int:
    bench = Benchmark("overhead")
    num_pairs = 4 if bench.quick else 8
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = settings("base", folder, compiled=False)
        write_text(folder, config.model.vocab_size)
        with join_world(place(), config.distributed) as world:
            required(config.run.dir).mkdir()
            job = build(config, world, make_model(config, world, AlbertPretraining))
            warm_up(job)
            meter = Meter.of(config.train, NUM_SUMS)
            steps = our_steps(job, meter)
            added: list[float] = []
            foreign: list[float] = []
            with RunLog(required(config.run.dir), Progress(1_000)) as log:
                block_s(job, meter, steps, log, 1)
                for number in range(2, 2 + num_pairs):
                    with ForeignCores() as watch:
                        plain_s = block_s(job, meter, steps, None, number)
                        with_s = block_s(job, meter, steps, log, number)
                    foreign.append(watch.cores or 0.0)
                    added.append(100 * (with_s - plain_s) / (STEPS_BETWEEN * plain_s / BLOCK_STEPS))
                job.checkpointer.finish()
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
