"""Sends the rows of a run to Weights & Biases or MLflow, each by its own package.

Where they send to, and as whom, is set as with any other program: ``wandb login``, ``WANDB_MODE=offline``,
``MLFLOW_TRACKING_URI``. A run that continues writes on in the tracker's run that it began.
"""

from __future__ import annotations

import math
import secrets
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from shoal.atomic_io import write_atomically
from shoal.errors import UsageError, import_extra
from shoal.record import End, Evaluation, Row, Start, Step, Stop
from shoal.train.reporting import scalars_of
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
