"""Reads environment variables, which no other module does (a test enforces it), and counts the cores.

A worker's rank comes from its launcher: torchrun's variables first, then those of Open MPI, of MPICH's Hydra
and Intel MPI, and of Slurm. Kubeflow's pods have torchrun's without the local ones, or its options (PET_…).
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path

from shoal.errors import UsageError

LAUNCH_DIR = "SHOAL_LAUNCH_DIR"
"""Folder shared by the launcher of this host and its workers, for error reports."""

STORE_FILE = "SHOAL_STORE_FILE"
"""File of torch's ``FileStore``, by which the workers of one host rendezvous without a port."""

STORE_PORT = "SHOAL_STORE_PORT"
"""Port at MASTER_ADDR for the store of programs without torch; shoal's launchers of several hosts set it."""

TEST_DATA = "SHOAL_TEST_DATA"

SECRET_FILE = "SHOAL_SECRET_FILE"
"""File with the job's secret, shared by its workers and servers."""
SECRET = "SHOAL_SECRET"
"""The secret itself; weaker, since child processes inherit it and /proc/PID/environ shows it."""
MAKE_SECRET = "(umask 077; head -c 32 /dev/urandom | base64 > job.secret)"
"""Shell command that makes a secret's file."""
HELPERS = "SHOAL_HELPERS"
"""Servers on helper hosts: ``10.0.0.7:4400,10.0.0.8:4400*2.0``, the second with twice the bandwidth."""
INTERFACE = "SHOAL_INTERFACE"
"""Address or name of the network interface that the backend uses; several, separated by commas."""
TRANSPORT = "SHOAL_TRANSPORT"
"""Transport of the backend: ``tcp``, or ``ofi:`` and libfabric's providers; the same on all hosts."""
NETWORK_THREADS = "SHOAL_NETWORK_THREADS"
"""Threads of a process that read and write the backend's TCP connections; the same on all hosts."""
MOST_NETWORK_THREADS = 16
HOST_ID = "SHOAL_HOST_ID"
"""Overrides the identity of this host; tests emulate several hosts on one machine with it."""
NATIVE_GROUP = "SHOAL_NATIVE_GROUP"
"""1 (the default) or 0: whether the backend uses its process group in C++."""
ATTENTION_KERNEL = "SHOAL_ATTENTION_KERNEL"
"""1 or 0 (the default): whether attention with dropout on a GPU uses shoal's own kernels."""
DEBUG = "SHOAL_DEBUG"
"""1: errors that end a command or a worker show their tracebacks; set by ``shoal --debug`` for the job."""
CACHE_DIR = "SHOAL_CACHE_DIR"
"""Folder for what is built once per machine; default: ``~/.cache/shoal``."""
MEMORY = "SHOAL_MEMORY"
"""Memory of a worker, such as 8GB, to fill where there is no GPU or not all of it may be used."""
PROGRESS_FILE = "SHOAL_PROGRESS_FILE"
"""File in which the first worker writes the step of each checkpoint, for the launcher of a cluster's job."""
SECRET_ID = "SHOAL_SECRET_ID"
"""Name or ARN of the job's secret in AWS Secrets Manager, for jobs of SageMaker."""
SOURCE_SHA256 = "SHOAL_SOURCE_SHA256"
"""Sum of the archive that ``shoal submit sagemaker --source`` has uploaded."""
GPUS = "SHOAL_GPUS"
"""GPUs that the job asks for on each host; finding none is an error then."""
GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd")
"""Device files of the drivers of NVIDIA and AMD."""
_WSL_DEVICE = "/dev/dxg"
"""Device file of any GPU under WSL, without CUDA too."""
SAGEMAKER_BASE = "SHOAL_SAGEMAKER_BASE"
"""Folder that stands for ``/opt/ml``; tests emulate SageMaker's instances with it."""

_SLURM_JOB_ID = "SLURM_JOB_ID"
_SLURM_SPECIAL_STEPS = 0xFFFFFFF0
"""Numbers from which Slurm counts steps that are no srun: the batch script, the shell of salloc."""
_FIRST_JOB_PORT, _NUM_JOB_PORTS = 20_000, 10_000

# (rank, number of workers, local rank, local number of workers) of each launcher
_MPI_NAMES = {
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
_DEFAULT_PORT = 29_500
_SAFE_IN_URL = re.compile(r"/[^?#\x00-\x1f]*")
_SECRET_BYTES = (16, 4_096)
"""Minimum and maximum; a shorter secret could be found by trial from the messages of a handshake."""

_REPORTED = re.compile(
    r"(?:SHOAL|NCCL|GLOO|TORCH|TORCHELASTIC|PET|PYTORCH|CUDA|NVIDIA|HIP|ROCR|FI|UCX|OMP|GOMP|KMP|MKL|OPENBLAS|OMPI_COMM"
    r"|PMI|PMIX|MPI|TOKENIZERS|SLURM)_\w+"
    r"|(?:GLOBAL_|LOCAL_|GROUP_|ROLE_)?RANK|(?:LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|NODE_RANK|MASTER_(?:ADDR|PORT)"
    r"|LD_(?:LIBRARY_PATH|PRELOAD)|MALLOC_\w+|PYTHON\w*|VIRTUAL_ENV|CONDA_PREFIX|CXX|CC|TMPDIR|LANG|LC_ALL"
)
"""Environment variables for bug reports."""
_OF_THE_JOB = re.compile(
    r"(?:GLOBAL_|LOCAL_|GROUP_|ROLE_)?RANK|(?:LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|NODE_RANK|MASTER_(?:ADDR|PORT)"
    r"|(?:TORCHELASTIC|PET|OMPI|PMI|PMIX|MPI|SLURM_STEP)_\w+|SLURM_(?:PROCID|LOCALID|NODEID)"
    rf"|{LAUNCH_DIR}|{STORE_FILE}|{STORE_PORT}|{SECRET}|{SECRET_FILE}|{HELPERS}|{PROGRESS_FILE}"
)
"""Environment variables that a launcher gives to the workers of a job."""
_SECRET_NAME = re.compile(
    r"SECRET|TOKEN(?!IZERS)|PASS(?!IVE)|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE|AUTH|SIGNATURE|COOKIE|_KEY$|_PAT$"
)
_SHORTEST_SECRET = 6
"""Shorter values, such as 1 or true, are no secrets."""


@dataclass(frozen=True, kw_only=True)
class WorkerPlace:
    """Rank of this process in the job and on its host."""

    rank: int
    num_workers: int
    local_rank: int
    num_local_workers: int

    @property
    def is_main(self) -> bool:
        """True for the worker that prints, writes the record and owns the run directory."""
        return self.rank == 0


@dataclass(frozen=True, kw_only=True)
class SlurmStep:
    """Place of this process among the tasks of an ``srun``."""

    job: int
    restarts: int
    """Times that Slurm has requeued the job."""
    place: WorkerPlace
    """The task, its number among all tasks and among those of its node."""
    node: int
    num_nodes: int
    first_node: str
    num_gpus: int = 0
    """GPUs that Slurm gives the job on this node; 0: it does not say."""

    @property
    def port(self) -> int:
        """A port for the rendezvous, which other jobs on the same nodes do not have."""
        return _FIRST_JOB_PORT + self.job % _NUM_JOB_PORTS

    @property
    def run_id(self) -> str:
        """A name of this start of the job."""
        return f"{self.job}.{self.restarts}"


@dataclass(frozen=True, kw_only=True)
class KubeflowHost:
    """A pod among those of a job of Kubeflow."""

    number: int
    num_hosts: int
    num_workers: int | None
    """Workers to start in it; ``None``: one per GPU."""


@dataclass(frozen=True, kw_only=True)
class SageMakerDefaults:
    """The environment variables that AWS's own examples read for a training job."""

    role: str | None
    fsx: str | None
    subnets: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class HelperAddress:
    """Address of a server on a helper host, and its bandwidth relative to a worker host's.

    A bandwidth of ``None`` means that it is measured.
    """

    address: str
    port: int
    bandwidth: float | None = None


@dataclass(frozen=True, kw_only=True)
class WorkerEnv:
    """Rank of a worker process, and the rendezvous of the workers."""

    place: WorkerPlace
    master_addr: str
    master_port: int
    launcher: str
    store_file: Path | None = None
    """File of the rendezvous on one host; address and port are ignored then."""

    @property
    def init_method(self) -> str:
        """URL of the store, for ``init_process_group``."""
        if self.store_file is not None:
            return f"file://{self.store_file}"
        host = f"[{self.master_addr}]" if ":" in self.master_addr else self.master_addr
        return f"tcp://{host}:{self.master_port}"


def worker_env(environ: Mapping[str, str] | None = None) -> WorkerEnv | None:
    """Return this worker's environment if a launcher has started the process, else ``None``.

    Raises:
        UsageError: a variable is missing or is not a number in its range.
    """
    environ = os.environ if environ is None else environ
    mpi = [item for item in _MPI_NAMES.items() if item[1][0] in environ and item[1][1] in environ]
    step = slurm_step(environ)
    if "RANK" in environ and "WORLD_SIZE" in environ:
        names, launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), "torchrun"
    elif step is not None and (not mpi or mpi[0][1][2] not in environ):  # srun --mpi=pmi2 sets PMI_RANK too
        return _slurm_worker(step, environ) if step.place.num_workers > 1 else None
    elif mpi:
        launcher, names = mpi[0]
    elif "PMIX_RANK" in environ and "PMIX_NAMESPACE" in environ:
        raise UsageError(
            "PMIx has started this process (PMIX_RANK) and no variable says how many workers there are; "
            "export RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE, or unset PMIX_RANK to run alone"
        )
    else:
        return None
    rank, num_workers = (_number(environ, name) for name in names[:2])
    one_per_host = launcher == "torchrun" and _is_one_per_host(environ, num_workers)
    local_rank = _number(environ, names[2], default=0 if one_per_host else rank)
    num_local = _number(environ, names[3], default=1 if one_per_host else num_workers)
    if rank >= num_workers:
        raise UsageError(f"{names[0]}={rank} must be below {names[1]}={num_workers}; check the launcher")
    addr, store = environ.get("MASTER_ADDR", ""), environ.get(STORE_FILE)
    if store and not _SAFE_IN_URL.fullmatch(store):
        raise UsageError(
            f"{STORE_FILE}={store!r} must be an absolute path without ?, # and control characters, which a "
            "URL cannot hold; set TMPDIR to another folder"
        )
    if not addr:
        if num_local != num_workers:
            raise UsageError(
                f"{launcher} started {num_workers} workers on several hosts but MASTER_ADDR is not set; "
                "export the address of the host of rank 0 to all of them"
            )
        addr = "127.0.0.1"
    return WorkerEnv(
        place=WorkerPlace(
            rank=rank, num_workers=num_workers, local_rank=local_rank, num_local_workers=num_local
        ),
        master_addr=addr,
        master_port=_number(environ, "MASTER_PORT", default=_DEFAULT_PORT),
        launcher=launcher,
        store_file=Path(store) if store else None,
    )


def _is_one_per_host(environ: Mapping[str, str], num_workers: int) -> bool:
    """Return whether RANK and WORLD_SIZE, without the local ones, number hosts with a worker each.

    They do in the pods of Kubeflow's PyTorchJob, where MASTER_ADDR names the first; with the address of this
    host itself, or none, they number workers on this host.

    Raises:
        UsageError: each of the hosts is to start several workers, by torchrun.
    """
    address = environ.get("MASTER_ADDR", "")
    if "LOCAL_RANK" in environ or "LOCAL_WORLD_SIZE" in environ or not address or _names_this_host(address):
        return False
    hosts = environ.get("PET_NNODES", "")
    if hosts.isdecimal() and int(hosts) != num_workers:
        raise UsageError(
            f"WORLD_SIZE={num_workers} workers on PET_NNODES={hosts} hosts, and RANK counts hosts: start the "
            "command with shoal launch -- or torchrun, or set PET_NPROC_PER_NODE (nprocPerNode) to 1"
        )
    return True


def _names_this_host(address: str) -> bool:
    try:
        return ip_address(without_brackets(address)).is_loopback
    except ValueError:
        return address == "localhost"


def kubeflow_host(environ: Mapping[str, str] | None = None) -> KubeflowHost | None:
    """Return this pod's place in a PyTorchJob or TrainJob, from torchrun's variables, or ``None``.

    Raises:
        UsageError: a variable is not a number.
    """
    environ = os.environ if environ is None else environ
    if "LOCAL_RANK" in environ or "LOCAL_WORLD_SIZE" in environ:  # of a worker that torchrun has started
        return None
    if environ.get("PET_NNODES", "").isdecimal() and "PET_NODE_RANK" in environ:
        workers = environ.get("PET_NPROC_PER_NODE", "")
        return KubeflowHost(
            number=_number(environ, "PET_NODE_RANK"),
            num_hosts=int(environ["PET_NNODES"]),
            num_workers=int(workers) if workers.isdecimal() else None,
        )
    size = _number(environ, "WORLD_SIZE", default=0) if "RANK" in environ else 0
    if size and _is_one_per_host(environ, size):  # older versions set no PET_NNODES
        return KubeflowHost(number=_number(environ, "RANK"), num_hosts=size, num_workers=None)
    return None


def mpi_place(environ: Mapping[str, str] | None = None) -> WorkerPlace | None:
    """Return the place of this process among those that mpirun has started, or ``None``.

    Raises:
        UsageError: a variable is not a number.
    """
    environ = os.environ if environ is None else environ
    for names in _MPI_NAMES.values():
        if all(name in environ for name in names):
            rank, size, local_rank, local_size = (_number(environ, name) for name in names)
            return WorkerPlace(
                rank=rank, num_workers=size, local_rank=local_rank, num_local_workers=local_size
            )
    return None


def slurm_step(environ: Mapping[str, str] | None = None) -> SlurmStep | None:
    """Return the place of this process in an ``srun`` of Slurm, else ``None``.

    The batch script and the shell of ``salloc`` have most of Slurm's variables but are no tasks.

    Raises:
        UsageError: a variable of Slurm is missing or malformed.
    """
    environ = os.environ if environ is None else environ
    number = environ.get("SLURM_STEP_ID", "")
    if not number.isdecimal() or int(number) >= _SLURM_SPECIAL_STEPS:
        return None
    node = _number(environ, "SLURM_NODEID")
    counts = _tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if node >= len(counts):
        raise UsageError(
            f"SLURM_NODEID={node} and SLURM_STEP_TASKS_PER_NODE={environ.get('SLURM_STEP_TASKS_PER_NODE')!r} "
            "contradict each other: start the command with srun"
        )
    return SlurmStep(
        job=_number(environ, _SLURM_JOB_ID),
        restarts=_number(environ, "SLURM_RESTART_COUNT", default=0),
        place=WorkerPlace(
            rank=_number(environ, "SLURM_PROCID"),
            num_workers=sum(counts),
            local_rank=_number(environ, "SLURM_LOCALID"),
            num_local_workers=counts[node],
        ),
        node=node,
        num_nodes=len(counts),
        first_node=first_node(environ.get("SLURM_STEP_NODELIST", "")),
        num_gpus=_number(environ, "SLURM_GPUS_ON_NODE", default=0),
    )


def first_node(node_list: str) -> str:
    """Return the first name of a node list of Slurm, such as ``gpu-[003-010,12],login1``.

    Raises:
        UsageError: the list is empty or malformed.
    """
    match = re.match(r"([\w.-]+)(?:\[(\d+)[^][]*\]([\w.-]*))?(?=,|$)", node_list)
    if match is None:
        raise UsageError(f"the node list {node_list!r} is not one of Slurm: start the command with srun")
    return "".join(part or "" for part in match.groups())


def _tasks_per_node(text: str) -> list[int]:
    """Return the numbers of tasks of ``2(x3),1``: 2, 2, 2, 1."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part)
        if match is None:
            raise UsageError(
                f"SLURM_STEP_TASKS_PER_NODE={text!r} is not of the form 2(x3),1: start the command with srun"
            )
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _slurm_worker(step: SlurmStep, environ: Mapping[str, str]) -> WorkerEnv:
    return WorkerEnv(
        place=step.place,
        master_addr=environ.get("MASTER_ADDR") or (step.first_node if step.num_nodes > 1 else "127.0.0.1"),
        master_port=_number(environ, "MASTER_PORT", default=step.port),
        launcher="Slurm",
    )


def workers_first_node(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the first node of the first group of a heterogeneous job of Slurm, or ``None``."""
    nodes = _text("SLURM_JOB_NODELIST_HET_GROUP_0", environ)
    return first_node(nodes) if nodes else None


def has_other_hosts(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether a launcher says that workers of this job run on other hosts too."""
    environ = os.environ if environ is None else environ
    for size, local in (("WORLD_SIZE", "LOCAL_WORLD_SIZE"), *(names[1::2] for names in _MPI_NAMES.values())):
        sizes = environ.get(size, ""), environ.get(local, "")
        if all(map(str.isdecimal, sizes)):
            return int(sizes[1]) < int(sizes[0])
    host = kubeflow_host(environ)
    return host is not None and host.num_hosts > 1


def rendezvous(environ: Mapping[str, str] | None = None) -> str | None:
    """Return ``MASTER_ADDR:MASTER_PORT`` (default port 29500), Kubeflow's PET_MASTER_ADDR, or ``None``."""
    for name in ("MASTER", "PET_MASTER"):
        if address := _text(f"{name}_ADDR", environ):
            return f"{address}:{_text(f'{name}_PORT', environ) or _DEFAULT_PORT}"
    return None


def store_port(worker: WorkerEnv, environ: Mapping[str, str] | None = None) -> int:
    """Return the port of rank 0's store for programs without torch.

    It is the one after MASTER_PORT if torchrun's agent listens there, for a store that only torch reads.

    Raises:
        UsageError: SHOAL_STORE_PORT is not a number.
    """
    environ = os.environ if environ is None else environ
    holds_port = _text("TORCHELASTIC_USE_AGENT_STORE", environ) == "True"
    return _number(environ, STORE_PORT, default=worker.master_port + holds_port)


def progress_file(environ: Mapping[str, str] | None = None) -> Path | None:
    """Return the file for the step of the last checkpoint, or ``None``."""
    value = _text(PROGRESS_FILE, environ)
    return Path(value) if value else None


def sagemaker_base(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder by which SageMaker and its containers exchange files."""
    return Path(_text(SAGEMAKER_BASE, environ) or "/opt/ml")


def sagemaker_defaults(environ: Mapping[str, str] | None = None) -> SageMakerDefaults:
    """Return SAGEMAKER_ROLE, SAGEMAKER_FSX_ID and SAGEMAKER_SUBNET_IDS (separated by commas)."""
    subnets = (_text("SAGEMAKER_SUBNET_IDS", environ) or "").split(",")
    return SageMakerDefaults(
        role=_text("SAGEMAKER_ROLE", environ),
        fsx=_text("SAGEMAKER_FSX_ID", environ),
        subnets=tuple(subnet.strip() for subnet in subnets if subnet.strip()),
    )


def secret_id(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the name of the job's secret in Secrets Manager, or ``None``."""
    return _text(SECRET_ID, environ)


def source_sha256(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the sum of the archive with the user's program, or ``None``."""
    return _text(SOURCE_SHA256, environ)


def alone(folder: Path) -> WorkerEnv:
    """Return the place of a process that is the only worker; its store is a file in ``folder``."""
    place = WorkerPlace(rank=0, num_workers=1, local_rank=0, num_local_workers=1)
    return WorkerEnv(
        place=place, master_addr="127.0.0.1", master_port=0, launcher="none", store_file=folder / "store"
    )


def launch_dir(environ: Mapping[str, str] | None = None) -> Path | None:
    """Return the folder shared with shoal's launcher, or ``None`` under another one."""
    value = _text(LAUNCH_DIR, environ)
    return Path(value) if value else None


def debug(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether errors show their tracebacks; any value but 0 says yes, since it is read in an error."""
    return (_text(DEBUG, environ) or "0") != "0"


def set_debug() -> None:
    """Let the errors of this process and of those that it starts show their tracebacks."""
    os.environ[DEBUG] = "1"


def secret(environ: Mapping[str, str] | None = None) -> bytes | None:
    """Return the job's secret from ``SHOAL_SECRET`` or the file ``SHOAL_SECRET_FILE``, or ``None``.

    Raises:
        UsageError: the file cannot be read, is another user's, or others can read it; or the secret is too
            short.
    """
    environ = os.environ if environ is None else environ
    if SECRET in environ:
        source, value = SECRET, environ[SECRET].encode(errors="surrogateescape").strip()
    elif (path := environ.get(SECRET_FILE)) is not None:
        source, value = f"{SECRET_FILE}={path}", _read_secret(path).strip()
    else:
        return None
    if not _SECRET_BYTES[0] <= len(value) <= _SECRET_BYTES[1]:
        raise UsageError(
            f"{source}: a secret has {_SECRET_BYTES[0]} to {_SECRET_BYTES[1]:,} bytes, and this one has "
            f"{'more' if len(value) > _SECRET_BYTES[1] else len(value)}; make one with {MAKE_SECRET} and use "
            "the same on all hosts"
        )
    return value


def _read_secret(path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            status = os.fstat(file.fileno())  # of the file itself: Kubernetes mounts a link to it
            value = file.read(_SECRET_BYTES[1] + 3)  # and a line break
    except OSError as problem:
        raise UsageError(f"{SECRET_FILE}={path} cannot be read: {problem.strerror}") from None
    mode = stat.S_IMODE(status.st_mode)
    in_group = status.st_gid in {os.getegid(), *os.getgroups()}
    if mode & (0o006 if in_group else 0o066):
        raise UsageError(
            f"{SECRET_FILE}={path} has the mode {mode:04o}, so that other users can read or change it; "
            f"chmod 600 {path} (a secret that Kubernetes mounts: defaultMode: 0440)"
        )
    if status.st_uid not in (os.geteuid(), 0):
        raise UsageError(
            f"{SECRET_FILE}={path} belongs to the user with the id {status.st_uid}, who knows what is in it; "
            f"a secret is a file of this user ({os.geteuid()}) or of root: copy it"
        )
    return value


def helpers(environ: Mapping[str, str] | None = None) -> list[HelperAddress]:
    """Return the servers named in ``SHOAL_HELPERS``.

    Raises:
        UsageError: an entry is not ``address:port`` or ``address:port*bandwidth``.
    """
    value = (os.environ if environ is None else environ).get(HELPERS, "")
    found = []
    for entry in filter(None, (part.strip() for part in value.split(","))):
        where, _, factor = entry.partition("*")
        address, _, port = where.rpartition(":")
        address = without_brackets(address)
        try:
            bandwidth = float(factor) if "*" in entry else None
        except ValueError:
            bandwidth = 0.0
        usable = bandwidth is None or 0 < bandwidth < float("inf")
        if not (address and port.isdecimal() and 0 < int(port) < 1 << 16 and usable):
            raise UsageError(
                f"{HELPERS} has the entry {entry!r}; an entry is address:port, or address:port*2.0 for a "
                "helper with twice the bandwidth of a worker's host"
            )
        found.append(HelperAddress(address=address, port=int(port), bandwidth=bandwidth))
    return found


def without_brackets(host: str) -> str:
    """Return a name or an address, which has brackets if it is one of IPv6 before a port.

    >>> without_brackets("[fd00::7]")
    'fd00::7'
    """
    return host.removeprefix("[").removesuffix("]")


def set_variables(changes: Mapping[str, str]) -> None:
    """Set variables of this process's environment, which its children inherit."""
    os.environ.update(changes)


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Remove variables from this process's environment, and so from its children's, within a block."""
    values = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(values)


def interface(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the addresses or interface names in ``SHOAL_INTERFACE``, or ``None``."""
    return _text(INTERFACE, environ)


def transport(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the transport in ``SHOAL_TRANSPORT``, or ``None``."""
    return _text(TRANSPORT, environ)


def network_threads(environ: Mapping[str, str] | None = None) -> int:
    """Return the number of threads in ``SHOAL_NETWORK_THREADS``, or 0.

    Raises:
        UsageError: it is no number from 1 to 16.
    """
    value = _text(NETWORK_THREADS, environ)
    if value is None:
        return 0
    if not (value.isascii() and value.isdigit() and 1 <= int(value) <= MOST_NETWORK_THREADS):
        raise UsageError(
            f"{NETWORK_THREADS}={value!r} must be a number of threads from 1 to {MOST_NETWORK_THREADS}; "
            "without it the number depends on the cores"
        )
    return int(value)


def native_group(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether the process group in C++ is to be used: yes, unless ``SHOAL_NATIVE_GROUP`` is 0.

    Raises:
        UsageError: it is neither 0 nor 1.
    """
    return _is_on(NATIVE_GROUP, "1", "the process group in C++", "that in Python", environ)


def attention_kernel(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether attention with dropout on a GPU uses kernels of shoal: yes, unless the variable is 0.

    Raises:
        UsageError: it is neither 0 nor 1.
    """
    return _is_on(ATTENTION_KERNEL, "1", "the kernels of attention", "torch's operations", environ)


def _is_on(name: str, default: str, one: str, zero: str, environ: Mapping[str, str] | None) -> bool:
    """Return whether a variable is 1; the error says what 1 and 0 choose."""
    value = _text(name, environ) or default
    if value not in ("0", "1"):
        raise UsageError(f"{name}={value!r} must be 1 for {one} or 0 for {zero}")
    return value == "1"


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder for what is built once per machine: ``SHOAL_CACHE_DIR``, else in the user's cache.

    Raises:
        UsageError: neither is known, as in a container whose user has no home.
    """
    if value := _text(CACHE_DIR, environ):
        return Path(value)
    if user := _text("XDG_CACHE_HOME", environ):
        return Path(user, "shoal")
    try:
        return Path.home() / ".cache" / "shoal"
    except RuntimeError:
        raise UsageError(f"this user has no home for a cache; set {CACHE_DIR} to a folder") from None


def compiler(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the C++ compiler in ``CXX``, or ``None``."""
    return _text("CXX", environ)


def host_id(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the host identity in ``SHOAL_HOST_ID``, or ``None``."""
    return _text(HOST_ID, environ)


def job_id(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the scheduler's job id, which a requeued job keeps, or ``None``."""
    return _text(_SLURM_JOB_ID, environ)


def promised_gpus(environ: Mapping[str, str] | None = None) -> int:
    """Return the number of GPUs that the scheduler has allocated to the job on this host; 0: none.

    That is SHOAL_GPUS, Slurm's number in a step, or the GPUs that Kubernetes' device plug-in names.

    Raises:
        UsageError: a variable is not a number.
    """
    environ = os.environ if environ is None else environ
    step = slurm_step(environ)
    named = environ.get("NVIDIA_VISIBLE_DEVICES", "").split(",")  # an image's own "all" promises nothing
    return (
        _number(environ, GPUS, default=0)
        or (step.num_gpus if step else 0)
        or sum(name.startswith(("GPU-", "MIG-")) for name in named)
    )


def selected_gpus(environ: Mapping[str, str] | None = None) -> str:
    """Return a variable that selects GPUs, such as ``CUDA_VISIBLE_DEVICES=0,1``; empty: none does."""
    environ = os.environ if environ is None else environ
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if re.match(r"\d|GPU-|MIG-", value := environ.get(name, "")):
            return f"{name}={value}"
    return ""


def worker_memory(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the memory that a worker may fill, such as ``8GB``; ``None``: that of its GPU."""
    return _text(MEMORY, environ)


def test_data_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder of the tests' real data, which is not part of the project."""
    return Path(_text(TEST_DATA, environ) or "../shared/data")


def child_environment(**changes: str) -> dict[str, str]:
    """Return a copy of this process's environment for a child, with ``changes`` applied."""
    return {**os.environ, **changes}


def outside_of_job() -> dict[str, str]:
    """Return a copy of this process's environment without what makes it a worker of its job."""
    return {name: value for name, value in os.environ.items() if not _OF_THE_JOB.fullmatch(name)}


def reportable(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the environment variables that a bug report may show, sorted; the values of secrets are not.

    Example:
        >>> reportable({"NCCL_DEBUG": "INFO", "SHOAL_SECRET": "0123456789abcdef", "MY_NOTES": "private"})
        {'NCCL_DEBUG': 'INFO', 'SHOAL_SECRET': '<removed>'}
    """
    environ = os.environ if environ is None else environ
    return {
        name: "<removed>" if _SECRET_NAME.search(name) else value
        for name, value in sorted(environ.items())
        if _REPORTED.fullmatch(name)
    }


def secret_values(environ: Mapping[str, str] | None = None) -> set[str]:
    """Return the values of variables whose name is that of a secret, and the content of the secret's file.

    Of a value of several lines each line is one, too.
    """
    environ = os.environ if environ is None else environ
    values = [value for name, value in environ.items() if _SECRET_NAME.search(name.upper())]
    if path := environ.get(SECRET_FILE):
        with suppress(OSError), Path(path).open("rb") as file:
            values.append(file.read(_SECRET_BYTES[1] + 3).decode(errors="surrogateescape"))
    texts = {text.strip() for value in values for text in (value, *value.splitlines())}
    return {text for text in texts if len(text) >= _SHORTEST_SECRET}


def num_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cores_per_worker(environ: Mapping[str, str] | None = None) -> int:
    """Return this process's share of its host's cores; 0 if no launcher says how many workers there are."""
    environ = os.environ if environ is None else environ
    for local in ("LOCAL_WORLD_SIZE", *(names[3] for names in _MPI_NAMES.values())):
        size = environ.get(local, "")
        if size.isascii() and size.isdigit() and int(size):
            return num_cores() // int(size)
    return 0


def compiler_problem(environ: Mapping[str, str] | None = None) -> str:
    """Return the missing requirement of torch.compile for GPU kernels, and its remedy; else empty.

    Triton compiles the launcher of each kernel as an extension module in C.
    """
    if not _text("CC", environ) and not any(map(shutil.which, ("gcc", "clang"))):
        return "torch.compile needs a C compiler on the host of a GPU: apt-get install gcc, or set CC"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        return f"torch.compile needs {header} on the host of a GPU: apt-get install python3-dev"
    return ""


def _text(name: str, environ: Mapping[str, str] | None) -> str | None:
    return (os.environ if environ is None else environ).get(name) or None


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = environ.get(name)
    if value is None:
        if default is None:
            raise UsageError(f"the environment variable {name} is not set; the launcher must set it")
        return default
    if not value.isdecimal():
        raise UsageError(f"the environment variable {name}={value!r} must be a whole number of at least 0")
    return int(value)


def num_gpus() -> int:
    """Return the number of GPUs of this host. Torch, slow to import, is asked only if there is a driver."""
    if not any(Path(file).exists() for file in (*GPU_DEVICES, _WSL_DEVICE)):
        return 0
    from torch import cuda

    return cuda.device_count()
