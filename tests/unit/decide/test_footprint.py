"""The memory estimate against what a real step of this model keeps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shoal.data.loader import as_tensors
from shoal.data.packing import pack
from shoal.decide.footprint import footprint, optimizer_state_bytes, transformer_activations
from shoal.models.pretraining import AlbertPretraining
from shoal.models.text_config import AlbertModelConfig

CONFIG = AlbertModelConfig(
    vocab_size=1_000,
    hidden_size=128,
    num_hidden_layers=4,
    num_attention_heads=2,
    intermediate_size=512,
    max_position_embeddings=64,
    classifier_dropout_prob=0.0,
)
BATCH, LENGTH, PREDICTIONS = 8, 64, 10


def saved_bytes(config: AlbertModelConfig) -> int:
    """Return the bytes of distinct tensors that autograd keeps in a real forward pass, weights left out."""
    model = AlbertPretraining(config)
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def pack_tensor(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    ids = torch.randint(5, 1_000, (BATCH * LENGTH,))
    packed = pack(ids.numpy(), torch.zeros_like(ids).numpy(), np.full(BATCH, LENGTH))
    rows = (torch.arange(BATCH)[:, None] * LENGTH + torch.arange(1, PREDICTIONS + 1)).flatten()
    with torch.autograd.graph.saved_tensors_hooks(pack_tensor, lambda tensor: tensor):
        sums = model(
            **as_tensors(packed, pin_memory=False),
            masked_rows=rows,
            masked_ids=ids[rows],
            labels=torch.zeros(BATCH, dtype=torch.long),
        )
    del sums
    return sum(kept.values())


@pytest.mark.parametrize("layers", [4, 8])
def test_activations_within_a_third_of_what_autograd_keeps(layers: int) -> None:
    from dataclasses import replace

    config = replace(CONFIG, num_hidden_layers=layers)
    estimate = transformer_activations(
        micro_batch_size=BATCH,
        sequence_length=LENGTH,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=layers,
        num_logits=BATCH * PREDICTIONS * config.vocab_size,
        activation_bytes=4,
        activation_checkpointing=False,
    )
    assert estimate == pytest.approx(saved_bytes(config), rel=1 / 3)


def test_the_sum_and_what_checkpointing_saves() -> None:
    settings = {
        "micro_batch_size": 2,
        "sequence_length": 8,
        "hidden_size": 4,
        "intermediate_size": 16,
        "num_layers": 3,
        "num_logits": 10,
        "activation_bytes": 2,
    }
    full = transformer_activations(**settings, activation_checkpointing=False)
    layer = 2 * 8 * (9 * 4 + 2 * 16) * 2
    assert full == 3 * layer + 80
    for optimizer, state in (("adamw", 8_000), ("sgd", 4_000), ("adafactor", 40)):
        found = footprint(1_000, state_bytes=optimizer_state_bytes(optimizer), activations_bytes=full)
        assert (found.optimizer_bytes, found.total_bytes) == (state, 8_000 + state + full)
    slim = transformer_activations(**settings, activation_checkpointing=True)
    assert slim == layer + 3 * 2 * 8 * 4 * 2 + 80
