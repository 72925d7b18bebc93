"""Sizes of BERT. Standard library only, so that ``--help`` does not wait for torch."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.models.encoder_config import EncoderConfig, layer_parameters


@dataclass(frozen=True, kw_only=True)
class BertModelConfig(EncoderConfig):
    """The model: its sizes, where its weights come from, what is trained."""

    skip_nsp: bool = False
    """Train without next-sentence prediction."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_trains_something("skip_nsp")


def num_parameters(config: BertModelConfig) -> int:
    """Return the number of parameters of the pretraining model, both heads included."""
    h = config.hidden_size
    embeddings = (config.vocab_size + config.max_position_embeddings + 2) * h + 2 * h
    layers = config.num_hidden_layers * layer_parameters(h, config.intermediate_size)
    pooler = h * h + h
    heads = (h * h + h) + 2 * h + config.vocab_size + (2 * h + 2)
    return embeddings + layers + pooler + heads
