"""Synthetic records, as a real run writes them. ``python report_records.py DIR`` writes one of each kind."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shoal.record import (
    PARTS,
    Checkpoint,
    End,
    Evaluation,
    Resume,
    Row,
    Start,
    Step,
    Stop,
)
from shoal.train.reporting import RecordWriter

BEGIN_S = 1_764_000_000.0
UNIGRAM_ENTROPY = 6.62


def start(**changes: Any) -> Start:
    values: dict[str, Any] = {
        "run": "first-light",
        "recipe": "albert",
        "command": ["shoal", "train", "albert", "--preset", "tiny", "--run.dir", "runs/first light"],
        "config": {
            "model": {"num_layers": 4, "hidden_size": 128, "dropout": 0.0, "pre_layer_norm": False},
            "optimizer": {"name": "lamb", "learning_rate": 0.00176, "betas": [0.9, 0.999], "clip": None},
            "data": {"path": "runs/builtin-text", "global_batch": 64},
        },
        "num_workers": 2,
        "num_hosts": 1,
        "backend": "gloo",
        "device": "cpu",
        "precision": "fp32",
        "versions": {"shoal": "0.1.0", "torch": "2.15.0", "python": "3.11.9"},
        "num_parameters": 1_873_410,
        "total_steps": 1_000,
        "global_batch_size": 64,
        "micro_batch_size": 16,
        "accumulation_steps": 2,
        "references": {"mlm_loss": UNIGRAM_ENTROPY, "sop_accuracy": 0.5},
        "time_s": BEGIN_S,
    }
    return Start(**{**values, **changes})


def step(number: int, time_s: float, noise: random.Random, *, speed: float = 1.0, **changes: Any) -> Step:
    mlm = 4.9 + 4.1 * math.exp(-number / 180) + noise.gauss(0, 0.07)
    sop = 0.693 - 0.12 * (1 - math.exp(-number / 500)) + noise.gauss(0, 0.01)
    parts = (0.003, 0.062, 0.118, 0.014, 0.011, 0.004)
    seconds = {
        part: value / speed * noise.uniform(0.9, 1.15) for part, value in zip(PARTS, parts, strict=True)
    }
    total = sum(seconds.values())
    values: dict[str, Any] = {
        "step": number,
        "samples": 64 * number,
        "loss": mlm + sop,
        "metrics": {
            "mlm_loss": mlm,
            "mlm_accuracy": 0.30 - 0.28 * math.exp(-number / 300) + noise.gauss(0, 0.006),
            "sop_accuracy": 0.5 + 0.16 * (1 - math.exp(-number / 500)) + noise.gauss(0, 0.02),
        },
        "learning_rate": 0.00176 * min(number / 100, (1000 - number) / 900 if number < 1000 else 0.0),
        "loss_scale": 1.0,
        "grad_norm": 0.6 + 3.0 * math.exp(-number / 60) + abs(noise.gauss(0, 0.08)),
        "weight_norm": 42.0 + number / 80,
        "samples_per_s": 64 / total,
        "step_s": total,
        "parts_s": seconds,
        "peak_memory_bytes": 734_003_200,
        "time_s": time_s,
    }
    return Step(**{**values, **changes})


def evaluation(number: int, time_s: float, **changes: Any) -> Evaluation:
    values: dict[str, Any] = {
        "step": number,
        "split": "held-out",
        "num_samples": 2_048,
        "metrics": {
            "mlm_loss": 5.0 + 4.0 * math.exp(-number / 190),
            "mlm_accuracy": 0.29 - 0.27 * math.exp(-number / 300),
            "sop_accuracy": 0.5 + 0.15 * (1 - math.exp(-number / 500)),
        },
        "seconds": 1.4,
        "time_s": time_s,
    }
    return Evaluation(**{**values, **changes})


def checkpoint(number: int, time_s: float) -> Checkpoint:
    return Checkpoint(
        step=number,
        path=f"checkpoints/step-{number:06d}",
        num_bytes=22_480_920,
        blocked_s=0.0061,
        written_s=0.184,
        time_s=time_s,
    )


def training(
    first: int, last: int, time_s: float, *, every: int = 10, speed: float = 1.0, seed: int = 1
) -> tuple[list[Row], float]:
    """Rows of steps ``first`` to ``last`` with evaluations each 100 steps and checkpoints each 200."""
    noise = random.Random(seed)
    rows: list[Row] = []
    for number in range(first, last + 1, every):
        row = step(number, time_s, noise, speed=speed)
        time_s += every * row.step_s
        rows.append(step(number, time_s, noise, speed=speed))
        if number % 100 == 0:
            time_s += 1.4
            rows.append(evaluation(number, time_s))
        if number % 200 == 0:
            rows.append(checkpoint(number, time_s))
    return rows, time_s


def finished_run() -> list[Row]:
    """A run that was killed at 430, resumed from 400, stopped by a signal at 700 and then finished."""
    first, killed_s = training(10, 430, BEGIN_S)
    again_s = killed_s + 95
    second, stopped_s = training(410, 700, again_s, seed=2)
    third_s = stopped_s + 40
    third, end_s = training(710, 1000, third_s, seed=3)
    return [
        start(),
        *first,
        start(time_s=again_s - 3),
        Resume(step=400, path="checkpoints/step-000400", damaged=[], time_s=again_s),
        *second,
        checkpoint(700, stopped_s),
        Stop(step=700, reason="SIGTERM", exit_code=75, time_s=stopped_s),
        start(time_s=third_s - 3, num_workers=4, accumulation_steps=1),
        Resume(
            step=700,
            path="checkpoints/step-000700",
            damaged=["step-000720: wrong checksum of shard 1"],
            time_s=third_s,
        ),
        *third,
        End(step=1000, seconds=end_s - third_s, metrics={"mlm_loss": 5.02}, time_s=end_s),
    ]


def faster_run() -> list[Row]:
    """The same recipe, half as slow again, with another learning rate and one metric more."""
    rows, end_s = training(10, 1000, BEGIN_S + 4000, speed=1.5, seed=7)
    config = {
        "model": {"num_layers": 4, "hidden_size": 128, "dropout": 0.1, "pre_layer_norm": False},
        "optimizer": {"name": "adamw", "learning_rate": 0.001, "betas": [0.9, 0.999], "clip": 1.0},
        "data": {"path": "runs/builtin-text", "global_batch": 64},
    }
    last = evaluation(1000, end_s, split="test", metrics={"mlm_loss": 5.1, "perplexity": 164.0})
    return [
        start(run="adamw-compiled", config=config, time_s=BEGIN_S + 4000, precision="bf16"),
        *rows,
        last,
        End(step=1000, seconds=end_s - BEGIN_S - 4000, metrics={}, time_s=end_s),
    ]


def diverged_run() -> list[Row]:
    """fp16 with overflows, then a loss that is not finite for five lines: the run stops itself."""
    noise = random.Random(5)
    rows: list[Row] = [start(run="too-hot", precision="fp16")]
    for number in range(1, 121):
        bad = number > 115
        scale = 65_536.0 / 2 ** (number // 30)
        changes: dict[str, Any] = {"loss_scale": scale, "num_skipped": int(number % 30 == 0)}
        if bad:
            changes |= {"loss": math.nan, "grad_norm": math.inf}
        rows.append(step(number, BEGIN_S + 0.3 * number, noise, **changes))
    reason = "the loss was not finite for 5 steps (116 to 120)"
    return [*rows, Stop(step=120, reason=reason, exit_code=1, time_s=BEGIN_S + 37)]


def long_run() -> list[Row]:
    """6,000 lines, one single spike, a checkpoint each 30 steps, still running."""
    noise = random.Random(9)
    rows: list[Row] = [start(run="long", total_steps=8_000)]
    for number in range(1, 6_001):
        spike = {"loss": 31.5, "grad_norm": 900.0} if number == 4_321 else {}
        rows.append(step(number, BEGIN_S + 0.2 * number, noise, **spike))
        if number % 30 == 0:
            rows.append(checkpoint(number, BEGIN_S + 0.2 * number))
    return rows


RUNS: dict[str, Callable[[], list[Row]]] = {
    "finished": finished_run,
    "faster": faster_run,
    "diverged": diverged_run,
    "long": long_run,
    "unstarted": lambda: [start(run="unstarted")],
    "one-step": lambda: [start(run="one-step"), step(1, BEGIN_S + 1, random.Random(0))],
}


def write_run(folder: Path, rows: list[Row]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    writer = RecordWriter(folder)
    for row in rows:
        writer.write(row)
    writer.close()
    return folder


if __name__ == "__main__":
    for name, make in RUNS.items():
        write_run(Path(sys.argv[1]) / name, make())
