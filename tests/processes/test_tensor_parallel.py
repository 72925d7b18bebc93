"""Causal models whose layers are divided over workers: losses, gradients and weights of one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_world import NUM_PARTS, Oracle, Worker, run_worlds, worst_gradient
from torch import Tensor
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from shoal.models.causal import CausalLM, MeanLoss
from shoal.models.layers import blocks_of
from shoal.models.tensor_plan import divide_layers
from shoal.optim.moments import local_part
from shoal.pipelining import make_mesh, pipeline
from shoal.pipelining.init_meta import init_whole

ROWS, LENGTH, VOCAB, SEED = 8, 12, 61, 5
MOST = {torch.float32: (1e-6, 1e-5), torch.float64: (1e-12, 1e-12)}
"""Relative errors of the loss, and of gradients by the largest of their tensor."""
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2,
    "num_attention_heads": 12, "max_position_embeddings": LENGTH,
}  # fmt: skip
LLAMA = SIZES | {"num_key_value_heads": 12}
MODELS: dict[str, Any] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA)),
    "llama-tied": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, num_key_value_heads=6)),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)),
}
LAYOUTS = {
    2: [(2, False, name) for name in MODELS],
    3: [(3, False, "llama"), (3, False, "qwen2")],
    4: [(4, False, "llama-tied"), (2, False, "gpt_neox"), (2, True, "llama-tied"), (2, True, "qwen2")],
    6: [(6, False, "qwen2"), (3, True, "llama")],
    8: [(4, True, "llama"), (2, True, "llama-tied")],
}
"""Of a number of workers: those that divide a layer, whether the others are shards, and the model."""


MATRICES = ("proj.weight", "dense.weight", "h_to_4h.weight", "4h_to_h.weight", "query_key_value.weight")
"""Ends of the names of weights that each worker has a part of."""


def on_meta(name: str, dtype: torch.dtype) -> Any:
    """Return a model without weights."""
    with torch.device("meta"):
        weights: PreTrainedModel = MODELS[name]()
    return MeanLoss(CausalLM(weights.to(dtype))).train()


def batch() -> dict[str, Tensor]:
    """Return rows of two documents, but for the first."""
    torch.manual_seed(7)
    ids, positions = torch.randint(VOCAB, (ROWS, LENGTH + 1)), torch.arange(LENGTH).repeat(ROWS, 1)
    labels = ids[:, 1:].clone()
    for row in range(1, ROWS):
        begin = 1 + (3 * row) % (LENGTH - 2)
        positions[row, begin:] -= begin
        labels[row, begin - 1] = -100
    inputs = {"input_ids": ids[:, :-1].contiguous(), "position_ids": positions, "labels": labels}
    return {**inputs, "dropout_keys": torch.arange(ROWS)}


def train(worker: Worker) -> dict[str, Any]:
    """Train one step of each case of this world; return the errors by case."""
    found = {}
    for tensor, shard, name in LAYOUTS[worker.size]:
        replicas = worker.size // tensor
        mesh = make_mesh("cpu", pipeline=1, data=replicas, tensor=tensor)
        for dtype in MOST:
            whole = on_meta(name, dtype)
            init_whole(whole, torch.device("cpu"), seed=SEED)
            oracle = Oracle(whole, batch())
            model = on_meta(name, dtype)
            divide_layers(model.weights, mesh["tp"])
            rows = {n: v.chunk(replicas)[mesh["dp"].get_local_rank()] for n, v in batch().items()}
            stage = pipeline(
                model, rows, mesh=mesh["pp"], data_parallel=mesh["dp"], microbatches=NUM_PARTS // replicas,
                schedule="1f1b", whole=True, blocks=blocks_of(model.weights), shard=shard, seed=SEED,
                device="cpu",
            )  # fmt: skip
            loss = float(stage.step(**rows))
            named = dict(stage.module.named_parameters())
            error, worst = worst_gradient(named, oracle.gradients)
            again = float(stage.evaluate(**rows).loss)
            parts = tensor * replicas if shard else tensor
            found[f"{name} {dtype} tensor={tensor} shard={shard}"] = {
                "loss": abs(loss - oracle.loss) / oracle.loss,
                "evaluation": abs(again - oracle.loss) / oracle.loss,
                "gradient": error,
                "name": worst,
                "whole": [
                    n
                    for n, p in named.items()
                    if n.endswith(MATRICES) and local_part(p).numel() * parts > p.numel()
                ],
            }
            stage.close()
    return found


@pytest.mark.parametrize("num_workers", [2, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 6, 8))])
def test_losses_gradients_and_weights_are_those_of_one_process(num_workers: int, tmp_path: Path) -> None:
    (world,) = run_worlds(tmp_path, partial(dict), [(num_workers, train)])
    for found in world:
        assert len(found) == 2 * len(LAYOUTS[num_workers])
        for case, result in found.items():
            loss, gradient = MOST[torch.float64 if "float64" in case else torch.float32]
            assert result["loss"] <= loss and result["evaluation"] <= loss, (case, result)
            assert result["gradient"] <= gradient and not result["whole"], (case, result)
