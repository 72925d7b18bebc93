"""New models of a size: their tokenizer knows every word of synthetic texts as one token."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from shoal.models.text_config import AlbertModelConfig, T5ModelConfig

pytest.importorskip("transformers")


@pytest.mark.parametrize("sizes", [AlbertModelConfig(vocab_size=2_000), T5ModelConfig(vocab_size=2_000)])
def test_a_word_is_a_token(tmp_path: Path, sizes: AlbertModelConfig | T5ModelConfig) -> None:
    from shoal.models.synthetic import LABELS, num_words, text, write_model
    from shoal.recipes.source_tokenizer import read_source_tokenizer

    tokenizer = read_source_tokenizer(write_model(tmp_path, sizes))
    words = text(Random(1), 500, num_words(sizes.vocab_size))
    encoded = tokenizer.encode(words, add_special_tokens=False)
    assert encoded.tokens == words.split(" ") and len(set(encoded.ids)) > 300
    assert max(encoded.ids) < sizes.vocab_size
    assert tokenizer.encode(" ".join(LABELS), add_special_tokens=False).tokens == list(LABELS)
