"""Reads torchrun's variables: RANK and WORLD_SIZE count workers, or hosts in Kubeflow's PyTorchJob.

Pods of PyTorchJob and TrainJob number hosts by these variables or by those of torchrun's options, PET_….
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import ip_address

from shoal.env.variables import Environ, number, variables_of, without_brackets
from shoal.env.worker import RankNames, WorkerEnv, read_worker
from shoal.errors import UsageError

NAMES = RankNames("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def torchrun_worker(environ: Mapping[str, str]) -> WorkerEnv | None:
    """Return the worker that torchrun, or a launcher with the same variables, has started, or ``None``.

    Raises:
        UsageError: a variable is missing or out of its range.
    """
    if NAMES.rank not in environ or NAMES.num_workers not in environ:
        return None
    return read_worker(environ, "torchrun", NAMES, one_per_host=counts_hosts(environ))


def counts_hosts(environ: Mapping[str, str]) -> bool:
    """Return whether RANK and WORLD_SIZE, without the local ones, number hosts with a worker each.

    They do in the pods of Kubeflow's PyTorchJob, where MASTER_ADDR names the first; with the address of this
    host itself, or none, they number workers on this host.

    Raises:
        UsageError: each of the hosts is to start several workers, by torchrun.
    """
    address = without_brackets(environ.get("MASTER_ADDR", ""))
    if not address or _is_this_host(address):
        return False
    if NAMES.local_rank in environ or NAMES.num_local_workers in environ:
        return False
    hosts, size = environ.get("PET_NNODES", ""), environ[NAMES.num_workers]
    if hosts.isdecimal() and size.isdecimal() and int(hosts) != int(size):
        raise UsageError(
            f"WORLD_SIZE={size} workers on PET_NNODES={hosts} hosts, and RANK counts hosts: start the "
            "command with shoal launch -- or torchrun, or set PET_NPROC_PER_NODE (nprocPerNode) to 1"
        )
    return True


def _is_this_host(address: str) -> bool:
    try:
        return ip_address(without_brackets(address)).is_loopback
    except ValueError:
        return address == "localhost"


@dataclass(frozen=True, kw_only=True)
class KubeflowHost:
    """A pod among those of a job of Kubeflow."""

    number: int
    num_hosts: int
    num_workers: int | None
    """Workers to start in it; ``None``: one per GPU."""


def kubeflow_host(environ: Environ = None) -> KubeflowHost | None:
    """Return this pod's number in a PyTorchJob or TrainJob, from torchrun's variables, or ``None``.

    Raises:
        UsageError: a variable is not a number.
    """
    environ = variables_of(environ)
    if "LOCAL_RANK" in environ or "LOCAL_WORLD_SIZE" in environ:  # of a worker that torchrun has started
        return None
    if environ.get("PET_NNODES", "").isdecimal() and "PET_NODE_RANK" in environ:
        workers = environ.get("PET_NPROC_PER_NODE", "")
        return KubeflowHost(
            number=number(environ, "PET_NODE_RANK"),
            num_hosts=int(environ["PET_NNODES"]),
            num_workers=int(workers) if workers.isdecimal() else None,
        )
    size = number(environ, "WORLD_SIZE", default=0) if "RANK" in environ else 0
    if size and counts_hosts(environ):  # older versions set no PET_NNODES
        return KubeflowHost(number=number(environ, "RANK"), num_hosts=size, num_workers=None)
    return None
