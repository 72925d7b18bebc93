"""Steps that a run traces: those that were asked for, in one file, of the first worker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from shoal.train.config import RunOutputConfig
from shoal.train.run import Run, Sizes

ROWS = [(torch.randn(4), torch.randn(2)) for _ in range(32)]


def train(directory: Path, until: int, profile: int) -> None:
    settings = RunOutputConfig(profile=profile, checkpoint_frequency=100)
    with Run.open(directory, settings=settings) as run:
        model = run.data_parallel(nn.Linear(4, 2))
        optimizer = torch.optim.AdamW(model.parameters())
        run.keep(model=model.module, optimizer=optimizer)
        for step in run.steps(ROWS, Sizes(global_batch_size=8), until=until):
            with step:
                for inputs, targets in step:
                    step.backward((model(inputs) - targets).square().sum() / step.num_samples)
                step.update(optimizer)
        run.finish()


def updates_in(file: Path) -> int:
    events = json.loads(file.read_text())["traceEvents"]
    return sum(event.get("name") == "Optimizer.step#AdamW.step" for event in events)


@pytest.mark.parametrize("num_steps", [1, 2])
def test_the_steps_that_were_asked_for_are_traced(num_steps: int, tmp_path: Path) -> None:
    train(tmp_path / "run", 6, num_steps)
    (file,) = (tmp_path / "run").glob("profile-*")
    assert file.name == f"profile-steps-3-{2 + num_steps}.json"
    assert updates_in(file) == num_steps


def test_a_run_that_continues_traces_its_own_steps(tmp_path: Path) -> None:
    train(tmp_path / "run", 2, 1)
    assert not list((tmp_path / "run").glob("profile-*"))
    train(tmp_path / "run", 6, 1)
    assert [file.name for file in (tmp_path / "run").glob("profile-*")] == ["profile-steps-5-5.json"]


def test_no_steps_are_traced_by_default(tmp_path: Path) -> None:
    train(tmp_path / "run", 4, 0)
    assert not list((tmp_path / "run").glob("profile-*"))
