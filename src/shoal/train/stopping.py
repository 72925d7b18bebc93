"""Handles what stops a run: signals, non-finite losses, lack of memory."""

from __future__ import annotations

import atexit
import signal
from collections.abc import Sequence
from types import FrameType

import torch

from shoal.decide.batch import BatchPlan
from shoal.errors import ShoalError

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Records the first signal that requests a stop; the loop checks it between steps.

    Handles SIGTERM (schedulers, the launcher) and SIGUSR1 (Slurm's ``--signal=USR1@60``). Both are ignored
    once the interpreter exits: Python then restores the default actions, and a second SIGTERM would replace
    the exit code of a saved run. Construct it in the main thread.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        """Name of the first signal received, such as ``"SIGTERM"``."""
        for number in _STOP_SIGNALS:
            signal.signal(number, self._record)
        atexit.register(_ignore)

    def _record(self, number: int, frame: FrameType | None) -> None:
        self.requested = self.requested or signal.Signals(number).name


def _ignore() -> None:
    for number in _STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def not_finite(count: int, step: int, sample_ids: Sequence[str], *, section: str) -> ShoalError:
    """Return the error for ``count`` consecutive steps with a non-finite loss, up to ``step``.

    Args:
        sample_ids: samples of the last step.
        section: the section of the settings that has the schedule.
    """
    shown = ", ".join(sample_ids[:8]) + (" …" if len(sample_ids) > 8 else "")
    return ShoalError(
        f"the loss was not finite for {count} steps in a row, up to step {step:,}; samples of that step: "
        f"{shown}. Lower --{section}.learning-rate or lengthen --{section}.warmup-steps; the same command "
        "continues from the last checkpoint"
    )


def out_of_memory(
    error: BaseException, batch: BatchPlan, remedy: str, *, section: str = "train"
) -> ShoalError:
    """Return the error for lack of memory, which names the settings to change.

    Args:
        batch: sizes of the batch.
        remedy: a further option that reduces memory.
        section: the section of the settings that has the batch size.
    """
    size = batch.micro_batch_size
    smaller = f"--{section}.micro-batch-size {size // 2} or " if size > 1 else ""
    return ShoalError(
        f"out of memory with a micro-batch of {size} {batch.unit}: use {smaller}"
        f"{remedy}; the global batch stays the same ({error})"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` was raised because the device or the host is out of memory."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
