"""The only reader of environment variables.

A worker learns its place from whoever started it: torchrun's names first, then those of Open MPI, MPICH
and Intel MPI. Nothing else in the package looks at ``os.environ``; a test greps for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shoal.cluster import WorkerPlace
from shoal.errors import UsageError

LAUNCH_DIR = "SHOAL_LAUNCH_DIR"
"""Folder that the launcher of this host shares with its workers: process ids, error files."""

TEST_DATA = "SHOAL_TEST_DATA"

SECRET = "SHOAL_SECRET"
"""The job's secret, known to its workers and servers."""
SECRET_FILE = "SHOAL_SECRET_FILE"
"""A file that holds it."""
HELPERS = "SHOAL_HELPERS"
"""Servers on helper hosts: ``10.0.0.7:4400,10.0.0.8:4400*2.0``, the second with twice the bandwidth."""
INTERFACE = "SHOAL_INTERFACE"
"""Address or name of the network interface on which the backend listens."""
TRANSPORT = "SHOAL_TRANSPORT"
"""What carries the backend's chunks: ``tcp``, or ``ofi:`` and libfabric's providers; alike on all hosts."""
HOST_ID = "SHOAL_HOST_ID"
"""Overrides what tells whether two workers share a host; tests make several hosts of one machine with it."""

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


@dataclass(frozen=True, kw_only=True)
class HelperAddress:
    """Where a server on a helper host listens, and its bandwidth as a multiple of a worker host's.

    A bandwidth of ``None`` is to be measured.
    """

    address: str
    port: int
    bandwidth: float | None = None


@dataclass(frozen=True, kw_only=True)
class Joined:
    """The place of a process that somebody has started as a worker, and where the workers meet."""

    place: WorkerPlace
    master_addr: str
    master_port: int
    launcher: str


def joined(environ: Mapping[str, str] | None = None) -> Joined | None:
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
    addr = environ.get("MASTER_ADDR", "")
    if not addr:
        if num_local != num_workers:
            raise UsageError(
                f"{launcher} started {num_workers} workers on several hosts but MASTER_ADDR is not set; "
                "export the address of the host of rank 0 to all of them"
            )
        addr = "127.0.0.1"
    return Joined(
        place=WorkerPlace(
            rank=rank, num_workers=num_workers, local_rank=local_rank, num_local_workers=num_local
        ),
        master_addr=addr,
        master_port=_number(environ, "MASTER_PORT", default=_DEFAULT_PORT),
        launcher=launcher,
    )


def launch_dir(environ: Mapping[str, str] | None = None) -> Path | None:
    """Return the folder shared with our own launcher, or ``None`` under another one."""
    value = (os.environ if environ is None else environ).get(LAUNCH_DIR)
    return Path(value) if value else None


def secret(environ: Mapping[str, str] | None = None) -> bytes | None:
    """Return the job's secret from ``SHOAL_SECRET`` or the file ``SHOAL_SECRET_FILE``, or ``None``.

    Raises:
        UsageError: the file cannot be read, or the secret is empty.
    """
    environ = os.environ if environ is None else environ
    name, value = SECRET, environ.get(SECRET)
    if value is None:
        name, path = SECRET_FILE, environ.get(SECRET_FILE)
        if path is None:
            return None
        try:
            value = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            raise UsageError(f"{name}={path} cannot be read as text: {problem}") from None
    if not value.strip():
        raise UsageError(f"{name} holds no secret; put a long random text there, the same on all hosts")
    return value.strip().encode()


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
def without_helpers() -> Iterator[None]:
    """Make groups in this block without helper hosts."""
    value = os.environ.pop(HELPERS, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[HELPERS] = value


def interface(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the address or interface name in ``SHOAL_INTERFACE``, or ``None``."""
    return (os.environ if environ is None else environ).get(INTERFACE) or None


def transport(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the transport that ``SHOAL_TRANSPORT`` names, or ``None``."""
    return (os.environ if environ is None else environ).get(TRANSPORT) or None


def host_id(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the host identity that ``SHOAL_HOST_ID`` imposes, or ``None``."""
    return (os.environ if environ is None else environ).get(HOST_ID) or None


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
