"""The machine of a figure, and the processors' other users meanwhile. Standard library only."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Any, Self

_PROC = Path("/proc")
_NAMED_PACKAGES = ("shoal", "torch", "numpy", "transformers", "datasets", "timm", "pytorch_optimizer")


class ForeignCores:
    """Measures how many processors other processes kept busy inside a ``with`` block.

    The busy time of all processors, stolen time included, less that of this process and its descendants.
    ``/proc/stat`` counts in ticks of 10 ms, so a block should last at least a quarter of a second.
    ``cores`` is ``None`` where the operating system does not tell (anything but Linux).

    Args:
        own_network: count the kernel's work for network packets as ours: emulated hosts send and receive
            everything on this machine, and the kernel charges that to nobody.
    """

    def __init__(self, *, own_network: bool = False) -> None:
        self.cores: float | None = None
        self._own_network = own_network

    def __enter__(self) -> Self:
        self._begin = _busy_and_own_s(self._own_network)
        self._begin_s = time.perf_counter()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seconds = time.perf_counter() - self._begin_s
        end = _busy_and_own_s(self._own_network)
        if self._begin is None or end is None:
            return
        foreign_s = (end[0] - self._begin[0]) - (end[1] - self._begin[1])
        self.cores = max(0.0, foreign_s / max(seconds, 1e-9))


def describe_machine() -> dict[str, Any]:
    """Return processor, cores, memory, accelerators, system and versions; nothing that names the host."""
    versions = {"python": platform.python_version()}
    for name in _NAMED_PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "processor": _processor_name(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "accelerators": _accelerators(),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": versions,
    }


def current_commit() -> str | None:
    """Return the commit of the checkout, with ``-dirty`` where tracked files differ from it."""
    here = Path(__file__).resolve().parent
    try:
        commit = _git(here, "rev-parse", "HEAD")
        return commit + ("-dirty" if _git(here, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _git(where: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=where, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _accelerators() -> list[str]:
    try:
        import torch
    except ImportError:
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def _processor_name() -> str:
    try:
        for line in (_PROC / "cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _busy_and_own_s(own_network: bool = False) -> tuple[float, float] | None:
    """Return the busy seconds of all processors, and those of this process and its descendants."""
    try:
        ticks = [int(word) for word in (_PROC / "stat").read_text().splitlines()[0].split()[1:]]
        own_ticks = _ticks_of_tree(os.getpid(), "ksoftirqd/" if own_network else None)
        own_ticks += ticks[6] if own_network else 0
    except (OSError, IndexError):
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = ticks[:8]
    tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + softirq + steal) * tick_s, own_ticks * tick_s


def _ticks_of_tree(root: int, also: str | None = None) -> int:
    """Sum the processor time of a process, of its living descendants and of those it has waited for.

    ``also``: and of all processes whose name begins like this.
    """
    children: dict[int, list[int]] = {}
    ticks: dict[int, int] = {}
    for folder in _PROC.iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            # the name in parentheses may hold spaces; what follows it is state, parent, ...
            before, _, after = (folder / "stat").read_text().rpartition(")")
        except OSError:  # it has ended meanwhile
            continue
        pid, after_name = int(folder.name), after.split()
        named = also is not None and before.partition("(")[2].startswith(also)
        children.setdefault(root if named else int(after_name[1]), []).append(pid)
        ticks[pid] = sum(int(word) for word in after_name[11:15])
    total, waiting = 0, [root]
    while waiting:
        pid = waiting.pop()
        total += ticks.get(pid, 0)
        waiting.extend(children.get(pid, ()))
    return total
