"""Selects a new group's helper hosts: those of ``SHOAL_HELPERS`` that rank 0 reaches and did not lose."""

from __future__ import annotations

import ipaddress
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
"""Time that a new group waits for helpers that do not accept a connection."""
_PAUSE_S = 0.1

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
