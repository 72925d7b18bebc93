"""Writes the reference of the commands from the commands themselves: a page for each, an anchor for each option.

Settings that all recipes have are on one page. The page of a recipe's benchmark has what its training has not.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from cyclopts.docs.markdown import generate_markdown_docs
from mkdocs.structure.files import File

from shoal.cli.app import app
from shoal.recipes import RECIPES

FOLDER = "reference/cli"
COMMON = f"{FOLDER}/settings.md"
_INDEX = f"{FOLDER}/index.md"
_INTRODUCTION = """# Commands

`shoal COMMAND --help` prints what these pages say; of a recipe the common options, and `--help-all` every one. In a
terminal, a misspelt option gets a suggestion, and so has the name that other programs have for an option, such as `--lr`.

`--quiet` prints nothing but errors. [`runs`](runs.md), [`report`](report.md) and [`doctor`](doctor.md) print one JSON document with
`--json`; [`plan`](plan.md) and [`bench`](bench.md) write one with `--json FILE`, and print it with `--json` alone. Their text then goes to
stderr. Keys keep their names and meanings in all versions 0.x; a version may add some.

Options of all recipes: [settings](settings.md).

| command | does |
|---|---|
"""
_SHARED = (
    "Run directory, lines, checkpoints",
    "Devices and communication",
    "Updates by servers",
    "Workers",
)
"""Groups whose common options are on one page."""
_COMMAND = re.compile(r"^#+ (shoal .+)$", re.MULTILINE)
_GROUP = re.compile(r"^\*\*(.+)\*\*:$", re.MULTILINE)
_OPTION = re.compile(r"^\* `(?:[A-Z_.]+, )?(--[\w.-]+)(.*?)`", re.MULTILINE)
_TO_COMMAND = re.compile(r"\]\(#(shoal-[\w-]+)\)")


def on_config(config: Any) -> None:
    """Put the pages into the navigation, below "Commands"."""
    for entry in _entries(config.nav):
        if entry.get("Commands") == [_INDEX]:
            entry["Commands"] = [_INDEX, *_navigation()]


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages, and a table of all commands."""
    rows = [f"| [`{name}`]({name}.md) | {app[name].help.strip().splitlines()[0]} |\n" for name in _names()]
    files.append(File.generated(config, _INDEX, content=_INTRODUCTION + "".join(rows)))
    common = "# Settings of all recipes\n\n`shoal train` and `shoal finetune` have these options with every recipe.\n"
    for title, options in _common().items():
        common += f"\n## {title}\n\n" + _with_anchors("\n".join(options)) + "\n"
    files.append(File.generated(config, COMMON, content=common))
    for command, text in _texts().items():
        content = f"# {command}\n\n{_with_anchors(_linked(_shortened(command, text), _uri(command)))}"
        files.append(File.generated(config, _uri(command), content=content))
    return files


def _names() -> list[str]:
    return sorted(command for command in app if not command.startswith("-"))


@cache
def _texts() -> dict[str, str]:
    """Return the text of each command, such as ``shoal train albert``."""
    texts = {}
    for name in _names():
        text = generate_markdown_docs(
            app, commands_filter=[name], generate_toc=False, heading_level=2, no_root_title=True
        )
        text = text.replace(" *[default: ()]*", "").replace(' *[default: ""]*', "")
        own, *rest = _COMMAND.split(text)
        if rest:  # a group of commands has no list of them
            subcommands = [command for command in rest[::2] if command.count(" ") == 2]
            own += "\n**Commands**:\n\n" + "".join(f"* [`{c}`](#{_anchor(c)})\n" for c in subcommands)
        texts[f"shoal {name}"] = own
        texts |= dict(zip(rest[::2], rest[1::2], strict=True))
    return texts


def _anchor(command: str) -> str:
    return command.replace(" ", "-")


def _uri(command: str) -> str:
    return f"{FOLDER}/{command.removeprefix('shoal ').replace(' ', '-')}.md"


def _linked(text: str, uri: str) -> str:
    """Point the links between commands at their pages."""
    pages = {_anchor(command): _uri(command) for command in _texts()}
    return _TO_COMMAND.sub(lambda link: f"]({pages[link[1]].rpartition('/')[2]})", text)


def _groups(text: str) -> dict[str, list[str]]:
    """Return the options of a command by the title of their group; "" is what stands before, as one text."""
    first, *rest = _GROUP.split(text)
    options = (re.split(r"(?m)^(?=\* )", group.strip()) for group in rest[1::2])
    return {"": [first], **{title: [o.strip() for o in own if o] for title, own in zip(rest[::2], options, strict=True)}}


def _joined(groups: dict[str, list[str]]) -> str:
    parts = (f"**{title}**:\n\n" + "\n".join(options) for title, options in groups.items() if title and options)
    return "\n\n".join(["".join(groups[""]).strip(), *parts])


@cache
def _trainings() -> dict[str, str]:
    """Return the command that trains each recipe, by the recipe's name."""
    return {name: f"shoal {recipe.group} {recipe.command or name}" for name, recipe in RECIPES.items()}


@cache
def _common() -> dict[str, list[str]]:
    """Return the options that all recipes have, by the title of their group."""
    of_all = [_groups(_texts()[training]) for training in _trainings().values()]
    return {
        title: [option for option in of_all[0][title] if all(option in groups[title] for groups in of_all)]
        for title in _SHARED
    }


def _shortened(command: str, text: str) -> str:
    """Leave out of a recipe's options what is on another page."""
    groups, training = _groups(text), _trainings().get(command.split()[-1], "")
    if command in _trainings().values():
        known = {option for options in _common().values() for option in options}
        links = "".join(f"* [{title}](settings.md#{_slug(title)})\n" for title in _common())
        after = f"**Of all recipes**:\n\n{links}"
    elif command.startswith(("shoal bench train ", "shoal pipeline show ")) and training:
        known = {option for options in _groups(_texts()[training]).values() for option in options}
        after = f"It also has the settings of [`{training}`](#{_anchor(training)}).\n"
    else:
        return text
    own = {title: [option for option in options if option not in known] for title, options in groups.items()}
    return f"{_joined(own)}\n\n{after}"


def _slug(title: str) -> str:
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-")


def _with_anchors(text: str) -> str:
    """Give each option an anchor of its name: ``albert.html#--train.seed``."""
    return _OPTION.sub(r'* <a id="\1" href="#\1">`\1\2`</a>', text)


def _navigation() -> list[Any]:
    entries: list[Any] = []
    for name in _names():
        below = [command for command in _texts() if command.startswith(f"shoal {name} ")]
        pages = [{command.removeprefix(f"shoal {name} "): _uri(command)} for command in below]
        entries.append({name: [_uri(f"shoal {name}"), *pages] if pages else _uri(f"shoal {name}")})
    return [*entries, {"Settings of all recipes": COMMON}]


def _entries(nav: Any) -> list[dict[str, Any]]:
    """Return all entries of the navigation that have a title."""
    found = [entry for entry in nav if isinstance(entry, dict)]
    lists = [inner for entry in found for inner in entry.values() if isinstance(inner, list)]
    return found + [entry for inner in lists for entry in _entries(inner)]
