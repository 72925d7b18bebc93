"""The model to pretrain, with the same weights on every worker, from where the settings say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from shoal.models.directory import copy_weights
from shoal.models.pretraining import Pretraining
from shoal.recipes.masked_lm.config import PretrainConfig
from shoal.train.checkpoint import load_model
from shoal.train.config import required
from shoal.train.world import World

Model = TypeVar("Model", bound=Pretraining)


def make_model(config: PretrainConfig, world: World, kind: Callable[[Any], Model]) -> Model:
    """Return ``kind(config.model)`` on the worker's device, compiled where that is asked for.

    Raises:
        UsageError: the weights that it shall begin with are not there, or are of another model.
        ShoalError: they cannot be read.
    """
    torch.manual_seed(config.train.seed)
    model = kind(config.model)
    if config.model.load_from == "transformers":
        copy_weights(model, required(config.model.checkpoint_path))
    elif config.model.load_from == "checkpoint":
        load_model(required(config.model.checkpoint_path), model)
    model.to(world.device)
    if config.train.compile if config.train.compile is not None else world.device.type == "cuda":
        model.compile(dynamic=True)  # packed: no two micro-batches have the same shape
    return model
