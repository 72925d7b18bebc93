"""Defines the model sections of the text recipes: sizes of ALBERT, BERT and T5, and the name of the hub.

Standard library only, so that ``--help`` does not wait for torch.
"""

# Annotations are types here, not texts: the command line resolves texts in the module of the subclass.

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from shoal.errors import UsageError, require_positive

HUB = "hub:"
"""Prefix of models that are downloaded from the model hub."""
NUM_BUCKETS = 32
"""Rows of each T5 stack's table of relative positions, as in all published T5."""


def input_names(sizes: Mapping[str, Any]) -> list[str]:
    """Return the inputs that a model of transformers takes from its tokenizer: segments if it has them.

    Args:
        sizes: its config.json.
    """
    segments = ["token_type_ids"] if sizes.get("type_vocab_size", 1) > 1 else []
    return ["input_ids", "attention_mask", *segments]


def is_t5(sizes: Mapping[str, Any]) -> bool:
    """Return whether a config.json of transformers is a T5's, whose tokenizer has no tokens for classes."""
    return bool(sizes.get("model_type") == "t5")


def num_positions(sizes: Mapping[str, Any]) -> int | None:
    """Return the most tokens of a sequence by a model's config.json; none of a model without a limit (T5)."""
    positions: int | None = sizes.get("max_position_embeddings")
    if (
        positions is not None and sizes.get("model_type") == "roberta"
    ):  # its first ones lie behind the padding's
        padding = sizes.get("pad_token_id")
        positions -= (1 if padding is None else padding) + 1
    return positions


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """The model: its sizes, the source of its weights, its trained parts."""

    vocab_size: int = 30_522
    """Rows of the embedding; at least the vocabulary of the data."""
    hidden_size: int = 768
    """Width of the layers."""
    num_hidden_layers: int = 12
    """Number of layers; ALBERT applies one shared layer this many times."""
    num_attention_heads: int = 12
    """Attention heads; must divide the hidden size."""
    intermediate_size: int = 3_072
    """Width of the feed-forward block."""
    max_position_embeddings: int = 512
    """Maximum sequence length of the model."""
    hidden_dropout_prob: float = 0.1
    """Dropout on embeddings and after attention (BERT: and after feed-forward)."""
    attention_probs_dropout_prob: float = 0.1
    """Dropout on attention weights."""
    initializer_range: float = 0.02
    """Standard deviation of the initial weights."""
    checkpoint_path: Path | None = None
    """Initial weights: a shoal run, one of its checkpoints, or a transformers directory; default: random."""
    activation_checkpointing: bool = False
    """Recompute layers in the backward pass: about a third more time for much less memory."""

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise UsageError(
                f"model.hidden_size {self.hidden_size} must be a multiple of "
                f"model.num_attention_heads {self.num_attention_heads}"
            )

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer: attention, feed-forward, two layer norms, all with biases."""
        h, f = self.hidden_size, self.intermediate_size
        return 4 * (h * h + h) + (h * f + f) + (f * h + h) + 4 * h


@dataclass(frozen=True, kw_only=True)
class AlbertModelConfig(EncoderConfig):
    """The model: its sizes, the source of its weights, its trained parts."""

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
    """Normalise before attention and feed-forward instead of after."""

    @property
    def num_parameters(self) -> int:
        """Parameters of the pretraining model, both heads included."""
        e, h = self.embedding_size, self.hidden_size
        embeddings = (self.vocab_size + self.max_position_embeddings + 2) * e + 2 * e
        pooler = h * h + h
        heads = (h * e + e) + 2 * e + self.vocab_size + (2 * h + 2)
        final_norm = 2 * h if self.pre_layer_norm else 0
        return embeddings + (e * h + h) + self.layer_parameters + pooler + heads + final_norm


@dataclass(frozen=True, kw_only=True)
class BertModelConfig(EncoderConfig):
    """The model: its sizes, the source of its weights, its trained parts."""

    family: Literal["bert", "roberta", "distilbert"] = "bert"
    """Architecture: BERT with next-sentence prediction, or RoBERTa or DistilBERT with masked LM only."""
    pad_token_id: int = 0
    """Padding token of the data's vocabulary; RoBERTa's positions begin after this number."""

    @property
    def num_parameters(self) -> int:
        """Parameters of the pretraining model, the heads included."""
        h = self.hidden_size
        others = {"bert": 2, "distilbert": 0, "roberta": self.pad_token_id + 2}  # segments; unused positions
        rows = self.vocab_size + self.max_position_embeddings + others[self.family]
        layers = self.num_hidden_layers * self.layer_parameters
        head = (h * h + h) + 2 * h + self.vocab_size
        pooler_and_sentence = (h * h + h) + (2 * h + 2) if self.family == "bert" else 0
        return rows * h + 2 * h + layers + head + pooler_and_sentence


@dataclass(frozen=True, kw_only=True)
class T5ModelConfig:
    """The model: its sizes, where its weights come from."""

    vocab_size: int = 32_128
    """Rows of the embedding; at least the vocabulary of the data and 100 sentinels."""
    d_model: int = 768
    """Width of the layers."""
    d_kv: int = 64
    """Width of an attention head; num_heads × d_kv need not equal d_model."""
    d_ff: int = 3_072
    """Width of the feed-forward block."""
    num_layers: int = 12
    """Layers of the encoder, and as many of the decoder."""
    num_heads: int = 12
    """Attention heads."""
    dropout: float = 0.1
    """Dropout probability in all layers."""
    z_loss: float = 1e-4
    """Weight of the term log² Z in the training loss, which keeps the softmax's denominator near 1."""
    checkpoint_path: Path | None = None
    """Initial weights: a shoal run, one of its checkpoints, or a transformers directory; default: random."""

    def __post_init__(self) -> None:
        require_positive("model", self, "vocab_size", "d_model", "d_kv", "d_ff", "num_layers", "num_heads")
        require_positive("model", self, "dropout", least=0, below=1)
        require_positive("model", self, "z_loss", least=0)

    @property
    def num_parameters(self) -> int:
        """Parameters; the embedding is shared by encoder, decoder and logits and counts once."""
        d, inner, ff = self.d_model, self.num_heads * self.d_kv, self.d_ff
        encoder_layer = 4 * d * inner + 2 * d * ff + 2 * d
        decoder_layer = encoder_layer + 4 * d * inner + d
        stack = NUM_BUCKETS * self.num_heads + d  # relative positions and the last norm
        return self.vocab_size * d + self.num_layers * (encoder_layer + decoder_layer) + 2 * stack
