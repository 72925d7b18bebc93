"""The weights of BERT-base, by the parts of a forward pass."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from transformers import BertConfig, BertForPreTraining


@dataclass
class Part:
    """The shapes of a part's own weights, and the multiplications that it does for a token."""

    shapes: list[tuple[int, ...]] = field(default_factory=list)
    work: int = 0


def parts_of_bert(num_layers: int) -> list[Part]:
    """Return the embeddings, the layers, and pooler with heads, in the order of the forward pass."""
    with torch.device("meta"):
        model = BertForPreTraining(BertConfig(num_hidden_layers=num_layers))
    parts = [Part() for _ in range(num_layers + 2)]
    for name, parameter in model.named_parameters():
        words = name.split(".")
        where = 0 if "embeddings" in words else int(words[3]) + 1 if "layer" in words else num_layers + 1
        parts[where].shapes.append(tuple(parameter.shape))
        if where and parameter.dim() > 1:
            parts[where].work += parameter.numel()
    # the head multiplies by the word embeddings too, whose gradient is complete with the embeddings' only
    parts[-1].work += math.prod(model.bert.embeddings.word_embeddings.weight.shape)
    return parts


def bytes_of(parts: list[Part]) -> int:
    """Return the bytes of all weights in float32."""
    return 4 * sum(math.prod(shape) for part in parts for shape in part.shapes)
