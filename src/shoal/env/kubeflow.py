"""Pods of Kubeflow's PyTorchJob and TrainJob, which number hosts by torchrun's variables or options."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.env import torchrun
from shoal.env.variables import Environ, number, variables_of


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
    if size and torchrun.counts_hosts(environ):  # older versions set no PET_NNODES
        return KubeflowHost(number=number(environ, "RANK"), num_hosts=size, num_workers=None)
    return None
