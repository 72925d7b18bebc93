"""Drives torch.distributed.pipelining; no other module uses its private names.

``PipelineStage`` holds the values that wait for other stages and makes the sends and receives;
``_PipelineScheduleRuntime`` adds communication to a list of computations, in an order that cannot deadlock,
and runs it. Tested with torch 2.11 and 2.15, between which both changed a lot.

Shapes are always given: torch would otherwise infer them by running the stages on made-up values, and a
made-up index may point outside of a table. Every relayed tensor is declared to need a gradient, because
torch 2.11 supports no other kind: zeros travel back for those that have none (``stage_runner`` relays
integers as floating-point numbers of the same bits).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
)

from shoal.decide.pipeline_simulator import Schedule
from shoal.pipelining.stage_runner import StageRunner

Around = Callable[[str, int, int], AbstractContextManager[None]]
"""Called as (kind, stage, micro-batch); each computation runs inside the context manager that it returns."""

_FORWARD_KINDS = frozenset({"F", "SEND_F", "RECV_F", "WAIT_SEND_F"})
_LOGGER = "torch.distributed.pipelining.schedules"


class RunningStage(PipelineStage):
    """A stage as torch's runtime drives it.

    Args:
        runner: The stage, in the mode in which it will run.
        around: Context manager factory, entered around every computation of the stage.
        when_reduced: Called with the stage's index after the last backward pass of a step.
    """

    def __init__(
        self,
        runner: StageRunner,
        device: torch.device,
        group: dist.ProcessGroup,
        *,
        around: Around,
        when_reduced: Callable[[int], None],
    ) -> None:
        self._received = tuple(runner.received())
        super().__init__(
            runner,
            runner.stage.index,
            runner.stage.num_stages,
            device,
            input_args=self._received,
            output_args=tuple(runner.sent()),
            group=group,
        )
        self._around = around
        self._when_reduced = when_reduced

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        with self._around("F", self.stage_index, fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        with self._around("B" if full_backward else "I", self.stage_index, bwd_chunk_id):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        if not self.is_first:
            self.bwd_cache[bwd_chunk_id] = self._sendable(self.bwd_cache[bwd_chunk_id])

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        with self._around("W", self.stage_index, bwd_chunk_id):
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        super().perform_reduce_grad(grad_scale_factor)
        self._when_reduced(self.stage_index)

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        """Return none: the first messages of torch 2.11 only make the group's communicator, which exists by
        then.

        They also go from a rank to itself (V placements), which gloo does not support.
        """
        return []

    def _sendable(self, gradients: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
        """Return a contiguous gradient for each received value; torch 2.11 lists those of root inputs too."""
        return tuple(
            torch.zeros_like(value, device=self.device) if gradient is None else gradient.contiguous()
            for value, gradient in zip(self._received, gradients, strict=False)
        )


class ScheduleRuntime:
    """Runs the micro-batches of a step in the order of a schedule.

    Args:
        stages: This rank's, in order.
        schedule: Of all ranks; the forward passes of a stage must come in the order of the micro-batches.
        loss: Called as (outputs of the last stage, weight of the micro-batch); returns the tensor to start
            backward from. Without it only the forward passes run.
    """

    def __init__(
        self,
        stages: Sequence[RunningStage],
        schedule: Schedule,
        loss: Callable[[Any, Tensor], Tensor] | None = None,
    ) -> None:
        self._num = schedule.num_micro_batches
        self._stages = list(stages)
        self._trains = loss is not None
        self._runtime: Any = _PipelineScheduleRuntime(  # type: ignore[no-untyped-call]
            list(stages), n_microbatches=self._num, loss_fn=loss, scale_grads=False
        )
        self._runtime._prepare_schedule_with_comms(
            {
                rank: [_Action(a.stage, _ComputationType(a.kind), a.micro_batch) for a in actions]
                for rank, actions in enumerate(schedule.actions)
            }
        )
        if not self._trains:
            self._keep_forward_only(schedule)

    def _keep_forward_only(self, schedule: Schedule) -> None:
        """Drop the actions of backward. Each stage's shards are gathered once and freed at the end."""
        orders = self._runtime.pipeline_order_with_comms
        for rank, actions in orders.items():
            own = [stage for stage, owner in enumerate(schedule.placement) if owner == rank]
            kept = [action for action in actions if action.computation_type.value in _FORWARD_KINDS]
            orders[rank] = [
                *(_Action(stage, _ComputationType.UNSHARD) for stage in own),
                *kept,
                *(_Action(stage, _ComputationType.RESHARD) for stage in own),
            ]

    def run(self, inputs: Sequence[Mapping[str, Tensor]], weights: Sequence[Tensor] | None) -> list[Tensor]:
        """Run one step over the root inputs of all micro-batches.

        Returns:
            On the rank of the last stage, when it trains: what ``loss`` returned for each micro-batch.
        """
        for stage in self._stages:
            stage.has_backward = self._trains
            stage.clear_runtime_states()
        losses: list[Tensor] | None = [] if self._trains else None
        with _plain_errors():
            self._runtime._step_microbatches(
                [()] * self._num,
                [dict(kwargs) for kwargs in inputs],
                None if weights is None else list(weights),
                losses,
                return_outputs=False,
            )
        for stage in self._stages:
            stage.clear_runtime_states()
        return losses or []


def default_store() -> Store:
    """Return the store through which the workers of the job met."""
    return dist.distributed_c10d._get_default_store()


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise the error of a stage itself; torch wraps it with all inputs and logs the whole schedule."""
    logger = logging.getLogger(_LOGGER)
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    except RuntimeError as error:
        if error.__cause__ is not None and "ailed to run" in str(error):
            raise error.__cause__ from None
        raise
    finally:
        logger.setLevel(level)
