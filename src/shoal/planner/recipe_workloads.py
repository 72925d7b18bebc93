"""Returns the workload of each recipe that the planner knows.

The workloads were counted by :mod:`shoal.planner.counting` and lie in ``catalog/workloads.json``, so that a
plan needs no torch. Other lengths of sequences are counted when they are asked for.
"""

from __future__ import annotations

from functools import cache
from importlib import resources

from shoal.errors import UsageError
from shoal.json_text import parse_json
from shoal.planner.recipe_names import IMAGES, require_recipe
from shoal.planner.workload import Layer, Workload


@cache
def workload(name: str, sequence_length: int | None = None) -> Workload:
    """Return the workload of a recipe.

    Args:
        name: one of :func:`~shoal.planner.recipe_names.recipe_names`, or of a finetuning.
        sequence_length: tokens per sample; default: the recipe's own.

    Raises:
        UsageError: the recipe is unknown, or has no sequences.
        ShoalError: it has to be counted, and the library that provides its model is not installed.
    """
    require_recipe(name)
    if name in IMAGES and sequence_length is not None:
        raise UsageError(f"recipe {name} has images, not sequences; leave --sequence-length out")
    for known in _counted().get(name, ()):
        if sequence_length in (None, known.tokens_per_sample):
            return known
    from shoal.planner.counting import count_recipe

    return count_recipe(name, sequence_length)


@cache
def _counted() -> dict[str, list[Workload]]:
    """Return the workloads of the catalog by name; the first of each has the recipe's own length."""
    text = (resources.files("shoal.planner") / "catalog" / "workloads.json").read_text(encoding="utf-8")
    found: dict[str, list[Workload]] = {}
    for entry in parse_json(text, "catalog/workloads.json"):
        layers = tuple(
            Layer(name=name, num_parameters=parameters, forward_flops=flops)
            for name, parameters, flops in entry.pop("layers")
        )
        found.setdefault(entry["name"], []).append(Workload(layers=layers, **entry))
    return found
