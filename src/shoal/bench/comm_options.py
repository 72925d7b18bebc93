"""Defines and checks the options of ``shoal bench comm``."""

from __future__ import annotations

import importlib.util
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from shoal.errors import UsageError, did_you_mean, install_command
from shoal.launch.emulated_job import Hosts
from shoal.launch.emulated_network import parse_rate

COLOCATED = "shoal-colocated"
"""The backend shoal without its helper hosts."""
FRAMEWORKS = ("shoal-jax", "shoal-tensorflow")
"""The engine of backend shoal, called by programs of JAX and of TensorFlow."""
COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "barrier")
DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64")

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?)(?:i?b)?")


@dataclass(frozen=True, kw_only=True)
class CommBench:
    """Options of ``shoal bench comm``."""

    sizes: str = "4k,64k,1m,16m"
    """Bytes of the whole tensor, separated by commas; k, m and g are powers of 1,024."""
    collectives: str = "all_reduce"
    """all_reduce, reduce_scatter, all_gather, broadcast, reduce, barrier; several separated by commas."""
    backends: str = ""
    """Backends of torch.distributed; shoal-colocated for shoal without its helper hosts; shoal-jax and
    shoal-tensorflow for shoal in programs of JAX and TensorFlow. Default: gloo and shoal, and shoal-colocated
    if there are helpers."""
    dtype: str = "float32"
    """Type of the elements."""
    repeats: int = 7
    """Samples per collective, size and backend."""
    workers: int | None = None
    """Workers on this machine (default 2), or on each emulated host (default 1)."""
    emulated: Annotated[Hosts, Parameter(name="*")] = field(default_factory=Hosts)
    link: str | None = None
    """Rate of a host's link on a real cluster, such as 10gbit, to compare with its limit."""
    timeout: float = 300.0
    """Seconds after which a collective has failed."""
    json: Path | None = None
    """File for all samples."""
    plot: Path | None = None
    """File for a plot: .png, .svg or .pdf."""
    trace: Path | None = None
    """File for a timeline, for chrome://tracing and ui.perfetto.dev."""

    @property
    def link_bytes_per_s(self) -> float | None:
        """Rate of a host's link in each direction, if given."""
        if rate := self.link or self.emulated.nic:
            return parse_rate(rate, option="--link" if self.link else "--nic") / 8
        return None

    def check(self) -> None:
        """Validate the options before anything is started.

        Raises:
            UsageError: an unknown name, a number out of range, options that exclude each other, or a file
                that cannot be written.
        """
        parse_sizes(self.sizes)
        for option, names, known in (
            ("--collectives", split_list(self.collectives), COLLECTIVES),
            ("--dtype", [self.dtype], DTYPES),
        ):
            for name in names:
                if name not in known:
                    near = did_you_mean(name, known)
                    raise UsageError(f"{option}: {name!r} is none of {', '.join(known)}.{near}")
        frameworks = [name for name in split_list(self.backends) if name in FRAMEWORKS]
        if frameworks and "reduce" in split_list(self.collectives):
            raise UsageError(
                f"--collectives reduce: {frameworks[0]} has none, its programs call all_reduce; leave out "
                f"reduce or {frameworks[0]}"
            )
        for name, number in (("repeats", self.repeats), ("workers", self.workers)):
            if number is not None and number < 1:
                raise UsageError(f"--{name} {number} must be at least 1")
        if not (math.isfinite(self.timeout) and self.timeout > 0):
            raise UsageError(f"--timeout {self.timeout} must be a positive number of seconds")
        if self.emulated.hosts is None and (options := self.emulated.changed_options()):
            raise UsageError(f"{', '.join(options)} set up emulated hosts: add --hosts N")
        _ = self.link_bytes_per_s
        for path in filter(None, (self.json, self.plot, self.trace)):
            if not path.parent.is_dir():
                raise UsageError(f"{path}: the folder {path.parent} is not there; make it first")
        if self.plot is not None and importlib.util.find_spec("matplotlib") is None:
            raise UsageError(f"--plot needs matplotlib: {install_command('report')}")


def parse_sizes(texts: str) -> list[int]:
    """Return sizes such as ``64k,1m,2.5MiB`` in bytes; k, m and g are powers of 1,024.

    Raises:
        UsageError: an entry is not a size.
    """
    sizes = []
    for text in split_list(texts) or [""]:
        match = _SIZE.fullmatch(text.lower())
        size = round(float(match[1]) * _UNITS[match[2]]) if match else 0
        if size < 1:
            raise UsageError(f"--sizes: {text!r} must be a number of bytes above 0, such as 4k, 1m or 25m")
        sizes.append(size)
    return sizes


def split_list(text: str) -> list[str]:
    """Return the entries of a list separated by commas."""
    return [part.strip() for part in text.split(",") if part.strip()]
