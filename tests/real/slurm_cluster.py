"""Debian's Slurm on emulated hosts of this machine: a controller, and nodes with networks of their own.

Worker nodes are in the partitions ``gpu`` and ``high``, which preempts it; helper nodes are in ``cpu``.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from shoal.launch.emulated import Cluster
from shoal.launch.emulated_network import end_processes, identity

DAEMONS = ("slurmctld", "slurmd", "sbatch", "munged", "mungekey")
START_DEADLINE_S = 60.0
_CORES = 4

CONFIGURATION = """
ClusterName=emulated
SlurmctldHost={controller}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={spool}/%n
SlurmctldPidFile={folder}/run/controller.pid
SlurmdPidFile={folder}/run/%n.pid
SlurmctldLogFile={folder}/log/controller.log
SlurmdLogFile={folder}/log/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=2,sched_interval=2,sched_min_interval=100000
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
ReturnToService=2
SlurmdParameters=config_overrides
SwitchType=switch/none
KillWait=10
UnkillableStepTimeout=30
SlurmdTimeout=10
"""


class SlurmCluster:
    """A controller, ``workers`` and ``helpers`` nodes; a context manager that leaves nothing behind.

    ``nic`` is the rate of their links, such as ``"40mbit"``.
    """

    def __init__(self, folder: Path, *, workers: int, helpers: int, nic: str | None = None) -> None:
        self.folder = folder
        self.num_nodes = workers + helpers
        self._workers = workers
        self._hosts = Cluster(hosts=self.num_nodes + 1, nic=nic)
        self._controller = self.num_nodes
        # Of its own: the path of a socket has at most 107 characters, and Slurm adds the node's name twice.
        self._spool = tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp", ignore_cleanup_errors=True)

    def __enter__(self) -> Self:
        for name in ("munge", "state", "run", "log"):
            (self.folder / name).mkdir(parents=True)
        self._hosts.__enter__()
        try:
            self._configure()
            self._start_munge()
            self._start(self._controller, "slurmctld", "-D", "-c")
            for node in range(self.num_nodes):
                self.start_node(node)
            self.await_true(lambda: self.idle_nodes() == self.num_nodes)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._hosts.close()
        self._spool.cleanup()

    def name(self, node: int) -> str:
        return self._hosts.name(node)

    def idle_nodes(self) -> int:
        """Return the number of nodes that wait for a job; 0 before the controller answers."""
        code, text, _ = self.try_to("sinfo", "-h", "-N", "-t", "idle", "-o", "%N")
        return len(set(text.split())) if code == 0 else 0

    def run(self, *command: str, deadline_s: float = 120.0) -> str:
        """Run a command as on a login node and return its stdout; a failure is an error with its stderr."""
        code, out, err = self.try_to(*command, deadline_s=deadline_s)
        assert code == 0, f"{command} ended with {code}: {out}{err}"
        return out

    def try_to(self, *command: str, deadline_s: float = 120.0) -> tuple[int, str, str]:
        """Run a command as on a login node; return its exit code, stdout and stderr."""
        done = subprocess.run(
            self._on(self._controller, command),
            env=self._environment(),
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=deadline_s,
        )
        return done.returncode, done.stdout, done.stderr

    def kill_node(self, node: int) -> None:
        """Kill everything on a node at once, as when its power fails."""
        end_processes({identity(self._hosts.enter(node)[1].removeprefix("--net="))}, grace_s=0)

    def start_node(self, node: int) -> None:
        """Start a node's daemon, at first or after :meth:`kill_node`."""
        self._start(node, "slurmd", "-D")

    def state(self, job: str) -> str:
        """Return a job's state; empty: it is not known any more."""
        return self.run("squeue", "-h", "-o", "%T", "-j", job).partition("\n")[0]

    def ended(self, job: str) -> str:
        """Return the exit code of a job that has ended, as Slurm writes it (``0:0``)."""
        text = self.run("scontrol", "show", "job", job)
        has_ended = "JobState=COMPLETED" in text or "JobState=FAILED" in text
        return text.partition("ExitCode=")[2].split()[0] if has_ended else ""

    def await_true(self, condition: Callable[[], object], deadline_s: float = START_DEADLINE_S) -> None:
        end = time.monotonic() + deadline_s
        while not condition():
            assert time.monotonic() < end, self.logs()
            time.sleep(0.3)

    def logs(self) -> str:
        """Return the ends of all logs and outputs, for a failed test's message."""
        files = [
            *self.folder.glob("log/*"),
            *self.folder.glob("jobs/*/output*"),
            *self.folder.glob("jobs/*/logs/*"),
        ]
        return "\n".join(f"== {path}\n{path.read_text()[-3000:]}" for path in files)

    def _configure(self) -> None:
        nodes = range(self.num_nodes)
        address = self._hosts.address(self._controller)
        text = CONFIGURATION.format(
            controller=self.name(self._controller),
            address=address,
            folder=self.folder,
            spool=self._spool.name,
        )
        for node in nodes:
            text += f"NodeName={self.name(node)} NodeAddr={self._hosts.address(node)} CPUs={_CORES}\n"
        workers, helpers = (
            ",".join(self.name(node) for node in part)
            for part in (nodes[: self._workers], nodes[self._workers :])
        )
        text += f"PartitionName=gpu Nodes={workers} Default=YES PriorityTier=1 GraceTime=20 State=UP\n"
        text += f"PartitionName=high Nodes={workers} PriorityTier=10 PreemptMode=OFF State=UP\n"
        if helpers:
            text += f"PartitionName=cpu Nodes={helpers} PriorityTier=1 State=UP\n"
        (self.folder / "slurm.conf").write_text(text)
        hosts = ["127.0.0.1 localhost"]
        hosts += [f"{self._hosts.address(host)} {self.name(host)}" for host in range(self.num_nodes + 1)]
        (self.folder / "hosts").write_text("\n".join(hosts) + "\n")

    def _start_munge(self) -> None:
        folder = self.folder / "munge"
        subprocess.run(["mungekey", "--create", f"--keyfile={folder / 'key'}"], check=True)
        files = {name: f"--{option}={folder / name}" for name, option in MUNGE_FILES.items()}
        self._hosts.start(
            self._controller,
            ["munged", "--foreground", "--force", f"--key-file={folder / 'key'}", *files.values()],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.await_true((folder / "socket").exists)

    def _start(self, host: int, *command: str) -> None:
        configuration = ("-f", str(self.folder / "slurm.conf"))
        self._hosts.start(
            host,
            self._with_hosts_file([*command, *configuration]),
            env=self._environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _on(self, host: int, command: tuple[str, ...]) -> list[str]:
        return [*self._hosts.enter(host), *self._with_hosts_file(list(command))]

    def _with_hosts_file(self, command: list[str]) -> list[str]:
        mount = 'mount --bind "$0" /etc/hosts && exec "$@"'
        return ["unshare", "--mount", "sh", "-c", mount, str(self.folder / "hosts"), *command]

    def _environment(self) -> dict[str, str]:
        return {
            "HOME": os.environ.get("HOME", "/"),
            "LANG": "C.UTF-8",
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "SLURM_CONF": str(self.folder / "slurm.conf"),
            "OMP_NUM_THREADS": "1",
        }


MUNGE_FILES = {"socket": "socket", "pid": "pid-file", "log": "log-file", "seed": "seed-file"}


def missing() -> str:
    """Return why there can be no Slurm here; empty: there can."""
    if os.geteuid() != 0:
        return "emulated hosts need root"
    absent = [name for name in (*DAEMONS, "tc") if not shutil.which(name)]
    return f"{', '.join(absent)} not found: apt-get install slurm-wlm munge iproute2" if absent else ""
