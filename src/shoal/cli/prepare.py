"""``shoal prepare …``: raw data to shards."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from cyclopts import App

prepare = App(name="prepare", help="Turn raw data into shards that training reads.")


@prepare.command(name="text")
def prepare_text(
    *sources: str,
    out: Path,
    format: Literal["auto", "lines", "files", "wikitext"] = "auto",
    tokenizer: str = "unigram",
    vocab_size: int = 8_192,
    lowercase: bool = True,
    validation: float = 0.05,
    shard_bytes: int = 64 << 20,
    errors: Literal["strict", "replace"] = "strict",
    seed: int = 0,
    processes: int = 0,
    overwrite: bool = False,
) -> None:
    """Turn text into token shards. Run it again to continue after a stop or a crash.

    Parameters
    ----------
    sources
        Files, directories or globs of text; `builtin` is the English of this Python installation.
    out
        Directory for tokenizer, shards and manifest.
    format
        One article a line, one a file, or WikiText's headings; auto looks at each file.
    tokenizer
        unigram or wordpiece to train one on the text; else the path of a sentencepiece .model, a BERT
        vocab.txt or a tokenizer.json.
    vocab_size
        Tokens of a trained tokenizer at most.
    lowercase
        Lower-case the text and drop accents; a tokenizer.json brings its own rules.
    validation
        Share of articles held out.
    shard_bytes
        Bytes of text that make one shard at most.
    errors
        Stop at bytes that are not UTF-8, or replace them.
    seed
        Another seed holds out other articles.
    processes
        Worker processes; 0: one a core. The result does not depend on it.
    overwrite
        Remove what an earlier preparation wrote there, and begin anew.
    """
    from shoal.data import prepare as text

    settings = text.PrepareConfig(
        sources=sources,
        out=out,
        format=format,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        lowercase=lowercase,
        validation=validation,
        shard_bytes=shard_bytes,
        errors=errors,
        seed=seed,
        processes=processes,
        overwrite=overwrite,
    )
    text.prepare_text(settings)
