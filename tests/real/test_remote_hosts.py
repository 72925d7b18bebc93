"""``shoal submit ssh`` and ``mpi`` with a real sshd on each emulated host, and Debian's Open MPI over it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from worker_scripts import SUM

from shoal.launch.emulated import Cluster
from shoal.launch.emulated_network import identity, processes_in

MPIRUN = "/usr/bin/mpirun"
SSHD = "/usr/sbin/sshd"


def missing() -> str:
    if os.geteuid() != 0 or not shutil.which("tc"):
        return "emulated hosts need root and iproute2"
    absent = [path for path in (MPIRUN, SSHD, "/usr/bin/ssh") if not Path(path).exists()]
    return f"{absent} not found: apt-get install openmpi-bin openssh-server openssh-client" if absent else ""


pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

NAMES = ("n1", "n2", "h1", "login")
SCRIPT = (
    SUM
    + """
import os, pathlib, signal, sys, time
rank = os.environ["RANK"]
if sys.argv[1] == "sum":
    sum_over_workers()
    print("summed", os.environ["SHOAL_HELPERS"], os.environ["WORLD_SIZE"])
else:
    signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path(f"saved-{rank}").touch(), sys.exit(75)))
    pathlib.Path(f"waits-{rank}").touch()
    time.sleep(100)
"""
)
SSHD_CONFIG = """
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
StrictModes no
PermitRootLogin yes
UsePAM no
PidFile none
SetEnv PATH={path} SHOAL_NATIVE_GROUP=0 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
"""
SSH_CONFIG = """
Host *
  User root
  IdentityFile {folder}/key
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""


class Hosts:
    """Hosts with an sshd each, and one to log in to."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._cluster = Cluster(hosts=len(NAMES))

    def __enter__(self) -> Hosts:
        Path("/run/sshd").mkdir(exist_ok=True)
        self._cluster.__enter__()
        for name in ("key", "host_key"):
            make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)]
            subprocess.run(make, check=True)
        values = {"folder": self.folder, "path": self._path()}
        (self.folder / "sshd_config").write_text(SSHD_CONFIG.format(**values))
        (self.folder / "ssh_config").write_text(SSH_CONFIG.format(**values))
        lines = [f"{self._cluster.address(number)} {name}" for number, name in enumerate(NAMES)]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
        (self.folder / "script.py").write_text(SCRIPT)
        for number in range(len(NAMES) - 1):
            self._start(number, SSHD, "-D", "-f", str(self.folder / "sshd_config"))
        return self

    def __exit__(self, *_: object) -> None:
        self._cluster.close()

    def _path(self) -> str:
        """Return PATH with Debian's mpirun before that of a package of Python."""
        bin_folder = self.folder / "bin"
        bin_folder.mkdir(exist_ok=True)
        if not (bin_folder / "mpirun").exists():
            (bin_folder / "mpirun").symlink_to(MPIRUN)
        return f"{bin_folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"

    def _start(self, number: int, *command: str, out: Path | None = None) -> subprocess.Popen[str]:
        mount = 'mount --bind "$0" /etc/hosts && exec "$@"'
        with (out or Path(os.devnull)).open("w") as log:
            return self._cluster.start(
                number,
                ["unshare", "--mount", "sh", "-c", mount, str(self.folder / "hosts"), *command],
                env={
                    "PATH": self._path(),
                    "OMPI_ALLOW_RUN_AS_ROOT": "1",
                    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
                    "GLOO_SOCKET_IFNAME": "",
                },
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
            )

    def submit(
        self, how: str, what: str, out: Path, names: tuple[str, ...] = ("n1", "n2")
    ) -> subprocess.Popen[str]:
        """Run ``shoal submit`` on the login host."""
        config = self.folder / "ssh_config"
        agent = {"ssh": ("-F", str(config)), "mpi": ("--mca", "plm_rsh_agent", f"ssh -F {config}")}
        options = [f"--option={option}" for option in agent[how]]
        hosts = [word for name in names for word in ("--hosts", name)]
        hosts += ["--helper-hosts", "h1", "--workers-per-host", "1"]
        command = ("shoal", "submit", how, *hosts, *options, "--", sys.executable, "script.py", what)
        return self._start(NAMES.index("login"), *command, out=out)

    def await_files(self, *names: str) -> None:
        end = time.monotonic() + 60.0
        while not all((self.folder / name).exists() for name in names):
            assert time.monotonic() < end, f"no {names}"
            time.sleep(0.1)
        for name in names:
            (self.folder / name).unlink()

    def launchers(self, words: bytes = rb"shoal|script.py") -> list[int]:
        """Return the processes of shoal and the script on the hosts, or those with other words."""
        networks = {identity(self._cluster.enter(n)[1].removeprefix("--net=")) for n in range(len(NAMES) - 1)}
        found = []
        for pid in processes_in(networks):
            with suppress(OSError):  # it has ended
                if re.search(words, Path(f"/proc/{pid}/cmdline").read_bytes()):
                    found.append(pid)
        return found


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with Hosts(tmp_path_factory.mktemp("remote")) as hosts:
        yield hosts


@pytest.mark.parametrize("how", ["ssh", "mpi"])
def test_workers_sum_through_a_helper(hosts: Hosts, tmp_path: Path, how: str) -> None:
    submitted = hosts.submit(how, "sum", tmp_path / "log")
    code, said = submitted.wait(120), (tmp_path / "log").read_text()
    assert code == 0, said
    assert "n1: summed h1:7070 2\n" in said
    assert re.search(r"h1: .*stopped; .* [1-9][\d,]* chunks summed", said)


@pytest.mark.parametrize("how", ["ssh", "mpi"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_workers_save_when_stdin_closes(
    hosts: Hosts, tmp_path: Path, how: str, number: signal.Signals
) -> None:
    submitted = hosts.submit(how, "wait", tmp_path / "log")
    hosts.await_files("waits-0", "waits-1")
    submitted.send_signal(number)
    hosts.await_files("saved-0", "saved-1")
    said = submitted.wait(60), (tmp_path / "log").read_text()
    assert said[0] == (75 if number == signal.SIGINT else -signal.SIGKILL), said[1]
    end = time.monotonic() + 30.0
    while left := hosts.launchers():
        assert time.monotonic() < end, left
        time.sleep(0.2)


@pytest.mark.parametrize("start", range(4))
def test_a_worker_that_dies_of_a_signal_fails_the_job(hosts: Hosts, tmp_path: Path, start: int) -> None:
    """Four times: it was seen once that the exit code was 0."""
    submitted = hosts.submit("mpi", "wait", tmp_path / "log", names=("n1",))
    hosts.await_files("waits-0")
    (worker,) = hosts.launchers(rb"^[^\0]*python[^\0]*\0script\.py")
    os.kill(worker, signal.SIGUSR1)
    said = submitted.wait(60), (tmp_path / "log").read_text()
    assert said[0] == 1, said[1]
    assert "n1: worker 0 was ended by SIGUSR1\n" in said[1]
