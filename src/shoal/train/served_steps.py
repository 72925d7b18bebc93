"""Has servers update the weights of a :class:`shoal.train.run.Run`, instead of every worker by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch.optim import Optimizer

from shoal.errors import UsageError
from shoal.train.config import DistributedConfig
from shoal.train.gradients import DataParallel, Update, clip_factor, require_same
from shoal.train.served_tensors import COPIES
from shoal.train.served_update import Served


class ServedUpdate(Update):
    """The update of a model whose weights and optimizer state are on servers (:meth:`Run.use`).

    The bits are those of :class:`shoal.train.gradients.Update` with the optimizers of
    :mod:`shoal.optim`, on backend ``"shoal"``. Checkpoints hold what they hold without servers.
    """

    on_servers = True

    def __init__(
        self, models: Sequence[DataParallel], optimizer: Optimizer, config: DistributedConfig
    ) -> None:
        """Check the model and the settings; :meth:`open` loads weights and state to the servers.

        Args:
            models: those of :meth:`Run.data_parallel`.
            optimizer: of the one model.
            config: the wire format has to be fp32.

        Raises:
            UsageError: the model, the optimizer or the settings do not suit.
        """
        if len(models) != 1:
            raise UsageError(
                f"distributed.update servers is for one model of run.data_parallel, and the run has "
                f"{len(models)}: leave it out (a pipeline's stages update their own weights)"
            )
        if not models[0].average:
            raise UsageError(
                "distributed.update servers with optim.clip worker: servers see the sum of the gradients "
                "only; use --optim.clip global"
            )
        if config.wire != "fp32":
            raise UsageError(
                f"distributed.update servers with distributed.wire {config.wire}: gradients go to the "
                "servers in fp32; use --distributed.wire fp32"
            )
        super().__init__()
        self._model, self._optimizer, self._replicas = models[0], optimizer, config.replicas
        self._factor = 1.0
        self.note = (
            f"servers update the weights by {type(optimizer).__name__}, and keep its state"
            + COPIES * (config.replicas == 2)
        )

    def open(self, step: int) -> None:
        """Load the weights and the optimizer's state to the servers."""
        self._served = Served(
            self._model, self._optimizer, max_norm=math.inf, replicas=self._replicas, replaces=True
        )
        self._model.served = self._served

    def finish_gradients(
        self, *optimizers: Optimizer, max_norm: float | None, per_worker: bool, loss_scale: float
    ) -> float:
        """Wait until the servers have the gradients, and return their norm."""
        require_same(self._served.optimizer, optimizers)
        norm = self._served.measure() / loss_scale
        self._factor = clip_factor(norm, max_norm) / loss_scale
        return norm

    def apply(self, *optimizers: Optimizer) -> None:
        """Have the servers step, and wait for the weights."""
        self._served.apply(self._factor)

    def renew(self, optimizer: Optimizer) -> None:
        """Go on with another optimizer, from its state."""
        self._served.renew(optimizer)

    def bring_state(self) -> None:
        """Bring the optimizer's state back for a checkpoint; all workers call it."""
        self._served.finish()
