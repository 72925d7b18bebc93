"""With dropout on, workers and micro-batches give the gradient of the one big batch, model by model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import padded_batch, tiny_config
from torch import Tensor, nn
from transformers import AutoModelForQuestionAnswering, AutoModelForSequenceClassification

from shoal.data.loader import as_tensors
from shoal.data.packing import pack_padded
from shoal.decide.order import micro_batches, worker_part
from shoal.decide.rng import dropout_keys
from shoal.models.layers import MODEL_TYPES
from shoal.models.pretraining import AlbertPretraining, BertPretraining, Pretraining
from shoal.models.t5 import T5, new_t5
from shoal.models.tasks import QuestionAnswering, SequenceClassification, label_loss, span_loss
from shoal.models.text_config import AlbertModelConfig, BertModelConfig, T5ModelConfig

GLOBAL_BATCH = 24
LAYOUTS = [(1, 24), (1, 3), (2, 4), (3, 2), (4, 6)]  # workers, micro-batch
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 24,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.2,
}
Loss = Callable[[Sequence[int], Tensor], Tensor]  # of samples with their dropout keys: a sum over them


def gradient(model: nn.Module, loss: Loss, num_workers: int, micro_batch_size: int, seed: int = 5) -> Tensor:
    """Return the summed gradient of the global batch as this many workers compute it."""
    keys = torch.from_numpy(dropout_keys(seed, 2, np.arange(GLOBAL_BATCH)))
    model.zero_grad()
    for rank in range(num_workers):
        for cut in micro_batches(worker_part(GLOBAL_BATCH, rank, num_workers), micro_batch_size):
            loss(list(cut), keys[cut.start : cut.stop]).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def check(model: nn.Module, loss: Loss) -> None:
    expected = gradient(model, loss, 1, GLOBAL_BATCH)
    other = gradient(model, loss, 1, GLOBAL_BATCH, seed=6)
    assert (other - expected).abs().max() > 1e-3  # something is dropped
    for num_workers, micro_batch_size in LAYOUTS:
        found = gradient(model, loss, num_workers, micro_batch_size)
        assert (found - expected).abs().max() <= 1e-6 * expected.abs().max(), (num_workers, micro_batch_size)


def packed_samples() -> Callable[[Sequence[int]], dict[str, Any]]:
    """Return a function from samples of mixed lengths to their packed batch."""
    lengths = np.random.default_rng(1).integers(6, 21, GLOBAL_BATCH)
    padded = padded_batch(tuple(int(length) for length in lengths))

    def packed(samples: Sequence[int]) -> dict[str, Any]:
        arrays = (padded[n][samples].numpy() for n in ("input_ids", "token_type_ids", "attention_mask"))
        return as_tensors(pack_padded(*arrays), pin_memory=False)

    return packed


def pretraining_loss(model: Pretraining) -> Loss:
    packed = packed_samples()

    def loss(samples: Sequence[int], keys: Tensor) -> Tensor:
        batch = packed(samples)
        masked = torch.cat([batch["cu_seqlens"][:-1] + 1, batch["cu_seqlens"][:-1] + 4]).long()
        labels = torch.tensor(samples) % 2
        sums = model(
            **batch,
            masked_rows=masked,
            masked_ids=batch["input_ids"][masked],
            labels=labels,
            dropout_keys=keys,
        )
        total: Tensor = sums[0] + sums[2]
        return total

    return loss


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", ["albert", "bert", "albert, pre-norm"])
def test_pretraining(name: str, checkpointing: bool) -> None:
    torch.manual_seed(1)
    model: Pretraining
    if name == "bert":
        model = BertPretraining(BertModelConfig(**SIZES, activation_checkpointing=checkpointing))
    else:
        config = AlbertModelConfig(**SIZES, embedding_size=16, activation_checkpointing=checkpointing)
        model = AlbertPretraining(replace(config, pre_layer_norm=name != "albert"))
    model = model.double().train()
    check(model, pretraining_loss(model))


DROPOUTS = {
    "distilbert": ("dropout", "attention_dropout", "qa_dropout", "seq_classif_dropout"),
    "albert": ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout_prob"),
    "albert-prelayernorm": ("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout_prob"),
}


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("task", ["question answering", "classification"])
def test_tasks(model_type: str, task: str) -> None:
    torch.manual_seed(1)
    names = DROPOUTS.get(model_type, ("hidden_dropout_prob", "attention_probs_dropout_prob"))
    config, packed = tiny_config(model_type, **dict.fromkeys(names, 0.2), num_labels=2), packed_samples()
    if task == "classification":
        classifier = SequenceClassification(AutoModelForSequenceClassification.from_config(config))
        classifier = classifier.double().train()

        def label(samples: Sequence[int], keys: Tensor) -> Tensor:
            return label_loss(classifier(**packed(samples), dropout_keys=keys), torch.tensor(samples) % 2)

        check(classifier, label)
        return
    reader = QuestionAnswering(AutoModelForQuestionAnswering.from_config(config)).double().train()

    def span(samples: Sequence[int], keys: Tensor) -> Tensor:
        batch, place = packed(samples), torch.tensor(samples) % 5
        return span_loss(*reader(**batch, dropout_keys=keys), batch, place, place)

    check(reader, span)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_t5(checkpointing: bool) -> None:
    torch.manual_seed(1)
    config = T5ModelConfig(vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout=0.2)
    model: T5 = new_t5(config, pad_id=0, end_id=1).double().train()
    if checkpointing:
        model.recompute_activations()
    padded = padded_batch(tuple(range(5, 5 + GLOBAL_BATCH)))
    labels = torch.randint(2, 97, (GLOBAL_BATCH, 4))

    def loss(samples: Sequence[int], keys: Tensor) -> Tensor:
        mask = padded["attention_mask"][samples]
        width = int(mask.sum(1).max())  # padding differs between micro-batches
        ids = padded["input_ids"][samples][:, :width]
        out = model(ids, labels[samples], mask[:, :width], dropout_keys=keys)
        return out.loss * len(samples)

    check(model, loss)


def test_without_keys_torchs_generator_decides() -> None:
    torch.manual_seed(1)
    model = BertPretraining(BertModelConfig(**SIZES)).train()
    batch = packed_samples()([0, 1, 2])
    targets = {
        "masked_rows": torch.tensor([1]),
        "masked_ids": torch.tensor([7]),
        "labels": torch.ones(3).long(),
    }
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(model(**batch, **targets)[0].item())
    assert found[0] == found[1] != found[2]
