"""Tests the store in rank 0's process: its methods, its secret, and what strangers may send."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest

from shoal.comm import tcp_store
from shoal.comm.engine import CommError
from shoal.comm.store import PrefixStore
from shoal.comm.tcp_store import TcpStore, TcpStoreServer, listening_socket
from shoal.env import proof
from shoal.errors import UsageError

SECRET = b"the secret of the store's tests"
LIMIT = timedelta(seconds=20)
SOON = timedelta(seconds=0.1)


@pytest.fixture(params=[None, SECRET], ids=["open", "secret"])
def secret(request: pytest.FixtureRequest) -> bytes | None:
    return request.param


_opened: list[TcpStore | TcpStoreServer] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    while _opened:
        _opened.pop().close()


def serve(secret: bytes | None) -> TcpStoreServer:
    _opened.append(made := TcpStoreServer(listening_socket("127.0.0.1", 0), secret))
    return made


def client(server: TcpStoreServer, secret: bytes | None) -> TcpStore:
    _opened.append(made := TcpStore("127.0.0.1", server.port, secret, LIMIT))
    return made


def test_it_stores_for_all_and_wakes_who_waits(secret: bytes | None) -> None:
    server = serve(secret)
    one, two = client(server, secret), client(server, secret)
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(two.get("späte Größe")))
    reader.start()
    assert not one.check(["späte Größe"])
    one.set("späte Größe", "x" * 100_000)
    reader.join(10)
    assert found == [b"x" * 100_000]
    assert [store.add("n", 3) for store in (one, two, one)] == [3, 6, 9]
    assert two.check(["n", "späte Größe"])
    with pytest.raises(TimeoutError):
        one.wait(["n", "never"], SOON)
    one.wait(["n"], SOON)
    part = PrefixStore("group/", two)
    part.set("n", "mine")
    assert (one.get("group/n"), one.get("n")) == (b"mine", b"9")


def test_secrets_that_differ_are_refused() -> None:
    server = serve(SECRET)
    with pytest.raises(CommError, match="another SHOAL_SECRET"):
        client(server, b"another secret of the tests")
    with pytest.raises(UsageError, match="has a SHOAL_SECRET and this rank has none"):
        client(server, None)
    bare = serve(None)
    with pytest.raises(UsageError, match="has no SHOAL_SECRET"):
        client(bare, SECRET)
    assert client(server, SECRET).add("n", 1) == 1


def test_a_server_without_the_secret_is_refused() -> None:
    """A stranger at rank 0's port that repeats the greeting, and calls whatever proof good."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend() -> None:
            connection, _ = listener.accept()
            with connection:
                proof.receive(connection)
                proof.send(connection, [tcp_store._PROTOCOL, bytes(32), bytes(32)])
                connection.recv(1)

        stranger = threading.Thread(target=pretend)
        stranger.start()
        with pytest.raises(CommError, match="another SHOAL_SECRET"):
            TcpStore("127.0.0.1", listener.getsockname()[1], SECRET, LIMIT)
        stranger.join()


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        struct.pack("!I", 1 << 31),
        struct.pack("!II", 4, 1 << 20),
        b"",
        struct.pack("!I", 0),
    ],
    ids=["http", "two GB", "a field beyond the message", "nothing", "empty"],
)
def test_what_strangers_send_ends_their_connection_alone(sent: bytes) -> None:
    server = serve(SECRET)
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:
        stranger.settimeout(10)
        stranger.sendall(sent)
        with contextlib.suppress(OSError):  # refused before the end of what was sent
            stranger.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(100) == b""
    assert client(server, SECRET).add("n", 1) == 1


def test_silent_and_dripping_strangers_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places before the proof are bounded, and one deadline ends a greeting that comes byte by byte."""
    monkeypatch.setattr(proof, "MAX_UNPROVED", 8)
    monkeypatch.setattr(proof, "GREETING_S", 600.0)  # nobody leaves but for the ninth
    server = serve(SECRET)
    before = threading.active_count()
    with contextlib.ExitStack() as opened:
        strangers = [
            opened.enter_context(socket.create_connection(("127.0.0.1", server.port))) for _ in range(40)
        ]
        assert client(server, SECRET).add("n", 1) == 1
        deadline = time.monotonic() + 60
        while threading.active_count() > before + 8 + 1:
            assert time.monotonic() < deadline, "each stranger has its thread still"
            time.sleep(0.01)
        for stranger in strangers[:32]:
            stranger.settimeout(60)
            with contextlib.suppress(ConnectionResetError):  # before its greeting, where its thread was late
                while stranger.recv(100):  # until it is closed
                    pass
    monkeypatch.setattr(proof, "GREETING_S", 0.5)
    with socket.create_connection(("127.0.0.1", server.port)) as dripping:
        answer, num_sent = struct.pack("!I", 250) + bytes(250), 0
        with contextlib.suppress(OSError):
            for byte in answer:
                dripping.sendall(bytes([byte]))
                num_sent += 1
                time.sleep(0.1)
        assert num_sent < len(answer)  # which takes 25 s
    monkeypatch.setattr(proof, "GREETING_S", 600.0)
    assert client(server, SECRET).add("n", 1) == 2


def test_a_message_before_the_proof_is_short_and_connections_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = serve(SECRET)
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:
        stranger.settimeout(10)
        stranger.sendall(struct.pack("!I", 253))  # of 256 bytes with this number
        assert stranger.recv(1) == b""
    monkeypatch.setattr(proof, "MAX_CONNECTIONS", 1)
    one = client(server, SECRET)
    with socket.create_connection(("127.0.0.1", server.port)) as another:
        another.settimeout(10)
        assert another.recv(1) == b""
    one.close()
    assert client(server, SECRET).add("n", 1) == 1


def test_malformed_requests_and_too_much_are_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    store = client(serve(None), None)
    for request in (
        [b"unknown"], [b"set", b"k"], [b"add", b"k", b"one"], [b"get", b"\xff", b"1"],
        *([b"wait", limit, b"never"] for limit in (b"nan", b"inf", b"-inf")),
    ):  # fmt: skip
        with pytest.raises(CommError, match="a malformed request"):
            store._call(*request)
    with pytest.raises(CommError, match="at most 1,048,576 are sent"):
        store.set("k", "x" * (1 << 20))
    monkeypatch.setattr(tcp_store, "_MAX_STORED", 1000)
    store.set("k", "x" * 900)
    store.set("k", "x" * 950)
    with pytest.raises(CommError, match="the store is full"):
        store.set("l", "x" * 100)


def test_a_repeated_first_message_is_no_proof() -> None:
    """Who has recorded a member's messages cannot be one: the server's random number is another."""
    server = serve(SECRET)
    with socket.create_server(("127.0.0.1", 0)) as relay:
        heard: list[bytes] = []

        def pass_on() -> None:
            connection, _ = relay.accept()
            with connection, socket.create_connection(("127.0.0.1", server.port)) as onwards:
                for _ in range(2):
                    fields = proof.receive(connection)
                    heard.append(struct.pack("!I", sum(4 + len(each) for each in fields)))
                    heard[-1] += b"".join(struct.pack("!I", len(each)) + each for each in fields)
                    onwards.sendall(heard[-1])
                    proof.send(connection, proof.receive(onwards))

        thread = threading.Thread(target=pass_on)
        thread.start()
        TcpStore("127.0.0.1", relay.getsockname()[1], SECRET, LIMIT).close()
        thread.join()
    with socket.create_connection(("127.0.0.1", server.port)) as stranger:
        stranger.settimeout(10)
        stranger.sendall(heard[0])
        assert proof.receive(stranger)[0] == tcp_store._PROTOCOL
        stranger.sendall(heard[1])
        assert stranger.recv(1) == b""
    assert client(server, SECRET).add("n", 1) == 1


def test_a_port_that_is_taken_and_a_server_that_is_gone() -> None:
    server = serve(None)
    with pytest.raises(UsageError, match=f"cannot listen at 127.0.0.1:{server.port}"):
        listening_socket("127.0.0.1", server.port)
    store = client(server, None)
    server.close()
    with pytest.raises(CommError, match=r"was lost|malformed"):
        for _ in range(3):
            store.set("k", "v")
    with pytest.raises(CommError, match=r"did not answer within 0\.1 s"):
        TcpStore("127.0.0.1", server.port, None, SOON)
