"""Counts the samples of recipes for the planner: FLOPs and workloads; and predicts recipes by name.

``python -m shoal.recipes.workloads > FILE`` counts again what the planner's ``catalog/workloads.json`` holds.
"""

# What needs torch is imported in functions: `shoal plan` needs none for the workloads of the catalog.

from __future__ import annotations

import json
import math
import re
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, partial, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from shoal.decide.footprint import CountedActivations
from shoal.decide.workload import LAMB_BYTES, MOMENTUM_BYTES, WIDTHS, LayerPart, Workload
from shoal.errors import UsageError
from shoal.planner import api, comparison
from shoal.planner.convergence import Phase, data_set_of
from shoal.planner.recipe_workloads import Preset, catalog
from shoal.recipes import RECIPES, Sample, preset_file, script
from shoal.recipes.memory import activations_of, part_of, profile_of, state_bytes

P = ParamSpec("P")
T = TypeVar("T")

# ------------------------------------------------------------------------------------------------- counts


def flops_per_sample(sample: Sample) -> float:
    """Return the FLOPs of the matrix products of one sample, forward and backward, as workloads have them."""
    forward = sum(flops for _, _, flops in profile_of(sample).layers) / sample.num_samples
    return (2 + sample.num_trainable / sample.num_parameters) * forward


# ------------------------------------------------------------------------------------------------- names


def preset_settings(recipe: str, preset: str) -> Any:
    """Return the settings of a recipe's preset.

    Raises:
        UsageError: the recipe has no such preset.
    """
    if preset not in (presets := script(recipe).PRESETS):
        raise UsageError(f"{recipe} has no preset {preset}: choose one of {', '.join(presets)}")
    default = getattr(script(recipe), RECIPES[recipe].config)()
    return _with_values(default, tomllib.loads(preset_file(recipe, preset).read_text(encoding="utf-8")))


def _with_values(settings: Any, values: Mapping[str, Any]) -> Any:
    """Return settings with the values of TOML, in which lists stand for tuples and "none" for no value."""
    changed: dict[str, Any] = {}
    for name, value in values.items():
        old = getattr(settings, name)
        if is_dataclass(old):
            changed[name] = _with_values(old, value)
        elif isinstance(value, list):
            changed[name] = tuple(value)
        else:
            changed[name] = None if value == "none" else value
    return replace(settings, **changed)


def size_of(preset: str) -> str:
    """Return a preset's size of the model: presets that differ in the optimizer have the same."""
    return preset.partition("-")[0]


def workload_name(recipe: str, preset: str, config: Any = None, size: str | None = None) -> str:
    """Return the name of a recipe's model in the planner.

    Args:
        config: settings; default: the preset's.
        size: of a model to finetune; default: the size of the preset, if the recipe of the model has it, or
            base.
    """
    if RECIPES[recipe].starts_from:
        return f"{recipe}-{model_to_finetune(recipe, preset, size)}"
    config = preset_settings(recipe, preset) if config is None else config
    return RECIPES[recipe].workload.format(name=recipe, size=size_of(preset), config=config)


def model_to_finetune(recipe: str, preset: str, size: str | None) -> str:
    """Return the name of a model that a finetuning starts from if none is named, such as ``bert-base``."""
    sources = RECIPES[recipe].starts_from
    source = preset if preset in sources else sources[0]
    return f"{source}-{size or (preset if preset in script(source).PRESETS else 'base')}"


def _find(name: str) -> tuple[str, str, str] | None:
    """Return (recipe, preset, model to finetune or nothing) of a name of :func:`workload_name`."""
    for recipe, entry in RECIPES.items():
        for source in entry.starts_from:
            for preset in script(source).PRESETS:
                if name == f"{recipe}-{source}-{size_of(preset)}":
                    return recipe, _finetuning_preset(recipe, source, preset), f"{source}-{size_of(preset)}"
        if not entry.starts_from and hasattr(script(recipe), "sample"):
            for preset in script(recipe).PRESETS:
                if name == workload_name(recipe, preset):
                    return recipe, preset, ""
    return None


def _finetuning_preset(recipe: str, source: str, size: str) -> str:
    """Return the preset for models of a source, or the default for one too small for its sequences."""
    entry = RECIPES[recipe]
    if source not in script(recipe).PRESETS:
        return entry.preset
    section, setting = entry.length.split(".")
    named = tomllib.loads(preset_file(recipe, source).read_text(encoding="utf-8")).get(section, {})
    positions = getattr(preset_settings(source, size).model, "max_position_embeddings", math.inf)
    return source if named.get(setting, 0) <= positions else entry.preset


@cache
def preset_of(name: str) -> Preset | None:
    """Return the preset that a name stands for, or ``None`` if it names none.

    Args:
        name: as :func:`workload_name` returns it, or the recipe and a preset, such as ``bert-large-lans``.
    """
    recipe, preset, model = _find(name) or _of_preset(name)
    if not recipe:
        return None
    config = preset_settings(recipe, preset)
    counted_as = "" if model or _has_usual_sample(recipe, preset, config) else f"{recipe}-{preset}"
    return _preset(recipe, preset, model, config, counted_as)


def _preset(recipe: str, preset: str, model: str, config: Any, counted_as: str) -> Preset:
    """Return a preset for the planner, with settings that may differ from its own."""
    entry = RECIPES[recipe]
    length = entry.length.rpartition(".")[2]
    phases = [
        Phase(
            batch=sizes.global_batch_size,
            steps=getattr(sizes, "total_steps", None),
            epochs=getattr(sizes, "total_epochs", getattr(sizes, "epochs", None)),
            covers=hasattr(sizes, "epochs"),
            sequence_length=getattr(sizes, length) if section != "train" else None,
            micro_batch=None if sizes.micro_batch_size == "auto" else sizes.micro_batch_size,
            section=section,
            evaluate_every_steps=getattr(config.run, "validation_frequency", 0) or 0,
            evaluate_every_epochs=getattr(getattr(config, "validation", None), "every_epochs", 0.0),
        )
        for section, sizes in getattr(config, "phases", [("train", config.train)])
    ]
    return Preset(
        command=(entry.group, entry.command or recipe, "--preset", preset),
        model=(model and f"{recipe}-{model}") or workload_name(recipe, preset, config),
        counted_as=counted_as,
        phases=tuple(phases),
        length=entry.length,
        data=data_set_of(recipe, preset),
        precision=getattr(config.train, "precision", "auto"),
        shard_optimizer=config.train.shard_optimizer,
        has_stages=_accepts(config, pipeline=2),
        has_shards=_accepts(config, shard=True),
        has_tensor=_accepts(config, tensor=2),
        evaluation_samples=getattr(config.run, "validation_samples", 0),
        evaluates_beside=config.run.evaluates_beside,
        validation_hosts=config.run.hosts_apart,
        checkpoint_every_steps=config.run.checkpoint_frequency if config.run.save else None,
    )


@dataclass(frozen=True, kw_only=True)
class OwnSettings:
    """A recipe with settings that differ from a preset's, for the planner."""

    recipe: str
    preset: str
    model: str
    """Model to finetune, such as ``bert-base``; empty for others."""
    words: tuple[str, ...]
    """Options by which the settings differ."""
    config: Any

    @property
    def name(self) -> str:
        """The recipe, its preset and the options, for messages."""
        return " ".join((f"{self.recipe}-{self.model or self.preset}", *self.words))

    def presets(self, name: str) -> Preset | None:
        """Return this preset by its name."""
        if name != self.name:
            return preset_of(name)
        counted_as = "" if self._is_usual else self.name
        preset = _preset(self.recipe, self.preset, self.model, self.config, counted_as)
        return replace(preset, command=(*preset.command, *_without_batches(self.words)))

    def count(self, name: str, sequence_length: int | None = None) -> Workload | None:
        """Count the model with these settings by its name."""
        if name != self.name:
            return count_recipe(name, sequence_length)
        return _count(name, self.recipe, self.model, self.config, sequence_length)

    @property
    def _is_usual(self) -> bool:
        """Return true if samples and optimizer state are those of the preset."""
        usual = preset_settings(self.recipe, self.preset)
        if getattr(usual, "optim", None) != getattr(self.config, "optim", None):
            return False
        if self.model:
            return bool(usual.model == self.config.model and usual.data == self.config.data)
        same_text = getattr(usual, "data", None) == getattr(self.config, "data", None)
        return same_text and _has_usual_sample(self.recipe, self.preset, self.config)


def _without_batches(words: Sequence[str]) -> list[str]:
    """Return options without the batch sizes, which a plan has."""
    kept: list[str] = []
    rest = iter(words)
    for word in rest:
        name, equals, _ = word.partition("=")
        if not re.fullmatch(r"--\w+\.(global|micro)-batch-size", name):
            kept.append(word)
        elif not equals:
            next(rest, None)
    return kept


def own_settings(
    name: str, preset: str | None, words: Sequence[str], settings_of: Callable[[list[str]], tuple[str, Any]]
) -> OwnSettings | None:
    """Return a recipe with settings of one's own, or ``None`` if ``name`` is none and nothing is changed.

    Args:
        name: of a recipe, or as for :func:`preset_of`.
        preset: default: that of ``name``.
        words: options of the recipe's command.
        settings_of: parses a command.

    Raises:
        UsageError: no recipe has this name, or an option is none of its command.
    """
    recipe, named, model = _find(name) or _of_preset(name)
    if name in RECIPES and (preset or words or not recipe):
        recipe, named, model = name, RECIPES[name].preset, ""
    elif not words and preset in (None, named):
        return None
    if not recipe:
        option = f"--preset {preset}" if preset else words[0]
        raise UsageError(f"{option} is of a recipe, and {name!r} is none: name one of {', '.join(RECIPES)}")
    preset = preset or named
    if preset not in script(recipe).PRESETS:
        raise UsageError(
            f"{recipe} has no preset {preset}: choose one of {', '.join(script(recipe).PRESETS)}"
        )
    if RECIPES[recipe].starts_from and not model:
        model = model_to_finetune(recipe, preset, None)
    entry = RECIPES[recipe]
    _, config = settings_of([entry.group, entry.command or recipe, "--preset", preset, *words])
    return OwnSettings(recipe=recipe, preset=preset, model=model, words=tuple(words), config=config)


def _has_usual_sample(recipe: str, preset: str, config: Any) -> bool:
    """Return whether a preset's samples are those of the first preset with the same name of the workload."""
    name = workload_name(recipe, preset, config)
    usual = preset_settings(recipe, (_find(name) or ("", preset, ""))[1])
    if (usual.model, getattr(usual, "augment", None)) == (config.model, getattr(config, "augment", None)):
        return True
    own, other = (
        (each.num_parameters, [getattr(value, "shape", value) for value in each.inputs.values()])
        for each in map(script(recipe).sample, (config, usual))
    )
    return own == other


def _accepts(config: Any, **parallel: Any) -> bool:
    """Return whether a recipe with these settings can divide its model in a way."""
    if not hasattr(config, "parallel"):
        return False
    try:
        replace(config, parallel=replace(config.parallel, **parallel))
    except UsageError:  # they do not go together
        return False
    return True


def _of_preset(name: str) -> tuple[str, str, str]:
    """Return (recipe, preset, nothing) of a recipe and its preset; nothing of another name."""
    for recipe, entry in RECIPES.items():
        preset = name.removeprefix(f"{recipe}-")
        if preset != name and not entry.starts_from and preset in script(recipe).PRESETS:
            return recipe, preset, ""
    return "", "", ""


# ------------------------------------------------------------------------------------------------- workloads


@cache
def count_recipe(name: str, sequence_length: int | None = None) -> Workload | None:
    """Count the workload of a recipe's model, or return ``None`` for an unknown name.

    Args:
        name: as :func:`workload_name` returns it, or the recipe and a preset.
        sequence_length: tokens of a sample; default: the recipe's.

    Raises:
        UsageError: the model has no sequences, or none of this length.
        ShoalError: the library that provides the model is not installed.
    """
    recipe, preset, model = _find(name) or _of_preset(name)
    if not recipe:
        return None
    return _count(name, recipe, model, preset_settings(recipe, preset), sequence_length)


def _count(name: str, recipe: str, model: str, config: Any, sequence_length: int | None) -> Workload:
    """Count a recipe's sample with these settings and tokens of a sample."""
    length = RECIPES[recipe].length
    with tempfile.TemporaryDirectory() as folder:
        if model:
            config = with_new_model(config, Path(folder), model)
        if sequence_length is not None:
            if not length:
                raise UsageError(f"recipe {name} has no sequences; leave --sequence-length out")
            section, setting = length.split(".")
            config = _with_values(config, {section: {setting: sequence_length}})
        return workload_of(name, script(recipe).sample(config), config)


def with_new_model(config: Any, folder: Path, model: str) -> Any:
    """Return the settings of a finetuning with a new model of a size, which is written into ``folder``.

    Raises:
        UsageError: no preset has this size.
    """
    from shoal.models.synthetic import write_model

    source, _, size = model.partition("-")
    presets = script(source).PRESETS
    if size not in presets:
        raise UsageError(
            f"--size {size} is no preset of {source}: choose one of {', '.join(sorted(presets))}"
        )
    path = write_model(folder / "model", preset_settings(source, size).model)
    return replace(config, model=replace(config.model, path=path, from_scratch=True))


def workload_of(name: str, sample: Sample, config: Any) -> Workload:
    """Count the planner's workload of a recipe's sample."""
    from shoal.planner.counting import weight_sizes, workload_of_profile

    profile, moments = profile_of(sample), state_bytes(config, sample.model)
    workload = workload_of_profile(
        name,
        profile,
        CountedActivations(partial(activations_of, sample)),
        unit=config.unit,
        tokens_per_sample=sample.sequence_length,
        optimizer_bytes=MOMENTUM_BYTES if moments == 4 else LAMB_BYTES,
        state_bytes=moments,
        relay_bytes=sample.relay_bytes,
        summed_bytes=sample.summed_bytes,
        parts=dict(_parts(sample)),
        gathered=sample.gathered,
        weight_sizes=weight_sizes(sample.model),
        trainable=sample.num_trainable / sample.num_parameters,
        equal_shares=getattr(config, "equal_shares", False),
        explicit_stages=getattr(config, "explicit_stages", False),
        refuses_fp16=getattr(config, "refuses_fp16", ""),
        work_spread=sample.work_spread,
        input_s=sample.input_s,
    )
    return replace(workload, num_kernels=workload.num_kernels + sample.more_operations)


def _parts(sample: Sample) -> Iterator[tuple[int, LayerPart]]:
    """Yield the numbers of workers that can divide each layer of a sample, and the part of one of them."""
    from shoal.planner.counting import divided_weights

    for num_workers in WIDTHS:
        try:
            part = part_of(sample, num_workers)
        except UsageError:
            continue
        yield (
            num_workers,
            LayerPart(
                num_parameters=part.num_parameters,
                activations=CountedActivations(partial(activations_of, part)),
                divided=divided_weights(sample.model, part.model),
            ),
        )


def _counting(function: Callable[P, T]) -> Callable[P, T]:
    @wraps(function)
    def counting(*args: P.args, **options: P.kwargs) -> T:
        options.setdefault("count", count_recipe)
        options.setdefault("presets", preset_of)
        return function(*args, **options)

    return counting


plan = _counting(api.plan)
"""``api.plan``, which knows the presets of recipes, and counts those that are not in the catalog."""


compare = _counting(comparison.compare)
"""``comparison.compare`` with the same knowledge."""


def count_catalog() -> str:
    """Count the models of the planner's catalog again; return the text of the file."""
    from shoal.planner.counting import workload_of_entry
    from shoal.planner.hardware import shipped

    lines = []
    for known in (each for lengths in catalog().values() for each in lengths):
        length = known.tokens_per_sample if known.tokens_per_sample > 1 else None
        count = workload_of_entry if known.name in shipped("models.toml") else count_recipe
        lines.append(_as_json(count(known.name, length) or known))
    return "[\n" + ",\n".join(lines) + "\n]\n"


_RARE = (
    "summed_bytes",
    "parts",
    "gathered",
    "equal_shares",
    "explicit_stages",
    "refuses_fp16",
    "work_spread",
    "input_s",
)


def _as_json(workload: Workload) -> str:
    """Return a workload as an entry of the catalog, without the properties that most lack."""
    layers = [[each.name, each.num_parameters, each.forward_flops] for each in workload.layers]
    parts = {
        str(number): [each.num_parameters, _kept(each), each.divided]
        for number, each in workload.parts.items()
    }
    tree = {each.name: getattr(workload, each.name) for each in fields(workload)}
    usual = {each.name: each.default for each in fields(workload)} | {"parts": {}}
    tree |= {"layers": layers, "activations": _kept(workload), "parts": parts}
    for name in _RARE:
        if tree[name] == usual[name]:
            del tree[name]
    return json.dumps(tree, separators=(",", ":"))


def _kept(counted: Workload | LayerPart) -> dict[str, list[float]]:
    """Return the numbers of activations, those of a layer that is computed again where there is one."""
    numbers = {name: [*vars(each).values()] for name, each in counted.activations.items()}
    return {name: each if any(each[2:]) else each[:2] for name, each in numbers.items()}


if __name__ == "__main__":
    print(count_catalog(), end="")
