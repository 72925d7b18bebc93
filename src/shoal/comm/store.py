"""Exchanges signed records through the job's key-value store, and waits on it without outliving the group.

A store is any object with the methods of :class:`Store`, such as a ``torch.distributed.Store``. Every process
that reaches the store can write to it. With a secret of the job, each record therefore carries an HMAC-SHA256
over its key, the group's name and its text, and every record is checked when it is read. The launchers of
several hosts exchange such records too (``launch/host_rendezvous.py``).
"""

from __future__ import annotations

import contextlib
import hmac
import json
import re
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

from shoal.comm.engine import CommError
from shoal.errors import ShoalError, UsageError
from shoal.json_text import parse_json

_MAX_BYTES = 1 << 20
_MAC_DIGITS = 64
MAX_ERROR = 4096
"""Largest number of characters in a record ``{"error": reason}``, which raises the reason in its readers."""
_READERS_LIMIT = timedelta(seconds=10)
_LONGEST = timedelta(days=24)
"""Longest wait on a store: torch's gives milliseconds to ``poll``, as 32 bits."""
_POLL_S = 0.01
_ANSWER_MARGIN_S = 1.0
_ERROR = {"error": rf"[^\x00]{{1,{MAX_ERROR}}}"}
_CHANGED = "the store was changed by another process, or the ranks run different versions of shoal"

Rule = Any
"""Rule of a value in a record.

A pattern of a text, a range of whole numbers, ``float`` for a number of at least 0, ``object`` for anything,
a dict with the rule of each field, or a list with the rule of its entries.
"""
NAME = r"[^\x00-\x1f\x7f]{1,512}"
"""Rule of the name of a host and the like."""
_OCTET = r"(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_ADDRESS = rf"{_OCTET}(\.{_OCTET}){{3}}|[0-9a-f]{{0,4}}(:[0-9a-f]{{0,4}}){{2,7}}(%[\w.-]{{1,15}})?"
_ADDRESSES = rf"({_ADDRESS})(,({_ADDRESS})){{0,7}}"
PORT = range(1, 1 << 16)
"""Rule of the port of a service."""
_KEY = r"[0-9a-f]{64}"

LOCATION: Rule = {
    "host": NAME,
    "address": _ADDRESSES,
    "port": PORT,
    "global_rank": range(1 << 31),
    "pid": range(1, 1 << 31),
    "key": _KEY,
    "node": NAME,
    "network": NAME,
}
"""Location of a rank: the fields of ``engine.Peer`` and of ``addresses.Endpoint``."""
RULES: Rule = {
    "helpers": [{"address": _ADDRESS, "port": PORT, "name": NAME, "bandwidth": float, "key": rf"({_KEY})?"}],
    "options": object,
    "connections": range(65),
    "segment": r"shoal-[0-9a-f-]{1,64}",
    "secret": r"([0-9a-f]{64})?",
}
"""Settings that rank 0 decides for all ranks.

``key`` is a helper's public key, as rank 0 has heard it, or empty if the helper did not answer in time.
``bandwidth`` is a multiple of a worker host's, or 0 if it must be measured. ``connections`` is the number for
data to each peer, or 0 if it is not given and none is measured. ``segment`` names shared memory.
``secret`` is random, or empty if the job has its own.
"""


class Store(Protocol):
    """A key-value store that all processes of the job reach."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes:
        """Return the value of a key; wait for it where there is none."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether the store has all of these keys."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to the number under a key, 0 at first, and return the sum."""

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        """Wait until the store has all of these keys; raise an error after ``timeout``."""


class PrefixStore:
    """A part of a store, for one group: its keys have a prefix there.

    Args:
        prefix: of the keys.
        store: that has them.
    """

    def __init__(self, prefix: str, store: Store) -> None:
        self._prefix, self.underlying_store = prefix, store

    def set(self, key: str, value: str, /) -> None:
        self.underlying_store.set(self._prefix + key, value)

    def get(self, key: str, /) -> bytes:
        return self.underlying_store.get(self._prefix + key)

    def check(self, keys: list[str], /) -> bool:
        return self.underlying_store.check([self._prefix + key for key in keys])

    def add(self, key: str, amount: int, /) -> int:
        return self.underlying_store.add(self._prefix + key, amount)

    def wait(self, keys: list[str], timeout: timedelta, /) -> None:
        self.underlying_store.wait([self._prefix + key for key in keys], timeout)


class SignedStore:
    """Records in a store, checked when they are read: JSON objects, each with an HMAC of key, scope and text.

    Args:
        store: of the job.
        scope: name of those who share the records; those of another scope are refused.
        secret: the job's secret; ``None`` leaves records unsigned.
    """

    error: type[ShoalError] = CommError
    """Raised for a malformed record."""

    def __init__(self, store: Store, scope: str, secret: bytes | None) -> None:
        self._store, self._scope, self._secret = store, scope, secret

    def put(self, key: str, value: dict[str, Any]) -> None:
        """Write a record."""
        text = json.dumps(value)
        self._store.set(key, self._mac(key, text) + text)

    def read(self, key: str, rule: Rule, name: str) -> dict[str, Any]:
        """Return a record that is in the store; ``name`` is its name in errors.

        Raises:
            ShoalError: it is not signed with this secret, is malformed, or is an error.
        """
        text = self._store.get(key)[: _MAX_BYTES + 1].decode("ascii", errors="replace")
        signed = re.match(rf"[0-9a-f]{{{_MAC_DIGITS}}}(?=\{{)", text) is not None
        mac, text = (text[:_MAC_DIGITS], text[_MAC_DIGITS:]) if signed else ("", text)
        if not hmac.compare_digest(mac, self._mac(key, text)):
            raise self.forged(name, is_signed=signed)
        record: dict[str, Any] = parse_json(text, name, error=self.error, remedy=_CHANGED)
        is_error = isinstance(record, dict) and "error" in record
        if violation := _violation(record, _ERROR if is_error else rule):
            raise self.error(f"{name} is malformed: {violation}; {_CHANGED}")
        if is_error:
            raise self.error(f"the group cannot be made: {record['error']}")
        return record

    def forged(self, name: str, *, is_signed: bool) -> ShoalError:
        """Return the error for a record that is not signed with this secret."""
        return self.error(f"{name} is not signed with the job's secret")

    def _mac(self, key: str, text: str) -> str:
        if self._secret is None:
            return ""
        return hmac.digest(self._secret, json.dumps([key, self._scope, text]).encode(), "sha256").hex()


class Records(SignedStore):
    """The records of one group in the store.

    Args:
        store: of the job.
        group: name of the group.
        secret: the job's secret; ``None`` leaves records unsigned.
        timeout: limit of each read.
    """

    def __init__(self, store: Store, group: str, secret: bytes | None, timeout: timedelta) -> None:
        super().__init__(store, group, secret)
        self._timeout = min(timeout, _LONGEST)

    def wait_for_readers(self, rank: int, size: int) -> None:
        """Wait briefly until all ranks have read their records: the store may end with this process.

        All ranks that find the same reason to exit call it.
        """
        self._store.set(f"read/{rank}", "")
        with contextlib.suppress(RuntimeError, OSError):  # a late rank raises that the store was lost
            self._store.wait([f"read/{other}" for other in range(size)], _READERS_LIMIT)

    def get(self, key: str, rank: int, rule: Rule) -> dict[str, Any]:
        """Return the record that ``rank`` writes.

        Raises:
            CommError: the rank did not write it in time, wrote an error, or the record was changed.
            UsageError: the rank has a secret and this one has none.
        """
        limit_s = self._timeout.total_seconds()
        begun = time.monotonic()
        try:
            self._store.wait([key], self._timeout)
        except (RuntimeError, OSError) as problem:  # of torch's store, of JAX's and of shoal's
            if time.monotonic() - begun < limit_s / 2:
                raise CommError(
                    f"the job's store was lost while this rank waited for rank {rank} of the group: the "
                    f"process that holds it (rank 0's, as a rule) has ended; see what it printed: {problem}"
                ) from problem
            raise CommError(
                f"rank {rank} of the group did not come within {limit_s:g} s; see whether it was "
                "started and what it printed"
            ) from problem
        return self.read(key, rule, f"what rank {rank} has put into the store ({key})")

    def forged(self, name: str, *, is_signed: bool) -> ShoalError:
        """Return the error for a record that is not signed with this secret."""
        if self._secret is None and is_signed:
            return UsageError(
                f"{name} is signed: that rank has a SHOAL_SECRET and this rank has none; set the same on "
                "all hosts"
            )
        return CommError(
            f"{name} is not signed with this rank's secret: the SHOAL_SECRET of the two differ, or "
            "another process changed the store"
        )


def _violation(value: Any, rule: Rule, name: str = "it") -> str:
    """Return the rule that a value breaks, in words; empty if it breaks none."""
    if isinstance(rule, dict):
        if not isinstance(value, dict):
            return f"{name} is {value!r:.200}, not an object"
        if missing := rule.keys() - value.keys():
            return f"{name} has no field {', '.join(sorted(missing))}"
        if unknown := value.keys() - rule.keys():
            return f"{name} has unknown fields: {sorted(unknown)!r:.200}"
        problems = [_violation(value[field], each, field) for field, each in rule.items()]
        return next(filter(None, problems), "")
    if isinstance(rule, list):
        if not isinstance(value, list):
            return f"{name} is {value!r:.200}, not a list"
        return next(filter(None, [_violation(each, rule[0], f"an entry of {name}") for each in value]), "")
    if isinstance(rule, str):
        good = isinstance(value, str) and bool(re.fullmatch(rule, value))
        expected = f"a text of the form {rule}"
    elif isinstance(rule, range):
        good = type(value) is int and value in rule
        expected = f"a whole number from {rule.start} to {rule.stop - 1}"
    else:
        good = rule is object or (type(value) is float and 0 <= value < 1e18)
        expected = "a number of at least 0"
    return "" if good else f"{name} is {value!r:.200}, not {expected}"


# ---- waiting on the store -------------------------------------------------------------------------------


def wait_for_keys(store: Store, keys: list[str], must_end: Callable[[], bool], timeout: timedelta) -> bool:
    """Poll the store until it has all keys; return ``False`` on timeout or once ``must_end()`` is true."""
    end = time.monotonic() + timeout.total_seconds()
    while keys and not store.check(keys):
        if must_end() or time.monotonic() >= end:
            return False
        time.sleep(_POLL_S)
    return True


def monitored_barrier(
    store: Store, number: int, rank: int, size: int, limit: timedelta, wait_all_ranks: bool
) -> None:
    """Wait until all ranks of the group have called it with this ``number``.

    It uses only the store, because it must work where the group does not. The messages contain the phrases of
    torch's gloo backend, for which programs search.

    Raises:
        CommError: ranks did not come within ``limit``; rank 0 names the first, or all (``wait_all_ranks``).
    """
    base, limit = f"monitored/{number}", min(limit, _LONGEST)
    if limit <= timedelta(0):
        raise CommError(
            f"Rank {rank} timed out in monitoredBarrier: its timeout was {limit.total_seconds():g} s"
        )
    if rank == 0:
        keys = {other: f"{base}/{other}" for other in range(1, size)}
        wait_for_keys(store, list(keys.values()), lambda: False, limit)
        verdict = ""
        if missing := [str(other) for other, key in keys.items() if not store.check([key])]:
            named = f"Ranks {', '.join(missing)}" if wait_all_ranks else f"Rank {missing[0]}"
            verdict = (
                f"[Rank 0]: {named} failed to pass monitoredBarrier in "
                f"{round(limit.total_seconds() * 1000)} ms"
            )
        store.set(f"{base}/verdict", verdict)
        if verdict:
            raise CommError(verdict)
        return
    store.set(f"{base}/{rank}", "1")
    passed = (
        f"Rank {rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv"
    )
    try:
        store.wait([f"{base}/verdict"], limit + timedelta(seconds=_ANSWER_MARGIN_S))
    except (RuntimeError, OSError) as problem:
        raise CommError(
            f"{passed} from rank 0: it did not answer within {limit.total_seconds():g} s; see its log"
        ) from problem
    if verdict := store.get(f"{base}/verdict").decode():
        raise CommError(f"{passed} from rank 0: {verdict}")
