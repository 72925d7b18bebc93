"""Chooses the update of a :class:`shoal.train.run.Run` from its settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.errors import UsageError
from shoal.train.bounded_steps import BoundedUpdate
from shoal.train.config import DistributedConfig
from shoal.train.gradients import DataParallel, LossScale, Update
from shoal.train.local_run import LocalStepsUpdate
from shoal.train.quorum_run import QuorumUpdate
from shoal.train.served_steps import ServedUpdate
from shoal.train.world import World


def choose_update(
    config: DistributedConfig,
    kept: Mapping[str, Any],
    models: Sequence[DataParallel],
    *,
    scale: LossScale,
    world: World,
    directory: Path | None,
) -> Update | None:
    """Return the update that the settings ask for, which is not open yet; ``None``: each worker steps.

    Args:
        config: the mode and its options.
        kept: the objects in checkpoints, by name.
        models: those of :meth:`Run.data_parallel`.
        scale: the loss scale.
        world: the workers.
        directory: of the run; ``None``: a short training inside another run, in which workers wait for all.

    Raises:
        UsageError: the model, the optimizer or the settings do not go with it.
    """
    option = config.step_option
    if not option:
        return None
    names = [name for name, each in kept.items() if isinstance(each, Optimizer)]
    if names != ["optimizer"]:
        raise UsageError(
            f"{option} is for one optimizer, run.keep(optimizer=...), and the run keeps "
            f"{', '.join(names) or 'none'}: leave it out"
        )
    optimizer = kept["optimizer"]
    if not config.is_loose:
        return ServedUpdate(models, optimizer, config)
    if directory is None:
        return None
    kind: type[BoundedUpdate | LocalStepsUpdate] = BoundedUpdate
    if config.local_steps is not None:
        kind = LocalStepsUpdate if config.quorum is None else QuorumUpdate
    return kind(
        models, optimizer, config, scale=scale, world=world, directory=directory,
        own=_own_tensors(kept, models),
    )  # fmt: skip


def _own_tensors(kept: Mapping[str, Any], models: Sequence[DataParallel]) -> list[Tensor]:
    """Return the tensors of kept models that no servers have, such as averages of weights."""
    trained = {id(ddp.module) for ddp in models}
    others = [each for each in kept.values() if isinstance(each, nn.Module)]
    return [t for each in others if id(each) not in trained for t in each.state_dict().values()]
