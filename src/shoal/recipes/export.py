"""Writes the model of a run's checkpoint as a directory that others load: ``shoal export``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from shoal.data.manifest import Manifest
from shoal.errors import UsageError
from shoal.models.pretraining import AlbertPretraining, BertPretraining
from shoal.models.text_config import AlbertModelConfig, BertModelConfig, T5ModelConfig
from shoal.recipes import masked_lm, t5
from shoal.record import Start, read_record
from shoal.train.checkpoint import load_model
from shoal.train.config import load_toml
from shoal.train.run_dir import CONFIG_FILE, run_dir_of


@dataclass(frozen=True, kw_only=True)
class Exportable:
    """How to make and write the models of a recipe."""

    sizes: type[Any]
    """The settings of its model."""
    make: Callable[[Any, Manifest], Any]
    write: Callable[[Any, Path, Path], None]
    """Takes the model, the prepared text and the directory to write."""


_RECIPES = {
    "albert": Exportable(
        sizes=AlbertModelConfig, make=lambda sizes, _: AlbertPretraining(sizes), write=masked_lm.write_export
    ),
    "bert": Exportable(
        sizes=BertModelConfig, make=lambda sizes, _: BertPretraining(sizes), write=masked_lm.write_export
    ),
    "t5": Exportable(
        sizes=T5ModelConfig,
        make=t5.make_model,
        write=t5.write_export,
    ),
}
_PATHS = ("checkpoint_path",)
_IMAGES = {"mask_rcnn": "shoal.recipes.mask_rcnn_export", "resnet50": "shoal.recipes.resnet50_export"}
"""Recipes for images: modules with ``read_checkpoint`` and ``write_export``."""


def export_any(source: Path, out: Path | None = None) -> Path:
    """Write the model of ``source`` and return the directory.

    Args:
        source: a run directory, whose newest checkpoint is taken, or one of its checkpoints.
        out: what to write; default: a folder of the run directory named after the step.

    Raises:
        UsageError: ``source`` belongs to no run whose model can be exported.
        ShoalError: there is no checkpoint, or it is damaged.
    """
    recipe = next((row.recipe for row in read_record(run_dir_of(source)) if isinstance(row, Start)), "")
    if recipe not in _IMAGES:
        return export_run(source, out)
    module = import_module(_IMAGES[recipe])
    found, step = module.read_checkpoint(source)
    out = out or run_dir_of(source) / f"model-{step}"
    module.write_export(found, out)
    return out


def export_run(source: Path, out: Path | None = None) -> Path:
    """Write the weights and the tokenizer of ``source`` and return the directory.

    Args:
        source: a run directory, whose newest checkpoint is taken, or one of its checkpoints.
        out: what to write; default: ``transformers-STEP`` in the run directory.

    Raises:
        UsageError: ``source`` belongs to no pretraining run, or transformers has no form for its model.
        ShoalError: there is no checkpoint, or it is damaged.
    """
    run_dir = run_dir_of(source)
    tree = load_toml(run_dir / CONFIG_FILE)
    recipe = _RECIPES[recipe_of(run_dir)]
    data = Path(tree["data"]["path"])
    sizes = {name: value for name, value in tree["model"].items() if name not in _PATHS}
    sizes |= {"load_from": "scratch"}
    model = recipe.make(replace(recipe.sizes(), **sizes), Manifest.load(data))
    step = load_model(source, model)
    out = out or run_dir / f"transformers-{step}"
    recipe.write(model, data, out)
    return out


def recipe_of(run_dir: Path) -> str:
    """Return which pretraining recipe a run is of, from its record.

    Raises:
        UsageError: of none.
        ShoalError: the run has no readable record.
    """
    recipe = next((row.recipe for row in read_record(run_dir) if isinstance(row, Start)), "nothing yet")
    if recipe not in _RECIPES:
        raise UsageError(
            f"{run_dir} is a run of {recipe}; pretraining runs ({', '.join(_RECIPES)}) can be exported"
        )
    return recipe
