"""Writes a new model of a size without weights, and texts of random words for its tokenizer."""

from __future__ import annotations

from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from shoal.models.pretraining import transformers_config
from shoal.models.t5 import new_t5
from shoal.models.text_config import AlbertModelConfig, BertModelConfig, T5ModelConfig

LABELS = ("entailment", "neutral", "contradiction")
"""Further words of each tokenizer."""
_T5_TOKENS: tuple[str, ...] = ("<pad>", "</s>", "<unk>")
_ENCODER_TOKENS: tuple[str, ...] = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def write_model(folder: Path, sizes: AlbertModelConfig | BertModelConfig | T5ModelConfig) -> Path:
    """Write config.json and tokenizer.json of a model, as a transformers directory; return the folder."""
    is_t5 = isinstance(sizes, T5ModelConfig)
    special = _T5_TOKENS if is_t5 else _ENCODER_TOKENS
    if isinstance(sizes, T5ModelConfig):
        with torch.device("meta"):
            new_t5(sizes, pad_id=0, end_id=1).weights.config.save_pretrained(folder)
    else:
        transformers_config(sizes).save_pretrained(folder)
    words = map(_word, range(num_words(sizes.vocab_size)))
    ids = {word: token for token, word in enumerate((*special, *LABELS, *words))}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>" if is_t5 else "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if not is_t5:
        ends = [(name, ids[name]) for name in ("[SEP]", "[CLS]")]
        tokenizer.post_processor = processors.BertProcessing(*ends)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def num_words(vocab_size: int) -> int:
    """Return the number of words that a tokenizer of this size has besides special tokens and labels."""
    return vocab_size - len(_ENCODER_TOKENS) - len(LABELS)


def text(draw: Random, length: int, vocabulary: int) -> str:
    """Return ``length`` random words of a vocabulary of so many."""
    return " ".join(_word(draw.randrange(vocabulary)) for _ in range(length))


def _word(number: int) -> str:
    return f"w{number}"
