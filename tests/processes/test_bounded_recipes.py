"""Trains the other recipes with steps that do not wait for all workers: replay of the log, resume."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import image_jobs
import job_workers
import mask_rcnn_jobs
import pretrain_jobs as jobs
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import GPT2Config

from forked import fork_process, free_port
from shoal.data.images.mixing import mix, mixup_weight
from shoal.data.images.shards import ImageShards
from shoal.data.loader import Batch
from shoal.data.sources import ReaderSource
from shoal.data.steps import DataShard
from shoal.errors import EXIT_OK
from shoal.models.detection.mask_rcnn import MaskRCNN
from shoal.models.t5 import MODEL_INPUTS
from shoal.optim.lr_schedules import learning_rate, set_learning_rate
from shoal.optim.sgd import SGD
from shoal.recipes import images, mask_rcnn, resnet50, t5
from shoal.recipes.mask_rcnn import MaskRCNNTrainConfig
from shoal.recipes.mask_rcnn import make_plan as plan_of_scenes
from shoal.recipes.resnet50 import ResNetTrainConfig, build_model, make_plan, open_training
from shoal.recipes.t5 import T5Config
from shoal.record import Contributions, Evaluation, Step, read_record
from shoal.train.model_setup import choose_precision
from shoal.train.optimizers import build_optimizer
from shoal.train.run import Run
from shoal.train.servers import waiting
from shoal.train.servers.log import replay, summary

WORKERS = 3
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_jobs.prepare_small(tmp_path_factory.mktemp("shapes"))


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mask_rcnn_jobs.prepare_small(tmp_path_factory.mktemp("scenes"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.prepare_small(tmp_path_factory.mktemp("text"))


def settings(
    shapes: Path, run_dir: Path, servers: dict[str, Any], average_decay: float, **run: Any
) -> ResNetTrainConfig:
    """Return settings for 13 steps of 12 images, whose epochs end with steps 4, 8 and 13."""
    return image_jobs.small_config(
        shapes, run_dir, distributed={"backend": "shoal"}, servers=servers, run=run,
        train={"global_batch_size": 12, "average_decay": average_decay},
    )  # fmt: skip


def _work(config: jobs.AnyConfig, rank: int, num_workers: int, port: int) -> None:
    os.environ["SHOAL_HOST_ID"] = f"host-{rank}"
    job_workers.work(config, rank, num_workers, port)


def start(config: jobs.AnyConfig) -> list[Any]:
    port = free_port()
    return [fork_process(_work, config, rank, WORKERS, port) for rank in range(WORKERS)]


def run_killed(config: jobs.AnyConfig, run_dir: Path, step: int) -> None:
    """Kill the workers after the checkpoint of ``step``, and continue."""
    workers = start(config)
    jobs.wait_for_checkpoint(run_dir, step, workers)
    jobs.kill(workers)
    assert jobs.wait(start(config)) == [EXIT_OK] * WORKERS


def gradients_of(
    source: ReaderSource, global_batch: int, loss_of: Callable[[Batch, int], torch.Tensor]
) -> Callable[[int, int], None]:
    """Return what computes the gradient of a rank's part of a batch, given the loss of a micro-batch."""
    part = global_batch // WORKERS

    def backward(rank: int, number: int) -> None:
        shard = DataShard(
            global_batch_size=global_batch, micro_batch_size=part, rank=rank, num_workers=WORKERS
        )
        with closing(source.open(shard, range(number - 1, number))) as steps:
            for batch in chain.from_iterable(steps):
                (loss_of(batch, number) / global_batch * float(WORKERS)).backward()

    return backward


def replayed(config: ResNetTrainConfig) -> nn.Module:
    """Take the steps of a recipe's log again, in this process."""
    assert config.data.path is not None and config.run.dir is not None
    train, seed = ImageShards(Path(config.data.path), "train"), config.train.seed
    world = SimpleNamespace(device=CPU, num_workers=1)
    run: Any = SimpleNamespace(
        world=world, seed=seed, precision=choose_precision("fp32", CPU), to_device=lambda each: each
    )
    source, images_of = open_training(config, run, train)
    model = build_model(config, run, image_jobs.NUM_CLASSES, source.reader, images_of)

    def loss_of(batch: Batch, number: int) -> torch.Tensor:
        weight = mixup_weight(config.train.mixup, seed, number)
        logits = model(mix(images.like_weights(images_of(batch), model), weight)).float()
        targets = mix(F.one_hot(batch["labels"], image_jobs.NUM_CLASSES).float(), weight)
        smoothing = config.train.label_smoothing
        return F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)

    schedule = make_plan(config, num_examples=len(train), num_workers=WORKERS).schedule
    theirs = build_optimizer(model.named_parameters(), config.optim)  # torch's, whose last bits differ
    groups = [{key: group[key] for key in ("params", "weight_decay")} for group in theirs.param_groups]
    optimizer = SGD(groups, momentum=0.9, nesterov=True)
    taken = replay(
        config.run.dir / waiting.LOG, model, optimizer,
        gradients_of(source, config.train.global_batch_size, loss_of),
        max_norm=config.optim.max_grad_norm,
        schedule=lambda number: set_learning_rate(optimizer, learning_rate(schedule, number - 1)),
    )  # fmt: skip
    assert taken == schedule.total_steps
    return model


@pytest.mark.parametrize("option", ["wait_for", "staleness"])
def test_the_log_of_a_network_with_norms_is_replayed_to_the_bit(
    shapes: Path, tmp_path: Path, option: str
) -> None:
    """A late worker passes over ends of epochs, whose lines, scores and checkpoints all take part in."""
    config = settings(shapes, tmp_path, {"mode": "bounded", option: 2}, 0.0, log_frequency=5)
    run_killed(config, tmp_path, 4)
    model = replayed(config)  # compares weights and statistics where all workers met
    exported = resnet50.use.read_export(tmp_path / "model").model.state_dict()
    assert all(torch.equal(value, exported[name]) for name, value in model.state_dict().items())
    rows = read_record(tmp_path)
    assert [row.step for row in rows if isinstance(row, Step)] == [4, 5, 8, 10, 13]
    assert [row.step for row in rows if isinstance(row, Contributions)] == [4, 5, 8, 10, 13]
    assert [row.step for row in rows if isinstance(row, Evaluation)] == [4, 8, 13]
    assert summary(tmp_path / waiting.LOG).num_steps == 13


def test_local_steps_of_a_network_with_norms_and_averages_continue_exactly(
    shapes: Path, tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for run_dir in (whole, killed):
        config = settings(shapes, run_dir, {"mode": "local", "local_steps": 3}, 0.8)
        if run_dir == killed:
            run_killed(config, run_dir, 4)
        else:
            assert jobs.wait(start(config)) == [EXIT_OK] * WORKERS
    for name in ("model.safetensors", "config.json"):
        assert (whole / "model" / name).read_bytes() == (killed / "model" / name).read_bytes()
    assert jobs.losses(whole) == jobs.losses(killed)


def test_local_steps_of_a_language_model_continue_exactly(text: Path, tmp_path: Path) -> None:
    sizes = GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    sizes.save_pretrained(tmp_path / "model")
    local = {"mode": "local", "local_steps": 3, "fragments": 2}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for run_dir in (whole, killed):
        config = jobs.small_lm_config(
            text, tmp_path / "model" / "config.json", run_dir, model={"dropout": None}, servers=local,
            distributed={"backend": "shoal"}, run={"log_frequency": 3, "checkpoint_frequency": 3},
        )  # fmt: skip
        if run_dir == killed:
            run_killed(config, run_dir, 6)
        else:
            assert jobs.wait(start(config)) == [EXIT_OK] * WORKERS
    files = [run / "transformers" / "model.safetensors" for run in (whole, killed)]
    assert files[0].read_bytes() == files[1].read_bytes()
    losses = jobs.losses(whole)
    assert losses == jobs.losses(killed) and losses[12] < losses[3] - 0.2


def test_a_detector_whose_norms_learn_is_replayed_to_the_bit(scenes: Path, tmp_path: Path) -> None:
    config = mask_rcnn_jobs.small_config(
        scenes, tmp_path, distributed={"backend": "shoal"}, servers={"mode": "bounded", "wait_for": 2},
        train={"global_batch_size": 6, "total_steps": 3}, run={"log_frequency": 2},
    )  # fmt: skip
    assert jobs.wait(start(config)) == [EXIT_OK] * WORKERS
    model = replayed_detector(config)
    exported = mask_rcnn.use.read_export(tmp_path / "model").model.state_dict()
    assert all(torch.equal(value, exported[name]) for name, value in model.state_dict().items())


def replayed_detector(config: MaskRCNNTrainConfig) -> nn.Module:
    """Take the steps of a detector's log again, in this process."""
    assert config.run.dir is not None
    world: Any = SimpleNamespace(device=CPU, num_workers=1, is_main=True, control=None)
    source, held_out = mask_rcnn.open_data(config, world)
    torch.manual_seed(config.train.seed)
    model = MaskRCNN(config.model, len(held_out.categories)).to(memory_format=torch.channels_last)

    def loss_of(batch: Batch, number: int) -> torch.Tensor:
        targets = {name: batch[name] for name in mask_rcnn.TARGETS}
        keys = mask_rcnn.sampling_keys(config.train.seed, batch)
        inputs = images.like_weights(batch["images"], model)
        return mask_rcnn.mean_losses(model(inputs, targets, keys)).sum()

    plan = plan_of_scenes(config, num_examples=source.reader.num_examples, num_workers=WORKERS)
    optimizer = build_optimizer(model.named_parameters(), config.optim)
    replay(
        config.run.dir / waiting.LOG, model, optimizer,
        gradients_of(source, config.train.global_batch_size, loss_of),
        max_norm=config.optim.max_grad_norm,
        schedule=lambda number: set_learning_rate(optimizer, learning_rate(plan.schedule, number - 1)),
    )  # fmt: skip
    return model


# ---- T5, a pipeline of one stage ---------------------------------------------------------------------------


def small_t5(text: Path, run_dir: Path, batch: int, optimizer: str, **changes: Any) -> T5Config:
    return jobs.small_t5_config(
        text, run_dir, model={"dropout": 0.0}, optim={"optimizer": optimizer, "learning_rate": 0.01},
        train={"global_batch_size": batch}, **changes,
    )  # fmt: skip


def _replay_t5(config: T5Config, alone: T5Config, port: int) -> None:
    """Take the steps of a log again in one worker, whose stage has a batch of one of the others."""
    assert config.run.dir is not None and alone.run.dir is not None
    alone.run.dir.mkdir()
    with Run.open(config=alone, recipe="t5", worker=job_workers.joined(0, 1, port)) as run:
        train, _ = t5.open_text(config)
        _, stage = t5.open_model(alone, run, train, alone.parallel.plan(alone.train, 1))
        optimizer = build_optimizer(stage.module.named_parameters(), config.optim)

        def backward(rank: int, number: int) -> None:
            shard = DataShard(global_batch_size=12, micro_batch_size=4, rank=rank, num_workers=WORKERS)
            source = ReaderSource(reader=train, whole=True)
            for batch in chain.from_iterable(source.open(shard, range(number - 1, number))):
                stage.step(**{name: batch[name] for name in MODEL_INPUTS})

        replay(
            config.run.dir / waiting.LOG,
            stage.module,
            optimizer,
            backward,
            max_norm=config.optim.max_grad_norm,
            schedule=lambda step: set_learning_rate(
                optimizer, learning_rate(config.optim.schedule, step - 1)
            ),
        )  # compares the weights where all workers met
        stage.close()


@pytest.mark.parametrize("optimizer", ["adafactor", pytest.param("lamb", marks=pytest.mark.slow)])
def test_the_log_of_t5_is_replayed_to_the_bit(text: Path, tmp_path: Path, optimizer: str) -> None:
    config = small_t5(
        text, tmp_path / "run", 12, optimizer, distributed={"backend": "shoal"}, run={"log_frequency": 3},
        servers={"mode": "bounded", "wait_for": 2},
    )  # fmt: skip
    run_killed(config, tmp_path / "run", 3)
    again = fork_process(_replay_t5, config, small_t5(text, tmp_path / "again", 4, optimizer), free_port())
    assert jobs.wait([again]) == [EXIT_OK]
    assert summary(tmp_path / "run" / waiting.LOG).num_steps == config.train.total_steps


def test_local_steps_of_t5_with_adafactor_continue_exactly(text: Path, tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for run_dir in (whole, killed):
        config = jobs.small_t5_config(
            text, run_dir, model={"dropout": 0.0}, train={"global_batch_size": 12},
            distributed={"backend": "shoal"}, servers={"mode": "local", "local_steps": 2},
        )  # fmt: skip
        if run_dir == killed:
            run_killed(config, run_dir, 3)
        else:
            assert jobs.wait(start(config)) == [EXIT_OK] * WORKERS
    weights = [(each / "transformers" / "model.safetensors").read_bytes() for each in (whole, killed)]
    assert weights[0] == weights[1]
    assert jobs.losses(whole) == jobs.losses(killed)
