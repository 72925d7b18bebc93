"""Tests authenticated peers that send well-formed but false frames: an error names them at once."""

from __future__ import annotations

from time import monotonic, sleep

import comm_stranger as stranger
import numpy as np
import pytest
from comm_group import SECRET, Group, HelperProcess, Member
from comm_stranger import PUSH, RESULT, SUPPLY, TELL, Frame, Who

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


def both_errors(group: Group, since: float) -> list[str]:
    """Return the errors of rank 0, which waits for rank 1, and then of rank 1."""
    errors = group.errors([0], since)
    sleep(ARRIVED_S)  # else rank 1 may end its operation before it learns of rank 0's error
    group.tell(1)
    return errors + group.errors([1], monotonic())


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


@pytest.mark.parametrize("lie", TOLD_TO_HELPER)
def test_a_helper_ends_the_group_of_a_member_that_lies_about_itself(lie: str) -> None:
    frame, what = TOLD_TO_HELPER[lie]
    with HelperProcess("h0") as helper:
        with Group(sum_when_told, "ab", helpers=[helper], pattern=[2]) as group:
            group.expect(0, "begun")
            since = monotonic()
            who = group.who(1)
            with stranger.join(helper.address, helper.port, SECRET, who) as connection:
                connection.sendall(who.encode(frame))
                sleep(ARRIVED_S)
                group.tell(1)
                for text in group.errors(range(2), since):
                    assert (
                        "helper h0" in text and "rank 1 of the group sent a helper a malformed frame" in text
                    )
                    assert what in text, text
            assert not group.values(0, "sum") and not group.values(1, "sum")
        said = helper.stop()  # fails if it had crashed
    assert "rank 1 of group" in said and what in said


CONFLICTING = {
    "too few elements": about_first(payload=bytes(4 * COUNT - 4)),
    "another type": about_first(element=6, input=6),
    "another operation": about_first(combine=AVG),
    "supply of another size": about_first(type=SUPPLY, payload=bytes(4 * COUNT + 4)),
}


@pytest.mark.parametrize("where", ["helper", "rank 0"])
@pytest.mark.parametrize("lie", CONFLICTING)
def test_frames_that_do_not_fit_each_other_name_both_senders(lie: str, where: str) -> None:
    """The honest rank is not blamed alone, in either order."""
    with HelperProcess("h0") as helper:
        pattern = [2] if where == "helper" else [0]
        with Group(sum_when_told, "ab", helpers=[helper], pattern=pattern) as group:
            group.expect(0, "begun")
            at = helper if where == "helper" else group.peers[0]
            since = monotonic()
            who = group.who(1)
            with stranger.join(at.address, at.port, SECRET, who) as connection:
                connection.sendall(who.encode(CONFLICTING[lie]))
                for text in both_errors(group, since):
                    assert "6 elements of float32 (all_reduce, sum)" in text, text
                    if where == "helper":
                        assert "ranks 0 and 1 of the group" in text or "ranks 1 and 0 of the group" in text
                    else:
                        assert group.name(0) in text and group.name(1) in text


@pytest.mark.parametrize("kind", [PUSH, SUPPLY])
@pytest.mark.parametrize("where", ["helper", "rank 0"])
def test_a_frame_with_a_false_signature_names_its_sender_at_once(where: str, kind: int) -> None:
    with HelperProcess("h0") as helper:
        pattern = [2] if where == "helper" else [0]
        with Group(sum_when_told, "ab", helpers=[helper], pattern=pattern) as group:
            group.expect(0, "begun")
            at = helper if where == "helper" else group.peers[0]
            who = group.who(1)
            with stranger.join(at.address, at.port, SECRET, who) as connection:
                connection.sendall(who.encode(about_first(type=kind, signature=TRUE ^ 1)))
                sleep(ARRIVED_S)
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


@pytest.mark.parametrize("lie", ABOUT_MESSAGES)
def test_false_frames_about_messages_name_their_sender(lie: str) -> None:
    frame, what = ABOUT_MESSAGES[lie]
    with Group(sum_when_told, "ab") as group:
        group.expect(0, "begun")
        since = monotonic()
        who = group.who(1)
        with stranger.join(group.peers[0].address, group.peers[0].port, SECRET, who) as connection:
            connection.sendall(who.encode(frame))
            for text in both_errors(group, since):
                assert f"{group.name(1)} sent a malformed frame: {what}" in text, text


def test_a_result_of_another_size_names_the_server() -> None:
    with Group(sum_when_told, "ab", pattern=[1]) as group:
        group.expect(0, "begun")
        since = monotonic()
        who = group.who(1)
        with stranger.join(group.peers[0].address, group.peers[0].port, SECRET, who) as connection:
            connection.sendall(who.encode(about_first(type=RESULT, payload=LIE[4:])))
            for text in both_errors(group, since):
                assert f"{group.name(1)} sent a malformed frame: a result of 20 bytes" in text


@pytest.mark.parametrize(("suspect", "told"), [(0, TRUE), (1, TRUE), (0, TRUE ^ 1), (1, TRUE ^ 1)])
def test_a_false_report_of_a_difference_ends_the_group_with_the_reporters_name(
    suspect: int, told: int
) -> None:
    with Group(sum_when_told, "ab") as group:
        group.expect(0, "begun")
        who = group.who(1)
        with stranger.join(group.peers[0].address, group.peers[0].port, SECRET, who) as connection:
            connection.sendall(
                who.encode(Frame(type=TELL, seq=1, chunk=suspect, signature=told, payload=b""))
            )
            since = monotonic()
            sleep(ARRIVED_S)
            group.tell(1)
            for text in group.errors(range(2), since):
                assert group.name(1) in text, text


def test_a_suspect_that_is_no_rank_is_a_malformed_frame() -> None:
    with Group(sum_when_told, "ab") as group:
        group.expect(0, "begun")
        since = monotonic()
        who = group.who(1)
        with stranger.join(group.peers[0].address, group.peers[0].port, SECRET, who) as connection:
            connection.sendall(who.encode(Frame(type=TELL, seq=1, chunk=1 << 40, payload=b"")))
            for text in both_errors(group, since):
                assert (
                    f"{group.name(1)} sent a malformed" in text
                    and "it suspects rank 1099511627776 of 2" in text
                )


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
