"""Tiny configurations of the architectures and one batch of them, padded and packed."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AlbertConfig, BertConfig, DistilBertConfig, PretrainedConfig, RobertaConfig

from shoal.data.loader import Batch, as_tensors
from shoal.data.packing import pack_padded
from shoal.models.albert_prelayernorm import AlbertPreLayerNormConfig

VOCAB, HIDDEN, LONGEST = 97, 32, 20
LENGTHS = (13, LONGEST, 9, 17)
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 28,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def tiny_config(model_type: str, **changes: object) -> PretrainedConfig:
    """Return a configuration without dropout."""
    if model_type == "bert":
        return BertConfig(**{**SIZES, **changes})
    if model_type == "albert":
        sizes = {**SIZES, "embedding_size": 16, "classifier_dropout_prob": 0.0}
        return AlbertConfig(**{**sizes, **changes})
    if model_type == "albert-prelayernorm":
        sizes = {**SIZES, "embedding_size": 16, "classifier_dropout_prob": 0.0}
        return AlbertPreLayerNormConfig(**{**sizes, **changes})
    if model_type == "roberta":
        return RobertaConfig(**{**SIZES, "type_vocab_size": 1, "pad_token_id": 1, **changes})
    sizes = {"vocab_size": VOCAB, "dim": HIDDEN, "n_layers": 3, "n_heads": 4, "hidden_dim": 48}
    dropouts = dict.fromkeys(("dropout", "attention_dropout", "qa_dropout", "seq_classif_dropout"), 0.0)
    return DistilBertConfig(**{**sizes, "max_position_embeddings": 28, **dropouts, **changes})


def padded_batch(lengths: tuple[int, ...] = LENGTHS, *, seed: int = 7) -> dict[str, Tensor]:
    """Return random sequences with the names that transformers' models take; padding has id 1."""
    random = torch.Generator().manual_seed(seed)
    size = (len(lengths), max(lengths))
    mask = torch.arange(size[1]) < torch.tensor(lengths)[:, None]
    return {
        "input_ids": torch.randint(5, VOCAB, size, generator=random).masked_fill(~mask, 1),
        "token_type_ids": (torch.arange(size[1]) > 6).long().expand(size).contiguous(),
        "attention_mask": mask.long(),
    }


def packed(batch: dict[str, Tensor]) -> Batch:
    """Return the same sequences packed."""
    names = ("input_ids", "token_type_ids", "attention_mask")
    return as_tensors(pack_padded(*(batch[name].numpy() for name in names)), pin_memory=False)


def inputs_of(model_type: str, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return what of ``batch`` that architecture of transformers takes."""
    leaves_out = {"roberta", "distilbert"}
    return {n: t for n, t in batch.items() if n != "token_type_ids" or model_type not in leaves_out}


def relative_errors(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> dict[str, float]:
    """Largest difference over the largest entry, a tensor.

    The gradient of a key's bias is zero in theory and noise in practice: where theirs is noise beside the
    largest of all gradients, ours must be too.
    """
    noise = 1e-12 * max(grad.abs().max().item() for grad in theirs.values())
    errors = {}
    for name, grad in theirs.items():
        scale, error = grad.abs().max().item(), (ours[name] - grad).abs().max().item()
        errors[name] = error / scale if scale > noise else float(error > noise)
    return errors


def grads_of(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
