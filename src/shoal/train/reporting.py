"""Measures steps and reports them: timers, running means, the record, TensorBoard events, the terminal."""

from __future__ import annotations

import contextlib
import json
import math
import platform
import resource
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from io import RawIOBase
from itertools import pairwise
from os import SEEK_END
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from torch.profiler import ProfilerActivity, profile

import shoal
from shoal.atomic_io import write_atomically, write_error
from shoal.errors import ShoalError
from shoal.formatting import plural
from shoal.record import (
    FILE_NAME,
    PARTS,
    Checkpoint,
    End,
    Evaluation,
    Members,
    Phase,
    Resume,
    Row,
    Samples,
    Shares,
    Start,
    Step,
    Stop,
    Target,
    check_format,
)
from shoal.train.run_dir import flat_settings, last_start, own, recorded_backend

_SHOWN, _CELL = 4, 160
"""Samples that the terminal shows of a step, and most characters of a value."""

# ---- measuring a step ----------------------------------------------------------------------------------

_BUSY = ("data", "forward", "backward")
"""Parts of a step in which a worker does not wait for others."""


class StepTimer:
    """Adds up the time between laps, each under the name of the lap that ends it.

    On a GPU a lap is a CUDA event on the current stream. The events of a step are read at the end of the next
    one, which has passed them, so that no step waits for its own. Names are those of
    :data:`shoal.record.PARTS` or specific to a recipe (``pipeline``: forward, backward and messages of all
    micro-batches). Time outside of laps is ``other``.

    Args:
        device: of the model.

    Attributes:
        busy_s: seconds of the newest step whose laps were read in which this worker did not wait for others.
        synchronises: every timer waits for its GPU at each lap, which shows what the work of a part takes by
            itself, the host's included.
    """

    synchronises: ClassVar[bool] = False

    def __init__(self, device: torch.device) -> None:
        self.busy_s = 0.0
        self._on_gpu = device.type == "cuda"
        self._laps: list[tuple[str, float | torch.cuda.Event]] = []
        self._unread: list[list[tuple[str, float | torch.cuda.Event]]] = []
        self._step_begin = time.perf_counter()
        self.reset()

    def reset(self) -> None:
        """Discard all steps and begin a new one."""
        self.num_steps = 0
        self.total_s = 0.0
        self._seconds: dict[str, float] = defaultdict(float)
        self._unread.clear()
        self.begin_step()

    def begin_step(self) -> None:
        """Begin a step; the time since the last one is not counted."""
        self._step_begin = time.perf_counter()
        self._laps = [("", self._now())]

    def lap(self, part: str) -> None:
        """Count the time since the last lap as ``part``."""
        self._laps.append((part, self._now()))

    def end_step(self, count: int = 1) -> None:
        """End the step, which may count for several, and begin the next."""
        self._unread.append(self._laps)
        self._read(all_but=1)
        self.total_s += time.perf_counter() - self._step_begin
        self.num_steps += count
        self.begin_step()

    def parts_s(self) -> dict[str, float]:
        """Return the mean seconds per step of each part; their sum is :meth:`step_s`."""
        self._read()
        steps = max(self.num_steps, 1)
        names = [*PARTS, *sorted(set(self._seconds) - set(PARTS))]
        parts = {part: self._seconds.get(part, 0.0) / steps for part in names if part != "other"}
        parts["other"] = max(self.step_s() - sum(parts.values()), 0.0)
        return parts

    def step_s(self) -> float:
        """Return the mean seconds per step."""
        return self.total_s / max(self.num_steps, 1)

    def _read(self, all_but: int = 0) -> None:
        """Add up the laps of the ended steps, without the ``all_but`` newest."""
        while len(self._unread) > all_but:
            laps = self._unread.pop(0)
            self.busy_s = 0.0
            for (_, before), (part, after) in pairwise(laps):
                seconds = _seconds_between(before, after)
                self._seconds[part] += seconds
                self.busy_s += seconds if part in _BUSY else 0.0

    def _now(self) -> float | torch.cuda.Event:
        if not self._on_gpu:
            return time.perf_counter()
        if StepTimer.synchronises:
            torch.cuda.synchronize()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory in bytes: allocated by torch on a GPU, of the process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1_024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _seconds_between(before: float | torch.cuda.Event, after: float | torch.cuda.Event) -> float:
    if isinstance(before, float) and isinstance(after, float):
        return after - before
    assert isinstance(before, torch.cuda.Event) and isinstance(after, torch.cuda.Event)
    after.synchronize()
    return float(before.elapsed_time(after)) / 1_000


# ---- writing ---------------------------------------------------------------------------------------------


class RowWriter(Protocol):
    """Writes the rows of a run somewhere."""

    def write(self, row: Row) -> None:
        """Write a row; of some kinds nothing."""


class RecordWriter:
    """Appends rows to the record of a run, unbuffered.

    Raises:
        ShoalError: the file cannot be opened or written (permissions, a full disk), or has another format.
            Existing rows are unchanged.
    """

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE_NAME
        if self._path.is_file():
            check_format(self._path)
        try:
            self._file: RawIOBase = self._path.open("a+b", buffering=0)
            size = self._file.seek(0, SEEK_END)
            if size:
                self._file.seek(size - 1)
                if self._file.read(1) != b"\n":  # end the partial line of a killed run
                    self._file.write(b"\n")
        except OSError as error:
            raise ShoalError(f"{self._path} cannot be written: {error.strerror}") from None

    def write(self, row: Row) -> None:
        """Write a row.

        Raises:
            ShoalError: the file cannot be written, or the disk is full.
        """
        line = (json.dumps({"kind": row.kind, **asdict(row)}) + "\n").encode()
        try:
            num_written = self._file.write(line)
        except OSError as error:
            raise ShoalError(f"{self._path} cannot be written: {error.strerror}") from None
        if num_written != len(line):
            raise ShoalError(f"{self._path} was cut at {num_written} of {len(line)} bytes: the disk is full")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class EventWriter:
    """Writes scores and figures as TensorBoard events.

    Args:
        folder: of the event files.
        first_step: the first step that will be written, or written again: TensorBoard then drops what an
            earlier process wrote about it and later ones, whose weights were lost. ``None``: drop nothing.
    """

    def __init__(self, folder: Path, first_step: int | None) -> None:
        from tensorboardX import SummaryWriter  # with boto3, a 20th of a start; only one worker writes

        self._folder = folder
        # Names have whole seconds only: a run that goes on in the same one would write over the file.
        suffix = f".{time.time_ns()}"
        self._events = SummaryWriter(
            str(folder), flush_secs=10, purge_step=first_step, filename_suffix=suffix
        )
        self._settings: dict[str, Any] = {}

    def write(self, row: Row) -> None:
        """Write the scalars of a row, and at the end the settings with the last scores."""
        if isinstance(row, Start):
            self._settings = flat_settings(row.config)
        elif isinstance(row, Step | Evaluation):
            for name, value in scalars_of(row).items():
                self._events.add_scalar(name, value, row.step)
        elif isinstance(row, Samples):
            lines = "\n".join(f"    {line}" for line in _sample_lines(row))  # code, in Markdown
            self._events.add_text("samples", lines, row.step)
        elif isinstance(row, End):
            from tensorboardX.summary import hparams

            metrics = {name: value for name, value in row.metrics.items() if math.isfinite(value)}
            parameters = {k: v for k, v in self._settings.items() if isinstance(v, bool | int | float | str)}
            for summary in hparams(parameters, metrics):
                self._events.file_writer.add_summary(summary)

    def close(self) -> None:
        """Close the files.

        Raises:
            ShoalError: they cannot be written.
        """
        try:
            self._events.close()
        except OSError as problem:
            raise write_error(self._folder, problem) from None


class CheckpointNotice:
    """Writes the step of the newest checkpoint to a file, from which the launcher sees that a run advances.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, row: Row) -> None:
        """Write the step of a checkpoint."""
        if isinstance(row, Checkpoint):
            write_atomically(self._path, f"{row.step}\n".encode())


class RunLog(AbstractContextManager["RunLog"]):
    """Writes the rows of a run: to ``record.jsonl``, TensorBoard, the terminal, and to other writers.

    Args:
        run_dir: an existing run directory; this process becomes its owner.
        progress: the progress bar, closed with the log.
        others: further writers; their owners close them.
        first_step: the first step that this process does; 0 if it also writes about the state before;
            ``None`` if it does none.
    """

    def __init__(
        self,
        run_dir: Path,
        progress: Progress,
        others: Sequence[RowWriter] = (),
        *,
        first_step: int | None = None,
    ) -> None:
        self._owner = own(run_dir)
        self.progress = progress
        record, events = RecordWriter(run_dir), EventWriter(run_dir / "tensorboard", first_step)
        self._writers: list[RowWriter] = [record, *others, events, progress]
        self._stack = contextlib.ExitStack()
        for own_writer in (record, events, progress):
            self._stack.callback(own_writer.close)

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        with contextlib.nullcontext() if error is None else contextlib.suppress(ShoalError):
            self._stack.close()

    def write(self, row: Row) -> None:
        """Write a row, its figures and a line for the terminal.

        Raises:
            ShoalError: another job has taken over the run directory, or the record cannot be written.
        """
        if self._owner.is_lost.is_set():
            self._owner.require()
        for writer in self._writers:
            writer.write(row)


def scalars_of(row: Step | Evaluation) -> dict[str, float]:
    """Return the figures of a row by the names that trackers show."""
    if isinstance(row, Evaluation):
        return {f"{row.split}/{name}": value for name, value in row.metrics.items()}
    return {
        "train/loss": row.loss,
        **{f"train/{name}": value for name, value in row.metrics.items()},
        "optimizer/learning_rate": row.learning_rate,
        "optimizer/loss_scale": row.loss_scale,
        "optimizer/grad_norm": row.grad_norm,
        "optimizer/weight_norm": row.weight_norm,
        **{f"grad_norm/{layer}": norm for layer, norm in row.layer_norms.items()},
        "speed/samples_per_s": row.samples_per_s,
        **{f"speed/{part}_ms": 1_000 * seconds for part, seconds in row.parts_s.items()},
    }


def _text_of(row: Row) -> str:
    """Return a row in words for the terminal; empty for rows that are not shown."""
    match row:
        case Start():
            return (
                f"{row.run}: {row.recipe}, {row.num_parameters:,} parameters, {row.total_steps:,} steps\n"
                f"world: {plural(row.num_workers, 'worker')} on {plural(row.num_hosts, 'host')}, "
                f"{row.device}, {row.backend}, {row.precision}"
            )
        case Evaluation():
            return f"step {row.step:,} {row.split}: {format_metrics(row.metrics)} ({row.seconds:.1f} s)"
        case Samples():
            more = f"\n  … {row.num_rows - _SHOWN:,} more in {row.path}" if row.num_rows > _SHOWN else ""
            shown = "".join(f"\n  {line}" for line in _sample_lines(row)[:_SHOWN])
            return f"step {row.step:,} samples ({row.seconds:.1f} s):{shown}{more}"
        case Checkpoint():
            return (
                f"step {row.step:,} checkpoint: {row.path} ({row.num_bytes / 2**20:.1f} MiB, "
                f"training was blocked for {1_000 * row.blocked_s:.0f} ms)"
            )
        case Shares():
            return f"step {row.step:,}: the workers' shares of a batch are now {row} samples"
        case Members():
            change = "lost" if row.num_workers < row.num_before else "joined by"
            count = plural(abs(row.num_workers - row.num_before), "worker")
            return f"step {row.step:,}: {change} {count}, goes on with {plural(row.num_workers, 'worker')}"
        case Phase():
            steps = f"steps {row.step:,} to {row.last_step:,}"
            return f"{row.name}: {steps}, {row.sequence_length:,} tokens per sequence"
        case Resume():
            skipped = [f"skipped a damaged checkpoint: {damaged}" for damaged in row.damaged]
            return "\n".join([*skipped, f"continuing from {row.path} (step {row.step:,})"])
        case Target():
            pure = duration(row.seconds - row.evaluation_s)
            return (
                f"step {row.step:,} has the target {row.until} ({format_metrics(row.metrics)}): "
                f"{duration(row.seconds)} of training, {pure} without evaluation"
            )
        case Stop():
            return f"stopped at step {row.step:,}: {row.reason}"
        case End():
            metrics = format_metrics(row.metrics)
            return f"finished {row.step:,} steps in {duration(row.seconds)}: {metrics}"
    return ""


def _sample_lines(row: Samples) -> list[str]:
    """Return a line for each row of samples: its fields by name."""
    names, rows = row.cells(_CELL)
    return [", ".join(f"{name} {text!r}" for name, text in zip(names, texts, strict=True)) for texts in rows]


def changed_precision(run_dir: Path, step: int, precision: str) -> list[str]:
    """Return a line if the run has computed in another precision up to ``step``."""
    last = last_start(run_dir)
    before = last.precision if last else precision
    if before == precision:
        return []
    return [
        f"precision: {before} up to step {step:,}, {precision} from here on, so the results are not "
        f"those of one run in {before} (--train.precision)"
    ]


def changed_backend(run_dir: Path, step: int, backend: str, num_workers: int) -> list[str]:
    """Return a line if several workers have averaged by another backend up to ``step``."""
    before = recorded_backend(run_dir)
    if before is None or before.backend == backend or 1 in (before.num_workers, num_workers):
        return []
    return [
        f"backend: {before.backend} up to step {step:,}, {backend} from here on, so sums may differ in the "
        f"last bit from those of one run over {before.backend} (--distributed.backend)"
    ]


def versions() -> dict[str, str]:
    """Return the versions of the packages that results depend on."""
    installed = {"shoal": shoal.__version__, "torch": torch.__version__}
    for package in ("transformers", "torchvision"):  # each recipe needs at most one of them
        with contextlib.suppress(PackageNotFoundError):
            installed[package] = version(package)
    return {**installed, "python": platform.python_version()}


def device_name(device: torch.device) -> str:
    """Return a readable name of the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU, {plural(torch.get_num_threads(), 'thread')} per worker"


def format_metrics(metrics: dict[str, float]) -> str:
    """Format metrics as ``name value`` pairs in one line."""
    return ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in metrics.items())


@dataclass(kw_only=True)
class Speed:
    """Sums over the steps since the process began."""

    seconds: float = 0.0
    waited_s: float = 0.0
    """For other workers."""
    samples: int = 0

    def add(self, timer: StepTimer, samples: int) -> None:
        """Add the steps of a timer, of ``samples`` each."""
        self.seconds += timer.total_s
        self.waited_s += timer.num_steps * timer.parts_s()["gradient_wait"]
        self.samples += timer.num_steps * samples

    def line(self, num_workers: int, unit: str) -> str:
        """Return the throughput, and the share of time not spent waiting for gradients.

        That share estimates the scaling efficiency, since a single worker does not wait.
        """
        if not self.seconds:
            return "no step was done"
        per_s, busy = self.samples / self.seconds, 1 - self.waited_s / self.seconds
        return (
            f"{rate(per_s)} {unit}/s, {rate(per_s / num_workers)} per worker; "
            f"{100 * busy:.1f} % of the time was not spent waiting for other workers"
        )


# ---- the terminal ----------------------------------------------------------------------------------------

SECONDS_BETWEEN_LINES = 15.0


class Progress:
    """Shows the progress of a run on the standard error: a bar on a terminal, otherwise lines.

    Args:
        total_steps: steps of the whole run.
        first_step: the step from which the run continues.
        unit: name of samples, such as ``images``.
    """

    def __init__(self, total_steps: int, first_step: int = 0, *, unit: str = "sequences") -> None:
        self._total = total_steps
        self._unit = unit
        self._bar: RichProgress | None = None
        self._last_line_s = -SECONDS_BETWEEN_LINES
        if sys.stderr.isatty():
            self._bar = RichProgress(
                BarColumn(bar_width=10),  # with the figures, a line of 80 characters
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("ETA"),
                TimeRemainingColumn(compact=True),
                TextColumn("{task.fields[text]}"),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task("train", total=total_steps, completed=first_step, text="")
            self._bar.start()

    def advance(self, step: int) -> None:
        """Advance the bar to ``step``."""
        if self._bar is not None:
            self._bar.update(self._task, completed=step)

    def write(self, row: Row) -> None:
        """Show a row: a step in the bar or every 15 s, others as text."""
        if isinstance(row, Step):
            self.step(row)
        elif text := _text_of(row):
            self.say(text)

    def step(self, row: Step) -> None:
        """Show the loss, accuracies and speed of a line of the record."""
        accuracies = {name: value for name, value in row.metrics.items() if name.endswith("accuracy")}
        figures = f"loss {row.loss:.3f}" + "".join(
            f"  {name.removesuffix('_accuracy')} {100 * value:.1f} %" for name, value in accuracies.items()
        )
        figures += f"  {rate(row.samples_per_s)} {self._unit}/s"
        if self._bar is not None:
            short = figures.replace("  ", " ").replace(" %", "%").replace("sequences", "seq")
            self._bar.update(self._task, completed=row.step, text=short)
            return
        now = time.monotonic()
        if now - self._last_line_s >= SECONDS_BETWEEN_LINES or row.step == self._total:
            self._last_line_s = now
            left = duration((self._total - row.step) * row.step_s)
            self.say(f"step {row.step:,}/{self._total:,}  {figures}  ETA {left}")

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()


def rate(per_s: float) -> str:
    """Format samples per second: whole numbers, or two digits below 10."""
    return f"{per_s:,.0f}" if per_s >= 10 else f"{per_s:.2g}"


def duration(seconds: float) -> str:
    """Format a duration as ``h:mm:ss`` or ``m:ss``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


# ---- traces ---------------------------------------------------------------------------------------------

FIRST_STEP = 3
"""The step after the start with which a trace begins; the ones before it allocate and compile."""


class StepProfiler:
    """Traces steps of one worker: operations on the host, and kernels on a GPU.

    Args:
        directory: gets ``profile-steps-FIRST-LAST.json``, in the format of Chrome's traces, for Perfetto.
        begin: steps that were done before.
        num_steps: to trace; 0: none.
    """

    def __init__(self, directory: Path, begin: int, num_steps: int) -> None:
        self._directory = directory
        self._steps = range(begin + FIRST_STEP, begin + FIRST_STEP + num_steps)
        self._profile: profile | None = None

    def before(self, step: int) -> None:
        """Begin to trace, if ``step`` comes next and is the first to trace."""
        if self._profile is None and self._steps and step == self._steps[0]:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities)
            self._profile.start()

    def after(self, step: int) -> None:
        """Write the file, if ``step`` was the last to trace."""
        if self._profile is None or step != self._steps[-1]:
            return
        file = self._directory / f"profile-steps-{self._steps[0]}-{self._steps[-1]}.json"
        self._profile.stop()
        self._profile.export_chrome_trace(str(file))
        self._profile = None

    def close(self) -> None:
        """Stop, if the run ends before the last step to trace; nothing is written."""
        if self._profile is not None:
            self._profile.stop()
            self._profile = None
