"""``auto_layout``: workers agree on a layout that fits their memory, and train in it as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_world import Made, Shared, Worker, run_worlds, worst_gradient

from shoal.decide.partition import Memory
from shoal.errors import UsageError
from shoal.pipelining import auto_layout, pipeline

EXACT = 1e-6


def make_models() -> Shared:
    return {"gpt2": Made("gpt2")}


def trained(made: Made, memory: Memory) -> dict[str, Any]:
    """Train a step in the chosen layout; return it, and how far loss and gradients are from one process."""
    oracle = made.oracle()
    torch.manual_seed(0)
    layout = auto_layout(made.model, made.batch, memory=memory)
    stage = pipeline(made.model, layout.part(made.batch), **layout.options)
    loss = float(stage.step(**layout.part(made.batch)))
    stage.close()
    error, _ = worst_gradient(dict(stage.module.named_parameters()), oracle.gradients)
    return {
        "layout": [layout.mesh["pp"].size(), layout.mesh["dp"].size()],
        "loss": abs(loss - oracle.loss) / oracle.loss,
        "gradient": error,
        "text": layout.text,
    }


def in_memories(worker: Worker) -> list[Any]:
    """With less memory than one device needs, and with next to none."""
    made = worker.shared["gpt2"]
    state = 4 * sum(p.nbytes for p in made.model.parameters())
    less = trained(made, Memory(limit_bytes=state * 9 // 10))
    try:
        auto_layout(made.model, made.batch, memory=Memory(limit_bytes=1_000))
    except UsageError as error:
        return [less, str(error)]
    return [less, "fits"]


@pytest.mark.slow
def test_memory_decides_and_the_gradients_stay(tmp_path: Path) -> None:
    ((first, second),) = run_worlds(tmp_path, make_models, [(2, in_memories)])
    for less, refusal in (first, second):
        assert less["layout"] == [2, 1] and "GPT2LMHeadModel on 2 workers" in less["text"]
        assert max(less["loss"], less["gradient"]) <= EXACT
        assert "no layout of 2 devices" in refusal and "lacks" in refusal
