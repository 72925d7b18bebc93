"""Opens prepared text, initial weights and the tokenizer for the recipes that pretrain."""

# Annotations are types here, not texts: the command line resolves texts in the module of the subclass.

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from shoal.errors import UsageError
from shoal.models.text_config import EncoderConfig, T5ModelConfig
from shoal.train.config import required

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerFast

    from shoal.data.manifest import Manifest
    from shoal.data.text.shards import TextShards


@dataclass(frozen=True, kw_only=True)
class PreparedTextConfig:
    """The text to train on, and how it is read."""

    path: Path | None = None
    """Directory that `shoal prepare text` wrote."""
    verify: Literal["sizes", "checksums"] = "checksums"
    """Compare only sizes at the start, or read every byte once (1.5 GB/s, by the main worker)."""
    loader_processes: int = 0
    """Processes that make examples; 0: a thread of the worker, enough for text."""


def read_manifest(data: PreparedTextConfig) -> "Manifest":
    """Return the manifest of the prepared text that the settings name.

    Raises:
        UsageError: none is named, or it is not there.
    """
    from shoal.data.manifest import Manifest

    if data.path is None:
        raise UsageError(
            "data.path is not set: name the directory that `shoal prepare text` wrote, "
            "e.g. --data.path runs/text"
        )
    return Manifest.load(data.path)


def open_shards(data: PreparedTextConfig, *, verify: bool) -> "tuple[TextShards, TextShards]":
    """Return the shards of training and held-out text; ``verify`` compares them as the settings ask."""
    from shoal.data.text.shards import TextShards

    how = data.verify if verify else "sizes"
    path = required(data.path)
    return TextShards(path, "train", verify=how), TextShards(path, "validation", verify=how)


def load_weights(model: "nn.Module", config: EncoderConfig | T5ModelConfig) -> None:
    """Copy the initial weights that the settings name into ``model``.

    Raises:
        UsageError: they are not there, or are of another model.
        ShoalError: they cannot be read.
    """
    from shoal.models.directory import copy_weights
    from shoal.train.checkpoint import load_model

    if config.load_from == "transformers":
        copy_weights(model, required(config.checkpoint_path))
    elif config.load_from == "checkpoint":
        load_model(required(config.checkpoint_path), model)


def text_to_text_tokenizer(data: Path) -> "PreTrainedTokenizerFast":
    """Return the tokenizer of prepared text as T5 uses it: with an end token and the sentinels."""
    from tokenizers import AddedToken, Tokenizer, processors
    from transformers import PreTrainedTokenizerFast

    from shoal.data.manifest import Manifest
    from shoal.data.text.span_config import MAX_SENTINELS, sentinel_id

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
