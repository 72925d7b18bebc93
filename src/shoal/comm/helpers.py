"""Chooses a new group's helper hosts: those of ``SHOAL_HELPERS`` that rank 0 reaches and has not lost."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from shoal import env
from shoal.comm.engine import CommError, lost_helpers
from shoal.env import HelperAddress
from shoal.errors import UsageError

REACH_S = 3.0
"""Time that a group waits at its start for helpers that do not take a connection."""
_PAUSE_S = 0.1

# Why, by the helper's name. What was left out once stays out: a helper that comes and goes, or that only
# rank 0 reaches, would cost each further group its time to begin.
_left_out: dict[str, str] = {}
# By name; a job's further groups need not measure again.
_measured: dict[str, float] = {}


def name_of(helper: HelperAddress) -> str:
    return f"{helper.address}:{helper.port}"


def reachable_helpers(*, workers_serve: bool) -> list[HelperAddress]:
    """Return those of SHOAL_HELPERS that can serve a new group, and tell on stderr which are left out.

    Raises:
        CommError: there are helpers, none can be used, and the workers are not to serve.
        UsageError: an address is not an IPv4 address.
    """
    given = env.helpers()
    for helper in given:
        if not _is_ipv4(helper.address):
            raise UsageError(
                f"SHOAL_HELPERS has the entry {name_of(helper)!r}, and {helper.address!r} is not an IPv4 "
                "address; write the address that `shoal serve` was given"
            )
    for name in lost_helpers():
        _leave_out(name, "a group of this process lost it")
    asked = [helper for helper in given if name_of(helper) not in _left_out]
    for helper, problem in zip(asked, _reach(asked), strict=True):
        if problem:
            _leave_out(name_of(helper), f"it was not reached in {REACH_S:g} s: {problem}")
    usable = [helper for helper in asked if name_of(helper) not in _left_out]
    if given and not usable and not workers_serve:
        reasons = "; ".join(f"{name_of(helper)}: {_left_out[name_of(helper)]}" for helper in given)
        raise CommError(
            f"no server is left: none of SHOAL_HELPERS can be used ({reasons}) and workers do not serve; "
            "start the helpers again, or allow EngineOptions.workers_serve"
        )
    return usable


def bandwidth_of(helper: HelperAddress) -> float | None:
    """Return what the variable says of its bandwidth, or what a group has measured, if anything."""
    return helper.bandwidth or _measured.get(name_of(helper))


def remember_bandwidths(names: Sequence[str], bandwidths: Sequence[float]) -> None:
    """Keep what a group has measured for those that follow."""
    _measured.update(zip(names, bandwidths, strict=True))


def helper_bandwidths() -> tuple[float, ...]:
    """Return the bandwidth of each of SHOAL_HELPERS as a multiple of a worker host's.

    It is what the variable says, or what a group of this process has measured; 1 where there is neither.
    Helpers that are left out do not count.
    """
    return tuple(bandwidth_of(each) or 1.0 for each in env.helpers() if name_of(each) not in _left_out)


def _leave_out(name: str, why: str) -> None:
    if name in _left_out:
        return
    _left_out[name] = why
    print(f"shoal: new groups do without helper {name}: {why}", file=sys.stderr)


def _is_ipv4(address: str) -> bool:
    try:
        socket.inet_pton(socket.AF_INET, address)
    except OSError:
        return False
    return True


def _reach(helpers: Sequence[HelperAddress]) -> list[str]:
    """Return why each helper takes no connection; an empty text for those that do."""
    if not helpers:
        return []
    deadline = time.monotonic() + REACH_S
    with ThreadPoolExecutor(len(helpers)) as pool:
        return list(pool.map(lambda helper: _reach_one(helper, deadline), helpers))


def _reach_one(helper: HelperAddress, deadline: float) -> str:
    """Try until the deadline: the helper may be starting, and its queue of connections may be full.

    A connection that says nothing is no stranger to the server.
    """
    problem = "no answer"
    while (left_s := deadline - time.monotonic()) > 0:
        try:
            socket.create_connection((helper.address, helper.port), timeout=left_s).close()
        except TimeoutError:
            return "no answer"
        except OSError as error:
            problem = error.strerror or str(error)
            time.sleep(min(_PAUSE_S, left_s))
        else:
            return ""
    return problem
