"""Selects a new group's helper hosts, and measures their bandwidths.

A group uses those of ``SHOAL_HELPERS`` that rank 0 reaches and that no group of its process has lost.
"""

from __future__ import annotations

import ctypes
import math
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache

from shoal import native
from shoal.comm.engine import CommError, Engine, Operation, has_lost, lost_helpers
from shoal.comm.store import Records
from shoal.decide.server_assignment import assign_chunks
from shoal.env import settings
from shoal.env.secret import job_secret
from shoal.env.settings import HelperAddress

REACH_S = 3.0
"""Time that a new group waits for helpers whose host does not answer."""
STARTING_S = 30.0
"""Time that it waits for servers that do not listen yet on a host that answers; half its timeout if less."""
_PAUSE_S = 0.1
_AGAIN_S = 0.2
"""Time that it waits for a helper that was lost, which may have begun again."""
_LOST = "a group of this process lost it"

_PROBE_HOST_S = 0.15
_PROBE_ALL_HELPERS_S = 0.4  # a helper's first sums wait for a message of each host: 42 ms of 16 at 50 Mbit/s
_PROBE_HELPER_S = 0.04
_PROBE_MIN_BYTES = 128 << 10
_PROBE_MAX_BYTES = 64 << 20
_MAX_PROBED_HELPERS = 12
_MOST_TRANSFERS = 8
_MOST_READINGS = 3
_STEADY = 1.1
_PATTERN_LENGTH = 240
MANY_CONNECTIONS = 4
"""Connections to each peer that are tried beside one: clouds limit the rate of a flow."""
_WORTH_CONNECTIONS = 1.3
_TURNS = 4  # readings that must all agree before a group takes more connections
_SAME_RATE = 2.0  # a short probe of links that let bursts through resolves no smaller ratios
_STANDS_OUT = 1.3  # a helper this far from the median is measured again
_LIKE_HOST = 1.33  # helpers within this ratio of a worker host count as equal to it
_RESOLUTION = 20  # multiples are rounded to 1/20: the probe is no more accurate, and patterns stay short

# Reasons by helper name. An excluded helper stays excluded: one that comes and goes, or that only rank 0
# reaches, would delay the start of every further group.
_excluded: dict[str, str] = {}
# Multiples by helper name, so that further groups of the job do not probe again.
_measured: dict[str, float] = {}
_connections = 0  # for data to each peer, likewise; 0: not measured


def name_of(helper: HelperAddress) -> str:
    return f"{helper.address}:{helper.port}"


def reachable_helpers(*, workers_serve: bool, timeout_s: float) -> list[HelperAddress]:
    """Return the helpers of SHOAL_HELPERS that can serve a new group; print the excluded ones to stderr.

    Args:
        workers_serve: whether the group can do without helpers.
        timeout_s: limit for the group's start. The other ranks wait meanwhile.

    Raises:
        CommError: there are helpers, none is usable, and workers may not serve.
    """
    helpers = [_resolved(helper) for helper in settings.helpers()]
    for helper in helpers:
        if _is_lost(helper):
            _exclude(name_of(helper), _LOST)
    candidates = [helper for helper in helpers if name_of(helper) not in _excluded]
    for helper, problem in zip(candidates, _reach(candidates, min(STARTING_S, timeout_s / 2)), strict=True):
        if problem:
            _exclude(name_of(helper), problem)
    usable = [helper for helper in candidates if name_of(helper) not in _excluded]
    if helpers and not usable and not workers_serve:
        reasons = "; ".join(f"{name_of(helper)}: {_excluded[name_of(helper)]}" for helper in helpers)
        raise CommError(
            f"no server is left: none of SHOAL_HELPERS can be used ({reasons}) and workers do not serve; "
            "start the helpers again, or allow EngineOptions.workers_serve"
        )
    return usable


@cache
def _resolved(helper: HelperAddress) -> HelperAddress:
    """Return a helper by its address; exclude one whose name stands for none within :data:`REACH_S`.

    An IPv4 address goes before one of IPv6.
    """
    until = time.monotonic() + REACH_S
    while True:
        try:
            entries = socket.getaddrinfo(helper.address, helper.port, type=socket.SOCK_STREAM)
            entries.sort(key=lambda entry: entry[0] != socket.AF_INET)
            return replace(helper, address=str(entries[0][4][0]))
        except OSError as problem:
            if time.monotonic() > until:
                reason = f"its name stands for no address: {problem.strerror or problem}"
                _exclude(name_of(helper), reason)
                return helper
        time.sleep(_PAUSE_S)


def _is_lost(helper: HelperAddress) -> bool:
    """Return whether a group of this process has lost the helper, and no other process listens there now.

    One that has begun again has another public key, and serves new groups.
    """
    name = name_of(helper)
    if name not in lost_helpers():
        return False
    key = _ask(helper, _AGAIN_S)
    if not key or has_lost(name, key):
        return True
    if _excluded.get(name) == _LOST:
        del _excluded[name]
        print(f"shoal: helper {name} has begun again: new groups use it", file=sys.stderr)
    return False


def helper_keys(helpers: Sequence[HelperAddress]) -> list[str]:
    """Return the public key of each helper as hexadecimal digits; an empty string if it does not answer.

    In the group's signed record it makes sure that all ranks have the same process there. One that does not
    know the secret has none: the connection to it will say so.
    """
    with ThreadPoolExecutor(max(len(helpers), 1)) as pool:
        return list(pool.map(lambda helper: _ask(helper, REACH_S), helpers))


def _ask(helper: HelperAddress, limit_s: float) -> str:
    try:
        key = native.core().key_of_listener(helper.address, helper.port, job_secret() or b"", limit_s)
    except RuntimeError:
        return ""
    return str(key.hex())


def bandwidth_of(helper: HelperAddress) -> float | None:
    """Return a helper's bandwidth as SHOAL_HELPERS gives it or a group has measured it, else ``None``."""
    return helper.bandwidth or _measured.get(name_of(helper))


def remember_bandwidths(names: Sequence[str], bandwidths: Sequence[float]) -> None:
    """Store measured bandwidths for later groups of this process."""
    _measured.update(zip(names, bandwidths, strict=True))


def measured_connections() -> int:
    """Return the number of connections to each peer that a group has chosen; 0 for none yet."""
    return _connections


def remember_connections(number: int) -> None:
    """Store the measured number of connections for later groups of this process."""
    global _connections
    _connections = number


def connections_help(one: Callable[[], float], several: Callable[[], float], first: float) -> bool:
    """Return whether several connections to a peer are worth it: every time, by readings in turn.

    Another program that takes the processors lowers a rate, and nothing raises it: of the rates with one
    connection (``first`` is one already measured) the best counts.
    """
    best = first
    for _ in range(_TURNS):
        if several() <= _WORTH_CONNECTIONS * best:
            return False
        best = max(best, one())
    return True


def helper_bandwidths() -> tuple[float, ...]:
    """Return the bandwidth of each of SHOAL_HELPERS as a multiple of a worker host's.

    The value is given by the variable, or measured by a group of this process, or else 1. Excluded helpers
    are left out.
    """
    helpers = [_resolved(helper) for helper in settings.helpers()]
    return tuple(bandwidth_of(each) or 1.0 for each in helpers if name_of(each) not in _excluded)


def _exclude(name: str, reason: str) -> None:
    if name in _excluded:
        return
    _excluded[name] = reason
    print(f"shoal: new groups do without helper {name}: {reason}", file=sys.stderr)


def _reach(helpers: Sequence[HelperAddress], starting_s: float) -> list[str]:
    """Return the reason for which each helper is unreachable; an empty string for the others."""
    with ThreadPoolExecutor(max(len(helpers), 1)) as pool:
        return list(pool.map(lambda helper: _reach_one(helper, starting_s), helpers))


def _reach_one(helper: HelperAddress, starting_s: float) -> str:
    """Connect, and retry for :data:`REACH_S`, or for ``starting_s`` where its host refuses the connection.

    A host that refuses is there, and its server may be starting. A server that listens has been reached even
    if its process is stopped: the group's connections wait for it. A connection that sends nothing is no
    stranger to it.
    """
    begin = time.monotonic()
    problem, limit_s, announced = "no answer", min(REACH_S, starting_s), False
    num_losses = lost_helpers().count(name_of(helper))
    while (left_s := begin + limit_s - time.monotonic()) > 0:
        if lost_helpers().count(name_of(helper)) > num_losses:
            return _LOST
        try:
            socket.create_connection((helper.address, helper.port), timeout=left_s).close()
            return ""
        except TimeoutError:
            problem = "no answer"
        except OSError as error:
            problem = error.strerror or str(error)
            limit_s = starting_s if isinstance(error, ConnectionRefusedError) else limit_s
            time.sleep(min(_PAUSE_S, left_s))
        if not announced and time.monotonic() - begin > REACH_S:
            announced = True
            print(f"shoal: waiting for helper {name_of(helper)}, which does not listen yet", file=sys.stderr)
    return f"it was not reached in {limit_s:g} s: {problem}"


# ---- bandwidth probe ------------------------------------------------------------------------------------
# Runs once, when a group with helper hosts starts. Rank 0's clock decides, and the store carries its
# readings, so that all ranks use the same pattern. It takes about 2 s, and 0.1 s per helper;
# SHOAL_HELPERS=address:port*2.0 gives the bandwidth and avoids it.
#
# Links of clouds, and shaped ones, let some bytes through at a higher rate after a pause. So nothing is read
# from a first transfer: transfers follow each other without a pause, and the last one counts.


@dataclass(kw_only=True)
class Probe:
    """Measures the links of a connected group, with the same results on all ranks: rank 0's.

    All ranks make it and call the same methods. These raise ``CommError`` if the group failed or a transfer
    took longer than ``timeout_s``.
    """

    engine: Engine
    records: Records
    rank: int
    size: int
    num_hosts: int
    timeout_s: float
    num_bytes: int = _PROBE_MIN_BYTES
    """of a transfer among the workers; grows until it takes long enough"""
    _num_readings: int = field(default=0, init=False)

    def host_rate(self) -> float:
        """Return the bandwidth of a worker host in bytes/s."""
        workers = list(range(self.size))
        while self._seconds(workers, self.num_bytes) < _PROBE_HOST_S and self.num_bytes < _PROBE_MAX_BYTES:
            self.num_bytes *= 2
        took_s = self._steady_seconds(workers, self.num_bytes, least_s=2 * _PROBE_HOST_S)
        return 2 * (self.num_hosts - 1) / self.num_hosts * self.num_bytes / took_s

    def helper_rates(self, host: float, num_helpers: int) -> list[float]:
        """Return the bandwidth of each helper as a multiple of ``host``, that of a worker host in bytes/s.

        It measures each of the first 12 helpers for a moment, to compare them, and then all helpers together,
        for their sum.
        """
        share = max(int(host * _PROBE_HELPER_S / self.num_hosts), _PROBE_MIN_BYTES)

        def rate_of(helper: int) -> float:
            return share / self._steady_seconds([self.size + helper], share, least_s=_PROBE_HELPER_S)

        rates = [rate_of(helper) for helper in range(min(num_helpers, _MAX_PROBED_HELPERS))]
        weights = _relative_rates(confirmed(rates, rate_of)) + [1.0] * (num_helpers - len(rates))
        servers = [self.size + helper for helper in assign_chunks(_PATTERN_LENGTH, weights)]
        busy = min(num_helpers / self.num_hosts, 1.0)  # parts of the workers' links, by helpers of their rate
        num_bytes = min(max(int(busy * host * _PROBE_ALL_HELPERS_S), _PROBE_MIN_BYTES), _PROBE_MAX_BYTES)
        took_s = self._steady_seconds(servers, num_bytes, least_s=2 * _PROBE_ALL_HELPERS_S)
        return _multiples(weights, self.num_hosts * num_bytes / took_s / host, self.num_hosts)

    def _seconds(self, pattern: list[int], num_bytes: int) -> float:
        """Return the seconds of an all_reduce over the servers of ``pattern``, begun together."""
        self.engine.set_pattern(pattern)
        count = num_bytes // 4
        values = (ctypes.c_float * count)()
        self._run(Operation(kind="barrier", timeout_s=self.timeout_s))
        operation = Operation(
            kind="all_reduce", input=ctypes.addressof(values), output=ctypes.addressof(values), count=count,
            dtype="float32", shape=(count,), timeout_s=self.timeout_s,
        )  # fmt: skip
        begin = time.perf_counter()
        self._run(operation)
        key = f"probe/{self._num_readings}"
        self._num_readings += 1
        if self.rank == 0:
            self.records.put(key, {"value": time.perf_counter() - begin})
        return float(self.records.get(key, 0, {"value": float})["value"])

    def _steady_seconds(self, pattern: list[int], num_bytes: int, *, least_s: float) -> float:
        """Return the seconds of an all_reduce that follows others without a pause."""
        return until_steady(lambda: self._seconds(pattern, num_bytes), least_s=least_s)

    def _run(self, operation: Operation) -> None:
        self.engine.wait(self.engine.submit(operation))


def until_steady(measure: Callable[[], float], *, least_s: float) -> float:
    """Return the last of several readings, in seconds.

    They end when two successive ones are equal to 10 % and all of them together took ``least_s``, or after
    the eighth.
    """
    taken = [measure()]
    while len(taken) < _MOST_TRANSFERS:
        taken.append(measure())
        if sum(taken) >= least_s and max(taken[-2:]) <= _STEADY * min(taken[-2:]):
            break
    return taken[-1]


def confirmed(rates: Sequence[float], measure: Callable[[int], float]) -> list[float]:
    """Return the rates, with those that stand out measured again.

    Helpers are usually alike, and a transfer of 40 ms is easily disturbed: of the readings of one that stands
    out, the one nearest to the median of all counts.
    """
    typical = statistics.median(rates)

    def distance(rate: float) -> float:
        return abs(math.log(rate / typical))

    nearest = []
    for helper, rate in enumerate(rates):
        readings = [rate]
        while distance(readings[-1]) > math.log(_STANDS_OUT) and len(readings) < _MOST_READINGS:
            readings.append(measure(helper))
        nearest.append(min(readings, key=distance))
    return nearest


def _relative_rates(rates: Sequence[float]) -> list[float]:
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
    if max(weights) == min(weights) and 1 / _LIKE_HOST <= scale <= _LIKE_HOST:
        scale = 1.0
    return [max(round(weight * scale * _RESOLUTION), 1) / _RESOLUTION for weight in weights]
