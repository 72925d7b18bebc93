"""The size of a job: options that all schedulers share, with their checks, and the name of a job."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from shoal.errors import UsageError

HELPER_PORT, RENDEZVOUS_PORT = 7070, 29_400
"""Ports of helpers' servers and of the first worker host, on schedulers that give each job its own hosts."""
SIZE = Parameter(group=Group("Size of the job", sort_key=1))
"""Puts an option into this group of ``--help``."""
_COUNTS = (
    "hosts", "min_hosts", "workers_per_host", "global_batch", "gpus_per_host", "cpus_per_host",
    "efa_per_host", "save_s", "volume_gb", "nnodes", "workers", "helper_port",
)  # fmt: skip
_LEAST = {**dict.fromkeys(_COUNTS, 1), "helpers": 0}
_OWN_WORDS = ("shoal", "train", "finetune")


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Options of the workers of each host.

    Raises:
        UsageError: a number is too small, or a worker has no GPU of its own.
    """

    hosts: Annotated[int | tuple[str, ...], SIZE]
    """Worker hosts."""
    workers_per_host: Annotated[int | None, SIZE] = None
    """Workers per host; default: one per GPU, or one."""
    global_batch: Annotated[int | None, SIZE] = None
    """Samples per step: use the largest number of hosts whose workers divide it."""
    helpers_required: Annotated[bool, SIZE] = False
    """Fail if helpers are missing. By default the run starts without them, after a warning."""

    def __post_init__(self) -> None:
        check_counts(self)
        gpus = getattr(self, "gpus_per_host", None)
        if gpus is not None and (self.workers_per_host or 0) > gpus:
            raise UsageError(
                f"--workers-per-host {self.workers_per_host} must be at most --gpus-per-host {gpus}: "
                "a worker has a GPU of its own"
            )

    def launch_options(self) -> list[str]:
        """Return these as options of ``shoal launch``."""
        numbers = {"workers": self.workers_per_host, "global-batch": self.global_batch}
        options = [f"--{name}={value}" for name, value in numbers.items() if value is not None]
        return [*options, *(["--helpers-required"] if self.helpers_required else [])]


@dataclass(frozen=True, kw_only=True)
class JobSize(Workers):
    """Options of every job in a queue: each scheduler adds its own."""

    hosts: Annotated[int, SIZE]
    """Worker hosts."""
    helpers: Annotated[int, SIZE] = 0
    """Helper hosts."""
    name: str | None = None
    """Name of the job; default: the command's first words."""


def option(field: str) -> str:
    """Return the option of a field of settings."""
    return f"--{field.replace('_', '-')}"


def check_counts(settings: object) -> None:
    """Check that numbers of hosts, workers and the like are at least 1, of helpers 0.

    Raises:
        UsageError: one is smaller.
    """
    for name, least in _LEAST.items():
        value = getattr(settings, name, None)
        if isinstance(value, int) and value < least:
            raise UsageError(f"{option(name)} {value} must be at least {least}")


def check_form(settings: object, field: str, form: re.Pattern[str], rule: str) -> None:
    """Check the form of a text, or of each of several; ``None`` is not checked.

    Raises:
        UsageError: one is of another form; its text ends with ``rule``.
    """
    values = getattr(settings, field)
    for value in values if isinstance(values, tuple) else (values,):
        if value is not None and not form.fullmatch(value):
            raise UsageError(f"{option(field)} {value!r} {rule}")


def name_of(command: Sequence[str]) -> str:
    """Return the first word of a command that names its program: ``bert`` of ``shoal train bert``."""
    words = [Path(word).stem for word in command if word not in _OWN_WORDS]
    return next((word for word in words if not word.startswith(("-", "python"))), "shoal")
