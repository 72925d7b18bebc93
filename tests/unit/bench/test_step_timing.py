"""``shoal bench train``: arithmetic of a result, settings of a run, and the command on tiny models."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from shoal.bench.step_timing import KIND, TrainBench, TrainResult
from shoal.errors import UsageError

MADE = TrainResult(
    recipe="albert-base",
    sequence_length=512,
    num_parameters=12_000_000,
    device="device",
    num_devices=4,
    precision="bf16",
    global_batch=256,
    micro_batch=32,
    samples_s=(0.5, 0.25, 4.0),
    parts_s={"forward": 0.5, "backward": 1.0, "other": 0.0},
    peak_memory_bytes=1 << 30,
    flops_per_sample=1e12,
    matmul_flops_per_s=256e12,
)


def test_rates_are_of_the_median_step_and_one_device() -> None:
    assert MADE.step_s == 0.5
    assert MADE.samples_per_s == 512
    assert MADE.flops_per_s == 128e12
    assert MADE.utilisation == 0.5


def test_lines_and_file_say_the_same(tmp_path: Path) -> None:
    text = "\n".join(MADE.lines())
    for part in ("32 sequences × 2 × 4 devices = 256", "2 steps/s", "512 sequences/s", "1 GiB", "50.0 %"):
        assert part in text, part
    assert "forward 33 %, backward 67 %" in text and "other" not in text
    MADE.write(tmp_path / "run.json")
    read = json.loads((tmp_path / "run.json").read_text())
    assert read["kind"] == KIND and read["samples_per_s"] == 512 and read["samples_s"] == [0.5, 0.25, 4.0]


@pytest.mark.parametrize(("field", "value"), [("batch", 0), ("accumulate", 0), ("steps", 0), ("warm_up", -1)])
def test_senseless_numbers_are_refused(field: str, value: int) -> None:
    with pytest.raises(UsageError, match=f"--{field.replace('_', '-')} {value} must be at least"):
        replace(TrainBench(), **{field: value})  # type: ignore[arg-type]


def test_phases_and_batches(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from shoal.cli.bench_train_work import prepared
    from shoal.recipes.bert import BertConfig
    from shoal.recipes.t5 import T5Config

    bert = prepared(BertConfig(), tmp_path, TrainBench(batch=3, accumulate=2), num_workers=4)
    assert isinstance(bert, BertConfig)
    assert (bert.phase1.micro_batch_size, bert.phase1.global_batch_size) == (3, 24)
    assert bert.data.short_seq_prob == 0.0, "every sequence must be whole for the throughput to compare"
    t5 = prepared(T5Config(), tmp_path, TrainBench(), num_workers=2)
    assert isinstance(t5, T5Config)
    assert (t5.train.micro_batch_size, t5.train.global_batch_size) == (64, 128)


def _bench(folder: Path, *options: str) -> dict[str, object]:
    path = folder / "run.json"
    command = [sys.executable, "-m", "shoal", "bench", "train", *options, "--json", str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "utilisation" in done.stdout
    read: dict[str, object] = json.loads(path.read_text())
    return read


def test_albert_tiny_is_measured(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    options = ("--preset", "tiny", "--batch", "2", "--accumulate", "2", "--steps", "3", "--warm-up", "1")
    read = _bench(tmp_path, "albert", *options)
    assert (read["recipe"], read["sequence_length"], read["num_devices"]) == ("albert-tiny", 32, 1)
    assert (read["global_batch"], read["micro_batch"]) == (4, 2)
    samples, parts = read["samples_s"], read["parts_s"]
    assert isinstance(samples, list) and isinstance(parts, dict) and len(samples) == 3
    assert sum(parts.values()) == pytest.approx(sum(samples) / 3, rel=0.01), "parts sum up to the mean step"
    assert parts["forward"] > 0 and parts["backward"] > 0 and parts["optimizer"] > 0
    # Forward products of 2 layers over 32 whole tokens: 8 h² and 4 h f a token and attention's 4 S h; the
    # heads on 5 tokens beside. The backward pass twice that. A sequence that is not whole would have fewer.
    hidden, feed_forward, length = 128, 512, 32
    most = 2 * length * (8 * hidden**2 + 4 * hidden * feed_forward + 4 * length * hidden)
    heads = length * 2 * hidden * hidden + 5 * (2 * hidden * hidden + 2 * hidden * 2048) + 4 * hidden**2
    flops = read["flops_per_sample"]
    assert isinstance(flops, float) and 0.7 * 3 * most < flops <= 3 * (most + heads)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["bert", "t5"])
def test_other_recipes_are_measured(tmp_path: Path, recipe: str) -> None:
    pytest.importorskip("transformers")
    read = _bench(tmp_path, recipe, "--preset", "tiny", "--batch", "2", "--steps", "2")
    assert read["recipe"] == f"{recipe}-tiny" and read["global_batch"] == 2


@pytest.mark.slow
def test_detection_is_measured_on_scenes_of_one_size(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    sizes = ("--augment.shorter", "96", "--augment.longer", "128", "--train.precision", "fp32")
    read = _bench(tmp_path, "mask_rcnn", "--preset", "tiny", "--batch", "1", "--steps", "2", *sizes)
    assert (read["recipe"], read["unit"], read["global_batch"]) == ("mask-rcnn", "images", 1)
    assert len(read["samples_s"]) == 2  # type: ignore[arg-type]
    # ResNet-18: 1.8 G multiply-adds for 224² pixels, thrice that with the backward pass; the heads beside.
    assert read["flops_per_sample"] > 3 * 2 * 1.8e9 * 96 * 128 / 224**2  # type: ignore[operator]


def test_images_are_made_for_the_steps_that_are_timed(tmp_path: Path) -> None:
    from shoal.cli.bench_train_work import prepared_images
    from shoal.recipes.resnet50 import ResNetTrainConfig, make_plan

    config = prepared_images(
        ResNetTrainConfig(), tmp_path, TrainBench(batch=24, accumulate=2, steps=3, warm_up=1), num_workers=2
    )
    plan = make_plan(config, num_examples=config.data.made_images, num_workers=2)
    assert (plan.batch.global_batch_size, plan.batch.micro_batch_size) == (96, 24)
    assert plan.schedule.total_steps == 1 + 3
    assert (config.data.made_size, config.model.num_classes) == (256, 1000)
