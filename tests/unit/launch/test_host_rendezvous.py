"""The rendezvous of several hosts' launchers, each in a thread, and of helpers that wait for their end."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from torch.distributed import TCPStore

from forked import free_port
from shoal.comm.store import PrefixStore, SignedStore
from shoal.comm.tcp_store import TcpStore, TcpStoreServer, listening_socket
from shoal.errors import ShoalError, UsageError
from shoal.launch import host_rendezvous
from shoal.launch.host_rendezvous import HostGroup, await_workers_end, join_hosts, listen

SECRET = b"the secret of these hosts"


Host = partial[HostGroup]


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    yield
    _opened.close()


_opened = ExitStack()


def join(**settings: Any) -> HostGroup:
    member = join_hosts(**settings)
    _opened.callback(member.resources.close)
    return member


def host(port: int, num_hosts: int = 3, *, workers: int = 2, secret: bytes = SECRET) -> Host:
    return partial(
        join,
        host="127.0.0.1",
        port=port,
        num_hosts=num_hosts,
        num_workers=workers,
        secret=secret,
        deadline_s=20,
    )


def meet(*hosts: Host) -> list[HostGroup]:
    """Return the memberships of the hosts, by rank; one of them keeps the store."""
    with ThreadPoolExecutor(len(hosts)) as pool:
        return sorted(pool.map(lambda host: host(), hosts), key=lambda met: met.rank)


def store_at(port: int) -> PrefixStore:
    """Return the launchers' store as somebody finds it who knows its secret."""
    there = ("127.0.0.1", port, SECRET, timedelta(seconds=20))
    return PrefixStore("shoal/launch/", _opened.enter_context(closing(TcpStore(*there))))


def serve(port: int) -> TcpStoreServer:
    return TcpStoreServer(listening_socket("127.0.0.1", port), SECRET)


def put(store: PrefixStore, key: str, value: bytes) -> None:
    """Set any bytes."""
    below = store.underlying_store
    assert isinstance(below, TcpStore)
    below._call(b"set", f"shoal/launch/{key}".encode(), value)


@pytest.mark.parametrize("num_hosts", [1, 2, 5])
def test_each_host_gets_a_rank_and_the_way_to_the_store(num_hosts: int) -> None:
    port = free_port()
    hosts = [host(port, num_hosts) for _ in range(num_hosts)]
    met = meet(*hosts)
    assert [member.rank for member in met] == list(range(num_hosts))
    met[0].store.set("x", "1")
    assert [member.store.get("x") for member in met] == [b"1"] * num_hosts
    (workers,) = {member.master_port for member in met}
    assert workers != port
    assert TCPStore("127.0.0.1", workers, None, False, timedelta(seconds=20)).add("n", 1) == 1


def test_without_torch_the_workers_have_no_store_of_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", None)
    port = free_port()
    assert [member.master_port for member in meet(*(host(port, 2) for _ in range(2)))] == [port] * 2


# ---- helpers that wait for the end of the workers ---------------------------------------------------------


@pytest.mark.parametrize("code", [0, 76, None])
def test_helpers_are_released_when_the_leader_ends(code: int | None) -> None:
    port, reached, released = free_port(), threading.Barrier(3), threading.Event()

    def hold() -> int | None:
        found = await_workers_end("127.0.0.1", port, SECRET, deadline_s=30.0, reached=reached.wait)
        released.set()
        return found

    with ThreadPoolExecutor(2) as pool:
        helpers = [pool.submit(hold) for _ in range(2)]  # before anybody listens
        member = host(port, 1)()
        reached.wait(20)
        assert not released.wait(0.2)
        if code is None:  # its process is gone
            member.resources.close()
        else:
            member.leave(wait=True, exit_code=code)
        assert [helper.result(20) for helper in helpers] == [code] * 2


def test_strangers_release_no_helper() -> None:
    port, reached, released = free_port(), threading.Event(), threading.Event()
    member = host(port, 1)()

    def hold() -> None:
        await_workers_end("127.0.0.1", port, SECRET, deadline_s=30.0, reached=reached.set)
        released.set()

    threading.Thread(target=hold, daemon=True).start()
    assert reached.wait(20)
    with ExitStack() as strangers:
        for _ in range(300):
            strangers.enter_context(socket.create_connection(("127.0.0.1", port))).sendall(b"0\n")
        with pytest.raises(ShoalError, match=r"did not answer at 127.*another SHOAL_SECRET"):
            await_workers_end("127.0.0.1", port, b"another secret than that", deadline_s=5.0)
        assert not released.wait(0.2)
    member.leave(wait=True)
    assert released.wait(20)


def test_a_leader_that_never_comes() -> None:
    with pytest.raises(ShoalError, match=r"worker host did not answer at 127\.0\.0\.1:\d+ .*within 0 s"):
        await_workers_end("127.0.0.1", free_port(), SECRET, deadline_s=0.0)


# ---- refusals --------------------------------------------------------------------------------------------


def test_hosts_say_who_is_missing(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(host_rendezvous, "_TELL_S", 0.2)
    port, said = free_port(), ""
    with ThreadPoolExecutor(3) as pool:
        met = [pool.submit(host(port)) for _ in range(2)]
        come = (
            f"2 of 3 hosts have come to 127.0.0.1:{port}, beside the first one {os.uname().nodename}; start"
        )
        while come not in said:
            said += capfd.readouterr().err
        pool.submit(host(port)).result()
        assert {each.result().num_hosts for each in met} == {3}


def test_a_host_says_that_the_first_one_is_missing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host_rendezvous, "_TELL_S", 0.2)
    monkeypatch.setattr(host_rendezvous, "listen", lambda *_, **__: None)
    port = free_port()
    with pytest.raises(ShoalError, match="did not come together"):
        join(**host(port).keywords | {"deadline_s": 1.0})
    assert f"waiting: nobody listens at 127.0.0.1:{port}: start the same command" in capfd.readouterr().err


def test_the_host_with_the_store_leaves_last() -> None:
    port, left = free_port(), []
    first, second, third = meet(*(host(port) for _ in range(3)))

    def leave(member: HostGroup) -> None:
        member.leave(wait=True)
        left.append(member.rank)

    with ThreadPoolExecutor(1) as pool:
        leaving = pool.submit(leave, first)
        leave(second)
        time.sleep(0.3)
        assert left == [1] and not leaving.done()
        leave(third)
        leaving.result(20)
    assert left[0] == 1 and sorted(left) == [0, 1, 2]  # the first may return as the third does


def test_a_host_that_lost_another_learns_how_that_one_failed() -> None:
    first, failed, lost = meet(*(host(port) for port in [free_port()] * 3))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lost.cause, 76, "worker 2 lost another worker")
        assert first.cause(75, "") == (75, "")
        assert failed.cause(3, "the disk\x1b is full\n") == (3, "the disk\x1b is full\n")
        assert waiting.result(20) == (3, f"on host {os.uname().nodename}: the disk? is full\n")


def test_a_host_that_only_others_lost_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_rendezvous, "_OTHERS_END_S", 0.3)
    first, second = meet(*(host(port, 2) for port in [free_port()] * 2))
    assert first.cause(76, "lost") == (76, "lost")
    began = time.monotonic()
    first.leave(wait=True, may_lack=True)
    assert time.monotonic() - began < 20
    assert second.cause(0, "") == (0, "")


def test_another_version_of_shoal_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        leading = pool.submit(host(port, 2))
        store_at(port).wait(["leader"], timedelta(seconds=20))
        with monkeypatch.context() as patch:
            patch.setattr(host_rendezvous, "__version__", "0.0.1")
            with pytest.raises(UsageError, match=r"shoal's version is 0\.0\.1 here and .* on 127"):
                host(port, 2)()
        assert host(port, 2)().rank == 1
        assert leading.result().rank == 0


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ({"workers": 4}, "--workers is 4 here and 2 on 127.0.0.1"),
        ({"num_hosts": 2}, "--nnodes is 2 here and 3"),
    ],
)
def test_hosts_that_do_not_agree(setting: dict[str, int], said: str) -> None:
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        leading = pool.submit(host(port))
        store_at(port).wait(["leader"], timedelta(seconds=20))
        with pytest.raises(UsageError, match=said):
            host(port, **setting)()
        others = meet(host(port), host(port))  # it took nobody's place
        assert [leading.result().rank, *(met.rank for met in others)] == [0, 1, 2]


def test_a_host_with_another_secret_is_told_and_takes_no_place() -> None:
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        leading = pool.submit(host(port, 2))
        store_at(port).wait(["leader"], timedelta(seconds=20))
        with pytest.raises(ShoalError, match=r"another SHOAL_SECRET than this rank"):
            host(port, 2, secret=b"another secret than that")()
        assert host(port, 2)().rank == 1
        assert leading.result().rank == 0


def test_one_host_too_many_is_told() -> None:
    port = free_port()
    met = meet(*(host(port, 2) for _ in range(2)))
    assert [member.rank for member in met] == [0, 1]
    with pytest.raises(ShoalError, match=r"2 hosts have met at .* already and this is one more"):
        host(port, 2)()


def test_a_host_that_comes_back_takes_its_place_where_workers_come_and_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    port, names = free_port(), iter(["beta", "alpha"])  # ranks are by name
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("", next(names, "alpha"), "", "", "")))
    first, *others = meet(*[host(port)] * 3)
    assert [each.rank for each in others] == [1, 2]
    for name, rank in (("beta", 2), ("alpha", 1), ("gamma", 1), ("beta", 2)):
        monkeypatch.setattr(os, "uname", lambda name=name: os.uname_result(("", name, "", "", "")))
        back = partial(host(port), is_elastic=True)()
        assert (back.rank, back.master_port) == (rank, first.master_port)
        assert back.signed.challenge == first.signed.challenge


def earlier_job() -> dict[str, bytes]:
    """Return the records of a job of two hosts, as a stranger may have read them."""
    port = free_port()
    met = meet(*(host(port, 2) for _ in range(2)))
    assert [member.rank for member in met] == [0, 1]
    store = store_at(port)
    return {key: store.get(key) for key in ("leader", "host/1", "ranks")}


def test_an_answer_from_an_earlier_job_with_the_same_secret() -> None:
    recorded, port = earlier_job(), free_port()
    with ThreadPoolExecutor(1) as pool:
        leading = pool.submit(host(port, 2))
        put(store_at(port), "host/1", recorded["host/1"])
        with pytest.raises(ShoalError, match=r"'host/1' .* was not written by a launcher of this job"):
            leading.result()


def test_a_leader_from_an_earlier_job_with_the_same_secret() -> None:
    recorded, port = earlier_job(), free_port()
    _opened.enter_context(closing(serve(port)))
    store = store_at(port)
    for key in ("leader", "ranks"):
        put(store, key, recorded[key])
    with pytest.raises(ShoalError, match=r"'ranks' .* was not written by a launcher of this job"):
        host(port, 2)()


@pytest.mark.parametrize(
    "value",
    [b"", b"\x80\x04N.", b"{}", b"0" * 64 + b"{}", b"0" * 64, b"[" * 1_000, b"x" * 1_000_000],
    ids=["empty", "pickle", "unsigned", "wrong", "only a MAC", "nested", "long"],
)
def test_values_that_no_launcher_has_written(value: bytes) -> None:
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        leading = pool.submit(host(port, 2))
        put(store_at(port), "host/1", value)
        with pytest.raises(ShoalError, match="'host/1' in the store"):
            leading.result()


@pytest.mark.parametrize(
    ("answer", "violation"),
    [
        ({"challenge": "0" * 32, "nonce": "0" * 32}, "has no field name"),
        ({"challenge": "0" * 32, "nonce": "x", "name": "n1"}, "a text of the form"),
        ({"challenge": "0" * 32, "nonce": "0" * 32, "name": "n\n1"}, "a text of the form"),
        ({"challenge": "0" * 32, "nonce": "0" * 32, "name": "n1", "rank": 0}, "has unknown fields"),
    ],
)
def test_signed_answers_that_are_malformed(answer: dict[str, Any], violation: str) -> None:
    """By a launcher with the secret, such as one of another version."""
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        leading = pool.submit(host(port, 2))
        SignedStore(store_at(port), "shoal launch", SECRET).put("host/1", answer)
        with pytest.raises(ShoalError, match=f"'host/1' in the store at .* is malformed: .*{violation}"):
            leading.result()


def test_a_value_signed_for_another_key() -> None:
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        leading = pool.submit(host(port, 2))
        store = store_at(port)
        put(store, "host/1", store.get("leader"))
        with pytest.raises(ShoalError, match="'host/1' in the store"):
            leading.result()


def test_a_port_that_another_program_has_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        threading.Thread(target=hang_up, args=(stranger,), daemon=True).start()
        port = stranger.getsockname()[1]
        taken = partial(host(port, 2), deadline_s=1.5)
        with pytest.raises(ShoalError, match=rf"127\.0\.0\.1:{port} .* no other program .* \(ss -ltnp\)"):
            taken()


def hang_up(listener: socket.socket) -> None:
    with suppress(OSError):
        while True:
            listener.accept()[0].close()


def test_who_listens() -> None:
    port = free_port()
    first = listen("127.0.0.1", port, backlog=1)
    assert first is not None and first.getsockname() == ("127.0.0.1", port)
    assert listen("127.0.0.1", port, backlog=1) is None
    first.close()
    assert listen("192.0.2.1", port, backlog=1) is None  # an address for documentation: no machine has it
    with pytest.raises(ShoalError, match=r"--rdzv: the host 'no-such-host.invalid' cannot be found"):
        listen("no-such-host.invalid", port, backlog=1)
