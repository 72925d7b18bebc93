"""Loads the templates of this package."""

from __future__ import annotations

from pathlib import Path

from shoal.errors import ShoalError

try:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
except ImportError as error:
    raise ShoalError(f"a report needs jinja2 ({error}): pip install 'shoal[report]'") from None


def template(name: str) -> Template:
    """Return a template, which escapes values and refuses undefined names."""
    return Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    ).get_template(name)
