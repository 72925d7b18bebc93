"""From a run's checkpoint to a transformers directory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from shoal.data.manifest import Manifest
from shoal.errors import UsageError
from shoal.models.albert import AlbertPretraining, export_transformers
from shoal.models.albert_config import AlbertModelConfig
from shoal.train.checkpoint import load_model
from shoal.train.config import load_toml
from shoal.train.run_dir import CONFIG_FILE

_PATHS = ("checkpoint_path",)


def export_run(source: Path, out: Path | None = None) -> Path:
    """Write the weights and the tokenizer of ``source`` and return the directory.

    Args:
        source: a run directory, whose newest checkpoint is taken, or one of its checkpoints.
        out: what to write; default: ``transformers-STEP`` in the run directory.

    Raises:
        UsageError: ``source`` belongs to no run, or transformers has no form for its model.
        ShoalError: there is no checkpoint, or it is damaged.
    """
    run_dir = source if (source / CONFIG_FILE).is_file() else source.resolve().parent.parent
    if not (run_dir / CONFIG_FILE).is_file():
        raise UsageError(
            f"{source} is neither a run directory nor a checkpoint in one: it has no {CONFIG_FILE}"
        )
    tree = load_toml(run_dir / CONFIG_FILE)
    sizes = {name: value for name, value in tree["model"].items() if name not in _PATHS}
    model = AlbertPretraining(replace(AlbertModelConfig(), **{**sizes, "load_from": "scratch"}))
    step = load_model(source, model)
    out = out or run_dir / f"transformers-{step}"
    write_export(model, Path(tree["data"]["path"]), out)
    return out


def write_export(model: AlbertPretraining, data: Path, out: Path) -> None:
    """Write ``model`` with the tokenizer of the prepared text ``data``."""
    manifest = Manifest.load(data)
    export_transformers(
        model,
        out,
        tokenizer_file=data / manifest.tokenizer.file,
        special_ids={
            "cls_token": manifest.cls_id,
            "sep_token": manifest.sep_id,
            "mask_token": manifest.mask_id,
            "pad_token": manifest.pad_id,
            "unk_token": manifest.unk_id,
        },
    )
