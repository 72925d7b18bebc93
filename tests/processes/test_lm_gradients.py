"""Packed causal models in stages and shards: losses and gradients of transformers, a document at a time.

In fp64 they are compared with the unsplit model, since transformers computes its losses in fp32.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_world import Made, Shared, Worker, run_worlds, worst_gradient
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from shoal.models.causal import CausalLM, MeanLoss

ROWS, LENGTH, VOCAB = 8, 12, 61
MOST = {torch.float32: (1e-6, 1e-5), torch.float64: (1e-12, 1e-12)}
"""Relative errors of the loss, and of gradients by the largest of their tensor."""
LAYOUTS = ((1, 1, 2, True), (2, 1, 1, False), (2, 2, 2, False), (2, 1, 2, True), (4, 1, 2, True))
"""(ranks, stages per rank, replicas, shards)"""


def model_of(name: str) -> PreTrainedModel:
    if name == "gpt2":
        sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": LENGTH + 1}
        return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, **dict.fromkeys(OFF, 0.0)))
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    return LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=LENGTH + 1)
    )


OFF = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


def packed(name: str, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return a model and rows of documents, whose ends have no target; one row is a document of its own."""
    torch.manual_seed(7)
    model = MeanLoss(CausalLM(model_of(name).to(dtype))).train()
    ids = torch.randint(VOCAB, (ROWS, LENGTH + 1))
    positions = torch.arange(LENGTH).repeat(ROWS, 1)
    labels = ids[:, 1:].clone()
    for row in range(1, ROWS):
        begin = 1 + (3 * row) % (LENGTH - 2)
        positions[row, begin:] -= begin
        labels[row, begin - 1] = -100
    keys = torch.arange(ROWS)
    batch = {"input_ids": ids[:, :-1].contiguous(), "position_ids": positions, "labels": labels}
    return model, {**batch, "dropout_keys": keys}


def one_at_a_time(model: Any, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and the gradients of the documents alone, by transformers."""
    model.zero_grad()
    total, count = 0.0, int((batch["labels"] >= 0).sum())
    for ids, positions, labels in zip(
        *(batch[n] for n in ("input_ids", "position_ids", "labels")), strict=True
    ):
        row = torch.cat([ids, labels[-1:]])
        cuts = [*positions.eq(0).nonzero().flatten().tolist(), LENGTH + 1]
        for begin, end in pairwise(cuts):
            if end - begin > 1:
                document = row[None, begin:end]
                loss = model.weights(input_ids=document, labels=document).loss * (end - begin - 1) / count
                loss.backward()
                total += float(loss.detach())
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return total, gradients


def make_models(names: list[tuple[str, torch.dtype]]) -> Shared:
    return {f"{name} {dtype}": Made(partial(packed, name, dtype)) for name, dtype in names}


def errors(worker: Worker) -> dict[str, Any]:
    """Train one step in every layout of this world; return the errors by case."""
    found = {}
    for case, made in worker.shared.items():
        wanted, gradients = made.oracle().loss, made.oracle().gradients
        if "float32" in case:
            wanted, gradients = one_at_a_time(made.model, made.batch)
        for ranks, virtual, replicas, shard in LAYOUTS:
            if ranks * replicas == worker.size:
                schedule = "interleaved" if virtual > 1 else "1f1b"
                options = {"ranks": ranks, "virtual": virtual, "replicas": replicas, "shard": shard}
                stage, batch = worker.pipeline(made, schedule=schedule, **options)
                loss = float(stage.step(**batch))
                error, name = worst_gradient(dict(stage.module.named_parameters()), gradients)
                found[f"{case} {options}"] = (abs(loss - wanted) / wanted, error, name)
                stage.close()
    return found


@pytest.mark.parametrize(
    "num_workers", [2, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)]
)
def test_losses_and_gradients_are_those_of_transformers(num_workers: int, tmp_path: Path) -> None:
    names = [(name, dtype) for name in ("gpt2", "llama") for dtype in MOST]
    (world,) = run_worlds(tmp_path, partial(make_models, names), [(num_workers, errors)])
    for found in world:
        assert found.keys() == world[0].keys() and found
        for case, (loss, gradient, name) in found.items():
            limits = MOST[torch.float64 if "float64" in case else torch.float32]
            assert loss <= limits[0] and gradient <= limits[1], (case, loss, gradient, name)
