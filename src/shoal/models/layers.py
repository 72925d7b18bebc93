"""Maps the layers of BERT, RoBERTa, ALBERT and DistilBERT to one structure.

transformers' modules hold the weights under transformers' names, so that weights load in both directions. The
four architectures compute the same from parts with other names; :class:`TransformerLayer` holds the parts.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import NewGELUActivation

from shoal.dropout import SampleDropout, dropout
from shoal.models.albert_prelayernorm import MODEL_TYPE

MODEL_TYPES = ("bert", "albert", MODEL_TYPE, "roberta", "distilbert")
"""``model_type`` in transformers of the supported architectures."""
ALBERTS = ("albert", MODEL_TYPE)
"""Those of ALBERT, post-norm and pre-norm."""


@dataclass(frozen=True, kw_only=True)
class TransformerLayer:
    """The parts of a transformer layer in the order of use of a post-norm one."""

    query: nn.Linear
    key: nn.Linear
    value: nn.Linear
    dense: nn.Linear
    attention_norm: nn.LayerNorm
    up: nn.Linear
    activation: nn.Module
    down: nn.Linear
    output_norm: nn.LayerNorm
    num_heads: int
    attention_dropout: float
    """Of attention weights."""
    dense_dropout: float
    """Of the attention block's output."""
    output_dropout: float
    """Of the feed-forward block's output."""


_BERT, _ALBERT, _DISTILBERT = range(3)
_PARTS = {
    "query": ("attention.self.query", "attention.query", "attention.q_lin"),
    "key": ("attention.self.key", "attention.key", "attention.k_lin"),
    "value": ("attention.self.value", "attention.value", "attention.v_lin"),
    "dense": ("attention.output.dense", "attention.dense", "attention.out_lin"),
    "attention_norm": ("attention.output.LayerNorm", "attention.LayerNorm", "sa_layer_norm"),
    "up": ("intermediate.dense", "ffn", "ffn.lin1"),
    "activation": ("intermediate.intermediate_act_fn", "activation", "ffn.activation"),
    "down": ("output.dense", "ffn_output", "ffn.lin2"),
    "output_norm": ("output.LayerNorm", "full_layer_layer_norm", "output_layer_norm"),
    "num_heads": ("attention.self.num_attention_heads", "attention.num_attention_heads", "attention.n_heads"),
    "attention_dropout": ("attention.self.dropout.p", "attention.attention_dropout.p", "attention.dropout.p"),
    "dense_dropout": ("attention.output.dropout.p", "attention.output_dropout.p", None),
    "output_dropout": ("output.dropout.p", None, "ffn.dropout.p"),  # ALBERT has a module and does not call it
}
"""Place of each part in a layer of BERT or RoBERTa, of ALBERT, and of DistilBERT; none: no dropout there."""


def layers_of(base: PreTrainedModel) -> list[TransformerLayer]:
    """Return the layers of a base model (``BertModel`` …) in the order of use, shared ones repeatedly."""
    if base.config.model_type == "distilbert":
        return [_layer(layer, _DISTILBERT) for layer in base.transformer.layer]
    if base.config.model_type not in ALBERTS:
        return [_layer(layer, _BERT) for layer in base.encoder.layer]
    groups = base.encoder.albert_layer_groups
    views = [[_layer(layer, _ALBERT) for layer in group.albert_layers] for group in groups]
    count = base.config.num_hidden_layers
    # as transformers divides, rounding included
    return [layer for number in range(count) for layer in views[int(number / (count / len(views)))]]


def _layer(layer: nn.Module, architecture: int) -> TransformerLayer:
    places = {part: of_all[architecture] for part, of_all in _PARTS.items()}
    parts: dict[str, Any] = {
        part: 0.0 if path is None else attrgetter(path)(layer) for part, path in places.items()
    }
    return TransformerLayer(**{**parts, "activation": fused_activation(parts["activation"])})


def final_norm_of(base: PreTrainedModel) -> nn.LayerNorm | None:
    """Return the norm behind the last layer of a pre-norm model; none of a post-norm one."""
    norm: nn.LayerNorm | None = base.encoder.final_norm if base.config.model_type == MODEL_TYPE else None
    return norm


def embedding_dropout(base: PreTrainedModel) -> float:
    """Return the probability of dropping an element of the embeddings."""
    config = base.config
    return float(config.dropout if config.model_type == "distilbert" else config.hidden_dropout_prob)


def embed(
    base: PreTrainedModel,
    input_ids: Tensor,
    token_type_ids: Tensor,
    position_ids: Tensor,
    keys: Tensor | None = None,
) -> Tensor:
    """Return the input of the first layer, ``[T, hidden]``, from ``[T]`` token ids, segments and positions.

    Args:
        keys: int64 ``[T]`` to drop by, in training.
    """
    config, arguments = base.config, {}
    if config.model_type == "roberta":  # positions are counted from behind the padding's row
        position_ids = position_ids + (base.embeddings.padding_idx + 1)
    if config.model_type != "distilbert":
        if config.type_vocab_size == 1:  # RoBERTa separates segments by special tokens alone
            token_type_ids = torch.zeros_like(token_type_ids)
        arguments["token_type_ids"] = token_type_ids[None]
    hidden: Tensor = base.embeddings(input_ids[None], position_ids=position_ids[None], **arguments)[0]
    if keys is not None:
        hidden = dropout(hidden, keys, embedding_dropout(base))
    if config.model_type in ALBERTS:
        hidden = base.encoder.embedding_hidden_mapping_in(hidden)
    return hidden


def fused_activation(module: Callable[[Tensor], Tensor]) -> nn.Module:
    """Return the same function as one torch operation where there is one.

    transformers computes ``gelu_new`` by seven elementwise operations; torch's tanh-GELU is the same.
    """
    if isinstance(module, NewGELUActivation):
        return nn.GELU(approximate="tanh")
    assert isinstance(module, nn.Module)
    return module


def fuse_activations(model: nn.Module) -> None:
    """Replace all activation functions inside a model as :func:`fused_activation` does."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, NewGELUActivation):
                setattr(module, name, fused_activation(child))


def blocks_of(model: PreTrainedModel) -> list[nn.Module]:
    """Return the layers of a model of transformers that run one after the other, each in one call."""
    names = model._no_split_modules or ()
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList)]
    return [layer for each in lists for layer in each if type(layer).__name__ in names]


def recompute_layers(model: PreTrainedModel, current: Callable[[], SampleDropout | None]) -> None:
    """Recompute the layers of a model of transformers in the backward pass, with the forward pass's dropout.

    Args:
        current: returns the dropout of the forward pass; none: torch's own.
    """

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        own = current()
        return (nullcontext(), nullcontext()) if own is None else own.recomputation()

    # Older versions of transformers have one of these names, newer ones warn of it.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False, "context_fn": contexts})
