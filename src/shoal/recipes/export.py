"""Writes the model of a run's checkpoint as a directory that others load: ``shoal export``."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from shoal.data.manifest import Manifest
from shoal.data.text.text_to_text import text_to_text_tokenizer
from shoal.errors import UsageError
from shoal.models.pretraining import Pretraining, new_encoder
from shoal.models.text_config import AlbertModelConfig, BertModelConfig, T5ModelConfig
from shoal.recipes import masked_lm, t5
from shoal.recipes.model_source import find_run
from shoal.recipes.prepared_text import tokenizer_files
from shoal.recipes.t5_stages import write_stored
from shoal.record import Start, read_record
from shoal.train.checkpoint import load_model, stored_model
from shoal.train.config import load_toml
from shoal.train.run_dir import CONFIG_FILE, description_in

_ENCODERS: dict[str, Any] = {"albert": AlbertModelConfig, "bert": BertModelConfig}
"""The settings of the models."""
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Types of the weights of an export."""
_IMAGES = {"mask_rcnn": "shoal.recipes.mask_rcnn_export", "resnet50": "shoal.recipes.resnet50_export"}
"""Recipes for images: modules with ``read_checkpoint`` and ``write_export``."""


def export_any(source: Path, out: Path | None = None, *, precision: str = "fp32") -> Path:
    """Write the model of ``source`` and return the directory.

    Args:
        source: a run directory, whose newest checkpoint is taken, or one of its checkpoints.
        out: what to write; default: a folder of the run directory named after the step.
        precision: type of the weights, one of :data:`TYPES`; it is in the directory's config.json.

    Raises:
        UsageError: ``source`` belongs to no run whose model can be exported.
        ShoalError: there is no checkpoint, or it is damaged.
    """
    recipe = recipe_of(find_run(source, "SOURCE"))
    if recipe not in _IMAGES:
        return export_run(source, out, precision=precision)
    module = import_module(_IMAGES[recipe])
    found, step = module.read_checkpoint(source)
    found.model.to(TYPES[precision])
    out = out or find_run(source, "SOURCE") / f"model-{step}"
    module.write_export(found, out)
    return out


def export_run(source: Path, out: Path | None = None, *, precision: str = "fp32") -> Path:
    """Write the weights and the tokenizer of ``source`` and return the directory.

    Args:
        source: a run directory, whose newest checkpoint is taken, or one of its checkpoints.
        out: what to write; default: ``transformers-STEP`` in the run directory.
        precision: as for :func:`export_any`.

    Raises:
        UsageError: ``source`` belongs to no pretraining run.
        ShoalError: there is no checkpoint, or it is damaged.
    """
    run_dir = find_run(source, "SOURCE")
    if recipe_of(run_dir) == "t5":
        return _export_t5(source, run_dir, out, precision)
    model, step = _read_encoder(source, run_dir)
    model.to(TYPES[precision])
    out = out or run_dir / f"transformers-{step}"
    masked_lm.write_export(model, description_in(run_dir), out)
    return out


def read_encoder(source: Path) -> tuple[Pretraining, Path]:
    """Return the model of a pretraining run of ALBERT or BERT, and the folder with its tokenizer.

    Raises:
        UsageError: ``source`` is no such run nor a checkpoint in one.
        ShoalError: there is no checkpoint, or it is damaged.
    """
    run_dir = find_run(source, "SOURCE")
    if recipe_of(run_dir) == "t5":
        raise UsageError(f"{run_dir} is a run of t5, which has no masks to fill: name one of albert or bert")
    model, _ = _read_encoder(source, run_dir)
    return model, description_in(run_dir)


def _read_encoder(source: Path, run_dir: Path) -> tuple[Any, int]:
    """Return the model of a checkpoint of ALBERT or BERT, and its step."""
    recipe = recipe_of(run_dir)
    if recipe not in _ENCODERS:
        known = ", ".join((*_ENCODERS, "t5"))
        raise UsageError(f"{run_dir} is a run of {recipe}; pretraining runs ({known}) can be exported")
    model = new_encoder(_ENCODERS[recipe](**_sizes_in(run_dir)))
    return model, load_model(source, model)


def _export_t5(source: Path, run_dir: Path, out: Path | None, precision: str) -> Path:
    """Write a T5 one tensor at a time: it may be too large for this machine's memory."""
    data, (step, _) = description_in(run_dir), stored_model(source)
    out = out or run_dir / f"transformers-{step}"
    length = load_toml(run_dir / CONFIG_FILE)["data"]["input_length"]
    with torch.device("meta"):
        model = t5.make_model(T5ModelConfig(**_sizes_in(run_dir)), Manifest.load(data))
    model.to(TYPES[precision])
    write_stored(source, model, out, tokenizer_files(text_to_text_tokenizer(data), model, length))
    return out


def _sizes_in(run_dir: Path) -> dict[str, Any]:
    """Return the settings of a run's model without the source of its weights."""
    sizes = load_toml(run_dir / CONFIG_FILE)["model"]
    return {name: value for name, value in sizes.items() if name != "checkpoint_path"}


def recipe_of(run_dir: Path) -> str:
    """Return the recipe of a run, from its record.

    Raises:
        ShoalError: the run has no readable record.
    """
    return next((row.recipe for row in read_record(run_dir) if isinstance(row, Start)), "nothing yet")
