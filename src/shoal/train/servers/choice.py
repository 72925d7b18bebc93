"""Chooses the update of a :class:`shoal.train.run.Run` from its settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.errors import UsageError
from shoal.train.config import ServersConfig, check_clip
from shoal.train.gradients import DataParallel, ManyWorkers, Update

_MODES = {
    "sync": "shoal.train.servers.update:update_of_run",
    "bounded": "shoal.train.servers.waiting:update_of_run",
    "async": "shoal.train.servers.waiting:update_of_run",
    "local": "shoal.train.servers.local:update_of_run",
}
"""Module and function of each mode; only the chosen one is imported."""


def choose_update(
    config: ServersConfig,
    kept: Mapping[str, Any],
    models: Sequence[DataParallel],
    *,
    directory: Path | None,
) -> Update | None:
    """Return the update of the mode, which :meth:`Update.open` begins; ``None``: each worker steps.

    Args:
        config: the mode and its options.
        kept: the objects in checkpoints, by name.
        models: those of :meth:`Run.data_parallel`.
        directory: of the run; ``None``: a short training inside another run, in which workers wait for all.

    Raises:
        UsageError: the model, the optimizer or the settings do not suit the mode.
    """
    if config.mode == "off":
        return None
    _check_run(config, kept, models)
    model, optimizer = models[0], kept["optimizer"]
    assert isinstance(model, ManyWorkers), "on servers, one worker has buckets too"
    if directory is None and not config.is_synchronous:
        return None
    module, _, function = _MODES[config.mode].partition(":")
    make: Callable[..., Update] = getattr(import_module(module), function)
    update = make(model, optimizer, config, directory=directory, own=_own_tensors(kept, model))
    if config.replicas == 2:
        update.note += "; workers have copies of the helper hosts' weights"
    return update


def _check_run(config: ServersConfig, kept: Mapping[str, Any], models: Sequence[DataParallel]) -> None:
    """Check that the mode is possible for what a run trains.

    Args:
        config: the mode.
        kept: the objects in checkpoints, by name.
        models: those of :meth:`Run.data_parallel`.
    """
    option = config.option
    names = [name for name, each in kept.items() if isinstance(each, Optimizer)]
    if names != ["optimizer"]:
        raise UsageError(
            f"{option} is for one optimizer, run.keep(optimizer=...), and the run keeps "
            f"{', '.join(names) or 'none'}: leave it out"
        )
    if len(models) != 1:
        raise UsageError(
            f"{option} is for one model of run.data_parallel, and the run has {len(models)}: leave it out (a "
            "pipeline's stages update their own weights)"
        )
    check_clip(config, per_worker=not models[0].average)


def _own_tensors(kept: Mapping[str, Any], model: DataParallel) -> list[Tensor]:
    """Return the tensors of kept models that no servers have, such as averages of weights."""
    others = [each for each in kept.values() if isinstance(each, nn.Module) and each is not model.module]
    return [tensor for each in others for tensor in each.state_dict().values()]
