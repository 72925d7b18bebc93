"""Tests processes that are killed during a collective: workers, and helpers' servers."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import ExitStack

import pytest
from comm_group import (
    BOUND_S,
    DEADLINE_S,
    Group,
    HelperProcess,
    Member,
    base,
    digest,
    expected,
    scale,
    stream,
)

from shoal.comm.engine import EngineOptions

STEPS = 40
COUNT = 300_000


@pytest.mark.parametrize("hosts", ["aaa", "abc", "aabb"])
def test_a_killed_worker_is_named_on_every_survivor_with_the_operation(hosts: str) -> None:
    lost, size = 1, len(hosts)
    with Group(stream, hosts, 100_000, COUNT) as group:
        group.expect(0, "sum", count=5)
        since = group.signal(lost, signal.SIGKILL)
        survivors = [rank for rank in range(size) if rank != lost]
        for text in group.errors(survivors, since):
            assert f"{group.name(1)} was lost" in text
            assert "operation #" in text
            assert f"all_reduce of float32[{COUNT}] (sum)" in text
        steps = [len(group.values(rank, "sum")) for rank in survivors]
        want = expected(hosts, max(steps), COUNT)
        for rank, done in zip(survivors, steps, strict=True):  # and what was summed before was right
            assert group.values(rank, "sum") == want[:done]


def test_a_killed_worker_is_named_though_its_children_live_on() -> None:
    with Group(stream_beside_a_child, "ab") as group:
        group.expect(0, "sum", count=5)
        since = group.signal(1, signal.SIGKILL)
        (text,) = group.errors([0], since)
        assert f"{group.name(1)} was lost: " in text


def stream_beside_a_child(member) -> None:  # type: ignore[no-untyped-def]
    if os.fork() == 0:  # as loaders of data are
        time.sleep(3 * BOUND_S)
        os._exit(0)
    stream(member, 100_000, COUNT)


def test_a_worker_that_leaves_in_the_middle_is_named() -> None:
    with Group(leave_early, "ab") as group:
        group.expect(1, "done")
        (text,) = group.errors([0], time.monotonic())
        assert "rank 1" in text and "has left the group" in text


def leave_early(member) -> None:  # type: ignore[no-untyped-def]
    stream(member, 2 if member.rank == 1 else 3, 100)


@pytest.mark.parametrize(
    ("hosts", "num_helpers", "num_killed"),
    [("abc", 3, 1), ("abc", 3, 3), ("aab", 2, 1), ("aabb", 2, 2), ("abcd", 1, 1)],
)
def test_sums_keep_their_bits_when_helpers_are_killed(hosts: str, num_helpers: int, num_killed: int) -> None:
    _kill_helpers(hosts, num_helpers, num_killed, seed=num_helpers)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_sums_keep_their_bits_when_helpers_are_killed_at_many_moments(seed: int) -> None:
    hosts = ["abcd", "aabb", "abca", "ab"][seed % 4]
    _kill_helpers(hosts, 3, 1 + seed % 3, seed)


def _kill_helpers(hosts: str, num_helpers: int, num_killed: int, seed: int) -> None:
    chance = random.Random(seed)
    with ExitStack() as stack:
        helpers = [stack.enter_context(HelperProcess(f"h{k}")) for k in range(num_helpers)]
        group = stack.enter_context(Group(stream, hosts, STEPS, COUNT, helpers=helpers))
        moments = sorted(chance.sample(range(2, STEPS - 10), num_killed))
        order = chance.sample(helpers, num_killed)
        for moment, helper in zip(moments, order, strict=True):
            group.expect(chance.randrange(len(hosts)), "sum", count=moment)
            time.sleep(chance.random() * 0.02)
            helper.kill()
        want = expected(hosts, STEPS, COUNT)
        for rank in range(len(hosts)):
            group.expect(rank, "done")
            assert group.values(rank, "sum") == want
            events = "\n".join(group.values(rank, "events")[0])
            for helper in order:  # nobody learnt of it after the last sum: they were killed in the stream
                assert f"helper {helper.name} was lost" in events


def test_a_rank_that_begins_after_the_loss_meets_another_whose_window_is_full() -> None:
    """Each sends the lowest chunks first, whatever was lost: else two full windows wait for each other."""
    count = 1_000_000  # 123 chunks; rank 0 has 24 of them under way, rank 1 has 3
    options = [EngineOptions(min_window_bytes=256 << 10), EngineOptions()]
    with HelperProcess("h0") as helper:
        with Group(begin_in_turn, "ab", count, helpers=[helper], options=options) as group:
            group.expect(0, "begun")
            time.sleep(0.2)  # its window fills
            helper.kill()
            group.expect(0, "lost")
            group.tell(1)
            for rank in range(2):
                group.expect(rank, "done", deadline_s=3 * BOUND_S)
                assert group.values(rank, "sum") == expected("ab", 1, count)


def begin_in_turn(member: Member, count: int) -> None:
    """Rank 1 begins its sum when the test says so, rank 0 at once; it tells of the helper's loss."""
    if member.rank == 1:
        assert member.told(DEADLINE_S)
    data = base(member.rank, count) * scale(0)
    handle = member.begin("all_reduce", data)
    member.report("begun")
    while member.rank == 0 and not member.engine.take_events():
        time.sleep(0.01)
    member.report("lost")
    member.end(handle)
    member.report("sum", digest(data))


def test_without_servers_the_job_ends_and_names_the_last_one() -> None:
    options = EngineOptions(workers_serve=False)
    with HelperProcess("first") as first, HelperProcess("second") as second:
        with Group(stream, "abc", 100_000, COUNT, helpers=[first, second], options=options) as group:
            group.expect(0, "sum", count=5)
            first.kill()
            group.expect(0, "sum", count=30)  # the other one carries on alone
            second.process.send_signal(signal.SIGKILL)
            for text in group.errors(range(3), time.monotonic()):
                assert "no server is left" in text and "helper second" in text
            steps = [len(group.values(rank, "sum")) for rank in range(3)]
            want = expected("abc", max(steps), COUNT)
            for rank, done in enumerate(steps):
                assert done >= 28 and group.values(rank, "sum") == want[:done]
