"""Defines the settings of a layout that is searched for. Standard library only, for a quick ``--help``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from shoal.decide.batch import ScheduleName as ScheduleName  # options resolve inherited annotations here
from shoal.decide.batch import StagesConfig
from shoal.errors import UsageError, require_positive

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(StagesConfig):
    """Division of the model and the batch over the workers: workers = pipeline × data."""

    layout: Literal["given", "auto"] = "given"
    """given: the settings below; auto: the fastest layout that fits the memory, by a cost model."""
    devices: int | None = None
    """Devices to plan for, with layout auto or in a dry run; default: the workers."""
    memory: str | None = None
    """Memory of a device, such as 40GB, for layout auto and for predictions in a dry run."""
    device: Literal["v100", "a100", "h100"] = "a100"
    """Type of device whose rates the cost model uses."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive("parallel", self, "devices")
        if self.memory is not None:
            parse_bytes(self.memory)

    @property
    def is_searched(self) -> bool:
        return self.layout == "auto"


def parse_bytes(text: str, name: str = "parallel.memory") -> int:
    """Return the number of bytes of a text such as ``40GB`` or ``16GiB``.

    Args:
        text: a number with a unit.
        name: the setting, for the error.

    Raises:
        UsageError: the text is not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise UsageError(f"{name} {text!r} must be a number with a unit, such as 40GB or 16GiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])
