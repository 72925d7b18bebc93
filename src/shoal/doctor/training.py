"""What training would use here: precision, backends, transports, launcher and disk."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal import env
from shoal.doctor.check import Check, gibibytes, judged
from shoal.errors import ShoalError

if TYPE_CHECKING:
    from shoal.native import Fabric

LITTLE_DISK_BYTES = 5 * 2**30
"""Below this a few checkpoints of a large model fill the disk."""
LITTLE_SHARED_BYTES = 128 * 2**20
_LOOPBACK = "127.0.0.1"


def checks(torch: Any, folder: Path) -> list[Check]:
    """Look at what training uses; ``torch`` may be ``None``, ``folder`` is where runs would lie."""
    of_torch = [] if torch is None else [_precision(torch), _backends(torch)]
    return [*of_torch, _transports(), *_libfabric(), _launcher(), _disk(folder)]


def _precision(torch: Any) -> Check:
    from shoal.train.gradients import choose_precision

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    chosen = choose_precision("auto", device).name
    why = {"cuda": "this GPU", "cpu": "this processor"}[device.type]
    return Check(name="precision", found=f"auto is {chosen} on {why}")


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
    return judged(
        "backends",
        ", ".join(found) or "none",
        well="gloo" in found,
        otherwise="missing",
        remedy="shoal needs gloo: install a torch built with it",
    )


def _transports() -> Check:
    """What backend "shoal" sends its chunks over."""
    shared = Path("/dev/shm")
    room = shutil.disk_usage(shared).free if shared.is_dir() else 0
    return judged(
        "transports",
        f"shared memory in a host ({gibibytes(room)} free in {shared}), TCP between hosts",
        well=room >= LITTLE_SHARED_BYTES,
        otherwise="note",
        remedy="backend shoal needs about 3 MiB a worker and group there: docker run --shm-size 1g",
    )


def _libfabric() -> list[Check]:
    """Which providers ``EngineOptions(transport="ofi:…")`` can name here."""
    from shoal import native

    if not native.is_built():
        return []
    return [fabric_check(native.fabric(_LOOPBACK))]


def fabric_check(fabric: Fabric) -> Check:
    """Say what of libfabric can be used; nothing needs it but hosts whose network is EFA or the like."""
    if not fabric.built:
        found, remedy = (
            "not built in",
            "for EFA and the like: apt-get install libfabric-dev, then install shoal again",
        )
        return Check(name="libfabric", state="note", found=found, remedy=remedy)
    if not fabric.version:
        remedy = "for EFA and the like: apt-get install libfabric1, or set LD_LIBRARY_PATH to where it is"
        return Check(
            name="libfabric", state="note", found=f"cannot be loaded: {fabric.problem}", remedy=remedy
        )
    usable = [name for name, problem in fabric.providers.items() if not problem]
    broken = [f"{name} does not open ({problem})" for name, problem in fabric.providers.items() if problem]
    return judged(
        "libfabric",
        "; ".join([f"{fabric.version}, usable providers: {', '.join(usable) or 'none'}", *broken]),
        well=bool(usable),
        otherwise="note",
        remedy="fi_info says what it finds; TCP needs none of it",
    )


def _launcher() -> Check:
    try:
        worker = env.worker_env()
    except ShoalError as error:
        remedy = "set the variable rightly, or unset RANK and WORLD_SIZE to let shoal start the workers"
        return Check(name="launcher", state="missing", found=str(error), remedy=remedy)
    if worker is None:
        return Check(name="launcher", found="none: shoal starts the workers itself")
    place = worker.place
    return Check(
        name="launcher",
        found=f"{worker.launcher}: worker {place.rank} of {place.num_workers}, meeting at "
        f"{worker.init_method}",
    )


def _disk(folder: Path) -> Check:
    free = shutil.disk_usage(folder).free
    return judged(
        "disk",
        f"{gibibytes(free)} free in {folder}",
        well=free >= LITTLE_DISK_BYTES,
        otherwise="note",
        remedy="checkpoints need room: free some, or keep the run on another disk with --run.dir",
    )
