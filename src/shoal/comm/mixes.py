"""Groups for which torch was asked to make several backends, one for each type of device."""

from __future__ import annotations

from typing import Any

from torch.distributed import distributed_c10d

from shoal.comm import BACKEND_NAME
from shoal.errors import UsageError

_OF_ACCELERATORS = ("nccl", "xccl", "ucc", "mpi")


def refuse_other_backends(meeting: Any) -> None:
    """See that no other backend was to serve CUDA tensors.

    ``meeting`` is torch's ``DistributedBackendOptions``.
    torch replaces the whole group by one that is written in Python, so that this backend would silently serve
    what another one was asked to. For CPU tensors it does so.

    Raises:
        UsageError: another backend was asked for.
    """
    group = getattr(meeting, "process_group", None)
    if group is None:  # torch 2.11: the configuration is known once the group is registered
        return
    # Those that torch has made are in the group; of those to come the accelerator's is the default.
    _refuse(
        [
            *(group._get_backend(each).name() for each in group._device_types if each.type != "cpu"),
            group.name(),
        ]
    )


def refuse_configuration(group: Any) -> None:
    """See the same of a registered group, before its first operation.

    Raises:
        UsageError: another backend was asked for.
    """
    configuration = distributed_c10d._world.pg_backend_config.get(group, "")
    _refuse([each.rpartition(":")[2] for each in configuration.split(",")])


def _refuse(names: list[str]) -> None:
    for name in names:
        if name in _OF_ACCELERATORS:
            raise UsageError(
                f"the backend of this group mixes {BACKEND_NAME} and {name}; torch lets a group have one "
                f"backend where {BACKEND_NAME} is among them, and {name} would not be used: write "
                f'"{BACKEND_NAME}" for CPU and CUDA tensors, or make two groups, '
                f'init_process_group("{name}") and new_group(backend="{BACKEND_NAME}") for the CPU tensors'
            )
