"""The processor, the memory and the GPUs."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Any

from shoal.doctor.check import Check, gibibytes


def checks(torch: Any) -> list[Check]:
    """Look at the machine; at its GPUs only with a ``torch`` that is not ``None``."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = memory_bytes(Path("/proc/meminfo"), Path("/sys/fs/cgroup/memory.max"))
    found = [
        Check(
            name="processor", found=f"{cpu_name(Path('/proc/cpuinfo'))}, {num_cores} cores for this process"
        ),
        Check(name="memory", found=gibibytes(memory) if memory else "size unknown"),
    ]
    return found if torch is None else [*found, _gpus(torch)]


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


def _gpus(torch: Any) -> Check:
    if torch.cuda.is_available():
        gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        found = "; ".join(
            f"{gpu.name} ({gibibytes(gpu.total_memory)}, capability {gpu.major}.{gpu.minor})" for gpu in gpus
        )
    elif torch.version.cuda:
        found = f"none: no NVIDIA driver for this torch's CUDA {torch.version.cuda}; training runs on the CPU"
    else:
        found = "none"
    return Check(name="GPUs", found=found)
