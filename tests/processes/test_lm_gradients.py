"""Packed causal models in stages and shards: losses and gradients of transformers, a document at a time.

In fp64 they are compared with the unsplit model, since transformers computes its losses in fp32.
"""

from __future__ import annotations

import itertools
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_world import NUM_PARTS, Made, Oracle, Shared, Worker, run_worlds, worst_gradient
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from shoal.models.causal import CausalLM, MeanLoss
from shoal.models.layers import blocks_of
from shoal.pipelining import pipeline

ROWS, LENGTH, VOCAB = 8, 12, 61
MOST = {torch.float32: (1e-6, 1e-5), torch.float64: (1e-12, 1e-12)}
"""Relative errors of the loss, and of gradients by the largest of their tensor."""
LAYOUTS = ((1, 1, 2, True), (2, 1, 1, False), (2, 2, 2, False), (2, 1, 2, True), (4, 1, 2, True))
"""(ranks, stages per rank, replicas, shards)"""


OLDER, NEWER = ("gpt2", "llama"), ("qwen3", "gemma3")


def model_of(name: str) -> PreTrainedModel:
    if name == "gpt2":
        sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": LENGTH + 1}
        return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, **dict.fromkeys(OFF, 0.0)))
    sizes = {
        "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH + 1,
    }  # fmt: skip
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes))
    if name == "qwen3":
        return Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=16))
    windows = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2}
    return Gemma3ForCausalLM(Gemma3TextConfig(**sizes, head_dim=16, query_pre_attn_scalar=16, **windows))


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
    ("num_workers", "names"),
    [
        (2, OLDER),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((2, NEWER), *itertools.product((4, 8), (OLDER, NEWER)))
        ),
    ],
    ids=lambda each: each if isinstance(each, int) else ", ".join(each),
)
def test_losses_and_gradients_are_those_of_transformers(
    num_workers: int, names: tuple[str, ...], tmp_path: Path
) -> None:
    models = [(name, dtype) for name in names for dtype in MOST]
    (world,) = run_worlds(tmp_path, partial(make_models, models), [(num_workers, errors)])
    for found in world:
        assert found.keys() == world[0].keys() and found
        for case, (loss, gradient, name) in found.items():
            limits = MOST[torch.float64 if "float64" in case else torch.float32]
            assert loss <= limits[0] and gradient <= limits[1], (case, loss, gradient, name)


def by_blocks(worker: Worker) -> dict[str, Any]:
    """Train and evaluate in shards whose layers are gathered one at a time; return the errors by case.

    Beside them are the layers that were gathered while a layer ran, and the weights that stayed gathered.
    """
    found, mesh = {}, worker.mesh(1, worker.size)
    for name, dtype in itertools.product(("gpt2", "llama"), MOST):
        wanted = Oracle(*packed(name, dtype))
        for recomputes in (False, True):
            model: Any
            model, batch = packed(name, dtype)
            if recomputes:
                CausalLM(model.weights).recompute_activations()
            blocks, gathered = blocks_of(model.weights), []
            for number, block in enumerate(blocks):
                block.register_forward_hook(partial(note_gathered, gathered, blocks, number))
            rows = {n: v.chunk(worker.size)[worker.rank] for n, v in batch.items()}
            stage = pipeline(
                model, rows, mesh=mesh["pp"], data_parallel=mesh["dp"], microbatches=NUM_PARTS // worker.size,
                schedule="1f1b", whole=True, blocks=blocks, shard=True,
            )  # fmt: skip
            loss = float(stage.step(**rows))
            error, worst = worst_gradient(dict(stage.module.named_parameters()), wanted.gradients)
            left = [n for n, p in model.named_parameters() if not isinstance(p, DTensor)]
            again = float(stage.evaluate(**rows).loss)
            left += [n for n, p in model.named_parameters() if not isinstance(p, DTensor)]
            found[f"{name} {dtype} recomputes={recomputes}"] = {
                "loss": max(abs(loss - wanted.loss), abs(again - wanted.loss)) / wanted.loss,
                "gradient": error,
                "name": worst,
                "gathered": gathered,
                "left": left,
            }
            stage.close()
    return found


def note_gathered(
    gathered: list[Any], blocks: list[nn.Module], number: int, block: nn.Module, inputs: Any, output: Any
) -> None:
    """Append the number of a layer that has run, and those of all layers that are gathered."""
    whole = [k for k, each in enumerate(blocks) if not isinstance(next(each.parameters()), DTensor)]
    gathered.append((number, whole))


@pytest.mark.parametrize("num_workers", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_shards_gather_a_layer_at_a_time(num_workers: int, tmp_path: Path) -> None:
    """A backward pass that computes a layer again has gathered the next one too."""
    (world,) = run_worlds(tmp_path, partial(dict), [(num_workers, by_blocks)])
    for found in world:
        assert len(found) == 8
        for case, result in found.items():
            loss, gradient = MOST[torch.float64 if "float64" in case else torch.float32]
            assert result["loss"] <= loss and result["gradient"] <= gradient, (case, result)
            assert not result["left"], case
            most = 2 if "recomputes=True" in case else 1
            for number, whole in result["gathered"]:
                assert number in whole and len(whole) <= most, (case, result["gathered"])
            assert {number for number, _ in result["gathered"]} == set(range(4))
