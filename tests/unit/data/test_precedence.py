"""Reads of shards that wait for gradients: by the slots of a host's workers, and at a socket."""

import select
import socket
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from shoal.data import precedence
from shoal.data.peers import (
    _BUFFER_BYTES,
    _IN_FLIGHT_BYTES,
    DONE,
    FRAME,
    MAX_FRAME,
    PROTOCOL,
    Peer,
    PeerReader,
    Peers,
)
from shoal.data.precedence import ExchangeMark, Precedence, make_slots
from shoal.env import proof

SECRET = b"the secret of these tests"
SECOND = 1_000_000_000


class Clock:
    """Time that passes where a read waits."""

    def __init__(self):
        self.now = 1_000 * SECOND
        self.on_sleep = []

    def monotonic_ns(self):
        return self.now

    def monotonic(self):
        return self.now / SECOND

    def sleep(self, seconds):
        self.now += round(seconds * SECOND)
        if self.on_sleep:
            self.on_sleep.pop(0)()


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(precedence, "time", clock)
    return clock


@pytest.fixture
def slots():
    path = make_slots(2)
    yield path
    path.unlink()


def workers(path, clock, *took_s):
    """Two workers whose earlier exchanges took so many seconds."""
    marks = [ExchangeMark(), ExchangeMark()]
    for number, mark in enumerate(marks):
        mark.open(path, number)
        for seconds in took_s:
            mark.begin()
            clock.now += round(seconds * SECOND)
            mark.end()
    return marks


def test_reads_wait_until_a_worker_has_its_gradients(slots, clock):
    first, second = workers(slots, clock, 4.0)
    gate = Precedence(slots)
    assert gate.wait() == 0
    first.begin()
    assert gate.wait() == 0, "the other worker may need the data"
    second.begin()
    clock.on_sleep = [lambda: None, lambda: None, first.end]
    assert gate.wait() == pytest.approx(3 * precedence._LOOK_S)
    second.end()
    assert gate.wait() == 0


def test_an_exchange_that_takes_over_twice_the_usual_time_waits_for_another_host(slots, clock):
    first, second = workers(slots, clock, 3.0, 1.0, 2.0)
    gate = Precedence(slots)
    first.begin()
    clock.now += SECOND
    second.begin()
    second.begin()  # a second bucket
    assert gate.wait() == pytest.approx(2.0, abs=precedence._LOOK_S)  # twice the shortest, after the second
    assert gate.wait() == 0


def test_a_piece_comes_before_the_server_gives_up(slots, clock):
    for mark in workers(slots, clock, 100.0):
        mark.begin()
    gate = Precedence(slots)
    assert gate.wait() == pytest.approx(precedence._MOST_WAIT_S, abs=precedence._LOOK_S)
    assert gate.wait() == pytest.approx(precedence._MOST_WAIT_S, abs=precedence._LOOK_S)


def test_a_first_exchange_has_no_usual_time(slots, clock):
    for mark in workers(slots, clock):
        mark.begin()
    assert Precedence(slots).wait() == 0


def test_without_slots_nothing_waits(slots, clock, tmp_path):
    marks = workers(slots, clock, 1.0)
    late = ExchangeMark()
    late.open(slots, 2)  # it came later, and has no slot
    for mark in (*marks, late):
        mark.begin()
    assert Precedence(None).wait() == Precedence(tmp_path / "absent").wait() == 0
    assert Precedence(slots).wait() > 0


@pytest.fixture
def peer(monkeypatch):
    """A peer that sends a file of 64 MB as fast as it is taken, and counts what it has sent."""
    monkeypatch.setenv("SHOAL_SECRET", SECRET.decode())
    data = np.random.default_rng(3).bytes(8 * MAX_FRAME)
    sent = SimpleNamespace(data=data, num_bytes=0, is_stuck=threading.Event())

    def serve(link):
        proof.receive(link)
        proof.send(link, [b"ok", b"ready"])
        whole = b"".join(
            FRAME.pack(MAX_FRAME) + data[first : first + MAX_FRAME]
            for first in range(0, len(data), MAX_FRAME)
        )
        whole += FRAME.pack(DONE)
        link.setblocking(False)
        link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        while sent.num_bytes < len(whole):
            if not select.select([], [link], [], 1.0)[1]:
                sent.is_stuck.set()
                continue
            sent.num_bytes += link.send(whole[sent.num_bytes : sent.num_bytes + _BUFFER_BYTES])

    listener = proof.ProvedListener(socket.create_server(("127.0.0.1", 0)), PROTOCOL, SECRET, serve)
    listener.start()
    sent.peer = Peer(name="b", address="127.0.0.1", port=listener.port, num_bytes=1)
    yield sent
    listener.close()


def test_a_peer_sends_no_more_than_is_in_flight_while_gradients_are_exchanged(slots, peer, monkeypatch):
    monkeypatch.setattr(precedence, "_MOST_WAIT_S", 600.0)
    monkeypatch.setattr(precedence, "_TIMES_USUAL", 1 << 40)
    mark, other = ExchangeMark(), ExchangeMark()
    for number, each in enumerate((mark, other)):
        each.open(slots, number)
        each.begin()
        each.end()
    reader = PeerReader(Peers(hosts=(peer.peer,), own="a", stall_s=600.0, exchange=slots))
    file = SimpleNamespace(copy_name="train-00000-0123456789abcdef.tar", num_bytes=len(peer.data))
    received = bytearray()
    begins, has_begun = threading.Event(), threading.Event()

    def read():
        for part in reader.parts(peer.peer, file):
            received.extend(part)
            if not begins.is_set():
                begins.set()
                has_begun.wait(60)

    thread = threading.Thread(target=read)
    thread.start()
    assert begins.wait(60)
    mark.begin()
    other.begin()
    has_begun.set()
    peer.is_stuck.clear()
    assert peer.is_stuck.wait(60)
    assert len(received) <= _BUFFER_BYTES
    # the kernel takes twice of what it is asked for, at both ends
    assert peer.num_bytes <= 8 * _BUFFER_BYTES + 2 * _IN_FLIGHT_BYTES < len(peer.data) // 40
    held = len(received)
    other.end()
    thread.join(60)
    assert bytes(received) == peer.data and len(received) > held
