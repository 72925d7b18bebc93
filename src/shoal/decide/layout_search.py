"""Searches the layout of devices, stages × replicas, that trains fastest within memory.

A layout uses ``pipeline × data`` devices: each replica is a pipeline, and ranks that hold the same stages
average their gradients over the replicas. A step takes until the last rank has its average. A rank begins to
average after its last backward pass, so ranks that finish early hide it in their idle time. A weight that is
tied over ranks is summed over them first. All is predicted from a model's cost, without a device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from shoal.decide.autotune import Conditions, ScheduleChoice, ScheduleSearch
from shoal.decide.cost import Link, ModelCost, StageCost, parameter_sizes, stage_costs
from shoal.decide.layout import Layout
from shoal.decide.ownership import largest_share
from shoal.decide.partition import DoesNotFit, Memory, check_num_stages, in_gb
from shoal.decide.server_assignment import ring_seconds
from shoal.errors import UsageError

_QUICK = ("1f1b", "interleaved", "bfs", "gpipe")
"""Schedules for the first ranking of layouts: those that are cheap to construct."""
MICRO_BATCH_SIZES = (1, 2, 4, 8, 16)
"""Sizes of a micro-batch, in samples, for callers without a choice of their own."""
MAX_PIPELINE = 32
"""Longest pipelines that are tried by default: bubbles and search time grow with the length."""
_MAX_TIGHT = 8
"""Number of layouts that do not fit at first and are searched in detail."""
_MAX_TIGHT_REMEDY = 3
"""The same per remedy of an error: a detailed search takes about a second."""
_RELAXED_DEVICES = (2, 4, 8, 16)
"""Multiples of the devices that are tried to suggest a layout that fits."""


@dataclass(frozen=True, kw_only=True)
class _Shape:
    """Ranks of a pipeline, replicas of it, and the micro-batches of a replica."""

    stages: int
    data: int
    micro_batch_size: int
    num_micro_batches: int

    def __str__(self) -> str:
        return f"pipeline {self.stages} × data {self.data} with micro-batches of {self.micro_batch_size}"


@dataclass(frozen=True, kw_only=True)
class RankedLayout:
    """A layout with its predicted step and its place among others."""

    layout: Layout
    data: int
    """Replicas of the pipeline."""
    choice: ScheduleChoice
    stages: tuple[StageCost, ...]
    first_units: tuple[str, ...]
    """Name of the first unit of each stage."""
    memory: Memory
    step_s: float
    reason: str = ""
    """Reason for its place in the ranking."""

    @property
    def micro_batch_size(self) -> int:
        assert self.layout.micro_batch is not None
        return round(self.layout.micro_batch)

    @property
    def num_micro_batches(self) -> int:
        """Per replica and step."""
        return self.layout.global_batch // (self.data * self.micro_batch_size)

    @property
    def averaging_s(self) -> float:
        """Time of a step after the pipeline has ended: gradients that idle time did not hide."""
        return self.step_s - self.choice.timeline.makespan_s

    @property
    def spare_bytes(self) -> int:
        """Free memory of the fullest rank; negative: missing."""
        return self.memory.limit_bytes - max(self.choice.rank_bytes)

    def __str__(self) -> str:
        virtual = f", {self.layout.virtual} stages per rank" if self.layout.virtual > 1 else ""
        return (
            f"pipeline {self.layout.stages} × data {self.data}{virtual}, {self.num_micro_batches} "
            f"micro-batches of {self.micro_batch_size}, {self.choice.schedule.name}"
        )


def averaging_s(
    cost: ModelCost,
    choice: ScheduleChoice,
    *,
    data: int,
    link: Link | None,
    gradient_ratio: float = 1.0,
    broadcasts: bool = False,
) -> float:
    """Return the time of a step from its first action until the last rank has its averaged gradients.

    Each rank's gradients are all-reduced in a ring of ``data`` replicas, 2 (n - 1) / n of their bytes through
    every link; sharded ones take as much, half of it before the step. Those of a weight that several ranks
    share are first all-reduced over these ranks, once the last of them has it.

    Args:
        broadcasts: owners then send their new weights to the other replicas (ZeRO-1), half of an all-reduce.
    """
    end = list(choice.timeline.rank_end_s)
    if link is None:
        return max(end)
    bounds = [0, *choice.cuts, len(cost.units)]
    owned: list[dict[str, int]] = [{} for _ in end]
    for stage, rank in enumerate(choice.schedule.placement):
        for unit in cost.units[bounds[stage] : bounds[stage + 1]]:
            owned[rank].update(unit.parameters)
    owners: dict[str, list[int]] = {}
    for rank, parameters in enumerate(owned):
        for name in parameters:
            owners.setdefault(name, []).append(rank)

    def ring(num_bytes: float, num_ranks: int) -> float:
        return ring_seconds(num_bytes, [link.bytes_per_s] * num_ranks, latency_s=link.latency_s)

    for name, ranks in owners.items():
        if len(ranks) > 1:
            done = max(end[rank] for rank in ranks) + ring(owned[ranks[0]][name] * gradient_ratio, len(ranks))
            for rank in ranks:
                end[rank] = done
    return max(
        done + ring(held * gradient_ratio, data) + broadcasts * ring(held, data) / 2
        for done, held in zip(end, (sum(parameters.values()) for parameters in owned), strict=True)
    )


@dataclass(frozen=True, kw_only=True)
class LayoutSearch:
    """The layouts to choose from, except for the number of devices."""

    cost: ModelCost
    """Of a micro-batch of ``micro_batch_size`` samples."""
    memory: Memory
    global_batch_size: int
    micro_batch_size: int
    sizes: Sequence[int]
    """Sizes of micro-batches to choose from; the cost is scaled in proportion."""
    conditions: Conditions = field(default_factory=Conditions)
    """Link of the pipeline and schedules to choose from; their memory is not used."""
    data_link: Link | None = None
    """Between replicas. Default: the pipeline's."""
    shard: bool = False
    """Shard the state over the replicas."""
    shard_optimizer: bool = False
    """Divide the optimizer's state over the replicas (ZeRO-1)."""

    def choose(
        self, num_devices: int, pipelines: Sequence[int] | None = None, *, num_layouts: int = 5
    ) -> list[RankedLayout]:
        """Return the layouts that fit, the fastest first, each with the reason for its place.

        All are ranked with one simple schedule; the best ``num_layouts`` get the whole portfolio and refined
        cuts.

        Args:
            pipelines: numbers of ranks to choose from. Default: every divisor of ``num_devices`` up to
                :data:`MAX_PIPELINE`.

        Raises:
            UsageError: more stages than the model has units, a pipeline that does not divide the devices, or
                a global batch that no layout divides.
            DoesNotFit: no layout fits; the message has the missing bytes of the nearest, and one that would
                fit.
        """
        for ranks in pipelines or ():
            check_num_stages(self.cost, ranks)
            if num_devices % ranks:
                raise UsageError(f"a pipeline of {ranks} ranks does not divide {num_devices} devices")
        shapes = list(self.shapes(num_devices, pipelines))
        if not shapes:
            raise UsageError(
                f"a global batch of {self.global_batch_size} cannot be divided over {num_devices} devices in "
                f"micro-batches of {' or '.join(map(str, self.sizes))}: "
                "it must be a multiple of replicas × micro-batch size"
            )
        best, missing = self.quick(shapes, num_layouts)
        layouts = [self.ranked(shape) for shape in best] or self.tight(missing, _MAX_TIGHT)
        if not layouts:
            nearest, lacking = min(missing.items(), key=lambda item: item[1])
            raise DoesNotFit(
                f"no layout of {num_devices} devices of {in_gb(self.memory.limit_bytes)} fits: {nearest} "
                f"comes nearest and lacks {in_gb(lacking)} on its fullest rank; {_remedy(self, num_devices)}",
                lacking,
            )
        layouts.sort(key=lambda layout: layout.step_s)
        return [replace(layout, reason=_reason(layout, layouts[0])) for layout in layouts]

    def shapes(self, num_devices: int, pipelines: Sequence[int] | None) -> Iterator[_Shape]:
        """Yield the layouts that divide devices, batch and model."""
        num_units = len(self.cost.units)
        for ranks in pipelines or range(1, min(num_devices, num_units, MAX_PIPELINE) + 1):
            data = num_devices // ranks
            if num_devices % ranks or ranks * min(self.conditions.virtual) > num_units:
                continue
            for size in self.sizes:
                if self.global_batch_size % (data * size) == 0:
                    num_micro_batches = self.global_batch_size // (data * size)
                    yield _Shape(
                        stages=ranks, data=data, micro_batch_size=size, num_micro_batches=num_micro_batches
                    )

    def least_s(self, shape: _Shape) -> float:
        """Return the time of a step of equal stages without relays and averaging: a lower bound."""
        whole = sum(unit.forward_s + unit.backward_s for unit in self.cost.units)
        batch_s = whole * shape.micro_batch_size / self.micro_batch_size / shape.stages
        return batch_s * (shape.num_micro_batches + (shape.stages - 1) / max(self.conditions.virtual))

    def quick(self, shapes: Sequence[_Shape], num_layouts: int) -> tuple[list[_Shape], dict[_Shape, int]]:
        """Return the best shapes with a simple schedule, and the missing bytes of those that do not fit."""
        names = [name for name in _QUICK if name in self.conditions.names] or list(self.conditions.names)
        fitting: list[tuple[float, _Shape]] = []
        missing: dict[_Shape, int] = {}
        for shape in sorted(shapes, key=self.least_s):
            if len(fitting) >= num_layouts and self.least_s(shape) >= fitting[num_layouts - 1][0]:
                break
            try:
                layout = self.ranked(shape, names=names, num_refined=0)
            except DoesNotFit as error:
                missing[shape] = error.missing_bytes
            else:
                fitting = sorted([*fitting, (layout.step_s, shape)], key=lambda pair: pair[0])
        return [shape for _, shape in fitting[:num_layouts]], missing

    def tight(self, missing: dict[_Shape, int], most: int) -> list[RankedLayout]:
        """Return layouts that fit with fewer micro-batches in flight, of the ``most`` with the least missing
        bytes."""
        layouts = []
        for shape in sorted(missing, key=lambda shape: missing[shape])[:most]:
            try:
                layouts.append(self.ranked(shape))
            except DoesNotFit as error:
                missing[shape] = min(missing[shape], error.missing_bytes)
        return layouts

    def ranked(self, shape: _Shape, names: Sequence[str] | None = None, num_refined: int = 1) -> RankedLayout:
        """Return the shape with the schedule whose step, with averaging, is the fastest.

        Raises:
            DoesNotFit: no schedule fits.
        """
        cost = self.cost
        if shape.micro_batch_size != self.micro_batch_size:
            cost = cost.scaled(shape.micro_batch_size / self.micro_batch_size)
        memory = replace(self.memory, shards=shape.data if self.shard else 1)
        if self.shard_optimizer:
            owned = largest_share(parameter_sizes(cost.units), shape.data)
            memory = replace(memory, optimizer_ratio=memory.optimizer_ratio * owned)
        conditions = replace(self.conditions, memory=memory, names=names or self.conditions.names)
        search = ScheduleSearch(
            cost=cost,
            num_ranks=shape.stages,
            num_micro_batches=shape.num_micro_batches,
            conditions=conditions,
        )
        choices = search.choose(num_refined)
        link = self.data_link or conditions.link
        ratio = memory.gradient_ratio
        steps = [
            averaging_s(
                cost,
                each,
                data=shape.data,
                link=link,
                gradient_ratio=ratio,
                broadcasts=self.shard_optimizer,
            )
            for each in choices
        ]
        best = min(range(len(choices)), key=lambda index: steps[index])
        return RankedLayout(
            layout=Layout(
                global_batch=self.global_batch_size,
                micro_batch=shape.micro_batch_size,
                stages=shape.stages,
                virtual=choices[best].num_virtual,
                shard=self.shard,
                sharded_optimizer=self.shard_optimizer,
            ),
            data=shape.data,
            choice=choices[best],
            stages=stage_costs(cost, choices[best].cuts),
            first_units=tuple(cost.units[first].name for first in (0, *choices[best].cuts)),
            memory=memory,
            step_s=steps[best],
        )


def _reason(layout: RankedLayout, best: RankedLayout) -> str:
    timeline = layout.choice.timeline
    idle = f"{100 * timeline.bubble:.1f} % idle"
    averaging = f"{100 * layout.averaging_s / layout.step_s:.1f} % of the step averaging gradients"
    spare = f"{in_gb(layout.spare_bytes)} to spare on the fullest rank"
    if layout is best:
        return f"the fastest that fits: {idle}, {averaging}, {spare}"
    return f"{layout.step_s / best.step_s:.2f} times the time of the fastest: {idle}, {averaging}, {spare}"


def _remedy(search: LayoutSearch, num_devices: int) -> str:
    """Return the least change that makes a layout fit: smaller micro-batches, sharding, more devices."""
    least = min(search.sizes)
    halves = [least >> shift for shift in range(1, least.bit_length())]
    changes: list[tuple[str, LayoutSearch, int]] = [
        (f"micro-batches of {size}", replace(search, sizes=(size,)), num_devices)
        for size in halves
        if search.global_batch_size % size == 0
    ]
    if not search.shard:
        if not search.shard_optimizer:
            changes.append(("a sharded optimizer", replace(search, shard_optimizer=True), num_devices))
        changes.append(("sharded state", replace(search, shard=True, shard_optimizer=False), num_devices))
    changes += [(f"{n * num_devices} devices", search, n * num_devices) for n in _RELAXED_DEVICES]
    changes.append(
        (
            f"{_RELAXED_DEVICES[-1] * num_devices} devices, sharded state and micro-batches of 1",
            replace(search, sizes=(1,), shard=True, shard_optimizer=False),
            _RELAXED_DEVICES[-1] * num_devices,
        )
    )
    for change, changed, devices in changes:
        shapes = list(changed.shapes(devices, None))
        fitting, missing = changed.quick(shapes, 1)
        for layout in fitting or changed.tight(missing, _MAX_TIGHT_REMEDY):
            return f"with {change} it fits as {layout}"
    return "nothing that was tried fits: take a device with more memory"
