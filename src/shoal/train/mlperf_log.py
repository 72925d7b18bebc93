"""Writes a run as log lines of MLPerf training, by the package mlperf-logging.

Each line is ``:::MLLOG`` and a JSON object with ``key``, ``value``, ``time_ms``, ``event_type`` and
``metadata`` (github.com/mlcommons/logging; the keys are those of its compliance checker). A block is the
training between two evaluations.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

from shoal.errors import UsageError, import_extra
from shoal.record import End, Evaluation, Phase, Resume, Row, Start, Step, Stop, Target


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
