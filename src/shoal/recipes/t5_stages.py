"""Fills and writes a T5 that no worker holds whole: stages of a model on the meta device.

Every worker builds the model without weights, allocates its own stages, and fills them from files one tensor
at a time. The trained model is written from the run's checkpoint in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import nn

from shoal.errors import ShoalError, UsageError
from shoal.models.directory import model_type_of, refuse_pickles, save
from shoal.models.t5 import T5
from shoal.train.checkpoint import load_model, read_tensors, stored_model
from shoal.train.checkpoint_files import Chunk, StoredTensor
from shoal.train.checkpoint_state import named_tensors

_WEIGHTS = "weights."
"""Before the names of transformers in those of :class:`shoal.models.t5.T5`."""


def load_weights(part: nn.Module, whole: nn.Module, source: Path) -> None:
    """Copy weights into a part of a model, one tensor at a time.

    Args:
        part: parameters, sharded or not, under the names of ``whole``.
        whole: the model, on meta or not.
        source: a transformers directory, a run of shoal or one of its checkpoints.

    Raises:
        UsageError: they are not there, or are of another model.
        ShoalError: they cannot be read.
    """
    if not (source / "config.json").is_file():
        load_model(source, part, whole=whole)
        return
    model_type_of(source, known=("t5",))
    stored = _stored_weights(source)
    for name, tensor in named_tensors(whole).items():
        there = stored[name].size if name in stored else "missing"
        if there != tuple(tensor.shape):
            raise UsageError(
                f"{source}: {name.removeprefix(_WEIGHTS)} is {there} there and {tuple(tensor.shape)} in the "
                "model; take the config.json or the preset that belongs to these weights"
            )
    for name, tensor in named_tensors(part).items():  # the file is closed after each: so are its pages
        read_tensors(source, {name: stored[name]}, {name: tensor})


def _stored_weights(directory: Path) -> dict[str, StoredTensor]:
    """Return the tensors of a transformers directory by their names in :class:`T5`."""
    refuse_pickles(directory)
    tensors: dict[str, StoredTensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118  # it is no mapping
                    piece = file.get_slice(key)
                    size = tuple(piece.get_shape())
                    chunk = Chunk(offsets=(0,) * len(size), sizes=size, file=path.name, key=key)
                    tensors[_WEIGHTS + key] = StoredTensor(
                        dtype=piece.get_dtype(), size=size, chunks=(chunk,)
                    )
        except (SafetensorError, OSError) as error:
            raise ShoalError(f"{path}: the weights cannot be read: {error}") from None
    return tensors


def write_stored(source: Path, model: T5, out: Path, tokenizer: Mapping[str, bytes]) -> None:
    """Write the model of a checkpoint as a transformers directory, one tensor at a time.

    Args:
        source: a run of shoal, or one of its checkpoints.
        model: its sizes; may be on the meta device.
        tokenizer: its files, by their names.

    Raises:
        ShoalError: there is no checkpoint, or it is damaged.
    """
    _, stored = stored_model(source)
    save(model, out, tokenizer=tokenizer, read=lambda name: stored[_WEIGHTS + name]())
