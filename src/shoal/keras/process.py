"""Joins this process to the others, as Keras' backend requires, and returns its rank."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import keras

from shoal.comm.engine import EngineOptions
from shoal.comm.job_group import TIMEOUT_S, GlobalGroup, JobGroup
from shoal.comm.store import Store
from shoal.errors import UsageError

if TYPE_CHECKING:
    from shoal.comm.device_tensors import DeviceTensors
    from shoal.comm.devices import Device


def _open_cuda(device: Any) -> Device:
    from shoal.comm.cuda_device import CudaDevice

    return CudaDevice(device)


DEVICES: dict[str, Callable[[Any], Device]] = {"cuda": _open_cuda}
"""Opens the devices of torch whose tensors pass through the lane, by their types."""
_on_devices: dict[Any, DeviceTensors] = {}


def _leave_devices() -> None:
    while _on_devices:
        _on_devices.popitem()[1].close()


_of_torch = GlobalGroup("shoal.keras", finish=_leave_devices)
_MODULES = {"jax": "shoal.jax.process", "tensorflow": "shoal.tensorflow.process"}


def backend() -> str:
    """Return Keras' backend: tensorflow, jax or torch.

    Raises:
        UsageError: it is another one.
    """
    name = str(keras.config.backend())
    if name not in (*_MODULES, "torch"):
        raise UsageError(
            f"Keras' backend is {name}; shoal.keras trains with tensorflow, jax and torch: set KERAS_BACKEND"
        )
    return name


def _process() -> Any:
    name = backend()
    return import_module(_MODULES[name]) if name in _MODULES else _of_torch


def init(
    *, timeout_s: float = TIMEOUT_S, options: EngineOptions | None = None, store: Store | None = None
) -> None:
    """Join the processes that the launcher has started together; again: does nothing.

    It is ``init`` of :mod:`shoal.jax` or :mod:`shoal.tensorflow` on these backends, whose collectives can
    then be used too.

    Args:
        timeout_s: limit for each rank's arrival and for each collective, in seconds.
        options: of the engine, the same on all ranks.
        store: that all ranks reach already, such as the one of a ``torch.distributed`` group; ``None``: rank
            0 makes one.

    Raises:
        CommError: a rank did not come in time, or has another secret.
        UsageError: it was called before with other options, an environment variable is wrong,
            rank 0's port is taken, or on
            JAX's backend there is no C++ compiler.

    Example:
        >>> import shoal.keras as sk
        >>> sk.init()
        >>> sk.rank(), sk.size()
        (0, 1)
        >>> sk.shutdown()
    """
    _process().init(timeout_s=timeout_s, options=options, store=store)


def shutdown() -> None:
    """Wait for the collectives of this process, and leave the others. A program's end does it too."""
    _process().shutdown()


def is_initialized() -> bool:
    """Return whether :func:`init` was called."""
    return bool(_process().is_initialized())


def group() -> JobGroup:
    """Return the group of all processes.

    Raises:
        UsageError: :func:`init` was not called.
    """
    job_group: JobGroup = _process().group()
    return job_group


def on_device(device: Any) -> DeviceTensors | None:
    """Return the collectives on tensors of torch on a device; ``None`` for those of CPUs.

    Raises:
        UsageError: it is neither a CPU nor a CUDA device, or :func:`init` was not called.
    """
    if device.type not in DEVICES:
        if device.type == "cpu":
            return None
        raise UsageError(
            f"a gradient is on {device}, and shoal.keras is for tensors on CPUs and on CUDA devices; choose "
            "one with keras.device"
        )
    if device not in _on_devices:
        from shoal.comm.device_tensors import DeviceTensors

        _on_devices[device] = DeviceTensors(DEVICES[device.type](device), group())
    return _on_devices[device]


def rank() -> int:
    """Return the rank of this process, from 0 to :func:`size` - 1.

    Raises:
        UsageError: :func:`init` was not called.
    """
    return group().rank


def size() -> int:
    """Return the number of processes.

    Raises:
        UsageError: :func:`init` was not called.
    """
    return group().size


def local_rank() -> int:
    """Return the rank of this process among those of its host.

    Raises:
        UsageError: :func:`init` was not called.
    """
    return group().local_rank


def local_size() -> int:
    """Return the number of processes on this host.

    Raises:
        UsageError: :func:`init` was not called.
    """
    return group().local_size


def barrier() -> None:
    """Wait until all ranks have called it.

    Raises:
        CommError: a rank was lost, or did not come in time.
        UsageError: :func:`init` was not called.
    """
    group().barrier()
