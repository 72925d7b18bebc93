"""Exchanges signed records through torch's store, and waits on the store without outliving the group.

Every process that reaches the store can write to it. With a secret of the job, each record therefore carries
an HMAC-SHA256 over its key, the group's name and its text, and every field is checked when it is read.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store

from shoal.comm.addresses import Endpoint
from shoal.comm.engine import CommError, Helper, Peer
from shoal.errors import UsageError
from shoal.json_text import parse_json

_MAX_BYTES = 1 << 20
_MAC_DIGITS = 64
_MAX_ERROR = 4096
_READERS_LIMIT = timedelta(seconds=10)
_GLOO_LIMIT = timedelta(minutes=30)
_POLL_S = 0.01
_ANSWER_MARGIN_S = 1.0
_CHANGED = "the store was changed by another process, or the ranks run different versions of shoal"

_NAME = r"[^\x00-\x1f\x7f]{1,512}"
_SEGMENT = r"shoal-[0-9a-f-]{1,64}"
_SECRET = r"([0-9a-f]{64})?"


class Records:
    """The records of one group in the store.

    Args:
        store: torch's store.
        group: name of the group.
        secret: the job's secret; ``None`` leaves records unsigned.
        timeout: limit of each read.
    """

    def __init__(self, store: Store, group: str, secret: bytes | None, timeout: timedelta) -> None:
        self._store, self._group, self._secret, self._timeout = store, group, secret, timeout

    def put(self, key: str, value: dict[str, Any]) -> None:
        """Write a record."""
        text = json.dumps(value)
        self._store.set(key, self._mac(key, text) + text)

    def put_error(self, key: str, reason: str) -> None:
        """Write a record that raises ``reason`` in its readers."""
        self.put(key, {"error": reason[:_MAX_ERROR]})

    def wait_for_readers(self, rank: int, size: int) -> None:
        """Wait briefly until all ranks have read what they need: the store may end with this process.

        All ranks that find the same reason to exit call it.
        """
        self._store.set(f"read/{rank}", "")
        with contextlib.suppress(Exception):  # a late rank raises that the store was lost
            self._store.wait([f"read/{other}" for other in range(size)], _READERS_LIMIT)

    def get(self, key: str, rank: int) -> Fields:
        """Return the record that ``rank`` writes.

        Raises:
            CommError: the rank did not write it in time, wrote an error, or the record was changed.
            UsageError: the rank has a secret and this one has none.
        """
        limit_s = self._timeout.total_seconds()
        begun = time.monotonic()
        try:
            self._store.wait([key], self._timeout)
        except Exception as problem:  # the store's error classes differ between versions
            if time.monotonic() - begun < limit_s / 2:
                raise CommError(
                    f"torch's store was lost while this rank waited for rank {rank} of the group: the "
                    f"process that holds it (rank 0's, as a rule) has ended; see what it printed: {problem}"
                ) from problem
            raise CommError(
                f"rank {rank} of the group did not come within {limit_s:g} s; see whether it was "
                "started and what it printed"
            ) from problem
        fields = Fields(self._parse(key, self._store.get(key), rank), key, rank)
        if reason := fields.error():
            raise CommError(f"the group cannot be made: {reason}")
        return fields

    def _mac(self, key: str, text: str) -> str:
        if self._secret is None:
            return ""
        return hmac.digest(self._secret, json.dumps([key, self._group, text]).encode(), "sha256").hex()

    def _parse(self, key: str, raw: bytes, rank: int) -> object:
        text = raw[: _MAX_BYTES + 1].decode("ascii", errors="replace")
        signed = re.match(rf"[0-9a-f]{{{_MAC_DIGITS}}}(?=\{{)", text) is not None
        mac, text = (text[:_MAC_DIGITS], text[_MAC_DIGITS:]) if signed else ("", text)
        if self._secret is None and signed:
            raise UsageError(
                f"rank {rank} has a SHOAL_SECRET and this rank has none; set the same on all hosts"
            )
        if not hmac.compare_digest(mac, self._mac(key, text)):
            raise CommError(
                f"what rank {rank} has put into the store ({key}) is not signed with this rank's secret: "
                "the SHOAL_SECRET of the two differ, or another process changed the store"
            )
        where = f"what rank {rank} has put into the store ({key})"
        record: object = parse_json(text, where, error=CommError, remedy=_CHANGED)
        return record


class Fields:
    """The fields of a record. Each is checked when it is taken; :meth:`end` rejects fields that are left."""

    def __init__(self, record: object, key: str, rank: int) -> None:
        self._key, self._rank = key, rank
        if not isinstance(record, dict):
            raise _malformed(key, rank, "it is not an object")
        self._fields = dict(record)

    def error(self) -> str:
        """Return the reason that a rank wrote in place of a record, if it did."""
        return self.text("error", rf"[^\x00]{{1,{_MAX_ERROR}}}") if "error" in self._fields else ""

    def integer(self, name: str, least: int, most: int) -> int:
        """Take an integer in a range."""
        value = self.value(name)
        if type(value) is not int or not least <= value <= most:
            raise self._wrong(name, value, f"a whole number from {least} to {most}")
        return value

    def number(self, name: str) -> float:
        """Take a finite number of at least 0."""
        value = self.value(name)
        if type(value) not in (int, float) or not 0 <= value < 1e18:
            raise self._wrong(name, value, "a number of at least 0")
        return float(value)

    def text(self, name: str, pattern: str) -> str:
        """Take a string that matches a pattern."""
        value = self.value(name)
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise self._wrong(name, value, f"a text of the form {pattern}")
        return value

    def address(self, name: str) -> str:
        """Take an IPv4 address."""
        value = self.text(name, r"[0-9.]{7,15}")
        try:
            return str(ipaddress.IPv4Address(value))
        except ValueError:
            raise self._wrong(name, value, "an IPv4 address") from None

    def value(self, name: str) -> Any:
        """Take any value."""
        if name not in self._fields:
            raise _malformed(self._key, self._rank, f"it has no field {name}")
        return self._fields.pop(name)

    def each(self, name: str) -> list[Fields]:
        """Take a list of records."""
        value = self.value(name)
        if not isinstance(value, list):
            raise self._wrong(name, value, "a list")
        return [Fields(item, f"{self._key}, {name}", self._rank) for item in value]

    def end(self) -> None:
        """Raise if a field was not taken."""
        if self._fields:
            raise _malformed(self._key, self._rank, f"it has unknown fields: {sorted(self._fields)!r:.200}")

    def _wrong(self, name: str, value: object, rule: str) -> CommError:
        return _malformed(self._key, self._rank, f"{name} is {value!r:.200}, not {rule}")


def _malformed(key: str, rank: int, what: str) -> CommError:
    return CommError(f"what rank {rank} has put into the store ({key}) is malformed: {what}; {_CHANGED}")


def parse_peer(fields: Fields) -> tuple[Peer, Endpoint]:
    """Parse the record of a rank's location.

    Raises:
        CommError: a field is missing, unknown or out of its range.
    """
    peer = Peer(
        host=fields.text("host", _NAME),
        address=fields.address("address"),
        port=fields.integer("port", 1, (1 << 16) - 1),
        global_rank=fields.integer("global_rank", 0, (1 << 31) - 1),
        pid=fields.integer("pid", 1, (1 << 31) - 1),
    )
    endpoint = Endpoint(fields.text("node", _NAME), peer.address, fields.text("network", _NAME))
    fields.end()
    return peer, endpoint


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Settings that rank 0 decides for all ranks."""

    helpers: list[Helper]
    bandwidths: list[float]
    """bandwidth of each helper, as a multiple of a worker host's; 0 if it must be measured"""
    options: Any
    segment: str
    """name for shared memory"""
    secret: str
    """a random secret in hexadecimal, or empty if the job has its own"""

    def record(self) -> dict[str, Any]:
        helpers = [
            {**asdict(helper), "bandwidth": bandwidth}
            for helper, bandwidth in zip(self.helpers, self.bandwidths, strict=True)
        ]
        return {
            "helpers": helpers, "options": self.options, "segment": self.segment, "secret": self.secret
        }  # fmt: skip


def parse_rules(fields: Fields) -> Rules:
    """Parse rank 0's record of settings.

    Raises:
        CommError: a field is missing, unknown or out of its range.
    """
    helpers, bandwidths = [], []
    for each in fields.each("helpers"):
        helpers.append(
            Helper(
                address=each.address("address"),
                port=each.integer("port", 1, (1 << 16) - 1),
                name=each.text("name", _NAME),
            )
        )
        bandwidths.append(each.number("bandwidth"))
        each.end()
    rules = Rules(
        helpers=helpers,
        bandwidths=bandwidths,
        options=fields.value("options"),
        segment=fields.text("segment", _SEGMENT),
        secret=fields.text("secret", _SECRET),
    )
    fields.end()
    return rules


# ---- waiting on the store -------------------------------------------------------------------------------


def wait_for_keys(store: Store, keys: list[str], must_end: Callable[[], bool], timeout: timedelta) -> bool:
    """Poll the store until it has all keys; return ``False`` on timeout or once ``must_end()`` is true."""
    end = time.monotonic() + timeout.total_seconds()
    while keys and not store.check(keys):
        if must_end() or time.monotonic() >= end:
            return False
        time.sleep(_POLL_S)
    return True


class InterruptibleStore(Store):
    """A store whose waits end when the group does.

    gloo's threads wait in it for ranks that may never come. A group whose threads block cannot be destroyed.
    """

    def __init__(self, store: Store, must_end: Callable[[], bool]) -> None:
        super().__init__()
        self._store = store
        self._must_end = must_end

    def set(self, key: str, value: Any) -> None:
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def wait(self, keys: list[str], timeout: timedelta = _GLOO_LIMIT) -> None:
        if not wait_for_keys(self._store, keys, self._must_end, timeout):
            raise RuntimeError(f"no rank wrote {', '.join(keys)}")


def monitored_barrier(
    store: Store, number: int, rank: int, size: int, limit: timedelta, wait_all_ranks: bool
) -> None:
    """Wait until all ranks of the group have called it with this ``number``.

    It uses only the store, because it must work where the group does not. The messages contain the phrases of
    torch's gloo backend, for which programs search.

    Raises:
        CommError: ranks did not come within ``limit``; rank 0 names the first, or all (``wait_all_ranks``).
    """
    base = f"monitored/{number}"
    if limit <= timedelta(0):
        raise CommError(
            f"Rank {rank} timed out in monitoredBarrier: its timeout was {limit.total_seconds():g} s"
        )
    if rank == 0:
        keys = {other: f"{base}/{other}" for other in range(1, size)}
        verdict = ""
        if not wait_for_keys(store, list(keys.values()), lambda: False, limit):
            missing = [other for other, key in keys.items() if not store.check([key])]
            named = ", ".join(map(str, missing if wait_all_ranks else missing[:1]))
            verdict = (
                f"[Rank 0]: Rank{'s' if wait_all_ranks else ''} {named} failed to pass monitoredBarrier in "
                f"{round(limit.total_seconds() * 1000)} ms"
                if missing
                else ""
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
    except Exception as problem:  # the store's error classes differ between versions
        raise CommError(
            f"{passed} from rank 0: it did not answer within {limit.total_seconds():g} s; see its log"
        ) from problem
    if verdict := store.get(f"{base}/verdict").decode():
        raise CommError(f"{passed} from rank 0: {verdict}")
