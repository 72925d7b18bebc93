"""From any run's checkpoint to a directory that others load; each recipe imports what it needs itself."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from shoal.record import Start, read_record
from shoal.train.run_dir import run_dir_of

_MODULES = {"mask_rcnn": "shoal.recipes.mask_rcnn.export", "resnet50": "shoal.recipes.resnet.export"}
"""Modules with an ``export_run`` of their own, by recipe; the language recipes share one."""


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
    directory: Path = import_module(_MODULES.get(recipe, "shoal.recipes.export")).export_run(source, out)
    return directory
