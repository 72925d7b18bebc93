"""Presets and the arithmetic of ResNet runs, against values computed by hand; refusals."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from importlib import resources
from typing import Any

import pytest

from shoal.data.images.augment import AugmentConfig
from shoal.errors import UsageError
from shoal.models.resnet_config import ResNetConfig
from shoal.optim.lr_schedules import learning_rate
from shoal.recipes.resnet50 import (
    PRESETS,
    DataConfig,
    OptimConfig,
    ResNetTrainConfig,
    RunPlan,
    TrainConfig,
    ValidationConfig,
    check,
    make_plan,
)
from shoal.train.config import RunOutputConfig

IMAGENET = 1_281_167
SECTIONS = {
    "model": ResNetConfig,
    "data": DataConfig,
    "augment": AugmentConfig,
    "train": TrainConfig,
    "optim": OptimConfig,
    "validation": ValidationConfig,
    "run": RunOutputConfig,
}


def preset(name: str) -> ResNetTrainConfig:
    file = resources.files("shoal.recipes") / "presets" / "resnet50" / f"{name}.toml"
    tree: dict[str, dict[str, Any]] = tomllib.loads(file.read_text())
    return ResNetTrainConfig(**{section: SECTIONS[section](**values) for section, values in tree.items()})


def plan(config: ResNetTrainConfig, num_examples: int = IMAGENET, num_workers: int = 64) -> RunPlan:
    return make_plan(config, num_examples=num_examples, num_workers=num_workers)


def rate(found: RunPlan, step: int) -> float:
    """Return the learning rate of ``step``, counted from 1."""
    return learning_rate(found.schedule, step - 1)


def test_presets_are_all_there() -> None:
    files = (resources.files("shoal.recipes") / "presets" / "resnet50").iterdir()
    assert {file.name for file in files} == {f"{name}.toml" for name in PRESETS}


def test_the_post_of_16k() -> None:
    """AWS 2018: 6.4 for 16,384 images, 0.001 up in 10 of 90 epochs, a parabola down."""
    config = preset("imagenet-16k")
    found = plan(config)
    assert (found.schedule.total_steps, found.schedule.warmup_steps) == (7_038, 782)
    assert rate(found, 1) == 0.001
    assert rate(found, 392) == pytest.approx(0.001 + (6.4 - 0.001) / 2)  # half of the warm-up
    assert rate(found, 783) == pytest.approx(6.4)
    assert rate(found, 782 + 3_128 + 1) == pytest.approx(6.4 / 4, rel=1e-5)  # half of what is left
    assert rate(found, 7_038) == pytest.approx(1e-5 + 6.4 / 6_256**2, rel=1e-5)
    assert (found.batch.micro_batch_size, found.batch.accumulation_steps) == (256, 1)
    assert config.optim.options() == {"momentum": 0.9, "nesterov": True}
    assert (config.optim.weight_decay, config.train.loss_scale, config.model.zero_gamma) == (
        1e-4,
        1_024,
        True,
    )


def test_colours_of_the_post_and_of_its_script() -> None:
    """The post names saturation, hue, brightness and PCA noise; its script has contrast and no hue."""
    post, script = preset("imagenet-16k"), preset("imagenet-16k-scripts")
    assert replace(script, augment=post.augment) == post
    ranges = [(a.brightness, a.contrast, a.saturation, a.hue) for a in (post.augment, script.augment)]
    assert ranges == [(0.4, 0.0, 0.4, 0.1), (0.4, 0.4, 0.4, 0.0)]
    assert post.augment.lighting == script.augment.lighting == 0.1


def test_the_reference_point_of_32k() -> None:
    config = preset("imagenet-lars-32k")
    found = plan(config)
    assert (found.schedule.total_steps, found.schedule.warmup_steps) == (2_268, 626)
    assert rate(found, 627) == pytest.approx(21.2)
    assert config.optim.optimizer == "lars" and config.optim.options()["momentum"] == 0.94
    assert config.optim.weight_decay == 2.5e-5 and config.train.label_smoothing == 0.1


def test_fast_grows_from_160_to_192() -> None:
    augment = preset("imagenet-fast").augment
    assert [augment.size_at(epoch) for epoch in (0, 11, 13, 15)] == [160, 160, 192, 192]


def test_the_rate_is_in_proportion_to_the_batch() -> None:
    config = preset("cifar10")
    base = plan(config, 50_000, 1).schedule.base
    sixteen = replace(config, train=replace(config.train, global_batch_size=4_096))
    assert plan(sixteen, 50_000, 1).schedule.base == pytest.approx(16 * base)
    given = replace(config, optim=replace(config.optim, learning_rate=1.0))
    assert plan(given, 50_000, 1).schedule.base == 1.0


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        ("train", {"total_epochs": 5}, r"optim\.warmup_epochs 10.* 0 and train\.total_epochs 5"),
        ("train", {"label_smoothing": 1.0}, r"train\.label_smoothing 1\.0 must be at least 0 and below 1"),
        ("train", {"mixup": 2.0}, r"train\.mixup 2\.0 must be from 0 to 1"),
        ("data", {"cache_bytes": "much"}, r"data\.cache_bytes 'much'"),
        ("data", {"made_images": -1}, r"data\.made_images -1"),
        ("validation", {"size": 300}, r"validation\.size 300 does not fit into validation\.resize 256"),
    ],
)
def test_refusals(section: str, changes: dict[str, Any], message: str) -> None:
    config = ResNetTrainConfig()
    with pytest.raises(UsageError, match=message):
        replace(config, **{section: replace(getattr(config, section), **changes)})


def test_refusals_that_need_the_number_of_images() -> None:
    config = ResNetTrainConfig()
    with pytest.raises(UsageError, match="less than half of one"):
        plan(config, 50)
    odd = replace(config, train=replace(config.train, mixup=0.2, micro_batch_size=1))
    with pytest.raises(UsageError, match=r"train\.mixup pairs neighbours"):
        plan(odd)


def test_too_few_made_images_are_refused_before_workers_start() -> None:
    config = ResNetTrainConfig()
    few = replace(config, data=replace(config.data, made_images=40))
    wanted = r"data\.made_images 40 leaves 8 held-out images for 10 classes: make 50 or more"
    with pytest.raises(UsageError, match=wanted):
        check(few, 1, None)
