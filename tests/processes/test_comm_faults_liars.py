"""Tests authenticated peers that send well-formed but false frames: an error names them at once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import ExitStack
from time import monotonic, sleep

import comm_stranger as stranger
import numpy as np
import pytest
from comm_group import SECRET, Group, HelperProcess, Member
from comm_stranger import PUSH, RESULT, SUPPLY, TELL, Frame, Who

from shoal.comm.engine import Peer

COUNT = 6
TRUE = stranger.signature(count=COUNT)
LIE = bytes(np.full(COUNT, 1e6, np.float32))
INT8, AVG = 4, 1
ARRIVED_S = 0.5
"""A frame has been read by then; nothing tells the test that it has."""


def sum_when_told(member: Member) -> None:
    """Agree once; then rank 0 begins operation #1, and each other rank when the test tells it."""
    data = np.ones(COUNT, np.float32)
    member.end(member.begin("all_reduce", data))
    member.report("agreed")
    if member.rank > 0:
        member.told(60)
    data[:] = 1
    handle = member.begin("all_reduce", data)
    member.report("begun")
    member.end(handle)
    member.report("sum", data)
    member.report("events", member.engine.take_events())


def about_first(**words: object) -> Frame:
    """Return rank 1's contribution, from host 1, to the chunk of operation #1; all true but ``words``."""
    true = {"seq": 1, "host": 1, "signature": TRUE, "payload": bytes(np.ones(COUNT, np.float32))}
    return Frame(**{**true, **words})  # type: ignore[arg-type]


def lie_to(stack: ExitStack, at: Peer | HelperProcess, group: Group, frame: Frame) -> float:
    """Send a frame as rank 1's, over a connection that stays until the test's end; return when."""
    since, who = monotonic(), group.who(1)
    connection = stack.enter_context(stranger.join(at.address, at.port, SECRET, who))
    connection.sendall(who.encode(frame))
    return since


def both_errors(lied: Sequence[tuple[Group, float]]) -> list[list[str]]:
    """Return, of each group, the error of rank 0, which waits for rank 1, and then of rank 1."""
    found = [group.errors([0], since) for group, since in lied]
    sleep(ARRIVED_S)  # else rank 1 may end its operation before it learns of rank 0's error
    for group, _ in lied:
        group.tell(1)
    return [errors + group.errors([1], monotonic()) for (group, _), errors in zip(lied, found, strict=True)]


TOLD_TO_HELPER = {
    "in the name of another host": (about_first(host=0, payload=LIE), "host 0 of 2 where host 1 of 2"),
    "of more hosts": (about_first(needed=16384), "host 1 of 16384 where host 1 of 2"),
    "supply for another host": (about_first(type=SUPPLY, host=0), "host 0 of 2 where host 1 of 2"),
    "supply of more hosts": (about_first(type=SUPPLY, needed=65535), "host 1 of 65535 where host 1 of 2"),
    "supply of part of an element": (about_first(type=SUPPLY, payload=bytes(3)), "whole number of elements"),
    "average of integers": (
        about_first(element=INT8, input=INT8, combine=AVG, divisor=256, payload=bytes(COUNT)),
        "an average needs floating-point elements",
    ),
}


def test_a_helper_ends_the_group_of_a_member_that_lies_about_itself() -> None:
    """A group for each lie, all at one helper."""
    with ExitStack() as stack:
        helper = stack.enter_context(HelperProcess("h0"))
        lied = []
        for frame, what in TOLD_TO_HELPER.values():
            group = stack.enter_context(Group(sum_when_told, "ab", helpers=[helper], pattern=[2]))
            group.expect(0, "begun")
            lie_to(stack, helper, group, frame)
            lied.append((group, what))
        sleep(ARRIVED_S)
        for group, what in lied:
            group.tell(1)
            for text in group.errors(range(2), monotonic()):
                assert "helper h0" in text and "rank 1 of the group sent a helper a malformed frame" in text
                assert what in text, text
            assert not group.values(0, "sum") and not group.values(1, "sum")
        said = helper.stop()  # fails if it had crashed
    assert said.count("rank 1 of group") >= len(lied) and all(what in said for _, what in lied)


CONFLICTING = {
    "too few elements": about_first(payload=bytes(4 * COUNT - 4)),
    "another type": about_first(element=6, input=6),
    "another operation": about_first(combine=AVG),
    "supply of another size": about_first(type=SUPPLY, payload=bytes(4 * COUNT + 4)),
    "supply of what is summed": about_first(type=SUPPLY, payload=LIE),
}


@pytest.mark.parametrize("where", ["helper", "rank 0"])
def test_frames_that_do_not_fit_each_other_name_both_senders(where: str) -> None:
    """The honest rank is not blamed alone, in either order; a group for each frame.

    Only what a lost helper has summed is supplied.
    """
    with ExitStack() as stack:
        helper = stack.enter_context(HelperProcess("h0"))
        lied = []
        for frame in CONFLICTING.values():
            pattern = [2] if where == "helper" else [0]
            group = stack.enter_context(Group(sum_when_told, "ab", helpers=[helper], pattern=pattern))
            group.expect(0, "begun")
            lied.append((group, lie_to(stack, helper if where == "helper" else group.peers[0], group, frame)))
        for frame, (group, _), texts in zip(CONFLICTING.values(), lied, both_errors(lied), strict=True):
            for text in texts:
                if where == "rank 0" and frame.type == SUPPLY:
                    what = f"it supplies chunk 0 of operation #1, which {group.name(0)} serves"
                    assert f"{group.name(1)} sent a malformed frame: {what}" in text, text
                    continue
                assert "6 elements of float32 (all_reduce, sum)" in text, text
                if where == "helper":
                    assert "ranks 0 and 1 of the group" in text or "ranks 1 and 0 of the group" in text
                else:
                    assert group.name(0) in text and group.name(1) in text


def test_a_frame_with_a_false_signature_names_its_sender_at_once() -> None:
    """Groups for both kinds of frames, at a helper and at a rank."""
    with ExitStack() as stack:
        helper = stack.enter_context(HelperProcess("h0"))
        lied = []
        for where, kind in itertools.product(("helper", "rank 0"), (PUSH, SUPPLY)):
            pattern = [2] if where == "helper" else [0]
            group = stack.enter_context(Group(sum_when_told, "ab", helpers=[helper], pattern=pattern))
            group.expect(0, "begun")
            at = helper if where == "helper" else group.peers[0]
            lie_to(stack, at, group, about_first(type=kind, signature=TRUE ^ 1))
            lied.append(group)
        sleep(ARRIVED_S)
        for group in lied:
            group.tell(1)
            since = group.expect(1, "begun").at
            for text in group.errors(range(2), since):
                assert f"received a frame of {group.name(1)} about operation #1" in text, text
                assert "signature of another operation than all_reduce of float32[6] (sum)" in text


def test_a_result_from_a_rank_that_does_not_serve_the_chunk_is_refused() -> None:
    with Group(sum_when_told, "abc", pattern=[1]) as group:
        group.expect(0, "begun")
        since = monotonic()
        who = group.who(2)
        peer = group.peers[0]
        with stranger.join(peer.address, peer.port, SECRET, who) as connection:
            connection.sendall(who.encode(about_first(type=RESULT, needed=3, host=2, payload=LIE)))
            sleep(ARRIVED_S)
            for rank in (1, 2):
                group.tell(rank)
            for text in group.errors(range(3), since):
                assert f"{group.name(2)} sent a malformed frame: a result of chunk 0" in text, text
                assert f"which {group.name(1)} serves" in text
        assert not group.values(0, "sum")


ALL_TO_ALL, RECV = 7, 11
ABOUT_MESSAGES = {
    "an offer of a receive": (Frame(type=stranger.OFFER, kind=RECV, payload=b""), "an offer of a recv"),
    "an offer without a size": (
        Frame(type=stranger.OFFER, kind=ALL_TO_ALL, redo=1, payload=b"1"),
        "an offer without the size of the message",
    ),
    "too much unasked": (
        Frame(type=stranger.OFFER, kind=ALL_TO_ALL, seq=9, payload=bytes((1 << 20) + 1)),
        "more than 1048576 bytes of messages unasked",
    ),
    "nothing to accept": (
        Frame(type=stranger.ACCEPT, chunk=3, payload=b""),
        "it accepts message 3, which is not offered",
    ),
    "a part of nothing": (
        Frame(type=stranger.PART, chunk=3, payload=b"1"),
        "a part of message 3, which was not accepted",
    ),
    "room for nothing": (
        Frame(type=stranger.ROOM, needed=0, chunk=1, payload=b""),
        "it has taken more bytes of messages than were sent",
    ),
    "a slot of another": (
        Frame(type=stranger.ROOM, needed=1, payload=b""),
        "it gives back a slot that it does not have",
    ),
}


def test_false_frames_about_messages_name_their_sender() -> None:
    """A group for each frame."""
    with ExitStack() as stack:
        lied = []
        for frame, _ in ABOUT_MESSAGES.values():
            group = stack.enter_context(Group(sum_when_told, "ab"))
            group.expect(0, "begun")
            lied.append((group, lie_to(stack, group.peers[0], group, frame)))
        for (group, _), (_, what), texts in zip(
            lied, ABOUT_MESSAGES.values(), both_errors(lied), strict=True
        ):
            for text in texts:
                assert f"{group.name(1)} sent a malformed frame: {what}" in text, text


def test_a_result_of_another_size_names_the_server_and_a_suspect_must_be_a_rank() -> None:
    with ExitStack() as stack:
        group = stack.enter_context(Group(sum_when_told, "ab", pattern=[1]))
        other = stack.enter_context(Group(sum_when_told, "ab"))
        lies = {group: about_first(type=RESULT, payload=LIE[4:])}
        lies[other] = Frame(type=TELL, seq=1, chunk=1 << 40, payload=b"")
        for each in lies:
            each.expect(0, "begun")
        lied = [(each, lie_to(stack, each.peers[0], each, frame)) for each, frame in lies.items()]
        of_result, of_suspect = both_errors(lied)
        for text in of_result:
            assert f"{group.name(1)} sent a malformed frame: a result of 20 bytes" in text
        for text in of_suspect:
            assert f"{other.name(1)} sent a malformed" in text
            assert "it suspects rank 1099511627776 of 2" in text


def test_a_false_report_of_a_difference_ends_the_group_with_the_reporters_name() -> None:
    """A report of a frame of the true operation says nothing."""
    with ExitStack() as stack:
        lied = []
        for suspect, told in itertools.product((0, 1), (TRUE, TRUE ^ 1)):
            group = stack.enter_context(Group(sum_when_told, "ab"))
            group.expect(0, "begun")
            frame = Frame(type=TELL, seq=1, chunk=suspect, signature=told, payload=b"")
            lie_to(stack, group.peers[0], group, frame)
            lied.append((group, told))
        sleep(ARRIVED_S)
        for group, told in lied:
            group.tell(1)
            if told == TRUE:
                assert (group.expect(0, "sum").value == 2).all()
                continue
            for text in group.errors(range(2), monotonic()):
                assert group.name(1) in text, text


def test_a_member_on_another_host_takes_no_name_of_a_process() -> None:
    """Not a rank's at a helper or at a rank; and from no address that of a process that a rank calls."""
    with HelperProcess("h0") as helper, Group(sum_when_told, "ab", helpers=[helper], pattern=[2]) as group:
        group.expect(0, "begun")
        as_helper = Who(group=group.identity, rank=0, size=2, process=f"{helper.address}:{helper.port}")
        places: list[tuple[Peer | HelperProcess, Who, str]] = [
            (helper, group.who(0), "127.0.0.9"),
            (helper, group.who(1), "127.0.0.9"),
            (group.peers[0], group.who(1), "127.0.0.9"),
            (group.peers[0], as_helper, helper.address),
            (group.peers[1], group.who(0), group.peers[0].address),
        ]
        for at, who, source in places:
            connection, is_in = stranger.prove(at.address, at.port, SECRET, who, source)
            connection.close()
            assert not is_in, (at, who, source)
        group.tell(1)
        for rank in range(2):
            assert (group.expect(rank, "sum").value == 2).all()
            assert group.expect(rank, "events").value == []
        said = helper.stop()
    assert "from 127.0.0.9: it takes the name of a process that is connected from 127.0.0.1" in said


def test_a_process_has_no_more_connections_than_it_opens() -> None:
    with HelperProcess("h0") as helper, Group(sum_when_told, "ab", helpers=[helper], pattern=[2]) as group:
        group.expect(0, "begun")
        found = [stranger.prove(helper.address, helper.port, SECRET, group.who(1)) for _ in range(70)]
        for connection, _ in found:
            connection.close()
        assert sum(is_in for _, is_in in found) == 1 + 64 - 2  # two are rank 1's own
        said = helper.stop()
    assert "its process has 65 connections already" in said


ESCAPES = "\x1b[2J\x1b]0;title\x07"


@pytest.mark.parametrize("kind", [stranger.FAIL, stranger.ANNOUNCE])
def test_text_from_a_peer_reaches_no_terminal_unescaped(kind: int) -> None:
    with Group(sum_when_told, "ab") as group:
        group.expect(0, "begun")
        since = monotonic()
        who = group.who(1)
        with stranger.join(group.peers[0].address, group.peers[0].port, SECRET, who) as connection:
            connection.sendall(
                who.encode(Frame(type=kind, seq=1, payload=f"forged\nline {ESCAPES}".encode()))
            )
            for text in group.errors([0], since):
                assert "forged\\x0aline \\x1b[2J" in text and "\x1b" not in text and "\n" not in text


def test_a_group_name_reaches_a_helpers_log_escaped() -> None:
    with HelperProcess("h0") as helper:
        who = Who(group=f"x\nforged {ESCAPES}", rank=0, size=2)
        with stranger.join(helper.address, helper.port, SECRET, who) as connection:
            connection.sendall(who.encode(Frame(magic=7)))
            assert stranger.hears_the_end(connection)
        said = helper.stop()
    assert "x\\x0aforged \\x1b[2J" in said and "\x1b" not in said and "\nforged" not in said


def test_a_helper_that_speaks_like_a_rank_is_left_out() -> None:
    """It has no rank to compare with, and what it serves goes to the others."""
    with stranger.FakeHelper(SECRET) as fake:
        with Group(sum_when_told, "ab", helpers=[fake], pattern=[0, 1]) as group:  # type: ignore[list-item]
            group.expect(0, "begun")
            fake.send(Frame(type=stranger.ANNOUNCE, seq=1, payload=b"of my own"), group.identity)
            sleep(ARRIVED_S)
            group.tell(1)
            for rank in range(2):
                assert (group.expect(rank, "sum").value == 2).all()
                (event,) = group.expect(rank, "events").value
                assert "helper fake was lost" in event
            assert any(
                "a helper issues no operations" in group.values(rank, "events")[0][0] for rank in range(2)
            )
