"""Shares the cores of a host among its workers where their launcher has not done so.

``shoal launch`` sets OMP_NUM_THREADS for its workers. torchrun sets 1 however many cores there are; under
mpirun and srun without it each worker would start a thread for every core of the host.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from shoal.env.settings import LAUNCH_DIR, host_id
from shoal.env.variables import Environ, variables_of
from shoal.env.worker import WorkerRanks
from shoal.errors import ShoalError

THREADS = "OMP_NUM_THREADS"


def own_cores() -> str:
    """Return this host's name and, as bits of a hexadecimal number, the cores that may run this process."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return f"{host_id() or os.uname().nodename} {sum(1 << core for core in cores):x}"


def share_of_cores(rank: int, cores: Sequence[str], *, num_local_workers: int, quota: float) -> int:
    """Return the number of threads for a worker; at least 1.

    A core that several workers of a host may use is shared equally. So mpirun's binding is followed, to
    cores or to sockets.

    Args:
        rank: of the worker.
        cores: :func:`own_cores` of all workers, by rank.
        num_local_workers: workers on its host, which share the quota.
        quota: how many cores' time the container may use.

    Raises:
        ShoalError: what a worker sent is not from :func:`own_cores`.
    """
    host, own = _parsed(cores[rank])
    users = Counter(core for other, some in map(_parsed, cores) if other == host for core in some)
    by_users = Counter(users[core] for core in own)
    share = sum(count / num_users for num_users, count in by_users.items())
    return max(1, int(min(share + 1e-6, quota / num_local_workers)))


def share_threads(ranks: WorkerRanks, share: int, environ: Environ = None) -> None:
    """Set the number of torch's threads to this worker's share of the cores, unless the user has chosen it.

    The first worker says so in one line. Fewer threads than the share, as ``torch.set_num_threads`` or MKL
    choose, stay.

    Args:
        ranks: of this worker.
        share: its cores; see :func:`share_of_cores`.
        environ: default: this process's variables.
    """
    environ = variables_of(environ)
    by_torchrun = set_by_torchrun(environ)
    if LAUNCH_DIR in environ or (THREADS in environ and not by_torchrun):
        return
    before = torch.get_num_threads()
    if share == before or (share > before and not (by_torchrun and before == 1)):
        return
    torch.set_num_threads(share)
    if ranks.is_main:
        reason = "torchrun had set 1" if by_torchrun else f"torch would start {before}"
        print(
            f"shoal: {share} threads in each of {ranks.num_local_workers} workers, its share of this host's "
            f"cores ({reason}); {THREADS} sets another number",
            file=sys.stderr, flush=True,
        )  # fmt: skip


def set_by_torchrun(environ: Mapping[str, str], parent: Path | None = None) -> bool:
    """Return whether the 1 in OMP_NUM_THREADS is torchrun's own, and not that of the user who started it.

    Args:
        environ: variables of this worker.
        parent: the variables that torchrun, its parent, was started with, as the kernel shows them.
    """
    if environ.get(THREADS) != "1" or "TORCHELASTIC_USE_AGENT_STORE" not in environ:
        return False
    try:
        variables = (parent or Path(f"/proc/{os.getppid()}/environ")).read_bytes()
    except OSError:
        return False
    return not any(each.startswith(f"{THREADS}=".encode()) for each in variables.split(b"\0"))


def _parsed(cores: str) -> tuple[str, list[int]]:
    host, _, bits = cores.rpartition(" ")
    try:
        number = int(bits, 16)
    except ValueError as error:
        raise ShoalError(f"a worker sent {cores[:80]!r} as its host and cores") from error
    return host, [core for core in range(number.bit_length()) if number >> core & 1]
