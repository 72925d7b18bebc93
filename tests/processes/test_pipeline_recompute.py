"""Stages that compute layers again in the backward pass have the bits of stages that keep activations."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
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


Cases = list[tuple[str, str]]
"""Models and layouts."""
ALL: dict[int, Cases] = {
    size: [(name, layout) for name in ("gpt2", "t5") for layout in layouts]
    for size, layouts in LAYOUTS.items()
}
QUICK: dict[int, Cases] = {
    2: [("gpt2", "1f1b"), ("t5", "interleaved"), ("gpt2", "shards"), ("t5", "bf16")],
    3: [("t5", "gpipe"), ("gpt2", "interleaved")],
}
"""Each layout with one of the models."""


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


def differing(cases: Cases, worker: Worker) -> dict[str, tuple[int, int, int]]:
    """Return how many tensors differ, of how many, and how many stages have no layers to compute again."""
    found = {}
    for name, layout in cases:
        made, options = worker.shared[name], LAYOUTS[worker.size][layout]
        made.model.gradient_checkpointing_disable()
        kept, none = steps(worker, made, options)
        assert none == 0
        made.model.gradient_checkpointing_enable()
        again, num_stages = steps(worker, made, options)
        pairs = zip(kept, again, strict=True)
        different = sum(not torch.equal(one, other) for one, other in pairs)
        found[f"{name} {layout}"] = different, len(kept), options.get("virtual", 1) - num_stages
    return found


@pytest.mark.parametrize(
    "cases", [pytest.param(QUICK, id="quick"), pytest.param(ALL, id="all", marks=pytest.mark.slow)]
)
def test_all_bits_are_those_of_kept_activations(cases: dict[int, Cases], tmp_path: Path) -> None:
    worlds = [(size, partial(differing, each)) for size, each in cases.items()]
    for world in run_worlds(tmp_path, make_models, worlds):
        for found in world:
            assert all(each[0] == 0 and each[1] > 4 and each[2] == 0 for each in found.values()), found
