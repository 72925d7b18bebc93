"""Agrees with all workers on the backend that carries their gradients, before the process group exists.

1. Each worker puts its device, and whether shoal's process group in C++ loads, into the job's store.
2. Worker 0 adds what it alone reads, the helper hosts and the run's record, and passes all of it on.
3. Each applies the rule of :mod:`shoal.decide.backend` to that, so all have the same choice or error.
4. Where the rule asks for a comparison, all make it (:func:`compare`), with the same readings.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from shoal.comm import native_group
from shoal.comm.store import NAME, Records, Rule
from shoal.decide.backend import (
    AUTO,
    GLOO,
    NCCL,
    READINGS,
    SHOAL,
    SMALLEST_BYTES,
    BackendChoice,
    Readings,
    Recorded,
    Situation,
    choose_backend,
    choose_measured,
    next_bytes,
)
from shoal.decide.server_assignment import MIB, recommended_bucket_bytes
from shoal.env.secret import job_secret
from shoal.env.settings import helpers
from shoal.env.worker import WorkerRanks
from shoal.errors import ShoalError, UsageError, did_you_mean
from shoal.train.config import DistributedConfig

_COUNT = range(1 << 31)
_MOST_TEXT = 2048
_TEXT = rf"[^\x00]{{0,{_MOST_TEXT}}}"
_WORKER: Rule = {"device": r"\w{1,32}", "unloaded": _TEXT}
_JOB: Rule = {
    "num_helpers": _COUNT,
    "recorded": [{"backend": NAME, "num_workers": _COUNT, "num_hosts": _COUNT}],
    "unloaded": _TEXT,
    "devices": [r"\w{1,32}"],
}
_TRIAL_TIMEOUT_S = 60.0
"""Most time for a backend under comparison to connect."""
_BYTES = {"fp32": 4, "bf16": 2, "int8": 1}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}


@dataclass(frozen=True, kw_only=True)
class Purpose:
    """Purpose of a process group.

    Attributes:
        averages: whether gradients are averaged in it; workers that only predict do not.
        servers: the option by which servers update weights; may be empty.
        recorded: reads the record of the run, on worker 0; ``None``: the run begins.
    """

    averages: bool = True
    servers: str = ""
    recorded: Callable[[], Recorded | None] = lambda: None


def agree_on_backend(
    store: Store,
    ranks: WorkerRanks,
    device: torch.device,
    config: DistributedConfig,
    purpose: Purpose,
) -> BackendChoice:
    """Return the backend, the same on all workers, who all call this.

    Args:
        store: of the job.
        ranks: of this worker.
        device: of this worker.
        config: backend, bucket size and wire format.
        purpose: of the process group.

    Raises:
        UsageError: the settings name no backend for this device; workers have different devices; or helper
            hosts cannot be used.
        ShoalError: a worker did not come in time, or the record of the run is damaged.
    """
    requested, num_hosts = check_backend(config.backend, device), num_hosts_of(ranks)
    looks = (
        requested == AUTO and purpose.averages and ranks.num_workers > 1 and _may_be_shoal(device, num_hosts)
    )
    own = {"device": device.type, "unloaded": native_group.problem()[:_MOST_TEXT] if looks else ""}
    timeout = timedelta(seconds=config.timeout_s)
    records = Records(PrefixStore("backend/", store), "the workers", job_secret(), timeout)
    job = _exchange(records, ranks, own, purpose)
    recorded = [Recorded(**each) for each in job["recorded"]]
    try:
        if len(job["devices"]) > 1:
            raise UsageError(
                f"some workers would train on {' and some on '.join(job['devices'])}: name one device for "
                "all, as in --distributed.device cpu"
            )
        choice = choose_backend(
            Situation(
                requested=requested,
                wire=config.wire,
                on_gpu=_is_gpu(device),
                num_workers=ranks.num_workers,
                num_hosts=num_hosts,
                num_helpers=job["num_helpers"],
                averages=purpose.averages,
                servers=purpose.servers,
                recorded=recorded[0] if recorded else None,
                unloaded=job["unloaded"],
            )
        )
    except UsageError:
        records.wait_for_readers(ranks.rank, ranks.num_workers)
        raise
    return choice or compare(store, ranks, device, config)


def check_backend(name: str, device: torch.device) -> str:
    """Return the backend of the settings in lower case.

    Raises:
        UsageError: torch has no backend of that name, or not for this device.
    """
    backend, known = name.lower(), [AUTO, *dist.Backend.backend_list]
    if backend not in known:
        raise UsageError(
            f"distributed.backend {name!r} is not a backend of torch.distributed; "
            f"it has {', '.join(known[1:])}.{did_you_mean(name, known)}"
        )
    if backend != AUTO and not dist.is_backend_available(backend):
        built = [each for each in known[1:] if dist.is_backend_available(each)]
        raise UsageError(
            f"distributed.backend {backend!r}: torch {torch.__version__} is built without it; it has "
            f"{', '.join(built)}"
        )
    if backend == NCCL and not _is_gpu(device):
        raise UsageError(
            "distributed.backend 'nccl' is for GPUs, and this worker uses the CPU: use gloo or shoal"
        )
    return backend


def num_hosts_of(ranks: WorkerRanks) -> int:
    """Return the number of hosts of a job."""
    return -(-ranks.num_workers // ranks.num_local_workers)


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _may_be_shoal(device: torch.device, num_hosts: int) -> bool:
    """Return whether it matters if the group in C++ loads, which may take a compiler half a minute."""
    return not _is_gpu(device) or num_hosts > 1


def _exchange(
    records: Records, ranks: WorkerRanks, own: Mapping[str, str], purpose: Purpose
) -> dict[str, Any]:
    """Return what all workers and worker 0 know, in the form of :data:`_JOB`."""
    records.put(f"worker/{ranks.rank}", dict(own))
    if ranks.rank == 0:
        try:
            recorded = purpose.recorded()
            named = len(helpers())
            each = [records.get(f"worker/{rank}", rank, _WORKER) for rank in range(ranks.num_workers)]
        except ShoalError as problem:
            records.put("job", {"error": f"worker 0: {problem}"[:_MOST_TEXT]})
            raise
        job = {
            "num_helpers": named,
            "recorded": [asdict(recorded)] if recorded else [],
            "unloaded": next(filter(None, (worker["unloaded"] for worker in each)), ""),
            "devices": sorted({worker["device"] for worker in each}),
        }
        records.put("job", job)
    return records.get("job", 0, _JOB)


# ---- the comparison --------------------------------------------------------------------------------------


def compare(
    store: Store, ranks: WorkerRanks, device: torch.device, config: DistributedConfig
) -> BackendChoice:
    """Return the faster of nccl and shoal for the sum of a bucket, in the run's own wire format.

    The readings are maxima over the workers, and so the same on all of them.

    Raises:
        ShoalError: neither works.
    """
    bucket_bytes = int((config.bucket_mb or 0) * MIB) or recommended_bucket_bytes(
        num_hosts_of(ranks), ranks_per_host=ranks.num_local_workers
    )
    timeout = timedelta(seconds=min(config.timeout_s, _TRIAL_TIMEOUT_S))
    dist.init_process_group(
        GLOO,
        store=PrefixStore("trial/", store),
        rank=ranks.rank,
        world_size=ranks.num_workers,
        timeout=timeout,
    )
    try:
        groups, problems = _groups((NCCL, SHOAL), device, timeout)
        if len(groups) == 1:
            (left,), ((lost, problem),) = groups, problems.items()
            reason = f"{lost} does not work"
            return BackendChoice(backend=left, reason=reason, note=f"backend {left}: {reason}: {problem}")
        num_bytes, seconds = _readings(groups, device, config.wire, bucket_bytes)
        return choose_measured(seconds, wire=config.wire, num_bytes=num_bytes, first=NCCL)
    finally:
        dist.destroy_process_group()


def _groups(
    names: Sequence[str], device: torch.device, timeout: timedelta
) -> tuple[dict[str, dist.ProcessGroup], dict[str, str]]:
    """Make a group of each backend; return those that work, and why others do not.

    Raises:
        ShoalError: none works.
    """
    groups: dict[str, dist.ProcessGroup] = {}
    problems: dict[str, str] = {}
    for name in names:
        problem = ""
        try:
            group = dist.new_group(backend=name, timeout=timeout)
            assert isinstance(group, dist.ProcessGroup)
            groups[name] = group
            dist.all_reduce(torch.zeros(1, device=device), group=group)
            _synchronize(device)
        except (RuntimeError, OSError, ShoalError) as error:
            problem = str(error) or type(error).__name__
        if _largest(float(bool(problem))):
            problems[name] = problem or "another worker could not use it"
            groups.pop(name, None)
    if not groups:
        raise ShoalError("; ".join(f"backend {name}: {problem}" for name, problem in problems.items()))
    return groups, problems


def _readings(
    groups: Mapping[str, dist.ProcessGroup], device: torch.device, wire: str, bucket_bytes: int
) -> tuple[int, dict[str, Readings]]:
    """Return the bytes of a sum, and the seconds of all sums by wire format and backend.

    Of fp32, bf16 is tried too, for the hint in the line.
    """
    formats = (wire, "bf16") if wire == "fp32" else (wire,)
    spent_s = 0.0

    def read(name: str, wire: str, num_bytes: int) -> float:
        nonlocal spent_s
        taken = _seconds(groups[name], wire, num_bytes, device)
        spent_s += taken
        return taken

    num_bytes, more = 0, min(SMALLEST_BYTES, bucket_bytes)
    while more > num_bytes:
        num_bytes = more
        slowest_s = max(read(name, wire, num_bytes) for name in groups)
        more = next_bytes(
            num_bytes,
            bucket_bytes=bucket_bytes,
            slowest_s=slowest_s,
            spent_s=spent_s,
            num_readings=len(groups) * (1 + READINGS * len(formats)),
        )
    taken: dict[str, dict[str, list[float]]] = {each: {name: [] for name in groups} for each in formats}
    for each in formats:
        for _ in range(READINGS):
            for name in groups:  # by turns
                taken[each][name].append(read(name, each, num_bytes))
    return num_bytes, dict(taken)


def _seconds(group: dist.ProcessGroup, wire: str, num_bytes: int, device: torch.device) -> float:
    """Return the seconds of the sum of ``num_bytes`` of fp32 gradients on the slowest worker."""
    size = dist.get_world_size(group)
    count = -(-num_bytes // _BYTES["fp32"] // size) * size
    sent = torch.zeros(count, dtype=_DTYPES[wire], device=device)
    received, parts = torch.zeros_like(sent), sent.view(size, -1)
    dist.barrier()
    _synchronize(device)
    begin = time.perf_counter()
    if wire == "int8":  # as shoal.comm.hooks.EightBitWire sends it
        dist.all_to_all_single(received, sent, group=group)
        dist.all_gather_into_tensor(received, parts[0].contiguous(), group=group)
    else:
        dist.all_reduce(sent, group=group)
    _synchronize(device)
    return _largest(time.perf_counter() - begin)


def _largest(value: float) -> float:
    """Return the largest value of all workers."""
    largest: Tensor = torch.tensor([value], dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return float(largest)


def _synchronize(device: torch.device) -> None:
    if _is_gpu(device) and torch.cuda.is_available():
        torch.cuda.synchronize(device)
