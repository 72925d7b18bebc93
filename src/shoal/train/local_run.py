"""Has the workers of a :class:`shoal.train.run.Run` step by themselves, and exchange every few steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.errors import UsageError
from shoal.optim.moments import norm_of
from shoal.optim.sgd import SGD
from shoal.train.bounded_replay import go_back
from shoal.train.bounded_steps import check_loose
from shoal.train.checkpoint_files import StoredTensor
from shoal.train.config import DistributedConfig
from shoal.train.fragments import Streaming
from shoal.train.gradients import (
    DataParallel,
    LossScale,
    Update,
    clip_factor,
    parameters_of,
    require_same,
    scale_all,
)
from shoal.train.local_steps import LocalSteps
from shoal.train.served_checks import check_model, check_outer
from shoal.train.served_tensors import COPIES
from shoal.train.world import World

LOG = "exchanges.jsonl"
"""Name of the log of exchanges in a run's directory."""


class InnerState:
    """State of the optimizer that a worker has for itself, as checkpoints hold it: ``RANK.ENTRY.PARAMETER``.

    A worker that continues reads the state of its rank; one of a rank that there was not begins without.

    Args:
        optimizer: of this worker.
        model: whose parameters it steps.
        rank: of this worker.
    """

    def __init__(self, optimizer: Optimizer, model: nn.Module, rank: int) -> None:
        self._optimizer, self._rank = optimizer, rank
        self._parameters = dict(model.named_parameters())

    def own_tensors(self) -> dict[str, Tensor]:
        """Return this worker's tensors, for a checkpoint."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                if value is None:
                    continue
                tensor = value if isinstance(value, Tensor) else torch.tensor(float(value))
                tensors[f"{self._rank}.{key}.{name}"] = tensor
        return tensors

    def tensors_to_read(self, saved: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
        """Return empty tensors for what the worker of this rank has saved.

        Those of a parameter's shape have its memory layout, as the optimizer expects.

        Raises:
            UsageError: the checkpoint has one state for all workers.
        """
        wanted = {}
        for full, stored in saved.items():
            rank, _, name = full.split(".", 2)
            if not rank.isdecimal():
                raise UsageError(
                    "distributed.local_steps: the checkpoint was written without, and holds one state of the "
                    "optimizer for all workers; continue without --distributed.local-steps, or start a new "
                    "run from its model"
                )
            if int(rank) == self._rank and name in self._parameters:
                parameter = self._parameters[name]
                if stored.size == tuple(parameter.shape):
                    wanted[full] = torch.empty_like(parameter)
                else:  # a count of steps, or the rows and columns of Adafactor
                    dtype = parameter.dtype if stored.size else torch.float32
                    wanted[full] = torch.empty(stored.size, dtype=dtype, device=parameter.device)
        return wanted

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the optimizer's state."""
        self._optimizer.state.clear()
        for full, tensor in tensors.items():
            _, key, name = full.split(".", 2)
            self._optimizer.state[self._parameters[name]][key] = tensor


class LocalStepsUpdate(Update):
    """The update of a model that every worker steps by itself, with an exchange every few steps (DiLoCo).

    Exchanges come early where all workers need the same weights: at lines of the record, evaluations and
    checkpoints.

    Attributes:
        step: steps done.
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
        """Make the outer optimizer, whose state checkpoints hold; :meth:`open` loads it to the servers.

        Args:
            models: those of :meth:`Run.data_parallel`.
            optimizer: of the one model, for each worker.
            config: says how many steps there are between exchanges, and gives the outer optimizer.
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
        assert config.local_steps is not None
        self._every, self._replicas = config.local_steps, config.replicas
        self._streaming = Streaming(config.local_fragments, config.local_delay, config.local_mix)
        self._streaming.check(self._every)
        self._directory, self._rank, self._own = directory, world.place.rank, own
        self._inner = optimizer
        self._outer = SGD(
            parameters_of(optimizer),
            lr=config.outer_rate,
            momentum=config.outer_momentum,
            nesterov=config.outer_momentum > 0,
        )
        check_outer(self._outer, self._model)
        self._steps: LocalSteps | None = None
        self.step, self._norm = 0, math.nan
        self.note = (
            f"each worker steps by itself, and all exchange every {self._every} steps{self._streaming.text}, "
            "and at lines, evaluations and checkpoints; the exchanges are in "
            f"{LOG}{COPIES * (self._replicas == 2)}"
        )

    def open(self, step: int) -> None:
        """Load the weights and the outer optimizer's state to the servers, after so many steps."""
        if self._rank == 0:
            go_back(self._directory / LOG, step)
        self.step = step
        self._steps = LocalSteps(
            self._model, self._inner, self._outer, self._every, self._directory / LOG, after=step,
            streaming=self._streaming, replicas=self._replicas, own=self._own,
        )  # fmt: skip

    def state_of(self, kept: Mapping[str, Any]) -> dict[str, Any]:
        """Return what checkpoints hold, given what the run keeps: each worker's optimizer, and the outer."""
        inner = InnerState(self._inner, self._model.module, self._rank)
        return {**kept, "optimizer": inner, "outer": self._outer}

    def runs_ahead(self, *, asks: bool) -> bool:
        return self._steps is not None and not self._steps.has_met

    def settle(self) -> bool:
        if self._steps is not None:
            self._steps.exchange()
        return True

    def step_after(self, number: int) -> int:
        return self.step

    def finish_gradients(
        self, *optimizers: Optimizer, max_norm: float | None, per_worker: bool, loss_scale: float
    ) -> Tensor:
        """Clip this worker's gradients; return their norm."""
        require_same(self._inner, optimizers)
        gradients = [p.grad for p in parameters_of(*optimizers) if p.grad is not None]
        self._norm = norm_of(gradients) / loss_scale
        if math.isfinite(self._norm):
            scale_all(gradients, clip_factor(self._norm, max_norm) / loss_scale)
        return torch.tensor(self._norm)

    def apply(self, *optimizers: Optimizer) -> None:
        """Take this worker's step, unless its norm is not finite, and exchange if it is time."""
        assert self._steps is not None
        if math.isfinite(self._norm):
            self._inner.step()
        self.step += 1
        self._steps.end_step()

    def renew(self, optimizer: Optimizer) -> None:
        """Go on with another optimizer on each worker; the outer one goes on."""
        self.settle()
        self._inner = optimizer

    def bring_state(self) -> None:
        """Bring the outer optimizer's state back for a checkpoint; all workers call it."""
        if self._steps is not None:
            self._steps.finish()
