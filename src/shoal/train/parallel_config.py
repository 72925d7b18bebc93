"""Settings of pipeline and data parallelism. Standard library only, so that ``--help`` is quick."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal

from shoal.decide.batch import BatchPlan, BatchSizes, known_size, plan_batch
from shoal.errors import UsageError, require_positive

ScheduleName = Literal["auto", "gpipe", "1f1b", "interleaved", "bfs", "vee", "backward_first"]

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Division of the model and the batch over the workers: workers = pipeline × data."""

    layout: Literal["given", "auto"] = "given"
    """given: the settings below; auto: the fastest layout that fits the memory, by a cost model."""
    pipeline: int = 1
    """Workers that hold a part of the model each; neighbours by rank."""
    data: int | None = None
    """Replicas of the pipeline; default: workers / pipeline."""
    virtual_stages: int | None = None
    """Stages per worker; more of them shorten the bubble and add messages; default: the fastest."""
    micro_batches: int | None = None
    """Micro-batches per replica and step; default: up to 4 per worker of the pipeline."""
    schedule: ScheduleName = "auto"
    """Order of forward and backward; auto: the fastest, by simulation with measured costs."""
    optimize: Literal["speed", "memory"] = "speed"
    """Objective of the cut into stages."""
    shard: bool = False
    """Divide parameters, gradients and optimizer state over the replicas (FSDP2)."""
    devices: int | None = None
    """Devices to plan for, with layout auto or in a dry run; default: the workers."""
    memory: str | None = None
    """Memory of a device, such as 40GB, for layout auto and for predictions in a dry run."""
    device: Literal["v100", "a100", "h100"] = "a100"
    """Device whose rates the cost model takes."""

    def __post_init__(self) -> None:
        require_positive("parallel", self, "pipeline", "data", "virtual_stages", "micro_batches", "devices")
        if (self.virtual_stages or 1) > 1 and self.pipeline == 1 and self.layout == "given":
            raise UsageError(
                f"parallel.virtual_stages {self.virtual_stages} needs a pipeline: set parallel.pipeline to 2 "
                "or more"
            )
        if self.memory is not None:
            parse_bytes(self.memory)

    def replicas(self, num_workers: int) -> int:
        """Return the number of replicas of ``num_workers`` workers.

        Raises:
            UsageError: ``num_workers`` is not pipeline × data.
        """
        if num_workers % self.pipeline:
            raise UsageError(
                f"parallel.pipeline {self.pipeline} does not divide the {num_workers} workers; start a "
                f"multiple of {self.pipeline} (--workers)"
            )
        found = num_workers // self.pipeline
        if self.data is not None and self.data != found:
            raise UsageError(
                f"parallel.pipeline {self.pipeline} × parallel.data {self.data} are "
                f"{self.pipeline * self.data} workers, but there are {num_workers}; leave parallel.data out "
                "or start as many"
            )
        return found

    def check_wire(self, wire: str) -> None:
        """Check that replicas of stages can send their gradients in the format ``wire``.

        Raises:
            UsageError: another one than fp32 for gradients that FSDP2 sums.
        """
        if wire != "fp32" and self.shard:
            raise UsageError(
                f"distributed.wire {wire}: with parallel.shard, replicas add their gradients in fp32"
            )

    @property
    def splits(self) -> bool:
        """True if a worker holds less than the whole model."""
        return self.pipeline > 1 or self.shard

    def plan(self, sizes: BatchSizes, num_workers: int) -> BatchPlan:
        """Return how a global batch is computed; the ``num_workers`` of the plan are the replicas.

        Args:
            sizes: of the global batch and, or ``None``, of the micro-batch.

        Raises:
            UsageError: the sizes do not divide.
        """
        replicas = self.replicas(num_workers)
        given = known_size(sizes.micro_batch_size)
        size = self.micro_batch_size(sizes.global_batch_size // replicas, given)
        found = plan_batch(_Sizes(sizes.global_batch_size, size), replicas)
        return replace(found, replicas=True)

    def micro_batch_size(self, share: int, given: int | None) -> int | None:
        """Return the sequences per micro-batch; ``None``: the default without a pipeline.

        Args:
            share: sequences of a replica per step.
            given: ``train.micro_batch_size``.

        Raises:
            UsageError: parallel.micro_batches does not divide the share, or contradicts ``given``.
        """
        if self.micro_batches is None:
            if given is not None or self.pipeline == 1:
                return given
            return share // max(d for d in range(1, 4 * self.pipeline + 1) if share % d == 0)
        if share % self.micro_batches:
            raise UsageError(
                f"parallel.micro_batches {self.micro_batches} does not divide a replica's share of {share} "
                "sequences of the global batch; choose a divisor of it"
            )
        size = share // self.micro_batches
        if given is not None and given != size:
            raise UsageError(
                f"parallel.micro_batches {self.micro_batches} make micro-batches of {size} sequences, but "
                f"train.micro_batch_size is {given}: leave one of them out"
            )
        return size


@dataclass(frozen=True)
class _Sizes:
    global_batch_size: int
    micro_batch_size: int | None


def parse_bytes(text: str, name: str = "parallel.memory") -> int:
    """Return the number of bytes of a text such as ``40GB`` or ``16GiB``.

    Args:
        text: a number with a unit.
        name: the setting, for the error.

    Raises:
        UsageError: the text is not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    if match is None or match[2].upper() not in _UNITS:
        raise UsageError(f"{name} {text!r} must be a number with a unit, such as 40GB or 16GiB")
    return int(float(match[1]) * _UNITS[match[2].upper()])
