"""Has the steps of a :class:`shoal.train.run.Run` taken without waiting for all workers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal import record
from shoal.decide.bounded_waiting import WaitingRule
from shoal.errors import UsageError
from shoal.optim.moments import norm_of
from shoal.train.bounded_replay import Counts, go_back, require_workers
from shoal.train.bounded_waiting import BoundedWaiting
from shoal.train.config import DistributedConfig
from shoal.train.gradients import DataParallel, LossScale, Update, parameters_of, require_same, scale_all
from shoal.train.served_checks import check_model, check_no_momentum, check_optimizer
from shoal.train.served_tensors import COPIES
from shoal.train.world import World

LOG = "contributions.jsonl"
"""Name of the log of steps in a run's directory; :func:`shoal.train.bounded_replay.replay` reads it."""


def check_loose(models: Sequence[DataParallel], scale: LossScale, option: str) -> DataParallel:
    """Return the run's model, if its workers can step without agreeing before each step.

    Args:
        models: those of :meth:`Run.data_parallel`.
        scale: of the loss.
        option: that asks for it, for messages.

    Raises:
        UsageError: they cannot; the message says why.
    """
    if len(models) != 1:
        raise UsageError(
            f"{option} is for one model of run.data_parallel, and the run has {len(models)}: leave it out (a "
            "pipeline's stages update their own weights)"
        )
    (model,) = models
    if not model.average:
        raise UsageError(f"{option} with optim.clip worker: servers clip the mean; use --optim.clip global")
    if scale.dynamic:
        raise UsageError(
            f"{option} with train.precision fp16: a dynamic loss scale follows each step of all workers; use "
            "bf16, or set --train.loss-scale"
        )
    return model


class BoundedUpdate(Update):
    """The update of a model whose steps take the gradients of some workers, or of older weights.

    Checkpoints hold what they hold without servers. The gradients of each step are written to :data:`LOG`.
    Asynchronous, a step of the run is a batch of each worker, and as many updates of the weights.

    Attributes:
        step: the steps that this worker has passed: it goes on with the batch of the next one.
        is_settled: whether all workers have the weights of that step.
    """

    is_synchronous = False
    on_servers = True

    def __init__(
        self,
        models: Sequence[DataParallel],
        optimizer: Optimizer,
        config: DistributedConfig,
        *,
        scale: LossScale,
        world: World,
        directory: Path,
        own: Sequence[Tensor] = (),
    ) -> None:
        """Check that the steps can be taken so; :meth:`open` loads weights and state to the servers.

        Args:
            models: those of :meth:`Run.data_parallel`.
            optimizer: of the one model.
            config: says for whom steps wait.
            scale: of the loss.
            world: the workers.
            directory: of the run.
            own: tensors that each worker changes by itself, averaged where all meet.

        Raises:
            UsageError: the model, the optimizer or the settings do not suit.
        """
        super().__init__()
        self._model = check_loose(models, scale, config.step_option)
        check_model(self._model)
        check_optimizer(optimizer, self._model)
        if config.asynchronous:
            check_no_momentum(optimizer)
        self._rule = rule_of(config, world.num_workers)
        self._updates_a_step = world.num_workers if config.asynchronous else 1
        self._compensation, self._extrapolation = config.compensation, config.extrapolation
        self._optimizer, self._world, self._log = optimizer, world, directory / LOG
        self._replicas, self._own = config.replicas, own
        self._training: Any = None  # BoundedWaiting, once it is open
        self._first = self.step = 0
        self.is_settled, self._asks = True, False
        copies = COPIES * (config.replicas == 2)
        self.note = f"servers step with {self._rule.text}; the gradients of each step are in {LOG}{copies}"

    def open(self, step: int) -> None:
        """Load the weights and the optimizer's state to the servers, after so many steps."""
        if self._world.is_main:
            if self._rule.asynchronous:
                require_workers(self._log, self._world.num_workers)
            go_back(self._log, step * self._updates_a_step)
        self._first = self.step = step
        self._training = BoundedWaiting(
            self._model, self._optimizer, self._rule, max_norm=math.inf, log=self._log,
            after=step * self._updates_a_step, compensation=self._compensation,
            extrapolation=self._extrapolation, replicas=self._replicas, own=self._own,
        )  # fmt: skip

    def runs_ahead(self, *, asks: bool) -> bool:
        self._asks = asks
        if self._training.until == self.step:
            self.settle()
        return not self.is_settled

    def settle(self) -> bool:
        if not self.is_settled:
            self._training.synchronize()
            self.is_settled = True
        return True

    def step_after(self, number: int) -> int:
        return self.step

    def finish_gradients(
        self, *optimizers: Optimizer, max_norm: float | None, per_worker: bool, loss_scale: float
    ) -> Tensor:
        """Hand the gradients over; return the norm of those of the newest step that this worker knows."""
        require_same(self._training.optimizer, optimizers)
        gradients = [p.grad for p in parameters_of(*optimizers) if p.grad is not None]
        scale_all(gradients, 1.0 / loss_scale)
        own = norm_of(gradients) if self.step == self._first else math.nan
        self.is_settled = False
        self._training.hand_over(max_norm, asks=self._asks)
        norm = self._training.grad_norm
        return torch.tensor(own if math.isnan(norm) and self.step == self._first else norm)

    def apply(self, *optimizers: Optimizer) -> None:
        """Take the newest weights."""
        self._training.take_newest()
        self.step = self.step + 1 if self._rule.asynchronous else self._training.next_step - 1

    def renew(self, optimizer: Optimizer) -> None:
        """Go on with another optimizer of the same kind, from its state."""
        self.settle()
        self._training.renew(optimizer)

    def bring_state(self) -> None:
        """Bring the optimizer's state back for a checkpoint; all workers call it."""
        self._training.finish(ends=False)
        self.is_settled = True

    def row(self) -> record.Contributions:
        """Return the counts since the last such row, for the record."""
        return row_of(self._training.take_counts(), self.step)


def rule_of(config: DistributedConfig, num_workers: int) -> WaitingRule:
    """Return for whom steps wait."""
    if config.asynchronous:
        return WaitingRule(num_workers, 1, "next", asynchronous=True)
    late = config.late if config.wait_for is not None else "drop"
    staleness = config.staleness if config.staleness is not None else int(late == "next")
    wait_for = num_workers if config.wait_for is None else config.wait_for
    return WaitingRule(num_workers, wait_for, late, staleness, config.grace_s)


def row_of(counts: Counts, step: int) -> record.Contributions:
    """Return the record's row of these counts, after ``step``."""
    most = max(counts.staleness, default=0)
    return record.Contributions(
        step=step, used=counts.used, dropped=counts.dropped,
        staleness=[counts.staleness.get(each, 0) for each in range(most + 1)],
    )  # fmt: skip
