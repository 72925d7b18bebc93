"""Counts the cores and GPUs of this host, and finds its compiler and its identity."""

from __future__ import annotations

import os
import re
import shutil
import sysconfig
from collections.abc import Callable
from functools import cache
from pathlib import Path

from shoal.env.launcher import num_local_workers
from shoal.env.settings import host_id
from shoal.env.slurm import slurm_step
from shoal.env.variables import Environ, number, text, variables_of

GPUS = "SHOAL_GPUS"
"""GPUs that the job asks for on each host; finding none is an error then."""
GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd")
"""Device files of the drivers of NVIDIA and AMD."""
_NO_QUOTA = 1 << 20
_WSL_DEVICE = "/dev/dxg"
"""Device file of any GPU under WSL, without CUDA too."""


def num_cores() -> int:
    """Return the number of cores that this process may use, by affinity and by its container's quota."""
    return max(1, min(num_scheduled(), int(cpu_quota())))


def num_scheduled() -> int:
    """Return the number of cores that the scheduler may run this process on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_quota(cgroups: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> float:
    """Return how many cores' time this process may use, as Kubernetes and Docker limit it; at most 2**20.

    Args:
        cgroups: where the kernel shows the groups, of version 1 or 2.
        own: the groups of this process.
    """
    quota = float(_NO_QUOTA)
    for line in _content(own).splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = cgroups / controllers if controllers else cgroups
        path = Path(group.lstrip("/"))
        for folder in (root / path, *(root / parent for parent in path.parents)):
            if controllers:
                limit, period = _content(folder / "cpu.cfs_quota_us"), _content(folder / "cpu.cfs_period_us")
            else:
                limit, _, period = _content(folder / "cpu.max").partition(" ")
            if limit.strip().isdecimal() and period.strip().isdecimal() and int(period):
                quota = min(quota, int(limit) / int(period))
    return quota


def _content(file: Path) -> str:
    """Return the text of a file of the kernel; empty if it is not there."""
    try:
        return file.read_text()
    except OSError:
        return ""


def cores_per_worker(environ: Environ = None) -> int:
    """Return this process's share of its host's cores; 0 if no launcher says how many workers there are."""
    workers = num_local_workers(environ)
    return num_cores() // workers if workers else 0


def num_gpus() -> int:
    """Return the number of GPUs of this host. Torch, slow to import, is used only if there is a driver."""
    if not any(Path(file).exists() for file in (*GPU_DEVICES, _WSL_DEVICE)):
        return 0
    from torch import cuda

    return cuda.device_count()


def promised_gpus(environ: Environ = None) -> int:
    """Return the number of GPUs that the scheduler has allocated to the job on this host; 0: none.

    That is SHOAL_GPUS, Slurm's number in a step, or the GPUs that Kubernetes' device plug-in names.

    Raises:
        UsageError: a variable is not a number.
    """
    environ = variables_of(environ)
    step = slurm_step(environ)
    named = environ.get("NVIDIA_VISIBLE_DEVICES", "").split(",")  # an image's own "all" promises nothing
    return (
        number(environ, GPUS, default=0)
        or (step.num_gpus if step else 0)
        or sum(name.startswith(("GPU-", "MIG-")) for name in named)
    )


def selected_gpus(environ: Environ = None) -> str:
    """Return a variable that selects GPUs, such as ``CUDA_VISIBLE_DEVICES=0,1``; empty if none does."""
    environ = variables_of(environ)
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if re.match(r"\d|GPU-|MIG-", value := environ.get(name, "")):
            return f"{name}={value}"
    return ""


def compiler(environ: Environ = None) -> str | None:
    """Return the C++ compiler in ``CXX``, or ``None``."""
    return text("CXX", environ)


def compiler_problem(environ: Environ = None) -> str:
    """Return the missing requirement of torch.compile for GPU kernels, and its remedy; else empty.

    Triton compiles the launcher of each kernel as an extension module in C.
    """
    if not text("CC", environ) and not any(map(shutil.which, ("gcc", "clang"))):
        return "torch.compile needs a C compiler on the host of a GPU: apt-get install gcc, or set CC"
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        return f"torch.compile needs {header} on the host of a GPU: apt-get install python3-dev"
    return ""


@cache
def runs_triton(device_type: str) -> bool:
    """Return whether kernels in Triton can be compiled and launched on devices of a type of torch's."""
    from torch.utils._triton import has_triton

    return device_type == "cuda" and has_triton() and not compiler_problem()


def host_identity() -> str:
    """Return a string that is equal for two processes exactly if they may share memory.

    It contains the node name, the boot id, the network namespace (a container or an emulated host has its
    own) and the file system of ``/dev/shm``. ``SHOAL_HOST_ID`` overrides it.
    """
    if override := host_id():
        return override
    shared_memory = _or_unknown(lambda: Path("/dev/shm").stat().st_dev)
    return "/".join([os.uname().nodename, *_boot_and_network(), shared_memory])


def network_identity() -> str:
    """Return a string that is equal for two processes if they share their loopback interface.

    ``SHOAL_HOST_ID`` does not affect it: the hosts into which it divides a machine share the loopback.
    """
    parts = _boot_and_network()
    return "/".join(parts if "?" not in parts else [os.uname().nodename, *parts])


def boot_identity() -> str:
    """Return a string that is equal for two processes if they run on one kernel."""
    return _or_unknown(lambda: Path("/proc/sys/kernel/random/boot_id").read_text().strip())


def _boot_and_network() -> list[str]:
    return [
        boot_identity(),
        _or_unknown(lambda: Path("/proc/self/ns/net").stat().st_ino),
    ]


def _or_unknown(read: Callable[[], object]) -> str:
    try:
        return str(read())
    except OSError:
        return "?"
