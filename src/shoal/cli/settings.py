"""Fills in settings that the command line left open: from ``--config``, then from ``--preset``."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cyclopts
from cyclopts import App

from shoal.env.launcher import worker_env
from shoal.env.settings import launch_dir
from shoal.recipes import RECIPES, preset_file
from shoal.train.config import load_toml, shortened

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


def starts_or_leads() -> bool:
    """Return whether this process starts workers or is the first of them: one of all prints."""
    worker = worker_env()
    return worker is None or (worker.ranks.is_main and launch_dir() is None)


def this_command() -> list[str]:
    """Return this process's command, with which workers are started."""
    return [sys.executable, "-m", "shoal", *sys.argv[1:]]
