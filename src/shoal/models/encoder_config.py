"""Sizes that ALBERT and BERT share. Standard library only, so that ``--help`` does not wait for torch."""

# Annotations are types here, not texts: the command line resolves texts in the module of the subclass.

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shoal.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """The model: its sizes, where its weights come from, what is trained."""

    vocab_size: int = 30_522
    """Rows of the embedding; at least the vocabulary of the data."""
    hidden_size: int = 768
    """Width of the layers."""
    num_hidden_layers: int = 12
    """How many layers a token passes through; ALBERT applies one shared layer so often."""
    num_attention_heads: int = 12
    """Attention heads; must divide the hidden size."""
    intermediate_size: int = 3_072
    """Width of the feed-forward part."""
    max_position_embeddings: int = 512
    """Longest sequence that the model can take."""
    hidden_dropout_prob: float = 0.1
    """Dropout on embeddings and after attention (BERT: and after feed-forward)."""
    attention_probs_dropout_prob: float = 0.1
    """Dropout on attention weights."""
    initializer_range: float = 0.02
    """Standard deviation of the initial weights."""
    load_from: Literal["scratch", "checkpoint", "transformers"] = "scratch"
    """Initial weights: random, a checkpoint of a shoal run, or a transformers directory."""
    checkpoint_path: Path | None = None
    """The run, checkpoint or transformers directory that load_from names."""
    activation_checkpointing: bool = False
    """Recompute layers in the backward pass: about a third more time for much less memory."""
    skip_mlm: bool = False
    """Train without the masked language model."""

    def __post_init__(self) -> None:
        if self.hidden_size % self.num_attention_heads:
            raise UsageError(
                f"model.hidden_size {self.hidden_size} must be a multiple of "
                f"model.num_attention_heads {self.num_attention_heads}"
            )
        if (self.load_from == "scratch") != (self.checkpoint_path is None):
            raise UsageError(
                f"model.load_from {self.load_from!r} and model.checkpoint_path {self.checkpoint_path} "
                "do not go together: a path belongs to 'checkpoint' and 'transformers', none to 'scratch'"
            )

    def check_trains_something(self, skip_sentence: str) -> None:
        """Raise a :class:`UsageError` if the masked LM and the field ``skip_sentence`` are both left out."""
        if self.skip_mlm and getattr(self, skip_sentence):
            raise UsageError(
                f"model.{skip_sentence} and model.skip_mlm together leave nothing to train; drop one"
            )


def layer_parameters(hidden_size: int, intermediate_size: int) -> int:
    """Return the parameters of one layer: attention, feed-forward, two layer norms, all with biases."""
    h, f = hidden_size, intermediate_size
    return 4 * (h * h + h) + (h * f + f) + (f * h + h) + 4 * h
