"""Python, shoal, the packages that it requires, torch, the native core and a compiler."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from typing import Any

import shoal
from shoal.doctor.check import Check, judged

OLDEST_PYTHON = (3, 11)
# What each extra is for; those that every recipe of today needs count as missing when they are not there.
EXTRAS = {
    "text": "to train ALBERT and to prepare text",
    "report": "to write reports",
    "vision": "to train on images",
    "aws": "to start runs on AWS",
}
NEEDED_EXTRAS = frozenset({"text"})


def checks(torch: Any, torch_error: str) -> list[Check]:
    """Look at the software; ``torch`` and ``torch_error`` are what :func:`import_torch` gave."""
    return [
        _python(),
        Check(name="shoal", found=shoal.__version__),
        *_packages(),
        _torch(torch, torch_error),
        _native_core(),
        _compiler(),
    ]


def import_torch() -> tuple[Any, str]:
    """Return torch, or ``None`` and why it cannot be imported."""
    try:
        import torch
    except Exception as error:  # a broken installation raises whatever its loader meets
        return None, f"{type(error).__name__}: {error}"
    return torch, ""


def _python() -> Check:
    return judged(
        "Python",
        f"{platform.python_version()}, {sys.executable}",
        well=sys.version_info[:2] >= OLDEST_PYTHON,
        otherwise="missing",
        remedy=f"shoal needs Python {'.'.join(map(str, OLDEST_PYTHON))} or newer",
    )


def _packages() -> list[Check]:
    try:
        requirements = metadata.requires("shoal") or []
    except metadata.PackageNotFoundError:
        found = "shoal is not installed in this Python, so what it requires is unknown"
        remedy = "pip install . in the source folder"
        return [Check(name="packages", state="missing", found=found, remedy=remedy)]
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
    return [_group_check(name, groups[name], installed) for name in ("", *EXTRAS) if name in groups]


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
    wanted = f"shoal[{extra}]" if extra else "shoal"
    purpose = f"{EXTRAS[extra]}: " if extra else ""
    return judged(
        f"[{extra}]" if extra else "packages",
        ", ".join(states),
        well=not num_wrong,
        otherwise="missing" if not extra or extra in NEEDED_EXTRAS else "note",
        remedy=f"{purpose}pip install --upgrade '{wanted}'",
    )


def _numbers(version: str) -> tuple[int, ...]:
    """``2.15.0+cu132`` -> (2, 15, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def _torch(torch: Any, error: str) -> Check:
    if torch is None:
        remedy = "pip install --force-reinstall torch"
        return Check(name="torch", state="missing", found=f"cannot be imported ({error})", remedy=remedy)
    built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for CPU only"
    return Check(name="torch", found=f"imports, {built}")


def _native_core() -> Check:
    try:
        from shoal import native

        levels, features = native.simd_levels(), native.cpu_features()
    except Exception as error:  # a module built for another Python or machine raises what its loader meets
        remedy = "install a C++20 compiler and run: pip install --force-reinstall shoal"
        return Check(name="native core", state="missing", found=str(error), remedy=remedy)
    has = ", ".join(name for name, there in features.items() if there) or "no vector units known"
    return Check(name="native core", found=f"{levels[-1]} kernels; processor has {has}")


def _compiler() -> Check:
    path = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if path is None:
        remedy = "torch.compile on the CPU needs one: install g++ or clang++"
        return Check(name="C++ compiler", state="note", found="none found", remedy=remedy)
    answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=False)
    first = answer.stdout.partition("\n")[0].strip()
    return Check(name="C++ compiler", found=first or path)
