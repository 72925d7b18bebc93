"""Joins the workers of a job, and exchanges values between them.

The default process group carries gradients; ``backends`` chooses its backend. Control values (counts of
targets, stop requests) use a gloo group of CPU tensors, so that they never wait for a GPU.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from shoal.decide.backend import SHOAL, BackendChoice
from shoal.env.machine import GPU_DEVICES, cpu_quota, num_cores, promised_gpus, selected_gpus
from shoal.env.settings import LAUNCH_DIR, host_id
from shoal.env.variables import Environ, variables_of
from shoal.env.worker import MEMBERS, WorkerEnv, WorkerRanks
from shoal.errors import ShoalError, UsageError
from shoal.json_text import parse_json
from shoal.train.backends import Purpose, agree_on_backend, num_hosts_of
from shoal.train.config import DistributedConfig

if TYPE_CHECKING:
    from shoal.comm.members import Members

T = TypeVar("T")
B = TypeVar("B")
Float32Array = npt.NDArray[np.float32]

_MOST_AT_ONCE = 8
"""Batches that threads infer at once: each has its activations in memory."""
_joins = itertools.count()
"""Numbers the calls of :func:`join_world` in this process, the same on all workers."""


@dataclass(frozen=True, kw_only=True)
class World:
    """Rank, device and process groups of this worker."""

    ranks: WorkerRanks
    device: torch.device
    backend: str
    """Backend of the default process group."""
    backend_reason: str = ""
    """Reason for this backend, for the record."""
    note: str = ""
    """A line for the beginning of a run, where the backend is not the expected one."""
    control: dist.ProcessGroup
    """A group of all workers for CPU tensors: gloo's, or the default one if its members may change."""
    cores: int = field(default_factory=num_cores)
    """This worker's share of its host's cores, at least 1; default: all that this process may use."""
    members: Members | None = None
    """The workers, if they may change; a process that is not yet one of them is in a group alone."""

    @cached_property
    def rank(self) -> int:
        """Rank of this worker, from 0 to ``num_workers`` - 1."""
        return self.ranks.rank if self.members is None else self.members.rank

    @cached_property
    def num_workers(self) -> int:
        """Number of workers on all hosts."""
        return self.ranks.num_workers if self.members is None else self.members.size

    @cached_property
    def is_main(self) -> bool:
        """True on the first worker, which writes the record and checkpoints."""
        return self.ranks.is_main if self.members is None else self.members.is_first

    @cached_property
    def num_hosts(self) -> int:
        """Number of hosts."""
        return num_hosts_of(self.ranks)

    @property
    def is_late(self) -> bool:
        """True before this process becomes one of workers that train already."""
        return self.members is not None and self.members.generation == 0

    def forget_ranks(self) -> None:
        """Read rank and number of workers again, which have changed."""
        for name in ("rank", "num_workers", "is_main"):
            self.__dict__.pop(name, None)

    def barrier(self) -> None:
        """Wait until all workers have called this."""
        dist.barrier(group=self.control)

    def by_rank(self, value: float) -> list[float]:
        """Return zeros with ``value`` at this worker's rank; summed over all workers, they are all values."""
        values = [0.0] * self.num_workers
        values[self.rank] = value
        return values

    def follow_rates(self) -> None:
        """Move sums of backend shoal away from late servers. A collective, between two steps."""
        backend = sys.modules.get("shoal.comm.native_group")  # not loaded for another backend
        if self.backend == "shoal" and backend is not None:
            backend.follow_rates(dist.group.WORLD)


def choose_device(config: DistributedConfig, local_rank: int, num_local_workers: int) -> torch.device:
    """Return the device of a worker: a GPU of its own if there are enough on this host, else the CPU.

    Where GPUs are in sight and the CPU is used all the same, the first worker of the host says so.

    Raises:
        UsageError: there are fewer GPUs than workers on this host, and ``device`` is ``cuda`` or the job has
            asked its scheduler for GPUs; or torch was not built for the worker's GPU.
    """
    if config.device == "cpu":
        return torch.device("cpu")
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_gpus >= num_local_workers:
        if missing := not_built_for(local_rank):
            raise UsageError(f"{missing}, or use --distributed.device cpu")
        return torch.device("cuda", local_rank)
    problem = f"{num_local_workers} workers on this host but {num_gpus} GPUs{_why_no_gpus(num_gpus)}"
    promised = promised_gpus()
    if config.device == "cuda" or promised:
        request = (
            "distributed.device cuda" if config.device == "cuda" else f"the job asked for {promised} GPUs"
        )
        raise UsageError(f"{request}: {problem}; start fewer workers or use --distributed.device cpu")
    sign = selected_gpus() or next((file for file in GPU_DEVICES if Path(file).exists()), "")
    if local_rank == 0 and (num_gpus or sign):
        seen = f" ({sign})" if sign else ""
        print(
            f"shoal: WARNING: training on the CPU of {os.uname().nodename}{seen}: {problem}; "
            "--distributed.device cuda makes this an error, cpu leaves this line out",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    return torch.device("cpu")


def not_built_for(gpu: int) -> str:
    """Return why this torch has no kernels for a GPU, and the remedy; empty if it has."""
    capability, built = torch.cuda.get_device_capability(gpu), torch.cuda.get_arch_list()
    if runs_on(capability, built):
        return ""
    needed = "sm_{}{}".format(*capability)
    return (
        f"{torch.cuda.get_device_name(gpu)} is {needed}, and torch {torch.__version__} is built for "
        f"{', '.join(built)}: install one that is built for {needed} (for V100: torch 2.11 to 2.14 for CUDA "
        "12.6)"
    )


def runs_on(capability: tuple[int, int], built: Sequence[str]) -> bool:
    """Return whether a torch that is built for the architectures ``built`` runs on a GPU of ``capability``.

    Binaries (``sm_75``) run on devices of the same major and at least that minor version, intermediate code
    (``compute_75``) on all from there on. Of other names, such as AMD's, nothing is known: True.
    """
    architectures = [re.fullmatch(r"(sm|compute)_(\d+)(\d)[af]?", each) for each in built]
    for kind, major, minor in (each.groups() for each in architectures if each):
        version = int(major), int(minor)
        if version <= capability and (kind == "compute" or version[0] == capability[0]):
            return True
    return not any(architectures)


def _why_no_gpus(num_gpus: int) -> str:
    if num_gpus:
        return ""
    if torch.version.cuda is None and torch.version.hip is None:
        return f" (torch {torch.__version__} is built for the CPU)"
    return " (torch finds none; nvidia-smi and shoal doctor may say why)"


def choose_kernels() -> None:
    """Choose among torch's CUDA kernels for batches whose shapes vary.

    cuDNN's attention builds a plan for every new shape, which takes 20 to 1,000 ms, and is torch's first
    choice for masked attention on Hopper; packed text has a new shape in almost every micro-batch.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


@contextmanager
def join_world(
    joined: WorkerEnv,
    config: DistributedConfig,
    purpose: Purpose = Purpose(),  # noqa: B008  # frozen
) -> Iterator[World]:
    """Initialize the process groups in this block.

    Args:
        joined: rank and address from the launcher.
        config: backend, device and timeout.
        purpose: of the default group.

    Raises:
        UsageError: see :func:`choose_device` and :func:`shoal.train.backends.agree_on_backend`.
        ShoalError: a worker did not come in time.
    """
    ranks = joined.ranks
    device = choose_device(config, ranks.local_rank, ranks.num_local_workers)
    timeout = timedelta(seconds=config.timeout_s)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        choose_kernels()
    elastic = config.elastic if purpose.averages else None
    job_store = _store_of(joined, timeout, changes=elastic is not None)
    store = PrefixStore(f"join {next(_joins)}/", job_store)  # torchrun's outlives the process group
    if elastic is not None:
        from shoal.comm.members import require_changing_groups

        require_changing_groups()
        choice = BackendChoice(backend=SHOAL, reason="distributed.elastic")
    else:
        choice = agree_on_backend(store, ranks, device, config, purpose)
    changes = elastic is not None
    options: Any = {"enable_reconfigure": True} if changes else {}  # torch 2.14
    dist.init_process_group(
        choice.backend,
        store=PrefixStore("workers/", store),
        rank=ranks.rank,
        world_size=ranks.num_workers,
        timeout=timeout,
        **options,
    )
    members = None
    try:
        if elastic is not None:
            from shoal.comm.members import meet

            members = meet(elastic, config.worker_patience_s)
        control = dist.group.WORLD if changes else dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(control, dist.ProcessGroup)
        # a process that comes later cannot ask the others, which have the same cores
        cores_of = [own_cores()] * ranks.num_workers if changes else all_gather_json(control, own_cores())
        cores = share_of_cores(
            ranks.rank, cores_of, num_local_workers=ranks.num_local_workers, quota=cpu_quota()
        )
        share_threads(ranks, cores)
        yield World(
            ranks=ranks,
            device=device,
            backend=choice.backend,
            backend_reason=choice.reason,
            note=choice.note,
            control=control,
            cores=cores,
            members=members,
        )
    finally:
        if members is not None:
            members.close()
        dist.destroy_process_group()


def _store_of(joined: WorkerEnv, timeout: timedelta, *, changes: bool) -> Store:
    """Return the job's store; on one host, where members may be killed, one that a kill does not damage."""
    if changes and joined.store_file is not None:
        from shoal.comm.folder_store import FolderStore

        return FolderStore(joined.store_file.with_suffix(MEMBERS), timeout)
    store: Store = next(
        rendezvous(
            joined.init_method,
            rank=joined.ranks.rank,
            world_size=joined.ranks.num_workers,
            timeout=timeout,
        )
    )[0]
    store.set_timeout(timeout)
    return store


# ---- exchange of values ----------------------------------------------------------------------------------
#
# The object collectives of ``torch.distributed`` pickle. Bytes from a peer are never unpickled here.


def all_gather_json(group: dist.ProcessGroup | None, value: Any) -> list[Any]:
    """Return the ``value`` of every worker by rank.

    Args:
        group: of all workers; ``None``: there is one.
        value: a JSON value.

    Raises:
        ShoalError: a worker was lost, or did not answer before the group's timeout.
    """
    return run_on_all(group, lambda: value)


def run_on_all(group: dist.ProcessGroup | None, action: Callable[[], T]) -> list[T]:
    """Run ``action`` on every worker and return all results (JSON values) by rank.

    Args:
        group: of all workers; ``None``: there is one.
        action: the function to run; may differ per worker.

    Raises:
        ShoalError: the action failed on some worker, or a worker was lost. All workers raise the error of the
            lowest failed rank, a UsageError as such. A worker with a defect (an exception that is neither a
            :class:`ShoalError` nor an :class:`OSError`) raises its own, with the traceback.
    """
    cause: Exception | None = None
    try:
        report = json.dumps({"result": action()})
    except Exception as error:  # noqa: BLE001  # raised below; otherwise the other workers would wait until the group's timeout
        cause = error
        text = f"{type(error).__name__}: {error}" if _is_defect(error) else str(error)
        report = json.dumps({"error": text, "usage": isinstance(error, UsageError)})
    gathered = _gathered(group, report.encode())
    reports = [parse_json(data, f"what worker {rank} sent") for rank, data in enumerate(gathered)]
    if cause is not None and _is_defect(cause):
        raise cause
    for rank, other in enumerate(reports):
        if "error" in other:
            suffix = f" (worker {rank})" if len(reports) > 1 and not other["usage"] else ""
            raise (UsageError if other["usage"] else ShoalError)(other["error"] + suffix) from cause
    return [other["result"] for other in reports]


def _is_defect(error: Exception) -> bool:
    return not isinstance(error, ShoalError | OSError)


def _gathered(group: dist.ProcessGroup | None, data: bytes) -> list[bytes]:
    """Return every worker's ``data``, padded with spaces to one length."""
    if group is None:
        return [data]
    num_workers = dist.get_world_size(group)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(num_workers)]
    try:
        dist.all_gather(sizes, torch.tensor([len(data)]), group=group)
        longest = int(max(sizes))
        mine = torch.frombuffer(bytearray(data.ljust(longest)), dtype=torch.uint8)
        all_data = [torch.empty(longest, dtype=torch.uint8) for _ in range(num_workers)]
        dist.all_gather(all_data, mine, group=group)
    except RuntimeError as error:
        raise ShoalError(f"another worker was lost while the workers agreed: {error}") from error
    return [buffer.numpy().tobytes() for buffer in all_data]


def gather_arrays(world: World, own: npt.NDArray[Any]) -> list[npt.NDArray[Any]] | None:
    """Return the arrays of all workers by rank on the main worker, ``None`` on the others.

    Args:
        own: ``[n]``; the type is the same on all workers, the length may differ.
    """
    if world.num_workers == 1:
        return [own]
    sizes = torch.zeros(world.num_workers, dtype=torch.int64)
    sizes[world.rank] = len(own)
    dist.all_reduce(sizes, group=world.control)
    padded = torch.from_numpy(np.pad(own, (0, int(sizes.max()) - len(own))))
    parts = [torch.empty_like(padded) for _ in sizes] if world.is_main else None
    if len(padded):
        dist.gather(padded, parts, group=world.control)
    if parts is None:
        return None
    return [part[:size].numpy() for part, size in zip(parts, sizes.tolist(), strict=True)]


def infer(compute: Callable[[B], T], batches: Iterable[B], device: torch.device) -> Iterator[T]:
    """Yield ``compute(batch)`` for each batch, in order, under inference mode.

    Results do not depend on the number of threads. On CPUs, matrix products and convolutions add in another
    order if more threads share one, so each batch is computed by one thread, up to eight batches at once.

    Args:
        compute: runs the model; several threads call it on CPUs, so it must not change shared state, and it
            enters autocast itself, which holds for a thread.
    """

    def one(batch: B) -> T:
        with torch.inference_mode():
            return compute(batch)

    if device.type != "cpu":
        yield from map(one, batches)
        return
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for threads that begin from now on too
    try:
        num_ahead = min(num_threads, _MOST_AT_ONCE)
        with ThreadPoolExecutor(num_ahead, "shoal-infer") as pool:
            pending = deque[Future[T]]()
            for batch in batches:
                pending.append(pool.submit(one, batch))
                if len(pending) > num_ahead:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
    finally:
        torch.set_num_threads(num_threads)


def gather_rows(
    world: World, own: torch.Tensor, rows_of: Sequence[npt.NDArray[np.int64]]
) -> Float32Array | None:
    """Return the rows of all workers ``[num_rows, columns]`` on the main worker, ``None`` on the others.

    Args:
        own: this worker's rows ``[n, columns]``, float32 on the CPU, in the order of ``rows_of[rank]``.
        rows_of: row numbers of each worker; together each row once.
    """
    parts = gather_arrays(world, own.flatten().numpy())
    if parts is None:
        return None
    num_rows = sum(map(len, rows_of))
    out = np.empty((num_rows, sum(map(len, parts)) // max(num_rows, 1)), dtype=np.float32)
    for rows, part in zip(rows_of, parts, strict=True):
        out[rows] = part.reshape(len(rows), out.shape[1])
    return out


# ---- cores of a host ------------------------------------------------------------------------------------

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
