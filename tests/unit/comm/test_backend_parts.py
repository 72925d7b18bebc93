"""Tests parts of the backend that need one process: tensors, addresses, the single-process engine."""

from __future__ import annotations

import threading
import uuid
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from shoal.comm import rendezvous
from shoal.comm.collectives import (
    ENGINE_DTYPES,
    as_contiguous,
    as_movable,
    output_buffer,
    overlaps,
    reduction_of,
)
from shoal.comm.engine import CommError, Operation, SingleProcessEngine
from shoal.comm.store import monitored_barrier
from shoal.env import settings
from shoal.errors import UsageError

# ---- environment ----------------------------------------------------------------------------------------


def test_helpers_with_and_without_bandwidth() -> None:
    found = settings.helpers({"SHOAL_HELPERS": "10.0.0.7:4400, 10.0.0.8:4401*2.5,"})
    assert [(h.address, h.port) for h in found] == [("10.0.0.7", 4400), ("10.0.0.8", 4401)]
    assert found[1].bandwidth == 2.5
    assert settings.helpers({}) == []


@pytest.mark.parametrize("entry", ["10.0.0.7", ":4400", "a:0", "a:70000", "a:1*0", "a:1*-2", "a:1*x", "a:1*"])
def test_wrong_helpers_are_named(entry: str) -> None:
    with pytest.raises(UsageError, match="SHOAL_HELPERS has the entry"):
        settings.helpers({"SHOAL_HELPERS": f"10.0.0.1:1,{entry}"})


# ---- who and where --------------------------------------------------------------------------------------


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rendezvous.interface_address("10.1.2.3") == "10.1.2.3"
    assert rendezvous.interface_address("fd00:0::7") == "fd00::7"
    assert rendezvous.interface_address("lo") == "127.0.0.1"
    with pytest.raises(UsageError, match=r"SHOAL_INTERFACE=nowhere0.*this host has .*lo"):
        rendezvous.interface_address("nowhere0")
    assert rendezvous.interface_addresses("lo,10.1.2.3") == "127.0.0.1,10.1.2.3"
    with pytest.raises(
        UsageError,
        match=r"SHOAL_INTERFACE=lo,127\.0\.0\.1 stands for 127\.0\.0\.1, 127\.0\.0\.1: give .* once",
    ):
        rendezvous.interface_addresses("lo,127.0.0.1")
    with pytest.raises(UsageError, match=r"nowhere0"):
        rendezvous.interface_addresses("lo,nowhere0")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert rendezvous.local_address(dist.PrefixStore("a/", dist.PrefixStore("b/", store))) == "127.0.0.1"
    monkeypatch.setenv("SHOAL_INTERFACE", "127.0.0.9")
    assert rendezvous.local_address(store) == "127.0.0.9"


def test_loopback_addresses_reach_only_their_network() -> None:
    one, other = rendezvous.Endpoint("a", "127.0.1.1", "x"), rendezvous.Endpoint("b", "10.0.0.2", "y")
    with pytest.raises(UsageError, match=r"listens at 10\.0\.0\.1,127\.0\.0\.1, which rank 1"):
        rendezvous.refuse_loopback([rendezvous.Endpoint("a", "10.0.0.1,127.0.0.1", "x"), other])
    rendezvous.refuse_loopback([one, rendezvous.Endpoint("c", "127.0.0.2", "x")])
    rendezvous.refuse_loopback([other, rendezvous.Endpoint("c", "10.0.0.3", "x")])
    with pytest.raises(UsageError, match=r"rank 1 on host a listens at 127\.0\.1\.1, which rank 0 on host b"):
        rendezvous.refuse_loopback([other, one])


def test_a_rank_that_cannot_take_part_tells_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    limit = timedelta(seconds=5)
    monkeypatch.setenv("SHOAL_HELPERS", "10.0.0.1:1")
    with pytest.raises(UsageError, match="SHOAL_SECRET is not"):
        rendezvous.connect_engine(store, 0, 2, "g", 0, limit)
    monkeypatch.delenv("SHOAL_HELPERS")
    with pytest.raises(CommError, match=r"cannot be made: rank 0: .*SHOAL_SECRET is not"):
        rendezvous.connect_engine(store, 1, 2, "g", 1, limit)


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(CommError, match=r"rank 1 of the group did not come within 0.2 s"):
        rendezvous.connect_engine(dist.HashStore(), 0, 2, "g", 0, timedelta(seconds=0.2))


# ---- operands -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "dtype", "name"),
    [
        (ReduceOp.SUM, torch.float32, "sum"),
        (ReduceOp.AVG, torch.bfloat16, "avg"),
        (ReduceOp.AVG, torch.int64, "sum"),
        (ReduceOp.PRODUCT, torch.int64, "prod"),
        (ReduceOp.BXOR, torch.uint8, "bxor"),
        (ReduceOp.SUM, torch.bool, "max"),
        (ReduceOp.PRODUCT, torch.bool, "min"),
        (ReduceOp.BOR, torch.bool, "bor"),
        (ReduceOp.SUM, torch.complex64, "sum"),
    ],
)
def test_reductions_of_dtypes(op: ReduceOp.RedOpType, dtype: torch.dtype, name: str) -> None:
    assert reduction_of(op, torch.empty(1, dtype=dtype)).name == name
    assert reduction_of(ReduceOp(op), torch.empty(1, dtype=dtype)).name == name


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        (ReduceOp.AVG, torch.bool),
        (ReduceOp.BAND, torch.float32),
        (ReduceOp.MAX, torch.complex64),
        (ReduceOp.SUM, torch.int16),
        (ReduceOp.SUM, torch.float8_e4m3fn),
    ],
)
def test_reductions_that_cannot_be(op: ReduceOp.RedOpType, dtype: torch.dtype) -> None:
    with pytest.raises(UsageError, match=f"of a {dtype} tensor"):
        reduction_of(op, torch.empty(1, dtype=dtype))


def test_blocks_are_copied_only_if_they_must_be() -> None:
    table = torch.arange(12.0).view(3, 4)
    assert as_contiguous(table).data_ptr() == table.data_ptr()
    target, copy = output_buffer(table)
    assert target.data_ptr() == table.data_ptr()
    assert copy is None
    turned = table.t()
    assert torch.equal(as_contiguous(turned), turned)
    assert as_contiguous(turned).is_contiguous()
    target, copy = output_buffer(turned)
    assert copy is not None
    target.fill_(7)
    copy()
    assert (table == 7).all()
    rows = torch.arange(6.0)
    assert overlaps(rows[:3], rows[2:])
    assert not overlaps(rows[:3], rows[3:])


def test_what_moves_keeps_its_bits() -> None:
    for dtype in (torch.float16, torch.bool, torch.complex128, torch.int16):
        tensor = torch.ones(5, dtype=dtype)
        flat = as_movable(tensor)
        assert flat.data_ptr() == tensor.data_ptr()
        assert flat.numel() * flat.element_size() == tensor.numel() * tensor.element_size()
        assert flat.dtype == (dtype if dtype in ENGINE_DTYPES else torch.uint8)


# ---- alone, and the monitored barrier -------------------------------------------------------------------


def test_the_engine_of_one() -> None:
    engine = SingleProcessEngine()
    source, target = torch.arange(4.0), torch.zeros(4)
    asked = Operation(
        kind="all_gather", input=source.data_ptr(), output=target.data_ptr(), count=4, dtype="float32",
        timeout_s=1,
    )  # fmt: skip
    handle = engine.submit(asked)
    assert engine.wait(handle)
    assert torch.equal(source, target)
    seen: list[int] = []
    engine.then(handle, lambda: seen.append(handle))
    assert seen == [handle]
    assert engine.counters()["bytes_all_gather"] == 16 and engine.num_submitted == 1
    with pytest.raises(ValueError, match="a message between rank 0 and rank 1 of a group of 1"):
        engine.submit(Operation(kind="send", root=1))
    engine.abort("enough of this")
    with pytest.raises(CommError, match="enough of this"):
        engine.submit(Operation(kind="barrier"))


def _barrier(store: dist.Store, ranks: list[int], size: int, limit_s: float) -> dict[int, str]:
    """Run the barrier on these ranks as threads; return what each was told."""
    told: dict[int, str] = {}

    def one(rank: int) -> None:
        try:
            monitored_barrier(store, 1, rank, size, timedelta(seconds=limit_s), rank == 0)
        except CommError as error:
            told[rank] = str(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return told


def test_monitored_barrier() -> None:
    store = dist.PrefixStore(uuid.uuid4().hex, dist.HashStore())
    assert _barrier(store, [0, 1, 2], 3, 10) == {}
    store = dist.PrefixStore(uuid.uuid4().hex, dist.HashStore())
    told = _barrier(store, [0, 2], 4, 0.2)
    assert told.keys() == {0, 2}
    assert all("Ranks 1, 3 failed to pass monitoredBarrier in 200 ms" in text for text in told.values())
    assert "Rank 2 successfully reached monitoredBarrier" in told[2]
