"""Has the workers of a :class:`shoal.train.run.Run` step by themselves, and exchange when a quorum has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from shoal import record
from shoal.decide.bounded_waiting import WaitingRule
from shoal.errors import UsageError
from shoal.train.bounded_replay import go_back
from shoal.train.bounded_steps import LOG, row_of
from shoal.train.bounded_waiting import BoundedWaiting
from shoal.train.config import DistributedConfig, RunOutputConfig
from shoal.train.gradients import parameters_of
from shoal.train.local_run import LocalStepsUpdate
from shoal.train.local_steps import set_moves
from shoal.train.served_tensors import COPIES


class QuorumUpdate(LocalStepsUpdate):
    """The update of a model that every worker steps by itself, with exchanges that need some of the workers.

    A round of local steps is what a batch is to :class:`shoal.train.bounded_steps.BoundedUpdate`: a worker
    that is late goes on with the steps of the newest round. All meet at ends of rounds only, so lines,
    evaluations, checkpoints and the last step come there.
    """

    def __init__(self, models: Any, optimizer: Optimizer, config: DistributedConfig, **given: Any) -> None:
        """Check the quorum; as :class:`~shoal.train.local_run.LocalStepsUpdate`."""
        super().__init__(models, optimizer, config, **given)
        assert config.quorum is not None
        num_workers = given["world"].num_workers
        if not 1 <= config.quorum < num_workers:
            raise UsageError(
                f"distributed.quorum {config.quorum} must be from 1 to one less than the number of workers, "
                f"{num_workers}; leave it out to exchange with all"
            )
        self._rule = WaitingRule(
            num_workers, config.quorum, config.late, int(config.late == "next"), config.grace_s
        )
        self._parameters: list[torch.Tensor] = list(parameters_of(self._outer))
        self._waiting: Any = None  # BoundedWaiting, once it is open
        self._begin: list[torch.Tensor] = []
        self._asks, self._is_settled = False, True
        self.note = (
            f"each worker steps by itself, and exchanges come every {self._every} steps, with "
            f"{self._rule.text}; the moves of each are in {LOG}{COPIES * (self._replicas == 2)}"
        )

    def check_synchronized(self, settings: RunOutputConfig, steps: Sequence[int]) -> None:
        """Check that lines, evaluations and checkpoints come at ends of rounds.

        Args:
            settings: say how often they come.
            steps: others at which all workers meet, such as the last one.

        Raises:
            UsageError: a frequency or a step is no multiple of the local steps.
        """
        names = ("log_frequency", "checkpoint_frequency", "validation_frequency")
        for name in names:
            self._require_end(f"run.{name}", getattr(settings, name, 0))
        for step in steps:
            self._require_end("the end of an epoch or of the run at step", step)

    def _require_end(self, name: str, step: int) -> None:
        if step % self._every:
            raise UsageError(
                f"distributed.quorum with {name} {step}: all workers meet at ends of rounds only; give a "
                f"multiple of distributed.local_steps {self._every}"
            )

    def open(self, step: int) -> None:
        """Load the weights and the outer optimizer's state to the servers, after so many steps."""
        log, self.step = self._directory / LOG, step
        if self._rank == 0:
            go_back(log, step // self._every)
        self._waiting = BoundedWaiting(
            self._model, self._outer, self._rule, max_norm=None, log=log, after=step // self._every,
            replicas=self._replicas, own=self._own,
        )  # fmt: skip
        self._begin = [parameter.detach().clone() for parameter in self._parameters]

    def runs_ahead(self, *, asks: bool) -> bool:
        self._asks = asks
        if self.step == (self._waiting.until or 0) * self._every:
            self.settle()
        return not self._is_settled

    def settle(self) -> bool:
        if self._is_settled:
            return True
        self._require_end("an evaluation or a checkpoint after step", self.step)
        self._waiting.synchronize()
        self._take_begin()
        self._is_settled = True
        return True

    def apply(self, *optimizers: Optimizer) -> None:
        """Take this worker's step, unless its norm is not finite, and exchange at the end of a round."""
        if math.isfinite(self._norm):
            self._inner.step()
        self.step, self._is_settled = self.step + 1, False
        if self.step % self._every:
            return
        set_moves(self._parameters, self._begin)
        self._waiting.hand_over(None, asks=self._asks)
        self._waiting.take_newest()
        self._take_begin()
        self.step = (self._waiting.next_step - 1) * self._every

    def row(self) -> record.Contributions:
        """Return the counts of moves since the last such row, for the record."""
        return row_of(self._waiting.take_counts(), self.step)

    def bring_state(self) -> None:
        """Bring the outer optimizer's state back for a checkpoint; all workers call it."""
        self._waiting.finish(ends=False)
        self._take_begin()
        self._is_settled = True

    @torch.no_grad()
    def _take_begin(self) -> None:
        """Note the weights from which the next round begins."""
        torch._foreach_copy_(self._begin, self._parameters)
