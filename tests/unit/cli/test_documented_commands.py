"""Parses the commands of every page: no option that a page names is missing or misspelt."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from shoal.cli.app import app
from shoal.cli.train import command_for
from shoal.recipes import RECIPES

ROOT = Path(__file__).parents[3]
POSTS = (ROOT / "docs" / "from-the-posts.md").read_text(encoding="utf-8")


def blocks(text: str) -> list[str]:
    """Return a page's commands of shoal in blocks of code, each on one line."""
    fenced = [f"    {line}" for block in text.split("```")[1::2] for line in block.splitlines()]
    lines = "\n".join((text, *fenced)).replace("\\\n", " ")
    return re.findall(r"^ {4}(?:sudo )?(?:\S*/)?(shoal [a-z].*)$", lines, re.MULTILINE)


def commands() -> list[str]:
    """Return the commands of all pages, and what the posts' page names in code spans too.

    What stands behind ``--`` is a command of its own; one with `…` is no command to type.
    """
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    texts = [
        path.read_text(encoding="utf-8")
        for path in pages
        if not {"_build", "log", "design"} & set(path.parts)
    ]
    lines = [line for text in texts for line in blocks(text)] + re.findall(r"`(shoal [^`]+)`", POSTS)
    typed = [" ".join(command.split()) for line in lines for command in line.split(" -- ")]
    return sorted({each for each in typed if re.match(r"shoal \S+ \S+ .", each) and " …" not in each})


@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_page_can_be_typed(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    program, *words = shlex.split(command, comments=True)
    if "--tokenizer" in words:  # the one file that is looked for while options are read
        path = Path(words[words.index("--tokenizer") + 1])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    assert program == "shoal"
    if words[0] == "submit":
        words += ["--", "true"]  # what it submits is parsed by itself
    unused = app.parse_known_args(words)[2]
    assert not unused


OPTION = re.compile(
    r"(--(?:train|optim|run|data|model|parallel|distributed|finetune|validation|augment)\.[a-z0-9-]+)"
)


@pytest.mark.parametrize("option", sorted(set(OPTION.findall(POSTS))))
def test_an_option_of_a_recipe_exists(option: str) -> None:
    """Either as it stands, or as the negative of a switch."""
    section, name = option.removeprefix("--").split(".")
    kinds = [command_for(recipe).__annotations__.get(f"section_{section}") for recipe in RECIPES]
    names = {field.name.replace("_", "-") for kind in kinds if kind for field in fields(kind.__origin__)}
    assert name in names or name.removeprefix("no-") in names
