"""Complete training jobs: one script per recipe, read from top to bottom, and its presets.

Each script runs by ``python -m shoal.recipes.NAME``, under ``torchrun``, or by ``shoal train NAME``. It has a
configuration dataclass, ``main(config)`` with the loop in it, and ``check(config, num_workers, dry_run)``.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Where a recipe is found; nothing of it is imported before :meth:`load`."""

    config: str
    """Class of its settings."""
    preset: str
    """Its default preset."""
    help: str
    """One sentence for ``shoal train --help``."""
    module: str = ""
    """Default: its name."""


RECIPES = {
    "albert": Recipe(
        config="AlbertConfig", preset="base", help="Pretrain ALBERT: masked LM and sentence order."
    ),
    "bert": Recipe(
        config="BertConfig", preset="base", help="Pretrain BERT: masked LM and next sentence, in two phases."
    ),
    "t5": Recipe(
        config="T5Config", preset="base", help="Pretrain T5: span corruption, whole or in pipeline stages."
    ),
    "resnet50": Recipe(
        config="ResNetTrainConfig",
        preset="imagenet-16k",
        help="Train ResNet-50, or another residual network, to classify images; defined in epochs.",
    ),
}


def load(name: str) -> Any:
    """Import and return the module of recipe ``name``."""
    return import_module(f"{__name__}.{RECIPES[name].module or name}")


def run_script(name: str) -> None:
    """Replace this process by ``shoal train NAME`` with the same options."""
    os.execv(sys.executable, [sys.executable, "-m", "shoal", "train", name, *sys.argv[1:]])
