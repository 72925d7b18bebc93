"""The options of ``shoal bench comm``."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import UsageError, did_you_mean
from shoal.launch.emulated_network import parse_rate

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "barrier")
DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64")
COLOCATED = "shoal-colocated"
"""The backend shoal without its helper hosts."""

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmg]?)(?:i?b)?")


@dataclass(frozen=True, kw_only=True)
class CommBench:
    """What to measure, on which hosts, and where to write it."""

    sizes: tuple[int, ...]
    """Bytes of the tensor that a collective works on, the whole one."""
    collectives: tuple[str, ...]
    backends: tuple[str, ...]
    """Names of torch backends, or :data:`COLOCATED`; empty: gloo and shoal, with and without helpers."""
    dtype: str = "float32"
    repeats: int = 7
    timeout_s: float = 300.0
    workers: int | None = None
    hosts: int | None = None
    nic: str | None = None
    num_helpers: int = 0
    helper_nic: str | None = None
    link: str | None = None
    json: Path | None = None
    plot: Path | None = None
    trace: Path | None = None

    @property
    def link_bytes_per_s(self) -> float | None:
        """The rate of a host's link in each direction, if the user has named it."""
        if rate := self.link or self.nic:
            return parse_rate(rate, option="--link" if self.link else "--nic") / 8
        return None

    def check(self) -> None:
        """Look for what cannot be measured, before anything is started.

        Raises:
            UsageError: a name or a number is none, options do not go together, a file cannot be written.
        """
        for collective in self.collectives:
            if collective not in COLLECTIVES:
                raise UsageError(
                    f"--collectives: {collective!r} is none of {', '.join(COLLECTIVES)}."
                    f"{did_you_mean(collective, COLLECTIVES)}"
                )
        if self.dtype not in DTYPES:
            raise UsageError(
                f"--dtype: {self.dtype!r} is none of {', '.join(DTYPES)}.{did_you_mean(self.dtype, DTYPES)}"
            )
        if self.repeats < 1:
            raise UsageError(f"--repeats {self.repeats} must be at least 1")
        if not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            raise UsageError(f"--timeout {self.timeout_s} must be a positive number of seconds")
        if self.hosts is None and (self.nic or self.num_helpers or self.helper_nic):
            raise UsageError("--nic, --helpers and --helper-nic belong to emulated hosts: add --hosts N")
        _ = self.link_bytes_per_s
        for path in filter(None, (self.json, self.plot, self.trace)):
            if not path.parent.is_dir():
                raise UsageError(f"{path}: the folder {path.parent} is not there; make it first")
        if self.plot is not None:
            from shoal.bench.plot import require_matplotlib

            require_matplotlib()

    def chosen_backends(self, *, has_helpers: bool) -> tuple[str, ...]:
        return self.backends or (("gloo", COLOCATED, "shoal") if has_helpers else ("gloo", "shoal"))


def parse_sizes(texts: Sequence[str]) -> tuple[int, ...]:
    """Return sizes such as ``64k``, ``1m`` or ``2.5MiB`` in bytes; k, m and g are powers of 1,024.

    Raises:
        UsageError: one is no size.
    """
    sizes = []
    for text in texts:
        match = _SIZE.fullmatch(text.strip().lower())
        size = round(float(match[1]) * _UNITS[match[2]]) if match else 0
        if size < 1:
            raise UsageError(f"--sizes: {text!r} must be a number of bytes above 0, such as 4k, 1m or 25m")
        sizes.append(size)
    return tuple(sizes)


def split_list(text: str) -> list[str]:
    """Return the parts of a list that is separated by commas."""
    return [part.strip() for part in text.split(",") if part.strip()]
