"""Selects a new group's helper hosts, and measures their bandwidths.

A group uses those of ``SHOAL_HELPERS`` that rank 0 reaches and that no group of its process has lost.
"""

from __future__ import annotations

import ctypes
import ipaddress
import socket
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from shoal import env
from shoal.comm.engine import CommError, Engine, Operation, lost_helpers
from shoal.comm.store import Records
from shoal.decide.server_assignment import assign_chunks
from shoal.env import HelperAddress
from shoal.errors import UsageError

REACH_S = 3.0
"""Time that a new group waits for helpers that do not accept a connection."""
_PAUSE_S = 0.1

_PROBE_HOST_S = 0.15
_PROBE_ALL_HELPERS_S = 0.25
_PROBE_HELPER_S = 0.04
_PROBE_MIN_BYTES = 128 << 10
_PROBE_MAX_BYTES = 64 << 20
_PROBE_TIMEOUT_S = 30.0
_MAX_PROBED_HELPERS = 12
_PATTERN_LENGTH = 240
_SAME_RATE = 1.3  # a short probe does not resolve smaller ratios between helpers
_RESOLUTION = 20  # multiples are rounded to 1/20: the probe is no more accurate, and patterns stay short

# Reasons by helper name. An excluded helper stays excluded: one that comes and goes, or that only rank 0
# reaches, would delay the start of every further group.
_excluded: dict[str, str] = {}
# Multiples by helper name, so that further groups of the job do not probe again.
_measured: dict[str, float] = {}


def name_of(helper: HelperAddress) -> str:
    return f"{helper.address}:{helper.port}"


def reachable_helpers(*, workers_serve: bool) -> list[HelperAddress]:
    """Return the helpers of SHOAL_HELPERS that can serve a new group; print the excluded ones to stderr.

    Raises:
        CommError: there are helpers, none is usable, and workers may not serve.
        UsageError: an address is not an IPv4 address.
    """
    given = env.helpers()
    for helper in given:
        try:
            ipaddress.IPv4Address(helper.address)
        except ValueError:
            raise UsageError(
                f"SHOAL_HELPERS has the entry {name_of(helper)!r}, and {helper.address!r} is not an IPv4 "
                "address; write the address that `shoal serve` was given"
            ) from None
    for name in lost_helpers():
        _exclude(name, "a group of this process lost it")
    asked = [helper for helper in given if name_of(helper) not in _excluded]
    for helper, problem in zip(asked, _reach(asked), strict=True):
        if problem:
            _exclude(name_of(helper), f"it was not reached in {REACH_S:g} s: {problem}")
    usable = [helper for helper in asked if name_of(helper) not in _excluded]
    if given and not usable and not workers_serve:
        reasons = "; ".join(f"{name_of(helper)}: {_excluded[name_of(helper)]}" for helper in given)
        raise CommError(
            f"no server is left: none of SHOAL_HELPERS can be used ({reasons}) and workers do not serve; "
            "start the helpers again, or allow EngineOptions.workers_serve"
        )
    return usable


def bandwidth_of(helper: HelperAddress) -> float | None:
    """Return a helper's bandwidth as SHOAL_HELPERS gives it or a group has measured it, else ``None``."""
    return helper.bandwidth or _measured.get(name_of(helper))


def remember_bandwidths(names: Sequence[str], bandwidths: Sequence[float]) -> None:
    """Store measured bandwidths for later groups of this process."""
    _measured.update(zip(names, bandwidths, strict=True))


def helper_bandwidths() -> tuple[float, ...]:
    """Return the bandwidth of each of SHOAL_HELPERS as a multiple of a worker host's.

    The value is given by the variable, or measured by a group of this process, or else 1. Excluded helpers
    are left out.
    """
    return tuple(bandwidth_of(each) or 1.0 for each in env.helpers() if name_of(each) not in _excluded)


def _exclude(name: str, why: str) -> None:
    if name in _excluded:
        return
    _excluded[name] = why
    print(f"shoal: new groups do without helper {name}: {why}", file=sys.stderr)


def _reach(helpers: Sequence[HelperAddress]) -> list[str]:
    """Return the reason for which each helper is unreachable; an empty string for the others."""
    deadline = time.monotonic() + REACH_S
    with ThreadPoolExecutor(max(len(helpers), 1)) as pool:
        return list(pool.map(lambda helper: _reach_one(helper, deadline), helpers))


def _reach_one(helper: HelperAddress, deadline: float) -> str:
    """Connect, and retry until the deadline: the helper may be starting, or its listen queue may be full.

    The server does not count a connection that sends nothing as a stranger.
    """
    problem = "no answer"
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((helper.address, helper.port), timeout=left_s).close()
            return ""
        except TimeoutError:
            return "no answer"
        except OSError as error:
            problem = error.strerror or str(error)
            time.sleep(min(_PAUSE_S, left_s))
    return problem


# ---- bandwidth probe ------------------------------------------------------------------------------------
# Runs once, when a group with helper hosts starts. Rank 0's clock decides, and the store carries its
# readings, so that all ranks use the same pattern. It takes about 0.5 s, and 0.2 s per helper;
# SHOAL_HELPERS=address:port*2.0 gives the bandwidth and avoids it.


def measure_helpers(
    engine: Engine, records: Records, *, rank: int, size: int, num_hosts: int, num_helpers: int
) -> tuple[float, list[float]]:
    """Measure a worker host's bandwidth, and each helper's as a multiple of it. All ranks call it.

    It measures the workers' links first, then each of the first 12 helpers for a moment, to compare them, and
    last all helpers together, for their sum.

    Returns:
        The bandwidth of a worker host in bytes/s, and the multiple of each helper.

    Raises:
        CommError: the group failed.
    """
    engine.set_pattern(list(range(size)))
    num_bytes, took_s = _PROBE_MIN_BYTES, 0.0
    for attempt in range(32):
        took_s = _timed(engine, num_bytes)
        enough = took_s >= _PROBE_HOST_S or num_bytes >= _PROBE_MAX_BYTES
        next_bytes = _from_rank_0(records, rank, f"probe/{attempt}", 0 if enough else num_bytes * 2)
        if not next_bytes:
            break
        num_bytes = int(next_bytes)
    host = _from_rank_0(records, rank, "probe/host", 2 * (num_hosts - 1) / num_hosts * num_bytes / took_s)
    rates = []
    for helper in range(min(num_helpers, _MAX_PROBED_HELPERS)):
        engine.set_pattern([size + helper])
        share = max(int(host * _PROBE_HELPER_S / num_hosts), _PROBE_MIN_BYTES)
        _timed(engine, share // 2)  # warms up the connections
        rates.append(_from_rank_0(records, rank, f"probe/helper/{helper}", share / _timed(engine, share)))
    weights = _relative_rates(rates) + [1.0] * (num_helpers - len(rates))
    engine.set_pattern([size + helper for helper in assign_chunks(_PATTERN_LENGTH, weights)])
    num_bytes = min(int(host * _PROBE_ALL_HELPERS_S), _PROBE_MAX_BYTES)
    together = num_hosts * num_bytes / _timed(engine, num_bytes) / host
    together = _from_rank_0(records, rank, "probe/together", together)
    return host, _multiples(weights, together, num_hosts)


def _relative_rates(rates: list[float]) -> list[float]:
    """Return rates as multiples of their mean; all 1 if they differ little."""
    mean = sum(rates) / len(rates)
    same = max(rates) <= _SAME_RATE * min(rates)
    return [1.0 if same else rate / mean for rate in rates]


def _multiples(weights: list[float], together: float, num_hosts: int) -> list[float]:
    """Return each helper's bandwidth as a multiple of a worker host's.

    ``together`` is the multiple of all helpers. From about ``num_hosts`` on, the workers' links were the
    limit: the helpers can then take everything, and are not measured more precisely.
    """
    if together > 0.8 * num_hosts:
        together = max(float(num_hosts), together)
    scale = together / sum(weights)
    return [max(round(weight * scale * _RESOLUTION), 1) / _RESOLUTION for weight in weights]


def _timed(engine: Engine, num_bytes: int) -> float:
    """Return the seconds of an all_reduce that all ranks begin together."""
    count = num_bytes // 4
    values = (ctypes.c_float * count)()
    engine.wait(engine.submit(Operation(kind="barrier", timeout_s=_PROBE_TIMEOUT_S)))
    operation = Operation(
        kind="all_reduce", input=ctypes.addressof(values), output=ctypes.addressof(values), count=count,
        dtype="float32", shape=(count,), timeout_s=_PROBE_TIMEOUT_S,
    )  # fmt: skip
    begin = time.perf_counter()
    engine.wait(engine.submit(operation))
    return time.perf_counter() - begin


def _from_rank_0(records: Records, rank: int, key: str, value: float) -> float:
    """Return rank 0's value."""
    if rank == 0:
        records.put(key, {"value": float(value)})
    return float(records.get(key, 0, {"value": float})["value"])
