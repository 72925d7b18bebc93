"""Compares each plan with a dry run of its command: layout, batch, steps, precision and bytes."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import ceil
from random import Random
from typing import Any

import pytest

from shoal.cli.app import main
from shoal.cli.train import settings_of
from shoal.decide.footprint import Activations, Numerics
from shoal.errors import EXIT_OK, EXIT_USAGE, UsageError
from shoal.planner import hardware
from shoal.planner.answer import command_of
from shoal.planner.convergence import data_set_of
from shoal.planner.hardware import Catalog
from shoal.planner.prediction import Plan
from shoal.recipes import RECIPES, Sample, memory, script
from shoal.recipes.resnet50 import IMAGENET_CLASSES
from shoal.recipes.workloads import (
    own_settings,
    plan,
    preset_of,
    preset_settings,
    size_of,
    with_new_model,
)

PRETRAININGS = ("albert", "bert", "t5", "lm", "resnet50", "mask_rcnn")
PRESETS = [(recipe, preset) for recipe in PRETRAININGS for preset in script(recipe).PRESETS]
FINETUNINGS = [
    f"{recipe}-{source}-{size}"
    for recipe in ("squad", "classify", "t5_classify")
    for source in RECIPES[recipe].starts_from
    for size in dict.fromkeys(map(size_of, script(source).PRESETS))
]
LARGE = {("t5", "3b"), ("t5", "large"), ("albert", "xlarge"), ("lm", "llama-8b"), ("lm", "llama-1b")}
"""Their activations take long to count."""
CLUSTERS = [
    f"{count}x{name}"
    for name, instance in Catalog().instances.items()
    if instance.accelerator
    for count in (1, 3, 8, 64)
]
BATCH = re.compile(r"^batch +(?:\w+: )?(\d+) \w+ × (\d+) [\w -]+ × (\d+) \w+ = ([\d,]+) ", re.M)
STEPS = re.compile(r"^(?:(?:run|epochs) .*?\b([\d,]+) steps|steps +([\d,]+) =)", re.M)
IMAGES = 1_281_167
"""Of ImageNet, from which plans of ResNet-50 have their steps."""

DryRun = Callable[..., tuple[int, str]]


@pytest.fixture
def dry_run(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
) -> DryRun:
    """Return a function that runs a command with data of its recipe, and returns its status and words."""
    monkeypatch.setattr("shoal.data.coco.synthetic.NUM_CATEGORIES", 90)  # as COCO's, of which plans are
    counted: dict[object, Activations] = {}
    count = memory.activations_of

    def once(sample: Sample, numerics: Numerics) -> Activations:
        shapes = tuple(tuple(each.shape) for each in sample.inputs.values() if hasattr(each, "shape"))
        key = (type(sample.model), sample.num_parameters, sample.num_trainable, shapes, numerics)
        if key not in counted:
            counted[key] = count(sample, numerics)
        return counted[key]

    monkeypatch.setattr(memory, "activations_of", once)

    @cache
    def data_of(recipe: str, preset: str, model: str = "") -> tuple[str, ...]:
        if model:
            folder = tmp_path_factory.mktemp("finetuning")
            module: Any = script(recipe)
            config = with_new_model(preset_settings(recipe, preset), folder, model)
            trial = module.trial(config, folder)
            source = ("--model.path", str(config.model.path), "--model.from-scratch")
            return *source, "--data.path", str(trial.data.path), "--data.eval", _one(trial.data.eval)
        if recipe == "mask_rcnn":
            return "--data.made-images", "1000"
        config = preset_settings(recipe, preset)
        if recipe == "resnet50":
            classes = str(config.model.num_classes or IMAGENET_CLASSES)
            published = data_set_of(recipe, preset)
            images = str(published.num_examples if published else IMAGES)
            return "--data.made-images", images, "--model.num-classes", classes
        folder = tmp_path_factory.mktemp("text")
        script(recipe).trial(config, folder)  # writes text with the tokens of the model
        return "--data.path", str(folder)

    def run(recipe: str, preset: str, *words: str, model: str = "") -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["shoal", *words, *data_of(recipe, preset, model), "--dry-run"])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        said = capsys.readouterr()
        return ended.value.code, said.out + said.err

    return run


def _one(paths: Any) -> str:
    """Return the path, or the only one of several."""
    (path,) = paths if isinstance(paths, tuple) else (paths,)
    return str(path)


def steps_of(found: Plan, said: str) -> list[int]:
    """Return the steps of a dry run; those of a finetuning for the examples that the plan is of."""
    steps = [int("".join(each).replace(",", "")) for each in STEPS.findall(said)]
    planned = re.match(
        r"([\d.]+) epochs of .*: ([\d,]+) examples", found.training.parts[0].convergence.source
    )
    made = re.search(r" times ([\d,]+) sequences", said)
    if not planned or not made:
        return steps
    epochs, batch = float(planned[1]), found.layouts[0].global_batch
    of_made, of_planned = (ceil(epochs * int(n.replace(",", "")) / batch) for n in (made[1], planned[2]))
    assert steps == [of_made]
    return [of_planned]


def assert_run_as_planned(found: Plan, said: str) -> None:
    """Compare a plan with what its command's dry run says."""
    batches = [tuple(int(n.replace(",", "")) for n in each) for each in BATCH.findall(said)]
    layout = found.layouts[0]
    replicas = found.workers.num_accelerators // layout.per_replica
    planned = [
        (layout.micro_batch, step.micro_batches, replicas, layout.global_batch)
        for layout, step in zip(found.layouts, found.steps, strict=True)
    ]
    assert batches == planned
    for setting, value, may_differ in (
        ("pipeline", layout.stages, found.training.has_stages),
        ("tensor", layout.tensor, found.training.has_tensor),
        ("shard", str(layout.shard).lower(), found.training.has_shards),
        ("shard_optimizer", str(layout.sharded_optimizer).lower(), True),
    ):
        assert f"\n{setting} = {value}\n" in said or not may_differ
    until = found.training.parts[0].convergence.source  # data of unknown length: a plan says so
    assert until == "one million samples" or steps_of(found, said) == [run.num_steps for run in found.runs]
    assert f"\nmemory       {found.memory}\n" in said
    device = found.workers.instance.accelerator
    assert device
    precision = found.training.parts[0].precision
    hosts = replace(found.workers, count=found.workers.count + found.training.validation_hosts)
    assert f"\ndevices      {hosts.num_accelerators:,} {device.name} in {precision}; " in said
    assert "does not fit" not in said


def outcome_of(recipe: str, preset: str, cluster: str, dry_run: DryRun, model: str = "") -> str:
    """Check a plan against the dry run of its command, or its refusal against training's; return which."""
    group, called = RECIPES[recipe].group, RECIPES[recipe].command or recipe
    try:
        found = plan(f"{recipe}-{model or preset}", cluster, algorithms=["hierarchical-ring"])[0]
    except UsageError as error:
        command = (group, called, "--preset", preset, "--cluster", cluster)
        status, said = dry_run(recipe, preset, *command, model=model)
        if "fits on no layout" in str(error):
            return "too large"
        assert status == EXIT_USAGE and str(error) in said
        return "refused"
    words = command_of(found)[1:]
    end = words.index("--rdzv") if "--rdzv" in words else len(words)
    status, said = dry_run(recipe, preset, *words[:end], "--cluster", cluster, model=model)
    assert status == EXIT_OK, f"shoal {shlex.join(words)}: {said}"
    assert_run_as_planned(found, said)
    return "planned"


def finetuned(name: str, cluster: str, dry_run: DryRun) -> str:
    """Check a plan of a finetuning, as :func:`outcome_of` does."""
    preset = preset_of(name)
    assert preset
    recipe, _, model = name.partition("-")
    return outcome_of(recipe, preset.command[-1], cluster, dry_run, model)


def test_a_plan_is_what_its_command_trains(dry_run: DryRun) -> None:
    every = [(*preset, cluster) for preset in PRESETS if preset not in LARGE for cluster in CLUSTERS]
    outcomes = [outcome_of(*each, dry_run) for each in Random(51).sample(every, 12)]
    assert outcomes.count("planned") > 3 and "refused" in outcomes


def test_a_plan_of_a_finetuning_is_what_its_command_trains(dry_run: DryRun) -> None:
    small = [name for name in FINETUNINGS if name.endswith("-tiny")]
    outcomes = [
        finetuned(name, cluster, dry_run)
        for name in small
        for cluster in ("1xg6e.12xlarge", "3xp4d.24xlarge")
    ]
    assert outcomes.count("planned") == len(small) + 1, "48 questions divide over 24 devices, 32 do not"
    assert outcomes.count("refused") == len(small) - 1


@pytest.mark.parametrize(
    ("preset", "mib", "divided"),
    [
        ("tiny", 9, "--parallel.pipeline 4 --parallel.virtual-stages 2 --parallel.tensor 2"),
        ("tiny", 11, "--parallel.tensor 2 --train.shard-optimizer"),
        ("gpt2-124m", 2246, "--parallel.shard"),
    ],
)
def test_a_plan_that_divides_the_model_is_what_its_command_trains(
    preset: str, mib: int, divided: str, dry_run: DryRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a small model on devices with little memory."""
    read = hardware._accelerator
    monkeypatch.setattr(hardware, "_accelerator", lambda entry: replace(read(entry), memory_bytes=mib << 20))
    assert outcome_of("lm", preset, "1xp4d.24xlarge", dry_run) == "planned"
    found = plan(f"lm-{preset}", "1xp4d.24xlarge", algorithms=["hierarchical-ring"])[0]
    assert f" {divided} --workers" in shlex.join(command_of(found))


def test_a_plan_with_hosts_that_evaluate_is_what_its_command_trains(dry_run: DryRun) -> None:
    own = own_settings("albert", "base", ("--run.validation-hosts", "1"), settings_of)
    assert own
    found = plan(
        own.name,
        "5xp4d.24xlarge",
        presets=own.presets,
        count=own.count,
        algorithms=["hierarchical-ring"],
    )[0]
    assert found.workers.count == 4
    words = command_of(found)[1:]
    status, said = dry_run("albert", "base", *words[: words.index("--rdzv")], "--cluster", "5xp4d.24xlarge")
    assert status == EXIT_OK
    assert_run_as_planned(found, said)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("cluster", ["1xc5n.18xlarge", "1xg6e.12xlarge", "1xp4d.24xlarge"])
def test_a_plan_in_16_bits_is_what_its_command_trains(precision: str, cluster: str, dry_run: DryRun) -> None:
    """On processors, on GPUs without the attention kernels, and on those with them."""
    own = own_settings("bert", "tiny", ("--train.precision", precision), settings_of)
    assert own
    found = plan(own.name, cluster, presets=own.presets, count=own.count, algorithms=["hierarchical-ring"])[0]
    status, said = dry_run("bert", "tiny", *command_of(found)[1:], "--cluster", cluster)
    assert status == EXIT_OK
    assert_run_as_planned(found, said)


def test_a_plan_of_images_on_processors_is_what_its_command_trains(dry_run: DryRun) -> None:
    """In bf16, as the preset says; autocast on CPUs keeps other tensors."""
    assert outcome_of("resnet50", "cifar10", "1xc5n.18xlarge", dry_run) == "planned"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", FINETUNINGS)
def test_every_plan_of_a_finetuning_is_what_its_command_trains(name: str, dry_run: DryRun) -> None:
    for cluster in CLUSTERS:
        finetuned(name, cluster, dry_run)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("recipe", "preset"), PRESETS)
def test_every_plan_is_what_its_command_trains(recipe: str, preset: str, dry_run: DryRun) -> None:
    for cluster in CLUSTERS:
        outcome_of(recipe, preset, cluster, dry_run)
