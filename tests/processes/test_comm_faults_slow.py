"""Tests stopped processes and a busy machine: logged or waited for, never declared dead."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from comm_group import SECRET, Group, HelperProcess, Member, base, digest, expected, scale, stream

from shoal import native
from shoal.comm.engine import EngineOptions

COUNT = 300_000


@pytest.mark.parametrize("stopped_s", [5.0, pytest.param(10.0, marks=pytest.mark.slow)])
def test_who_is_stopped_is_named_as_straggler_and_nothing_is_lost(stopped_s: float) -> None:
    steps = 80
    with ExitStack() as stack:
        helper = stack.enter_context(HelperProcess("h0"))

        def begun(hosts: str, **given: Any) -> Group:
            """Start one and return while it is far from its end: each is stopped before the next is made."""
            group = stack.enter_context(Group(stream, hosts, steps, COUNT, 0.01, **given))
            group.expect(0, "sum", count=5)
            return group

        stopped: dict[Group, int] = {}
        for hosts, rank in (("ab", 1), ("aab", 1), ("abc", 0)):
            group = begun(hosts)
            group.signal(rank, signal.SIGSTOP)
            stopped[group] = rank
        first = group
        helped = begun("abc", helpers=[helper], pattern=[0, 1, 2, 3])
        helper.process.send_signal(signal.SIGSTOP)
        time.sleep(stopped_s)
        for group, rank in stopped.items():
            group.signal(rank, signal.SIGCONT)
        helper.process.send_signal(signal.SIGCONT)
        for group in (*stopped, helped):
            events = []
            for rank in range(group.size):
                group.expect(rank, "done")
                assert group.values(rank, "sum") == expected(group.hosts, steps, COUNT)
                events.append("\n".join(group.values(rank, "events")[0]))
                assert "was lost" not in events[rank]
            name = "helper h0" if group is helped else group.name(stopped[group])
            speaker = 1 if group is first else 0  # the lowest rank that waits
            told = [
                line for line in events[speaker].splitlines() if line.startswith("straggler: operation #")
            ]
            assert any(name in line for line in told), events
            assert f"all_reduce of float32[{COUNT}]" in told[0]


def test_a_helper_that_stands_still_is_replaced_and_serves_later_groups() -> None:
    steps = 40
    given: dict[str, Any] = {"pattern": [0, 1, 2, 3], "options": EngineOptions(helper_patience_s=1.0)}
    with HelperProcess("h0") as helper:
        with Group(stream, "abc", steps, COUNT, 0.01, helpers=[helper], **given) as group:
            group.expect(0, "sum", count=5)
            helper.process.send_signal(signal.SIGSTOP)
            for rank in range(group.size):
                group.expect(rank, "done")
                assert group.values(rank, "sum") == expected(group.hosts, steps, COUNT)
                events = "\n".join(group.values(rank, "events")[0])
                assert "helper h0 was lost (it has said nothing for 1 s); the others take over" in events
        helper.process.send_signal(signal.SIGCONT)
        with Group(stream, "ab", 5, COUNT, 0.01, helpers=[helper], **given | {"pattern": [0, 1, 2]}) as later:
            for rank in range(later.size):
                later.expect(rank, "done")
                assert later.values(rank, "sum") == expected(later.hosts, 5, COUNT)
                assert "was lost" not in "\n".join(later.values(rank, "events")[0])


@pytest.mark.parametrize("stopped_s", [1.0, pytest.param(6.0, marks=pytest.mark.slow)])
def test_who_is_stopped_while_a_group_connects_is_waited_for(stopped_s: float) -> None:
    """A listener drops who does not introduce itself within 5 s; it calls again."""
    steps = 3
    with HelperProcess("h0") as helper:
        helper.process.send_signal(signal.SIGSTOP)
        with Group(stream, "abc", steps, 5_000, helpers=[helper], pattern=[0, 1, 2, 3]) as group:
            group.signal(1, signal.SIGSTOP)
            time.sleep(stopped_s)
            assert not group.values(0, "sum")
            group.signal(1, signal.SIGCONT)
            time.sleep(stopped_s / 2)
            helper.process.send_signal(signal.SIGCONT)
            for rank in range(group.size):
                group.expect(rank, "done")
                assert group.values(rank, "sum") == expected(group.hosts, steps, 5_000)
                assert "was lost" not in "\n".join(group.values(rank, "events")[0])


def compute_first(member: Member) -> None:
    """Rank 2 comes some seconds after the others; it is busy in Python, with the GIL."""
    data = np.ones(100, np.float32)
    if member.rank == 2:
        until = time.monotonic() + 2.5
        while time.monotonic() < until:
            sum(range(1000))
    member.end(member.begin("all_reduce", data))
    assert (data == 4).all()
    member.report("events", member.engine.take_events())


def test_a_late_rank_is_named_once_by_one_rank() -> None:
    with Group(compute_first, "aabb") as group:
        for rank in range(4):
            group.expect(rank, "done")
        (line,) = group.values(0, "events")[0]
        assert "straggler: operation #0, all_reduce of float32[100] (sum), has waited" in line
        assert f"{group.name(2)} has not begun it" in line
        assert [group.values(rank, "events") for rank in (1, 2, 3)] == [[[]]] * 3


# ---- a busy machine ----------------------------------------------------------------------------------------


def stream_for(member: Member, duration_s: float) -> None:
    """Sum tensors for so long, with pauses; rank 0 says when it is over."""
    mine = base(member.rank, 20_000)
    until = time.monotonic() + duration_s
    go_on = np.ones(1, np.uint8)
    step = 0
    while go_on[0]:
        data = mine * scale(step)
        member.end(member.begin("all_reduce", data))
        member.report("sum", digest(data))
        go_on[0] = time.monotonic() < until
        member.end(member.begin("broadcast", go_on))
        time.sleep(0.05)
        step += 1
    member.report("events", member.engine.take_events())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("duration_s", [2.5, 300.0])
def test_sixteen_busy_processes_raise_no_false_alarm(duration_s: float) -> None:
    with ExitStack() as stack:
        for _ in range(16):
            busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            stack.callback(busy.wait)
            stack.callback(busy.kill)
        helper = stack.enter_context(HelperProcess("h0"))
        group = stack.enter_context(
            Group(stream_for, "aab", duration_s, helpers=[helper], pattern=[0, 2, 3], connect_s=120)
        )
        for rank in range(group.size):
            group.expect(rank, "done", deadline_s=duration_s + 120)
            sums = group.values(rank, "sum")
            assert sums == expected("aab", len(sums), 20_000)
            assert "was lost" not in "\n".join(group.values(rank, "events")[0])


# ---- memory of servers -------------------------------------------------------------------------------------

WINDOW = 1 << 20


def push_ahead(member: Member, count: int, num_ops: int) -> None:
    """Submit everything at once and watch what this rank's own server holds meanwhile."""
    member.end(member.begin("barrier", np.zeros(0, np.uint8)))
    member.report("ready")
    assert member.told(60)
    tensors = [base(member.rank, count) * scale(step) for step in range(num_ops)]
    handles = [member.begin("all_reduce", data) for data in tensors]
    most = 0
    while not member.engine.is_done(handles[-1]):
        most = max(most, member.engine.counters()["held_bytes"])
        time.sleep(0.005)
    for handle, data in zip(handles, tensors, strict=True):
        member.end(handle)
        member.report("sum", digest(data))
    member.report("held", most)


def test_servers_hold_no_more_than_the_windows_while_a_worker_is_stopped() -> None:
    count, num_ops, others = 500_000, 20, 3
    server = native.core().HelperServer("127.0.0.100", 0, SECRET.encode(), 0)
    server.start()
    helper = HelperProcess("h0", port=server.port)
    options = EngineOptions(window_bytes=WINDOW)
    with Group(
        push_ahead, "abcd", count, num_ops, helpers=[helper], pattern=[0, 4, 1, 4], options=options
    ) as group:
        for rank in range(4):
            group.expect(rank, "ready")
        group.signal(3, signal.SIGSTOP)
        for rank in range(4):
            group.tell(rank)
        most, begun, limit = 0, None, time.monotonic() + 60
        while time.monotonic() < (limit if begun is None else begun + 2):
            most = max(most, server.counters()["held_bytes"])
            begun = begun or (time.monotonic() if most else None)
            time.sleep(0.02)
        group.signal(3, signal.SIGCONT)
        for rank in range(4):
            group.expect(rank, "done")
            assert group.values(rank, "sum") == expected("abcd", num_ops, count)
        least = 5 * (32 << 10)  # of five servers: the window is never smaller
        bound = others * max(WINDOW, least)
        assert 0 < most <= bound < num_ops * count * 4
        assert 0 < group.values(0, "held")[0] <= bound + num_ops * count * 4 // 4  # and its own contributions
    server.stop()
