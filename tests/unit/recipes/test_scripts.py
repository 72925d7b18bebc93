"""Each recipe's module has what :class:`shoal.recipes.Script` says, and what the registry says of it."""

from __future__ import annotations

import inspect
from dataclasses import is_dataclass

import pytest

from shoal.recipes import RECIPES, Script, Use, command_use, preset_file, recipe_of_command, script

FUNCTIONS = [name for name, value in vars(Script).items() if inspect.isfunction(value) and name[0] != "_"]


@pytest.mark.parametrize("name", RECIPES)
def test_a_module_has_the_names_of_the_protocol(name: str) -> None:
    module, recipe = script(name), RECIPES[name]
    for function in FUNCTIONS:
        wanted = list(inspect.signature(getattr(Script, function)).parameters.values())[1:]
        given = list(inspect.signature(getattr(module, function)).parameters.values())
        assert [(each.name, each.default) for each in given] == [(each.name, each.default) for each in wanted]
    assert FUNCTIONS == ["main", "check", "sample", "trial"]
    assert is_dataclass(getattr(module, recipe.config))
    for constant in ("PRESETS", "IMMUTABLE"):
        values = getattr(module, constant)
        assert isinstance(values, tuple) and all(isinstance(value, str) for value in values)
    assert issubclass(module.use, Use)
    if recipe.predict is not None:
        assert is_dataclass(command_use(name, recipe.predict).Predict)
    if recipe.evaluate is not None:
        assert is_dataclass(command_use(name, recipe.evaluate).Evaluate)


@pytest.mark.parametrize("name", RECIPES)
def test_what_the_registry_says_is_there(name: str) -> None:
    module, recipe = script(name), RECIPES[name]
    assert recipe.preset in module.PRESETS
    assert all(preset_file(name, preset).is_file() for preset in module.PRESETS)
    assert set(recipe.starts_from) <= set(RECIPES)
    assert recipe_of_command(recipe.group, recipe.command or name) == name
    config = getattr(module, recipe.config)()
    for setting in (*recipe.shortcuts.values(), *filter(None, [recipe.length])):
        section, option = setting.split(".")
        assert hasattr(getattr(config, section), option), setting
