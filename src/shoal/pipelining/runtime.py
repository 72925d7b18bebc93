"""Runs the steps of a pipeline on one worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shoal.decide.pipeline_simulator import Timeline
from shoal.pipelining.adapter import RunningStage, ScheduleRuntime
from shoal.pipelining.device_placement import state_of
from shoal.pipelining.explain import explain
from shoal.pipelining.failure_detector import FailureDetector
from shoal.pipelining.loss import Batch, Count, check_inputs, micro_batches, num_rows, weighted
from shoal.pipelining.pipeline_plan import PipelinePlan
from shoal.pipelining.process_groups import ProcessGroups
from shoal.pipelining.random_streams import streams
from shoal.pipelining.replicas import ReplicaSum
from shoal.pipelining.stage import StageModule
from shoal.pipelining.stage_runner import StageRunner
from shoal.pipelining.state_dict import ModelPart
from shoal.pipelining.tied_weights import TiedWeights
from shoal.pipelining.trace import Tracer, clock_offset, gather, step_row, timeline_of
from shoal.pipelining.verify import compare, run_unsplit
from shoal.record import PipelineStep


@dataclass(frozen=True)
class Evaluation:
    """Result of :meth:`Pipeline.evaluate`."""

    loss: Tensor
    """Mean over the targets of the whole global batch, on every rank, ``[]``."""
    outputs: list[Any] | None
    """On the last stage's rank: the model's output for each micro-batch. ``None`` elsewhere."""


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """Options of a pipeline besides its plan."""

    example: dict[str, Tensor]
    """A replica's batch, on the meta device."""
    count: Count
    seed: int
    title: str
    """Name of the model, for reports."""
    wire: torch.dtype | Callable[..., Any] | None = None
    """Dtype in which replicas send fp32 gradients, or the class that sends them; default: as they are."""


class Pipeline:
    """This worker's part of a model that is split over several workers.

    Attributes:
        module: This worker's parameters and buffers under the names of the unsplit model. Optimizers,
            clipping and checkpoints use it like any model.
        plan: The layout, the same on all workers.
        timeline: The predicted timeline of a step.
        traced: The measured timeline of the last step inside :meth:`tracing`.
        wire: Sends the gradients of replicas, if a class was given for that; its residuals are state to save.
        device: Where this worker computes.
        loss_scale: Factor of the gradients of a step, against underflow in fp16; 1 by default. Divide them by
            it before the update, and skip the update if a gradient of any stage is not finite.
        step_number: Number of completed steps. Set it when resuming from a checkpoint: random streams
            (dropout) depend on it.
        is_alone: The gradients and the loss of a step are those of this replica's own batch: nothing is
            summed over replicas, which need not come to a step together. Evaluations stay those of all.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        runners: Mapping[int, StageRunner],
        users: Mapping[str, Sequence[int]],
        groups: ProcessGroups,
        settings: PipelineOptions,
        *,
        aliases: Mapping[str, str],
        unsplit: tuple[nn.Module, Callable[[Batch], object]] | None = None,
    ) -> None:
        """
        Args:
            runners: this rank's stages by index, on their device.
            users: the pipeline rank of each stage that uses a parameter.
            aliases: other names of tied weights -> canonical names.
            unsplit: the model, and a function that runs it on a micro-batch; the first step is compared with
                it.
        """
        self.plan = plan
        self.timeline = plan.timeline()
        self.traced: Timeline | None = None
        self.device = groups.device
        self.loss_scale = 1.0
        self.step_number = 0
        self.is_alone = False
        self._runners = dict(runners)
        self._groups = groups
        self._settings = settings
        self._unsplit = unsplit
        self._trains = True
        parameters, buffers, not_saved = state_of(runners.values())
        self.module = ModelPart(parameters, buffers, aliases=aliases, not_saved=not_saved)
        self._parameters = parameters
        doubles = [parameter for parameter in parameters.values() if parameter.dtype == torch.float64]
        num_doubles = groups.sum(torch.tensor([len(doubles)], device=groups.device), of_all=False)
        self._loss_dtype = torch.float64 if int(num_doubles) else torch.float32
        self._ties = TiedWeights(users, parameters, groups.group)
        self.wire: Any = None
        dtype = settings.wire if isinstance(settings.wire, torch.dtype) else None
        if not isinstance(settings.wire, torch.dtype | None) and groups.data_group is not None:
            held = parameters.items()
            self.wire = settings.wire(
                held, groups.data_group, group_number=groups.rank, holders=self._ties.holders
            )
        self._replicas = ReplicaSum(groups.data_group, wire=self.wire or dtype)
        self._replicated = self._find_replicated()
        self._left: dict[int, set[nn.Parameter]] = {}
        self._tracer = Tracer(groups.device, self._inside)
        self._offset_s = clock_offset(groups.group, groups.device)
        self._runtimes: dict[bool, ScheduleRuntime] = {}
        self._failures = FailureDetector(
            _peers(plan, groups), groups.group, groups.data_group, groups.tensor_group
        )

    # ---- a step -----------------------------------------------------------------------------------------

    def step(self, **batch: Tensor) -> Tensor:
        """Run forward and backward of a batch: ``module`` then has the gradients of the global batch.

        Gradients of an earlier step are dropped. Call the optimizer afterwards.

        Args:
            batch: this replica's rows, with the names, shapes and dtypes of the example; the same on every
                rank of the pipeline.

        Returns:
            The mean loss over the targets of the global batch, on every rank, ``[]``.

        Raises:
            UsageError: names, shapes or dtypes of the batch differ from the example's.
            ShoalError: another worker was lost, which the message names; or the first step differs from that
                of the unsplit model (``verify``).
        """
        parts = self._parts(batch)
        self.module.zero_grad(set_to_none=True)
        with self._failures.step():
            of_all = not self.is_alone
            weights = [weight * self.loss_scale for weight in self._weights(parts, of_all)]
            reference = None
            if self._unsplit is not None:
                reference = run_unsplit(*self._unsplit, parts, weights, self._stream, self._groups)
                reference = replace(reference, loss=reference.loss / self.loss_scale)
            self._set_mode(True)
            replicated = self._replicated if of_all else {}
            self._left = {stage: set(parameters) for stage, parameters in replicated.items()}
            self._tracer.start()
            losses = self._runtime(True).run(parts, weights)
            self._replicas.start(self._unreduced())
            self._replicas.finish()
            self._ties.reduce()
            loss = (self._total(losses, of_all) / self.loss_scale).to(self._loss_dtype)
            if self._tracer.on:
                self._keep_trace()
        if reference is not None:
            compare(reference, loss, self._parameters, self._groups)
            self._unsplit = None
        self.step_number += 1
        return loss

    def evaluate(self, **batch: Tensor) -> Evaluation:
        """Run the evaluation graph forward over a batch with the example's shapes, without gradients.

        Buffers (BatchNorm's statistics) are those of the first replica, on all.

        Raises:
            UsageError, ShoalError: as :meth:`step`.
        """
        parts = self._parts(batch)
        last = self._runners.get(self.plan.schedule.num_stages - 1)
        with self._failures.step(), torch.no_grad():
            self._share_buffers()
            weights = self._weights(parts)
            self._set_mode(False)
            if last is not None:
                last.losses.clear()
                last.outputs.clear()
            self._runtime(False).run(parts, None)
            self._set_mode(True)
            for runner in self._runners.values():
                runner.free()
            losses = (
                []
                if last is None
                else [weighted((loss,), weight) for loss, weight in zip(last.losses, weights, strict=True)]
            )
            return Evaluation(
                self._total(losses).to(self._loss_dtype), None if last is None else list(last.outputs)
            )

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Measure the steps inside; ``traced`` is then the last one's timeline. All ranks trace or none."""
        self._tracer.on = True
        try:
            yield
        finally:
            self._tracer.on = False

    @property
    def stages(self) -> list[StageModule]:
        """This rank's stages in the order of the model, such as to ``compile`` them before the first step."""
        return [runner.stage for _, runner in sorted(self._runners.items())]

    def owned(self, name: str) -> bool:
        """Return whether this rank counts a parameter in norms: the first rank counts one tied over
        several."""
        return self._ties.owned(name)

    def kept(self) -> dict[str, Any]:
        """Return this worker's state for checkpoints, without its optimizer, by key."""
        return {"model": self.module} | ({} if self.wire is None else {"wire": self.wire})

    def explain(self) -> str:
        """Return a report: stages, their cost and memory, the timeline, and the reason for this layout."""
        return explain(
            self.plan,
            self.timeline,
            self.traced,
            title=self._settings.title,
            num_replicas=self._groups.num_replicas,
        )

    def recorded(self, step: int) -> PipelineStep:
        """Return the predicted and the last traced step as a row of a run's record.

        Args:
            step: the run's number of the traced step.
        """
        return step_row(self.plan.schedule, self.timeline, self.traced, step=step)

    def close(self) -> None:
        """Stop the thread that watches the other workers."""
        self._failures.close()

    # ---- parts of a step --------------------------------------------------------------------------------

    def _parts(self, batch: Batch) -> list[dict[str, Tensor]]:
        check_inputs(batch, self._settings.example)
        on_device = {name: tensor.to(self._groups.device) for name, tensor in batch.items()}
        return micro_batches(on_device, self.plan.schedule.num_micro_batches)

    def _weights(self, parts: Sequence[Batch], of_all: bool = True) -> list[Tensor]:
        """Return each micro-batch's share of the targets of the global batch, or of this replica's."""
        counts = torch.stack([torch.as_tensor(self._settings.count(part)).double() for part in parts])
        counts = counts.to(self._groups.device)
        total = counts.sum()
        if of_all and self._groups.data_group is not None:
            dist.all_reduce(total, group=self._groups.data_group)
        return list(counts / total.clamp(min=1))

    def _total(self, losses: Sequence[Tensor], of_all: bool = True) -> Tensor:
        """Return the sum of all micro-batches' losses, of all replicas or this one, in float64."""
        total = torch.zeros((), dtype=torch.float64, device=self._groups.device)
        for loss in losses:
            total += loss.detach()
        return self._groups.sum(total, of_all=of_all)

    def _set_mode(self, training: bool) -> None:
        self._trains = training
        for runner in self._runners.values():
            runner.train(training)

    def _runtime(self, training: bool) -> ScheduleRuntime:
        """Return the runtime of a mode, created on first use: the stages must be in that mode."""
        if training not in self._runtimes:
            schedule, groups = self.plan.schedule, self._groups
            stages = [
                RunningStage(
                    runner,
                    groups.device,
                    groups.group,
                    around=self._tracer.around,
                    when_reduced=self._reduced,
                )
                for _, runner in sorted(self._runners.items())
            ]
            self._runtimes[training] = ScheduleRuntime(stages, schedule, weighted if training else None)
        return self._runtimes[training]

    def _inside(self, kind: str, stage: int, micro_batch: int) -> AbstractContextManager[None]:
        return self._stream(micro_batch) if kind == "F" and self._trains else nullcontext()

    def _stream(self, micro_batch: int) -> AbstractContextManager[None]:
        """Return the random stream of a micro-batch of this replica's next step."""
        number = self.plan.schedule.num_micro_batches
        size = num_rows(self._settings.example) // number
        begin = (self._groups.replica * number + micro_batch) * size
        return streams(self._settings.seed, self.step_number, range(begin, begin + size))

    # ---- gradients over replicas ------------------------------------------------------------------------

    def _find_replicated(self) -> dict[int, set[nn.Parameter]]:
        """Return the parameters of each stage whose gradients no FSDP sums up."""
        mesh = self._groups.data_mesh
        if mesh is None or self._groups.data_group is None:
            return {}
        return {
            index: {parameter for parameter in runner.parameters() if not _is_sharded(parameter, mesh)}
            for index, runner in self._runners.items()
        }

    def _reduced(self, stage: int) -> None:
        """Begin to sum the gradients of a finished stage, except those that another stage here still adds
        to."""
        mine = self._left.pop(stage, set())
        ready = mine.difference(*self._left.values())
        self._replicas.start([p for p in self._parameters.values() if p in ready])

    def _unreduced(self) -> list[nn.Parameter]:
        """Return the parameters not summed when their stage finished: FSDP's runtime has no such event."""
        left = set[nn.Parameter]().union(*self._left.values())
        self._left = {}
        return [p for p in self._parameters.values() if p in left]

    def _share_buffers(self) -> None:
        if (group := self._groups.data_group) is not None:
            for buffer in self.module.buffers():
                dist.broadcast(buffer, src=dist.get_global_rank(group, 0), group=group)

    # ---- traces -----------------------------------------------------------------------------------------

    def _keep_trace(self) -> None:
        groups, schedule = self._groups, self.plan.schedule
        boxes = gather(self._tracer.boxes(), schedule, self._offset_s, groups.group, groups.device)
        self.traced = timeline_of(boxes, self.timeline, schedule.num_ranks)


def _is_sharded(parameter: nn.Parameter, mesh: DeviceMesh) -> bool:
    """Return whether a parameter is divided over the workers of ``mesh``, and not only over others."""
    if not isinstance(parameter, DTensor):
        return False
    own = parameter.device_mesh
    return own == mesh or bool(set(mesh.mesh_dim_names or ()) & set(own.mesh_dim_names or ()))


def _peers(plan: PipelinePlan, groups: ProcessGroups) -> dict[int, str]:
    """Return the role of every worker of all replicas, by global rank."""
    ranks = torch.tensor([dist.get_rank()], device=groups.device)
    for group in (groups.tensor_group, groups.data_group, groups.group):
        if group is not None:
            gathered = [torch.empty_like(ranks) for _ in range(dist.get_world_size(group))]
            dist.all_gather(gathered, ranks, group=group)
            ranks = torch.stack(gathered)
    num_parts = 1 if groups.tensor_group is None else dist.get_world_size(groups.tensor_group)
    peers: dict[int, str] = {}
    for number, other in enumerate(ranks.flatten().tolist()):
        rank, rest = divmod(number, groups.num_replicas * num_parts)
        replica, part = divmod(rest, num_parts)
        stages = [str(stage) for stage, owner in enumerate(plan.schedule.placement) if owner == rank]
        role = f"stage{'s' * (len(stages) > 1)} {', '.join(stages)}"
        role = f"part {part} of {role}" if num_parts > 1 else role
        peers[other] = f"{role} of replica {replica}" if groups.num_replicas > 1 else role
    return peers
