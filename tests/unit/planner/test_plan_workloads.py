"""Workloads counted from the real models, against what is known of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from shoal.cli.train import settings_of
from shoal.decide.workload import Workload
from shoal.errors import UsageError
from shoal.models.text_config import BertModelConfig
from shoal.planner.answer import command_of
from shoal.planner.counting import workload_of_entry, workload_of_function
from shoal.planner.hardware import shipped
from shoal.planner.prediction import Plan
from shoal.planner.recipe_workloads import catalog, workload
from shoal.planner.step_time import KERNEL_S
from shoal.recipes import workloads

COUNTED: dict[tuple[str, int | None], Workload] = {}


def count_recipe(name: str, length: int | None = None) -> Workload:
    """Count a model once for all tests: without a length also for that of the recipe."""
    if (name, length) not in COUNTED:
        counted = workloads.count_recipe(name, length)
        assert counted is not None
        COUNTED[name, length] = COUNTED[name, counted.tokens_per_sample] = counted
    return COUNTED[name, length]


def test_bert_has_its_parameters_and_flops() -> None:
    found = count_recipe("bert-base", 128)
    config = BertModelConfig()
    assert found.num_parameters == config.num_parameters
    # A layer's products: 24 h² a token and 4 S h of attention (Narayanan et al. 2021), the last layer for the
    # masked tokens only; the head's h² + h V on 15 %.
    h, length, layers, vocabulary = 768, 128, 12, 30522
    most = length * layers * (24 * h * h + 4 * length * h) + 0.16 * length * (2 * h * h + 2 * h * vocabulary)
    assert 0.93 * most < found.forward_flops < most
    assert found.tokens_per_sample == length


def test_shared_layers_are_counted_once_and_their_gradients_come_last() -> None:
    found = count_recipe("albert-base")
    assert 11e6 < found.num_parameters < 13e6
    shared = [layer for layer in found.layers if "albert_layers" in layer.name]
    assert shared and all(layer.num_parameters for layer in shared)
    # Twelve passes through one layer.
    assert found.forward_flops > 0.9 * 512 * 12 * (24 * 768 * 768)


def test_resnet50() -> None:
    pytest.importorskip("torchvision")
    found = count_recipe("resnet50")
    assert found.num_parameters == 25_557_032
    assert found.forward_flops == pytest.approx(2 * 4.09e9, rel=0.01)
    assert found.layers[0].name == "conv1" and found.layers[-1].name == "fc"
    # Forward 53 convolutions, norms, 49 activations, 16 sums; backward the same and a second kernel for each
    # convolution.
    assert 350 < found.num_kernels < 500
    assert found.unit == "images"


def made_model() -> tuple[object, dict[str, object], int]:
    import torch
    from torch import nn

    class Made(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(16, 32)
            self.second = nn.Linear(32, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x)).sum()

    return Made(), {"x": torch.zeros(8, 16)}, 8


def test_a_users_model() -> None:
    found = workload_of_function(f"{__name__}:made_model")
    assert [(layer.name, layer.num_parameters) for layer in found.layers] == [
        ("first", 16 * 32 + 32),
        ("second", 32 * 4 + 4),
    ]
    assert [layer.forward_flops for layer in found.layers] == [2 * 16 * 32, 2 * 32 * 4]
    with pytest.raises(UsageError, match="cannot be imported"):
        workload_of_function("no.such.module:f")
    with pytest.raises(UsageError, match="cannot be imported"):
        workload_of_function("made_model")


@pytest.mark.parametrize(
    ("name", "length", "parameters"),
    [
        ("t5-tiny", 64, 1_197_824),
        ("squad-bert-tiny", 128, 675_842),  # its encoder has no pooler
        ("classify-bert-tiny", 128, 692_483 - 129),  # two labels here
        ("t5_classify-t5-tiny", 512, 1_197_824),
    ],
)
def test_what_is_finetuned_and_t5_are_the_models_of_their_presets(
    name: str, length: int, parameters: int
) -> None:
    """The numbers are those that `shoal bench train` wrote."""
    pytest.importorskip("transformers")
    found = count_recipe(name)
    assert (found.tokens_per_sample, found.num_parameters) == (length, parameters)


@pytest.mark.parametrize(("name", "length"), [("t5-tiny", 64), ("squad-bert-tiny", 128)])
def test_attention_grows_with_the_square(name: str, length: int) -> None:
    pytest.importorskip("transformers")
    shorter, found = count_recipe(name, length // 2), count_recipe(name)
    assert 0.25 < shorter.forward_flops / found.forward_flops < 0.55


SLOW_TO_COUNT = (
    "t5-3b",
    "t5-base",
    "t5-large",
    "t5-small",
    "gpt",
    "llama",
    "base",
    "large",
    "resnet50",
    "rcnn",
)


@pytest.mark.parametrize(
    ("name", "length"),
    [
        pytest.param(
            name, each, marks=pytest.mark.slow if any(part in name for part in SLOW_TO_COUNT) else ()
        )
        for name, entries in catalog().items()
        for each in (None, *(entry.tokens_per_sample for entry in entries[1:]))
    ],
)
def test_the_catalog_has_what_is_counted(name: str, length: int | None) -> None:
    """Else: ``python -m shoal.recipes.workloads > src/shoal/planner/catalog/workloads.json``."""
    pytest.importorskip("transformers")
    kept = workload(name, length)
    tokens = kept.tokens_per_sample if kept.tokens_per_sample > 1 else None
    count = workload_of_entry if name in shipped("models.toml") else count_recipe
    counted = count(name, tokens)
    assert kept.layers == counted.layers
    assert kept.num_kernels == pytest.approx(counted.num_kernels, rel=0.05), "versions of torch differ"
    for mine, other in ((kept, counted), *((kept.parts[n], part) for n, part in counted.parts.items())):
        assert mine.num_parameters == other.num_parameters
        assert getattr(mine, "divided", ()) == getattr(other, "divided", ())
        for numerics, found in other.activations.items():
            assert vars(mine.activations[numerics]) == pytest.approx(vars(found), rel=0.05)
    without = {"num_kernels": 0, "activations": {}, "parts": dict.fromkeys(counted.parts)}
    assert replace(kept, **without) == replace(counted, **without | {"parts": dict.fromkeys(kept.parts)})


def test_every_name_that_is_measured_is_known() -> None:
    """`shoal bench train` writes these, and ``--measured`` compares with them."""
    for name in ("albert-xlarge", "t5-tiny", "t5-3b", "squad-albert-large", "classify-bert-tiny"):
        assert workload(name).name == name
    assert workload("resnet50-tiny", count=count_recipe).name == "resnet50-tiny", "of a preset"
    named = workloads.preset_of("bert-large-lans")
    assert named and (named.name, named.model) == ("train bert --preset large-lans", "bert-large")
    for name in ("bert-larger", "squad-t5-base", "t5_classify-bert-base", "squad", "squad-bert"):
        with pytest.raises(UsageError, match="is not known"):
            workload(name, count=workloads.count_recipe)


@pytest.mark.parametrize(
    ("recipe", "preset", "size", "name"),
    [
        ("albert", "xlarge", None, "albert-xlarge"),
        ("bert", "large-lans", None, "bert-large"),
        ("resnet50", "imagenet-16k", None, "resnet50"),
        ("resnet50", "cifar10", None, "resnet8"),
        ("mask_rcnn", "coco-sgd-192", None, "mask-rcnn"),
        ("mask_rcnn", "faster-rcnn-tiny", None, "faster-rcnn"),
        ("squad", "bert", None, "squad-bert-base"),
        ("classify", "albert", "large", "classify-albert-large"),
        ("squad", "tiny", None, "squad-bert-tiny"),
        ("t5_classify", "t5", "3b", "t5_classify-t5-3b"),
    ],
)
def test_a_preset_is_named_after_its_model(recipe: str, preset: str, size: str | None, name: str) -> None:
    assert workloads.workload_name(recipe, preset, size=size) == name


@pytest.mark.parametrize(
    ("name", "batch", "steps", "data"),
    [
        ("squad-bert-base", 32, math.ceil(2 * 87_599 / 32), "SQuAD 1.1"),
        ("squad-albert-base", 48, 8_144, ""),
        ("classify-bert-large", 32, math.ceil(3 * 392_702 / 32), "MNLI"),
        ("classify-albert-xlarge", 128, 10_000, ""),
        ("resnet50-cifar10", 256, round(14 * 50_000 / 256), "CIFAR-10"),
    ],
)
def test_a_plan_has_the_steps_and_data_of_its_preset(name: str, batch: int, steps: int, data: str) -> None:
    found = workloads.plan(name, "1xp5.4xlarge", algorithms=["ring"])[0]
    assert found.layouts[0].global_batch == batch and found.runs[0].num_steps == steps
    assert found.training.parts[0].convergence.source.endswith(f"examples of {data}" if data else " albert")


def test_texts_have_the_work_of_their_own_lengths_and_the_memory_of_full_ones() -> None:
    full, planned = workload("squad-bert-base"), workloads.plan("squad-bert-base", "1xp4d.24xlarge")[0]
    part = planned.training.parts[0]
    assert part.workload.forward_flops == pytest.approx(190 / 384 * full.forward_flops)
    assert part.workload.work_spread == 0.40
    assert part.workload.activations == full.activations


def test_another_length_is_counted_by_a_recipe() -> None:
    pytest.importorskip("transformers")
    assert workload("albert-tiny", 16, count_recipe).tokens_per_sample == 16
    with pytest.raises(UsageError, match="albert-tiny was counted for samples of 32 tokens"):
        workload("albert-tiny", 16)


def test_unknown_recipe_says_which_was_meant() -> None:
    with pytest.raises(UsageError, match=r"'bert-lage' is not known. Did you mean 'bert-large'\?"):
        workload("bert-lage")
    with pytest.raises(UsageError, match="resnet50 has images, not sequences"):
        workload("resnet50", 128)
    assert {"resnet50", "mask-rcnn", "bert-large", "albert-base", "albert-large", "t5-3b"} <= set(catalog())


def test_evaluations_and_checkpoints_are_those_of_the_preset() -> None:
    found = workloads.plan("t5-base", "2xp4d.24xlarge")[0]
    assert found.training.checkpoint_every_steps == 5000
    part = found.training.parts[0]
    forward_s = (
        256 / 2 * part.workload.forward_flops / part.achieved_flops
    )  # of 2,048 sequences on 16 devices
    passes = math.ceil(2_048 / 16 / found.layouts[0].micro_batch)
    each_s = forward_s + passes * KERNEL_S * part.workload.num_kernels / 3
    assert found.runs[0].evaluations_s == pytest.approx(1_000_000 / 5_000 * each_s)
    phases = workloads.plan("bert-large", "1xp4d.24xlarge")[0]
    counts = [
        run.num_steps / (part.convergence.evaluate_every_epochs / part.global_batch)
        for run, part in zip(phases.runs, phases.training.parts, strict=True)
    ]
    assert [math.ceil(count) for count in counts] == [4, 1], "7,038 and 1,563 steps, each 2,000 and the last"


def test_a_finetuning_is_evaluated_once_on_the_validation_part_of_its_data() -> None:
    convergence = workloads.plan("squad-bert-base", "1xp4d.24xlarge")[0].training.parts[0].convergence
    assert convergence.evaluation_samples == 10_570
    assert convergence.evaluate_every_epochs == convergence.samples(1)


def test_hosts_that_evaluate_are_paid_and_do_not_train() -> None:
    def planned(*words: str) -> Plan:
        own = workloads.own_settings("t5", "base", words, settings_of)
        assert own
        return workloads.plan(own.name, "5xp4d.24xlarge", presets=own.presets, count=own.count)[0]

    found = planned("--run.validation-hosts", "1")
    alone = workloads.plan("t5-base", "4xp4d.24xlarge")[0]
    assert (found.workers.count, found.hosts) == (4, "4xp4d.24xlarge + 1 that evaluates")
    assert found.steps == alone.steps
    every = workloads.plan("t5-base", "1xp4d.24xlarge")[0].runs[0].evaluations_s
    assert found.runs[0].evaluations_s == pytest.approx(every / 200), "the last one alone is waited for"
    assert found.dollars == pytest.approx(5 / 4 * (alone.dollars or 0) * found.total_s / alone.total_s)
    words = command_of(found)
    assert words[words.index("--nnodes") + 1] == "5" and "--run.validation-hosts" in words
    with pytest.raises(UsageError, match="leaves none of 5 hosts to train"):
        planned("--run.validation-hosts", "5")
