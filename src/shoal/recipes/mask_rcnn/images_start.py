"""From settings to workers, whichever the recipe."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from shoal.env import WorkerEnv
from shoal.recipes.images import ImageTrainConfig
from shoal.recipes.start import Launch, named, start
from shoal.train.config import required

Config = TypeVar("Config", bound=ImageTrainConfig)


def run(
    config: Config,
    how: Launch,
    train: Callable[[Config, WorkerEnv, list[str]], int],
    describe: Callable[[Config, int, bool], list[str]],
    *,
    preset: str,
    command: list[str],
) -> int:
    """Join the workers if this process is one, else start them; return the exit code.

    Args:
        config: the settings.
        how: where the workers run.
        train: what a worker does.
        describe: checks the settings for a number of workers; returns the lines of a dry run, if it is one.
        preset: what the settings are called, for the name of the run.
        command: what a worker is started with.

    Raises:
        UsageError: settings that cannot work together or with the images.
        ShoalError: a worker failed.
    """
    resolved: Config = replace(config, run=named(config.run, f"{config.recipe}-{preset}"))
    return start(
        how,
        command=command,
        run_dir=required(resolved.run.dir),
        describe=lambda num_workers: describe(resolved, num_workers, how.dry_run),
        work=lambda place: train(resolved, place, command),
    )
