"""Parses the commands of the page "From the posts": no option that it names is missing or misspelt."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from shoal.cli.app import app
from shoal.cli.train import command_for
from shoal.recipes import RECIPES

PAGE = (Path(__file__).parents[3] / "docs" / "from-the-posts.md").read_text(encoding="utf-8")


def commands() -> list[str]:
    """Return the commands of the page, in code spans and in blocks, those behind ``--`` by themselves."""
    indented = re.findall(r"^ {4}\S.*\n(?: {8}.*\n)*", PAGE, re.MULTILINE)
    blocks = [" ".join(block.replace("\\\n", " ").split()) for block in indented]
    spans = re.findall(r"`(shoal [^`]+)`", PAGE)
    found = [command for text in (*blocks, *spans) for command in text.split(" -- ")]
    return [command for command in dict.fromkeys(found) if len(command.split()) > 3]


@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_page_can_be_typed(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("spiece.model").touch()  # the one file that is looked for while options are read
    program, *words = shlex.split(command)
    assert program == "shoal"
    if words[0] == "submit":
        words += ["--", "true"]  # what it submits is parsed by itself
    unused = app.parse_known_args(words)[2]
    assert not unused


OPTION = re.compile(
    r"(--(?:train|optim|run|data|model|parallel|distributed|finetune|validation|augment)\.[a-z0-9-]+)"
)


@pytest.mark.parametrize("option", sorted(set(OPTION.findall(PAGE))))
def test_an_option_of_a_recipe_exists(option: str) -> None:
    """Either as it stands, or as the negative of a switch."""
    section, name = option.removeprefix("--").split(".")
    kinds = [command_for(recipe).__annotations__.get(f"section_{section}") for recipe in RECIPES]
    names = {field.name.replace("_", "-") for kind in kinds if kind for field in fields(kind.__origin__)}
    assert name in names or name.removeprefix("no-") in names
