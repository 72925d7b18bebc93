"""A model that one stage runs as it is computes what its exported graph computes, to the bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shoal.models.t5 import new_t5
from shoal.models.text_config import T5ModelConfig
from shoal.pipelining.random_streams import streams
from shoal.pipelining.stage import StageModule
from shoal.pipelining.stage_runner import StageRunner
from shoal.pipelining.stage_sources import Graph, Whole

CONFIG = T5ModelConfig(vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, dropout=0.2)


def new_model() -> Any:
    torch.manual_seed(3)
    return new_t5(CONFIG, pad_id=0, end_id=1)


def made_batch() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(4)
    return {
        "input_ids": torch.randint(2, 97, (4, 9), generator=random),
        "labels": torch.randint(2, 97, (4, 6), generator=random),
    }


def results(stage: StageModule, step: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of a step, and the gradient of each parameter by its canonical name."""
    runner = StageRunner(stage).train()
    runner.zero_grad()
    with streams(7, step, range(8, 12)):
        (loss,) = runner(**made_batch())
    loss.backward()
    names, gradients = stage.parameter_names, {}
    for own, parameter in stage.named_parameters(remove_duplicate=False):
        assert parameter.grad is not None
        gradients.setdefault(names[own], parameter.grad.clone())
    return loss.detach(), gradients


def test_a_whole_model_has_the_bits_of_its_graph_dropout_included() -> None:
    batch = made_batch()
    exported, itself = new_model(), new_model()
    (of_graph,) = Graph(exported, batch, batch).stages(())
    source = Whole(itself, batch)
    (as_it_is,) = source.stages(())
    assert as_it_is.weights is itself and source.cost(torch.device("cpu")).units[0].parameters
    losses = []
    for step in (0, 1):
        ours, theirs = results(as_it_is, step), results(of_graph, step)
        assert ours[0] == theirs[0] and list(ours[1]) == list(theirs[1])
        assert all(torch.equal(ours[1][name], theirs[1][name]) for name in theirs[1])
        losses.append(float(ours[0]))
    assert losses[0] != losses[1]
    with torch.no_grad():
        evaluated = [StageRunner(stage).eval() for stage in (as_it_is, of_graph)]
        assert len({float(runner(**batch)[0]) for runner in evaluated}) == 1
        assert [type(runner.outputs[0]).__name__ for runner in evaluated] == ["T5Output"] * 2


def test_a_whole_model_compiles_as_it_does_elsewhere() -> None:
    batch, compiled = made_batch(), new_model()
    stages = [Whole(model, batch).stages(())[0] for model in (new_model(), compiled)]
    compiled.compile(backend="eager", fullgraph=True)
    (loss, gradients), (expected, others) = results(stages[1], 3), results(stages[0], 3)
    assert loss == expected and all(torch.equal(gradients[name], others[name]) for name in others)
