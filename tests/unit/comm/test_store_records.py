"""Tests records in torch's store: changed and malformed ones are refused, with the rank named."""

from __future__ import annotations

import json
import os
import threading
from datetime import timedelta
from multiprocessing.connection import Connection, Pipe
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore

from forked import fork_process
from shoal.comm import rendezvous
from shoal.comm.engine import CommError
from shoal.comm.store import LOCATION, RULES, Records
from shoal.errors import UsageError

LIMIT = timedelta(seconds=5)
PEER = {
    "host": "a", "address": "10.0.0.1", "port": 4000, "global_rank": 0, "pid": 7, "node": "a", "network": "x",
    "key": "0123456789abcdef" * 4,
}  # fmt: skip
HELPER = {"address": "10.0.0.2", "port": 7070, "name": "10.0.0.2:7070", "bandwidth": 0.0, "key": ""}
SETTINGS = {"helpers": [HELPER], "options": {}, "connections": 0, "segment": "shoal-7-0a", "secret": "0" * 64}


def read(value: Any, rule: Any) -> Any:
    records = Records(dist.HashStore(), "g", None, LIMIT)
    records.put("key", value)
    return records.get("key", 3, rule)


def test_good_records_are_read() -> None:
    assert read(PEER, LOCATION) == PEER
    assert read(SETTINGS, RULES) == SETTINGS


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", 0), ("port", 65_536), ("port", "4000"), ("port", True), ("port", 1.5), ("pid", 0),
        ("key", ""), ("key", "0" * 63), ("key", "G" * 64),
        ("global_rank", -1), ("address", "10.0.0.256"), ("address", "::1::g"), ("address", ":" * 9),
        ("address", ["10.0.0.1"]),
        ("address", "10.0.0.1\n"), ("host", ""), ("host", "x" * 513), ("node", "a\x1b[2J"), ("network", None),
        ("extra", 1),
    ],
)  # fmt: skip
def test_wrong_fields_of_a_peer_are_named(field: str, value: object) -> None:
    with pytest.raises(
        CommError, match=rf"what rank 3 has put into the store \(key\) is malformed: .*{field}"
    ):
        read({**PEER, field: value}, LOCATION)
    with pytest.raises(CommError, match="has no field host"):
        read({name: each for name, each in PEER.items() if name != "host"}, LOCATION)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("connections", -1), ("connections", 65), ("connections", 1.0),
        ("segment", "/etc/passwd"), ("segment", "shoal-../x"), ("segment", "shoal-" + "0" * 65),
        ("secret", "0" * 63), ("secret", None), ("helpers", {}), ("helpers", [{**HELPER, "port": -1}]),
        ("helpers", [{**HELPER, "bandwidth": -1.0}]), ("helpers", [7]),
        ("helpers", [{**HELPER, "bandwidth": float("nan")}]), ("helpers", [{**HELPER, "key": "0" * 63}]),
        ("unknown", 0),
    ],
)  # fmt: skip
def test_wrong_fields_of_the_rules_are_named(field: str, value: object) -> None:
    with pytest.raises(
        CommError,
        match=r"what rank 3 has put into the store \(key.*(is malformed|: is (not JSON|nested)).*changed",
    ):
        read({**SETTINGS, field: value}, RULES)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff", b'{"a":' * 100_000, b"7", b" " * (2 << 20)])
def test_what_is_no_record_is_an_error(raw: bytes) -> None:
    store = dist.HashStore()
    store.set("key", raw.decode("latin-1"))
    with pytest.raises(CommError, match="what rank 3 has put into the store"):
        Records(store, "g", None, LIMIT).get("key", 3, LOCATION)


def test_records_are_signed_with_the_job_s_secret() -> None:
    store = dist.HashStore()
    mine = Records(store, "g", b"secret", LIMIT)
    mine.put("peer/1", PEER)
    assert mine.get("peer/1", 1, LOCATION)["port"] == 4000
    signed = store.get("peer/1")
    for changed, other in [
        (signed.replace(b"4000", b"4001"), mine),  # a field
        (signed[64:], mine),  # no signature
        (b"0" * 64 + signed[64:], mine),
        (signed, Records(store, "g", b"another", LIMIT)),
        (signed, Records(store, "h", b"secret", LIMIT)),  # of another group
    ]:
        store.set("peer/1", changed.decode())
        with pytest.raises(
            CommError, match=r"rank 1 .* is not signed with this rank's secret: .* changed the"
        ):
            other.get("peer/1", 1, LOCATION)
    store.set("peer/2", signed.decode())  # under another rank's key
    with pytest.raises(CommError, match="rank 2"):
        mine.get("peer/2", 2, LOCATION)
    store.set("peer/1", signed.decode())
    with pytest.raises(UsageError, match=r"rank 1 .* has a SHOAL_SECRET and this rank has none"):
        Records(store, "g", None, LIMIT).get("peer/1", 1, LOCATION)


def test_a_changed_record_ends_a_group_at_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_SECRET", "of this job, long enough")
    store = dist.HashStore()
    store.set("peer/1", json.dumps({**PEER, "global_rank": 1}))  # somebody who does not know the secret
    with pytest.raises(CommError, match=r"rank 1 .* is not signed"):
        rendezvous.connect_engine(store, 0, 2, "g", 0, LIMIT)


def hold_store(pipe: Connection) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    pipe.recv()
    os._exit(0)


def test_a_store_that_ends_is_not_a_rank_that_is_late() -> None:
    ours, theirs = Pipe()
    process = fork_process(hold_store, theirs)
    store = TCPStore("127.0.0.1", ours.recv(), timeout=timedelta(seconds=60), wait_for_workers=False)
    records = Records(store, "g", None, timedelta(seconds=60))
    threading.Timer(0.3, lambda: ours.send(None)).start()
    with pytest.raises(CommError, match="the job's store was lost while this rank waited for rank 3"):
        records.get("peer/3", 3, LOCATION)
    process.join()
