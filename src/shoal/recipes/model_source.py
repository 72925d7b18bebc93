"""Defines which models a path names: for ``--model``, ``shoal export`` and ``shoal evaluate checkpoint``.

Reads the sizes of those in transformers directories.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shoal.data.objects import scheme_of
from shoal.errors import UsageError, cannot_read
from shoal.json_text import parse_json
from shoal.models.text_config import HUB, num_positions
from shoal.record import Start, read_record
from shoal.train.config import load_toml, required
from shoal.train.run_dir import CONFIG_FILE, DESCRIPTION

MODEL_CONFIG = "config.json"
"""File of an exported model, beside its weights."""
TRANSFORMERS, NETWORK = "transformers", "model"
"""Folders of a run directory with the model at its end: of a language model, of a network for images."""
ADAPTER = "adapter"
"""Folder of a run directory with the adapters at its end."""

Kind = Literal["run", "checkpoint", "export", "hub"]
KINDS: dict[Kind, str] = {
    "run": f"a run of shoal (with {CONFIG_FILE})",
    "checkpoint": "a checkpoint in one",
    "export": f"a directory of an exported model (with {MODEL_CONFIG})",
    "hub": f"a model of the hub ({HUB}NAME)",
}


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Locates the files of a model."""

    path: Path
    """The path as it was given."""
    kind: Kind
    run: Path | None = None
    """Directory of the run that the path is, or is a part of."""
    directory: Path | None = None
    """Exported model: the path itself, or the one that its run wrote at the end."""

    @property
    def description(self) -> Path | None:
        """The folder with the sizes and the tokenizer of a finetuned model, without weights."""
        if self.run is None or not self._is_finetuned:
            return None
        folder = self.run / DESCRIPTION
        return folder if (folder / MODEL_CONFIG).is_file() else None

    @property
    def checkpoint(self) -> Path | None:
        """The run or checkpoint that has the weights, or ``None`` if :attr:`directory` has them.

        A finetuned language model and a network for images are what their run exported at its end. A run of
        pretraining may have been continued since, so its best or newest checkpoint counts.
        """
        if self.kind == "checkpoint":
            return self.path
        return self.path if self.kind == "run" and not self._is_final else None

    @property
    def _is_final(self) -> bool:
        if self.run is None or self.directory is None:
            return False
        return self._is_finetuned or self.directory.name == NETWORK

    @property
    def _is_finetuned(self) -> bool:
        return self.run is not None and "path" in load_toml(self.run / CONFIG_FILE).get("model", {})


def find_model(path: Path, option: str = "--model", *, kinds: tuple[Kind, ...] = tuple(KINDS)) -> ModelSource:
    """Return the files of the model that ``path`` names.

    Args:
        path: a run of shoal, a checkpoint in one, an exported model, or ``hub:NAME``.
        option: the option or setting that named it, for the error.
        kinds: those that the caller can use.

    Raises:
        UsageError: it is none of these, or lies in an object store.
    """
    if scheme_of(path) is not None:  # what can read from there has made a copy before
        scheme, _, rest = str(path).partition(":")
        location = f"{scheme}://{rest.strip('/')}"
        raise UsageError(
            f"{option} {location} lies in an object store, where only shoal predict, evaluate, export and "
            f"report read models: copy it with shoal export {location} --out FOLDER, and name that folder"
        )
    source = _source_of(path)
    if source is None or source.kind not in kinds:
        *first, last = (KINDS[kind] for kind in kinds)
        names = f"{', '.join(first)} or {last}"
        problem = "does not exist: name" if source is None and not path.exists() else "is not"
        raise UsageError(f"{option} {path} {problem} {names}")
    return source


def find_run(path: Path, option: str) -> Path:
    """Return the run directory of ``path``, which is a run or a checkpoint in one.

    Raises:
        UsageError: it is neither.
    """
    source = find_model(path, option, kinds=("run", "checkpoint"))
    assert source.run is not None
    return source.run


def recipe_of(run: Path) -> str:
    """Return the name of the recipe of a run, from its record.

    Raises:
        ShoalError: the run has no readable record.
    """
    return next((row.recipe for row in read_record(run) if isinstance(row, Start)), "nothing yet")


def _source_of(path: Path) -> ModelSource | None:
    parent = path.resolve().parent
    if str(path).startswith(HUB):
        return ModelSource(path=path, kind="hub", directory=path)
    if (path / MODEL_CONFIG).is_file():
        run = parent if (parent / CONFIG_FILE).is_file() else None
        return ModelSource(path=path, kind="export", run=run, directory=path)
    if (path / CONFIG_FILE).is_file():
        return ModelSource(path=path, kind="run", run=path, directory=_export_in(path))
    for run in (parent.parent, parent.parent.parent):  # also of weights beside training
        if (run / CONFIG_FILE).is_file():
            return ModelSource(path=path, kind="checkpoint", run=run, directory=_export_in(run))
    return None


def _export_in(run: Path) -> Path | None:
    folders = (run / name for name in (TRANSFORMERS, NETWORK))
    return next((folder for folder in folders if (folder / MODEL_CONFIG).is_file()), None)


# ---- sizes -------------------------------------------------------------------------------------------------


def read_model_config(directory: Path) -> dict[str, Any]:
    """Return ``config.json`` of a transformers directory.

    Raises:
        UsageError: it is not there, or not a JSON object.
    """
    return read_object(directory / MODEL_CONFIG)


def read_object(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file.

    Raises:
        UsageError: it cannot be read, or is not a JSON object.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(cannot_read(path, error)) from None
    tree = parse_json(data, str(path), error=UsageError)
    if not isinstance(tree, dict):
        raise UsageError(f"{path}: must be a JSON object; is it of a transformers directory?")
    return tree


def longest_sequence(directory: Path) -> int:
    """Return the positions of a model; of one without a limit (T5), more than any text has tokens."""
    return num_positions(read_model_config(directory)) or 1 << 31


def positions_of(path: Path) -> int | None:
    """Return the number of positions of the model in ``path``, before it is exported.

    Returns:
        None for a model without a limit, and for the hub's, which may not be here yet.

    Raises:
        UsageError: there is no such model.
    """
    source = find_model(path, "model.path")
    if source.kind == "hub":
        return None
    if source.checkpoint is not None:
        sizes: dict[str, Any] = load_toml(required(source.run) / CONFIG_FILE).get("model", {})
        return sizes.get("max_position_embeddings")
    return num_positions(read_model_config(required(source.directory)))


def check_length(path: Path, setting: str, max_seq_length: int) -> None:
    """Raise a :class:`UsageError` where sequences are longer than the model has positions for."""
    positions = positions_of(path)
    if positions is not None and max_seq_length > positions:
        option = setting.replace("_", "-")
        raise UsageError(
            f"{setting} {max_seq_length} is more than the {positions} positions of the model in {path}; "
            f"shorten it, such as --{option} {positions}"
        )
