"""How a process learns its place, from each launcher's variables."""

from __future__ import annotations

import sys
from pathlib import Path
from subprocess import run

import pytest

from shoal import env
from shoal.cluster import WorkerPlace
from shoal.errors import UsageError

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
MPICH = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}
MEETING = {"MASTER_ADDR": "host-0", "MASTER_PORT": "12345"}
PLACE = WorkerPlace(rank=5, num_workers=8, local_rank=1, num_local_workers=4)


@pytest.mark.parametrize(
    ("variables", "launcher"), [(TORCHRUN, "torchrun"), (OPEN_MPI, "Open MPI"), (MPICH, "MPICH")]
)
def test_place_under_each_launcher(variables: dict[str, str], launcher: str) -> None:
    joined = env.joined({**variables, **MEETING, "HOME": "/home/x"})
    assert joined == env.Joined(place=PLACE, master_addr="host-0", master_port=12345, launcher=launcher)


def test_nobody_has_started_this_process_as_a_worker() -> None:
    assert env.joined({}) is None
    assert env.joined({"RANK": "0"}) is None  # other programs use the name too
    assert env.joined({"WORLD_SIZE": "2", "MASTER_ADDR": "x"}) is None


def test_torchrun_goes_before_mpi() -> None:
    """Under mpirun torchrun may start the workers; the inner launcher is the one that counts."""
    outer = {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0"}
    joined = env.joined({**outer, **MPICH, **TORCHRUN, **MEETING})
    assert joined is not None
    assert (joined.launcher, joined.place) == ("torchrun", PLACE)


def test_one_host_needs_only_rank_and_size() -> None:
    joined = env.joined({"RANK": "1", "WORLD_SIZE": "3"})
    assert joined is not None
    assert joined.place == WorkerPlace(rank=1, num_workers=3, local_rank=1, num_local_workers=3)
    assert (joined.master_addr, joined.master_port) == ("127.0.0.1", 29_500)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"RANK": "x"}, "the environment variable RANK='x' must be a whole number of at least 0"),
        ({"RANK": "-1"}, "RANK='-1' must be a whole number"),
        ({"WORLD_SIZE": "2.5"}, "WORLD_SIZE='2.5' must be a whole number"),
        ({"WORLD_SIZE": ""}, "WORLD_SIZE='' must be a whole number"),
        ({"RANK": "8"}, "RANK=8 must be below WORLD_SIZE=8; check the launcher"),
        ({"LOCAL_RANK": "one"}, "LOCAL_RANK='one'"),
        ({"MASTER_PORT": "http"}, "MASTER_PORT='http'"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set; export the address of the host of rank 0"),
    ],
)
def test_wrong_variables_are_named(changes: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        env.joined({**TORCHRUN, **MEETING, **changes})
    assert said in str(caught.value)


@pytest.mark.parametrize("variables", [OPEN_MPI, MPICH])
def test_mpi_on_several_hosts_needs_an_address(variables: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="started 8 workers on several hosts but MASTER_ADDR is not set"):
        env.joined(variables)


def test_joined_reads_the_real_environment() -> None:
    program = "from shoal import env; print(env.joined().place.rank, env.launch_dir())"
    child_env = env.child_environment(**TORCHRUN, **MEETING, SHOAL_LAUNCH_DIR="/run/shoal")
    child = run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=child_env)
    assert child.stdout == "5 /run/shoal\n"


def test_folders() -> None:
    assert env.launch_dir({}) is None
    assert env.launch_dir({"SHOAL_LAUNCH_DIR": ""}) is None
    assert env.launch_dir({"SHOAL_LAUNCH_DIR": "/run/x"}) == Path("/run/x")
    assert env.test_data_dir({"SHOAL_TEST_DATA": "/data"}) == Path("/data")
    assert env.test_data_dir({}) == Path("../shared/data")


def test_child_environment_changes_only_the_child() -> None:
    before = env.child_environment()
    changed = env.child_environment(SHOAL_TEST_DATA="/elsewhere")
    assert changed == {**before, "SHOAL_TEST_DATA": "/elsewhere"}
    assert env.test_data_dir() != Path("/elsewhere")


def test_groups_made_without_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.HELPERS, "10.0.0.7:4400")
    with env.without_helpers():
        assert env.helpers() == []
    assert [helper.port for helper in env.helpers()] == [4400]
    monkeypatch.delenv(env.HELPERS)
    with env.without_helpers():
        pass
    assert env.helpers() == []
