"""Sizes of T5. Standard library only, so that ``--help`` does not wait for torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shoal.errors import UsageError

NUM_BUCKETS = 32
"""Rows of each stack's table of relative positions, as in all published T5."""


@dataclass(frozen=True, kw_only=True)
class T5ModelConfig:
    """The model: its sizes, where its weights come from."""

    vocab_size: int = 32_128
    """Rows of the embedding; at least the vocabulary of the data and 100 sentinels."""
    d_model: int = 768
    """Width of the layers."""
    d_kv: int = 64
    """Width of an attention head; heads × this need not be d_model."""
    d_ff: int = 3_072
    """Width of the feed-forward part."""
    num_layers: int = 12
    """Layers of the encoder, and of the decoder."""
    num_heads: int = 12
    """Attention heads."""
    dropout: float = 0.1
    """Dropout everywhere."""
    z_loss: float = 1e-4
    """Weight of log² Z beside the cross-entropy, in training: keeps the softmax's denominator near 1."""
    load_from: Literal["scratch", "checkpoint", "transformers"] = "scratch"
    """Initial weights: random, a checkpoint of a shoal run, or a transformers directory."""
    checkpoint_path: Path | None = None
    """The run, checkpoint or transformers directory that load_from names."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_heads"):
            if getattr(self, name) < 1:
                raise UsageError(f"model.{name} {getattr(self, name)} must be at least 1")
        if not 0 <= self.dropout < 1:
            raise UsageError(f"model.dropout {self.dropout} must be at least 0 and below 1")
        if not self.z_loss >= 0:
            raise UsageError(f"model.z_loss {self.z_loss} must be at least 0")
        if (self.load_from == "scratch") != (self.checkpoint_path is None):
            raise UsageError(
                f"model.load_from {self.load_from!r} and model.checkpoint_path {self.checkpoint_path} "
                "do not go together: a path belongs to 'checkpoint' and 'transformers', none to 'scratch'"
            )


def num_parameters(config: T5ModelConfig) -> int:
    """Return the number of parameters; the embedding serves encoder, decoder and logits and counts once."""
    d, inner, ff = config.d_model, config.num_heads * config.d_kv, config.d_ff
    encoder_layer = 4 * d * inner + 2 * d * ff + 2 * d
    decoder_layer = encoder_layer + 4 * d * inner + d
    stack = NUM_BUCKETS * config.num_heads + d  # relative positions and the last norm
    return config.vocab_size * d + config.num_layers * (encoder_layer + decoder_layer) + 2 * stack
