"""Settings that the command line left open: from ``--config``, then from ``--preset``."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import cyclopts
from cyclopts import App

from shoal.train.config import load_toml


def settings_from(
    folder_of: Callable[[str], str], default_of: Callable[[str], str]
) -> Callable[[App, tuple[str, ...], Any], None]:
    """Return what cyclopts calls to fill in settings.

    Keys are checked like options, so that a misspelt one in a file fails with a suggestion too.

    Args:
        folder_of: from a command's name to its folder of presets in ``shoal.recipes``.
        default_of: from a command's name to its preset where none is named.
    """

    def fill_in(app: App, commands: tuple[str, ...], arguments: Any) -> None:
        given = {argument.name: argument.tokens[0].value for argument in arguments if argument.tokens}
        trees: list[tuple[str, dict[str, Any]]] = []
        if path := given.get("--config"):
            trees.append((path, load_toml(Path(path))))
        preset = given.get("--preset", default_of(commands[-1]))
        file = resources.files("shoal.recipes") / folder_of(commands[-1]) / f"{preset}.toml"
        if file.is_file():
            trees.append((f"preset {preset}", tomllib.loads(file.read_text(encoding="utf-8"))))
        for source, tree in trees:
            for command in reversed(commands):
                tree = {command: tree}
            cyclopts.config.Dict(tree, source=source)(app, commands, arguments)

    return fill_in


def this_command() -> list[str]:
    """Return this process's command, with which workers are started."""
    return [sys.executable, "-m", "shoal", *sys.argv[1:]]
