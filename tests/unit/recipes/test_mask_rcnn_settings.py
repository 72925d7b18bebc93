"""Presets and the arithmetic of Mask R-CNN runs, against the published values; refusals."""

from __future__ import annotations

import json
import tomllib
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from shoal.cli.app import app
from shoal.data.coco.augment import DetectionAugmentConfig
from shoal.data.coco.synthetic import make_coco
from shoal.decide.batch import plan_batch
from shoal.errors import UsageError
from shoal.models.detection.config import MaskRCNNConfig
from shoal.optim.lr_schedules import learning_rate
from shoal.recipes.images import ImageDataConfig
from shoal.recipes.mask_rcnn import (
    PRESETS,
    DetectionRunConfig,
    MaskRCNNTrainConfig,
    OptimConfig,
    RunPlan,
    TrainConfig,
    ValidationConfig,
    check,
    make_plan,
    sample,
)
from shoal.recipes.memory import memory_of
from shoal.train.run import Sizes

COCO = 117_266  # images of train2017 with objects
SECTIONS = {
    "model": MaskRCNNConfig,
    "data": ImageDataConfig,
    "augment": DetectionAugmentConfig,
    "train": TrainConfig,
    "optim": OptimConfig,
    "validation": ValidationConfig,
    "run": DetectionRunConfig,
}


def preset(name: str) -> MaskRCNNTrainConfig:
    file = resources.files("shoal.recipes") / "presets" / "mask_rcnn" / f"{name}.toml"
    tree: dict[str, dict[str, Any]] = tomllib.loads(file.read_text())
    sections = {}
    for section, values in tree.items():
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
        sections[section] = SECTIONS[section](**values)
    return MaskRCNNTrainConfig(**sections)


def plan(config: MaskRCNNTrainConfig, num_workers: int = 1) -> RunPlan:
    return make_plan(config, num_examples=COCO, num_workers=num_workers)


def rate_at(found: RunPlan, step: int) -> float:
    """Return the learning rate of ``step``, counted from 1."""
    return learning_rate(found.schedule, step - 1)


def test_presets_are_all_there() -> None:
    files = (resources.files("shoal.recipes") / "presets" / "mask_rcnn").iterdir()
    assert {file.name for file in files} == {f"{name}.toml" for name in PRESETS}


def test_detectron2s_schedule() -> None:
    config = preset("coco-1x")
    found = plan(config, num_workers=8)
    rates = [rate_at(found, step) for step in (1, 501, 1_001, 60_000, 60_001, 80_000, 80_001, 90_000)]
    assert rates == pytest.approx([2e-5, 0.01001, 0.02, 0.02, 2e-3, 2e-3, 2e-4, 2e-4])
    assert (found.batch.micro_batch_size, found.batch.accumulation_steps) == (2, 1)
    assert config.optim.options() == {"momentum": 0.9, "nesterov": False}
    assert config.optim.weight_decay == 1e-4 and max(config.augment.shorter) == 800
    assert "90,000 = 12.28 epochs of 117,266 images" in "\n".join(found.lines)


def test_the_record_of_2019() -> None:
    """24 hosts of 8, 192 images a step: rate 0.24 after 1,250 steps, 16 epochs."""
    config = preset("coco-sgd-192")
    found = plan(config, num_workers=24 * 8)
    assert (found.batch.micro_batch_size, found.batch.accumulation_steps) == (1, 1)
    assert config.train.total_steps * 192 / COCO == pytest.approx(16, abs=1e-3)
    rates = [rate_at(found, step) for step in (1, 1_251, 6_000, 6_001, 8_001, 9_772)]
    assert rates == pytest.approx([0.24 * 0.24 / 1_250, 0.24, 0.24, 0.024, 0.0024, 0.0024])
    assert config.optim.options() == {"momentum": 0.9, "nesterov": False}
    assert config.run.validation_frequency == round(COCO / 192)
    for batch, first, last in ((96, 12_000, 16_000), (128, 9_000, 12_000)):  # MLPerf's sets
        assert tuple(step * 192 for step in config.optim.milestones) == (first * batch, last * batch)


@pytest.mark.parametrize(
    ("batch", "rate", "decay", "beta2", "warmup", "steps"),
    [
        (32, 0.008, 5e-4, 0.35, 100, 50_000),
        (64, 0.008, 5e-4, 0.40, None, 25_000),
        (256, 0.06, 1e-3, 0.25, 1_000, 7_500),
        (512, 0.05, 1.25e-3, 0.25, 500, 3_700),
    ],
)
def test_novograd_by_batch(
    batch: int, rate: float, decay: float, beta2: float, warmup: int | None, steps: int
) -> None:
    """The sets of the record runs; all with GIoU, smoothed labels, biases twice as fast, a cosine."""
    config = preset(f"coco-novograd-{batch}")
    found = plan(config, num_workers=8)
    assert found.batch.global_batch_size == batch and config.train.total_steps == steps
    assert warmup in (None, config.optim.warmup_steps)
    assert rate_at(found, config.optim.warmup_steps + 1) == rate
    half = (config.optim.warmup_steps + steps) // 2
    assert rate_at(found, half + 1) == pytest.approx(rate * (1 + 0.001) / 2, rel=1e-3)
    assert rate_at(found, steps + 1) == pytest.approx(0.001 * rate)
    assert config.optim.options() == {
        "beta1": 0.9,
        "beta2": beta2,
        "eps": 1e-7,
        "bias_correction": True,
        "reg_inside_moment": True,
        "grad_averaging": False,
        "init_zero": False,
    }
    assert (config.optim.weight_decay, config.optim.bias_rate) == (decay, 2.0)
    assert (config.model.box_loss, config.model.label_smoothing) == ("giou", 0.1)


def test_what_stays_follows_from_trained_weights() -> None:
    random, trained = MaskRCNNConfig(), MaskRCNNConfig(weights=Path("w.safetensors"))
    assert (random.stages_frozen, random.norms_frozen) == (0, False)
    assert (trained.stages_frozen, trained.norms_frozen) == (2, True)
    asked = MaskRCNNConfig(weights=Path("w.safetensors"), frozen_stages=0, frozen_norms=False)
    assert (asked.stages_frozen, asked.norms_frozen) == (0, False)


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        ("model", {"frozen_stages": 6}, r"model\.frozen_stages 6"),
        ("model", {"label_smoothing": 1.0}, r"model\.label_smoothing 1\.0"),
        ("data", {"made_images": -1}, r"data\.made_images -1"),
        ("train", {"micro_batch_size": 0}, r"train\.micro_batch_size 0"),
        ("optim", {"end_factor": 2.0}, r"optim\.end_factor 2\.0 must be from 0 to 1"),
        ("optim", {"beta2": 0.3}, r"optim\.beta2 0\.3 is not an option of sgd.*novograd"),
        ("run", {"validation_frequency": -1}, r"run\.validation_frequency -1"),
        ("augment", {"flip": 1.5}, r"flip=1\.5"),
    ],
)
def test_refusals(section: str, changes: dict[str, Any], message: str) -> None:
    config = MaskRCNNTrainConfig()
    with pytest.raises(UsageError, match=message):
        replace(config, **{section: replace(getattr(config, section), **changes)})


@pytest.mark.parametrize(
    ("changes", "num_workers", "message"),
    [
        ({"train": {"total_steps": 70_000}}, 1, r"milestones \(60000, 80000\) must lie within .* 70000"),
        ({"optim": {"warmup_steps": 90_001}}, 1, r"warmup_steps 90001 must lie between 0 and"),
        ({"train": {"micro_batch_size": 3}}, 1, r"micro_batch_size 3 does not divide .* are 2 and 4"),
        ({}, 16, r"micro_batch_size 2 does not divide a worker's share of 1"),
    ],
)
def test_refusals_of_the_plan(changes: dict[str, dict[str, Any]], num_workers: int, message: str) -> None:
    config = MaskRCNNTrainConfig()
    for section, values in changes.items():
        config = replace(config, **{section: replace(getattr(config, section), **values)})
    with pytest.raises(UsageError, match=message):
        plan(config, num_workers)


def test_images_and_weights_must_be_named_and_there(tmp_path: Path) -> None:
    config = MaskRCNNTrainConfig(run=DetectionRunConfig(name="r", dir=tmp_path / "run"))
    with pytest.raises(UsageError, match=r"data\.path is not set.*shoal prepare coco"):
        check(config, 1, None)
    config = replace(config, data=ImageDataConfig(made_images=10))
    assert check(config, 1, None) == []
    config = replace(config, model=MaskRCNNConfig(weights=tmp_path / "none.safetensors"))
    with pytest.raises(UsageError, match=r"none\.safetensors does not exist"):
        check(config, 1, None)


def test_images_to_validate_on_must_be_there(tmp_path: Path) -> None:
    make_coco(tmp_path / "scenes", num_train=1, num_validation=1, size=32)
    manifest = tmp_path / "scenes" / "manifest.json"
    tree = json.loads(manifest.read_text())
    del tree["splits"]["validation"]
    manifest.write_text(json.dumps(tree))
    config = MaskRCNNTrainConfig(data=ImageDataConfig(path=str(tmp_path / "scenes")))
    with pytest.raises(UsageError, match=r"no images to validate on.*shoal prepare coco --help"):
        check(config, 1, None)


def test_the_size_of_the_published_network() -> None:
    """torchvision's maskrcnn_resnet50_fpn has 44,401,393 weights; the stem and the first stage stay."""
    config = preset("coco-1x")
    assert config.augment.largest_batch == (800, 1_344)
    counted, two = sample(config), plan_batch(Sizes(global_batch_size=2), 1)
    parameters, memory = counted.num_trainable, memory_of(counted, config, two)
    assert parameters == 44_401_393 + 53_120  # torchvision's norms are frozen, these learn
    from_trained = replace(config, model=replace(config.model, weights=Path("w.safetensors")))
    counted = sample(from_trained)
    frozen, less = counted.num_trainable, memory_of(counted, from_trained, two)
    assert frozen < 44_401_393 and less.activations_bytes < memory.activations_bytes
    assert memory.optimizer_bytes == 4 * parameters


def test_a_dry_run_of_512_workers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenes = tmp_path / "scenes"
    make_coco(scenes, num_train=3, num_validation=2, size=32)
    options = [
        "--data.path",
        str(scenes),
        "--run.dir",
        str(tmp_path / "run"),
        "--workers",
        "512",
        "--dry-run",
    ]
    options += ["--model.anchor-sizes", "16", "32", "64", "128", "256", "--augment.shorter", "64", "96"]
    options += ["--augment.longer", "128"]
    command = ["train", "mask_rcnn", "--preset", "coco-novograd-512", *options]
    assert app(command, result_action="return_value") == 0
    said = capsys.readouterr().out
    assert "1 image × 1 accumulation step × 512 workers = 512 images a step" in said
    assert "5e-05 to 0.05 in 500 steps, then to 5e-05 along a cosine" in said
    assert "held out     2 images of 5 categories" in said
    resolved = tomllib.loads(said.partition("\nbatch ")[0])
    assert resolved["optim"]["beta2"] == 0.25 and resolved["augment"]["shorter"] == [64, 96]
    assert resolved["model"]["anchor_sizes"] == [16, 32, 64, 128, 256]
    assert not (tmp_path / "run").exists()
