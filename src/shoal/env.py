"""The only reader of environment variables.

A worker learns its place from whoever started it: torchrun's names first, then those of Open MPI, MPICH
and Intel MPI. Nothing else in the package looks at ``os.environ``; a test greps for it.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import UsageError

LAUNCH_DIR = "SHOAL_LAUNCH_DIR"
"""Folder that the launcher of this host shares with its workers: process ids, error files."""

STORE_FILE = "SHOAL_STORE_FILE"
"""File in which the workers of one host meet (torch's ``FileStore``), so that nobody listens on a port."""

TEST_DATA = "SHOAL_TEST_DATA"

SECRET_FILE = "SHOAL_SECRET_FILE"
"""A file that holds the job's secret, known to its workers and servers."""
SECRET = "SHOAL_SECRET"
"""The secret itself. The weaker form: each child process inherits it, and /proc/PID/environ shows it."""
MAKE_SECRET = "(umask 077; head -c 32 /dev/urandom | base64 > job.secret)"
"""A command that makes a secret's file."""
HELPERS = "SHOAL_HELPERS"
"""Servers on helper hosts: ``10.0.0.7:4400,10.0.0.8:4400*2.0``, the second with twice the bandwidth."""
INTERFACE = "SHOAL_INTERFACE"
"""Address or name of the network interface on which the backend listens."""
TRANSPORT = "SHOAL_TRANSPORT"
"""What carries the backend's chunks: ``tcp``, or ``ofi:`` and libfabric's providers; alike on all hosts."""
HOST_ID = "SHOAL_HOST_ID"
"""Overrides what tells whether two workers share a host; tests make several hosts of one machine with it."""

_SLURM_JOB_ID = "SLURM_JOB_ID"

# (rank, number of workers, local rank, local number of workers) as each launcher names them
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
"""A shorter one could be found by trial, from what a handshake shows."""


@dataclass(frozen=True, kw_only=True)
class WorkerPlace:
    """The position of this process in the job."""

    rank: int
    num_workers: int
    local_rank: int
    num_local_workers: int

    @property
    def is_main(self) -> bool:
        """True for the worker that prints, writes the record and owns the run directory."""
        return self.rank == 0


@dataclass(frozen=True, kw_only=True)
class HelperAddress:
    """Where a server on a helper host listens, and its bandwidth as a multiple of a worker host's.

    A bandwidth of ``None`` is to be measured.
    """

    address: str
    port: int
    bandwidth: float | None = None


@dataclass(frozen=True, kw_only=True)
class WorkerEnv:
    """The place of a process that somebody has started as a worker, and where the workers meet."""

    place: WorkerPlace
    master_addr: str
    master_port: int
    launcher: str
    store_file: Path | None = None
    """The file in which the workers of one host meet; the address and the port then mean nothing."""

    @property
    def init_method(self) -> str:
        """The URL at which ``init_process_group`` finds the store."""
        if self.store_file is not None:
            return f"file://{self.store_file}"
        return f"tcp://{self.master_addr}:{self.master_port}"


def worker_env(environ: Mapping[str, str] | None = None) -> WorkerEnv | None:
    """Return this process's place if a launcher has set one, else ``None``.

    Raises:
        UsageError: a variable is missing or is not a number in its range.
    """
    environ = os.environ if environ is None else environ
    if "RANK" in environ and "WORLD_SIZE" in environ:
        names, launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"), "torchrun"
    else:
        mpi = [item for item in _MPI_NAMES.items() if item[1][0] in environ and item[1][1] in environ]
        if not mpi:
            return None
        launcher, names = mpi[0]
    rank, num_workers = (_number(environ, name) for name in names[:2])
    local_rank = _number(environ, names[2], default=rank)
    num_local = _number(environ, names[3], default=num_workers)
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


def alone(folder: Path) -> WorkerEnv:
    """Return the place of a process that is the only worker; its store is a file in ``folder``."""
    place = WorkerPlace(rank=0, num_workers=1, local_rank=0, num_local_workers=1)
    return WorkerEnv(
        place=place, master_addr="127.0.0.1", master_port=0, launcher="none", store_file=folder / "store"
    )


def launch_dir(environ: Mapping[str, str] | None = None) -> Path | None:
    """Return the folder shared with our own launcher, or ``None`` under another one."""
    value = (os.environ if environ is None else environ).get(LAUNCH_DIR)
    return Path(value) if value else None


def secret(environ: Mapping[str, str] | None = None) -> bytes | None:
    """Return the job's secret from ``SHOAL_SECRET`` or the file ``SHOAL_SECRET_FILE``, or ``None``.

    Raises:
        UsageError: the file cannot be read, or others can read it; or the secret is too short.
    """
    environ = os.environ if environ is None else environ
    source, path = SECRET, environ.get(SECRET_FILE)
    value = environ.get(SECRET, "").encode(errors="surrogateescape")
    if SECRET not in environ:
        if path is None:
            return None
        source, value = f"{SECRET_FILE}={path}", _read_secret(path)
    value = value.strip()
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
            status = os.fstat(file.fileno())  # of the file itself, where Kubernetes mounts a link to it
            value = file.read(_SECRET_BYTES[1] + 3)  # a line break more is none of it
    except OSError as problem:
        raise UsageError(f"{SECRET_FILE}={path} cannot be read: {problem.strerror}") from None
    mode = stat.S_IMODE(status.st_mode)
    in_group = status.st_gid in {os.getegid(), *os.getgroups()}
    if mode & (0o006 if in_group else 0o066):
        raise UsageError(
            f"{SECRET_FILE}={path} has the mode {mode:04o}, so that other users can read or change it; "
            f"chmod 600 {path} (a secret that Kubernetes mounts: defaultMode: 0440)"
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
        place, _, factor = entry.partition("*")
        address, _, port = place.rpartition(":")
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


@contextmanager
def without(*names: str) -> Iterator[None]:
    """Take variables out of this process's environment in this block, and so out of its children's."""
    values = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(values)


def interface(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the address or interface name in ``SHOAL_INTERFACE``, or ``None``."""
    return (os.environ if environ is None else environ).get(INTERFACE) or None


def transport(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the transport that ``SHOAL_TRANSPORT`` names, or ``None``."""
    return (os.environ if environ is None else environ).get(TRANSPORT) or None


def host_id(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the host identity that ``SHOAL_HOST_ID`` imposes, or ``None``."""
    return (os.environ if environ is None else environ).get(HOST_ID) or None


def job_id(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the scheduler's name for this job, which a job that is started again keeps, or ``None``."""
    return (os.environ if environ is None else environ).get(_SLURM_JOB_ID) or None


def test_data_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Return where tests look for real data that is not part of the project."""
    return Path((os.environ if environ is None else environ).get(TEST_DATA, "../shared/data"))


def child_environment(**changes: str) -> dict[str, str]:
    """Return a copy of this process's environment for a child, with ``changes`` applied."""
    return {**os.environ, **changes}


def _number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = environ.get(name)
    if value is None:
        if default is None:
            raise UsageError(f"the environment variable {name} is not set; the launcher must set it")
        return default
    if not value.isdecimal():
        raise UsageError(f"the environment variable {name}={value!r} must be a whole number of at least 0")
    return int(value)
