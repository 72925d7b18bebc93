"""``shoal launch`` as Slurm starts it, with recorded variables; all "nodes" are this machine."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from forked import fork_process, free_port, wait_for
from shoal.cli.app import main
from shoal.errors import WARNING_SIGNALS

WORKER = """
import os, pathlib, sys
names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID"
found = " ".join(os.environ.get(name, "-") for name in [*names.split(), "SHOAL_HELPERS"])
assert pathlib.Path(os.environ["SHOAL_SECRET_FILE"]).stat().st_mode & 0o777 == 0o600
pathlib.Path("env-" + os.environ["RANK"]).write_text(found)
"""


SUM = """
import os, pathlib, torch, torch.distributed as dist
dist.init_process_group("shoal")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
pathlib.Path("sum-" + os.environ["RANK"]).write_text(str(total.item()))
dist.destroy_process_group()
"""


MEET = """
import os, pathlib, shoal.comm.job_group
joined = shoal.comm.job_group.join(timeout_s=60.0)
told = joined.broadcast_bytes(b"from rank 0")
pathlib.Path("told-" + os.environ["RANK"]).write_text(f"{joined.size} {told.decode()}")
joined.barrier()
joined.close()
"""


JUMPING_CLOCK = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
int clock_gettime(clockid_t clock, struct timespec* now) {
  static int (*true_one)(clockid_t, struct timespec*);
  static unsigned calls;
  if (!true_one) *(void**)&true_one = dlsym(RTLD_NEXT, "clock_gettime");
  const int found = true_one(clock, now);
  if (clock == CLOCK_REALTIME) now->tv_sec += ((int)(__sync_fetch_and_add(&calls, 1) % 3) - 1) * 86400;
  return found;
}
"""


MANY_SUMS = """
import os, pathlib, time, torch, torch.distributed as dist
first = time.time()
assert max(abs(time.time() - first) for _ in range(3)) > 80_000
dist.init_process_group("shoal")
total = torch.ones(1000)
for _ in range(10):
    dist.all_reduce(total)
dist.barrier()
pathlib.Path("sum-" + os.environ["RANK"]).write_text(str(total.sum().item()))
dist.destroy_process_group()
"""


def slurm(
    job: int, node: int, tasks: str = "1(x2)", task: int | None = None, local: int = 0
) -> dict[str, str]:
    """Return what Slurm 22.05 gives the task of a node, in so far as it is read."""
    nodes = "localhost,n1" if node < 2 else ""
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_ID": "0",
        "SLURM_NODEID": str(node),
        "SLURM_PROCID": str(node if task is None else task),
        "SLURM_LOCALID": str(local),
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURM_STEP_NODELIST": nodes,
    }


class Started:
    """``shoal launch`` in a process of its own."""

    def __init__(self, cwd: Path, variables: dict[str, str], *arguments: str) -> None:
        self.output = cwd / f"output-{uuid.uuid4()}"
        self.process = fork_process(run, cwd, variables, ["shoal", "launch", *arguments], self.output)

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)


def run(cwd: Path, variables: dict[str, str], arguments: list[str], output: Path) -> None:
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SHOAL_S"))]:
        del os.environ[name]
    os.environ.update(variables)
    os.chdir(cwd)
    descriptor = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.argv = arguments
    main()


def free_job() -> int:
    """Return a job's number whose port is free."""
    for job in range(os.getpid() % 9_000, 10_000):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", 20_000 + job)) != 0:
                return 40_000 + job
    raise AssertionError("no free port")


def end(*jobs: Started) -> list[tuple[int | None, str]]:
    codes = wait_for([job.process for job in jobs])
    return [(code, job.output.read_text()) for code, job in zip(codes, jobs, strict=True)]


def test_two_nodes_meet_a_helper_and_get_torchruns_variables(tmp_path: Path) -> None:
    job = free_job()
    helper = Started(
        tmp_path, slurm(job, 0, "1") | {"SLURM_JOB_NODELIST_HET_GROUP_0": "localhost"}, "--role", "helper"
    )
    command = ("--workers", "2", "--helpers", "1", "--", sys.executable, "-c", WORKER)
    nodes = [Started(tmp_path, slurm(job, node), *command) for node in (1, 0)]
    assert [code for code, _ in end(*nodes)] == [0, 0]
    helper.signal(signal.SIGUSR1)  # a warning to the whole job
    helper.signal(signal.SIGUSR2)
    helper.signal(signal.SIGHUP)
    time.sleep(1.0)
    assert helper.process.exitcode is None
    helper.signal(signal.SIGTERM)
    ((code, said),) = end(helper)
    assert code == 0 and "stopped" in said
    server = said.partition("listening on ")[2].split()[0]
    port = (tmp_path / "env-0").read_text().split()[6]  # of torch's store: any free one
    assert port.isdecimal() and int(port) != 20_000 + job % 10_000
    for rank in range(4):
        host, local = divmod(rank, 2)
        expected = f"{rank} 4 {local} 2 {host} localhost {port} {job}.0 {server}"
        assert (tmp_path / f"env-{rank}").read_text() == expected
    assert (
        stat.S_IMODE((tmp_path / "jobs" / str(job) / "starts" / f"{job}.0" / "secret").stat().st_mode)
        == 0o600
    )


def test_a_clock_that_jumps_by_days_changes_nothing(tmp_path: Path) -> None:
    """Nothing waits by the time of day."""
    source, library = tmp_path / "jumps.c", tmp_path / "jumps.so"
    source.write_text(JUMPING_CLOCK)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    job = free_job()
    command = ("--", "/usr/bin/env", f"LD_PRELOAD={library}", sys.executable, "-c", MANY_SUMS)
    nodes = [Started(tmp_path, slurm(job, node), *command) for node in (1, 0)]
    found = end(*nodes)
    assert [code for code, _ in found] == [0, 0], found
    assert [(tmp_path / f"sum-{rank}").read_text() for rank in range(2)] == ["1024000.0"] * 2


def test_a_script_meets_on_one_host_too(tmp_path: Path) -> None:
    command = ("--workers", "2", "--", sys.executable, "-c", SUM)
    alone = Started(tmp_path, {}, *command)
    assert end(alone) == [(0, "")]
    assert [(tmp_path / f"sum-{rank}").read_text() for rank in range(2)] == ["3.0", "3.0"]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--workers-per-host", "--workers-per-host is no option of shoal launch: see shoal launch --help"),
        ("no-such-program", "no-such-program, the command of the workers, is not found on "),
    ],
)
def test_what_is_no_command(tmp_path: Path, word: str, said: str) -> None:
    ((code, output),) = end(Started(tmp_path, {}, word, "2", "--", "true"))
    assert (code, output.startswith(f"shoal: {said}"), output.count("\n")) == (2, True, 1), output


def test_workers_without_torch_start_with_a_helper_named_in_advance(tmp_path: Path) -> None:
    """Launchers, helper and workers meet at HOST:PORT and the next port, which nothing else takes."""
    secret = tmp_path / "secret"
    secret.write_text(uuid.uuid4().hex)
    secret.chmod(0o600)
    rdzv, server = (f"localhost:{free_port()}", f"127.0.0.1:{(port := free_port())}")
    given = {"SHOAL_SECRET_FILE": str(secret)}
    options = ("--rdzv", rdzv)
    helper = Started(tmp_path, given, *options, "--role", "helper", "--helper-port", str(port))
    command = ("--nnodes", "2", "--workers", "2", "--", sys.executable, "-c", MEET)
    hosts = [
        Started(tmp_path, given | {"SHOAL_HELPERS": server}, *options, "--node-rank", str(node), *command)
        for node in (1, 0)
    ]
    ends = end(*hosts, helper)
    assert [code for code, _ in ends] == [0, 0, 0], ends
    assert "stopped" in ends[2][1]
    assert [(tmp_path / f"told-{rank}").read_text() for rank in range(4)] == ["4 from rank 0"] * 4


def test_a_helper_is_to_start_again_with_workers_that_saved(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(uuid.uuid4().hex)
    secret.chmod(0o600)
    given = {"SHOAL_SECRET_FILE": str(secret)}
    options = ("--rdzv", f"localhost:{free_port()}")
    helper = Started(tmp_path, given, *options, "--role", "helper", "--helper-port", str(port := free_port()))
    command = ("--workers", "1", "--", sys.executable, "-c", "import sys; sys.exit(75)")
    host = Started(tmp_path, given | {"SHOAL_HELPERS": f"127.0.0.1:{port}"}, *options, *command)
    ends = end(host, helper)
    assert [code for code, _ in ends] == [75, 76], ends


def test_one_task_per_worker_is_the_same_job(tmp_path: Path) -> None:
    job = free_job()
    tasks = [(task, *divmod(task, 2)) for task in range(4)]
    started = [
        Started(tmp_path, slurm(job, node, "2(x2)", task, local), "--", sys.executable, "-c", WORKER)
        for task, node, local in tasks
    ]
    assert [code for code, _ in end(*started)] == [0] * 4
    for task, node, local in tasks:
        expected = f"{task} 4 {local} 2 {node} localhost {20_000 + job % 10_000} {job}.0 -"
        assert (tmp_path / f"env-{task}").read_text() == expected


def test_pods_of_kubeflow_are_hosts(tmp_path: Path) -> None:
    """Its variables stand for --nnodes, --node-rank, --workers and --rdzv; the secret is the user's."""
    secret = tmp_path / "secret"
    secret.write_text(uuid.uuid4().hex)
    secret.chmod(0o600)
    port = str(20_000 + free_job() % 10_000)
    given = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_MASTER_ADDR": "localhost"}
    given |= {"PET_MASTER_PORT": port, "SHOAL_SECRET_FILE": str(secret)}
    pods = [{**given, "PET_NODE_RANK": str(pod)} for pod in (1, 0)]
    started = [Started(tmp_path, pod, "--", sys.executable, "-c", WORKER) for pod in pods]
    assert [code for code, _ in end(*started)] == [0, 0]
    found = [(tmp_path / f"env-{rank}").read_text().split()[:7] for rank in range(4)]
    assert [" ".join(words[:6]) for words in found] == [
        f"{rank} 4 {rank % 2} 2 {rank // 2} localhost" for rank in range(4)
    ]
    assert len({words[6] for words in found}) == 1


def test_hosts_that_the_batch_does_not_need_stay_idle(tmp_path: Path) -> None:
    command = ("--workers", "2", "--global-batch", "10", "--", sys.executable, "-c", WORKER)
    job = free_job()
    first, second = end(*(Started(tmp_path, slurm(job, node), *command) for node in (0, 1)))
    assert (first[0], second) == (0, (0, ""))
    assert "1 of 2 hosts stay idle: the global batch of 10 divides over 1 × 2 workers" in first[1]
    assert (tmp_path / "env-1").read_text().startswith("1 2 1 2 0 ")
    assert not (tmp_path / "env-2").exists()


def test_the_failure_of_one_host_is_the_others_exit_code(tmp_path: Path) -> None:
    job = free_job()
    code = (
        "import os, sys, time\n"
        "from shoal.launch.worker import run_worker\n"
        "def main():\n"
        "    if os.environ['RANK'] == '1': sys.exit('the disk is full')\n"
        "    time.sleep(1)\n"
        "    raise RuntimeError('Connection closed by peer')\n"
        "run_worker(main)\n"
    )
    command = ("--workers", "1", "--", sys.executable, "-c", code)
    ends = end(*(Started(tmp_path, slurm(job, node), *command) for node in (0, 1)))
    assert [code for code, _ in ends] == [1, 1]
    assert f"on host {os.uname().nodename}: worker 1 ended with exit code 1" in "".join(
        text for _, text in ends
    )


@pytest.mark.slow
def test_a_host_that_is_gone_without_a_word_makes_the_run_resumable(tmp_path: Path) -> None:
    job = free_job()
    code = (
        "import os, signal, time\n"
        "from shoal.launch.worker import run_worker\n"
        "def main():\n"
        "    if os.environ['RANK'] == '1': os.kill(os.getppid(), signal.SIGKILL); time.sleep(60)\n"
        "    time.sleep(1)\n"
        "    raise RuntimeError('Connection closed by peer')\n"
        "run_worker(main)\n"
    )
    command = ("--workers", "1", "--", sys.executable, "-c", code)
    ends = end(*(Started(tmp_path, slurm(job, node), *command) for node in (0, 1)))
    assert {code for code, _ in ends} == {76, -signal.SIGKILL}
    assert "worker 0 lost another worker" in "".join(text for _, text in ends)


@pytest.mark.parametrize("number", WARNING_SIGNALS)
def test_a_signal_while_helpers_are_awaited_loses_nothing(tmp_path: Path, number: signal.Signals) -> None:
    job = Started(tmp_path, slurm(free_job(), 0, "1"), "--workers", "1", "--helpers", "1", "--", "true")
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("jobs/*/starts/*/secret")):
        assert time.monotonic() < deadline and job.process.exitcode is None
        time.sleep(0.05)
    job.signal(number)
    assert end(job)[0][0] == 75


def test_a_signal_while_the_hosts_meet_ends_all_of_them_as_saved(tmp_path: Path) -> None:
    """A launcher that waited inside the store's code aborted when the leader had left."""
    job = free_job()
    command = ("--workers", "1", "--", "true")
    nodes = [Started(tmp_path, slurm(job, node, "1(x3)"), *command) for node in (0, 1)]
    secret = tmp_path / "jobs" / str(job) / "starts" / f"{job}.0" / "secret"
    while not secret.exists():
        time.sleep(0.05)
    time.sleep(3.0)  # they import torch and meet; the third does not come
    for node in nodes:
        node.signal(signal.SIGUSR1)
    for code, said in end(*nodes):
        assert code == 75, said
        assert "terminate" not in said
