"""Traces a few steps of a run with torch's profiler, into one file of the run directory."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

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
