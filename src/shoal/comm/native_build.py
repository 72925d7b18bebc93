"""Compiles a library against ``libshoal.so`` when it is first used, into a cache.

For code that needs the headers of an installed package (torch, jaxlib): it then fits the version that is
there, and no wheel has to fit all of them. It is built once per version, machine and compiler, into
``$SHOAL_CACHE_DIR``, else ``~/.cache/shoal``. One process of a host builds, the others wait. What is in the
cache needs no compiler. Imports neither torch nor NumPy.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shoal import env, native
from shoal.errors import ShoalError, UsageError

TREE_CALL = Path(__file__).parent / "native_call"
"""Folder of the header on which the libraries for JAX and TensorFlow are built."""
_LIMIT_S = 900
_MOST_LINES = 3
"""Lines of the compiler's output in an error."""


class CannotBuildError(ShoalError):
    """A library could not be built; the message says why."""


class NoCompilerError(CannotBuildError, UsageError):
    """No C++ compiler is found."""


class _KilledError(CannotBuildError):
    """The compiler was ended by a signal."""


@dataclass(frozen=True)
class Library:
    """A library of shoal's that is compiled on first use.

    Attributes:
        title: what it is, for the line that says that it is built.
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
    """Return the file of a compiled library; build it if the cache does not have it.

    Raises:
        CannotBuildError: the compiler failed, now or before, or the cache is not this user's.
        NoCompilerError: there is no compiler, and the cache does not have it.
        OSError: the cache cannot be written.
        UsageError: no folder for the cache is known.
    """
    package = Path(native.core().__file__ or "").parent
    shoal, header = package / "lib" / "libshoal.so", package / "include" / "shoal.h"
    if not (shoal.exists() and header.exists() and hasattr(native.core().Engine, "c_group")):
        raise CannotBuildError(f"{shoal} is missing: shoal was built before it had one; reinstall shoal")
    key, file = _key(library, header), f"{library.name}.so"
    try:
        compiler = _compiler()
    except NoCompilerError:  # as in a container's image, where it was built when the image was made
        for built in sorted(env.cache_dir().glob(f"{library.kind}-{key}-*/{file}")):
            return _private_folder(built.parent) / file
        raise
    folder = _private_folder(env.cache_dir() / f"{library.kind}-{key}-{_compiler_key(compiler)}")
    target, failed = folder / file, folder / "failed.txt"
    with _locked(folder / "lock"):
        if failed.exists():
            raise CannotBuildError(f"{failed.read_text()} (from {failed}; delete it to try again)")
        if not target.exists():
            print(f"shoal: building {library.title} in {folder}, once", file=sys.stderr, flush=True)
            try:
                _compile(library, compiler, package, target)
            except _KilledError:  # as when a job is preempted: says nothing about the next time
                raise
            except CannotBuildError as problem:
                failed.write_text(str(problem))
                raise
    return target


def _compiler() -> Path:
    for name in (env.compiler(), "c++", "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return Path(found).resolve()
    raise NoCompilerError("no C++ compiler is found; install g++ or clang++, or set CXX")


def _sources(library: Library) -> list[Path]:
    folders = (library.sources, *library.shared)
    return sorted(path for folder in folders for path in folder.iterdir() if path.suffix in {".cc", ".h"})


def _compiler_key(compiler: Path) -> str:
    status = compiler.stat()
    return hashlib.sha256(f"{compiler}\0{status.st_size}\0{status.st_mtime_ns}".encode()).hexdigest()[:8]


def _key(library: Library, header: Path) -> str:
    """Return a hash of all that a build depends on but the compiler."""
    digest = hashlib.sha256("\0".join(library.versions).encode())
    for path in (*_sources(library), header):
        digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _private_folder(folder: Path) -> Path:
    """Create a folder that only this user can write: what is in it is loaded into the process."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise CannotBuildError(
            f"{folder} can be written by other users; delete it, or set {env.CACHE_DIR} to a folder of yours"
        )
    return folder


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file releases the lock


def _compile(library: Library, compiler: Path, package: Path, target: Path) -> None:
    includes = (library.sources, *library.shared, package / "include", *library.includes)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        command = [
            str(compiler), "-O2", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden", "-w", "-pthread",
            *library.flags, *(flag for path in includes for flag in ("-isystem", str(path))),
            *(str(path) for path in _sources(library) if path.suffix == ".cc"),
            *library.links, f"-L{package / 'lib'}", "-lshoal", "-o", str(made),
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
        made.replace(target)
