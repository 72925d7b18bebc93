"""Makes commands of the uses of trained models: ``shoal predict NAME`` and ``shoal evaluate NAME``."""

# Annotations are objects here, not texts: cyclopts reads those of the generated commands.

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import cyclopts
from cyclopts import App, Group, Parameter

from shoal.recipes import using
from shoal.recipes.model_source import find_model
from shoal.recipes.start import Launch
from shoal.train.config import load_toml
from shoal.train.run_dir import CONFIG_FILE

LAUNCH = Annotated[Launch, Parameter(name="*", group=Group("Workers", sort_key=100))]
"""The parameter of options of starting workers."""


def with_options(command: Callable[..., int], settings: type[Any], text: str) -> Callable[..., int]:
    """Return ``command`` with the fields of ``settings`` as the options of its parameter ``what``.

    Args:
        text: its docstring.
    """
    kind = Annotated[settings, Parameter(name="*")]  # type: ignore[valid-type]
    signature = inspect.signature(command)
    parameters = dict(signature.parameters)
    parameters["what"] = parameters["what"].replace(annotation=kind)
    command.__signature__ = signature.replace(parameters=list(parameters.values()))  # type: ignore[attr-defined]
    command.__annotations__["what"] = kind
    command.__doc__ = text
    return command


def settings_of_the_run(app: App, commands: tuple[str, ...], arguments: cyclopts.ArgumentCollection) -> None:
    """Fill in the settings that the command line left open from those of the model's run, if it is of one."""
    given = {argument.name: argument.tokens[0].value for argument in arguments if argument.tokens}
    run_dir = find_model(Path(given["--model"])).run if "--model" in given else None
    if run_dir is None:
        return
    known = {argument.name for argument in arguments}
    tree: dict[str, Any] = {}
    for section, values in load_toml(run_dir / CONFIG_FILE).items():
        for key, value in values.items() if isinstance(values, dict) else ():
            name = using.SETTINGS.get(f"{section}.{key}", f"{section}.{key}")
            if f"--{name.replace('_', '-')}" in known:
                *sections, key = name.split(".")
                (tree.setdefault(sections[0], {}) if sections else tree)[key] = value
    for command in reversed(commands):
        tree = {command: tree}
    cyclopts.config.Dict(tree, source=str(run_dir / CONFIG_FILE))(app, commands, arguments)
