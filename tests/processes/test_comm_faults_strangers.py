"""Tests strangers at the ports of workers and helpers, and peers that send malformed frames."""

from __future__ import annotations

import random
import re
import resource
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from threading import Event
from time import monotonic, sleep

import comm_stranger as stranger
import numpy as np
import pytest
from comm_group import SECRET, Group, HelperProcess, Member, base, digest, expected, scale
from comm_stranger import Frame, Who

COUNT = 100_000
NUM_STRANGERS = 1000
HELPER_TAKES_PART = [0, 1, 2]


def stream_until_told(member: Member) -> None:
    """Sum one tensor after the other until the test tells rank 0 to stop."""
    mine = base(member.rank, COUNT)
    go_on = np.ones(1, np.uint8)
    step = 0
    while go_on[0]:
        data = mine * scale(step % 50)
        member.end(member.begin("all_reduce", data))
        member.report("sum", digest(data))
        if member.rank == 0:
            go_on[0] = not member.told()
        member.end(member.begin("broadcast", go_on))
        step += 1
    member.report("events", member.engine.take_events())


def assert_sums(group: Group) -> None:
    period = expected(group.hosts, 50, COUNT)
    for rank in range(group.size):
        sums = group.values(rank, "sum")
        assert sums and sums == (period * (len(sums) // 50 + 1))[: len(sums)]


def test_a_thousand_strangers_change_no_sum_and_are_counted() -> None:
    with HelperProcess("h0") as helper:
        with Group(stream_until_told, "ab", helpers=[helper], pattern=HELPER_TAKES_PART) as group:
            group.expect(0, "sum", count=2)
            places = [(helper.address, helper.port)] + [(peer.address, peer.port) for peer in group.peers]

            def intrude(number: int) -> bool:
                chance = random.Random(number)
                return stranger.intrude(chance, *places[number % 3], group=group.identity, secret=SECRET)

            with ThreadPoolExecutor(16) as pool:
                spoke = list(pool.map(intrude, range(NUM_STRANGERS)))
            at = len(group.values(0, "sum"))
            group.expect(0, "sum", count=at + 5)  # the job goes on behind them
            group.tell(0)
            counters = [group.expect(rank, "done").value for rank in range(2)]
            assert_sums(group)
            assert group.values(0, "events") == [[]]
        said = helper.stop()
    dropped = [int(match[1]) for match in re.finditer(r"(\d+) strangers dropped", said)]
    dropped += [each["strangers_dropped"] for each in counters]
    assert dropped == [sum(spoke[place::3]) for place in range(3)]


def test_half_open_connections_keep_nobody_out() -> None:
    with HelperProcess("h0") as helper, ThreadPoolExecutor(1) as pool:
        joined = Event()

        def crowd() -> int:
            """Begin one handshake after the other until the group has met: more than can wait at once."""
            waiting: list[socket.socket] = []
            number = 0
            while not joined.is_set():
                waiting.append(stranger.dial(helper.address, helper.port))
                with suppress(ConnectionError):  # it was dropped at once
                    waiting[-1].sendall(stranger.MARK)
                number += 1
                if len(waiting) > 600:
                    waiting.pop(300).close()
            for connection in waiting:
                connection.close()
            return number

        crowding = pool.submit(crowd)
        try:
            sleep(0.5)
            with Group(stream_until_told, "abcd", helpers=[helper], pattern=[0, 4, 1, 4]) as group:
                group.expect(0, "sum", count=2)
                joined.set()
                assert crowding.result() > 300
                group.tell(0)
                for rank in range(4):
                    group.expect(rank, "done")
                assert_sums(group)
        finally:
            joined.set()


MOST_MORE = 64 << 20
"""Bytes that strangers may make a helper use."""
LINGERING = 400
"""Strangers of a flood that neither end nor go on."""


def most_memory(pid: int) -> int:
    """Return the most bytes that a process has had in memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10


def test_a_flood_of_strangers_takes_little_of_a_helpers_memory() -> None:
    with HelperProcess("h0") as helper, ExitStack() as lingering:
        with Group(stream_until_told, "ab", helpers=[helper], pattern=HELPER_TAKES_PART) as group:
            group.expect(0, "sum", count=2)
            before = most_memory(helper.process.pid)
            for number in range(LINGERING):
                waiting = lingering.enter_context(stranger.dial(helper.address, helper.port))
                waiting.sendall(stranger.MARK[: number % len(stranger.MARK)])

            def intrude(number: int) -> None:
                chance = random.Random(number)
                stranger.intrude(chance, helper.address, helper.port, group=group.identity, secret=SECRET)

            with ThreadPoolExecutor(16) as pool:
                list(pool.map(intrude, range(2 * NUM_STRANGERS)))
            assert most_memory(helper.process.pid) <= before + MOST_MORE
            group.expect(0, "sum", count=len(group.values(0, "sum")) + 5)
            group.tell(0)
            for rank in range(2):
                group.expect(rank, "done")
            assert_sums(group)
            assert group.values(0, "events") == [[]]


def test_a_helper_at_its_file_limit_says_so_and_serves_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stranger, "TIMEOUT_S", 4.0)
    most_files = 64
    with HelperProcess("h0") as helper:
        resource.prlimit(helper.process.pid, resource.RLIMIT_NOFILE, (most_files, most_files))
        with Group(stream_until_told, "ab", helpers=[helper], pattern=HELPER_TAKES_PART) as group:
            group.expect(0, "sum", count=2)
            guests = []
            with suppress(OSError, EOFError, AssertionError):  # the last one waits, or is cut
                for number in range(most_files):
                    who = Who(group="other", rank=number, size=most_files)
                    guests.append(stranger.prove(helper.address, helper.port, SECRET, who)[0])
            assert 10 < len(guests) < most_files
            group.expect(0, "sum", count=len(group.values(0, "sum")) + 5)
            for guest in guests:
                guest.close()
            with Group(stream_until_told, "cd", helpers=[helper], pattern=HELPER_TAKES_PART) as later:
                later.expect(0, "sum", count=2)
                for each in (group, later):
                    each.tell(0)
                    for rank in range(2):
                        each.expect(rank, "done")
                    assert_sums(each)
                    assert each.values(0, "events") == [[]]
        assert f"this process may open {most_files} files (RLIMIT_NOFILE)" in helper.stop()


IMPOSSIBLE = {
    "mark": (Frame(magic=7), "magic"),
    "header": (Frame(header_crc=7), "header does not match its checksum"),
    "payload": (Frame(payload_crc=7), "payload does not match its checksum"),
    "length": (Frame(payload_bytes=(1 << 32) - 1), "4294967295 bytes"),
    "type": (Frame(type=99), "unknown code"),
    "host": (Frame(host=5), "host 5 of 2"),
    "needed": (Frame(needed=0), "of 0"),
    "words": (Frame(host=1, element=3, input=5), "uint8"),
    "divisor": (Frame(host=1, divisor=0, combine=1, element=6, input=6), "average"),
    "odd size": (Frame(host=1, payload=bytes(63)), "whole number of elements"),
    "root": (Frame(kind=2, host=0, needed=1, root=1 << 20), "no rank 1048576"),
    "supply": (Frame(type=stranger.SUPPLY, needed=9), "of 9"),
    "order": (Frame(type=stranger.ORDER), "it sent an order, which only rank 0 may"),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_an_impossible_frame_of_a_peer_ends_the_job_and_names_it(name: str) -> None:
    frame, what = IMPOSSIBLE[name]
    with Group(stream_until_told, "ab") as group:
        group.expect(0, "sum", count=2)
        peer = group.peers[0]
        since = monotonic()
        who = group.who(1)
        with stranger.join(peer.address, peer.port, SECRET, who) as connection:
            connection.sendall(who.encode(frame))
            for text in group.errors(range(2), since):
                assert group.name(1) in text, text
            assert what in group.errors([0], since)[0]
        assert_sums(group)


def test_impossible_frames_of_other_groups_leave_a_helper_at_work() -> None:
    chance = random.Random(0)
    frames = [frame for frame, _ in IMPOSSIBLE.values()]
    frames += [stranger.mutated(chance, Frame(seq=0, host=chance.randint(0, 1))) for _ in range(300)]
    with HelperProcess("h0") as helper:
        with Group(stream_until_told, "ab", helpers=[helper], pattern=HELPER_TAKES_PART) as group:
            group.expect(0, "sum", count=2)
            for rank, frame in enumerate(frames):
                who = Who(group=f"other {rank // 8}", rank=rank % 2, size=2)
                with stranger.join(helper.address, helper.port, SECRET, who) as connection:
                    connection.sendall(who.encode(frame) + who.encode(Frame(host=1)))
            group.expect(0, "sum", count=len(group.values(0, "sum")) + 5)
            group.tell(0)
            for rank in range(2):
                group.expect(rank, "done")
            assert_sums(group)
            assert group.values(0, "events") == group.values(1, "events") == [[]]  # nobody lost the helper
        said = helper.stop()
    assert "is gone: " in said and "group 'other 0'" in said


def test_a_helper_drops_the_rank_that_sends_an_impossible_frame_and_the_job_goes_on_without_it() -> None:
    with HelperProcess("h0") as helper:
        with Group(stream_until_told, "ab", helpers=[helper], pattern=HELPER_TAKES_PART) as group:
            group.expect(0, "sum", count=2)
            who = group.who(1)
            with stranger.join(helper.address, helper.port, SECRET, who) as connection:
                connection.sendall(who.encode(Frame(payload_crc=7)))
                assert stranger.hears_the_end(connection)
            group.expect(0, "sum", count=len(group.values(0, "sum")) + 20)
            group.tell(0)
            for rank in range(2):
                group.expect(rank, "done")
                assert "helper h0 was lost" in group.values(rank, "events")[0][0]
            assert_sums(group)
        said = helper.stop()
    assert (
        f"rank 1 of group '{group.identity}' is gone: a frame's payload does not match its checksum" in said
    )
