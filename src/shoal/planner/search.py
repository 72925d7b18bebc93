"""Ranks all layouts that fit by predicted time or cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from shoal.decide.batch import StagesConfig
from shoal.decide.layout import RESERVED, Layout, footprint_of
from shoal.decide.ownership import shard_dimension
from shoal.decide.server_assignment import recommended_bucket_bytes
from shoal.decide.workload import Workload
from shoal.errors import UsageError
from shoal.planner.goal import Aim, Goal
from shoal.planner.hardware import Instance, Machines, require_accelerators
from shoal.planner.network import ALGORITHMS, COMPARED, RINGS, WITH_HELPERS
from shoal.planner.prediction import Part, Plan, Training, predict

_STAGES = (1, 2, 4, 8, 16, 32, 64)
_MOST_WIDTHS = 2
"""Widths of tensors that are tried of those that need no stages."""
Divided = Literal["nothing", "optimizer", "all"]
_AND_SHARDED: dict[Divided, str] = {
    "nothing": "",
    "optimizer": " and a sharded optimizer",
    "all": " and sharded state",
}
_TIED = 1e-3
"""Relative difference below which predictions are equal."""


def layouts_of(
    training: Training, workers: Machines, *, algorithm: str, wire_bytes: int = 4
) -> list[tuple[Layout, ...]]:
    """Return the layouts that fit, each with one entry per part of the training.

    A model that fits on one device is not split. Another is tried with the fewest stages and twice as many,
    with all state in shards over the replicas, and with each layer over the fewest devices of a host and
    twice as many. The batch is divided as in ``shoal train``; where its micro-batch does not fit, the largest
    divisor that does is taken, and the optimizer's state is divided over the replicas (ZeRO-1) if larger ones
    then fit.

    Raises:
        UsageError: the batch does not divide over devices of which one holds the model, or over the replicas
            of any other layout, or nothing fits: names the nearest layout and how much memory it lacks.
    """
    fitting: list[tuple[Layout, ...]] = []
    without = _Without()
    num_widths = 0
    for tensor in _widths(training, workers):
        shape = _Shape(tensor=tensor, algorithm=algorithm, wire_bytes=wire_bytes)
        found = _of_width(training, workers, shape, without)
        fitting += found
        of_one_stage = any(first.stages == 1 and not first.shard for first, *_ in found)
        num_widths += of_one_stage
        if num_widths == _MOST_WIDTHS or (of_one_stage and tensor == 1):
            break
    if not fitting:
        raise without.error
    return fitting


def _widths(training: Training, workers: Machines) -> list[int]:
    """Return the numbers of devices of a host over which each layer may be divided."""
    common = set.intersection(*(set(part.workload.parts) for part in training.parts))
    per_host = workers.instance.num_accelerators
    return [1, *(n for n in sorted(common) if training.has_tensor and per_host % n == 0)]


@dataclass(kw_only=True)
class _Without:
    """Layouts that are none: what they lack, and batches that do not divide."""

    missing: list[_Lacks] = field(default_factory=list)
    undivided: list[UsageError] = field(default_factory=list)

    @property
    def error(self) -> UsageError:
        """The first batch, which is that of ``shoal train``, else the nearest layout."""
        if self.undivided:
            return self.undivided[0]
        return UsageError(str(min(self.missing, key=lambda lack: lack.num_bytes)))


def _of_width(
    training: Training, workers: Machines, shape: _Shape, without: _Without
) -> list[tuple[Layout, ...]]:
    """Return the layouts that fit with one width of tensors; add the others to ``without``."""
    fitting: list[tuple[Layout, ...]] = []
    fewest = 0
    num_layers = min(len(part.workload.layers) for part in training.parts)
    for stages in _STAGES if training.has_stages else _STAGES[:1]:
        if workers.num_accelerators % (stages * shape.tensor) or stages > num_layers:
            continue
        if fewest and stages > fewest * (1 if fewest == 1 else 2):
            break  # more stages than the model needs only add bubbles
        num_before = len(fitting)
        replicas = workers.num_accelerators // (stages * shape.tensor)
        for divided in _divided_states(training, shape, replicas):
            if divided != "nothing" and replicas == 1:
                continue
            if divided == "all" and (len(fitting) > num_before or any(first.shard for first, *_ in fitting)):
                continue  # less memory for the state gains nothing
            try:
                tried = replace(shape, stages=stages, divided=divided)
                chosen = [_first_that_fits(part, workers, tried) for part in training.parts]
            except _Lacks as lack:
                without.missing.append(lack)
                continue
            except UsageError as error:
                if stages == shape.tensor == 1 and _holds_model(training, workers, tried):
                    raise
                without.undivided.append(error)
                continue
            layouts = tuple(layout for layout, _ in chosen)
            if tuple(replace(layout, sharded_optimizer=False) for layout in layouts) in fitting:
                continue  # the same micro-batches
            fitting.append(layouts)
            if divided == "nothing" or training.shard_optimizer:
                fewest = fewest or stages
                if all(is_preferred for _, is_preferred in chosen):
                    break  # less memory for the optimizer gains nothing
    return fitting


def _divided_states(training: Training, shape: _Shape, replicas: int) -> tuple[Divided, ...]:
    """Return what the replicas may divide among them."""
    if training.shard_optimizer:
        return ("optimizer",)
    may_shard = training.has_shards and shape.algorithm in RINGS  # which FSDP2 takes
    if shape.tensor > 1:
        may_shard = may_shard and all(
            shard_dimension(sizes, shape.tensor, replicas) is not None
            for part in training.parts
            for sizes in part.workload.parts[shape.tensor].divided
        )
    return ("nothing", "optimizer", *(("all",) if may_shard else ()))


class _Lacks(Exception):
    """No micro-batch of a layout fits."""

    def __init__(self, message: str, num_bytes: float) -> None:
        super().__init__(message)
        self.num_bytes = num_bytes


@dataclass(frozen=True, kw_only=True)
class _Shape:
    """A layout without micro-batches, the same for all parts of a training."""

    algorithm: str
    wire_bytes: int
    tensor: int = 1
    stages: int = 1
    divided: Divided = "nothing"
    """State that is sharded over the replicas."""

    def __str__(self) -> str:
        wide = f" of layers over {self.tensor} devices" if self.tensor > 1 else ""
        return f"{self.stages} {'stage' if self.stages == 1 else 'stages'}{wide}"


def _holds_model(training: Training, workers: Machines, shape: _Shape) -> bool:
    """Return whether a device has room for the model and one sample."""
    device = require_accelerators(workers)
    room = device.memory_bytes * (1 - RESERVED)
    layout = Layout(
        global_batch=1, shard=shape.divided == "all", sharded_optimizer=shape.divided == "optimizer"
    )
    return all(
        footprint_of(
            part.workload,
            layout,
            micro_batch=1,
            num_micro_batches=1,
            replicas=workers.num_accelerators,
            numerics=device.numerics(part.precision),
        ).total_bytes
        <= room
        for part in training.parts
    )


def _first_that_fits(part: Part, workers: Machines, shape: _Shape) -> tuple[Layout, bool]:
    """Return the layout with the largest micro-batch that fits, and whether it is that of ``shoal train``.

    Raises:
        _Lacks: none fits.
    """
    device = require_accelerators(workers)
    room = device.memory_bytes * (1 - RESERVED)
    replicas = workers.num_accelerators // (shape.stages * shape.tensor)
    needed, layout = 0, None
    for number, layout in enumerate(_candidates(part, workers, shape)):
        assert layout.micro_batch is not None
        needed = footprint_of(
            part.workload,
            layout,
            micro_batch=layout.micro_batch,
            num_micro_batches=round(part.global_batch / replicas / layout.micro_batch),
            replicas=replicas,
            numerics=device.numerics(part.precision),
        ).total_bytes
        if needed <= room:
            return layout, number == 0
    assert layout is not None
    raise _Lacks(
        f"{part.workload.name} fits on no layout of {workers}: the nearest, {shape} with micro-batches of "
        f"{layout.micro_batch:g}{_AND_SHARDED[shape.divided]}, needs {needed / 2**30:.1f} GiB a device, "
        f"{(needed - room) / 2**30:.1f} GiB more than there are; take more or larger devices",
        needed - room,
    )


@dataclass(frozen=True)
class _Sizes:
    global_batch_size: int
    micro_batch_size: int | None


def _candidates(part: Part, workers: Machines, shape: _Shape) -> Iterator[Layout]:
    """Yield the layouts with the micro-batch of ``shoal train`` and smaller ones."""
    stages = shape.stages
    sizes = _Sizes(part.global_batch, part.micro_batch)
    batch = StagesConfig(pipeline=stages, tensor=shape.tensor).plan(
        sizes, workers.num_accelerators, section=part.section, unit=part.workload.unit
    )
    share, most = batch.worker_batch_size, batch.micro_batch_size
    for micro in range(most, 0, -1):
        if share % micro:
            continue
        yield Layout(
            global_batch=part.global_batch,
            micro_batch=micro,
            tensor=shape.tensor,
            stages=stages,
            virtual=2 if stages > 1 else 1,
            shard=shape.divided == "all",
            sharded_optimizer=shape.divided == "optimizer",
            algorithm=shape.algorithm,
            wire_bytes=shape.wire_bytes,
            bucket_bytes=bucket_bytes_of(part.workload, workers, per_replica=stages * shape.tensor),
            collectives_at_once=2 if workers.instance.is_cpu else 1,
        )


def bucket_bytes_of(workload: Workload, workers: Machines, *, per_replica: int = 1) -> int:
    """Return the size of the gradients' buckets of ``shoal train``.

    Args:
        per_replica: accelerators that hold one copy of the model.
    """
    trained = round(workload.num_parameters * workload.trainable)
    return recommended_bucket_bytes(
        workers.count,
        ranks_per_host=max(workers.instance.num_accelerators, 1),
        gradient_bytes=4 * trained // per_replica,  # fp32, as DDP's buckets hold them
    )


def search(
    training: Training,
    workers: Machines,
    helpers: Sequence[Machines] = (),
    *,
    goal: Goal = "time",
    algorithms: Sequence[str] | None = None,
    wire_bytes: int = 4,
) -> list[Plan]:
    """Predict all layouts and algorithms; return the plans, the best first.

    Args:
        helpers: sets of helper hosts; each is tried.
        goal: rank by ``"time"`` or by ``"cost"``.
        algorithms: default: all that the hosts allow, with helpers only where there are some.
        wire_bytes: bytes of a gradient element on the network.

    Raises:
        UsageError: the model fits on no layout, or a ranking by cost lacks the price of a host.
    """
    plans: list[Plan] = []
    refused: list[UsageError] = []
    for algorithm in algorithms or algorithms_of(workers):
        try:
            fitting = layouts_of(training, workers, algorithm=algorithm, wire_bytes=wire_bytes)
        except UsageError as error:  # another one may take shards
            refused.append(error)
            continue
        for helping in helpers if algorithm == WITH_HELPERS else (None,):
            plans += [predict(training, workers, layouts, helping) for layouts in fitting]
    if not plans and refused:
        raise refused[0]
    if not plans:
        raise UsageError("no algorithm is left to plan with; two-hop-helpers needs --helpers")
    if goal == "cost" and any(plan.dollars is None for plan in plans):
        raise UsageError(
            f"{workers.instance.name} has no price per hour in the catalog to rank by cost; "
            "use --goal time, or give it a price with --catalog FILE"
        )
    return _simplest_first(sorted(plans, key=Aim(goal=goal).key), goal)


def _simplest_first(plans: list[Plan], goal: Goal) -> list[Plan]:
    """Return sorted plans with the simplest of those that are as good as the best before the others.

    Simpler is what needs no servers, fewer stages, and comes first in :data:`COMPARED`.
    """
    figures = [plan.total_s if goal == "time" else plan.dollars or 0.0 for plan in plans]
    tied = [plan for plan, figure in zip(plans, figures, strict=True) if figure <= (1 + _TIED) * figures[0]]
    simplest = min(tied, key=lambda plan: _complexity(plan.layouts[0]))
    return [simplest, *(plan for plan in plans if plan is not simplest)]


def _complexity(layout: Layout) -> tuple[int, bool, bool, int]:
    return layout.per_replica, layout.shard, layout.sharded_optimizer, COMPARED.index(layout.algorithm)


def algorithms_of(workers: Machines) -> Sequence[str]:
    """Return the algorithms that the libraries of the hosts have: gloo, for processors, has rings alone."""
    of_gpus = ("hierarchical-ring", "tree")
    return [each for each in ALGORITHMS if not (workers.instance.is_cpu and each in of_gpus)]


def helpers_to_try(workers: Machines, instances: Iterable[Instance]) -> list[Machines]:
    """Return sets of helper hosts: a quarter, a half and all of the number of workers' hosts.

    Of CPU hosts with a price, those are tried than which no other has as fast a network for less.
    """
    priced = [each for each in instances if each.is_cpu and each.price_per_hour is not None]
    useful = [
        each
        for each in priced
        if not any(
            other.nic_bytes_per_s >= each.nic_bytes_per_s
            and (other.price_per_hour or 0.0) < (each.price_per_hour or 0.0)
            for other in priced
        )
    ]
    counts = sorted({max(1, workers.count // part) for part in (4, 2, 1)})
    return [Machines(count=count, instance=each) for each in useful for count in counts]
