"""Tests groups that start while helpers are lost or unreachable: they exclude them, with the same sums."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from comm_group import BOUND_S, SECRET, Group, HelperProcess, Member
from shoal_workers import run_group
from torch.distributed.device_mesh import init_device_mesh

from forked import free_port
from shoal.comm.engine import CommError, EngineOptions, lost_helpers
from shoal.comm.helpers import REACH_S, helper_bandwidths

COUNT = 300_000
HOSTS = ("a", "b", "c")
BEGIN_S = 3 * REACH_S
"""A group waits ``REACH_S`` for helpers that do not answer; tests allow three times that."""
SHORT = timedelta(seconds=2 * REACH_S)
"""Timeout of a group that waits no longer for a server that does not listen either."""


def contribution(rank: int) -> torch.Tensor:
    return torch.randn(COUNT, generator=torch.Generator().manual_seed(rank))


def check_sum(rank: int, group: dist.ProcessGroup | None = None) -> None:
    tensor = contribution(rank)
    dist.all_reduce(tensor, group=group)
    assert torch.equal(tensor, contribution(0) + contribution(1) + contribution(2))


def lines_of(path: Path, text: str) -> list[str]:
    return [line for line in path.read_text().splitlines() if text in line]


def environment(helpers: list[str], **more: str) -> dict[str, str]:
    return {"SHOAL_HELPERS": ",".join(f"{each}*1.0" for each in helpers), "SHOAL_SECRET": SECRET, **more}


def keep_stderr(file: Path) -> None:
    os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)


def kill(name: str, pid: int) -> None:
    """Kill a helper and wait until its port is closed, which a signal does not."""
    os.kill(pid, signal.SIGKILL)
    address, _, port = name.rpartition(":")
    with suppress(ConnectionError):
        while True:
            socket.create_connection((address, int(port))).close()
            time.sleep(0.01)


def go_on_without(rank: int, folder: Path, killed: list[tuple[str, int]]) -> None:
    """Kill the helpers one by one and make groups of every kind after each death."""
    keep_stderr(folder / f"stderr-{rank}")
    check_sum(rank)
    for name, pid in killed:
        if rank == 0:
            kill(name, pid)
        dist.barrier()
        begin = time.monotonic()
        check_sum(rank, dist.new_group(backend="shoal"))
        mesh = init_device_mesh("cpu", (3,))
        check_sum(rank, mesh.get_group())
        pair = dist.new_group([1, 2], backend="shoal")  # rank 0 of it is another process
        if rank > 0:
            tensor = contribution(rank)
            dist.all_reduce(tensor, group=pair)
            assert torch.equal(tensor, contribution(1) + contribution(2))
        assert time.monotonic() - begin < BEGIN_S, (
            f"the groups took {time.monotonic() - begin:.1f} s to begin"
        )
        check_sum(rank)
        dist.barrier()
        if rank == 0:
            assert len(lines_of(folder / "stderr-0", f"do without helper {name}:")) == 1
    dist.destroy_process_group()
    dist.init_process_group(
        "shoal", init_method=f"file://{folder}/again", rank=rank, world_size=3
    )  # the same process begins again
    check_sum(rank)
    if rank == 0:
        for name, _ in killed:
            (line,) = lines_of(folder / "stderr-0", f"do without helper {name}:")
            assert "lost it" in line or "was not reached" in line


@pytest.mark.parametrize("num_killed", [1, 2])
def test_groups_go_on_after_helpers_are_killed(tmp_path: Path, num_killed: int) -> None:
    with ExitStack() as stack:
        helpers = [stack.enter_context(HelperProcess(f"h{k}")) for k in range(2)]
        names = [f"{each.address}:{each.port}" for each in helpers]
        killed = [(name, each.process.pid) for name, each in zip(names, helpers, strict=True)][:num_killed]
        run_group(
            go_on_without, 3, tmp_path, tmp_path, killed, hosts=HOSTS, environment=environment(names)
        )  # fmt: skip
        if num_killed == 1:
            said = helpers[1].stop()
            assert "0 strangers dropped" in said, said  # a probe is none


def use_one_that_begins_again(rank: int, folder: Path, name: str, pid: int) -> None:
    """Lose a helper, begin it again at its place, and make new groups beside the old one."""
    keep_stderr(folder / f"stderr-{rank}")
    check_sum(rank)
    address, _, port = name.rpartition(":")
    if rank == 0:
        kill(name, pid)
    dist.barrier()
    without = dist.new_group(backend="shoal")
    check_sum(rank, without)
    with ExitStack() as stack:
        if rank == 0:
            again = stack.enter_context(HelperProcess("h0", address=address, port=int(port)))
        dist.barrier()
        for _ in range(2):
            group = dist.new_group(backend="shoal", pg_options=EngineOptions(workers_serve=False))
            check_sum(rank, group)  # nobody but the helper serves
        check_sum(rank)
        check_sum(rank, without)
        dist.barrier()
        if rank == 0:
            assert len(lines_of(folder / "stderr-0", f"helper {name} has begun again")) == 1
            again.kill()
            again.process.wait()
        dist.barrier()
        check_sum(rank, dist.new_group(backend="shoal"))
        check_sum(rank)
    if rank == 0:
        assert len(lines_of(folder / "stderr-0", f"do without helper {name}:")) == 2


def test_a_helper_that_has_begun_again_serves_new_groups(tmp_path: Path) -> None:
    with HelperProcess("h0") as helper:
        name = f"{helper.address}:{helper.port}"
        run_group(
            use_one_that_begins_again, 3, tmp_path, tmp_path, name, helper.process.pid,
            hosts=HOSTS, environment=environment([name]),
        )  # fmt: skip


def silent_port(stack: ExitStack) -> int:
    """Return a port that takes no further connection and does not refuse one: a host that does not answer."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
    port = int(listener.getsockname()[1])
    for _ in range(2):
        waiting = stack.enter_context(socket.socket())
        waiting.setblocking(False)
        waiting.connect_ex(("127.0.0.1", port))
    time.sleep(0.1)
    return port


def test_a_job_begins_without_helpers_that_do_not_answer(tmp_path: Path) -> None:
    with ExitStack() as stack:
        helper = stack.enter_context(HelperProcess("h0"))
        refused, silent = f"127.0.0.1:{free_port()}", f"127.0.0.1:{silent_port(stack)}"
        names = [refused, f"{helper.address}:{helper.port}", silent]
        run_group(
            check_beginning, 3, tmp_path, tmp_path, names, hosts=HOSTS, environment={"SHOAL_SECRET": SECRET}
        )  # fmt: skip
        assert not helper.stop().startswith("0 groups")


def check_beginning(rank: int, folder: Path, names: list[str]) -> None:
    """Begin the job again with helpers, as a restart does."""
    dist.destroy_process_group()
    keep_stderr(folder / f"stderr-{rank}")
    os.environ.update(environment(names))
    for attempt in range(2):
        begin = time.monotonic()
        dist.init_process_group(
            "shoal", init_method=f"file://{folder}/{attempt}", rank=rank, world_size=3, timeout=SHORT
        )
        assert time.monotonic() - begin < BEGIN_S
        check_sum(rank)
        dist.destroy_process_group()
    if rank == 0:
        refused, _, silent = names
        assert "Connection refused" in lines_of(folder / "stderr-0", f"do without helper {refused}:")[0]
        assert "no answer" in lines_of(folder / "stderr-0", f"do without helper {silent}:")[0]
        assert len(lines_of(folder / "stderr-0", "do without helper")) == 2


def begin_with(rank: int, folder: Path, names: list[str]) -> None:
    """Begin the job again with helpers, of which the last does not answer."""
    dist.destroy_process_group()
    keep_stderr(folder / f"stderr-{rank}")
    os.environ.update(environment(names))
    dist.init_process_group("shoal", init_method=f"file://{folder}/again", rank=rank, world_size=3)
    check_sum(rank)
    if rank == 0:
        (line,) = lines_of(folder / "stderr-0", "do without helper")
        assert f"{names[-1]}: it was not reached in 3 s: no answer" in line
        assert helper_bandwidths() == (1.0, 1.0)


def test_a_job_waits_for_helpers_that_are_slow_and_not_for_an_absent_host(tmp_path: Path) -> None:
    """One server is stopped before it listens, and one that listens; both continue after ``REACH_S``."""
    late = HelperProcess("h0", port=free_port())
    late.start()
    late.process.send_signal(signal.SIGSTOP)
    with ExitStack() as stack:
        stack.push(late)
        slow = stack.enter_context(HelperProcess("h1"))
        slow.process.send_signal(signal.SIGSTOP)
        names = [f"{each.address}:{each.port}" for each in (late, slow)]
        stderr = tmp_path / "stderr-0"

        def go_on() -> None:
            while not stderr.exists() or not lines_of(stderr, f"waiting for helper {names[0]}"):
                time.sleep(0.1)
            for helper in (late, slow):
                helper.process.send_signal(signal.SIGCONT)
                time.sleep(REACH_S)

        waiter = threading.Thread(target=go_on, daemon=True)
        waiter.start()
        run_group(
            begin_with, 3, tmp_path, tmp_path, [*names, f"127.0.0.1:{silent_port(stack)}"],
            hosts=HOSTS, environment={"SHOAL_SECRET": SECRET},
        )  # fmt: skip
        waiter.join()
        late.await_listening()
        for helper in (late, slow):
            assert " 0 chunks summed" not in helper.stop()


def wait_for_loss(member: Member) -> None:
    member.report("begun", lost_helpers())
    while not lost_helpers():
        time.sleep(0.01)
    member.report("lost", lost_helpers())
    member.engine.close()
    member.report("closed", lost_helpers())


def test_what_engines_have_lost_is_known_also_when_they_are_closed() -> None:
    with HelperProcess("h0") as first, HelperProcess("h1") as second:
        with Group(wait_for_loss, "ab", helpers=[first, second]) as group:
            for rank in range(2):
                assert group.expect(rank, "begun").value == []
            second.kill()
            for rank in range(2):
                assert group.expect(rank, "lost", deadline_s=BOUND_S).value == ["h1"]
                assert group.expect(rank, "closed").value == ["h1"]


def check_no_server(rank: int, names: list[str]) -> None:
    os.environ.update(environment(names))
    begin = time.monotonic()
    with pytest.raises(
        CommError, match=rf"none of SHOAL_HELPERS can be used \({names[0]}: it was not reached"
    ):
        dist.new_group(backend="shoal", pg_options=EngineOptions(workers_serve=False), timeout=SHORT)
    assert time.monotonic() - begin < BEGIN_S


def test_a_group_without_any_server_says_so(tmp_path: Path) -> None:
    run_group(
        check_no_server, 3, tmp_path, [f"127.0.0.1:{free_port()}"],
        hosts=HOSTS, environment={"SHOAL_SECRET": SECRET},
    )  # fmt: skip


def check_names(rank: int, port: int) -> None:
    os.environ.update(environment([f"localhost:{port}", "no-such-host.invalid:7070"]))
    group = dist.new_group(backend="shoal", pg_options=EngineOptions(workers_serve=False))
    check_sum(rank, group)
    if rank == 0:
        assert helper_bandwidths() == (1.0,)


def test_helpers_may_have_names_and_one_without_an_address_is_left_out(tmp_path: Path) -> None:
    with HelperProcess("h0", address="127.0.0.1") as helper:
        run_group(check_names, 3, tmp_path, helper.port, hosts=HOSTS, environment={"SHOAL_SECRET": SECRET})


def check_ipv6(rank: int, port: int) -> None:
    os.environ.update(environment([f"[::1]:{port}"], SHOAL_INTERFACE="::1"))
    group = dist.new_group(backend="shoal", pg_options=EngineOptions(workers_serve=False))
    check_sum(rank, group)
    if rank == 0:
        assert helper_bandwidths() == (1.0,)


def test_a_helper_that_is_signalled_many_times_at_once_ends() -> None:
    """A scheduler and a launcher both end a helper; a signal may come while the one before is handled."""
    with ExitStack() as stack:
        helpers = [stack.enter_context(HelperProcess(f"h{index}")) for index in range(16)]
        for helper in helpers:
            for _ in range(30):
                helper.process.send_signal(signal.SIGTERM)
        for helper in helpers:
            assert helper.process.wait(timeout=3 * BOUND_S) == 0


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="this system has no IPv6")
def test_workers_and_helpers_by_ipv6(tmp_path: Path) -> None:
    with HelperProcess("h0", address="::1") as helper:
        run_group(check_ipv6, 3, tmp_path, helper.port, hosts=HOSTS, environment={"SHOAL_SECRET": SECRET})
