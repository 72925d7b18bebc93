"""Fills in the templates of this package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shoal.errors import import_extra

jinja2 = import_extra("jinja2", "report", "a report needs jinja2")


def fill_template(name: str, **values: Any) -> str:
    """Return the text of a template with escaped values; undefined names are refused."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text: str = environment.get_template(name).render(**values)
    return text
