"""Builds, loads and creates the process group in C++ (``native/``), which calls the engine without Python.

It is built when the first group is made, once per torch, Python and compiler, into a cache:
``$SHOAL_CACHE_DIR``, else ``~/.cache/shoal``. One process of a host builds, the others wait. Where it cannot
be built, a line of the log says why, once per host, and the group in Python (``backend.ShoalProcessGroup``)
does everything. The bits are the same, and ranks with and without it work together. ``SHOAL_NATIVE_GROUP=0``
chooses the group in Python.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from shoal import env, native
from shoal.comm.engine import Engine
from shoal.errors import UsageError

_log = logging.getLogger(__name__)
_NAME = "shoal_torch"
_SOURCES = Path(__file__).parent / "native"
_BUILD_LIMIT_S = 900
_MOST_LINES = 3
"""Lines of the compiler's output in the log."""


class _CannotBuildError(Exception):
    """The native group is not available; the message says why."""


class _KilledError(_CannotBuildError):
    """The compiler was ended by a signal."""


@cache
def load() -> ModuleType | None:
    """Return the compiled module, built if the cache lacks it; ``None`` if the group in Python is to be used.

    Raises:
        UsageError: an environment variable is wrong.
    """
    if not env.native_group():
        return None
    try:
        module = _import(build())
    except (_CannotBuildError, UsageError, OSError, ImportError) as problem:
        _log.log(
            logging.WARNING if _is_first_of_host() else logging.DEBUG,
            "backend shoal uses its process group in Python, which takes longer for small tensors: %s",
            problem,
        )
        return None
    atexit.register(module.end)
    return module


def wrap(group: Any) -> Any:
    """Return the C++ backend of a ``ShoalProcessGroup``, which it then owns; without it, the group itself."""
    module = load()
    if module is None:
        return group
    engine = group.engine
    return module.create(
        group,
        group.operations.idle,
        engine.c_group() if isinstance(engine, Engine) else 0,
        group.getRank(),
        group.getSize(),
        group.operations.timeout,
        group.member.options.ordered_callbacks,
    )


def python_group(group: Any) -> Any:
    """Return the ``ShoalProcessGroup`` of a process group, for what only shoal's groups have.

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
    counts = Counter(python_group(group).engine.counters())
    if (backend := native_backend(group)) is not None:
        counts.update(sys.modules[_NAME].own_counters(backend))
    return dict(counts)


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

    Raises:
        OSError: the cache cannot be written.
        UsageError: no folder for the cache is known.
    """
    package = Path(native.core().__file__ or "").parent
    library, header = package / "lib" / "libshoal.so", package / "include" / "shoal.h"
    if not (library.exists() and header.exists() and hasattr(native.core().Engine, "c_group")):
        raise _CannotBuildError(f"{library} is missing: shoal was built before it had one; reinstall shoal")
    key = _key(header)
    try:
        compiler = _compiler()
    except _CannotBuildError:  # as in a container's image, where it was built when the image was made
        for module in sorted(env.cache_dir().glob(f"group-{key}-*/{_NAME}.so")):
            return _private_folder(module.parent) / module.name
        raise
    folder = _private_folder(env.cache_dir() / f"group-{key}-{_compiler_key(compiler)}")
    module, failed = folder / f"{_NAME}.so", folder / "failed.txt"
    with _locked(folder / "lock"):
        if failed.exists():
            raise _CannotBuildError(f"{failed.read_text()} (from {failed}; delete it to try again)")
        if not module.exists():
            print(f"shoal: building its process group in {folder}, once", file=sys.stderr, flush=True)
            try:
                _compile(compiler, package, module)
            except _KilledError:  # as when a job is preempted: says nothing about the next time
                raise
            except _CannotBuildError as problem:
                failed.write_text(str(problem))
                raise
    return module


def _is_first_of_host() -> bool:
    worker = env.worker_env()
    return worker is None or worker.place.local_rank == 0


def _compiler() -> Path:
    for name in (env.compiler(), "c++", "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return Path(found).resolve()
    raise _CannotBuildError("no C++ compiler is found; install g++ or clang++, or set CXX")


def _sources() -> list[Path]:
    return sorted(path for path in _SOURCES.iterdir() if path.suffix in {".cc", ".h"})


def _compiler_key(compiler: Path) -> str:
    status = compiler.stat()
    return hashlib.sha256(f"{compiler}\0{status.st_size}\0{status.st_mtime_ns}".encode()).hexdigest()[:8]


def _key(header: Path) -> str:
    """Return a hash of all that a build depends on but the compiler."""
    parts = [
        torch.__version__, str(torch.compiled_with_cxx11_abi()), str(Path(torch.__file__).parent),
        sys.implementation.cache_tag, sysconfig.get_config_var("SOABI"), platform.machine(),
    ]  # fmt: skip
    digest = hashlib.sha256("\0".join(map(str, parts)).encode())
    for path in (*_sources(), header):
        digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _private_folder(folder: Path) -> Path:
    """Create a folder that only this user can write: what is in it is loaded into the process."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise _CannotBuildError(
            f"{folder} can be written by other users; delete it, or set {env.CACHE_DIR} to a folder of yours"
        )
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file releases the lock


def _compile(compiler: Path, package: Path, target: Path) -> None:
    root = Path(torch.__file__).parent
    includes = [
        _SOURCES, package / "include", root / "include", root / "include/torch/csrc/api/include",
        Path(sysconfig.get_paths()["include"]),
    ]  # fmt: skip
    abi = int(torch.compiled_with_cxx11_abi())
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        command = [
            str(compiler), "-O2", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", "-w", "-pthread",
            f"-D_GLIBCXX_USE_CXX11_ABI={abi}", f"-DTORCH_EXTENSION_NAME={_NAME}", *_pybind_flags(),
            *(flag for path in includes for flag in ("-isystem", str(path))),
            *(str(path) for path in _sources() if path.suffix == ".cc"),
            f"-L{root / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-ltorch", "-lc10",
            f"-L{package / 'lib'}", "-lshoal", "-o", str(made),
        ]  # fmt: skip
        try:
            run = subprocess.run(
                command, capture_output=True, text=True, timeout=_BUILD_LIMIT_S, cwd=folder, check=False
            )
        except subprocess.TimeoutExpired:
            raise _CannotBuildError(f"{compiler} took more than {_BUILD_LIMIT_S} s") from None
        if run.returncode < 0:
            raise _KilledError(f"{compiler} was ended by signal {-run.returncode}")
        if run.returncode != 0:
            errors = [line for line in run.stderr.splitlines() if "error" in line] or run.stderr.splitlines()
            raise _CannotBuildError(f"{compiler} failed: " + "; ".join(errors[:_MOST_LINES]))
        made.replace(target)


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
        raise _CannotBuildError(f"{path} is no extension module of this Python")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules[_NAME] = module
    return module
