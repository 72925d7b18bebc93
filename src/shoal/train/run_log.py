"""What a run tells: its record, TensorBoard events, and the terminal. Only the main worker has one."""

from __future__ import annotations

import contextlib
import math
import platform
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from tensorboardX import SummaryWriter
from tensorboardX.summary import hparams

import shoal
from shoal.record import (
    Checkpoint,
    End,
    Evaluation,
    Phase,
    PipelineStep,
    RecordWriter,
    Resume,
    Row,
    Start,
    Step,
    Stop,
    read_record,
)
from shoal.train.checkpoint import CompletedCheckpoint
from shoal.train.owner import own
from shoal.train.progress import Progress, duration, rate
from shoal.train.world import World


class RunLog:
    """Writes every row to ``record.jsonl`` and what belongs there to TensorBoard and the terminal.

    Every method that writes raises a ShoalError when another job has taken the run directory over.
    """

    def __init__(self, run_dir: Path, progress: Progress) -> None:
        self._owner = own(run_dir)
        self._record = RecordWriter(run_dir)
        self._events = SummaryWriter(str(run_dir / "tensorboard"), flush_secs=10)
        self._progress = progress
        self._hyper_parameters: dict[str, Any] = {}
        self.references: dict[str, float] = {}

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.close()
        self._events.close()
        self._record.close()

    def start(self, row: Start) -> None:
        self._write(row)
        self.references = row.references
        self._progress.say(
            f"{row.run}: {row.recipe}, {row.num_parameters:,} parameters, {row.total_steps:,} steps\n"
            f"world: {counted(row.num_workers, 'worker')} on {counted(row.num_hosts, 'host')}, {row.device}, "
            f"{row.backend}, {row.precision}"
        )
        self._hyper_parameters = {
            f"{section}.{name}": value
            for section, values in row.config.items()
            for name, value in values.items()
        }

    def step(self, row: Step) -> None:
        self._write(row)
        scalars = {
            "train/loss": row.loss,
            **{f"train/{name}": value for name, value in row.metrics.items()},
            "optimizer/learning_rate": row.learning_rate,
            "optimizer/loss_scale": row.loss_scale,
            "optimizer/grad_norm": row.grad_norm,
            "optimizer/weight_norm": row.weight_norm,
            "speed/samples_per_s": row.samples_per_s,
            **{f"speed/{part}_ms": 1_000 * seconds for part, seconds in row.parts_s.items()},
        }
        self._scalars(scalars, row.step)
        self._progress.step(row)

    def evaluation(self, row: Evaluation) -> None:
        """Write scores."""
        self._write(row)
        self._scalars({f"{row.split}/{name}": value for name, value in row.metrics.items()}, row.step)
        self._progress.say(
            f"step {row.step:,} {row.split}: {format_metrics(row.metrics)} ({row.seconds:.1f} s)"
        )

    def checkpoint(self, row: Checkpoint) -> None:
        self._write(row)
        self._progress.say(
            f"step {row.step:,} checkpoint: {row.path} ({row.num_bytes / 2**20:.1f} MiB, "
            f"training stood still {1_000 * row.blocked_s:.0f} ms)"
        )

    def checkpoints(self, completed: Iterable[CompletedCheckpoint]) -> None:
        """Write a line for each checkpoint that became complete."""
        for done in completed:
            self.checkpoint(
                Checkpoint(
                    step=done.step,
                    path=str(done.path),
                    num_bytes=done.num_bytes,
                    blocked_s=done.blocked_s,
                    written_s=done.written_s,
                )
            )

    def phase(self, row: Phase) -> None:
        self._write(row)
        self._progress.say(
            f"{row.name}: steps {row.step:,} to {row.last_step:,}, {row.sequence_length:,} tokens a sequence"
        )

    def pipeline_step(self, row: PipelineStep) -> None:
        self._write(row)

    def resume(self, row: Resume) -> None:
        self._write(row)
        for damaged in row.damaged:
            self._progress.say(f"passed over: {damaged}")
        self._progress.say(f"continuing from {row.path} (step {row.step:,})")

    def stop(self, row: Stop) -> None:
        self._write(row)
        self._progress.say(f"stopped at step {row.step:,}: {row.reason}")

    def end(self, row: End) -> None:
        self._write(row)
        metrics = {name: value for name, value in row.metrics.items() if math.isfinite(value)}
        scalar_types = (bool, int, float, str)
        parameters = {k: v for k, v in self._hyper_parameters.items() if isinstance(v, scalar_types)}
        for summary in hparams(parameters, metrics):
            self._events.file_writer.add_summary(summary)
        self._progress.say(
            f"finished {row.step:,} steps in {duration(row.seconds)}: {format_metrics(row.metrics)}"
        )

    def advance(self, step: int) -> None:
        """Move the progress bar."""
        self._progress.advance(step)

    def say(self, text: str) -> None:
        """Print a line above the progress bar."""
        self._progress.say(text)

    def _write(self, row: Row) -> None:
        self._owner.require(look=False)
        self._record.write(row)

    def _scalars(self, scalars: dict[str, float], step: int) -> None:
        for name, value in scalars.items():
            self._events.add_scalar(name, value, step)


def has_ended(run_dir: Path, step: int, world: World) -> bool:
    """Whether the run was scored and its model written after ``step``, its last; all workers call it.

    If not, a kill came between the last checkpoint and the end, and both have still to be done.
    """
    ended = world.is_main and any(isinstance(row, End) and row.step == step for row in read_record(run_dir))
    return world.sum_counts(ended) == [1]


def versions() -> dict[str, str]:
    """Return the versions that a run's figures depend on."""
    found = {"shoal": shoal.__version__, "torch": torch.__version__}
    for package in ("transformers", "torchvision"):  # either may be missing where the other is needed
        with contextlib.suppress(PackageNotFoundError):
            found[package] = version(package)
    return {**found, "python": platform.python_version()}


def device_name(device: torch.device) -> str:
    """Return what a person calls the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {counted(torch.get_num_threads(), 'thread')} a worker"


def counted(number: int, noun: str) -> str:
    """Return ``1 host``, ``2 hosts``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def format_metrics(metrics: dict[str, float]) -> str:
    """Return ``name value`` pairs for a line of text."""
    return ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in metrics.items())


def speed_line(run_dir: Path, world: World, unit: str) -> str:
    """Return how fast the steps since the last start were, and which part was not waiting for other workers.

    That part is what scaling costs nothing of: one worker alone has no other to wait for.
    """
    seconds = waited = samples = 0.0
    before = 0
    for row in read_record(run_dir):
        if isinstance(row, Start):
            seconds = waited = samples = 0.0
            before = 0
        elif isinstance(row, Resume):
            before = row.step
        elif isinstance(row, Step):
            num_steps = row.step - before
            seconds += num_steps * row.step_s
            waited += num_steps * row.parts_s["gradient_wait"]
            samples += num_steps * row.step_s * row.samples_per_s
            before = row.step
    if not seconds:
        return "no step was done"
    return (
        f"{rate(samples / seconds)} {unit}/s, {rate(samples / seconds / world.num_workers)} a worker; "
        f"{100 * (1 - waited / seconds):.1f} % of the time was not spent waiting for other workers"
    )
