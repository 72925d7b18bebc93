"""Defines a job's size, by options that all schedulers share, with their checks, and its name."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from shoal.env.settings import check_helpers
from shoal.env.worker import num_training_hosts
from shoal.errors import UsageError
from shoal.launch.job_folder import usable_hosts

HELPER_PORT, RENDEZVOUS_PORT = 7070, 29_400
"""Ports of helpers' servers and of the first worker host, on schedulers that give each job its own hosts."""
SIZE = Parameter(group=Group("Size of the job", sort_key=1))
"""Puts an option into this group of ``--help``."""
_COUNTS = (
    "hosts", "min_hosts", "workers_per_host", "global_batch", "gpus_per_host", "cpus_per_host",
    "efa_per_host", "helper_efa", "save_s", "volume_gb", "nnodes", "workers", "helper_port",
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
    transport: str | None = None
    """tcp (the default), or ofi: and libfabric's providers on all hosts, such as ofi:efa."""

    def __post_init__(self) -> None:
        check_counts(self)
        check_transport(self.transport)
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


def usable_workers(
    num_hosts: int, workers_per_host: int, global_batch: int | None, command: Sequence[str] = ()
) -> int:
    """Return the workers of the largest number of hosts over whose workers a global batch divides.

    Args:
        num_hosts: of the job.
        command: of a worker, which may keep hosts apart for evaluation.

    Raises:
        UsageError: it does not divide over the workers of one host, or no host is left to train.
    """
    num_hosts = num_training_hosts(num_hosts, hosts_apart(command))
    return usable_hosts(num_hosts, workers_per_host, global_batch) * workers_per_host


def hosts_apart(command: Sequence[str]) -> int:
    """Return the hosts that a command, in its words or its file, keeps apart for evaluation."""
    named = option_of(command, "--run.validation-hosts")
    if named is not None:
        return int(named) if named.isdecimal() else 0  # the command itself refuses it
    number = _setting_in(option_of(command, "--config"), "run", "validation_hosts")
    return number if isinstance(number, int) else 0


def is_elastic(command: Sequence[str]) -> bool:
    """Return whether the workers of a command come and go, by its words or its file."""
    named = option_of(command, "--distributed.elastic")
    return bool(named or _setting_in(option_of(command, "--config"), "distributed", "elastic"))


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


def check_transport(transport: str | None) -> None:
    """Check the words for a transport; whether hosts have it shows when they connect.

    Raises:
        UsageError: they are of another form.
    """
    if transport is not None:
        from shoal.comm.engine import fabric_providers  # --help does without it

        fabric_providers(transport)


def check_use_of_helpers(command: Sequence[str], num_helpers: int) -> None:
    """Refuse helper hosts that the backend or the wire format of a command, or of its file, would leave idle.

    Args:
        command: of the workers.
        num_helpers: helper hosts of the job.

    Raises:
        UsageError: it names another backend than shoal, or int8.
    """
    if not num_helpers:
        return

    def setting(name: str, default: str) -> str:
        in_file = _setting_in(option_of(command, "--config"), "distributed", name)
        named = option_of(command, f"--distributed.{name}") or in_file
        return named if isinstance(named, str) else default

    check_helpers(setting("backend", "auto"), num_helpers, setting("wire", "fp32"))


def _setting_in(file: str | None, section: str, name: str) -> object:
    """Return a setting in a file; ``None`` if it is not there, or the file cannot be read here."""
    try:
        values = tomllib.loads(Path(file or "").read_text(encoding="utf-8")).get(section)
    except (OSError, ValueError):  # the command itself says so
        return None
    return values.get(name) if isinstance(values, dict) else None


def option_of(command: Sequence[str], name: str) -> str | None:
    """Return the value of an option of a command, if it is given."""
    for word, following in pairwise([*command, ""]):
        if word == name and following:
            return following
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None


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
