"""Keeps in the run directory what describes its prepared data: a run can be used without them.

It is small: the manifest, with the ids of special tokens or the names of classes, and the tokenizer or
the categories. Exporting, predicting and finetuning from a run read it from there.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.atomic_io import write_atomically
from shoal.errors import UsageError

if TYPE_CHECKING:
    from shoal.train.run import Run

FOLDER = "data"
"""Folder of the run directory."""


def keep_description(run: Run, location: Path | str, *names: str) -> None:
    """Copy files of the prepared data into the run directory, on the first worker.

    Args:
        location: the prepared directory, or s3://BUCKET/PREFIX of one.
        names: the files, each small.

    Raises:
        ShoalError: the disk is full or the run directory cannot be written.
    """
    from shoal.data.images.storage import open_storage

    if run.directory is None or not run.world.is_main:
        return
    storage, folder = open_storage(location), run.directory / FOLDER
    folder.mkdir(exist_ok=True)
    for name in names:
        write_atomically(folder / name, storage.whole(name))


def description_in(run_dir: Path) -> Path:
    """Return the folder that :func:`keep_description` wrote.

    Raises:
        UsageError: the run has none.
    """
    folder = run_dir / FOLDER
    if not folder.is_dir():
        raise UsageError(
            f"{folder} is missing, which describes the data of the run: it has not begun to train, or only a "
            f"part of it was copied; copy the whole directory {run_dir}"
        )
    return folder
