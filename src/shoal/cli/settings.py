"""Fills in settings that the command line left open: from ``--config``, then from ``--preset``."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cyclopts
from cyclopts import App

from shoal.env.launcher import worker_env
from shoal.env.settings import launch_dir
from shoal.recipes import RECIPES, preset_file
from shoal.train.config import load_toml

_DURATIONS = {
    "steps": ("warmup_steps", "constant_steps", "hold_steps", "milestones"),
    "epochs": ("warmup_epochs",),
}
"""Settings of a schedule that are a part of ``total_steps`` or ``total_epochs``."""
_FEWEST_LINES = 20
"""Lines of the record, and so points of a report's curves, that a shortened preset has at least."""

Fill = Callable[[App, tuple[str, ...], cyclopts.ArgumentCollection], None]


def settings_from(recipe_of: Callable[[tuple[str, ...]], str]) -> Fill:
    """Return a function for cyclopts that fills in settings of the recipe ``recipe_of(command)``.

    Keys are checked like options, so that a misspelt one in a file fails with a suggestion too. A command
    whose recipe is unknown has no presets.
    """

    def fill_in(app: App, commands: tuple[str, ...], arguments: cyclopts.ArgumentCollection) -> None:
        def options() -> dict[str, str]:
            return {argument.name: argument.tokens[0].value for argument in arguments if argument.tokens}

        def apply(tree: dict[str, Any], source: str) -> None:
            for command in reversed(commands):
                tree = {command: tree}
            cyclopts.config.Dict(tree, source=source)(app, commands, arguments)

        if path := options().get("--config"):
            apply(load_toml(Path(path)), path)
        if recipe := RECIPES.get(name := recipe_of(commands)):
            preset = options().get("--preset", recipe.preset)
            if tree := preset_of(name, preset):
                tree, changes = shortened(tree, options())
                apply(tree, f"preset {preset}")
                if changes and starts_or_leads():
                    print(f"shoal: preset {preset}, adapted: {', '.join(changes)}", file=sys.stderr)

    return fill_in


def preset_of(recipe: str, preset: str) -> dict[str, Any]:
    """Return the settings of a preset by section; empty if there is no such preset."""
    file = preset_file(recipe, preset)
    return tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def shortened(preset: dict[str, Any], options: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Return a preset adapted to the steps or epochs that the user gave, and a list of the changes.

    If they are fewer than the preset's, the durations of its schedule that the user did not give shrink in
    proportion, and lines of the record are written at least 20 times. Phases share ``--train.total-steps``
    in the proportion of their own.

    Args:
        preset: settings in sections.
        options: texts of the options that the user gave, such as ``{"--train.total-steps": "60"}``.

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
        if f"--{section}.{name.replace('_', '-')}" not in options and old not in (None, value):
            tree[section][name] = value
            changes.append(f"{section}.{name} {value} instead of {old}")

    steps = _number(options.get("--train.total-steps", ""))
    for section, own in _shares(preset, steps).items():
        change(section, "total_steps", own)
    for section in preset:
        for unit, names in _DURATIONS.items():
            whole = preset[section].get(f"total_{unit}")
            part = _number(options.get(f"--{section}.total-{unit}", "")) or tree[section].get(f"total_{unit}")
            if whole is None or part is None or not 0 < part < whole:
                continue
            of = "optim" if section == "train" else section
            for name in names:
                old = preset.get(of, {}).get(name)
                if isinstance(old, list):
                    change(of, name, [max(1, each * part // whole) for each in old])
                elif old is not None:
                    fewer = old * part // whole if unit == "steps" else old * part / whole
                    change(of, name, max(fewer, int(name == "hold_steps")))  # a rate is held from step 1 on
    log_frequency = preset.get("run", {}).get("log_frequency")
    if steps and log_frequency is not None and steps < preset.get("train", {}).get("total_steps", steps + 1):
        change("run", "log_frequency", min(log_frequency, max(1, int(steps) // _FEWEST_LINES)))
    return tree, changes


def _number(text: str) -> int | float | None:
    """Return an option's number, or `None`; the parser rejects values that are not numbers."""
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        return None


def _shares(preset: Mapping[str, Any], steps: int | float | None) -> dict[str, int]:
    """Return the steps of each phase of a preset that has phases, if all of them together are ``steps``."""
    own = {section: each["total_steps"] for section, each in preset.items() if section.startswith("phase")}
    if not own or not steps:
        return {}
    shares = {section: int(each * steps // sum(own.values())) for section, each in own.items()}
    shares[max(own, key=own.__getitem__)] += int(steps) - sum(shares.values())
    return shares


def starts_or_leads() -> bool:
    """Return whether this process starts workers or is the first of them: one of all prints."""
    worker = worker_env()
    return worker is None or (worker.ranks.is_main and launch_dir() is None)


def this_command() -> list[str]:
    """Return this process's command, with which workers are started."""
    return [sys.executable, "-m", "shoal", *sys.argv[1:]]
