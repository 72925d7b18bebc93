"""Defines ``shoal prepare text``, apart from images, which are prepared without a tokenizer too."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from shoal.data.text.prepare import PrepareConfig, PrepareOptions, prepare_text


def prepare(
    *sources: str,
    out: Path,
    options: Annotated[PrepareOptions, Parameter(name="*")] = PrepareOptions(),  # noqa: B008
) -> None:
    """Prepare text.

    Parameters
    ----------
    sources
        Files, directories or globs of text, JSON lines, Parquet or MediaWiki's dumps, also compressed (.gz,
        .bz2, .zst). Rows are read from the field `text`, or from that of `FILE:FIELD`;
        `hf:NAME[:CONFIG][:SPLIT][:FIELD]` through the package datasets. `builtin` is the English of this
        Python installation.
    out
        Directory for tokenizer, shards and manifest.
    """
    prepare_text(PrepareConfig(sources=sources, out=out, **vars(options)))
