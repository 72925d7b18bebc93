"""Divides batches, and models in stages, over workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from shoal.errors import UsageError, require_positive

LARGEST_DEFAULT_MICRO_BATCH = 64

MicroBatch = int | Literal["auto"]
"""Samples of a forward pass; ``auto``: as many as fit into memory, which the launcher finds."""


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Division of one global batch: each worker runs ``accumulation_steps`` micro-batches."""

    global_batch_size: int
    micro_batch_size: int
    num_workers: int
    accumulation_steps: int
    unit: str = "sequences"
    """Name of the samples."""
    replicas: bool = False
    """``num_workers`` counts replicas of a pipeline, of several workers each."""

    @property
    def worker_batch_size(self) -> int:
        return self.micro_batch_size * self.accumulation_steps

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes as fields of rows of the record."""
        return {
            "global_batch_size": self.global_batch_size,
            "micro_batch_size": self.micro_batch_size,
            "accumulation_steps": self.accumulation_steps,
        }

    def __str__(self) -> str:
        counted = [
            (self.micro_batch_size, self.unit.removesuffix("s"), self.unit),
            (self.accumulation_steps, "accumulation step", "accumulation steps"),
            (self.num_workers, "worker", "workers"),
        ]
        if self.replicas:
            counted[1:] = [
                (self.accumulation_steps, "micro-batch", "micro-batches"),
                (self.num_workers, "replica", "replicas"),
            ]
        product = " × ".join(f"{number} {one if number == 1 else many}" for number, one, many in counted)
        return f"{product} = {self.global_batch_size:,} {self.unit} a step"


class BatchSizes(Protocol):
    """The sizes of a batch, as a section of settings or :class:`shoal.train.run.Sizes` has them."""

    @property
    def global_batch_size(self) -> int: ...

    @property
    def micro_batch_size(self) -> MicroBatch | None: ...


def plan_batch(
    sizes: BatchSizes, num_workers: int, *, section: str = "train", unit: str = "sequences"
) -> BatchPlan:
    """Derive the accumulation; the micro-batch defaults to the largest divisor up to 64.

    Args:
        sizes: of the global batch and, or ``None``, of the micro-batch.
        num_workers: workers, or replicas of a pipeline, that share the global batch.
        section: section of the settings that has the sizes, for messages.
        unit: name of the samples.

    Raises:
        UsageError: the sizes do not divide (the message names the nearest sizes that do), or the micro-batch
            is ``auto`` and has not been chosen yet.
    """
    global_batch_size = sizes.global_batch_size
    micro_batch_size = known_size(sizes.micro_batch_size, section=section)
    if global_batch_size % num_workers:
        raise UsageError(
            f"{section}.global_batch_size {global_batch_size} does not divide over {num_workers} workers; "
            f"the nearest sizes that do are {_nearest(global_batch_size, num_workers)}"
        )
    share = global_batch_size // num_workers
    if micro_batch_size is None:
        micro_batch_size = max(d for d in range(1, LARGEST_DEFAULT_MICRO_BATCH + 1) if share % d == 0)
    if share % micro_batch_size:
        raise UsageError(
            f"{section}.micro_batch_size {micro_batch_size} does not divide a worker's share of {share} "
            f"{unit} ({section}.global_batch_size {global_batch_size} / {num_workers} workers); "
            f"the nearest sizes that do are {_nearest_divisors(share, micro_batch_size)}"
        )
    return BatchPlan(
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        num_workers=num_workers,
        accumulation_steps=share // micro_batch_size,
        unit=unit,
    )


def known_size(size: MicroBatch | None, *, section: str = "train") -> int | None:
    """Return the size of a micro-batch that is known.

    Raises:
        UsageError: it is ``auto``.
    """
    if size == "auto":
        raise UsageError(
            f"{section}.micro_batch_size auto is found by the command that starts the workers: under "
            "torchrun give the number that `shoal bench train RECIPE --fill-memory` finds on one of the hosts"
        )
    return size


def largest_divisor(share: int, most: int, *, even: bool = False) -> int:
    """Return the largest divisor of a worker's ``share`` up to ``most``; an even one, if there is one.

    Example:
        >>> largest_divisor(96, 29), largest_divisor(45, 20, even=True), largest_divisor(30, 16, even=True)
        (24, 15, 10)
    """
    divisors = [size for size in range(1, min(share, most) + 1) if share % size == 0]
    preferred = [size for size in divisors if size % 2 == 0] if even else []
    return (preferred or divisors)[-1]


def _nearest(value: int, divisor: int) -> str:
    below = value // divisor * divisor
    return " and ".join(str(v) for v in (below, below + divisor) if v)


def _nearest_divisors(value: int, target: int) -> str:
    divisors = [d for d in range(1, value + 1) if value % d == 0]
    below = [d for d in divisors if d < target][-1:]
    above = [d for d in divisors if d > target][:1]
    return " and ".join(str(d) for d in below + above)


ScheduleName = Literal["auto", "gpipe", "1f1b", "interleaved", "bfs", "vee", "backward_first"]


@dataclass(frozen=True, kw_only=True)
class StagesConfig:
    """Division of the model and the batch over the workers: workers = pipeline × tensor × data."""

    pipeline: int = 1
    """Number of workers over which the model is divided; they have consecutive ranks."""
    tensor: int = 1
    """Number of workers over which each layer is divided, by transformers' plan for the model; they have
    consecutive ranks."""
    data: int | None = None
    """Replicas of the model; default: workers / (pipeline × tensor)."""
    virtual_stages: int | None = None
    """Stages per worker; more stages shorten the bubble and add messages; default: the fastest."""
    micro_batches: int | None = None
    """Micro-batches per replica and step; default: up to 4 per worker of the pipeline."""
    schedule: ScheduleName = "auto"
    """Order of forward and backward passes; auto: the fastest in simulation with measured costs."""
    optimize: Literal["speed", "memory"] = "speed"
    """Objective of the partition into stages."""
    shard: bool = False
    """Divide parameters, gradients and optimizer state over the replicas (FSDP2)."""

    def __post_init__(self) -> None:
        require_positive("parallel", self, "pipeline", "tensor", "data", "virtual_stages", "micro_batches")
        if (self.virtual_stages or 1) > 1 and self.pipeline == 1 and not self.is_searched:
            raise UsageError(
                f"parallel.virtual_stages {self.virtual_stages} needs a pipeline: set parallel.pipeline to 2 "
                "or more"
            )

    @property
    def is_searched(self) -> bool:
        """True if the layout is yet to be found."""
        return False

    @property
    def replica_size(self) -> int:
        """Number of workers that have one copy of the model together."""
        return self.pipeline * self.tensor

    def replicas(self, num_workers: int) -> int:
        """Return the number of replicas of ``num_workers`` workers.

        Raises:
            UsageError: ``num_workers`` is not pipeline × tensor × data.
        """
        names = [f"parallel.{name} {n}" for name in ("pipeline", "tensor") if (n := getattr(self, name)) > 1]
        name = " × ".join(names) or "parallel.pipeline 1"
        if num_workers % self.replica_size:
            raise UsageError(
                f"{name} does not divide the {num_workers} workers; start a multiple of {self.replica_size} "
                "(--workers)"
            )
        num_replicas = num_workers // self.replica_size
        if self.data is not None and self.data != num_replicas:
            raise UsageError(
                f"{name} × parallel.data {self.data} are {self.replica_size * self.data} workers, but there "
                f"are {num_workers}; leave parallel.data out or start as many"
            )
        return num_replicas

    def check_wire(self, wire: str) -> None:
        """Check that replicas of stages can send their gradients in the format ``wire``.

        Raises:
            UsageError: 8-bit blocks for gradients that FSDP2 sums.
        """
        if wire == "int8" and (self.shard or self.tensor > 1):
            name = "shard" if self.shard else "tensor"
            raise UsageError(
                f"distributed.wire int8: its residuals would take the memory that parallel.{name} saves; use "
                "bf16"
            )

    def check(self, config: Any) -> None:
        """Check that the other settings allow a model in stages or shards, if it has them.

        Args:
            config: has the sections ``distributed``, ``servers``, ``optim`` and ``train``.

        Raises:
            UsageError: one does not.
        """
        if not self.splits:
            if self.micro_batches:
                raise UsageError("parallel.micro_batches needs a pipeline: set the micro_batch_size instead")
            return
        self.check_wire(config.distributed.wire)
        self.check_steps(config.servers.option)
        for setting, value, plain in (
            ("distributed.shares", config.distributed.shares, "equal"),
            ("optim.clip", config.optim.clip, "global"),
            ("train.shard_optimizer", self.shard and config.train.shard_optimizer, False),
            ("distributed.elastic", config.distributed.elastic, None),
        ):
            if value != plain:
                raise UsageError(
                    f"{setting} {value} does not go with a model in stages or shards: leave it out"
                )

    def check_steps(self, option: str) -> None:
        """Check that no servers update the weights if a worker holds less than the whole model.

        Args:
            option: the mode of servers that update, for the message; empty if none do.

        Raises:
            UsageError: they do.
        """
        if option and self.splits:
            raise UsageError(
                f"{option} does not go with a model in stages or shards: each stage would have servers of "
                "its own, which decide by themselves whose gradients a step takes; leave it out, or leave "
                "parallel.pipeline and parallel.shard out"
            )

    @property
    def splits(self) -> bool:
        """True if a worker holds less than the whole model."""
        return self.replica_size > 1 or self.shard

    def divide(
        self, sizes: BatchSizes, num_workers: int, *, section: str = "train", unit: str = "sequences"
    ) -> BatchPlan:
        """Return :meth:`plan`, or without stages and shards the division over workers.

        Raises:
            UsageError: the sizes do not divide.
        """
        if self.splits:
            return self.plan(sizes, num_workers, section=section, unit=unit)
        self.replicas(num_workers)  # parallel.data, if given, has to be right
        return plan_batch(sizes, num_workers, section=section, unit=unit)

    def plan(
        self, sizes: BatchSizes, num_workers: int, *, section: str = "train", unit: str = "sequences"
    ) -> BatchPlan:
        """Return the division of a global batch; the ``num_workers`` of the plan are the replicas.

        Args:
            sizes: of the global batch and, or ``None``, of the micro-batch.
            section: section of the settings that has the sizes, for messages.
            unit: name of the samples.

        Raises:
            UsageError: the sizes do not divide.
        """
        replicas = self.replicas(num_workers)
        micro_batch_size = known_size(sizes.micro_batch_size, section=section)
        size = self.micro_batch_size(sizes.global_batch_size // replicas, micro_batch_size)
        batch = plan_batch(_Sizes(sizes.global_batch_size, size), replicas, section=section, unit=unit)
        return replace(batch, replicas=True)

    def micro_batch_size(self, share: int, requested: int | None) -> int | None:
        """Return the sequences per micro-batch; ``None``: the default without a pipeline.

        Args:
            share: sequences of a replica per step.
            requested: ``train.micro_batch_size``.

        Raises:
            UsageError: parallel.micro_batches does not divide the share, or contradicts ``requested``.
        """
        if self.micro_batches is None:
            if requested is not None or self.pipeline == 1:
                return requested
            return share // max(d for d in range(1, 4 * self.pipeline + 1) if share % d == 0)
        if share % self.micro_batches:
            raise UsageError(
                f"parallel.micro_batches {self.micro_batches} does not divide a replica's share of {share} "
                "sequences of the global batch; choose a divisor of it"
            )
        size = share // self.micro_batches
        if requested is not None and requested != size:
            raise UsageError(
                f"parallel.micro_batches {self.micro_batches} make micro-batches of {size} sequences, but "
                f"train.micro_batch_size is {requested}: leave one of them out"
            )
        return size


@dataclass(frozen=True)
class _Sizes:
    global_batch_size: int
    micro_batch_size: int | None


class WorkerShares(Protocol):
    """Samples of each worker, which may change between two steps; the same on all workers."""

    current: tuple[int, ...]
    """Samples of each worker, by rank."""
    seconds: list[float]
    """Median time of each worker's part, by rank, from which the last change was computed; or empty."""

    def observe(self, step: int, seconds: Sequence[float]) -> bool:
        """Take the time that each worker computed, by rank; return whether the shares of ``step`` are others.

        Args:
            step: the step that comes next, counted over the whole run from 1.
            seconds: of a step before it, without waiting for other workers.
        """
