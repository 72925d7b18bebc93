"""Stages that compute layers again in the backward pass have the bits of stages that keep activations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from pipeline_world import Made, Shared, Worker, run_worlds
from torch import Tensor

from shoal.pipelining.recompute import SegmentedRun

LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "1f1b": {"ranks": 2},
        "interleaved": {"ranks": 2, "virtual": 2, "schedule": "interleaved"},
        "shards": {"ranks": 1, "virtual": 2, "schedule": "interleaved", "replicas": 2, "shard": True},
        "bf16": {"ranks": 2, "autocast": torch.bfloat16},
    },
    3: {
        "gpipe": {"ranks": 3, "schedule": "gpipe"},
        "interleaved": {"ranks": 3, "virtual": 2, "schedule": "interleaved"},
    },
}


def make_models() -> Shared:
    return {name: Made(name, dropout=0.2) for name in ("gpt2", "t5")}


def steps(worker: Worker, made: Made, layout: dict[str, Any]) -> tuple[list[Tensor], int]:
    """Return losses and gradients of two steps, and the number of stages with layers to compute again."""
    stage, batch = worker.pipeline(made, seed=7, **layout)
    values = []
    for _ in range(2):
        values.append(stage.step(**batch))
        values += [p.grad.clone() for p in stage.module.parameters() if p.grad is not None]
    stage.close()
    return [getattr(each, "to_local", each.clone)() for each in values], sum(
        isinstance(part.body.run, SegmentedRun) for part in stage.stages
    )


def differing(worker: Worker) -> dict[str, tuple[int, int, int]]:
    """Return how many tensors differ, of how many, and how many stages have no layers to compute again."""
    found = {}
    for name, made in worker.shared.items():
        for layout, options in LAYOUTS[worker.size].items():
            made.model.gradient_checkpointing_disable()
            kept, none = steps(worker, made, options)
            assert none == 0
            made.model.gradient_checkpointing_enable()
            again, num_stages = steps(worker, made, options)
            pairs = zip(kept, again, strict=True)
            different = sum(not torch.equal(one, other) for one, other in pairs)
            found[f"{name} {layout}"] = different, len(kept), options.get("virtual", 1) - num_stages
    return found


def test_all_bits_are_those_of_kept_activations(tmp_path: Path) -> None:
    for world in run_worlds(tmp_path, make_models, [(2, differing), (3, differing)]):
        for found in world:
            assert all(each[0] == 0 and each[1] > 4 and each[2] == 0 for each in found.values()), found
