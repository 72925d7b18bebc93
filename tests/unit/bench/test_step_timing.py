"""``shoal bench train``: arithmetic of a result, settings of a run, and the command on tiny models."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shoal.bench.step_timing import KIND, TrainBench, TrainResult
from shoal.cli.app import main
from shoal.cli.bench_train import batch_of, command_for, synchronised, timed_settings, with_few_lines
from shoal.decide.footprint import Footprint
from shoal.errors import EXIT_OK, UsageError
from shoal.planner.hardware import Catalog
from shoal.recipes import script
from shoal.recipes.memory import memory_by_batch
from shoal.recipes.resnet50 import ResNetTrainConfig, make_plan
from shoal.recipes.workloads import flops_per_sample, preset_settings, with_new_model
from shoal.train.config import ParallelConfig
from shoal.train.reporting import StepTimer

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


def test_on_a_gpu_steps_are_timed_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ResNetTrainConfig()
    for cuda, device, warm_up, steps, wanted in (
        (False, "auto", 4, 10, config.run.log_frequency),
        (True, "cpu", 4, 10, config.run.log_frequency),
        (True, "auto", 5, 15, 5),
        (True, "cuda", 2, 5, 1),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda found=cuda: found)
        there = replace(config, distributed=replace(config.distributed, device=device))
        timed = with_few_lines(there, TrainBench(warm_up=warm_up, steps=steps))
        assert timed.run.log_frequency == wanted


def test_the_parts_of_some_steps_are_separated_by_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those behind the second up to the fifth of the first optimizer; another one counts for nothing."""
    begun: list[int] = []
    waits: list[int] = []
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: SimpleNamespace(record=lambda: None))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(len(begun)))
    optimizers = [torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]) for _ in range(2)]
    timer = StepTimer(torch.device("cuda"))
    with synchronised(2, 5):
        for number in range(7):
            begun.append(number)
            timer.lap("forward")
            timer.lap("backward")
            for optimizer in optimizers:
                optimizer.step()
    assert waits == [3, 3, 4, 4, 5, 5]
    with pytest.raises(ValueError, match="ended"), synchronised(1, 5):
        optimizers[0].step()
        raise ValueError("ended")
    assert not StepTimer.synchronises


def test_rates_are_of_the_median_step_and_one_device() -> None:
    assert MADE.step_s == 0.5
    assert MADE.samples_per_s == 512
    assert MADE.flops_per_s == 128e12
    assert MADE.utilisation == 0.5
    assert MADE.mfu is None and replace(MADE, peak_flops_per_s=512e12).mfu == 0.25


def test_lines_and_file_say_the_same(tmp_path: Path) -> None:
    text = "\n".join(MADE.lines())
    for part in ("32 sequences × 2 × 4 devices = 256", "2 steps/s", "512 sequences/s", "1 GiB", "50.0 %"):
        assert part in text, part
    assert "MFU" not in text
    on_gpus = "\n".join(replace(MADE, peak_flops_per_s=512e12, num_stages=2, global_batch=128).lines())
    assert "MFU           12.5 %, of the data sheet's 512 TFLOP/s" in on_gpus
    assert "32 sequences × 2 × 2 × a pipeline of 2 = 128" in on_gpus
    assert "forward 33 %, backward 67 %" in text and "other" not in text
    assert "with waits" not in text and "allocator" not in text and "by count" not in text
    counted = "\n".join(replace(MADE, counted_memory_bytes=3 << 20).lines())
    assert "by count      3 MiB: weights, gradients, optimizer, activations" in counted
    apart = replace(MADE, parts_apart_s={"forward": 1.0, "optimizer": 3.0}, alloc_retries=2)
    text = "\n".join(apart.lines())
    assert "with waits    forward 25 %, optimizer 75 %" in text and "freed its cache 2 times" in text
    MADE.write(tmp_path / "run.json")
    read = json.loads((tmp_path / "run.json").read_text())
    assert read["kind"] == KIND and read["samples_per_s"] == 512 and read["samples_s"] == [0.5, 0.25, 4.0]


def test_a_dry_run_says_the_batch_and_the_memory_as_a_training_does(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    config, machines = preset_settings("albert", "tiny"), Catalog().machines("2xp4d.24xlarge")
    count = memory_by_batch(script("albert").sample(config), config, machines)

    def said(*words: str) -> str:
        command = ("bench", "train", "albert", "--preset", "tiny", "--dry-run", "--cluster", f"{machines}")
        monkeypatch.setattr(sys, "argv", ["shoal", *command, *words])
        with pytest.raises(SystemExit) as ended:
            main()
        assert ended.value.code == EXIT_OK
        return capsys.readouterr().out

    def memory_of(size: int) -> Footprint:
        return count(batch_of(config, TrainBench(), num_workers=16, size=size))

    timed = said("--batch", "8", "--accumulate", "2")
    assert "batch        8 sequences × 2 accumulation steps × 16 workers = 256 sequences a step" in timed
    assert f"memory       {memory_of(8)}\n" in timed
    found = re.search(r"by count, (\d+) sequences fit into 36 GiB: (.*)\n", said("--fill-memory"))
    assert found
    most, limit = int(found[1]), 0.9 * 40 * 2**30
    assert found[2] == str(memory_of(most)), "less than a 32nd below the largest"
    assert memory_of(most).total_bytes <= limit < memory_of(most + most // 32 + 1).total_bytes
    assert "by count, 5 sequences fit into 36 GiB" in said("--fill-memory", "--batch", "5")


@pytest.mark.parametrize(("field", "value"), [("batch", 0), ("accumulate", 0), ("steps", 0), ("warm_up", -1)])
def test_senseless_numbers_are_refused(field: str, value: int) -> None:
    with pytest.raises(UsageError, match=f"--{field.replace('_', '-')} {value} must be at least"):
        replace(TrainBench(), **{field: value})  # type: ignore[arg-type]


def test_phases_and_batches(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from shoal.recipes.bert import BertConfig
    from shoal.recipes.t5 import T5Config

    bert = timed_settings("bert", BertConfig(), tmp_path, TrainBench(batch=3, accumulate=2), num_workers=4)
    assert isinstance(bert, BertConfig)
    assert (bert.phase1.micro_batch_size, bert.phase1.global_batch_size) == (3, 24)
    assert bert.data.short_seq_prob == 0.0, "every sequence must be whole for the throughput to compare"
    t5 = timed_settings("t5", T5Config(), tmp_path, TrainBench(), num_workers=2)
    assert isinstance(t5, T5Config)
    assert (t5.train.micro_batch_size, t5.train.global_batch_size) == (64, 128)
    # two pipelines of two stages, with 4 micro-batches a stage
    piped = replace(T5Config(), parallel=ParallelConfig(pipeline=2))
    t5 = timed_settings("t5", piped, tmp_path, TrainBench(batch=3), num_workers=4)
    assert (t5.train.micro_batch_size, t5.train.global_batch_size) == (3, 3 * 8 * 2)
    t5 = timed_settings("t5", piped, tmp_path, TrainBench(batch=3, accumulate=2), num_workers=4)
    assert t5.train.global_batch_size == 3 * 2 * 2
    # text that is named is read as it is
    named = replace(BertConfig(), data=replace(BertConfig().data, path=tmp_path / "mine"))
    assert timed_settings("bert", named, tmp_path / "made", TrainBench(), num_workers=1).data == named.data


def test_options_of_other_recipes_are_refused(tmp_path: Path) -> None:
    from shoal.recipes.squad import SquadConfig

    named = SquadConfig(model=replace(SquadConfig().model, path=tmp_path))
    for recipe, options, message in (
        ("t5", {"phase": 2}, "--phase 2 is for a recipe with phases"),
        ("albert", {"size": "large"}, "--size large is for finetuning: here choose a --preset"),
        ("squad", {"size": "large", "settings": named}, "--size large is for a new model"),
    ):
        with pytest.raises(UsageError, match=message):
            command_for(recipe)(**options)


def test_one_phase_is_timed_without_the_other() -> None:
    from shoal.recipes.bert import BertConfig

    config = BertConfig()
    assert [section for section, _ in config.only_phase(1).phases] == ["phase1"]
    assert config.only_phase(2).phases == [("phase2", config.phase2)]


@pytest.mark.parametrize("name", ["squad-bert-tiny", "classify-albert-tiny", "t5_classify-t5-tiny"])
def test_synthetic_examples_fill_their_sequences(tmp_path: Path, name: str) -> None:
    pytest.importorskip("transformers")
    from shoal.recipes.classify import ClassifyConfig
    from shoal.recipes.squad import SquadConfig
    from shoal.recipes.t5_classify import T5ClassifyConfig

    recipe, model = name.split("-", 1)
    config: Any = {"squad": SquadConfig, "classify": ClassifyConfig, "t5_classify": T5ClassifyConfig}[
        recipe
    ]()
    config = replace(config, train=replace(config.train, precision="fp32"))
    if recipe == "squad":
        config = replace(config, window=replace(config.window, max_seq_length=64, doc_stride=16))
    else:
        config = replace(config, data=replace(config.data, max_seq_length=64))
    timed = timed_settings(recipe, config, tmp_path, TrainBench(batch=3), num_workers=2, model=model)
    sample = script(recipe).sample(timed)
    assert (sample.sequence_length, timed.train.global_batch_size) == (64, 6)
    assert sample.num_samples == 3
    batch = sample.inputs
    if recipe == "t5_classify":
        assert batch["input_ids"].shape == (3, 64) and bool(batch["attention_mask"].all())
    else:
        assert batch["cu_seqlens"].tolist() == [0, 64, 128, 192]
    source, _, size = model.partition("-")
    assert 1000 < int(batch["input_ids"].max()) < preset_settings(source, size).model.vocab_size
    assert flops_per_sample(sample) > 0
    # files that are named are read
    data = replace(config.data, path=tmp_path / "mine", eval=(tmp_path / "other",))
    named = timed_settings(
        recipe, replace(config, data=data), tmp_path, TrainBench(), num_workers=1, model=model
    )
    assert (named.data.path, named.data.eval) == (data.path, data.eval)
    if recipe == "t5_classify":  # 4 micro-batches a stage on one replica of two workers
        staged = replace(config, parallel=ParallelConfig(pipeline=2))
        piped = timed_settings(recipe, staged, tmp_path, TrainBench(batch=3), num_workers=2, model=model)
        assert piped.train.global_batch_size == 3 * 8


def test_sizes_of_new_models(tmp_path: Path) -> None:
    from shoal.recipes.squad import SquadConfig

    made = with_new_model(SquadConfig(), tmp_path, "bert-large").model
    assert made.from_scratch and json.loads((made.path / "config.json").read_text())["hidden_size"] == 1024
    with pytest.raises(
        UsageError, match="--size huge is no preset of albert: choose one of base, large, tiny"
    ):
        with_new_model(SquadConfig(), tmp_path, "albert-huge")


def _bench(folder: Path, *options: str) -> dict[str, object]:
    path = folder / "run.json"
    command = [sys.executable, "-m", "shoal", "bench", "train", *options, "--json", str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "utilisation" in done.stdout
    read: dict[str, object] = json.loads(path.read_text())
    return read


@pytest.mark.slow
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
@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        ("squad", ("--window.max-seq-length", "64", "--window.doc-stride", "16")),
        ("classify", ("--data.max-seq-length", "64")),
        ("t5_classify", ()),
    ],
)
def test_finetuning_is_measured(tmp_path: Path, recipe: str, options: tuple[str, ...]) -> None:
    pytest.importorskip("transformers")
    read = _bench(tmp_path, recipe, "--preset", "tiny", "--batch", "2", "--steps", "2", *options)
    model = "t5" if recipe == "t5_classify" else "bert"
    assert read["recipe"] == f"{recipe}-{model}-tiny" and read["sequence_length"] == 64


@pytest.mark.slow
def test_a_pipeline_is_measured(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pipeline = ("--workers", "2", "--parallel.pipeline", "2")
    read = _bench(tmp_path, "t5", "--preset", "tiny", "--batch", "2", "--steps", "2", *pipeline)
    assert (read["num_devices"], read["num_stages"]) == (2, 2)
    assert (read["micro_batch"], read["global_batch"]) == (2, 16)


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
    options = TrainBench(batch=24, accumulate=2, steps=3, warm_up=1)
    config = timed_settings("resnet50", ResNetTrainConfig(), tmp_path, options, num_workers=2)
    plan = make_plan(config, num_examples=config.data.made_images, num_workers=2)
    assert (plan.batch.global_batch_size, plan.batch.micro_batch_size) == (96, 24)
    assert plan.schedule.total_steps == 1 + 3
    assert (config.data.made_size, config.model.num_classes) == (256, 1000)


def test_flops_of_resnet_50_are_three_times_its_published_multiplications() -> None:
    pytest.importorskip("torchvision")
    flops = flops_per_sample(script("resnet50").sample(ResNetTrainConfig()))
    assert flops == pytest.approx(3 * 2 * 4.09e9, rel=0.005)
