"""Writes the model of a run's checkpoint as a directory that others load: ``shoal export``."""

from __future__ import annotations

from pathlib import Path

import torch

from shoal.errors import UsageError
from shoal.recipes import RECIPES, use_of
from shoal.recipes.model_source import NETWORK, TRANSFORMERS, find_run, recipe_of

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Types of the weights of an export."""


def export_model(
    source: Path,
    out: Path | None = None,
    *,
    precision: str = "fp32",
    folders: tuple[str, ...] = (TRANSFORMERS, NETWORK),
) -> Path:
    """Write the model of ``source`` by the recipe that trained it, and return the directory.

    Args:
        source: a run directory, whose best or newest checkpoint is taken, or one of its checkpoints.
        out: what to write; default: a folder of the run directory named after the step.
        precision: type of the weights, one of :data:`TYPES`; it is in the directory's config.json.
        folders: kinds of models that the caller can use, by the names of their exports.

    Raises:
        UsageError: ``source`` belongs to no run whose model can be exported.
        ShoalError: there is no checkpoint, or it is damaged.
    """
    run = find_run(source, "SOURCE")
    recipe = recipe_of(run)
    uses = {name: use_of(name) for name in RECIPES}
    exported = {name: use for name, use in uses.items() if use and use.export_folder in folders}
    if recipe not in exported:
        raise UsageError(f"{run} is a run of {recipe}; those of {', '.join(exported)} can be exported")
    return exported[recipe].export(source, out, TYPES[precision])
