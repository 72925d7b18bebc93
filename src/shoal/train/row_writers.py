"""Writes the rows of a run for others: Weights & Biases, MLflow, the log of MLPerf, each by its own package.

The address and the user of a tracker are set as with any other program: ``wandb login``,
``WANDB_MODE=offline``, ``MLFLOW_TRACKING_URI``. A run that continues writes on in the tracker's run that it
began.

Each line of MLPerf's log is ``:::MLLOG`` and a JSON object with ``key``, ``value``, ``time_ms``,
``event_type`` and ``metadata`` (github.com/mlcommons/logging; the keys are those of its compliance checker).
A block is the training between two evaluations.
"""

from __future__ import annotations

import logging
import math
import secrets
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from shoal.atomic_io import write_atomically
from shoal.errors import UsageError, import_extra
from shoal.record import End, Evaluation, Phase, Resume, Row, Start, Step, Stop, Target
from shoal.train.config import RunOutputConfig
from shoal.train.reporting import RowWriter, scalars_of
from shoal.train.run_dir import flat_settings

_ID = "{}-run.txt"
"""File of the run directory with the identity of the tracker's run."""
_MOST_PARAMETERS = 100
"""Of a request to MLflow."""


class Tracker(ABC):
    """A run in an experiment tracker, opened by the first row.

    Args:
        directory: of the run.

    Raises:
        UsageError: the package is not installed, or the tracker refuses to begin.
    """

    name: str
    """As in ``run.report_to``; also the extra that installs the package."""
    remedy: str
    """For a user whose tracker cannot be reached."""

    def __init__(self, directory: Path) -> None:
        self._package: Any = import_extra(
            self.name, self.name, f"--run.report-to {self.name} needs {self.name}"
        )
        self._directory, self._id_file = directory, directory / _ID.format(self.name)
        self._is_open = False

    def write(self, row: Row) -> None:
        """Send the settings, figures and scores, and the end; of other rows nothing.

        A tracker that fails after its start is named once; training goes on without it.

        Raises:
            UsageError: it refuses to begin.
        """
        match row:
            case Start():
                self._start(row)
            case Step() | Evaluation():
                scalars = {name: value for name, value in scalars_of(row).items() if math.isfinite(value)}
                self._try(lambda: self.log(scalars, row.step, row.time_s))
            case End():
                self._leave(lambda: self.end(row.metrics))
            case Stop():
                self._leave(self.interrupt)

    def close(self) -> None:
        """Send what is left; a run that has neither ended nor been stopped has failed there."""
        self._leave(self.fail)

    @abstractmethod
    def begin(self, identity: str | None, row: Start, settings: dict[str, Any]) -> str:
        """Begin or continue a run of the tracker; return its identity.

        Args:
            identity: of the run that is continued.
            settings: by their dotted names.
        """

    @abstractmethod
    def log(self, scalars: Mapping[str, float], step: int, time_s: float) -> None:
        """Send finite figures of a step."""

    @abstractmethod
    def end(self, scores: Mapping[str, float]) -> None:
        """End the run with its last scores."""

    @abstractmethod
    def interrupt(self) -> None:
        """Leave the run, which the same command continues."""

    @abstractmethod
    def fail(self) -> None:
        """Leave the run after an error."""

    def _start(self, row: Start) -> None:
        identity = self._id_file.read_text().strip() if self._id_file.is_file() else None
        try:
            identity = self.begin(identity, row, flat_settings(row.config))
        except Exception as error:  # noqa: BLE001  # each package has its own
            raise UsageError(f"run.report_to {self.name}: {_line_of(error)}. {self.remedy}") from None
        write_atomically(self._id_file, f"{identity}\n".encode())
        self._is_open = True

    def _try(self, send: Callable[[], None]) -> None:
        if not self._is_open:
            return
        try:
            send()
        except Exception as error:  # noqa: BLE001  # each package has its own
            self._is_open = False
            line = f"{self.name} failed: {_line_of(error)}; training goes on without it"
            print(f"shoal: {line}", file=sys.stderr, flush=True)

    def _leave(self, send: Callable[[], None]) -> None:
        self._try(send)
        self._is_open = False


class WandbTracker(Tracker):
    """Sends rows to Weights & Biases: project ``WANDB_PROJECT``, by default ``shoal``."""

    name = "wandb"
    remedy = "Run `wandb login`, set WANDB_API_KEY, or keep the run on disk with WANDB_MODE=offline"

    def begin(self, identity: str | None, row: Start, settings: dict[str, Any]) -> str:
        identity = identity or secrets.token_hex(8)
        project = self._package.setup().settings.project or "shoal"
        self._run = self._package.init(
            project=project, name=row.run, id=identity, resume="allow",
            dir=str(self._directory), config=settings, job_type=row.recipe,
        )  # fmt: skip
        self._run.define_metric("*", step_metric="step")  # a run that continues repeats steps
        return identity

    def log(self, scalars: Mapping[str, float], step: int, time_s: float) -> None:
        self._run.log({**scalars, "step": step})

    def end(self, scores: Mapping[str, float]) -> None:
        self._run.summary.update(dict(scores))
        self._run.finish()

    def interrupt(self) -> None:
        self._run.mark_preempting()
        self._run.finish(exit_code=1)

    def fail(self) -> None:
        self._run.finish(exit_code=1)


class MLflowTracker(Tracker):
    """Sends rows to MLflow: experiment ``MLFLOW_EXPERIMENT_NAME``, by default ``shoal``."""

    name = "mlflow"
    remedy = "Set MLFLOW_TRACKING_URI to a server that runs, or to a file: sqlite:///mlflow.db"

    def begin(self, identity: str | None, row: Start, settings: dict[str, Any]) -> str:
        self._client = self._package.MlflowClient()
        if identity is not None:
            self._client.update_run(identity, status="RUNNING")
        else:
            title = self._package.environment_variables.MLFLOW_EXPERIMENT_NAME.get() or "shoal"
            there = self._client.get_experiment_by_name(title)
            experiment = there.experiment_id if there else self._client.create_experiment(title)
            identity = str(self._client.create_run(experiment, run_name=row.run).info.run_id)
            param = self._package.entities.Param
            parameters = [param(name, str(value)) for name, value in settings.items()]
            for first in range(0, len(parameters), _MOST_PARAMETERS):
                self._client.log_batch(identity, params=parameters[first : first + _MOST_PARAMETERS])
        self._identity = identity
        return identity

    def log(self, scalars: Mapping[str, float], step: int, time_s: float) -> None:
        metric = self._package.entities.Metric
        metrics = [metric(name, value, int(1_000 * time_s), step) for name, value in scalars.items()]
        self._client.log_batch(self._identity, metrics=metrics, synchronous=False)

    def end(self, scores: Mapping[str, float]) -> None:
        self._terminate("FINISHED")

    def interrupt(self) -> None:
        self._terminate("KILLED")

    def fail(self) -> None:
        self._terminate("FAILED")

    def _terminate(self, status: str) -> None:
        self._package.flush_async_logging()
        self._client.set_terminated(self._identity, status=status)


TRACKERS: Mapping[str, type[Tracker]] = {each.name: each for each in (WandbTracker, MLflowTracker)}


def _line_of(error: Exception) -> str:
    """Return the first line of an error's text, or its type."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


# ---- MLPerf ---------------------------------------------------------------------------------------------


class MLPerfLog:
    """Follows the rows of a run's record and appends the lines that they mean to a file.

    The first line, ``init_start``, is written at once; ``init_stop`` and ``run_start`` come with the record's
    start, and ``run_stop`` with its target, stop or end.

    Args:
        path: of the file. What is there stays.
        watched: names of the scores of the run's target; they are the value of ``eval_accuracy``. Default:
            all scores.

    Raises:
        UsageError: the package is not installed, or the file cannot be opened.
    """

    def __init__(self, path: Path, watched: frozenset[str] = frozenset()) -> None:
        mllog = import_extra("mlperf_logging.mllog.mllog", "mlperf", "--run.mlperf-log needs mlperf-logging")
        self._keys = mllog.constants
        self._watched = watched
        self._samples = self._epoch_samples = 0
        self._block_s = 0.0  # when the block began, or may begin
        self._in_block = self._has_evaluated = self._is_over = False
        try:
            handler = logging.FileHandler(path, encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"run.mlperf_log {path} cannot be written ({error.strerror}): name a file in a directory "
                "that is there"
            ) from None
        logger = logging.Logger("shoal.mlperf", logging.INFO)
        logger.addHandler(handler)
        self._logger, self._handler = mllog.MLLogger(logger), handler
        self._interval(self._keys.INIT_START, time.time())

    def close(self) -> None:
        """Close the file."""
        self._handler.close()

    def write(self, row: Row) -> None:
        """Write the lines that a row of the record means; of most kinds none."""
        keys = self._keys
        match row:
            case Start():
                self._start(row)
            case Resume():
                self._samples = row.samples
            case Step():
                self._begin_block()
            case Phase():
                self._event(keys.GLOBAL_BATCH_SIZE, row.global_batch_size, row.time_s)
                self._event(keys.GRADIENT_ACCUMULATION_STEPS, row.accumulation_steps, row.time_s)
                self._event(keys.MAX_SEQUENCE_LENGTH, row.sequence_length, row.time_s)
            case Evaluation():
                self._evaluation(row)
            case Target():
                self._stop(keys.SUCCESS, row.time_s)
            case Stop():
                self._stop(keys.ABORTED, row.time_s)
            case End():
                self._stop(keys.ABORTED if self._watched else keys.SUCCESS, row.time_s)

    def _start(self, row: Start) -> None:
        keys, sections = self._keys, row.config
        values = {
            keys.SEED: sections.get("train", {}).get("seed"),
            keys.GLOBAL_BATCH_SIZE: row.global_batch_size,
            keys.GRADIENT_ACCUMULATION_STEPS: row.accumulation_steps,
            keys.MAX_STEPS: row.total_steps,
            keys.OPT_NAME: sections.get("optim", {}).get("optimizer"),
            keys.TRAIN_SAMPLES: row.epoch_samples or None,
        }
        for key, value in values.items():
            if value is not None:
                self._event(key, value, row.time_s)
        self._interval(keys.INIT_STOP, row.time_s)
        self._interval(keys.RUN_START, row.time_s)
        self._block_s, self._epoch_samples = row.time_s, row.epoch_samples

    def _begin_block(self) -> None:
        """Write the beginning of a block, unless it is there already."""
        if not self._in_block:
            self._in_block = True
            self._interval(self._keys.BLOCK_START, self._block_s, **self._epoch_metadata("first_epoch_num"))

    def _end_block(self, time_s: float, samples: int) -> None:
        """Write the end of the block after ``samples`` of the run, if it has any."""
        if samples > self._samples:
            self._begin_block()
        self._samples = samples
        if self._in_block:
            self._in_block = False
            self._interval(self._keys.BLOCK_STOP, time_s, **self._epoch_metadata("first_epoch_num"))

    def _evaluation(self, row: Evaluation) -> None:
        keys, begin_s = self._keys, row.time_s - row.seconds
        self._end_block(begin_s, row.samples)
        if not self._has_evaluated:
            self._event(keys.EVAL_SAMPLES, row.num_samples, begin_s)
            self._has_evaluated = True
        self._interval(keys.EVAL_START, begin_s, **self._epoch_metadata())
        watched = {name: value for name, value in row.metrics.items() if name in self._watched}
        scores = watched or row.metrics
        value: Any = next(iter(scores.values())) if len(scores) == 1 else scores
        self._event(keys.EVAL_ACCURACY, value, row.time_s, split=row.split, **self._epoch_metadata())
        self._interval(keys.EVAL_STOP, row.time_s, **self._epoch_metadata())
        self._block_s = row.time_s

    def _stop(self, status: str, time_s: float) -> None:
        """Write the end of the run, once."""
        if not self._is_over:
            self._is_over = True
            self._end_block(time_s, self._samples)
            self._interval(self._keys.RUN_STOP, time_s, status=status)

    def _epoch_metadata(self, epoch: str = "epoch_num") -> dict[str, float]:
        """Return the progress of the run: in samples, and in epochs if it is defined in them."""
        epochs = {epoch: self._samples / self._epoch_samples} if self._epoch_samples else {}
        return {"samples_count": self._samples, **epochs}

    def _interval(self, key: str, time_s: float, **metadata: Any) -> None:
        write = self._logger.start if key.endswith("_start") else self._logger.end
        write(key, metadata=metadata, time_ms=round(1_000 * time_s))

    def _event(self, key: str, value: Any, time_s: float, **metadata: Any) -> None:
        self._logger.event(key, value, metadata=metadata, time_ms=round(1_000 * time_s))


def open_writers(
    stack: ExitStack, directory: Path, output: RunOutputConfig, *, watched: frozenset[str]
) -> list[RowWriter]:
    """Open further writers of rows: MLPerf's log, experiment trackers.

    Args:
        stack: closes them.
        watched: names of the scores of the run's target.
    """
    writers: list[RowWriter] = []
    if (path := output.mlperf_log) is not None:
        writers.append(stack.enter_context(closing(MLPerfLog(path, watched))))
    for name in dict.fromkeys(output.report_to):
        writers.append(stack.enter_context(closing(TRACKERS[name](directory))))
    return writers
