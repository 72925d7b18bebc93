"""Exchanges records between the ranks of a group through torch's store, checked when read and signed.

Anybody who reaches the store can write to it. With a secret of the job's own each record carries an
HMAC-SHA256 under it, over its key, the group's name and the text.
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

_MOST_BYTES = 1 << 20
_MAC_DIGITS = 64
_MOST_ERROR = 4096
_READERS_LIMIT = timedelta(seconds=10)
_CHANGED = "somebody has changed the store, or the ranks run different versions of shoal"

_NAME = r"[^\x00-\x1f\x7f]{1,512}"
_SEGMENT = r"shoal-[0-9a-f-]{1,64}"
_SECRET = r"([0-9a-f]{64})?"


class Records:
    """The records of one group in the store."""

    def __init__(self, store: Store, group: str, secret: bytes | None, timeout: timedelta) -> None:
        self._store, self._group, self._secret, self._timeout = store, group, secret, timeout

    def put(self, key: str, value: dict[str, Any]) -> None:
        text = json.dumps(value)
        self._store.set(key, self._mac(key, text) + text)

    def put_error(self, key: str, reason: str) -> None:
        """Tell those who read ``key`` why the group cannot be made."""
        self.put(key, {"error": reason[:_MOST_ERROR]})

    def wait_for_readers(self, rank: int, size: int) -> None:
        """Wait a little until all ranks have read what they need: the store may end with this process.

        All ranks call it that find the same reason to end.
        """
        self._store.set(f"read/{rank}", "")
        with contextlib.suppress(Exception):  # who is late hears that the store was lost
            self._store.wait([f"read/{other}" for other in range(size)], _READERS_LIMIT)

    def get(self, key: str, rank: int) -> Fields:
        """Return what ``rank`` has put.

        Raises:
            CommError: it has not in time, it could not take part and says why, or the record is not what
                it wrote.
            UsageError: it has a secret and this rank has none.
        """
        limit_s = self._timeout.total_seconds()
        begun = time.monotonic()
        try:
            self._store.wait([key], self._timeout)
        except Exception as problem:  # the store's own classes of errors differ between versions
            if time.monotonic() - begun < limit_s / 2:
                raise CommError(
                    f"torch's store was lost while this rank waited for rank {rank} of the group: the "
                    f"process that holds it (rank 0's, as a rule) has ended; see what it printed: {problem}"
                ) from problem
            raise CommError(
                f"rank {rank} of the group did not come within {limit_s:g} s; see whether it was "
                "started and what it printed"
            ) from problem
        found = Fields(self._opened(key, self._store.get(key), rank), key, rank)
        if reason := found.error():
            raise CommError(f"the group cannot be made: {reason}")
        return found

    def _mac(self, key: str, text: str) -> str:
        if self._secret is None:
            return ""
        return hmac.digest(self._secret, json.dumps([key, self._group, text]).encode(), "sha256").hex()

    def _opened(self, key: str, raw: bytes, rank: int) -> object:
        text = raw[: _MOST_BYTES + 1].decode("ascii", errors="replace")
        signed = re.match(rf"[0-9a-f]{{{_MAC_DIGITS}}}(?=\{{)", text) is not None
        mac, text = (text[:_MAC_DIGITS], text[_MAC_DIGITS:]) if signed else ("", text)
        if self._secret is None and signed:
            raise UsageError(
                f"rank {rank} has a SHOAL_SECRET and this rank has none; set the same on all hosts"
            )
        if not hmac.compare_digest(mac, self._mac(key, text)):
            raise CommError(
                f"what rank {rank} has put into the store ({key}) is not signed with this rank's secret: "
                "the SHOAL_SECRET of the two differ, or somebody has changed the store"
            )
        where = f"what rank {rank} has put into the store ({key})"
        found: object = parse_json(text, where, error=CommError, remedy=_CHANGED)
        return found


class Fields:
    """The fields of a record, each checked as it is taken."""

    def __init__(self, found: object, key: str, rank: int) -> None:
        self._key, self._rank = key, rank
        if not isinstance(found, dict):
            raise _malformed(key, rank, "it is not an object")
        self._found = dict(found)

    def error(self) -> str:
        """Return the reason that a rank gives instead of a record, if any."""
        return self.text("error", rf"[^\x00]{{1,{_MOST_ERROR}}}") if "error" in self._found else ""

    def whole(self, name: str, least: int, most: int) -> int:
        value = self.value(name)
        if type(value) is not int or not least <= value <= most:
            raise self._wrong(name, value, f"a whole number from {least} to {most}")
        return value

    def number(self, name: str) -> float:
        """Return a finite number of at least 0."""
        value = self.value(name)
        if type(value) not in (int, float) or not 0 <= value < 1e18:
            raise self._wrong(name, value, "a number of at least 0")
        return float(value)

    def text(self, name: str, pattern: str) -> str:
        value = self.value(name)
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise self._wrong(name, value, f"a text of the form {pattern}")
        return value

    def address(self, name: str) -> str:
        value = self.text(name, r"[0-9.]{7,15}")
        try:
            return str(ipaddress.IPv4Address(value))
        except ValueError:
            raise self._wrong(name, value, "an IPv4 address") from None

    def value(self, name: str) -> Any:
        if name not in self._found:
            raise _malformed(self._key, self._rank, f"it has no field {name}")
        return self._found.pop(name)

    def each(self, name: str) -> list[Fields]:
        """Return the records of a list."""
        value = self.value(name)
        if not isinstance(value, list):
            raise self._wrong(name, value, "a list")
        return [Fields(item, f"{self._key}, {name}", self._rank) for item in value]

    def end(self) -> None:
        """See that every field has been taken."""
        if self._found:
            raise _malformed(self._key, self._rank, f"it has unknown fields: {sorted(self._found)!r:.200}")

    def _wrong(self, name: str, value: object, rule: str) -> CommError:
        return _malformed(self._key, self._rank, f"{name} is {value!r:.200}, not {rule}")


def _malformed(key: str, rank: int, what: str) -> CommError:
    return CommError(f"what rank {rank} has put into the store ({key}) is malformed: {what}; {_CHANGED}")


def parse_peer(found: Fields) -> tuple[Peer, Endpoint]:
    """Return where a rank is.

    Raises:
        CommError: a field is missing, unknown or out of its range.
    """
    peer = Peer(
        host=found.text("host", _NAME),
        address=found.address("address"),
        port=found.whole("port", 1, (1 << 16) - 1),
        global_rank=found.whole("global_rank", 0, (1 << 31) - 1),
        pid=found.whole("pid", 1, (1 << 31) - 1),
    )
    place = Endpoint(found.text("node", _NAME), peer.address, found.text("network", _NAME))
    found.end()
    return peer, place


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Settings that rank 0 chooses for all ranks."""

    helpers: list[Helper]
    bandwidths: list[float]
    """of each helper, as a multiple of a worker host's; 0 is to be measured"""
    options: Any
    segment: str
    """name for shared memory"""
    secret: str
    """empty, or where the job has none of its own a random one in hexadecimal digits"""

    def record(self) -> dict[str, Any]:
        helpers = [
            {**asdict(helper), "bandwidth": bandwidth}
            for helper, bandwidth in zip(self.helpers, self.bandwidths, strict=True)
        ]
        return {
            "helpers": helpers, "options": self.options, "segment": self.segment, "secret": self.secret
        }  # fmt: skip


def parse_rules(found: Fields) -> Rules:
    """Return what rank 0 decides for all.

    Raises:
        CommError: a field is missing, unknown or out of its range.
    """
    helpers, bandwidths = [], []
    for each in found.each("helpers"):
        helpers.append(
            Helper(
                address=each.address("address"),
                port=each.whole("port", 1, (1 << 16) - 1),
                name=each.text("name", _NAME),
            )
        )
        bandwidths.append(each.number("bandwidth"))
        each.end()
    rules = Rules(
        helpers=helpers,
        bandwidths=bandwidths,
        options=found.value("options"),
        segment=found.text("segment", _SEGMENT),
        secret=found.text("secret", _SECRET),
    )
    found.end()
    return rules


_POLL_S = 0.01
_LIMIT = timedelta(minutes=30)


def wait_for_keys(store: Store, keys: list[str], must_end: Callable[[], bool], limit: timedelta) -> bool:
    """Wait until the store has all keys; ``False`` if ``must_end()`` or the end of ``limit`` came first."""
    end = time.monotonic() + limit.total_seconds()
    while not store.check(keys):
        if must_end() or time.monotonic() >= end:
            return False
        time.sleep(_POLL_S)
    return True


class InterruptibleStore(Store):
    """The store as gloo sees it. Its threads wait here for ranks that may never come, but no longer than the
    group lives: a group whose threads wait cannot be ended."""

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

    def wait(self, keys: list[str], timeout: timedelta = _LIMIT) -> None:
        if not wait_for_keys(self._store, keys, self._must_end, timeout):
            raise RuntimeError(f"nobody came to meet at {', '.join(keys)}")


_POLL_S = 0.01
_ANSWER_MARGIN_S = 1.0


def monitored_barrier(
    store: Store, number: int, rank: int, size: int, limit: timedelta, wait_all_ranks: bool
) -> None:
    """Return when all ranks of the group have called it with this ``number``.

    Raises:
        CommError: ranks did not come within ``limit``; rank 0 names the first, or all (``wait_all_ranks``).
    """
    base = f"monitored/{number}"
    if limit <= timedelta(0):
        raise CommError(
            f"Rank {rank} timed out in monitoredBarrier: its timeout was {limit.total_seconds():g} s"
        )
    if rank == 0:
        verdict = _missing(store, base, size, limit, wait_all_ranks)
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
    except Exception as problem:  # the store's own class of time-outs differs between versions
        raise CommError(
            f"{passed} from rank 0: it did not answer within {limit.total_seconds():g} s; see its log"
        ) from problem
    if verdict := store.get(f"{base}/verdict").decode():
        raise CommError(f"{passed} from rank 0, which says: {verdict}")


def _missing(store: Store, base: str, size: int, limit: timedelta, wait_all_ranks: bool) -> str:
    end = time.monotonic() + limit.total_seconds()
    missing = list(range(1, size))
    while missing:
        missing = [rank for rank in missing if not store.check([f"{base}/{rank}"])]
        if missing and time.monotonic() >= end:
            named = missing if wait_all_ranks else missing[:1]
            return (
                f"[Rank 0]: Rank{'s' if wait_all_ranks else ''} {', '.join(map(str, named))} failed to pass "
                f"monitoredBarrier in {round(limit.total_seconds() * 1000)} ms"
            )
        if missing:
            time.sleep(_POLL_S)
    return ""
