"""Tests the process group in C++: what torch sees of it, who leaves it, and how it is built."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from shoal_workers import exit_codes, group_counters, is_native, run_group, sequence_number, shoal_group
from torch.distributed.tensor.debug import CommDebugMode

from forked import fork_process, wait_for
from shoal.comm import native_group
from shoal.comm.backend import ShoalProcessGroup
from shoal.comm.engine import CommError, EngineOptions
from shoal.env import settings
from shoal.env.settings import CACHE_DIR, NATIVE_GROUP
from shoal.env.variables import child_environment
from shoal.errors import UsageError

NATIVE = {NATIVE_GROUP: "1"}
BOUND_S = 3 * 1.0
LIMIT_S = 20.0


# ---- what torch sees ----------------------------------------------------------------------------------


def check_seen(rank: int) -> None:
    world: Any = dist.group.WORLD
    assert is_native()
    assert type(world) is dist.ProcessGroup
    assert type(shoal_group()).__name__ == "ShoalProcessGroup"
    tensor = torch.full((4,), float(rank))
    with CommDebugMode() as seen:
        dist.all_reduce(tensor)
        rows = torch.empty(8)
        dist.all_gather_into_tensor(rows, tensor)
        funcol.all_reduce(tensor, "sum", world)
    counts = {str(op): count for op, count in seen.get_comm_counts().items()}
    assert (
        counts
        == {
            "c10d::allreduce_": 1,
            "c10d::_allgather_base_": 1,
            "c10d_functional::all_reduce": 1,
        }
        or sum(counts.values()) == 3
    ), counts


def test_torchs_tools_see_its_collectives(tmp_path: Path) -> None:
    run_group(check_seen, 2, tmp_path, environment=NATIVE)


def check_mix(rank: int) -> None:
    world: Any = dist.group.WORLD
    assert is_native()
    assert world._get_backend(torch.device("cuda")).name() == "gloo", "another backend has the CUDA tensors"
    tensor = torch.full((4,), float(rank))
    dist.all_reduce(tensor)
    assert tensor.tolist() == [1] * 4
    assert group_counters()["ops_all_reduce"] == 1


def test_another_backend_may_have_the_cuda_tensors(tmp_path: Path) -> None:
    run_group(check_mix, 2, tmp_path, backend="cpu:shoal,cuda:gloo", environment=NATIVE)


def check_sequence(rank: int) -> None:
    """Operations of both groups have one sequence of numbers: on one rank by C++, on the other by Python."""
    world: Any = dist.group.WORLD
    tensor = torch.full((6,), float(rank))
    strided = torch.full((4, 4), float(rank)).t()[1:]
    for _ in range(3):
        dist.all_reduce(tensor.fill_(rank))
        dist.all_reduce(strided.fill_(rank))
        assert tensor.tolist() == [1] * 6 and (strided == 1).all()
    assert sequence_number(world) == 6
    assert is_native() == (rank == 0)


def test_ranks_with_and_without_it_work_together(tmp_path: Path) -> None:
    codes = exit_codes(check_sequence, 2, tmp_path, environment=[NATIVE, {NATIVE_GROUP: "0"}])
    assert codes == [0, 0]


# ---- waiting and callbacks ----------------------------------------------------------------------------


def check_interrupt(rank: int) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupted)
    tensor = torch.ones(1)
    if rank == 0:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            dist.all_reduce(tensor)
        dist.all_reduce(torch.ones(1))
    else:
        time.sleep(1.5)
        dist.all_reduce(tensor)
        dist.all_reduce(tensor)


def test_a_wait_handles_signals(tmp_path: Path) -> None:
    run_group(check_interrupt, 2, tmp_path, environment=NATIVE)


def check_error_of_future(rank: int) -> None:
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    work: Any = dist.all_reduce(torch.ones(1000), async_op=True)
    future = work.get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    for failed in (future, future, doubled):
        with pytest.raises(RuntimeError, match="rank 1"):
            failed.wait()
    for _ in range(2):
        with pytest.raises(CommError, match="rank 1"):
            work.wait()
    assert work.is_completed() and not work.is_success()
    os._exit(0)


def test_a_lost_rank_is_named_by_works_and_futures(tmp_path: Path) -> None:
    assert exit_codes(check_error_of_future, 2, tmp_path, environment=NATIVE) == [0, -signal.SIGKILL]


def check_ordered(rank: int) -> None:
    group: Any = dist.new_group(pg_options=EngineOptions(ordered_callbacks=True))
    found = []

    def callback(future: torch.futures.Future[Any]) -> None:
        time.sleep(0.05 * rank)
        tensor = torch.full((3,), float(rank + 1))
        dist.all_reduce(tensor, group=group)
        found.append(tensor.tolist())

    for _ in range(5):
        work: Any = dist.all_reduce(torch.ones(1), group=group, async_op=True)
        work.get_future().then(callback)
        tensor = torch.full((4,), 2.0)
        dist.all_reduce(tensor, group=group)  # waits for the callback: otherwise ranks differ in the order
        assert tensor.tolist() == [4] * 4
    assert found == [[3] * 3] * 5


def test_ordered_callbacks_hold_the_program_back(tmp_path: Path) -> None:
    run_group(check_ordered, 2, tmp_path, environment=NATIVE)


# ---- leaving ------------------------------------------------------------------------------------------


def check_left(rank: int, how: str, folder: Path) -> None:
    store = dist.PrefixStore("left", dist.FileStore(str(folder / "store"), 2))
    group = ShoalProcessGroup(store, rank, 2, timedelta(seconds=LIMIT_S), "left", [0, 1])
    backend = native_group.wrap(group)  # nothing else refers to it
    del group
    tensor = torch.ones(100_000)
    backend.allreduce([tensor]).wait()
    if rank == 1:
        if how == "a sum under way":
            backend.allreduce([tensor])
        elif how == "a future":
            backend.allreduce([tensor.clone()]).get_future().wait()
        time.sleep(0.3)
        if how == "shut down":
            backend.shutdown()
        del backend, tensor
        gc.collect()
    else:
        begin = time.monotonic()
        with pytest.raises(CommError, match=r"rank 1 .*has left the group"):
            for _ in range(3):
                backend.allreduce([tensor]).wait()
        assert time.monotonic() - begin < BOUND_S
        (folder / "told").touch()
    end = time.monotonic() + LIMIT_S
    while not (folder / "told").exists() and time.monotonic() < end:
        time.sleep(0.01)  # rank 1 lives on: it is not its end that rank 0 hears
    assert (folder / "told").exists()


@pytest.mark.parametrize("how", ["shut down", "dropped", "a future", "a sum under way"])
def test_a_group_that_is_dropped_is_left(tmp_path: Path, how: str) -> None:
    run_group(check_left, 2, tmp_path, how, tmp_path, environment=NATIVE)


def check_fork(rank: int) -> None:
    tensor = torch.ones(10)
    work: Any = dist.all_reduce(tensor, async_op=True)
    work.get_future().wait()
    if (child := os.fork()) == 0:
        del work
        world: Any = dist.group.WORLD
        dist.distributed_c10d._world.pg_map.clear()
        del world
        gc.collect()
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    dist.all_reduce(tensor)
    assert tensor.tolist() == [4] * 10


def test_a_forked_child_does_not_disturb_it(tmp_path: Path) -> None:
    run_group(check_fork, 2, tmp_path, environment=NATIVE)


# Forks an interpreter for each end, one after the other: loading torch takes longer than the rest.
ALONE = """
import os, torch, torch.distributed as dist
for end, code in {"": 0, "raise SystemExit(3)": 3}.items():
    if (child := os.fork()) == 0:
        dist.init_process_group("shoal", store=dist.HashStore(), rank=0, world_size=1)
        tensor = torch.arange(3.0)
        work = dist.all_reduce(tensor, async_op=True)
        work.get_future().then(lambda done: print("sum", done.value()[0].tolist())).wait()
        print(type(dist.group.WORLD).__name__)
        exec(end)
        break
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code, end
"""


def test_an_interpreter_ends_with_a_group_open() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", ALONE],
        capture_output=True, text=True, timeout=120, env=child_environment(**NATIVE), check=False,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines() == ["sum [0.0, 1.0, 2.0]", "ProcessGroup"] * 2


# ---- building -----------------------------------------------------------------------------------------


def fake_compiler(folder: Path, script: str) -> Path:
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def load_in_worker(environment: Mapping[str, str], report: Path) -> None:
    """Write the lines of the log that loading makes, and whether it found a module."""
    os.environ.update(environment)
    lines: list[str] = []
    logger, handler = logging.getLogger("shoal.comm.native_group"), logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    module = native_group.load()
    assert native_group.load() is module
    report.write_text(json.dumps([module is not None, lines]))


def loads(folder: Path, num: int = 1, **environment: str) -> list[tuple[bool, list[str]]]:
    """Load the native group in processes side by side; return what each has reported."""
    changes = {**NATIVE, CACHE_DIR: str(folder / "cache"), **environment}
    reports = [folder / f"report-{k}" for k in range(num)]
    processes = [fork_process(load_in_worker, changes, report) for report in reports]
    assert wait_for(processes) == [0] * num
    return [json.loads(report.read_text()) for report in reports]


def test_without_a_compiler_the_group_is_in_python(tmp_path: Path) -> None:
    ((found, (line,)),) = loads(tmp_path, PATH="", CXX="")
    assert not found
    assert "process group in Python" in line and "no C++ compiler is found; install g++" in line


def test_what_was_built_needs_no_compiler(tmp_path: Path) -> None:
    built = native_group.build().resolve()
    compiler = fake_compiler(tmp_path, f'for last; do :; done; cp {built} "$last"')
    assert loads(tmp_path, CXX=str(compiler)) == [[True, []]]
    assert loads(tmp_path, PATH="", CXX="") == [[True, []]]


def test_one_line_of_a_host_says_that_the_group_is_in_python(tmp_path: Path) -> None:
    place = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "h"}
    assert loads(tmp_path, PATH="", CXX="", **place) == [[False, []]]
    ((_, lines),) = loads(tmp_path, PATH="", CXX="", **{**place, "LOCAL_RANK": "0"})
    assert len(lines) == 1


def test_a_user_without_a_home_gets_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2_000_000_011)  # as containers have: no entry in /etc/passwd
    with pytest.raises(UsageError, match="no home for a cache; set SHOAL_CACHE_DIR"):
        settings.cache_dir({})


def test_a_build_that_fails_is_not_repeated(tmp_path: Path) -> None:
    script = f"echo x >> {tmp_path}/calls; sleep 0.5; echo 'a.cc:1: error: too old' >&2; exit 1"
    compiler = fake_compiler(tmp_path, script)
    reports = loads(tmp_path, 3, CXX=str(compiler)) + loads(tmp_path, CXX=str(compiler))
    assert (tmp_path / "calls").read_text() == "x\n", "one process builds, the others wait"
    for found, (line,) in reports:
        assert not found and "failed: a.cc:1: error: too old" in line
    assert sum("delete it to try again" in line for _, (line,) in reports) == 3


def test_a_cache_that_others_can_write_is_not_used(tmp_path: Path) -> None:
    compiler = str(fake_compiler(tmp_path, "exit 1"))
    loads(tmp_path, CXX=compiler)
    (folder,) = (tmp_path / "cache").iterdir()
    folder.chmod(0o777)
    ((found, (line,)),) = loads(tmp_path, CXX=compiler)
    assert not found and "has the mode 0777" in line and "only this one" in line


def test_the_variable_is_checked() -> None:
    with pytest.raises(UsageError, match="SHOAL_NATIVE_GROUP='yes' must be 1"):
        settings.native_group({NATIVE_GROUP: "yes"})
    assert not settings.native_group({NATIVE_GROUP: "0"})
    assert settings.native_group({NATIVE_GROUP: "1"}) and settings.native_group({})
