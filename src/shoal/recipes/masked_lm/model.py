"""The model to pretrain, with the same weights on every worker, from where the settings say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch

from shoal.errors import ShoalError, UsageError
from shoal.models.directory import model_type_of
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
        load_transformers_weights(model, required(config.model.checkpoint_path))
    elif config.model.load_from == "checkpoint":
        load_model(required(config.model.checkpoint_path), model)
    model.to(world.device)
    if config.train.compile if config.train.compile is not None else world.device.type == "cuda":
        model.compile(dynamic=True)  # packed: no two micro-batches have the same shape
    return model


def load_transformers_weights(model: Pretraining, directory: Path) -> None:
    """Copy the weights of a transformers directory (safetensors) into ``model``.

    Raises:
        UsageError: there is no such directory, or it is of another architecture or other sizes.
        ShoalError: the weights cannot be read.
    """
    wanted, there = str(model.weights.config.model_type), model_type_of(directory)
    if there != wanted:
        raise UsageError(f"model.checkpoint_path {directory} holds a model of type {there}, not {wanted}")
    kind = type(model.weights)
    try:
        source = kind.from_pretrained(directory, local_files_only=True, use_safetensors=True)
    except Exception as error:  # safetensors has an exception of its own that derives from Exception alone
        raise ShoalError(f"{directory}: the weights cannot be read: {error}") from error
    theirs = {name: tensor.shape for name, tensor in source.state_dict().items()}
    for name, tensor in model.weights.state_dict().items():
        if theirs.get(name) != tensor.shape:
            raise UsageError(
                f"model.checkpoint_path {directory}: {name} has shape {tuple(theirs.get(name, ()))} there "
                f"and {tuple(tensor.shape)} in the model; choose the preset and vocabulary of that directory"
            )
    model.weights.load_state_dict(source.state_dict())
