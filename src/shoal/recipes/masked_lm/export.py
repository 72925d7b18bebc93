"""From a run's checkpoint to a transformers directory."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from shoal.data.manifest import Manifest
from shoal.errors import UsageError
from shoal.models.albert_config import AlbertModelConfig
from shoal.models.bert_config import BertModelConfig
from shoal.models.pretraining import AlbertPretraining, BertPretraining, Pretraining
from shoal.record import Start, read_record
from shoal.train.checkpoint import load_model
from shoal.train.config import load_toml
from shoal.train.run_dir import CONFIG_FILE

_PATHS = ("checkpoint_path",)
_MODELS: dict[str, tuple[type[Any], type[Any]]] = {
    "albert": (AlbertModelConfig, AlbertPretraining),
    "bert": (BertModelConfig, BertPretraining),
}


def export_run(source: Path, out: Path | None = None) -> Path:
    """Write the weights and the tokenizer of ``source`` and return the directory.

    Args:
        source: a run directory, whose newest checkpoint is taken, or one of its checkpoints.
        out: what to write; default: ``transformers-STEP`` in the run directory.

    Raises:
        UsageError: ``source`` belongs to no pretraining run, or transformers has no form for its model.
        ShoalError: there is no checkpoint, or it is damaged.
    """
    run_dir = source if (source / CONFIG_FILE).is_file() else source.resolve().parent.parent
    if not (run_dir / CONFIG_FILE).is_file():
        raise UsageError(
            f"{source} is neither a run directory nor a checkpoint in one: it has no {CONFIG_FILE}"
        )
    tree = load_toml(run_dir / CONFIG_FILE)
    config_type, model_type = _MODELS[recipe_of(run_dir)]
    sizes = {name: value for name, value in tree["model"].items() if name not in _PATHS}
    model = model_type(replace(config_type(), **{**sizes, "load_from": "scratch"}))
    step = load_model(source, model)
    out = out or run_dir / f"transformers-{step}"
    write_export(model, Path(tree["data"]["path"]), out)
    return out


def recipe_of(run_dir: Path) -> str:
    """Return which pretraining recipe a run is of, from its record.

    Raises:
        UsageError: of none.
        ShoalError: the run has no readable record.
    """
    recipe = next((row.recipe for row in read_record(run_dir) if isinstance(row, Start)), "nothing yet")
    if recipe not in _MODELS:
        raise UsageError(
            f"{run_dir} is a run of {recipe}; pretraining runs ({', '.join(_MODELS)}) can be exported"
        )
    return recipe


def is_exportable(model: Pretraining) -> bool:
    """Whether transformers has a form for ``model``; there is none with norms before the layers' halves."""
    return not getattr(model.config, "pre_layer_norm", False)


def write_export(model: Pretraining, data: Path, out: Path) -> None:
    """Write ``model`` with the tokenizer of the prepared text ``data``, whole or not at all.

    An older export in ``out`` is replaced.

    Raises:
        UsageError: transformers has no form for this model.
    """
    if not is_exportable(model):
        raise UsageError(
            "a model with pre_layer_norm cannot be exported: transformers' ALBERT has no such form"
        )
    temporary = out.with_name(f"{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    disable_progress_bar()
    model.weights.save_pretrained(temporary)
    _write_tokenizer(data, temporary)
    shutil.rmtree(out, ignore_errors=True)
    temporary.rename(out)


def _write_tokenizer(data: Path, out: Path) -> None:
    """Write the tokenizer so that ``AutoTokenizer`` finds it beside the weights."""
    manifest = Manifest.load(data)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(data / manifest.tokenizer.file))
    ids = {
        "cls_token": manifest.cls_id,
        "sep_token": manifest.sep_id,
        "mask_token": manifest.mask_id,
        "pad_token": manifest.pad_id,
        "unk_token": manifest.unk_id,
    }
    names = {name: tokenizer.convert_ids_to_tokens(i) for name, i in ids.items()}
    tokenizer.add_special_tokens(names)
    tokenizer.save_pretrained(out)
