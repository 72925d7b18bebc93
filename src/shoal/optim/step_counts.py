"""Counts the steps of many parameters at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class StepCounts:
    """Counts the steps of parameters in one tensor, of which the ``step`` of each state is a view.

    Hundreds of additions would take milliseconds. On a host the numbers are known without being read.

    Args:
        states: of the parameters; each has a ``step``, which is replaced.
        device: of the tensor.
    """

    def __init__(self, states: Sequence[dict[str, Any]], device: torch.device) -> None:
        steps: list[Tensor] = [state["step"] for state in states]
        self.tensor = torch.stack(steps).to(device)
        """Numbers of the last step of each parameter, from 1; ``[len(states)]``."""
        self._views = list(self.tensor.unbind())
        for state, view in zip(states, self._views, strict=True):
            state["step"] = view
        on_host = device.type == "cpu" and all(step.is_cpu for step in steps)
        self._known = [float(step) for step in steps] if on_host else None
        self._version = self.tensor._version

    def counts(self, states: Sequence[dict[str, Any]]) -> bool:
        """Return whether these are the states whose steps are counted."""
        return len(states) == len(self._views) and all(
            state["step"] is view for state, view in zip(states, self._views, strict=True)
        )

    def add(self, skip: Tensor | None) -> None:
        """Add 1 to all, unless ``skip`` is not 0."""
        known = self._known if self._version == self.tensor._version else None
        self.tensor.add_(1.0 if skip is None else 1.0 - skip.to(self.tensor.device))
        self._known = None if known is None or skip is not None else [number + 1.0 for number in known]
        self._version = self.tensor._version

    def numbers(self) -> list[float]:
        """Return the numbers; waits for a device that counts them."""
        if self._known is not None and self._version == self.tensor._version:
            return self._known
        numbers: list[float] = self.tensor.tolist()
        return numbers
