"""The rendezvous of several hosts' launchers, each in a thread, over a real store."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import PrefixStore, TCPStore

from forked import free_port
from shoal.errors import ShoalError, UsageError
from shoal.launch.rendezvous import OneHost, SeveralHosts, listen

SECRET = b"the secret of these hosts"


def host(port: int, num_hosts: int = 3, *, workers: int = 2, secret: bytes = SECRET) -> SeveralHosts:
    return SeveralHosts(
        host="127.0.0.1", port=port, num_hosts=num_hosts, num_workers=workers, secret=secret, deadline_s=20
    )


def meet(*hosts: SeveralHosts) -> list[Future[int]]:
    """Return the ranks that the hosts get; the first one leads."""
    with ThreadPoolExecutor(len(hosts)) as pool:
        return [pool.submit(lambda host=host: host.next_rendezvous().rank) for host in hosts]


def store_at(port: int) -> PrefixStore:
    store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=20), wait_for_workers=False)
    return PrefixStore("shoal/launch", store)


@pytest.mark.parametrize("num_hosts", [1, 2, 5])
def test_each_host_gets_a_rank_and_the_way_to_the_store(num_hosts: int) -> None:
    port = free_port()
    hosts = [host(port, num_hosts) for _ in range(num_hosts)]
    with ThreadPoolExecutor(num_hosts) as pool:
        met = list(pool.map(SeveralHosts.next_rendezvous, hosts))
    assert sorted(info.rank for info in met) == list(range(num_hosts))
    assert {info.world_size for info in met} == {num_hosts}
    for info in met:
        place = info.bootstrap_store_info
        assert place is not None and (place.master_addr, place.master_port) == ("127.0.0.1", port)
    met[0].store.set("x", "1")
    assert [info.store.get("x") for info in met] == [b"1"] * num_hosts


def test_one_host_needs_nobody() -> None:
    info = OneHost().next_rendezvous()
    assert (info.rank, info.world_size) == (0, 1)


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
        leading = pool.submit(host(port).next_rendezvous)
        store_at(port).wait(["leader"])
        with pytest.raises(UsageError, match=said):
            host(port, **setting).next_rendezvous()
        ranks = [future.result() for future in meet(host(port), host(port))]  # it took nobody's place
        assert sorted([leading.result().rank, *ranks]) == [0, 1, 2]


def test_a_host_with_another_secret_is_told_and_takes_no_place() -> None:
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        leading = pool.submit(host(port, 2).next_rendezvous)
        store_at(port).wait(["leader"])
        with pytest.raises(ShoalError, match=r"'leader' .* secret differs .* sha256sum of SHOAL_SECRET_FILE"):
            host(port, 2, secret=b"another secret than that").next_rendezvous()
        assert host(port, 2).next_rendezvous().rank == 1
        assert leading.result().rank == 0


def test_one_host_too_many_is_told() -> None:
    port = free_port()
    hosts = [host(port, 2) for _ in range(2)]
    assert sorted(future.result() for future in meet(*hosts)) == [0, 1]
    with pytest.raises(ShoalError, match=r"2 hosts have met at .* already and this is one more"):
        host(port, 2).next_rendezvous()


def earlier_job() -> dict[str, bytes]:
    """Return what a stranger can have read of a job of two hosts."""
    port = free_port()
    hosts = [host(port, 2) for _ in range(2)]  # they keep the store
    assert sorted(future.result() for future in meet(*hosts)) == [0, 1]
    store = store_at(port)
    return {key: store.get(key) for key in ("leader", "host/1", "ranks")}


def test_an_answer_from_an_earlier_job_with_the_same_secret() -> None:
    recorded, port = earlier_job(), free_port()
    with ThreadPoolExecutor(1) as pool:
        leading = pool.submit(host(port, 2).next_rendezvous)
        store_at(port).set("host/1", recorded["host/1"])
        with pytest.raises(ShoalError, match=r"'host/1' .* was not written by a launcher of this job"):
            leading.result()


def test_a_leader_from_an_earlier_job_with_the_same_secret() -> None:
    recorded, port = earlier_job(), free_port()
    server = TCPStore("127.0.0.1", port, None, True, timedelta(seconds=20), wait_for_workers=False)
    for key in ("leader", "ranks"):
        PrefixStore("shoal/launch", server).set(key, recorded[key])
    with pytest.raises(ShoalError, match=r"'ranks' .* was not written by a launcher of this job"):
        host(port, 2).next_rendezvous()


@pytest.mark.parametrize(
    "value",
    [b"", b"\x80\x04N.", b"{}", b"0" * 64 + b"{}", b"0" * 64, b"[" * 1_000, b"x" * 1_000_000],
    ids=["empty", "pickle", "unsigned", "wrong", "only a MAC", "nested", "long"],
)
def test_values_that_no_launcher_has_written(value: bytes) -> None:
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        leading = pool.submit(host(port, 2).next_rendezvous)
        store_at(port).set("host/1", value)
        with pytest.raises(ShoalError, match="'host/1' in the store"):
            leading.result()


def test_a_value_signed_for_another_place() -> None:
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        leading = pool.submit(host(port, 2).next_rendezvous)
        store = store_at(port)
        store.set("host/1", store.get("leader"))
        with pytest.raises(ShoalError, match="'host/1' in the store"):
            leading.result()


def test_who_listens() -> None:
    port = free_port()
    first = listen("127.0.0.1", port, backlog=1)
    assert first is not None and first.getsockname() == ("127.0.0.1", port)
    assert listen("127.0.0.1", port, backlog=1) is None
    first.close()
    assert listen("192.0.2.1", port, backlog=1) is None  # an address for documentation: no machine has it
    with pytest.raises(ShoalError, match=r"--rdzv: the host 'no-such-host.invalid' cannot be found"):
        listen("no-such-host.invalid", port, backlog=1)
