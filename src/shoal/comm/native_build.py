"""Compiles a library against ``libshoal.so`` when it is first used, into a cache.

For code that needs the headers of an installed package (torch, jaxlib): it then fits the version that is
there, and no wheel has to fit all of them. It is built once per version, machine and compiler, into
``$SHOAL_CACHE_DIR``, else ``~/.cache/shoal``. One process of a host builds, the others wait. What is in the
cache needs no compiler. Imports neither torch nor NumPy.

What is loaded is code, so its folder has mode 0700 and is opened once; all is done through the descriptor.
"""

from __future__ import annotations

import hashlib
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shoal import native
from shoal.atomic_io import check_private, open_private_folder, take_lock
from shoal.env import machine, settings
from shoal.env.settings import CACHE_DIR
from shoal.errors import ShoalError, UsageError

TREE_CALL = Path(__file__).parent / "native_call"
"""Folder of the header on which the libraries for JAX and TensorFlow are built."""
_LIMIT_S = 900
_FAILED = "failed.txt"
_MOST_LINES = 3
"""Lines of the compiler's output in an error."""
_REMEDY = f"delete it, or set {CACHE_DIR} to a folder of yours"
_OPEN: dict[Path, Path] = {}
"""Folders that this process has opened, by their descriptors: the loader knows a library by its path."""


class CannotBuildError(ShoalError):
    """A library could not be built; the message says why."""


class NoCompilerError(CannotBuildError, UsageError):
    """There is no C++ compiler."""


class _KilledError(CannotBuildError):
    """The compiler was ended by a signal."""


@dataclass(frozen=True)
class Library:
    """A library of shoal's that is compiled on first use.

    Attributes:
        title: its name in the message that says that it is built.
        kind: beginning of the names of its folders in the cache.
        name: of the file, without suffix.
        sources: folder of its ``.cc`` and ``.h`` files.
        versions: all that a build depends on but sources, ``shoal.h`` and the compiler.
        includes: folders of headers that are not shoal's.
        shared: folders of headers of shoal's that several libraries use.
        flags: of the compiler, besides those of every library.
        links: arguments of the linker, besides ``libshoal.so``.
    """

    title: str
    kind: str
    name: str
    sources: Path
    versions: tuple[str, ...]
    includes: tuple[Path, ...]
    shared: tuple[Path, ...] = ()
    flags: tuple[str, ...] = ()
    links: tuple[str, ...] = ()


def build(library: Library) -> Path:
    """Return the file of a compiled library, in a folder that stays open; build it if the cache lacks it.

    Raises:
        CannotBuildError: the compiler failed, now or before, or the cache cannot be written.
        NoCompilerError: there is no compiler, and the cache does not have it.
        UsageError: no folder for the cache is known, or other users may write to it or to the library.
    """
    package = _package()
    key, file = _key(library, package), f"{library.name}.so"
    try:
        compiler = _compiler()
    except NoCompilerError:
        for built in filter(_is_whole, _built_elsewhere(library, key)):
            return _checked(_private_folder(built.parent) / file, built)
        raise
    name = _folder(library, key, compiler)
    folder = _private_folder(name)
    target, failed = folder / file, folder / _FAILED
    with _locked(folder / "lock"):
        if failed.exists():
            raise CannotBuildError(
                f"{failed.read_text()} (from {name / failed.name}; delete it to try again)"
            )
        if not _is_whole(target):
            print(f"shoal: building {library.title} in {name}, once", file=sys.stderr, flush=True)
            try:
                _compile(library, compiler, package, target)
            except _KilledError:  # as when a job is preempted: says nothing about the next time
                raise
            except CannotBuildError as problem:
                failed.write_text(str(problem))
                raise
    return _checked(target, name / file)


def not_loaded(file: Path, problem: Exception) -> CannotBuildError:
    """Return the error for a built library that the system does not load, such as a damaged one.

    Args:
        file: that :func:`build` returned.
        problem: what its loader said.
    """
    folder = file.parent.resolve()
    reason = str(problem).replace(str(file), file.name)
    return CannotBuildError(
        f"{folder / file.name} cannot be loaded ({reason}); delete {folder}, or set {CACHE_DIR} to a folder "
        "of yours on a file system that may hold programs (no noexec)"
    )


def obstacle(library: Library) -> str:
    """Return why :func:`build` would fail, if that is known without building; else an empty string."""
    try:
        key = _key(library, _package())
        try:
            failed = _folder(library, key, _compiler()) / _FAILED
        except NoCompilerError as problem:
            return "" if _built_elsewhere(library, key) else str(problem)
        return failed.read_text() if failed.is_file() else ""
    except (CannotBuildError, UsageError, OSError) as problem:
        return str(problem)


def _package() -> Path:
    """Return the folder of the compiled core, with the library and its header."""
    package = Path(native.core().__file__ or "").parent
    shoal, header = package / "lib" / "libshoal.so", package / "include" / "shoal.h"
    if not (shoal.exists() and header.exists() and hasattr(native.core().Engine, "c_group")):
        raise CannotBuildError(f"{shoal} is missing: shoal was built before it had one; reinstall shoal")
    return package


def _built_elsewhere(library: Library, key: str) -> list[Path]:
    """Return libraries in the cache by any compiler, as in a container whose image was built with one."""
    return sorted(settings.cache_dir().glob(f"{library.kind}-{key}-*/{library.name}.so"))


def _folder(library: Library, key: str, compiler: Path) -> Path:
    return settings.cache_dir() / f"{library.kind}-{key}-{_compiler_key(compiler)}"


def _compiler() -> Path:
    for name in (machine.compiler(), "c++", "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return Path(path).resolve()
    raise NoCompilerError("no C++ compiler is found; install g++ or clang++, or set CXX")


def _sources(library: Library) -> list[Path]:
    folders = (library.sources, *library.shared)
    return sorted(path for folder in folders for path in folder.iterdir() if path.suffix in {".cc", ".h"})


def _compiler_key(compiler: Path) -> str:
    status = compiler.stat()
    return hashlib.sha256(f"{compiler}\0{status.st_size}\0{status.st_mtime_ns}".encode()).hexdigest()[:8]


def _key(library: Library, package: Path) -> str:
    """Return a hash of all that a build depends on but the compiler."""
    header = package / "include" / "shoal.h"
    digest = hashlib.sha256("\0".join(library.versions).encode())
    for path in (*_sources(library), header):
        digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _private_folder(folder: Path) -> Path:
    """Return the path, by its descriptor, of a folder that only this user can write; make it if missing."""
    try:
        return _opened_folder(folder)
    except OSError as problem:
        raise CannotBuildError(f"{problem}; set {CACHE_DIR} to a folder of yours") from None


def _opened_folder(folder: Path) -> Path:
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = folder.parent.stat().st_mode
    if mode & (stat.S_IWGRP | stat.S_IWOTH) and not mode & stat.S_ISVTX:
        raise UsageError(
            f"{folder.parent} has the mode {stat.S_IMODE(mode):04o}: other users may exchange the code that "
            f"is built in it; chmod go-w (or +t) {folder.parent}, or set {CACHE_DIR} to a folder of yours"
        )
    if folder not in _OPEN:
        _OPEN[folder] = Path(f"/proc/self/fd/{open_private_folder(folder, _REMEDY)}")
    return _OPEN[folder]


def _is_whole(file: Path) -> bool:
    """Return whether a library has the bytes that were built: to load one cut short ends the process."""
    digest = _digest_of(file)
    return file.exists() and digest.exists() and digest.read_text() == _hash(file)


def _digest_of(file: Path) -> Path:
    return file.with_suffix(".sha256")


def _hash(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _checked(file: Path, name: Path) -> Path:
    """Return the file of a library in a private folder, if no other user may write to it."""
    check_private(name, file.lstat(), _REMEDY)
    return file


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        take_lock(file.fileno(), path, wait=True)
        yield  # closing the file releases the lock


def _compile(library: Library, compiler: Path, package: Path, target: Path) -> None:
    includes = (library.sources, *library.shared, package / "include", *library.includes)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        built = Path(folder) / target.name
        command = [
            str(compiler), "-O2", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", "-w", "-pthread",
            *library.flags, *(flag for path in includes for flag in ("-isystem", str(path))),
            *(str(path) for path in _sources(library) if path.suffix == ".cc"),
            *library.links, f"-L{package / 'lib'}", "-lshoal", "-o", built.name,
        ]  # fmt: skip
        try:
            run = subprocess.run(
                command, capture_output=True, text=True, timeout=_LIMIT_S, cwd=folder, check=False
            )
        except subprocess.TimeoutExpired:
            raise CannotBuildError(f"{compiler} took more than {_LIMIT_S} s") from None
        if run.returncode < 0:
            raise _KilledError(f"{compiler} was ended by signal {-run.returncode}")
        if run.returncode != 0:
            errors = [line for line in run.stderr.splitlines() if "error" in line] or run.stderr.splitlines()
            raise CannotBuildError(f"{compiler} failed: " + "; ".join(errors[:_MOST_LINES]))
        built.chmod(0o700)
        _digest_of(target).write_text(_hash(built))
        built.replace(target)
