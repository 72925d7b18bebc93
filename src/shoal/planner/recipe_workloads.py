"""Returns the workloads of the models that the planner knows by name.

They were counted and lie in ``catalog/workloads.json``, so that a plan needs no torch. Recipes count theirs
(:mod:`shoal.recipes.workloads`), as do other lengths of sequences when they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib import resources

from shoal.decide.footprint import Activations, Numerics
from shoal.decide.workload import Layer, LayerPart, Workload
from shoal.errors import UsageError, did_you_mean
from shoal.json_text import parse_json
from shoal.planner.convergence import DataSet, Phase
from shoal.planner.hardware import shipped

Count = Callable[[str, int | None], Workload | None]
"""Counts a recipe's model by its name and the tokens of a sample; ``None`` for an unknown name."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A recipe with the settings of a preset."""

    command: tuple[str, ...]
    """Starts the training, such as ``("train", "bert", "--preset", "large")``."""
    model: str
    """Name of its workload."""
    counted_as: str = ""
    """Name of the preset by which its workload is counted, if its samples are not those of ``model``."""
    phases: tuple[Phase, ...]
    length: str = ""
    """The setting with the tokens of a sample, such as ``data.max_seq_length``."""
    data: DataSet | None = None
    """That the preset is for, if it is a published one."""
    precision: str = "auto"
    shard_optimizer: bool = False
    has_stages: bool = True
    """The recipe can divide its model into stages of a pipeline."""
    has_shards: bool = True
    """It can divide all state over the replicas."""
    has_tensor: bool = True
    """It can divide each layer, where the workload has parts."""
    evaluation_samples: int = 0
    """Of each evaluation; 0: those of the data set."""
    evaluates_beside: bool = False
    """Training waits for the last evaluation alone."""
    validation_hosts: int = 0
    """Hosts of the cluster that evaluate and do not train."""
    checkpoint_every_steps: int | None = None

    @property
    def name(self) -> str:
        """The preset, for messages."""
        return " ".join(self.command)


_NUMBERS = tuple(each.name for each in fields(Activations))
"""Of activations in the catalog, where the last ones may be left out."""
Presets = Callable[[str], Preset | None]
"""Returns the preset that a name of the planner stands for; ``None`` if there is none."""


def workload(name: str, sequence_length: int | None = None, count: Count | None = None) -> Workload:
    """Return the workload of a model.

    Args:
        name: of the catalog, or one that ``count`` knows.
        sequence_length: tokens per sample; default: the first length in the catalog, or the recipe's own.
        count: counts recipes that are not in the catalog with this length.

    Raises:
        UsageError: the name is unknown, or the model has no sequences.
        ShoalError: it has to be counted, and the library that provides it is not installed.
    """
    known = catalog().get(name, ())
    if known and known[0].tokens_per_sample == 1 and sequence_length is not None:
        raise UsageError(f"recipe {name} has {known[0].unit}, not sequences; leave --sequence-length out")
    for each in known:
        if sequence_length in (None, each.tokens_per_sample):
            return each
    if name in shipped("models.toml"):
        from shoal.planner.counting import workload_of_entry

        return workload_of_entry(name, sequence_length)
    counted = count(name, sequence_length) if count else None
    if counted is None:
        raise UsageError(_unknown(name, [each.tokens_per_sample for each in known]))
    return counted


@cache
def catalog() -> dict[str, list[Workload]]:
    """Return the workloads of the catalog by name; the first of each has the recipe's own length."""
    text = (resources.files("shoal.planner") / "catalog" / "workloads.json").read_text(encoding="utf-8")
    workloads: dict[str, list[Workload]] = {}
    for entry in parse_json(text, "catalog/workloads.json"):
        layers = tuple(
            Layer(name=name, num_parameters=parameters, forward_flops=flops)
            for name, parameters, flops in entry.pop("layers")
        )
        entry["activations"] = _activations(entry["activations"])
        entry["parts"] = {
            int(number): LayerPart(
                num_parameters=parameters,
                activations=_activations(kept),
                divided=tuple(tuple(sizes) for sizes in divided),
            )
            for number, (parameters, kept, divided) in entry.get("parts", {}).items()
        }
        entry["weight_sizes"] = tuple((size, count) for size, count in entry["weight_sizes"])
        workloads.setdefault(entry["name"], []).append(Workload(layers=layers, **entry))
    return workloads


def _activations(entry: Mapping[str, list[float]]) -> dict[Numerics, Activations]:
    return {
        Numerics(name): Activations(**dict(zip(_NUMBERS, numbers, strict=False)))
        for name, numbers in entry.items()
    }


def _unknown(name: str, lengths: list[int]) -> str:
    """Return the error of a name that is not in the catalog, or not with the length that was asked for."""
    if lengths:
        return (
            f"recipe {name} was counted for samples of {' and '.join(map(str, lengths))} tokens: for others "
            "give `count`, or call shoal.plan"
        )
    names = list(catalog())
    models = [each for each in names if each.partition("-")[2] not in names]
    tasks = sorted({each.partition("-")[0] for each in set(names) - set(models)})
    return (
        f"recipe {name!r} is not known.{did_you_mean(name, names)} Choose one of {', '.join(models)}; a "
        f"finetuning ({', '.join(tasks)}) of one, such as {names[-1]}; another recipe with a sample; or a "
        "model of yours with --model module:function"
    )
