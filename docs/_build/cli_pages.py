"""Writes the reference of the commands from the commands themselves, a page for each."""

from __future__ import annotations

from typing import Any

from cyclopts.docs.markdown import generate_markdown_docs
from mkdocs.structure.files import File

from shoal.cli.app import app

FOLDER = "reference/cli"
_INTRODUCTION = """# Commands

`shoal COMMAND --help` prints what these pages say; of a recipe the common options, and `--help-all` every one. In a
terminal, a misspelt option gets a suggestion.

| command | does |
|---|---|
"""


def on_files(files: Any, *, config: Any) -> Any:
    """Add the pages, and a table of all commands."""
    rows = []
    for name in sorted(command for command in app if not command.startswith("-")):
        text = generate_markdown_docs(
            app, commands_filter=[name], generate_toc=False, heading_level=2, no_root_title=True
        )
        text = text.replace(" *[default: ()]*", "").replace(' *[default: ""]*', "")
        content = f"# shoal {name}\n\n{text}"
        files.append(File.generated(config, f"{FOLDER}/{name}.md", content=content))
        summary = app[name].help.strip().splitlines()[0]
        rows.append(f"| [`{name}`]({name}.md) | {summary} |\n")
    files.append(File.generated(config, f"{FOLDER}/index.md", content=_INTRODUCTION + "".join(rows)))
    return files
