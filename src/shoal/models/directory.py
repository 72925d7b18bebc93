"""Reads and writes transformers directories: ``config.json``, safetensors and tokenizer files.

Nothing is unpickled, and nothing is downloaded unless a source is named ``hub:NAME``.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging as their_logging

from shoal.errors import ShoalError, UsageError
from shoal.json_text import parse_json
from shoal.models.layers import MODEL_TYPES
from shoal.models.text_config import HUB

_HUB_FILES = (
    "config.json",
    "*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.txt",
    "spiece.model",
)
_STORED = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""The types of weights in the header of a safetensors file."""


class HasWeights(Protocol):
    """A model around one of transformers, which holds its parameters."""

    @property
    def weights(self) -> Any:
        """The transformers model."""


# ------------------------------------------------------------------------------------------------ reading


def resolve(source: str | Path) -> Path:
    """Return the directory of ``source``; ``hub:NAME`` is downloaded first, or taken from the cache.

    Raises:
        ShoalError: the hub cannot be reached, or has no such model.
    """
    name = str(source)
    if not name.startswith(HUB):
        return Path(source)
    from huggingface_hub import snapshot_download  # only where a person asks for the hub

    try:
        return Path(snapshot_download(name.removeprefix(HUB), allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # noqa: BLE001  # which of its HTTP client's depends on its version
        raise ShoalError(
            f"{name}: cannot be fetched ({one_line(error)}); name a directory on disk instead"
        ) from None


def model_type_of(directory: Path, known: Sequence[str] = MODEL_TYPES) -> str:
    """Return the architecture of a transformers directory, one of ``known``.

    Raises:
        UsageError: it is not a transformers directory, or of another architecture.
    """
    path = directory / "config.json"
    if not path.is_file():
        problem = "has no config.json" if directory.is_dir() else "does not exist"
        raise UsageError(
            f"{directory} is not a transformers directory: it {problem}. A model of the hub is "
            f"named {HUB}NAME"
        )
    tree = parse_json(path.read_bytes(), str(path), error=UsageError)
    try:
        model_type = str(tree["model_type"])
    except (KeyError, TypeError) as error:
        raise UsageError(f"{path} names no model_type: {one_line(error)}") from None
    if model_type not in known:
        raise UsageError(f"{path}: model_type {model_type!r} must be one of {', '.join(known)}")
    return model_type


def load_weights(model_class: Any, directory: Path, **options: Any) -> Any:
    """Return the model that ``from_pretrained`` loads from the safetensors files of ``directory``, in fp32.

    Raises:
        UsageError: the weights are not there, or pickled.
        ShoalError: the weights cannot be read.
    """
    refuse_pickles(directory)
    options = {"dtype": torch.float32, "local_files_only": True, "use_safetensors": True, **options}
    try:
        with quiet_transformers():
            return model_class.from_pretrained(directory, **options)
    except (SafetensorError, OSError, RuntimeError, ValueError, LookupError) as error:
        raise ShoalError(f"{directory}: the weights cannot be read: {one_line(error)}") from None


def copy_weights(model: HasWeights, directory: Path) -> None:
    """Copy the weights of a transformers directory (safetensors) into a model to pretrain.

    Raises:
        UsageError: there is no such directory, or it is of another architecture or other sizes.
        ShoalError: the weights cannot be read.
    """
    wanted = str(model.weights.config.model_type)
    there = model_type_of(directory, known=(*MODEL_TYPES, wanted))
    if there != wanted:
        raise UsageError(f"model.checkpoint_path {directory} holds a model of type {there}, not {wanted}")
    source = load_weights(type(model.weights), directory)
    theirs = {name: tensor.shape for name, tensor in source.state_dict().items()}
    for name, tensor in model.weights.state_dict().items():
        if theirs.get(name) != tensor.shape:
            raise UsageError(
                f"model.checkpoint_path {directory}: {name} has shape {tuple(theirs.get(name, ()))} there "
                f"and {tuple(tensor.shape)} in the model; choose the preset and vocabulary of that directory"
            )
    model.weights.load_state_dict(source.state_dict())


def refuse_pickles(directory: Path) -> None:
    """Raise UsageError unless a directory holds weights as safetensors."""
    if any(directory.glob("*.safetensors")):
        return
    pickles = sorted(path.name for path in directory.glob("*.bin"))
    if pickles:
        raise UsageError(
            f"{directory} has its weights only as a pickle ({pickles[0]}), which can run code as it is read: "
            "write them as safetensors first (save_pretrained of a current transformers does)"
        )
    raise UsageError(
        f"{directory} has no weights: it holds no *.safetensors; fetch them, or train all "
        "weights from the sizes alone where from_scratch is an option (finetune: --model.from-scratch)"
    )


# ------------------------------------------------------------------------------------------------ writing


def save(
    model: HasWeights,
    directory: Path,
    *,
    tokenizer: Mapping[str, bytes],
    read: Callable[[str], Tensor] | None = None,
) -> None:
    """Write a directory that transformers' Auto classes load.

    It is written under a temporary name and then renamed; an older one is replaced.

    Args:
        model: the model with its weights.
        directory: to write.
        tokenizer: the names and contents of its files, which are written beside the weights.
        read: returns a weight by its name in transformers, for a model on the meta device: only one of them
            is in memory at a time.

    Raises:
        ShoalError: it cannot be written; files that were there stay.
    """
    temporary = directory.with_name(f"{directory.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with quiet_transformers():
            if read is None:
                model.weights.save_pretrained(temporary)
            else:
                _save_one_by_one(model.weights, temporary, read)
        for name, content in tokenizer.items():
            (temporary / name).write_bytes(content)
        shutil.rmtree(directory, ignore_errors=True)
        temporary.rename(directory)
    except (SafetensorError, OSError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise ShoalError(
            f"{directory}: the model cannot be written: {one_line(error)}; free some space or choose another "
            "folder, then run the command again"
        ) from None


def _save_one_by_one(model: PreTrainedModel, directory: Path, read: Callable[[str], Tensor]) -> None:
    """Write what ``save_pretrained`` does, with weights from ``read``, in the model's type."""
    directory.mkdir(parents=True)
    dtype = model.dtype
    model.config.architectures, model.config.dtype = [type(model).__name__], dtype
    model.config.save_pretrained(directory)
    if model.can_generate():
        model.generation_config.save_pretrained(directory)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        begin, end = end, end + dtype.itemsize * shape.numel()
        table[name] = {"dtype": _STORED[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    header = json.dumps(table).encode()
    header = header.ljust(-(-len(header) // 8) * 8)  # aligns the data
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name in shapes:
            file.write(read(name).to(dtype).contiguous().view(torch.uint8).numpy().data)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppress the progress bars and tables of transformers; errors here report in one line."""
    verbosity, bars = their_logging.get_verbosity(), their_logging.is_progress_bar_enabled()
    their_logging.set_verbosity_error()
    their_logging.disable_progress_bar()
    try:
        yield
    finally:
        their_logging.set_verbosity(verbosity)
        if bars:
            their_logging.enable_progress_bar()


def one_line(error: BaseException) -> str:
    """Return the message of an error of another package in at most 200 characters of one line."""
    return " ".join(str(error).split())[:200] or type(error).__name__
