"""Tests who is who: keys of processes, tags of frames, and a relay between a worker and a helper."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from time import monotonic

import comm_stranger as stranger
import numpy as np
import pytest
from comm_group import SECRET, Group, HelperProcess, Member
from comm_stranger import Frame, Seal, Who

from shoal.comm.engine import EngineOptions

PROTECTED = ["tag", "encrypt"]
OTHER = b"another process' private key    "
NOT_ITS_TAG = "a frame header does not match its tag: it was changed on the way, or somebody else has sent it"


def sum_until_told(member: Member) -> None:
    """Add up one number after the other until the test tells rank 0, which all learn from the sum."""
    number = 0
    while True:
        data = np.full(50_000, number, np.float32)
        data[0] = member.rank == 0 and member.told()
        member.end(member.begin("all_reduce", data))
        assert (data[1:] == member.size * number).all()
        number += 1
        member.report("sum", number)
        if data[0]:
            break
    member.report("events", member.engine.take_events())


def finish(group: Group) -> None:
    group.expect(0, "sum", count=len(group.values(0, "sum")) + 5)
    group.tell(0)
    for rank in range(group.size):
        group.expect(rank, "done")
        assert group.values(rank, "events") == [[]]


@pytest.mark.parametrize("protection", ["checksum", *PROTECTED])
def test_sums_are_right_whatever_protects_them(protection: str) -> None:
    options = EngineOptions(protection=protection, connections_per_peer=2)
    with (
        HelperProcess("h0") as helper,
        Group(sum_until_told, "aab", helpers=[helper], pattern=[0, 2, 3], options=options) as group,
    ):
        finish(group)
        helper.stop()


def test_a_member_with_another_key_takes_no_name_of_a_process() -> None:
    """Although it knows the secret, and calls from the address of the process."""
    with HelperProcess("h0") as helper, Group(sum_until_told, "ab", helpers=[helper], pattern=[2]) as group:
        group.expect(0, "sum", count=2)
        for at in (helper, group.peers[0]):
            who = replace(group.who(1), own=OTHER)
            connection, is_in = stranger.prove(at.address, at.port, SECRET, who)
            connection.close()
            assert not is_in
        finish(group)
        said = helper.stop()
    assert "it takes the name of a process that has another public key" in said


def test_a_rank_calls_nobody_with_another_key_than_the_group_knows() -> None:
    """Another process listens where rank 0 does: the one that calls it says so."""

    def with_another_key(group: Group) -> None:
        group.peers[0] = replace(group.peers[0], key=stranger.public_key(OTHER).hex())

    with Group(sum_until_told, "ab", change=with_another_key, connect_s=5) as group:
        texts = [group.expect(rank, "error").value for rank in range(2)]
    assert "another process answers there: its public key differs" in texts[1], texts


def repeated(seal: Seal, frame: bytes) -> bytes:
    return seal.close(frame) * 2


def left_out(seal: Seal, frame: bytes) -> bytes:
    seal.close(frame)
    return seal.close(frame)


def moved(seal: Seal, frame: bytes) -> bytes:
    first = seal.close(frame)
    return seal.close(frame) + first


def flipped(at: int) -> Callable[[Seal, bytes], bytes]:
    def changed(seal: Seal, frame: bytes) -> bytes:
        words = bytearray(seal.close(frame))
        words[at] ^= 1
        return bytes(words)

    return changed


CHANGED: dict[str, tuple[Callable[[Seal, bytes], bytes], str]] = {
    "flipped header": (flipped(30), NOT_ITS_TAG),
    "flipped tag": (flipped(stranger.HEADER_BYTES - 1), NOT_ITS_TAG),
    "flipped payload": (flipped(stranger.HEADER_BYTES), "a frame's payload does not match its tag"),
    "repeated": (repeated, NOT_ITS_TAG),
    "left out": (left_out, NOT_ITS_TAG),
    "moved": (moved, NOT_ITS_TAG),
    "with a checksum alone": (lambda _, frame: frame, NOT_ITS_TAG),
}


@pytest.mark.parametrize("protection", [stranger.TAG, stranger.ENCRYPT])
def test_frames_that_are_changed_on_the_way_end_the_connection(protection: int) -> None:
    """Of groups that each have one member at a helper, whose second frame a relay changes."""
    with HelperProcess("h0") as helper:
        for name, (change, _) in CHANGED.items():
            who = Who(group=name, rank=0, size=2)
            connection, seal, is_in = stranger.session(
                helper.address, helper.port, SECRET, who, "", protection
            )
            with connection:
                assert is_in
                connection.sendall(seal.close(who.join()))
                connection.sendall(change(seal, who.encode(Frame())))
                assert stranger.hears_the_end(connection), name
        said = helper.stop()
    for name, (_, what) in CHANGED.items():
        assert f"rank 0 of group '{name}' is gone: {what}" in said, said


@pytest.mark.parametrize("protection", PROTECTED)
def test_a_frame_without_the_tag_of_its_connection_ends_the_group_and_names_the_peer(protection: str) -> None:
    code = 1 + PROTECTED.index(protection)
    with Group(sum_until_told, "ab", options=EngineOptions(protection=protection)) as group:
        group.expect(0, "sum", count=2)
        peer, who, since = group.peers[0], group.who(1), monotonic()
        connection, seal, is_in = stranger.session(peer.address, peer.port, SECRET, who, "", code)
        with connection:
            assert is_in
            connection.sendall(seal.close(who.join()) + who.encode(Frame()))
            for text in group.errors(range(2), since):
                assert group.name(1) in text, text
            assert NOT_ITS_TAG in group.errors([0], since)[0]


def test_a_relay_is_not_taken_for_the_helper_behind_it() -> None:
    """It passes all on without knowing the secret; what it answers for is another address."""
    with HelperProcess("h0") as helper, Relay(helper) as relay:
        shown = replace(helper, address=relay.address, port=relay.port)
        with Group(sum_until_told, "ab", helpers=[shown], pattern=[2], connect_s=10) as group:
            texts = [group.expect(rank, "error").value for rank in range(2)]
        assert any(
            f"the process at {helper.address}:{helper.port} that answers there" in text for text in texts
        )
        helper.stop()


class Relay:
    """Listens, and passes on what comes, in both directions; a context manager."""

    address = "127.0.0.103"

    def __init__(self, to: HelperProcess) -> None:
        self._to = to
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> Relay:
        self._listener = socket.create_server((self.address, 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        for each in self._sockets:
            each.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = stranger.dial(self._to.address, self._to.port)
                self._sockets += [near, far]
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=_pass_on, args=ends, daemon=True).start()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
