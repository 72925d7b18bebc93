"""From any run's checkpoint to a directory that others load; each recipe imports what it needs itself."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from shoal.record import Start, read_record
from shoal.train.run_dir import run_dir_of

_MODULES = {"mask_rcnn": "shoal.recipes.mask_rcnn_export", "resnet50": "shoal.recipes.resnet50_export"}
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
    if recipe not in _MODULES:
        from shoal.recipes.export import export_run

        return export_run(source, out)
    module = import_module(_MODULES[recipe])
    found, step = module.read_checkpoint(source)
    out = out or run_dir_of(source) / f"model-{step}"
    module.write_export(found, out)
    return out
