"""The workers of a job as one of them sees it: ranks, devices, and two process groups.

``gradients`` is the backend that the user chose. Small facts that the host decides with (counts of target
tokens, wishes to stop) go through ``control``, a gloo group of CPU tensors, so that no step waits for a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

import torch
import torch.distributed as dist

from shoal.env import WorkerEnv, WorkerPlace, helpers
from shoal.errors import UsageError, did_you_mean
from shoal.train.config import DistributedConfig


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
