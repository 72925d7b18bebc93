"""Scores a network on prepared images, with any number of workers: ``shoal evaluate imagenet``."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from shoal.data.atomic_io import write_atomically
from shoal.data.images.shards import ImageShards
from shoal.env import WorkerEnv
from shoal.errors import EXIT_OK, UsageError
from shoal.recipes.start import Launch, start

if TYPE_CHECKING:
    from shoal.recipes.resnet.export import Exported


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """What to score on what."""

    source: Path
    """An exported network, a run, or a checkpoint of one."""
    data: str
    split: str
    batch_size: int
    mirror: bool | None
    """Whether the mirror images count, too; None: as in training."""
    precision: Literal["auto", "fp32", "bf16", "fp16"]
    out: Path | None
    """File for the figures as well."""

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UsageError(f"--batch-size {self.batch_size} must be at least 1")


def run(what: Scoring, how: Launch, *, command: list[str]) -> int:
    """Join the workers if this process is one, else start them; return the exit code.

    Raises:
        UsageError: the images or the network are not there, or do not go together.
        ShoalError: a worker failed.
    """

    def describe(num_workers: int) -> list[str]:
        shards = ImageShards(what.data, what.split)
        return [f"{len(shards):,} images of {what.data} over {num_workers} workers"]

    with tempfile.TemporaryDirectory(prefix="shoal-evaluate-") as folder:
        return start(
            how,
            command=command,
            run_dir=Path(folder),
            describe=describe,
            work=lambda place: score(what, place),
        )


def score(what: Scoring, joined: WorkerEnv) -> int:
    """Score with all workers; the main one prints the counts and writes the file."""
    import torch

    from shoal.data.images.reader import ImageReader, default_decode_threads
    from shoal.data.images.transform import CentreTransform
    from shoal.recipes.resnet.evaluation import LOSS, TOP1, TOP5, evaluate
    from shoal.train.config import DistributedConfig
    from shoal.train.gradients import choose_precision
    from shoal.train.world import join_world

    with join_world(joined, DistributedConfig()) as world:
        network, step = _read(what.source)
        shards = ImageShards(what.data, what.split)
        check_classes(what, network.classes, shards.manifest.classes)
        centre = CentreTransform(network.size, network.resize, mean=network.mean, std=network.std)
        threads = default_decode_threads(world.place.num_local_workers)
        found = evaluate(
            network.model.to(world.device).to(memory_format=torch.channels_last),
            ImageReader(shards, centre, seed=0, threads=threads, channels_last=True),
            world,
            choose_precision(what.precision, world.device),
            batch_size=what.batch_size,
            mirror=network.mirror if what.mirror is None else what.mirror,
            step=step,
        )
        if world.is_main:
            right = [round(found.metrics[name] * found.num_samples) for name in (TOP1, TOP5)]
            print(
                f"top-1 {100 * found.metrics[TOP1]:.3f} % ({right[0]:,} of {found.num_samples:,} images), "
                f"top-5 {100 * found.metrics[TOP5]:.3f} % ({right[1]:,}), loss {found.metrics[LOSS]:.4f}"
            )
            if what.out is not None:
                tree = {"num_images": found.num_samples, "top1": right[0], "top5": right[1]}
                write_atomically(what.out, (json.dumps({**tree, **found.metrics}, indent=1) + "\n").encode())
        return EXIT_OK


def _read(source: Path) -> tuple[Exported, int]:
    """Return the network of an export (a run's own where it has one), else of a checkpoint, and its step."""
    from shoal.recipes.images.export import CONFIG, EXPORT
    from shoal.recipes.resnet.export import read_checkpoint, read_export

    for directory in (source / EXPORT, source):
        if (directory / CONFIG).is_file():
            return read_export(directory), 0
    return read_checkpoint(source)


def check_classes(what: Scoring, ours: tuple[str, ...], theirs: tuple[str, ...]) -> None:
    """Check that labels mean the same in the network and in the images.

    Raises:
        UsageError: they do not.
    """
    for label, (our, their) in enumerate(zip_longest(ours, theirs)):
        if our != their:
            raise UsageError(
                f"label {label} is {our!r} in the network {what.source} and {their!r} in the images "
                f"{what.data}: evaluate on images that were prepared with the classes of its training"
            )
