"""Fills in settings that the command line left open: from ``--config``, then from ``--preset``."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import cyclopts
from cyclopts import App

from shoal.env import launch_dir, worker_env
from shoal.recipes import RECIPES
from shoal.train.config import load_toml

Fill = Callable[[App, tuple[str, ...], cyclopts.ArgumentCollection], None]


def settings_from(recipe_of: Callable[[tuple[str, ...]], str]) -> Fill:
    """Return a function for cyclopts that fills in settings of the recipe ``recipe_of(command)``.

    Keys are checked like options, so that a misspelt one in a file fails with a suggestion too. A command
    whose recipe is unknown has no presets.
    """

    def fill_in(app: App, commands: tuple[str, ...], arguments: cyclopts.ArgumentCollection) -> None:
        def given() -> dict[str, str]:
            return {argument.name: argument.tokens[0].value for argument in arguments if argument.tokens}

        def apply(tree: dict[str, Any], source: str) -> None:
            for command in reversed(commands):
                tree = {command: tree}
            cyclopts.config.Dict(tree, source=source)(app, commands, arguments)

        if path := given().get("--config"):
            apply(load_toml(Path(path)), path)
        if recipe := RECIPES.get(name := recipe_of(commands)):
            preset = given().get("--preset", recipe.preset)
            file = resources.files("shoal.recipes") / "presets" / name / f"{preset}.toml"
            if file.is_file():
                tree, changes = shortened(tomllib.loads(file.read_text(encoding="utf-8")), given())
                apply(tree, f"preset {preset}")
                if changes and starts_or_leads():
                    print(f"shoal: preset {preset}, shorter: {', '.join(changes)}", file=sys.stderr)

    return fill_in


_DURATIONS = ("warmup_steps", "constant_steps", "hold_steps", "milestones")


def shortened(preset: dict[str, Any], given: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Return a preset for the steps that the user gave, and what was changed, in words.

    If they are fewer than the preset's, the durations of its schedule that the user did not give shrink in
    proportion, and lines of the record are written at least 20 times.

    Args:
        preset: settings in sections.
        given: texts of the options that the user gave, such as ``{"--train.total-steps": "60"}``.

    Example:
        >>> preset = {"train": {"total_steps": 2400}, "optim": {"warmup_steps": 200}}
        >>> tree, changes = shortened(preset, {"--train.total-steps": "60"})
        >>> tree["optim"], changes
        ({'warmup_steps': 5}, ['optim.warmup_steps 5 instead of 200'])
    """
    tree = {section: dict(values) for section, values in preset.items()}
    changes: list[str] = []

    def change(section: str, name: str, value: Any) -> None:
        old = tree.get(section, {}).get(name)
        if f"--{section}.{name.replace('_', '-')}" not in given and old not in (None, value):
            tree[section][name] = value
            changes.append(f"{section}.{name} {value} instead of {old}")

    for section, values in preset.items():
        text, whole = given.get(f"--{section}.total-steps", ""), values.get("total_steps")
        if whole is None or not text.isdecimal() or not 0 < int(text) < whole:
            continue
        steps, of = int(text), "optim" if section == "train" else section
        for name in _DURATIONS:
            old = preset.get(of, {}).get(name)
            if isinstance(old, list):
                change(of, name, [max(1, each * steps // whole) for each in old])
            elif old is not None:
                change(of, name, old * steps // whole)
        log_frequency = preset.get("run", {}).get("log_frequency")
        if section == "train" and log_frequency is not None:
            change("run", "log_frequency", min(log_frequency, max(1, steps // _FEWEST_LINES)))
    return tree, changes


_FEWEST_LINES = 20
"""Lines of the record, and so points of a report's curves, that a shortened preset has at least."""


def starts_or_leads() -> bool:
    """Return whether this process starts workers or is the first of them: one of all prints."""
    worker = worker_env()
    return worker is None or (worker.place.is_main and launch_dir() is None)


def this_command() -> list[str]:
    """Return this process's command, with which workers are started."""
    return [sys.executable, "-m", "shoal", *sys.argv[1:]]
