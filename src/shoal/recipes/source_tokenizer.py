"""Reads the tokenizer of a transformers directory, with which texts become the inputs of its model."""

# What needs the package tokenizers is imported in functions: `--help` is quick.

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import UsageError
from shoal.models.text_config import is_t5
from shoal.recipes.model_source import MODEL_CONFIG, read_model_config, read_object

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def read_source_tokenizer(directory: Path) -> Tokenizer:
    """Return the tokenizer of a transformers directory; T5's has no tokens for classes and masks.

    Raises:
        UsageError: there is none, it cannot be read, or it has more tokens than the model has embeddings.
    """
    from shoal.data.text.tokenizer import read_tokenizer, vocab_size

    names = ("tokenizer.json", "vocab.txt", "spiece.model")
    file = next((directory / name for name in names if (directory / name).is_file()), None)
    if file is None:
        raise UsageError(
            f"{directory} holds no tokenizer ({', '.join(names)}); put the one there that the model was "
            "trained with, e.g. by its save_pretrained"
        )
    config = read_model_config(directory)
    if is_t5(config):
        tokenizer = read_tokenizer(file, lowercase=False, needs=("sep", "pad", "unk"))
    else:
        path = directory / "tokenizer_config.json"  # without one as BERT's and ALBERT's do by default
        lowercase = not path.is_file() or bool(read_object(path).get("do_lower_case", True))
        tokenizer = read_tokenizer(file, lowercase=lowercase)
    needed, rows = vocab_size(tokenizer), int(config.get("vocab_size", 0))
    if needed > rows:
        raise UsageError(
            f"{file} has {needed:,} tokens and the model of {directory / MODEL_CONFIG} {rows:,} embeddings; "
            "they do not belong together: put the model's own tokenizer there"
        )
    return tokenizer
