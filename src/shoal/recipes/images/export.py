"""A trained network as a directory: ``model.safetensors`` and ``config.json``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn

from shoal.data.atomic_io import write_atomically
from shoal.errors import ShoalError, UsageError
from shoal.json_text import parse_json

WEIGHTS, CONFIG = "model.safetensors", "config.json"
EXPORT = "model"
"""Folder of a run directory with the trained network."""


def write_directory(out: Path, model: nn.Module, tree: Mapping[str, Any]) -> None:
    """Write the weights and ``tree``, whole or not at all; an older export in ``out`` is replaced."""
    temporary = out.with_name(f"{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    save_file(tensors, temporary / WEIGHTS, metadata={"format": "pt"})
    write_atomically(temporary / CONFIG, (json.dumps(tree, indent=1, ensure_ascii=False) + "\n").encode())
    shutil.rmtree(out, ignore_errors=True)
    temporary.rename(out)


def read_tree(directory: Path, form: str) -> dict[str, Any]:
    """Return the configuration of a network of the given ``format``; to be called within :func:`reading`.

    Raises:
        UsageError: it is that of something else.
    """
    path = directory / CONFIG
    tree: dict[str, Any] = parse_json(path.read_bytes(), str(path))
    if tree["format"] != form:
        raise UsageError(f"{path} is not that of a network that shoal trained: it is no {form}")
    return tree


@contextmanager
def reading(directory: Path) -> Iterator[None]:
    """Surround the reading of a directory that :func:`write_directory` wrote.

    Raises:
        UsageError: ``directory`` is no such directory.
        ShoalError: its files are damaged.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise UsageError(
            f"{directory} is neither a run nor an exported network: {Path(error.filename).name} is missing"
        ) from None
    except ShoalError:
        raise
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise ShoalError(f"{directory} cannot be read: {' '.join(str(error).split())[:200]}") from None
