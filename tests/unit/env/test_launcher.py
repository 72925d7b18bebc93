"""A process reads its ranks from each launcher's variables."""

from __future__ import annotations

import sys
from pathlib import Path
from subprocess import run

import pytest

from shoal.env import machine
from shoal.env.launcher import has_other_hosts, rendezvous, worker_env
from shoal.env.machine import cores_per_worker, promised_gpus
from shoal.env.mpi import mpi_ranks
from shoal.env.sagemaker import sagemaker_base, sagemaker_defaults
from shoal.env.settings import helpers
from shoal.env.slurm import first_node, slurm_step
from shoal.env.torchrun import KubeflowHost, kubeflow_host
from shoal.env.variables import child_environment
from shoal.env.worker import WorkerEnv, WorkerRanks
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
RANKS = WorkerRanks(rank=5, num_workers=8, local_rank=1, num_local_workers=4)


@pytest.mark.parametrize(
    ("variables", "launcher"), [(TORCHRUN, "torchrun"), (OPEN_MPI, "Open MPI"), (MPICH, "MPICH")]
)
def test_ranks_under_each_launcher(variables: dict[str, str], launcher: str) -> None:
    given = worker_env({**variables, **MEETING, "HOME": "/home/x"})
    assert given == WorkerEnv(ranks=RANKS, master_addr="host-0", master_port=12345, launcher=launcher)


def test_cores_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "num_cores", lambda: 64)
    assert [cores_per_worker(each) for each in ({}, TORCHRUN, OPEN_MPI, MPICH)] == [0, 16, 16, 16]


def test_nobody_has_started_this_process_as_a_worker() -> None:
    assert worker_env({}) is None
    assert worker_env({"RANK": "0"}) is None  # other programs use the name too
    assert worker_env({"WORLD_SIZE": "2", "MASTER_ADDR": "x"}) is None


def test_torchrun_goes_before_mpi() -> None:
    """Under mpirun torchrun may start the workers; the inner launcher is the one that counts."""
    outer = {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0"}
    given = worker_env({**outer, **MPICH, **TORCHRUN, **MEETING})
    assert given is not None
    assert (given.launcher, given.ranks) == ("torchrun", RANKS)


def test_one_host_needs_only_rank_and_size() -> None:
    given = worker_env({"RANK": "1", "WORLD_SIZE": "3"})
    assert given is not None
    assert given.ranks == WorkerRanks(rank=1, num_workers=3, local_rank=1, num_local_workers=3)
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
    given = worker_env(variables)
    assert given is not None
    assert given.ranks == WorkerRanks(rank=2, num_workers=4, local_rank=0, num_local_workers=1)
    assert given.init_method == "tcp://bert-master-0:23456"
    assert has_other_hosts(variables)
    alone = worker_env({**variables, "WORLD_SIZE": "1", "RANK": "0", "PET_NNODES": "1"})
    assert alone is not None and (alone.ranks.num_workers, alone.ranks.num_local_workers) == (1, 1)


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "127.0.1.1", "::1", "[::1]", ""])
def test_ranks_with_the_address_of_this_host_are_those_of_its_workers(address: str) -> None:
    variables = {**OLD_PYTORCH_JOB, "MASTER_ADDR": address}
    given = worker_env(variables)
    assert given is not None
    assert given.ranks == WorkerRanks(rank=2, num_workers=4, local_rank=2, num_local_workers=4)
    assert not has_other_hosts(variables)


def test_pods_that_are_to_start_several_workers_each() -> None:
    """RANK counts pods there, and WORLD_SIZE workers: torchrun or ``shoal launch`` has to come between."""
    eight = {**PYTORCH_JOB, "WORLD_SIZE": "32", "PET_NPROC_PER_NODE": "8"}
    with pytest.raises(UsageError, match=r"WORLD_SIZE=32 workers on PET_NNODES=4 hosts.* shoal launch --"):
        worker_env(eight)
    started = worker_env({**eight, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8", "RANK": "17"})
    assert started is not None and started.ranks.local_rank == 1
    assert kubeflow_host(eight) == KubeflowHost(number=2, num_hosts=4, num_workers=8)


def test_the_host_of_a_pod_of_kubeflow() -> None:
    one = KubeflowHost(number=2, num_hosts=4, num_workers=1)
    assert kubeflow_host(PYTORCH_JOB) == kubeflow_host(TRAIN_JOB) == one
    one_a_gpu = KubeflowHost(number=2, num_hosts=4, num_workers=None)
    assert kubeflow_host(OLD_PYTORCH_JOB) == one_a_gpu
    assert kubeflow_host({**TRAIN_JOB, "PET_NPROC_PER_NODE": "auto"}) == one_a_gpu
    assert kubeflow_host({}) is None and kubeflow_host({**TRAIN_JOB, **TORCHRUN}) is None
    assert kubeflow_host({"PET_NNODES": "1:4"}) is None  # elastic: torchrun counts them
    assert rendezvous(TRAIN_JOB) == "bert-master-0:23456"
    assert has_other_hosts(TRAIN_JOB)


@pytest.mark.parametrize("address", ["fd00::7", "[fd00::7]"], ids=["bare", "brackets"])
def test_an_address_of_ipv6_has_brackets_before_a_port(address: str) -> None:
    given = worker_env({**TORCHRUN, **MEETING, "MASTER_ADDR": address, "MASTER_PORT": "5"})
    assert given is not None and given.master_addr == "fd00::7" and given.init_method == "tcp://[fd00::7]:5"
    (helper,) = helpers({"SHOAL_HELPERS": "[fd00::8]:7070*2.0"})
    assert (helper.address, helper.port, helper.bandwidth) == ("fd00::8", 7070, 2.0)


def test_workers_of_our_launcher_meet_in_a_file() -> None:
    given = worker_env({**MEETING, "RANK": "1", "WORLD_SIZE": "3", "SHOAL_STORE_FILE": "/tmp/a b%20/store"})
    assert given is not None
    assert given.init_method == "file:///tmp/a b%20/store"  # torch takes the path as it is


@pytest.mark.parametrize("path", ["store", "/tmp/#1/store", "/tmp/what?/store", "/tmp/a\nb/store"])
def test_a_store_file_that_a_url_cannot_name(path: str) -> None:
    with pytest.raises(UsageError, match=r"SHOAL_STORE_FILE=.* must be an absolute path .*set TMPDIR"):
        worker_env({"RANK": "1", "WORLD_SIZE": "3", "SHOAL_STORE_FILE": path})


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
        worker_env({**TORCHRUN, **MEETING, **changes})
    assert said in str(caught.value)


@pytest.mark.parametrize("variables", [OPEN_MPI, MPICH])
def test_mpi_on_several_hosts_needs_an_address(variables: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="started 8 workers on several hosts but MASTER_ADDR is not set"):
        worker_env(variables)


def test_worker_env_reads_the_real_environment() -> None:
    program = (
        "from shoal.env import launcher, settings;"
        "print(launcher.worker_env().ranks.rank, settings.launch_dir())"
    )
    child_env = child_environment(**TORCHRUN, **MEETING, SHOAL_LAUNCH_DIR="/run/shoal")
    child = run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=child_env)
    assert child.stdout == "5 /run/shoal\n"


def test_only_rank_0_is_main() -> None:
    workers = [
        WorkerRanks(rank=rank, num_workers=4, local_rank=rank % 2, num_local_workers=2) for rank in range(4)
    ]
    assert [ranks.is_main for ranks in workers] == [True, False, False, False]


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


def test_ranks_in_a_step_of_slurm() -> None:
    given = worker_env(SLURM)
    ranks = WorkerRanks(rank=2, num_workers=4, local_rank=0, num_local_workers=2)
    assert given == WorkerEnv(ranks=ranks, master_addr="n1", master_port=24_711, launcher="Slurm")
    assert worker_env({**SLURM, "PMI_RANK": "2", "PMI_SIZE": "4"}) == given  # srun --mpi=pmi2
    assert worker_env({**SLURM, "PMIX_RANK": "2", "PMIX_NAMESPACE": "slurm.4711.2"}) == given
    hydra = worker_env({**SLURM, **MPICH, **MEETING})
    assert hydra is not None and (hydra.launcher, hydra.ranks) == ("MPICH", RANKS)
    again = slurm_step({**SLURM, "SLURM_RESTART_COUNT": "3"})
    assert again is not None and (again.run_id, again.port) == ("4711.3", 24_711)


@pytest.mark.parametrize("step", ["", "4294967290", "4294967291", "4294967292"])
def test_the_batch_script_and_the_shell_of_salloc_are_no_workers(step: str) -> None:
    assert worker_env({**SLURM, "SLURM_STEP_ID": step}) is None


def test_one_task_of_slurm_may_start_workers_itself() -> None:
    single = {"SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_NODEID": "0", "SLURM_PROCID": "0"}
    assert worker_env({**SLURM, **single}) is None


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x"}, r"SLURM_STEP_TASKS_PER_NODE='2\(x' is not of the form"),
        ({"SLURM_NODEID": "2"}, "SLURM_NODEID=2 and SLURM_STEP_TASKS_PER_NODE"),
        ({"SLURM_STEP_NODELIST": ""}, "the node list '' is not one of Slurm"),
        ({"SLURM_STEP_NODELIST": "[n1-n2]"}, r"the node list '\[n1-n2\]' is not one of Slurm"),
        ({"SLURM_PROCID": "x"}, "SLURM_PROCID='x' must be a whole number"),
    ],
)
def test_variables_of_slurm_that_are_wrong(changes: dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        worker_env({**SLURM, **changes})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("gpu-[003-010,12],login1", "gpu-003"),
        ("rack[1,3]-node,x", "rack1-node"),
        ("ip-10-0-0-7.ec2.internal", "ip-10-0-0-7.ec2.internal"),
        ("rack[0-63]_blade[00-41]", "rack0_blade00"),
        ("a[1-2][3-4],b", "a13"),
        ("n1, n2", "n1"),
        ("tux[1-3,5].cluster", "tux1.cluster"),
    ],
)
def test_the_first_node_of_a_list(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_pmix_alone_does_not_say_how_many_workers_there_are() -> None:
    with pytest.raises(UsageError, match=r"PMIX_RANK.* export RANK, WORLD_SIZE"):
        worker_env({"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-1"})


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
def test_the_ranks_in_recorded_environments(launcher: str) -> None:
    given = worker_env(RECORDED[launcher])
    assert given is not None and given.launcher == ("Open MPI" if "Open" in launcher else "MPICH")
    assert given.ranks == WorkerRanks(rank=1, num_workers=2, local_rank=1, num_local_workers=2)
    launchers = mpi_ranks(RECORDED[launcher])
    assert launchers == (None if "gforker" in launcher else given.ranks)
    assert not has_other_hosts(RECORDED[launcher])


def test_prterun_says_no_number_of_workers() -> None:
    """Recorded under ``prterun -n 2`` of PRRTE 3, which has started this process without Open MPI."""
    prterun = {"PMIX_HOSTNAME": "n1", "PMIX_NAMESPACE": "prterun-n1-20521@1", "PMIX_RANK": "0"}
    with pytest.raises(UsageError, match=r"PMIX_RANK.* export RANK, WORLD_SIZE"):
        worker_env({**prterun, "PRTE_LAUNCHED": "1"})
    given = worker_env({**prterun, **TORCHRUN, **MEETING})
    assert given is not None and given.ranks == RANKS


def test_the_rendezvous_from_an_environment_with_an_address_only() -> None:
    assert rendezvous({"MASTER_ADDR": "a"}) == "a:29500"
    assert rendezvous({"MASTER_ADDR": "a", "MASTER_PORT": "7"}) == "a:7"
    assert rendezvous({"MASTER_PORT": "7"}) is None


def test_whether_there_are_other_hosts() -> None:
    assert [has_other_hosts(variables) for variables in (TORCHRUN, OPEN_MPI, MPICH)] == [True] * 3
    assert not has_other_hosts({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"})
    assert not has_other_hosts({"WORLD_SIZE": "4"})
    assert not has_other_hosts({"WORLD_SIZE": "x", "LOCAL_WORLD_SIZE": "1"})


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
    assert promised_gpus(variables) == promised
    assert promised_gpus({**SLURM, "SLURM_GPUS_ON_NODE": "4"}) == 4


def test_defaults_of_sagemaker() -> None:
    variables = {"SAGEMAKER_ROLE": "role", "SAGEMAKER_SUBNET_IDS": "subnet-1, subnet-2,"}
    defaults = sagemaker_defaults(variables)
    assert (defaults.role, defaults.fsx, defaults.subnets) == ("role", None, ("subnet-1", "subnet-2"))
    assert sagemaker_base(variables) == Path("/opt/ml")
    assert sagemaker_base({"SHOAL_SAGEMAKER_BASE": "/tmp/ml"}) == Path("/tmp/ml")
