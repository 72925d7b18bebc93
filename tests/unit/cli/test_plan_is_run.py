"""Compares each plan with a dry run of its command: layout, batch, steps, precision and bytes."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

import pytest

from shoal.cli.app import main
from shoal.decide.footprint import Activations
from shoal.errors import EXIT_OK, EXIT_USAGE, UsageError
from shoal.planner.answer import command_of
from shoal.planner.hardware import Catalog
from shoal.planner.prediction import Plan
from shoal.recipes import Sample, memory, script
from shoal.recipes.resnet50 import IMAGENET_CLASSES
from shoal.recipes.workloads import plan, preset_settings

RECIPES = ("albert", "bert", "t5", "lm", "resnet50", "mask_rcnn")
PRESETS = [(recipe, preset) for recipe in RECIPES for preset in script(recipe).PRESETS]
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

    def once(sample: Sample, precision: str, device_type: str = "cuda") -> Activations:
        shapes = tuple(tuple(each.shape) for each in sample.inputs.values() if hasattr(each, "shape"))
        key = (
            type(sample.model),
            sample.num_parameters,
            sample.num_trainable,
            shapes,
            precision,
            device_type,
        )
        if key not in counted:
            counted[key] = count(sample, precision, device_type)
        return counted[key]

    monkeypatch.setattr(memory, "activations_of", once)

    @cache
    def data_of(recipe: str, preset: str) -> tuple[str, ...]:
        if recipe == "mask_rcnn":
            return "--data.made-images", "1000"
        config = preset_settings(recipe, preset)
        if recipe == "resnet50":
            classes = str(config.model.num_classes or IMAGENET_CLASSES)
            return "--data.made-images", str(IMAGES), "--model.num-classes", classes
        folder = tmp_path_factory.mktemp("text")
        module: Any = script(recipe)
        module.trial(config, folder)  # writes text with the tokens of the model
        return "--data.path", str(folder)

    def run(recipe: str, preset: str, *words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["shoal", *words, *data_of(recipe, preset), "--dry-run"])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        said = capsys.readouterr()
        return ended.value.code, said.out + said.err

    return run


def assert_run_as_planned(found: Plan, said: str) -> None:
    """Compare a plan with what its command's dry run says."""
    batches = [tuple(int(n.replace(",", "")) for n in each) for each in BATCH.findall(said)]
    replicas = found.workers.num_accelerators // found.layouts[0].stages
    planned = [
        (layout.micro_batch, step.micro_batches, replicas, layout.global_batch)
        for layout, step in zip(found.layouts, found.steps, strict=True)
    ]
    assert batches == planned
    assert f"\npipeline = {found.layouts[0].stages}\n" in said or not found.training.has_stages
    assert f"\nshard_optimizer = {str(found.layouts[0].sharded_optimizer).lower()}\n" in said
    steps = [int("".join(each).replace(",", "")) for each in STEPS.findall(said)]
    until = found.training.parts[0].convergence.source  # data of unknown length: a plan says so
    assert until == "one million samples" or steps == [run.num_steps for run in found.runs]
    assert f"\nmemory       {found.memory}\n" in said
    device = found.workers.instance.accelerator
    assert device
    precision = found.training.parts[0].precision
    assert f"\ndevices      {found.workers.num_accelerators:,} {device.name} in {precision}; " in said
    assert "does not fit" not in said


def outcome_of(recipe: str, preset: str, cluster: str, dry_run: DryRun) -> str:
    """Check a plan against the dry run of its command, or its refusal against training's; return which."""
    try:
        found = plan(f"{recipe}-{preset}", cluster, algorithms=["hierarchical-ring"])[0]
    except UsageError as error:
        command = ("train", recipe, "--preset", preset, "--cluster", cluster)
        status, said = dry_run(recipe, preset, *command)
        if "fits on no layout" in str(error):
            return "too large"
        assert status == EXIT_USAGE and str(error) in said
        return "refused"
    words = command_of(found)[1:]
    end = words.index("--rdzv") if "--rdzv" in words else len(words)
    status, said = dry_run(recipe, preset, *words[:end], "--cluster", cluster)
    assert status == EXIT_OK, f"shoal {shlex.join(words)}: {said}"
    assert_run_as_planned(found, said)
    return "planned"


def test_a_plan_is_what_its_command_trains(dry_run: DryRun) -> None:
    every = [(*preset, cluster) for preset in PRESETS if preset not in LARGE for cluster in CLUSTERS]
    outcomes = [outcome_of(*each, dry_run) for each in Random(51).sample(every, 12)]
    assert outcomes.count("planned") > 3 and "refused" in outcomes


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "preset"), PRESETS)
def test_every_plan_is_what_its_command_trains(recipe: str, preset: str, dry_run: DryRun) -> None:
    for cluster in CLUSTERS:
        outcome_of(recipe, preset, cluster, dry_run)
