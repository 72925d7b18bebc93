"""Sizes of ALBERT. Standard library only, so that ``--help`` does not wait for torch."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.models.encoder_config import EncoderConfig, layer_parameters


@dataclass(frozen=True, kw_only=True)
class AlbertModelConfig(EncoderConfig):
    """The model: its sizes, where its weights come from, what is trained."""

    vocab_size: int = 30_000
    """Rows of the embedding; at least the vocabulary of the data."""
    embedding_size: int = 128
    """Width of the factorised embedding."""
    hidden_dropout_prob: float = 0.0
    """Dropout on embeddings and after attention."""
    attention_probs_dropout_prob: float = 0.0
    """Dropout on attention weights."""
    classifier_dropout_prob: float = 0.1
    """Dropout before the sentence-order classifier."""
    pre_layer_norm: bool = False
    """Normalise before attention and feed-forward instead of after (not exportable to transformers)."""
    skip_sop: bool = False
    """Train without sentence-order prediction."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_trains_something("skip_sop")


def num_parameters(config: AlbertModelConfig) -> int:
    """Return the number of parameters of the pretraining model, both heads included."""
    e, h = config.embedding_size, config.hidden_size
    embeddings = (config.vocab_size + config.max_position_embeddings + 2) * e + 2 * e
    layer = layer_parameters(h, config.intermediate_size)
    pooler = h * h + h
    heads = (h * e + e) + 2 * e + config.vocab_size + (2 * h + 2)
    final_norm = 2 * h if config.pre_layer_norm else 0
    return embeddings + (e * h + h) + layer + pooler + heads + final_norm
