"""Joins the workers of a job: ranks, devices, two process groups, and values exchanged between workers.

``gradients`` is the backend that the user chose. Small facts that the host decides with (counts of target
tokens, wishes to stop) go through ``control``, a gloo group of CPU tensors, so that no step waits for a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shoal.env import WorkerEnv, WorkerPlace, helpers
from shoal.errors import ShoalError, UsageError, did_you_mean
from shoal.json_text import parse_json
from shoal.train.config import DistributedConfig

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class World:
    """This worker's place, its device, and the groups it talks through."""

    place: WorkerPlace
    device: torch.device
    backend: str
    control: dist.ProcessGroup
    launcher: str

    @cached_property
    def num_workers(self) -> int:
        return self.place.num_workers

    @cached_property
    def is_main(self) -> bool:
        return self.place.is_main

    @cached_property
    def num_hosts(self) -> int:
        return -(-self.place.num_workers // self.place.num_local_workers)

    def sum_counts(self, *counts: int) -> list[int]:
        """Return each count summed over all workers."""
        total = torch.tensor(counts, dtype=torch.int64)
        dist.all_reduce(total, group=self.control)
        return [int(value) for value in total]

    def sum_values(self, values: torch.Tensor) -> torch.Tensor:
        """Return ``values [n]`` (CPU, float64) summed over all workers."""
        dist.all_reduce(values, group=self.control)
        return values

    def barrier(self) -> None:
        dist.barrier(group=self.control)


def choose_device(config: DistributedConfig, local_rank: int, num_local_workers: int) -> torch.device:
    """Return the device of a worker.

    Raises:
        UsageError: CUDA was asked for and there are fewer GPUs than workers on this host.
    """
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.device == "cuda" and num_gpus < num_local_workers:
        raise UsageError(
            f"distributed.device cuda: {num_local_workers} workers on this host but {num_gpus} GPUs; "
            "start fewer workers or use --distributed.device cpu"
        )
    if config.device == "cpu" or num_gpus < num_local_workers:
        return torch.device("cpu")
    return torch.device("cuda", local_rank)


def choose_backend(config: DistributedConfig, device: torch.device) -> str:
    """Return the torch.distributed backend, or where none was chosen the default: helper hosts mean shoal.

    Raises:
        UsageError: torch knows no backend of that name.
    """
    if config.backend is None:
        return "nccl" if device.type == "cuda" else "shoal" if helpers() else "gloo"
    known = list(dist.Backend.backend_list)
    if config.backend.lower() not in known:
        raise UsageError(
            f"distributed.backend {config.backend!r} is not a backend of torch.distributed; "
            f"it has {', '.join(known)}.{did_you_mean(config.backend, known)}"
        )
    return config.backend.lower()


@contextmanager
def join_world(joined: WorkerEnv, config: DistributedConfig) -> Iterator[World]:
    """Meet the other workers; leave them at the end."""
    place = joined.place
    device = choose_device(config, place.local_rank, place.num_local_workers)
    backend = choose_backend(config, device)
    timeout = timedelta(seconds=config.timeout_s)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=joined.init_method,
        rank=place.rank,
        world_size=place.num_workers,
        timeout=timeout,
    )
    try:
        control = dist.new_group(backend="gloo", timeout=timeout)
        assert isinstance(control, dist.ProcessGroup)
        yield World(place=place, device=device, backend=backend, control=control, launcher=joined.launcher)
    finally:
        dist.destroy_process_group()


# ---- values of every worker ------------------------------------------------------------------------------
#
# ``torch.distributed``'s own object collectives pickle their values; a peer's bytes are never unpickled here.


def all_gather_json(group: dist.ProcessGroup | None, value: Any) -> list[Any]:
    """Return every worker's ``value``, in rank order. ``group`` is ``None`` for a single worker.

    Raises:
        ShoalError: a worker was lost, or did not take part before the group's deadline.
    """
    return run_on_all(group, lambda: value)


def run_on_all(group: dist.ProcessGroup | None, action: Callable[[], T]) -> list[T]:
    """Run ``action`` on every worker and return all its results (values that JSON can hold).

    Raises:
        ShoalError: it failed on some worker, in any way, or a worker was lost; all raise the error of the
            lowest rank, as the class it was. Only a worker with a defect (an exception that is neither a
            :class:`ShoalError` nor an :class:`OSError`) raises its own, which has the traceback.
    """
    cause: Exception | None = None
    try:
        report = json.dumps({"result": action()})
    except Exception as error:  # unreported, it would leave the others waiting until the group's deadline
        cause = error
        text = f"{type(error).__name__}: {error}" if _is_defect(error) else str(error)
        report = json.dumps({"error": text, "usage": isinstance(error, UsageError)})
    gathered = _gathered(group, report.encode())
    reports = [parse_json(data, f"what worker {rank} sent") for rank, data in enumerate(gathered)]
    if cause is not None and _is_defect(cause):
        raise cause
    for rank, other in enumerate(reports):
        if "error" in other:
            where = f" (worker {rank})" if len(reports) > 1 and not other["usage"] else ""
            raise (UsageError if other["usage"] else ShoalError)(other["error"] + where) from cause
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
