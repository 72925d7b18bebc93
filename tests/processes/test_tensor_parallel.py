"""Causal models whose layers are divided over workers: losses, gradients and weights of one process."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_world import NUM_PARTS, Oracle, Worker, run_worlds, worst_gradient
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from shoal.errors import ShoalError
from shoal.models.causal import CausalLM, MeanLoss
from shoal.models.layers import blocks_of
from shoal.models.tensor_plan import divide_layers
from shoal.optim.moments import local_part
from shoal.pipelining import Pipeline, make_mesh, pipeline
from shoal.pipelining.init_meta import init_whole

ROWS, LENGTH, VOCAB, SEED = 8, 12, 61, 5
"""Rows of a replica."""
MOST = {torch.float32: (1e-6, 1e-5), torch.float64: (1e-12, 1e-12)}
"""Relative errors of the loss, and of gradients by the largest of their tensor."""
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2,
    "num_attention_heads": 12, "max_position_embeddings": LENGTH,
}  # fmt: skip
LLAMA = SIZES | {"num_key_value_heads": 12}
WINDOWED = ["sliding_attention", "full_attention"]
MODELS: dict[str, Any] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA)),
    "llama-tied": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=True)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, num_key_value_heads=6)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**LLAMA, head_dim=4)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**LLAMA, head_dim=4, query_pre_attn_scalar=4, sliding_window=4, layer_types=WINDOWED)
    ),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)),
}
Layout = tuple[int, int, bool, str]
"""Workers that divide a layer, stages, whether the others are shards, and the model."""
LAYOUTS: dict[int, list[Layout]] = {
    2: [(2, 1, False, name) for name in MODELS],
    3: [(3, 1, False, "llama"), (3, 1, False, "qwen2")],
    4: [(2, 2, False, "llama-tied"), (2, 2, False, "gpt_neox"), (2, 1, True, "qwen2")],
}


def divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if not number % each]


def all_layouts(num_workers: int, tensor: int) -> list[Layout]:
    """Return all layouts in which so many of the workers divide a layer, each for one of the models."""
    names = [name for name in MODELS if name != "qwen2" or not 6 % tensor]
    found: list[Layout] = []
    for stages in divisors(num_workers // tensor):
        for shard in (False, True) if num_workers > tensor * stages else (False,):
            found.append((tensor, stages, shard, names[len(found) % len(names)]))
    return found


MATRICES = ("proj.weight", "dense.weight", "h_to_4h.weight", "4h_to_h.weight", "query_key_value.weight")
"""Ends of the names of weights that each worker has a part of."""


def on_meta(name: str, dtype: torch.dtype) -> Any:
    """Return a model without weights."""
    with torch.device("meta"):
        weights: PreTrainedModel = MODELS[name]()
    return MeanLoss(CausalLM(weights.to(dtype))).train()


def batch(num_rows: int) -> dict[str, Tensor]:
    """Return rows of two documents, but for the first."""
    torch.manual_seed(7)
    ids, positions = torch.randint(VOCAB, (num_rows, LENGTH + 1)), torch.arange(LENGTH).repeat(num_rows, 1)
    labels = ids[:, 1:].clone()
    for row in range(1, num_rows):
        begin = 1 + (3 * row) % (LENGTH - 2)
        positions[row, begin:] -= begin
        labels[row, begin - 1] = -100
    inputs = {"input_ids": ids[:, :-1].contiguous(), "position_ids": positions, "labels": labels}
    return {**inputs, "dropout_keys": torch.arange(num_rows)}


def open_stages(worker: Worker, layout: Layout, dtype: torch.dtype) -> tuple[Pipeline, dict[str, Tensor]]:
    """Return this worker's part of a model, and its replica's rows."""
    tensor, stages, shard, name = layout
    replicas = worker.size // (tensor * stages)
    mesh = make_mesh("cpu", pipeline=stages, data=replicas, tensor=tensor)
    model, own = on_meta(name, dtype), mesh["dp"].get_local_rank()
    if tensor > 1:
        divide_layers(model.weights, mesh["tp"])
    rows = {n: v.chunk(replicas)[own] for n, v in batch(ROWS * replicas).items()}
    stage = pipeline(
        model, rows, mesh=mesh["pp"], data_parallel=mesh["dp"],
        tensor_parallel=mesh["tp"] if tensor > 1 else None, microbatches=NUM_PARTS, schedule="1f1b",
        whole=True, blocks=blocks_of(model.weights), shard=shard, seed=SEED, device="cpu",
    )  # fmt: skip
    return stage, rows


def train(layouts: list[Layout], dtypes: list[torch.dtype], worker: Worker) -> dict[str, Any]:
    """Train one step of each layout; return the errors by case."""
    found = {}
    for layout in layouts:
        tensor, stages, shard, name = layout
        replicas = worker.size // (tensor * stages)
        for dtype in dtypes:
            whole = on_meta(name, dtype)
            init_whole(whole, torch.device("cpu"), seed=SEED)
            oracle = Oracle(whole, batch(ROWS * replicas))
            stage, rows = open_stages(worker, layout, dtype)
            loss = float(stage.step(**rows))
            named = dict(stage.module.named_parameters())
            error, worst = worst_gradient(named, oracle.gradients)
            again = float(stage.evaluate(**rows).loss)
            parts = tensor * replicas if shard else tensor
            found[f"{name} {dtype} tensor={tensor} stages={stages} shard={shard}"] = {
                "loss": abs(loss - oracle.loss) / oracle.loss,
                "evaluation": abs(again - oracle.loss) / oracle.loss,
                "gradient": error,
                "name": worst,
                "whole": [
                    n
                    for n, p in named.items()
                    if n.endswith(MATRICES) and local_part(p).numel() * parts > 1.5 * p.numel()
                ],
            }
            stage.close()
    return found


@pytest.mark.parametrize("num_workers", LAYOUTS)
def test_losses_gradients_and_weights_are_those_of_one_process(num_workers: int, tmp_path: Path) -> None:
    """In fp64, which shows the least errors; slow tests have both types for all layouts."""
    assert_same(num_workers, LAYOUTS[num_workers], [torch.float64], tmp_path)


def test_fp32_has_its_rounding_and_no_more(tmp_path: Path) -> None:
    assert_same(2, LAYOUTS[2][:1], [torch.float32], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_workers", "tensor"), [(n, t) for n in range(2, 9) for t in divisors(n) if not 12 % t]
)
def test_every_division_of_the_workers(num_workers: int, tensor: int, tmp_path: Path) -> None:
    assert_same(num_workers, all_layouts(num_workers, tensor), [*MOST], tmp_path)


def assert_same(num_workers: int, layouts: list[Layout], dtypes: list[torch.dtype], folder: Path) -> None:
    (world,) = run_worlds(folder, partial(dict), [(num_workers, partial(train, layouts, dtypes))])
    for found in world:
        assert len(found) == len(dtypes) * len(layouts)
        for case, result in found.items():
            is_exact = "float64" in case and "gemma3" not in case  # whose norms are in fp32
            loss, gradient = MOST[torch.float64 if is_exact else torch.float32]
            assert result["loss"] <= loss and result["evaluation"] <= loss, (case, result)
            assert result["gradient"] <= gradient and not result["whole"], (case, result)


def train_until_lost(victim: int, worker: Worker) -> str:
    """Train until somebody is lost; the victim is killed in the middle of it."""
    stage, rows = open_stages(worker, (2, 2, False, "llama"), torch.float32)
    stage.step(**rows)
    if worker.rank == victim:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
    while True:
        try:
            stage.step(**rows)
        except ShoalError as error:
            return str(error)


@pytest.mark.slow
def test_a_killed_worker_is_named_by_its_part_and_stage(tmp_path: Path) -> None:
    (found,) = run_worlds(tmp_path, partial(dict), [(4, partial(train_until_lost, 3))], killed=[3])
    assert len(found) == 3
    for message in found:
        assert "another worker was lost: rank 3 (part 1 of stage 1) died" in message, found
