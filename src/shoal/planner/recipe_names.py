"""Names the recipes and models that the planner knows."""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from typing import Any

from shoal.errors import UsageError, did_you_mean
from shoal.planner.hardware import shipped

IMAGES = ("resnet50", "mask-rcnn", "faster-rcnn")
FINETUNING = {"squad": 384, "classify": 128, "t5_classify": 512}
"""Tokens of a sample by default, as of these recipes."""


def recipe_names() -> list[str]:
    """Return the names that :func:`workload` accepts, but those of finetuning (``squad-bert-large``)."""
    return [*IMAGES, *presets_of("bert"), *presets_of("albert"), *presets_of("t5"), *shipped("models.toml")]


@cache
def presets_of(architecture: str) -> dict[str, Any]:
    """Return the settings of a text recipe's presets by their names here, such as ``bert-large``.

    Presets of the same model under another optimizer have none of their own.
    """
    found: dict[str, Any] = {}
    folder = resources.files("shoal.recipes") / "presets" / architecture
    for file in sorted(folder.iterdir(), key=lambda each: each.name):
        preset = file.name.removesuffix(".toml")
        if "-" not in preset:
            found[f"{architecture}-{preset}"] = tomllib.loads(file.read_text(encoding="utf-8"))
    return found


def finetuned(name: str) -> tuple[str, str] | None:
    """Return (task, model) of the name of a finetuning, ``None`` of another name.

    Example:
        >>> finetuned("squad-bert-large"), finetuned("bert-large")
        (('squad', 'bert-large'), None)
    """
    task, _, model = name.partition("-")
    architectures = ("t5",) if task == "t5_classify" else ("bert", "albert")
    known = task in FINETUNING and any(model in presets_of(each) for each in architectures)
    return (task, model) if known else None


def require_recipe(name: str) -> None:
    """Raise UsageError, listing the recipes, unless ``name`` is one of them."""
    if name not in recipe_names() and finetuned(name) is None:
        raise UsageError(
            f"recipe {name!r} is not known.{did_you_mean(name, recipe_names())} "
            f"Choose one of {', '.join(recipe_names())}; squad- or classify- before a BERT or an ALBERT, or "
            "t5_classify- before a T5, for its finetuning; or a model of yours with --model module:function"
        )
