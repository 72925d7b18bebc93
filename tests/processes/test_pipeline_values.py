"""Sends complex tensors, masks, lists, dicts and ``None`` between pipeline stages, beside activations.

A stage that computes nothing in evaluation sends what it received.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline_world import Made, Shared, Worker, run_worlds, worst_gradient
from torch import Tensor, nn

from shoal.pipelining.units import units_of

ROWS, LENGTH, WIDTH, LAYERS = 8, 6, 8, 4


class Layer(nn.Module):
    """Takes what decoders pass to their layers; ``bias`` is ``None`` in the even ones."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(
        self, hidden: Tensor, freqs_cis: Tensor, *, mask: Tensor, bias: Tensor | None, state: dict[str, Any]
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        turned = torch.view_as_complex(hidden.unflatten(-1, (-1, 2)).contiguous()) * freqs_cis
        hidden = self.linear(torch.view_as_real(turned).flatten(-2)).masked_fill(~mask[..., None], 0)
        hidden = hidden if bias is None else hidden + bias
        positions = state["positions"] + mask.to(torch.int32)
        seen = [*state["seen"], hidden.square().mean((-1, -2))]
        return torch.tanh(hidden), turned.conj() / 2, {"positions": positions, "seen": seen, "cache": None}


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.phase = nn.Parameter(torch.rand(LENGTH, WIDTH // 2))
        self.bias = nn.Parameter(torch.randn(WIDTH))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        mask = input_ids > 2
        state: dict[str, Any] = {"positions": torch.zeros_like(input_ids, dtype=torch.int32), "seen": []}
        hidden, freqs_cis = self.embedding(input_ids), torch.polar(torch.ones_like(self.phase), self.phase)
        for number, layer in enumerate(self.layers):
            bias = self.bias if number % 2 else None
            hidden, freqs_cis, state = layer(hidden, freqs_cis, mask=mask, bias=bias, state=state)
        scores = hidden @ self.embedding.weight.T + freqs_cis.abs().sum(-1, keepdim=True)
        scores = (
            scores * (1 + state["positions"][..., None]) + torch.stack(state["seen"]).sum(0)[:, None, None]
        )
        return {"loss": nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())}


def a_decoder() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(1)
    ids = torch.randint(0, 20, (2, ROWS, LENGTH))
    return Decoder(), {"input_ids": ids[0], "labels": ids[1]}


def make_models() -> Shared:
    return {"decoder": Made(a_decoder)}


def make_gpt2() -> Shared:
    return {"gpt2": Made("gpt2", dropout=0.1)}


def scores(worker: Worker) -> list[float]:
    """Return the loss in evaluation of the whole model, then of stages of which one is dropout alone."""
    made = worker.shared["gpt2"]
    made.model.eval()
    with torch.no_grad():
        found = [float(made.model(**made.batch).loss)]
    made.model.train()
    units = units_of(made.exported[True])
    drop = units.names.index("transformer.drop")
    for replicas in (1, 2):
        stage, batch = worker.pipeline(
            made,
            ranks=2 // replicas,
            virtual=4 // (2 // replicas),
            replicas=replicas,
            schedule="interleaved",
            cuts=[drop, drop + 1, len(units) // 2],
            shard=replicas > 1,
        )
        found.append(float(stage.evaluate(**batch).loss))
        stage.close()
    return found


def errors(worker: Worker) -> dict[str, float]:
    made = worker.shared["decoder"]
    oracle = made.oracle()
    found = {}
    for schedule, virtual in (("1f1b", 1), ("gpipe", 1), ("interleaved", 2)):
        stage, batch = worker.pipeline(made, ranks=2, virtual=virtual, schedule=schedule)
        loss = float(stage.step(**batch))
        error, _ = worst_gradient(dict(stage.module.named_parameters()), oracle.gradients)
        found[schedule] = max(error, abs(loss - oracle.loss) / abs(oracle.loss))
        stage.close()
    return found


def test_gradients_are_those_of_one_process(tmp_path: Path) -> None:
    (world,) = run_worlds(tmp_path, make_models, [(2, errors)])
    for found in world:
        assert set(found) == {"1f1b", "gpipe", "interleaved"} and max(found.values()) < 1e-5, found


def test_a_stage_of_dropout_alone_evaluates(tmp_path: Path) -> None:
    (world,) = run_worlds(tmp_path, make_gpt2, [(2, scores)])
    for whole, *others in world:
        assert others == pytest.approx([whole] * 2, rel=1e-6)
