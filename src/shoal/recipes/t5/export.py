"""Writes a T5 with the tokenizer of its text as a directory that transformers loads."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, processors
from transformers import PreTrainedTokenizerFast

from shoal.data.manifest import Manifest
from shoal.data.text.span_config import MAX_SENTINELS, sentinel_id
from shoal.models.directory import save
from shoal.models.t5 import T5


def write_export(model: T5, data: Path, out: Path) -> None:
    """Write ``model`` with the tokenizer of the prepared text ``data``, whole or not at all.

    An older export in ``out`` is replaced.
    """
    save(model, out, tokenizer=tokenizer_of(data))


def tokenizer_of(data: Path) -> PreTrainedTokenizerFast:
    """Return the tokenizer as T5 uses it: an end token behind each text, and the sentinels as tokens."""
    manifest = Manifest.load(data)
    tokenizer = Tokenizer.from_file(str(data / manifest.tokenizer.file))
    end = tokenizer.id_to_token(manifest.sep_id)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", pair=f"$A {end} $B {end}", special_tokens=[(end, manifest.sep_id)]
    )
    if tokenizer.get_vocab_size(with_added_tokens=True) == manifest.vocab_size:  # else ids would not be those
        names = [f"<extra_id_{number}>" for number in reversed(range(MAX_SENTINELS))]
        tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
        assert tokenizer.token_to_id("<extra_id_0>") == sentinel_id(manifest.vocab_size, 0)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=end,
        pad_token=tokenizer.id_to_token(manifest.pad_id),
        unk_token=tokenizer.id_to_token(manifest.unk_id),
    )
