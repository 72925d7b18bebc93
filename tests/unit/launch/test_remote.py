"""Starting launchers by ssh and mpirun: the commands, the check of versions, the exit code."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import ShoalError, UsageError
from shoal.launch import remote
from shoal.launch.job_command import read_command
from shoal.launch.remote import RemoteJob, RemoteStart, check_hosts, mpi_starts, run, ssh_starts

COMMAND = ("python", "train.py", "a b", "$HOME")
OPEN_MPI = "mpirun (Open MPI) 4.1.4\n"


def test_ssh_runs_the_very_words_on_each_host() -> None:
    job = RemoteJob(
        hosts=("a@n1", "n2"), helper_hosts=("h1",), folder=Path("/fsx/my job"), workers_per_host=8,
        global_batch=512, option=("-F", "config"), interface="eth0", transport="ofi:tcp;ofi_rxm",
    )  # fmt: skip
    helper, first, second = ssh_starts(job, COMMAND)
    assert (helper.label, first.label, second.label) == ("h1", "n1", "n2")
    assert helper.is_helper and not first.is_helper
    assert first.command[:-1] == [
        "ssh", "-T", "-o", "BatchMode=yes", "-o", "ServerAliveInterval=10", "-F", "config", "a@n1",
    ]  # fmt: skip
    assert first.command[-1] == (
        "cd '/fsx/my job' && exec env SHOAL_HELPERS=h1:7070 shoal launch --stdin-secret --rdzv=n1:29400 "
        "--interface=eth0 '--transport=ofi:tcp;ofi_rxm' --nnodes=2 --node-rank=0 --workers=8 "
        "--global-batch=512 -- python train.py 'a b' '$HOME'"
    )
    assert "--node-rank=1" in second.command[-1]
    assert helper.command[-1].endswith(
        "exec shoal launch --stdin-secret --rdzv=n1:29400 --interface=eth0 '--transport=ofi:tcp;ofi_rxm' "
        "--role=helper --helper-port=7070"
    )


def test_each_host_has_an_mpirun_of_its_own() -> None:
    job = RemoteJob(hosts=("n1", "n2"), helper_hosts=("h1",), folder=Path("/fsx"), option=("-x", "A"))
    helper, first, second = mpi_starts(job, COMMAND, OPEN_MPI)
    assert [(each.label, each.is_helper) for each in (helper, first, second)] == [
        ("h1", True), ("n1", False), ("n2", False),
    ]  # fmt: skip
    assert helper.command == [
        "mpirun", "--host", "h1", "-n", "1", "-wdir", "/fsx", "-x", "A", "shoal", "launch", "--stdin-secret",
        "--rdzv=n1:29400", "--role=helper", "--helper-port=7070",
    ]  # fmt: skip
    assert second.command == [
        "mpirun", "--host", "n2", "-n", "1", "-wdir", "/fsx", "-x", "A", "env", "SHOAL_HELPERS=h1:7070",
        "shoal", "launch", "--stdin-secret", "--rdzv=n1:29400", "--nnodes=2", "--node-rank=1", "--", *COMMAND,
    ]  # fmt: skip
    assert first.stop is None


@pytest.mark.parametrize(
    ("version", "command", "stop"),
    [
        (
            "mpirun (Open MPI) 5.0.11\n\nReport bugs",
            ["setpriv", "--pdeathsig", "USR2", "mpirun", "--host"],
            signal.SIGUSR2,
        ),
        ("HYDRA build details:\n    Version: 5.0.2\n", ["mpirun", "-hosts"], None),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.19.0 Build 2026", ["mpirun", "-hosts"], None),
    ],
)
def test_what_each_mpi_understands(version: str, command: list[str], stop: int | None) -> None:
    """As their ``mpirun --version`` begins, recorded."""
    (start,) = mpi_starts(RemoteJob(hosts=("n1",)), COMMAND, version)
    assert start.command[: len(command) + 3] == [*command, "n1", "-n", "1"]
    assert start.stop == stop


def test_a_signal_asks_where_the_end_of_stdin_is_not_passed_on() -> None:
    program = (
        "import signal, sys\n"
        "from shoal.launch.remote import RemoteStart, run\n"
        "wait = ['sh', '-c', 'trap \"exit 75\" USR1; echo ready; while sleep 0.1; do :; done']\n"
        "sys.exit(run([RemoteStart(label='n1', command=wait, stop=signal.SIGUSR1)]))\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 75


def test_an_mpirun_that_is_not_known() -> None:
    with pytest.raises(UsageError, match="neither Open MPI nor Hydra: 'mpirun 1'; use shoal submit ssh"):
        mpi_starts(RemoteJob(hosts=("n1",)), COMMAND, "mpirun 1")


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"hosts": ()}, "name the worker hosts"),
    ({"hosts": ("-oProxyCommand=x",)}, "'-oProxyCommand=x' is no name of a host"),
    ({"hosts": ("n1", "n1")}, "the host n1 is named twice; --workers-per-host N starts several"),
    ({"helper_hosts": ("a@n1",)}, "the host n1 is named twice"),
    ({"hosts": ("n1;rm",)}, "'n1;rm' is no name of a host"),
    ({"workers_per_host": 0}, "--workers-per-host 0 must be at least 1"),
    ({"global_batch": 0}, "--global-batch 0 must be at least 1"),
    ({"port": 70_000}, "--port 70000 must be from 1 to 65535"),
    ({"hosts": ("n1 n2",)}, "'n1 n2' is no name of a host"),
]


@pytest.mark.parametrize(("settings", "said"), SETTINGS)
def test_mistakes(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        RemoteJob(**{"hosts": ("n1", "n2"), **settings})


def shell(text: str, *, label: str = "n1", is_helper: bool = False) -> RemoteStart:
    return RemoteStart(label=label, command=["sh", "-c", text], is_helper=is_helper)


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ((0, 0), 0),
        ((75, 75), 75),
        ((75, 76), 76),
        ((76, 1), 1),
        ((1, 2), 2),
        ((0, 255), 76),  # ssh lost the host
        ((0, 139), 1),
    ],
)
def test_the_exit_code_is_that_of_the_worst_worker_host(codes: tuple[int, int], expected: int) -> None:
    helper = shell("cat > /dev/null; exit 1", is_helper=True)
    assert run([helper, *(shell(f"exit {code}") for code in codes)]) == expected


def test_hosts_that_do_not_notice_the_failure_of_another_are_asked_to_leave(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "_OTHERS_END_S", 0.3)
    assert run([shell("exit 1"), shell("cat > /dev/null; exit 75")]) == 1


def test_lines_have_the_hosts_name_and_the_secret_is_the_first_of_stdin(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    read = f'read -r secret; printf %s "$secret" > {tmp_path}/$0; echo read; echo wrong >&2'
    starts = [RemoteStart(label=name, command=["sh", "-c", read, name]) for name in ("n1", "n2")]
    assert run(starts) == 0
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["n1: read", "n2: read"]
    assert sorted(err.splitlines()) == ["n1: wrong", "n2: wrong"]
    one, other = ((tmp_path / name).read_text() for name in ("n1", "n2"))
    assert one == other and len(one) == 64


def test_a_host_without_shoal_or_with_another_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "ssh"
    program.write_text(
        '#!/bin/sh\nfor host; do [ "$found" ] && break; case $host in n?) found=$host;; esac; done\n'
        'case $found in n1) echo "shoal 1";; n2) echo "shoal 2";;\n'
        '    n3) echo "sh: shoal: not found" >&2; exit 127;; esac\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    check_hosts(RemoteJob(hosts=("n1",), folder=tmp_path), "shoal 1", None)
    with pytest.raises(ShoalError) as raised:
        check_hosts(RemoteJob(hosts=("n1", "n2"), helper_hosts=("n3",), folder=tmp_path), "shoal 1", None)
    said = str(raised.value)
    assert "not all hosts have shoal 1" in said and "n1" not in said.partition(":")[2]
    assert "n2 has 'shoal 2'; n3: sh: shoal: not found" in said


def test_files_of_the_command_are_looked_for_on_the_worker_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each host is a folder of this machine here, in which ``ssh`` runs the command line."""
    (tmp_path / "ssh").write_text(
        "#!/bin/sh\n"
        'for line; do host=$last; last=$line; done\n'
        f"cd {tmp_path}/$host && sh -c \"${{line#cd * && }}\"\n"
    )  # fmt: skip
    (tmp_path / "shoal").write_text("#!/bin/sh\necho shoal 1\n")
    for host, files in (("n1", ("venv/python", "a train.py")), ("n2", ("a train.py",)), ("h1", ())):
        (tmp_path / host / "venv").mkdir(parents=True)
        for file in files:
            (tmp_path / host / file).touch(0o755)
    for program in ("ssh", "shoal"):
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    def check(*words: str, hosts: tuple[str, ...] = ("n1", "n2")) -> None:
        job = RemoteJob(hosts=hosts, helper_hosts=("h1",), folder=tmp_path)
        check_hosts(job, "shoal 1", read_command(words))

    check("env", "A=b", "python3", "a train.py")
    check("venv/python", "a train.py", hosts=("n1",))
    check("apptainer", "exec", "image.sif", "python", "/absent.py")
    with pytest.raises(ShoalError, match=r"not all hosts have the files .*: n2 has no venv/python \("):
        check("venv/python", "a train.py")
    with pytest.raises(ShoalError, match=r"n1 has no absent\.py; n2 has no venv/python and no absent\.py"):
        check("venv/python", "absent.py")


def test_signals_that_come_during_the_start_let_all_workers_save() -> None:
    program = (
        "import sys\n"
        "from shoal.launch.remote import RemoteStart, run\n"
        "wait = ['sh', '-c', 'echo ready; cat > /dev/null; exit 75']\n"
        "sys.exit(run([RemoteStart(label=str(number), command=wait) for number in range(40)]))\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP) * 20:
            process.send_signal(number)
        assert len(process.stdout.readlines()) == 39
        assert process.wait(60) == 75


def test_a_program_that_is_missing() -> None:
    with pytest.raises(ShoalError, match="no-such-program was not found on this machine"):
        run([RemoteStart(label="n1", command=["no-such-program"])])
