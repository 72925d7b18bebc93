"""Checks the command of a job before it is submitted: its program, a recipe's settings, its paths."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from shoal.cli.fill_memory import without
from shoal.cli.train import settings_of
from shoal.decide.batch import plan_batch
from shoal.env.variables import child_environment
from shoal.errors import UsageError
from shoal.launch.job_command import JobCommand, check_launcher
from shoal.recipes import RECIPES, recipe_of_command

_CHECKED = ("train", "finetune")
_LOCAL = ("data.cache",)
"""Settings that name a folder of each host by itself."""
_WRITTEN = "run.dir"
_RAM = ("tmpfs", "ramfs")

PathRule = Callable[[str, Path], None]
"""Refuses the path of a setting, such as ``run.dir``, that the hosts do not share or the job would lose."""


def own_words(command: JobCommand) -> list[str]:
    """Return the words of shoal's command line that the workers run; empty for another program."""
    if command.is_shoal:
        return list(command.arguments)
    recipe = command.module.removeprefix("shoal.recipes.")
    if command.module.startswith("shoal.recipes.") and recipe in RECIPES:
        return [RECIPES[recipe].group, RECIPES[recipe].command or recipe, *command.arguments]
    return []


def check_command(
    command: JobCommand, *, num_workers: int | None, reads_data: bool, allow: PathRule | None = None
) -> list[str]:
    """Check the command of a job's workers, if it runs shoal.

    Args:
        command: of a worker.
        num_workers: of the job; ``None``: one per GPU of hosts that are not known.
        reads_data: the files of the command are here, so that it is run as a dry run.
        allow: rule of the paths in a recipe's settings.

    Returns:
        Lines that describe the run; none without its data.

    Raises:
        UsageError: the command could not run as a job.
    """
    try:
        check_launcher(command, num_workers=num_workers)
        words = own_words(command)
        if not words:
            return []
        if words[0] not in _CHECKED:
            _run([words[0], "--help"])
            return []
        if "--workers" in words or any(word.startswith("--workers=") for word in words):
            raise UsageError("leave --workers out of the command: --workers-per-host N goes before the --")
        _check_settings(words, num_workers, allow)
        if not reads_data or num_workers is None:
            return []
        alone = without(words, "--run.validation-hosts")  # on this host, as the workers that train
        output = _run([*alone, "--workers", str(num_workers), "--run.validation-hosts", "0", "--dry-run"])
        return [f"# {line}" for line in output.rpartition("\n\n")[2].splitlines()]  # after the settings
    except UsageError as error:
        raise UsageError(f"{error} (--no-check submits it anyway)") from None


def _run(words: Sequence[str]) -> str:
    """Run shoal with these words and return its output.

    Raises:
        UsageError: it fails.
    """
    done = subprocess.run(
        [sys.executable, "-m", "shoal", *words],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        env=child_environment(PYTHONIOENCODING="utf-8"),
    )
    if done.returncode != 0:
        raise UsageError(done.stderr.strip().removeprefix("shoal: "))
    return done.stdout.strip()


def _check_settings(words: Sequence[str], num_workers: int | None, allow: PathRule | None) -> None:
    """Check the options of a recipe, its batches and its paths; nothing is read."""
    if {"--help", "-h", "--help-all"} & set(words):
        raise UsageError("--help starts no training; leave it out of the command")
    _, config = settings_of(words)
    if num_workers is not None:
        _check_batches(config, num_workers)
    if allow is not None:
        for setting, path in paths_of(config):
            allow(setting, path)


def _check_batches(config: Any, num_workers: int) -> None:
    """Check that each batch of a recipe divides over the workers, in its layout."""
    parallel = getattr(config, "parallel", None)
    if getattr(parallel, "is_searched", False):
        return
    plan = plan_batch if parallel is None else parallel.plan
    for section in fields(config):
        sizes = getattr(config, section.name)
        is_used = getattr(sizes, "at", True)  # scores by finetuning, at these steps
        if is_used and hasattr(sizes, "global_batch_size") and hasattr(sizes, "micro_batch_size"):
            known = replace(sizes, micro_batch_size=None) if sizes.micro_batch_size == "auto" else sizes
            plan(known, num_workers, section=section.name)


def paths_of(config: Any) -> Iterator[tuple[str, Path]]:
    """Yield the paths in a recipe's settings, each with its name; ``run.dir`` always, by its default too."""
    for section in fields(config):
        settings = getattr(config, section.name)
        if not is_dataclass(settings):
            continue
        for field in fields(settings):
            value, name = getattr(settings, field.name), f"{section.name}.{field.name}"
            if name == _WRITTEN:
                yield name, value or Path("runs")
            elif name not in _LOCAL:
                yield from ((name, path) for path in _as_tuple(value) if isinstance(path, Path))


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


# ---- what the hosts share ----------------------------------------------------------------------------------


def _option(setting: str) -> str:
    return f"--{setting.replace('_', '-')}"


def inside_mount(mount: str, claim: str) -> PathRule:
    """Return the rule of pods: every path is below the folder in which they mount their claim."""

    def allow(setting: str, path: Path) -> None:
        location = os.path.normpath(Path(mount) / path)
        if Path(location).is_relative_to(mount):
            return
        fate = "would be lost with the pods" if setting == _WRITTEN else "is not in the pods"
        raise UsageError(
            f"{_option(setting)} {path} {fate}, which mount the claim {claim} at {mount}: name a path in "
            "it, or another --mount"
        )

    return allow


def inside_channels(channels: Sequence[str], *, written: Sequence[str], source: Path | None) -> PathRule:
    """Return the rule of SageMaker's containers.

    Args:
        channels: folders of data that exist there.
        written: those that outlive the job.
        source: folder here that becomes the one in which the command runs.
    """

    def allow(setting: str, path: Path) -> None:
        location = os.path.normpath(path)
        if any(Path(location).is_relative_to(folder) for folder in written):
            return
        if setting == _WRITTEN:
            kept = f"name a path in {' or '.join(written)}" if written else "add --fsx or --checkpoints"
            raise UsageError(f"{_option(setting)} {path} would be lost with the instances: {kept}")
        if any(Path(location).is_relative_to(folder) for folder in channels):
            return
        if source is not None and not path.is_absolute() and (source / path).exists():
            return
        known = ", ".join((*channels, *written)) or "none"
        raise UsageError(
            f"{_option(setting)} {path} is not in the containers, whose folders are: {known}. Copy it there "
            "by --channel NAME=s3://…, or bring it by --fsx"
        )

    return allow


def shared_by_nodes(num_hosts: int) -> PathRule | None:
    """Return the rule of a cluster's nodes: a run's directory is not in a node's own memory."""

    def allow(setting: str, path: Path) -> None:
        if setting == _WRITTEN and (kind := _file_system(path.absolute())) in _RAM:
            raise UsageError(
                f"{_option(setting)} {path} is in the memory of this machine ({kind}), which no other node "
                "sees: name a folder on a file system that all nodes share"
            )

    return allow if num_hosts > 1 else None


def _file_system(path: Path) -> str:
    """Return the type of the file system of a path; empty if it cannot be known."""
    try:
        lines = Path("/proc/self/mounts").read_text("utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    mounts = [line.split()[1:3] for line in lines if len(line.split()) > 2]
    mounted = [mount for mount in mounts if path.is_relative_to(mount[0])]
    return max(mounted, key=lambda mount: len(mount[0]))[1] if mounted else ""


def recipe_of(words: Sequence[str]) -> str | None:
    """Return the recipe that ``shoal WORDS`` runs, if it runs one."""
    return recipe_of_command(*words[:2]) if len(words) > 1 else None
