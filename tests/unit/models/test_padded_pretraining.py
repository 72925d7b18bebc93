"""Padded batches of one shape, as stages take them: losses, gradients and dropout of packed batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import grads_of, relative_errors
from torch import Tensor

from shoal.data.loader import as_tensors
from shoal.data.text.examples import ExampleConfig, ExampleReader
from shoal.data.text.padded_examples import PaddedExamples
from shoal.data.text.shards import TextShards
from shoal.models.padded_pretraining import PaddedPretraining
from shoal.models.pretraining import PRETRAINING_INPUTS, Pretraining, new_encoder
from shoal.models.text_config import AlbertModelConfig, BertModelConfig
from synthetic_text import prepare, random_documents

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
}


def sums_of(model: Pretraining, batch: dict[str, Any]) -> Tensor:
    return torch.stack([each.double() for each in model(**{n: batch[n] for n in PRETRAINING_INPUTS})])


@pytest.mark.parametrize(
    "config",
    [AlbertModelConfig(**SIZES, embedding_size=16), BertModelConfig(**SIZES, family="distilbert")],
    ids=["albert", "distilbert"],
)
def test_padding_changes_nothing(config: AlbertModelConfig | BertModelConfig, tmp_path: Path) -> None:
    prepare(tmp_path, {"train": random_documents([90, 200, 60, 300], vocab_size=128)}, vocab_size=128)
    settings = ExampleConfig(max_seq_length=32, max_predictions_per_seq=5, short_seq_prob=0.5)
    reader = ExampleReader(TextShards(tmp_path, "train"), settings)
    arrays = reader.batch(0, range(6))
    packed = as_tensors(reader.micro_batch(arrays), pin_memory=False)
    padded = as_tensors(PaddedExamples(reader).micro_batch(arrays), pin_memory=False)
    assert packed["max_seqlen"] * 6 > len(packed["input_ids"]), "nothing is padded"
    assert all(len(set(row)) == len(row) for row in padded["wanted"].tolist()), "a row is read twice"

    torch.manual_seed(1)
    model = new_encoder(config).double()
    sums = sums_of(model, packed)
    per_target = torch.tensor(6 / len(packed["masked_ids"]), dtype=torch.float64)
    (sums[0] * per_target / 6 + sums[2] / 6).backward()
    wanted = grads_of(model)
    model.zero_grad()
    found = PaddedPretraining(model)(**padded, samples_per_target=per_target)
    found["loss"].backward()
    torch.testing.assert_close(found["sums"], sums.detach(), rtol=1e-10, atol=0)
    errors = relative_errors(grads_of(model), wanted)
    assert max(errors.values()) < 1e-10, errors

    # a row without weight changes nothing but what the loss is divided by
    padded["weights"][0] = 0
    padded["masked_weights"][0] = 0
    rest = as_tensors(reader.micro_batch({n: a[1:] for n, a in arrays.items()}), pin_memory=False)
    others = sums_of(model, rest)
    found = PaddedPretraining(model)(**padded, samples_per_target=per_target)
    torch.testing.assert_close(found["sums"], others.detach(), rtol=1e-10, atol=0)
