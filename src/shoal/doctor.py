"""``shoal doctor``: what this machine has, what is missing for training, and how to get it.

It works, as far as it can, where torch or the native core is missing or broken: everything but the
standard library is imported inside the check that needs it.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import shoal
from shoal import env
from shoal.errors import EXIT_FAILURE, EXIT_OK, ShoalError

State = Literal["ok", "note", "missing"]

OLDEST_PYTHON = (3, 11)
LITTLE_DISK_BYTES = 5 * 2**30
"""Below this a few checkpoints of a large model fill the disk."""
LITTLE_SHARED_BYTES = 128 * 2**20

# What each extra is for; those that every recipe of today needs count as missing when they are not there.
EXTRAS = {
    "text": "to train ALBERT and to prepare text",
    "report": "to write reports",
    "vision": "to train on images",
    "aws": "to start runs on AWS",
}
NEEDED_EXTRAS = frozenset({"text"})


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the examination; ``missing`` means that training cannot run, ``note`` that it can."""

    topic: str
    name: str
    state: State
    found: str
    remedy: str = ""


def run_doctor() -> int:
    """Print the examination and return 0 when training can run here, else 1."""
    checks = examine()
    topic = ""
    for check in checks:
        if check.topic != topic:
            topic = check.topic
            print(f"\n{topic}")
        mark = {"ok": "ok", "note": "--", "missing": "!!"}[check.state]
        print(f"  {mark}  {check.name:<14}{check.found}")
        if check.remedy:
            print(f"      {'':<14}> {check.remedy}")
    missing = [check.name for check in checks if check.state == "missing"]
    if missing:
        print(f"\nTraining cannot run here until these are put right: {', '.join(missing)}")
        return EXIT_FAILURE
    print("\nTraining can run here.")
    return EXIT_OK


def examine() -> list[Check]:
    """Return everything that was looked at; it prints nothing and raises nothing."""
    torch, torch_error = _import_torch()
    checks = [*_python(), *_packages(), _torch_check(torch, torch_error), _native_core(), _compiler()]
    checks += _machine()
    if torch is not None:
        checks += [_gpus(torch), _precision(torch), _backends(torch)]
    return [*checks, _transports(), _launcher(), _disk(Path.cwd())]


# ---- software -------------------------------------------------------------------------------------------


def _python() -> list[Check]:
    wanted = ".".join(map(str, OLDEST_PYTHON))
    new_enough = sys.version_info[:2] >= OLDEST_PYTHON
    return [
        Check(
            topic="Software",
            name="Python",
            state="ok" if new_enough else "missing",
            found=f"{platform.python_version()}, {sys.executable}",
            remedy="" if new_enough else f"shoal needs Python {wanted} or newer",
        ),
        Check(topic="Software", name="shoal", state="ok", found=shoal.__version__),
    ]


def _packages() -> list[Check]:
    try:
        requirements = metadata.requires("shoal") or []
    except metadata.PackageNotFoundError:
        return [
            Check(
                topic="Software",
                name="packages",
                state="missing",
                found="shoal is not installed in this Python, so what it requires is unknown",
                remedy="pip install . in the source folder",
            )
        ]
    return package_checks(requirements, _installed_version)


def _installed_version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def package_checks(requirements: Sequence[str], installed: Callable[[str], str | None]) -> list[Check]:
    """Compare a distribution's requirements with what is installed: one line for the core, one an extra.

    Args:
        requirements: as in package metadata, e.g. ``matplotlib>=3.9; extra == "report"``.
        installed: gives the installed version of a package, or ``None``.
    """
    groups: dict[str, list[tuple[str, str]]] = {}
    for requirement in requirements:
        found = re.match(r"\s*([\w.-]+)(?:\[[^]]*\])?\s*(?:\(?>=\s*([\d.]+))?", requirement)
        extra = re.search(r"extra\s*==\s*['\"]([\w.-]+)['\"]", requirement)
        if found:
            groups.setdefault(extra[1] if extra else "", []).append((found[1], found[2] or ""))
    checks: list[Check] = []
    for name in ("", *EXTRAS):
        if name in groups:
            checks.append(_group_check(name, groups[name], installed))
    return checks


def _group_check(
    extra: str, packages: Sequence[tuple[str, str]], installed: Callable[[str], str | None]
) -> Check:
    states: list[str] = []
    num_wrong = 0
    for package, oldest in packages:
        version = installed(package)
        wrong = version is None or (oldest != "" and _numbers(version) < _numbers(oldest))
        num_wrong += wrong
        if version is None:
            states.append(f"{package} not installed")
        else:
            states.append(f"{package} {version}" + (f" (too old, needs {oldest})" if wrong else ""))
    needed = not extra or extra in NEEDED_EXTRAS
    wanted = f"shoal[{extra}]" if extra else "shoal"
    purpose = f"{EXTRAS[extra]}: " if extra else ""
    return Check(
        topic="Software",
        name=f"[{extra}]" if extra else "packages",
        state="ok" if not num_wrong else ("missing" if needed else "note"),
        found=", ".join(states),
        remedy=f"{purpose}pip install --upgrade '{wanted}'" if num_wrong else "",
    )


def _numbers(version: str) -> tuple[int, ...]:
    """``2.15.0+cu132`` -> (2, 15, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def _import_torch() -> tuple[Any, str]:
    """Return torch, or ``None`` and why it cannot be imported."""
    try:
        import torch
    except Exception as error:  # a broken installation raises whatever its loader meets
        return None, f"{type(error).__name__}: {error}"
    return torch, ""


def _torch_check(torch: Any, error: str) -> Check:
    if torch is None:
        return Check(
            topic="Software",
            name="torch",
            state="missing",
            found=f"cannot be imported ({error})",
            remedy="pip install --force-reinstall torch",
        )
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for CPU only"
    return Check(topic="Software", name="torch", state="ok", found=f"imports, {built}")


def _native_core() -> Check:
    try:
        from shoal import native

        levels, features = native.simd_levels(), native.cpu_features()
    except Exception as error:  # a module built for another Python or machine raises what its loader meets
        return Check(
            topic="Software",
            name="native core",
            state="missing",
            found=str(error),
            remedy="install a C++20 compiler and run: pip install --force-reinstall shoal",
        )
    has = ", ".join(name for name, there in features.items() if there) or "no vector units known"
    return Check(
        topic="Software", name="native core", state="ok", found=f"{levels[-1]} kernels; processor has {has}"
    )


def _compiler() -> Check:
    path = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if path is None:
        return Check(
            topic="Software",
            name="C++ compiler",
            state="note",
            found="none found",
            remedy="torch.compile on the CPU needs one: install g++ or clang++",
        )
    answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False)
    first = answer.stdout.partition("\n")[0].strip()
    return Check(topic="Software", name="C++ compiler", state="ok", found=first or path)


# ---- machine --------------------------------------------------------------------------------------------


def _machine() -> list[Check]:
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = memory_bytes(Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max"))
    return [
        Check(
            topic="Machine",
            name="processor",
            state="ok",
            found=f"{cpu_name(Path('/proc/cpuinfo'))}, {num_cores} cores for this process",
        ),
        Check(
            topic="Machine", name="memory", state="ok", found=gibibytes(memory) if memory else "size unknown"
        ),
    ]


def cpu_name(cpuinfo: Path) -> str:
    """Return the processor's name as Linux tells it, else as Python knows it."""
    if cpuinfo.is_file():
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(errors="replace"), re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()


def memory_bytes(meminfo: Path, cgroup_limit: Path) -> int:
    """Return the memory that this process may use: the machine's or its container's; 0 if unknown."""
    found = (
        re.search(r"^MemTotal:\s*(\d+) kB", meminfo.read_text(), re.MULTILINE) if meminfo.is_file() else None
    )
    total = int(found[1]) * 1024 if found else 0
    limit = cgroup_limit.read_text().strip() if cgroup_limit.is_file() else "max"
    return min(total, int(limit)) if limit.isdecimal() and total else total


def gibibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _gpus(torch: Any) -> Check:
    if not torch.cuda.is_available():
        found = "none"
        if torch.version.cuda:
            found = (
                f"none: no NVIDIA driver for this torch's CUDA {torch.version.cuda}; training runs on the CPU"
            )
        return Check(topic="Machine", name="GPUs", state="ok", found=found)
    gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    names = [
        f"{gpu.name} ({gibibytes(gpu.total_memory)}, capability {gpu.major}.{gpu.minor})" for gpu in gpus
    ]
    return Check(topic="Machine", name="GPUs", state="ok", found="; ".join(names))


# ---- training -------------------------------------------------------------------------------------------


def _precision(torch: Any) -> Check:
    from shoal.train.precision import choose_precision

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = choose_precision("auto", device).name
    why = {"cuda": "this GPU", "cpu": "this processor"}[device.type]
    return Check(topic="Training", name="precision", state="ok", found=f"auto is {chosen} on {why}")


def _backends(torch: Any) -> Check:
    from shoal import native

    dist = torch.distributed
    known: Mapping[str, Callable[[], bool]] = (
        {
            "gloo": dist.is_gloo_available,
            "nccl": dist.is_nccl_available,
            "mpi": dist.is_mpi_available,
            "shoal": lambda: "shoal" in dist.Backend.backend_list and native.is_built(),
        }
        if dist.is_available()
        else {}
    )
    found = [name for name, there in known.items() if there()]
    return Check(
        topic="Training",
        name="backends",
        state="ok" if "gloo" in found else "missing",
        found=", ".join(found) or "none",
        remedy="" if "gloo" in found else "shoal needs gloo: install a torch built with it",
    )


def _transports() -> Check:
    """What backend "shoal" sends its chunks over."""
    shared = Path("/dev/shm")
    room = shutil.disk_usage(shared).free if shared.is_dir() else 0
    little = room < LITTLE_SHARED_BYTES
    return Check(
        topic="Training",
        name="transports",
        state="note" if little else "ok",
        found=f"shared memory in a host ({gibibytes(room)} free in {shared}), TCP between hosts",
        remedy="backend shoal needs about 3 MiB a worker and group there: docker run --shm-size 1g"
        if little
        else "",
    )


def _launcher() -> Check:
    try:
        joined = env.joined()
    except ShoalError as error:
        return Check(
            topic="Training",
            name="launcher",
            state="missing",
            found=str(error),
            remedy="set the variable rightly, or unset RANK and WORLD_SIZE to let shoal start the workers",
        )
    if joined is None:
        return Check(
            topic="Training", name="launcher", state="ok", found="none: shoal starts the workers itself"
        )
    place = joined.place
    found = f"{joined.launcher}: worker {place.rank} of {place.num_workers}, meeting at "
    return Check(
        topic="Training",
        name="launcher",
        state="ok",
        found=f"{found}{joined.master_addr}:{joined.master_port}",
    )


def _disk(folder: Path) -> Check:
    free = shutil.disk_usage(folder).free
    little = free < LITTLE_DISK_BYTES
    return Check(
        topic="Training",
        name="disk",
        state="note" if little else "ok",
        found=f"{gibibytes(free)} free in {folder}",
        remedy="checkpoints need room: free some, or keep the run on another disk with --run.dir"
        if little
        else "",
    )
