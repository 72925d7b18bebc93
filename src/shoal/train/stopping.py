"""Stops runs: on signals, on losses that stay not finite, for lack of memory."""

from __future__ import annotations

import atexit
import signal
from collections.abc import Sequence
from types import FrameType

import torch

from shoal.decide.batch import BatchPlan
from shoal.errors import ShoalError

_ASK_TO_STOP = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Records the first signal that asks this process to stop; the loop reads it between steps.

    It handles SIGTERM (schedulers, the launcher) and SIGUSR1 (Slurm's ``--signal=USR1@60``). From the
    interpreter's exit on both are ignored: Python restores the default actions while it shuts down, and a
    second SIGTERM would turn the exit code of a saved run into death by signal. Construct it in the main
    thread.
    """

    def __init__(self) -> None:
        self.requested: str | None = None
        """The name of the first signal that came, such as ``"SIGTERM"``."""
        for number in _ASK_TO_STOP:
            signal.signal(number, self._note)
        atexit.register(_ignore)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = self.requested or signal.Signals(number).name


def _ignore() -> None:
    for number in _ASK_TO_STOP:
        signal.signal(number, signal.SIG_IGN)


def not_finite(count: int, step: int, sample_ids: Sequence[str], *, section: str) -> ShoalError:
    """Return the error that stops a run after ``step``, the last of ``count`` with a loss that is not finite.

    ``section`` is where the schedule stands in the settings.
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
    """Return the error that names the settings to change when memory runs out.

    ``section`` is where the batch stands in the settings, ``remedy`` an option that helps besides.
    """
    size = batch.micro_batch_size
    smaller = f"--{section}.micro-batch-size {size // 2} or " if size > 1 else ""
    return ShoalError(
        f"out of memory with a micro-batch of {size} {batch.unit}: use {smaller}"
        f"{remedy}; the global batch stays the same ({error})"
    )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` says that the device or the host has no memory left."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
