"""One process group a backend, over all workers, and what the host knows of them."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shoal.bench.settings import COLOCATED, CommBench
from shoal.comm.addresses import host_identity
from shoal.comm.helpers import helper_bandwidths
from shoal.env import HELPERS, WorkerEnv, helpers, without
from shoal.errors import UsageError
from shoal.json_text import parse_json


class Groups:
    """The group of each backend, and ``control``, a gloo group for what the benchmark itself has to say."""

    def __init__(self, bench: CommBench, place: WorkerEnv) -> None:
        self.rank, self.size = place.place.rank, place.place.num_workers
        timeout = timedelta(seconds=bench.timeout_s)
        dist.init_process_group(
            "gloo",
            init_method=place.init_method,
            rank=self.rank,
            world_size=self.size,
            timeout=timeout,
        )
        world = dist.group.WORLD
        assert world is not None
        self.control: dist.ProcessGroup = world
        ranks = self.gather_json({"host": host_identity(), "helpers": len(helpers())})
        self.hosts: list[str] = [rank["host"] for rank in ranks]
        self.of_backend: dict[str, dist.ProcessGroup] = {}
        for backend in bench.chosen_backends(has_helpers=ranks[0]["helpers"] > 0):  # shoal asks rank 0 too
            if backend == COLOCATED:
                with without(HELPERS):  # groups made here have none
                    self.of_backend[backend] = _new_group("shoal", timeout)
            else:
                self.of_backend[backend] = _new_group(backend, timeout)
        self.helper_bandwidths: tuple[float, ...] = tuple(self.gather_json(helper_bandwidths())[0])

    def largest(self, values: list[float]) -> list[float]:
        """Return each value's maximum over all ranks."""
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self.control)
        return [float(value) for value in tensor]

    def gather_json(self, value: Any) -> list[Any]:
        """Return the value of every rank, in rank order. JSON, not pickle: what comes by net is only data."""
        text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(text)]), group=self.control)
        longest = max(int(length) for length in lengths)
        texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(text)] = text
        dist.all_gather(texts, padded, group=self.control)
        return [
            parse_json(bytes(text[: int(length)].tolist()), f"what rank {rank} sent")
            for rank, (text, length) in enumerate(zip(texts, lengths, strict=True))
        ]

    def barrier(self) -> None:
        dist.barrier(group=self.control)


def _new_group(backend: str, timeout: timedelta) -> dist.ProcessGroup:
    if not hasattr(dist.Backend, backend.upper()) and backend not in dist.Backend.backend_list:
        known = ", ".join(name for name in dist.Backend.backend_list if name != "undefined")
        raise UsageError(f"--backends: torch has no backend {backend!r}; it knows {known}, and {COLOCATED}")
    group = dist.new_group(backend=backend, timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    return group
