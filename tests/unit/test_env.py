"""A process learns its place from each launcher's variables."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from subprocess import run

import pytest

from shoal import env
from shoal.env import WorkerPlace
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


def test_network_threads_kernels_and_cores_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    assert env.network_threads({}) == 0
    assert env.network_threads({env.NETWORK_THREADS: "3"}) == 3
    for wrong in ("0", "17", "two", "-1"):
        with pytest.raises(UsageError, match=f"SHOAL_NETWORK_THREADS='{wrong}' must be a number of threads"):
            env.network_threads({env.NETWORK_THREADS: wrong})
    assert env.attention_kernel({}) and not env.attention_kernel({env.ATTENTION_KERNEL: "0"})
    with pytest.raises(UsageError, match="SHOAL_ATTENTION_KERNEL='yes' must be 1"):
        env.attention_kernel({env.ATTENTION_KERNEL: "yes"})
    monkeypatch.setattr(env, "num_cores", lambda: 64)
    assert [env.cores_per_worker(each) for each in ({}, TORCHRUN, OPEN_MPI, MPICH)] == [0, 16, 16, 16]


@pytest.mark.parametrize(
    ("variables", "launcher"), [(TORCHRUN, "torchrun"), (OPEN_MPI, "Open MPI"), (MPICH, "MPICH")]
)
def test_place_under_each_launcher(variables: dict[str, str], launcher: str) -> None:
    given = env.worker_env({**variables, **MEETING, "HOME": "/home/x"})
    assert given == env.WorkerEnv(place=PLACE, master_addr="host-0", master_port=12345, launcher=launcher)


def test_nobody_has_started_this_process_as_a_worker() -> None:
    assert env.worker_env({}) is None
    assert env.worker_env({"RANK": "0"}) is None  # other programs use the name too
    assert env.worker_env({"WORLD_SIZE": "2", "MASTER_ADDR": "x"}) is None


def test_torchrun_goes_before_mpi() -> None:
    """Under mpirun torchrun may start the workers; the inner launcher is the one that counts."""
    outer = {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0"}
    given = env.worker_env({**outer, **MPICH, **TORCHRUN, **MEETING})
    assert given is not None
    assert (given.launcher, given.place) == ("torchrun", PLACE)


def test_one_host_needs_only_rank_and_size() -> None:
    given = env.worker_env({"RANK": "1", "WORLD_SIZE": "3"})
    assert given is not None
    assert given.place == WorkerPlace(rank=1, num_workers=3, local_rank=1, num_local_workers=3)
    assert (given.master_addr, given.master_port) == ("127.0.0.1", 29_500)
    assert given.init_method == "tcp://127.0.0.1:29500"


# What Kubeflow's training operator gives the second pod of a PyTorchJob (pkg/controller.v1/pytorch/envvar.go)
PYTORCH_JOB = {
    "MASTER_ADDR": "bert-master-0", "MASTER_PORT": "23456", "WORLD_SIZE": "4", "RANK": "2",
    "PET_MASTER_ADDR": "bert-master-0", "PET_MASTER_PORT": "23456", "PET_NNODES": "4", "PET_NODE_RANK": "2",
    "PET_NPROC_PER_NODE": "1",
}  # fmt: skip
OLD_PYTORCH_JOB = {name: value for name, value in PYTORCH_JOB.items() if "PET" not in name}
TRAIN_JOB = {name: value for name, value in PYTORCH_JOB.items() if "PET" in name}


@pytest.mark.parametrize("variables", [PYTORCH_JOB, OLD_PYTORCH_JOB])
def test_each_pod_of_a_pytorch_job_is_a_host_with_one_worker(variables: dict[str, str]) -> None:
    given = env.worker_env(variables)
    assert given is not None
    assert given.place == WorkerPlace(rank=2, num_workers=4, local_rank=0, num_local_workers=1)
    assert given.init_method == "tcp://bert-master-0:23456"
    assert env.has_other_hosts(variables)
    alone = env.worker_env({**variables, "WORLD_SIZE": "1", "RANK": "0", "PET_NNODES": "1"})
    assert alone is not None and (alone.place.num_workers, alone.place.num_local_workers) == (1, 1)


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "127.0.1.1", "::1", "[::1]", ""])
def test_ranks_with_the_address_of_this_host_are_those_of_its_workers(address: str) -> None:
    variables = {**OLD_PYTORCH_JOB, "MASTER_ADDR": address}
    given = env.worker_env(variables)
    assert given is not None
    assert given.place == WorkerPlace(rank=2, num_workers=4, local_rank=2, num_local_workers=4)
    assert not env.has_other_hosts(variables)


def test_pods_that_are_to_start_several_workers_each() -> None:
    """RANK counts pods there, and WORLD_SIZE workers: torchrun or ``shoal launch`` has to come between."""
    eight = {**PYTORCH_JOB, "WORLD_SIZE": "32", "PET_NPROC_PER_NODE": "8"}
    with pytest.raises(UsageError, match=r"WORLD_SIZE=32 workers on PET_NNODES=4 hosts.* shoal launch --"):
        env.worker_env(eight)
    started = env.worker_env({**eight, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8", "RANK": "17"})
    assert started is not None and started.place.local_rank == 1
    assert env.kubeflow_host(eight) == env.KubeflowHost(number=2, num_hosts=4, num_workers=8)


def test_what_kubeflow_gives_a_pod() -> None:
    found = env.KubeflowHost(number=2, num_hosts=4, num_workers=1)
    assert env.kubeflow_host(PYTORCH_JOB) == env.kubeflow_host(TRAIN_JOB) == found
    one_a_gpu = env.KubeflowHost(number=2, num_hosts=4, num_workers=None)
    assert env.kubeflow_host(OLD_PYTORCH_JOB) == one_a_gpu
    assert env.kubeflow_host({**TRAIN_JOB, "PET_NPROC_PER_NODE": "auto"}) == one_a_gpu
    assert env.kubeflow_host({}) is None and env.kubeflow_host({**TRAIN_JOB, **TORCHRUN}) is None
    assert env.kubeflow_host({"PET_NNODES": "1:4"}) is None  # elastic: torchrun counts them
    assert env.rendezvous(TRAIN_JOB) == "bert-master-0:23456"
    assert env.has_other_hosts(TRAIN_JOB)


@pytest.mark.parametrize(
    ("variables", "promised"),
    [
        ({}, 0),
        ({"SHOAL_GPUS": "8"}, 8),
        ({"NVIDIA_VISIBLE_DEVICES": "all"}, 0),  # of an image
        ({"NVIDIA_VISIBLE_DEVICES": "void"}, 0),
        ({"NVIDIA_VISIBLE_DEVICES": "GPU-8932f937,GPU-46a7"}, 2),  # of the device plug-in
        ({"SLURM_GPUS_ON_NODE": "4"}, 0),  # the batch script, or salloc's shell on a login node
    ],
)
def test_gpus_that_a_scheduler_promises(variables: dict[str, str], promised: int) -> None:
    assert env.promised_gpus(variables) == promised
    assert env.promised_gpus({**SLURM, "SLURM_GPUS_ON_NODE": "4"}) == 4


def test_gpus_that_are_selected() -> None:
    for value in ("0,1", "GPU-8932f937", "MIG-1"):
        assert env.selected_gpus({"CUDA_VISIBLE_DEVICES": value}) == f"CUDA_VISIBLE_DEVICES={value}"
    for value in ("", "-1", "NoDevFiles"):
        assert env.selected_gpus({"CUDA_VISIBLE_DEVICES": value}) == ""
    assert env.selected_gpus({"ROCR_VISIBLE_DEVICES": "0"}) == "ROCR_VISIBLE_DEVICES=0"


def test_an_address_of_ipv6_has_brackets_before_a_port() -> None:
    given = env.worker_env({**TORCHRUN, **MEETING, "MASTER_ADDR": "fd00::7", "MASTER_PORT": "5"})
    assert given is not None and given.init_method == "tcp://[fd00::7]:5"
    (helper,) = env.helpers({"SHOAL_HELPERS": "[fd00::8]:7070*2.0"})
    assert (helper.address, helper.port, helper.bandwidth) == ("fd00::8", 7070, 2.0)


def test_workers_of_our_launcher_meet_in_a_file() -> None:
    given = env.worker_env(
        {**MEETING, "RANK": "1", "WORLD_SIZE": "3", "SHOAL_STORE_FILE": "/tmp/a b%20/store"}
    )
    assert given is not None
    assert given.init_method == "file:///tmp/a b%20/store"  # torch takes the path as it is


@pytest.mark.parametrize("path", ["store", "/tmp/#1/store", "/tmp/what?/store", "/tmp/a\nb/store"])
def test_a_store_file_that_a_url_cannot_name(path: str) -> None:
    with pytest.raises(UsageError, match=r"SHOAL_STORE_FILE=.* must be an absolute path .*set TMPDIR"):
        env.worker_env({"RANK": "1", "WORLD_SIZE": "3", "SHOAL_STORE_FILE": path})


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
        env.worker_env({**TORCHRUN, **MEETING, **changes})
    assert said in str(caught.value)


@pytest.mark.parametrize("variables", [OPEN_MPI, MPICH])
def test_mpi_on_several_hosts_needs_an_address(variables: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="started 8 workers on several hosts but MASTER_ADDR is not set"):
        env.worker_env(variables)


def test_joined_reads_the_real_environment() -> None:
    program = "from shoal import env; print(env.worker_env().place.rank, env.launch_dir())"
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


def test_what_compiling_for_a_gpu_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(env.shutil, "which", lambda name: None)
    assert "apt-get install gcc, or set CC" in env.compiler_problem({})
    monkeypatch.setattr(env.sysconfig, "get_path", lambda name: str(tmp_path))
    assert f"needs {tmp_path}/Python.h" in env.compiler_problem({"CC": "cc"})
    (tmp_path / "Python.h").touch()
    assert env.compiler_problem({"CC": "cc"}) == ""
    monkeypatch.setattr(env.shutil, "which", lambda name: f"/usr/bin/{name}" if name == "clang" else None)
    assert env.compiler_problem({}) == ""


def test_groups_made_without_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.HELPERS, "10.0.0.7:4400")
    with env.without(env.HELPERS):
        assert env.helpers() == []
    assert [helper.port for helper in env.helpers()] == [4400]
    monkeypatch.delenv(env.HELPERS)
    with env.without(env.HELPERS):
        pass
    assert env.helpers() == []


# ---- the secret ------------------------------------------------------------------------------------------


SECRET = "sixteen bytes of"


def secret_file(folder: Path, mode: int, *, text: str | bytes = SECRET, group: int | None = None) -> Path:
    path = folder / "job.secret"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    if group is not None:
        os.chown(path, -1, group)
    path.chmod(mode)
    return path


def secret_in(path: Path) -> bytes | None:
    return env.secret({"SHOAL_SECRET_FILE": str(path)})


def test_secret_from_the_environment_or_a_file(tmp_path: Path) -> None:
    path = secret_file(tmp_path, 0o600, text=f"{SECRET}\n")
    assert env.secret({}) is None
    assert env.secret({"SHOAL_SECRET": f" {SECRET} "}) == SECRET.encode()
    assert secret_in(path) == SECRET.encode()
    both = {"SHOAL_SECRET": SECRET.upper(), "SHOAL_SECRET_FILE": str(path)}
    assert env.secret(both) == SECRET.upper().encode()


def test_the_command_that_errors_name_makes_a_secret(tmp_path: Path) -> None:
    run(["bash", "-c", env.MAKE_SECRET], cwd=tmp_path, check=True)
    made = secret_in(tmp_path / "job.secret")
    assert made is not None and len(made) == 44


@pytest.mark.parametrize("mode", [0o400, 0o440, 0o600, 0o640, 0o660, 0o700])
def test_secret_files_for_the_user_and_a_group_of_his(tmp_path: Path, mode: int) -> None:
    assert secret_in(secret_file(tmp_path, mode, group=os.getegid())) == SECRET.encode()


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o606, 0o602, 0o444, 0o666, 0o777])
def test_secret_files_that_others_can_read_or_change(tmp_path: Path, mode: int) -> None:
    path = secret_file(tmp_path, mode)
    with pytest.raises(UsageError) as caught:
        secret_in(path)
    assert f"SHOAL_SECRET_FILE={path} has the mode {mode:04o}" in str(caught.value)
    assert f"chmod 600 {path}" in str(caught.value)
    assert SECRET not in str(caught.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a file to a group that one is not in needs root")
@pytest.mark.parametrize("mode", [0o640, 0o620, 0o440])
def test_secret_files_of_a_group_of_others(tmp_path: Path, mode: int) -> None:
    other = next(gid for gid in range(54_321, 54_999) if gid not in {os.getegid(), *os.getgroups()})
    path = secret_file(tmp_path, mode, group=other)
    with pytest.raises(UsageError, match=f"has the mode {mode:04o}"):
        secret_in(path)
    assert secret_in(secret_file(tmp_path, 0o600, group=other)) == SECRET.encode()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_secret_files_are_this_users_or_roots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = secret_file(tmp_path, 0o640, group=os.getegid())
    os.chown(path, 12345, -1)
    with pytest.raises(UsageError, match=r"belongs to the user with the id 12345, .* or of root: copy it"):
        secret_in(path)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert secret_in(path) == SECRET.encode()
    os.chown(path, 0, -1)
    assert secret_in(path) == SECRET.encode()


def test_a_link_to_a_secret_counts_as_the_file(tmp_path: Path) -> None:
    """Kubernetes mounts a secret as a link, of mode 0777, through another one."""
    (tmp_path / "..2026").mkdir()
    path = secret_file(tmp_path / "..2026", 0o440)
    (tmp_path / "..data").symlink_to("..2026")
    (tmp_path / "job.secret").symlink_to("..data/job.secret")
    assert secret_in(tmp_path / "job.secret") == SECRET.encode()
    path.chmod(0o644)
    with pytest.raises(UsageError, match="has the mode 0644"):
        secret_in(tmp_path / "job.secret")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (SECRET[:-1], "this one has 15"),
        ("", "this one has 0"),
        (" \n" * 20, "this one has 0"),
        ("x" * 4_097, "this one has more"),
        ("x" * 100_000, "this one has more"),
    ],
)
def test_secrets_that_are_too_short_or_no_secrets(tmp_path: Path, text: str, said: str) -> None:
    path = secret_file(tmp_path, 0o600, text=text)
    for variables, name in (
        ({"SHOAL_SECRET_FILE": str(path)}, f"SHOAL_SECRET_FILE={path}"),
        ({"SHOAL_SECRET": text}, "SHOAL_SECRET"),
    ):
        with pytest.raises(UsageError) as caught:
            env.secret(variables)
        assert str(caught.value).startswith(f"{name}: a secret has 16 to 4,096 bytes")
        assert said in str(caught.value) and "head -c 32 /dev/urandom" in str(caught.value)
        assert not text.strip() or text not in str(caught.value)


def test_a_secret_of_any_bytes(tmp_path: Path) -> None:
    assert secret_in(secret_file(tmp_path, 0o600, text=bytes(range(128, 256)))) == bytes(range(128, 256))


def test_a_secret_file_that_is_not_there(tmp_path: Path) -> None:
    for path, problem in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(UsageError, match=f"SHOAL_SECRET_FILE={path} cannot be read: {problem}"):
            secret_in(path)


def test_without_takes_a_variable_from_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.SECRET, SECRET)
    with env.without(env.SECRET, "SHOAL_NEVER_SET"):
        assert env.SECRET not in env.child_environment()
    assert env.child_environment()[env.SECRET] == SECRET
    assert "SHOAL_NEVER_SET" not in env.child_environment()


def test_only_rank_0_is_main() -> None:
    places = [
        WorkerPlace(rank=rank, num_workers=4, local_rank=rank % 2, num_local_workers=2) for rank in range(4)
    ]
    assert [place.is_main for place in places] == [True, False, False, False]


# Recorded in a step of `srun --ntasks-per-node=2` on Slurm 22.05, second node, first task.
SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "2",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_LAUNCH_NODE_IPADDR": "10.78.0.1",
}


def test_place_in_a_step_of_slurm() -> None:
    given = env.worker_env(SLURM)
    place = WorkerPlace(rank=2, num_workers=4, local_rank=0, num_local_workers=2)
    assert given == env.WorkerEnv(place=place, master_addr="n1", master_port=24_711, launcher="Slurm")
    assert env.worker_env({**SLURM, "PMI_RANK": "2", "PMI_SIZE": "4"}) == given  # srun --mpi=pmi2
    assert env.worker_env({**SLURM, "PMIX_RANK": "2", "PMIX_NAMESPACE": "slurm.4711.2"}) == given
    hydra = env.worker_env({**SLURM, **MPICH, **MEETING})
    assert hydra is not None and (hydra.launcher, hydra.place) == ("MPICH", PLACE)
    again = env.slurm_step({**SLURM, "SLURM_RESTART_COUNT": "3"})
    assert again is not None and (again.run_id, again.port) == ("4711.3", 24_711)


@pytest.mark.parametrize("step", ["", "4294967290", "4294967291", "4294967292"])
def test_the_batch_script_and_the_shell_of_salloc_are_no_workers(step: str) -> None:
    assert env.worker_env({**SLURM, "SLURM_STEP_ID": step}) is None


def test_one_task_of_slurm_may_start_workers_itself() -> None:
    single = {"SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_NODEID": "0", "SLURM_PROCID": "0"}
    assert env.worker_env({**SLURM, **single}) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x"}, r"SLURM_STEP_TASKS_PER_NODE='2\(x' is not of the form"),
        ({"SLURM_NODEID": "2"}, "SLURM_NODEID=2 and SLURM_STEP_TASKS_PER_NODE"),
        ({"SLURM_STEP_NODELIST": ""}, "the node list '' is not one of Slurm"),
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID='x' must be a whole number"),
    ],
)
def test_variables_of_slurm_that_are_wrong(changes: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        env.worker_env({**SLURM, **changes})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu-[003-010,12],login1", "gpu-003"),
        ("rack[1,3]-node,x", "rack1-node"),
        ("ip-10-0-0-7.ec2.internal", "ip-10-0-0-7.ec2.internal"),
    ],
)
def test_the_first_node_of_a_list(nodes: str, first: str) -> None:
    assert env.first_node(nodes) == first


def test_pmix_alone_does_not_say_how_many_workers_there_are() -> None:
    with pytest.raises(UsageError, match=r"PMIX_RANK.* export RANK, WORLD_SIZE"):
        env.worker_env({"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-1"})


# What `mpirun -n 2` gave the second process, without paths, ports and what says nothing about places
RECORDED = {
    "Open MPI 5.0.11": {
        "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_COMM_WORLD_NODE_RANK": "1", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_UNIVERSE_SIZE": "2", "OMPI_WORLD_LOCAL_SIZE": "2", "OMPI_WORLD_SIZE": "2",
        "PMIX_HOSTNAME": "n1", "PMIX_NAMESPACE": "prterun-n1-20106@1", "PMIX_RANK": "1", "PRTE_LAUNCHED": "1",
    },
    "Open MPI 4.1.4": {
        "OMPI_APP_CTX_NUM_PROCS": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_COMM_WORLD_NODE_RANK": "1", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_FIRST_RANKS": "0", "PMIX_ID": "576847873.1", "PMIX_NAMESPACE": "576847873", "PMIX_RANK": "1",
    },
    "MPICH 5.0.2": {
        "HYDI_CONTROL_FD": "7", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1", "PMI_FD": "11",
        "PMI_HOSTNAME": "n1", "PMI_RANK": "1", "PMI_SIZE": "2",
    },
    "Intel MPI 2021.19": {
        "HYDRA_BSTRAP_LOCALHOST": "n1", "HYDRA_BSTRAP_SUBTREE_SIZE": "1", "I_MPI_PIN_INFO": "1",
        "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1", "PMI_FD": "11", "PMI_RANK": "1", "PMI_SIZE": "2",
    },
    "MPICH's gforker, which is for one host": {
        "MPI_APPNUM": "0", "MPI_UNIVERSE_SIZE": "-1", "PMI_DEBUG": "0", "PMI_FD": "12", "PMI_RANK": "1",
        "PMI_SIZE": "2",
    },
}  # fmt: skip


@pytest.mark.parametrize("launcher", RECORDED)
def test_the_place_in_recorded_environments(launcher: str) -> None:
    given = env.worker_env(RECORDED[launcher])
    assert given is not None and given.launcher == ("Open MPI" if "Open" in launcher else "MPICH")
    assert given.place == WorkerPlace(rank=1, num_workers=2, local_rank=1, num_local_workers=2)
    launchers = env.mpi_place(RECORDED[launcher])
    assert launchers == (None if "gforker" in launcher else given.place)
    assert not env.has_other_hosts(RECORDED[launcher])


def test_prterun_says_no_number_of_workers() -> None:
    """Recorded under ``prterun -n 2`` of PRRTE 3, which has started this process without Open MPI."""
    prterun = {"PMIX_HOSTNAME": "n1", "PMIX_NAMESPACE": "prterun-n1-20521@1", "PMIX_RANK": "0"}
    with pytest.raises(UsageError, match=r"PMIX_RANK.* export RANK, WORLD_SIZE"):
        env.worker_env({**prterun, "PRTE_LAUNCHED": "1"})
    given = env.worker_env({**prterun, **TORCHRUN, **MEETING})
    assert given is not None and given.place == PLACE


def test_the_rendezvous_from_an_environment_with_an_address_only() -> None:
    assert env.rendezvous({"MASTER_ADDR": "a"}) == "a:29500"
    assert env.rendezvous({"MASTER_ADDR": "a", "MASTER_PORT": "7"}) == "a:7"
    assert env.rendezvous({"MASTER_PORT": "7"}) is None


def test_whether_there_are_other_hosts() -> None:
    assert [env.has_other_hosts(variables) for variables in (TORCHRUN, OPEN_MPI, MPICH)] == [True] * 3
    assert not env.has_other_hosts({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"})
    assert not env.has_other_hosts({"WORLD_SIZE": "4"})
    assert not env.has_other_hosts({"WORLD_SIZE": "x", "LOCAL_WORLD_SIZE": "1"})
