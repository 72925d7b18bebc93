"""Refusals of ``shoal launch``, and the addresses that it finds."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from shoal.errors import ShoalError, UsageError
from shoal.launch.in_job import HostOptions, address_towards, in_job
from shoal.launch.local import outgoing_interface


def slurm(tasks: str) -> dict[str, str]:
    return {
        "SLURM_JOB_ID": "4",
        "SLURM_STEP_ID": "0",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_STEP_TASKS_PER_NODE": tasks,
        "SLURM_STEP_NODELIST": "n[1-2]",
    }


def mpi(*, size: int, local_size: int) -> dict[str, str]:
    values = {"RANK": 2, "SIZE": size, "LOCAL_RANK": 0, "LOCAL_SIZE": local_size}
    return {f"OMPI_COMM_WORLD_{name}": str(value) for name, value in values.items()}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"helpers": -1}, "--helpers -1 must be at least 0"),
        ({"helper_port": 0}, "--helper-port 0 must be"),
    ],
)
def test_numbers_have_a_least(given: dict[str, int], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        HostOptions(**given)  # type: ignore[arg-type]


KUBEFLOW = {
    "PET_NNODES": "4", "PET_NODE_RANK": "2", "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "bert-master-0",
}  # fmt: skip


@pytest.mark.parametrize(
    ("variables", "command", "options", "said"),
    [
        ({}, (), HostOptions(), "name the command of the workers after --"),
        ({}, ("true",), HostOptions(role="helper"), "takes no command"),
        ({}, ("true",), HostOptions(helpers=2), "a folder that all share: --job DIR"),
        ({}, (), HostOptions(role="helper"), "a folder that all share: --job DIR"),
        (
            slurm("1(x2)"),
            ("true",),
            HostOptions(nnodes=3),
            "Slurm has started this step on 2 nodes; leave it out",
        ),
        (
            slurm("2(x2)"),
            ("true",),
            HostOptions(workers=4),
            "4 tasks on 2 nodes, and several tasks of a node are",
        ),
        (
            slurm("1(x2)") | {"SLURM_GPUS_ON_NODE": "4"},
            ("true",),
            HostOptions(workers=8),
            "8 workers on the node .*, and Slurm gives the job 4 GPUs there: ask for as many",
        ),
        (
            slurm("8(x2)") | {"SLURM_GPUS_ON_NODE": "4"},
            ("true",),
            HostOptions(),
            "8 workers on the node .*, and Slurm gives the job 4 GPUs",
        ),
        (slurm("3,1"), ("true",), HostOptions(), "4 tasks on 2 nodes, not the same number on each"),
        (
            {},
            ("true",),
            HostOptions(nnodes=2, job=Path("j")),
            "--job with several hosts needs --node-rank N",
        ),
        (
            {},
            ("true", "--distributed.backend=nccl"),
            HostOptions(job=Path("j"), helpers=2),
            "distributed.backend nccl does not use helper hosts, and 2 helpers are named",
        ),
        (
            {"SHOAL_HELPERS": "h:7070"},
            ("true", "--distributed.backend", "gloo"),
            HostOptions(),
            "distributed.backend gloo does not use helper hosts, and 1 helper is named",
        ),
        ({}, ("true",), HostOptions(join=True), "--join needs --job DIR, the folder of a job that runs"),
        ({}, ("true",), HostOptions(join=True, job=Path("no-job")), "no-job has no start"),
        ({}, ("true",), HostOptions(run_id="bert"), "--run-id 'bert' is not of the form JOB.START"),
        ({}, ("true",), HostOptions(run_id="../x.1"), "is not of the form JOB.START"),
        (
            {},
            ("true",),
            HostOptions(run_id="x.next"),
            "x.next: only the first .* give the job's secret in SHOAL_SECRET",
        ),
        ({}, ("true",), HostOptions(nnodes=2, workers=1), "--nnodes 2 needs --rdzv HOST:PORT"),
        ({}, (), HostOptions(role="helper", helper_port=7070), "--helper-port needs the job's secret"),
        (
            mpi(size=4, local_size=2),
            ("true",),
            HostOptions(),
            "mpirun has started 2 shoal launch on this host",
        ),
        (mpi(size=4, local_size=1), ("true",), HostOptions(workers=1), "--nnodes 4 needs --rdzv HOST:PORT"),
        (KUBEFLOW, ("true",), HostOptions(), "--nnodes 4 needs the job's secret"),
        ({"SHOAL_GPUS": "8"}, ("true",), HostOptions(), "the job has 8 GPUs on .* and torch finds none"),
    ],
)
def test_contradicting_options(
    variables: dict[str, str],
    command: tuple[str, ...],
    options: HostOptions,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(UsageError, match=said):
        in_job(command, options)


def test_the_own_address_on_the_way_to_another_host() -> None:
    assert address_towards("localhost") == "127.0.0.1"
    with pytest.raises(ShoalError, match=r"the host 'no-such-host\.invalid' cannot be found by .*/etc/hosts"):
        address_towards("no-such-host.invalid", deadline_s=0.3)


def test_a_name_that_appears_late_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([OSError("not yet"), OSError("not yet")])
    real = socket.socket.connect

    class Late(socket.socket):
        def connect(self, address: tuple[str, int]) -> None:  # type: ignore[override]
            if (problem := next(answers, None)) is not None:
                raise problem
            real(self, address)

    monkeypatch.setattr("socket.socket", Late)
    assert address_towards("localhost") == "127.0.0.1"


def test_the_interface_for_others_is_not_loopback() -> None:
    others = {name for _, name in socket.if_nameindex() if name != "lo"}
    assert outgoing_interface("localhost") in {*others, None}
