"""Chooses the backend of ``torch.distributed`` that carries a run's gradients, and says why.

``distributed.backend`` of the settings decides for good. With ``auto`` (:func:`choose_backend`):

| workers | backend |
|---|---|
| any, with helper hosts or servers that update weights | shoal |
| any, of a run that has averaged gradients before | the recorded one |
| on CPUs | shoal if its process group in C++ loads on all hosts, else gloo |
| on GPUs of one host | nccl |
| on GPUs of several hosts | the faster of nccl and shoal, measured (:func:`choose_measured`) |

The measurement sums as many bytes as a bucket has, or as fit the time (:func:`next_bytes`), in the run's own
wire format.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.decide.server_assignment import MIB
from shoal.env.settings import check_helpers, counted_helpers
from shoal.errors import UsageError

AUTO = "auto"
SHOAL = "shoal"
GLOO = "gloo"
NCCL = "nccl"

READINGS = 5
"""Readings of each backend; their medians are compared."""
LIMIT_S = 3.0
"""Seconds that all readings together may take."""
HYSTERESIS = 1.1
"""Ratio by which shoal must be faster than the backend that GPUs have without a comparison."""
SMALLEST_BYTES = 64 << 10
"""Bytes of the first reading."""
_GROWTH = 4

Readings = Mapping[str, Sequence[float]]
"""Seconds of each backend's sums, by its name."""


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """Workers of a run so far, by its record."""

    backend: str
    num_workers: int
    num_hosts: int


@dataclass(frozen=True, kw_only=True)
class Situation:
    """Everything that the choice depends on, the same on all workers."""

    requested: str = AUTO
    """``distributed.backend`` of the settings."""
    wire: str = "fp32"
    """``distributed.wire`` of the settings."""
    on_gpu: bool = False
    num_workers: int = 1
    num_hosts: int = 1
    num_helpers: int = 0
    """Servers on helper hosts, or helper hosts that a job will have."""
    averages: bool = True
    """False for workers that only predict."""
    servers: str = ""
    """The option by which servers update weights, such as ``servers.mode sync``; may be empty."""
    recorded: Recorded | None = None
    """``None``: the run begins."""
    unloaded: str = ""
    """Why shoal's process group in C++ does not load on some host; empty if it does."""


@dataclass(frozen=True, kw_only=True)
class BackendChoice:
    """A backend.

    Attributes:
        backend: its name.
        reason: in a few words, for the record.
        note: a line for the terminal, where a user would not expect the choice; mostly empty.
    """

    backend: str
    reason: str
    note: str = ""


def choose_backend(known: Situation) -> BackendChoice | None:
    """Return the backend, or ``None`` where nccl and shoal have to be compared.

    Raises:
        UsageError: helper hosts that the named backend or the wire format cannot use, or GPU workers with
            helper hosts whose process group in C++ does not load.
    """
    check_helpers(known.requested, known.num_helpers, known.wire)
    if known.requested != AUTO:
        return BackendChoice(backend=known.requested, reason="distributed.backend names it")
    if not known.averages:
        return BackendChoice(backend=GLOO, reason="nothing is averaged")
    if known.num_helpers or known.servers:
        return _for_servers(known)
    if kept := _recorded(known):
        return kept
    if known.num_workers == 1:
        return BackendChoice(backend=NCCL if known.on_gpu else GLOO, reason="one worker has nothing to sum")
    if known.on_gpu and known.num_hosts == 1:
        return BackendChoice(backend=NCCL, reason="GPUs of one host")
    if known.unloaded:
        return _without_cpp(known)
    return None if known.on_gpu else BackendChoice(backend=SHOAL, reason="workers on CPUs")


def planned_backend(known: Situation) -> str:
    """Return the backend of a job before it starts, in words.

    Raises:
        UsageError: as :func:`choose_backend`.
    """
    choice = choose_backend(known)
    if choice is None:
        return f"{NCCL}, or {SHOAL} if it is 10 % faster in a comparison of {LIMIT_S:g} s at the start"
    text = f"{choice.backend} ({choice.reason})"
    if choice.backend != SHOAL or known.requested != AUTO or known.num_helpers or known.servers:
        return text
    return f"{text}; {GLOO} if its process group in C++ does not load"


def _for_servers(known: Situation) -> BackendChoice:
    reason = counted_helpers(known.num_helpers) if known.num_helpers else known.servers
    if known.on_gpu and known.unloaded:
        raise UsageError(
            f"{reason}, and workers on GPUs need shoal's process group in C++ for that, which does not "
            f"load: {known.unloaded}; --distributed.backend shoal takes the slower one in Python"
        )
    return BackendChoice(backend=SHOAL, reason=reason)


def _recorded(known: Situation) -> BackendChoice | None:
    """Return the backend of a run that continues, if its workers are of the kind that it was chosen for."""
    before = known.recorded
    if before is None or before.num_workers == 1 or known.num_workers == 1:
        return None
    if before.backend == NCCL and (not known.on_gpu or (before.num_hosts == 1) != (known.num_hosts == 1)):
        return None
    return BackendChoice(backend=before.backend, reason="the run began with it")


def _without_cpp(known: Situation) -> BackendChoice:
    backend = NCCL if known.on_gpu else GLOO
    return BackendChoice(
        backend=backend,
        reason="shoal's process group in C++ does not load",
        note=f"backend {backend}: shoal's process group in C++ does not load: {known.unloaded}",
    )


# ---- the comparison --------------------------------------------------------------------------------------


def next_bytes(
    num_bytes: int, *, bucket_bytes: int, slowest_s: float, spent_s: float, num_readings: int
) -> int:
    """Return the bytes of the next reading; the same as before where no more fit the time.

    Readings begin with :data:`SMALLEST_BYTES` and grow to a bucket, as long as all of them would end within
    :data:`LIMIT_S` at the rate that was seen.

    Args:
        num_bytes: of the last reading.
        bucket_bytes: of a bucket.
        slowest_s: time of that reading, of the slower backend.
        spent_s: time of all readings so far.
        num_readings: readings to come, if these are the last that grow.
    """
    larger = min(_GROWTH * num_bytes, bucket_bytes)
    expected_s = slowest_s * larger / num_bytes
    return larger if spent_s + num_readings * expected_s <= LIMIT_S else num_bytes


def choose_measured(
    seconds: Mapping[str, Readings], *, wire: str, num_bytes: int, first: str = NCCL
) -> BackendChoice:
    """Return the backend with the shortest median: ``first`` unless another is 10 % faster.

    Args:
        seconds: readings by wire format; those of ``wire`` decide, others are only suggested.
        wire: the run's own format.
        num_bytes: of fp32 gradients in a sum.
        first: the backend that workers have without a comparison.

    Example:

        >>> seconds = {"fp32": {"nccl": [0.011], "shoal": [0.006]}}
        >>> choice = choose_measured(seconds, wire="fp32", num_bytes=25 << 20)
        >>> choice.backend, choice.reason
        ('shoal', '25 MiB as fp32: nccl 11.0 ms, shoal 6.0 ms')
    """
    medians = {name: statistics.median(each) for name, each in seconds[wire].items()}
    fastest = min(medians, key=medians.__getitem__)
    chosen = fastest if medians[fastest] * HYSTERESIS <= medians[first] else first
    reason = f"{num_bytes / MIB:.3g} MiB as {wire}: " + ", ".join(
        f"{name} {1e3 * each:.1f} ms" for name, each in medians.items()
    )
    return BackendChoice(
        backend=chosen,
        reason=reason,
        note=f"backend {chosen}, by the sum of {reason}{_suggestion(seconds, wire, medians[chosen])}",
    )


def _suggestion(seconds: Mapping[str, Readings], wire: str, own_s: float) -> str:
    """Return a hint at the format with the shortest median, if it is 10 % faster than the run's."""
    others = {
        (name, other): statistics.median(each)
        for other, readings in seconds.items()
        for name, each in readings.items()
        if other != wire
    }
    best = min(others, key=others.__getitem__, default=None)
    if best is None or others[best] * HYSTERESIS > own_s:
        return ""
    name, other = best
    return f"; --distributed.wire {other} takes {1e3 * others[best]:.1f} ms over {name}"
