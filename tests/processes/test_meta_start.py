"""A model on the meta device: each worker allocates its part of it, and one tensor more at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_world import NUM_PARTS, Worker, run_worlds
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from shoal.decide.cost import Link, ModelCost, Unit
from shoal.models.causal import CausalLM, MeanLoss
from shoal.models.layers import blocks_of
from shoal.models.tensor_plan import divide_layers
from shoal.optim.moments import local_part
from shoal.pipelining import make_mesh, pipeline
from shoal.pipelining.export_graph import export_model
from shoal.pipelining.loss import micro_batches
from shoal.pipelining.units import units_of

ROWS, LENGTH = 4, 8
SIZES = LlamaConfig(
    vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
    num_key_value_heads=8, max_position_embeddings=LENGTH, pad_token_id=3,
)  # fmt: skip
MOST_BESIDE = 1 << 17
"""Bytes of small tensors: buffers, messages, indices."""
LAYOUTS: dict[int, list[tuple[int, int]]] = {2: [(1, 1), (1, 2)], 3: [(1, 1)], 4: [(2, 1), (2, 2)]}
"""By the number of workers: those that divide a layer, and stages; the others have shards."""


@contextmanager
def counted(folder: Path) -> Iterator[list[int]]:
    """Yield a list that gets the most bytes that tensors of the CPU took inside, above the beginning's."""
    most: list[int] = []
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        begin = torch.empty(1)
        yield most
    del begin
    found.export_chrome_trace(str(folder))
    events = [e for e in json.loads(folder.read_text())["traceEvents"] if e["name"] == "[memory]"]
    totals = [e["args"]["Total Allocated"] for e in sorted(events, key=lambda e: float(e["ts"]))]
    most.append(max(totals) - totals[0])


def equal_cost(model: Any, rows: dict[str, Tensor]) -> ModelCost:
    part = {name: value.to("meta") for name, value in micro_batches(rows, NUM_PARTS)[0].items()}
    units = units_of(export_model(model, part, True))
    return ModelCost(
        units=tuple(
            Unit(name=name, forward_s=1.0, backward_s=2.0, parameters=parameters)
            for name, parameters in zip(units.names, units.parameters, strict=True)
        ),
        relay_bytes=units.relay_bytes,
    )


def start(folder: Path, worker: Worker) -> list[dict[str, int]]:
    """Open each layout; return the bytes of a worker's part, of the largest tensor, and the most it took."""
    found = []
    for tensor, stages in LAYOUTS[worker.size]:
        mesh = make_mesh("cpu", pipeline=stages, data=worker.size // (tensor * stages), tensor=tensor)
        with torch.device("meta"):
            model = MeanLoss(CausalLM(LlamaForCausalLM(SIZES))).train()
        largest = max(parameter.nbytes for parameter in model.parameters())
        if tensor > 1:
            divide_layers(model.weights, mesh["tp"])
        ids = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH)
        rows = {"input_ids": ids, "position_ids": ids % LENGTH, "labels": ids, "dropout_keys": ids[:, 0]}
        cost = equal_cost(model, rows)
        with counted(folder / f"{worker.rank}.json") as most:
            stage = pipeline(
                model, rows, mesh=mesh["pp"], data_parallel=mesh["dp"],
                tensor_parallel=mesh["tp"] if tensor > 1 else None, microbatches=NUM_PARTS, schedule="1f1b",
                whole=True, blocks=blocks_of(model.weights), shard=True, cost=cost,
                link=Link(bytes_per_s=1e12), device="cpu",
            )  # fmt: skip
        part = sum(local_part(parameter).nbytes for parameter in stage.module.parameters())
        found.append({"part": part, "largest": largest, "most": most[0]})
        padding = dict(stage.module.named_parameters()).get("weights.model.embed_tokens.weight")
        if padding is not None:
            whole = padding.full_tensor() if hasattr(padding, "full_tensor") else padding
            assert not whole[3].any() and whole[2].all()
        stage.close()
    return found


@pytest.mark.parametrize("num_workers", [2, 4, pytest.param(3, marks=pytest.mark.slow)])
def test_a_worker_allocates_its_part_and_one_tensor(num_workers: int, tmp_path: Path) -> None:
    (world,) = run_worlds(tmp_path, partial(dict), [(num_workers, partial(start, tmp_path))])
    for found in world:
        for sizes in found:
            assert sizes["part"] <= sizes["most"] <= sizes["part"] + sizes["largest"] + MOST_BESIDE, sizes
