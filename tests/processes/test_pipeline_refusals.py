"""Refusals of pipeline() and step(): one line that names the value, the rule and the remedy, on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from pipeline_world import Made, Shared, Worker, run_worlds
from torch import Tensor, nn

from shoal.decide.partition import Memory
from shoal.errors import UsageError
from shoal.pipelining import pipeline


class Branching(nn.Module):
    """Cannot be exported: what it computes depends on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.first(x)
        if hidden.sum() > 0:
            hidden = hidden * 2
        return {"loss": self.second(hidden).square().mean()}


class Lossless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def make_models() -> Shared:
    return {"bert": Made("bert")}


def refusal(action: Callable[[], Any]) -> str:
    try:
        action()
    except UsageError as error:
        return str(error)
    return "nothing was refused"


def refusals(worker: Worker) -> dict[str, str]:
    made = worker.shared["bert"]
    rows = {"x": torch.randn(8, 4)}
    found = {
        "few micro-batches": refusal(
            lambda: pipeline(chain(), rows, microbatches=1, schedule="interleaved", virtual_stages=1)
        ),
        "no division": refusal(lambda: worker.pipeline(made, ranks=2, microbatches=3)),
        "no micro-batch": refusal(lambda: worker.pipeline(made, ranks=2, microbatches=0)),
        "unknown schedule": refusal(lambda: worker.pipeline(made, ranks=2, schedule="1f1c")),
        "too many stages": refusal(
            lambda: worker.pipeline(made, ranks=2, virtual=4096, schedule="interleaved")
        ),
        "memory": refusal(lambda: worker.pipeline(made, ranks=2, memory=Memory(limit_bytes=20_000))),
        "no export": refusal(lambda: pipeline(Branching(), rows, microbatches=4)),
        "two dimensions": refusal(lambda: pipeline(Branching(), rows, mesh=two_dimensions(worker))),
        "meta": refusal(lambda: pipeline(chain("meta"), rows, microbatches=4, schedule="gpipe")),
        "named twice": refusal(
            lambda: pipeline(chain(), rows, microbatches=4, modules=[["model"], ["model"]])
        ),
    }
    stage, batch = worker.pipeline(made, ranks=2)
    labels = batch["labels"]
    found["missing"] = refusal(lambda: stage.step(input_ids=batch["input_ids"], labels=labels))
    found["unknown"] = refusal(lambda: stage.step(**batch, position_ids=labels))
    found["shape"] = refusal(lambda: stage.step(**{**batch, "labels": labels[:, 1:]}))
    found["dtype"] = refusal(lambda: stage.evaluate(**{**batch, "labels": labels.int()}))
    found["loss after refusals"] = str(float(stage.step(**batch)) == float(stage.step(**batch)))
    stage.close()
    lossless = pipeline(Lossless(), rows, microbatches=4, schedule="gpipe")
    found["lossless"] = refusal_of_last(lossless, rows, worker)
    lossless.close()
    return found


def refusal_of_last(stage: Any, rows: dict[str, Tensor], worker: Worker) -> str:
    try:
        stage.step(**rows)
    except Exception as error:
        return str(error)
    return "nothing was refused"


def two_dimensions(worker: Worker) -> Any:
    return worker.mesh(2, 1)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        self.free = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": (self.free * self.model(x)).square().mean()}


def chain(device: str = "cpu") -> nn.Module:
    with torch.device(device):
        return Chain()


EXPECTED = {
    "few micro-batches": ["'interleaved' needs at least as many micro-batches as ranks", "1 for 2"],
    "no division": ["8 rows does not divide into 3 micro-batches", "multiple of 3"],
    "no micro-batch": ["microbatches is 0"],
    "unknown schedule": ["'1f1c'", "Did you mean '1f1b'?"],
    "too many stages": ["stages"],
    "memory": ["needs", "more on rank"],
    "no export": ["Branching cannot be exported at", "test_pipeline_refusals.py", "modules="],
    "two dimensions": ["mesh has 2 dimensions", "mesh['pp']"],
    "meta": ["cannot initialise 'free'", "initialise"],
    "named twice": ["module 'model' is named twice"],
    "missing": ["attention_mask missing", "example_inputs"],
    "unknown": ["position_ids unknown"],
    "shape": ["input 'labels' is int64[8, 11]", "int64[8, 12]"],
    "dtype": ["input 'labels' is int32"],
    "lossless": ["without a loss"],
    "loss after refusals": ["True"],
}


def test_refusals_name_value_rule_and_remedy_on_all_ranks(tmp_path: Path) -> None:
    ((first, second),) = run_worlds(tmp_path, make_models, [(2, refusals)])
    for case, words in EXPECTED.items():
        for found in (first, second):
            assert all(word in found[case] for word in words), (case, found[case])
            assert "\n" not in found[case]
