"""Builds, loads and creates the process group in C++ (``native/``), which calls the engine without Python.

It is built when the first group is created, once per torch, Python and compiler (``native_build``). If it
cannot be built, one log line per host has the reason, and the group in Python (``backend.ShoalProcessGroup``)
is used. The bits are the same, and ranks with and without it work together. ``SHOAL_NATIVE_GROUP=0`` selects
the group in Python.
"""

from __future__ import annotations

import importlib.util
import logging
import platform
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from shoal.comm import native_build
from shoal.env import settings
from shoal.env.launcher import worker_env
from shoal.errors import UsageError

_log = logging.getLogger(__name__)
_NAME = "shoal_torch"
_SOURCES = Path(__file__).parent / "native"


def load() -> ModuleType | None:
    """Return the compiled module, built if the cache lacks it; ``None`` if the group in Python is to be used.

    Raises:
        UsageError: an environment variable is wrong.
    """
    if not settings.native_group():
        return None
    group = _loaded()
    if isinstance(group, ModuleType):
        return group
    _say_once(group)
    return None


def problem() -> str:
    """Return why the process group in C++ does not load, built if the cache lacks it; empty if it does.

    Raises:
        UsageError: an environment variable is wrong.
    """
    if not settings.native_group():
        return f"{settings.NATIVE_GROUP} is 0"
    group = _loaded()
    return "" if isinstance(group, ModuleType) else group


@cache
def _loaded() -> ModuleType | str:
    """Return the compiled module, or why it does not load."""
    try:
        return _import(build())
    except (native_build.CannotBuildError, UsageError, OSError, ImportError) as error:
        return str(error)


@cache
def _say_once(reason: str) -> None:
    _log.log(
        logging.WARNING if _is_first_of_host() else logging.DEBUG,
        "backend shoal uses its process group in Python, which takes longer for small tensors: %s",
        reason,
    )


def wrap(group: Any) -> Any:
    """Return the C++ backend of a ``ShoalProcessGroup``, which it then owns; without it, the group itself."""
    module = load()
    if module is None:
        return group
    return module.create(
        group, group.operations.idle, group.engine.c_group(), group.getRank(), group.getSize(),
        group.operations.timeout,
    )  # fmt: skip


def python_group(group: Any) -> Any:
    """Return the ``ShoalProcessGroup`` of a process group, for methods that only shoal's groups have.

    Args:
        group: of ``torch.distributed``. Of a group of several backends, that of the CPU tensors counts.

    Returns:
        The group itself if its backend is not shoal's native one.
    """
    backend = native_backend(group)
    return group if backend is None else sys.modules[_NAME].python_group(backend)


def counters(group: Any) -> dict[str, int]:
    """Return the counters of a group's engine: bytes, frames, and operations by kind.

    Args:
        group: of ``torch.distributed``, or a ``ShoalProcessGroup``.
    """
    counts: dict[str, int] = python_group(group).engine.counters()
    return counts


def follow_rates(group: Any) -> bool:
    """Move sums away from servers that answer late. All ranks call it between the same two collectives.

    :class:`~shoal.train.run.Run` calls it every few steps. The bits of the sums stay the same.

    Args:
        group: of ``torch.distributed``, or a ``ShoalProcessGroup``.

    Returns:
        Whether the shares of the servers have changed; ``False`` within one host.

    Raises:
        CommError: the group failed, or a rank did not call it within the group's timeout.
        ValueError: servers keep weights of this group, which cannot move.
    """
    member = python_group(group)
    shares = member.engine.shares
    return shares is not None and shares.follow(member.operations.timeout.total_seconds())


def native_backend(group: Any) -> Any:
    """Return the native backend of a process group's CPU tensors, or ``None`` if it has none."""
    module = sys.modules.get(_NAME)
    if module is None or not isinstance(group, torch.distributed.ProcessGroup):
        return None
    for device in group._device_types:
        backend = group._get_backend(device)
        if isinstance(backend, torch._C._distributed_c10d.Backend) and module.is_native(backend):
            return backend
    return None


# ---- building -------------------------------------------------------------------------------------------


def build() -> Path:
    """Return the compiled module's file; build it if the cache does not have it.

    Errors are those of :func:`shoal.comm.native_build.build`.
    """
    return native_build.build(library())


def obstacle() -> str:
    """Return why the C++ group will not load, if that is known without building; else an empty string.

    Raises:
        UsageError: an environment variable is wrong.
    """
    return native_build.obstacle(library()) if settings.native_group() else f"{settings.NATIVE_GROUP} is 0"


def library() -> native_build.Library:
    """Return how the C++ group is compiled for this torch."""
    root = Path(torch.__file__).parent
    abi = torch.compiled_with_cxx11_abi()
    return native_build.Library(
        title="its process group",
        kind="group",
        name=_NAME,
        sources=_SOURCES,
        versions=(
            torch.__version__, str(abi), str(root),
            str(sys.implementation.cache_tag), str(sysconfig.get_config_var("SOABI")), platform.machine(),
        ),
        includes=(
            root / "include", root / "include/torch/csrc/api/include",
            Path(sysconfig.get_paths()["include"]),
        ),
        flags=(
            f"-D_GLIBCXX_USE_CXX11_ABI={int(abi)}", f"-DTORCH_EXTENSION_NAME={_NAME}", *_pybind_flags(),
        ),
        links=(f"-L{root / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10"),
    )  # fmt: skip


def _is_first_of_host() -> bool:
    worker = worker_env()
    return worker is None or worker.ranks.local_rank == 0


def _pybind_flags() -> list[str]:
    """Return the definitions by which an extension shares pybind11's types with torch before 2.9."""
    names = {
        name: getattr(torch._C, f"_PYBIND11_{name}", None)
        for name in ("COMPILER_TYPE", "STDLIB", "BUILD_ABI")
    }
    return [f'-DPYBIND11_{name}="{value}"' for name, value in names.items() if value is not None]


def _import(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(_NAME, path)
    if spec is None or spec.loader is None:
        raise native_build.CannotBuildError(f"{path} is no extension module of this Python")
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except (OSError, ImportError) as problem:
        raise native_build.not_loaded(path, problem) from None
    sys.modules[_NAME] = module
    return module
