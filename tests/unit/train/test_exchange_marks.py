"""Marks of gradient exchanges, which a step sets and reads of shards wait for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.data import precedence
from shoal.data.precedence import ExchangeMark
from shoal.env.worker import alone
from shoal.train.config import DistributedConfig, LoopConfig, RunOutputConfig
from shoal.train.gradients import ManyWorkers
from shoal.train.run import Run, Sizes


@pytest.mark.parametrize(
    ("average", "on_servers", "marked"),
    [
        (True, False, ["forward", "forward", "bucket*", "step"]),
        (False, False, ["forward", "forward", "step*"]),  # the update averages
        (True, True, ["forward", "forward", "bucket*", "step*"]),  # the update waits for weights
    ],
    ids=["backward", "update", "servers"],
)
def test_marks_of_a_step(
    average: bool, on_servers: bool, marked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two micro-batches, of which the last one averages; the names have * where an exchange is marked."""
    own, seen = ExchangeMark(), []
    monkeypatch.setattr(precedence, "OWN", own)

    def see(name: str) -> None:
        seen.append(name + ("*" if own._began_ns else ""))

    (tmp_path / "meet").mkdir()
    net = nn.Linear(4, 1)
    settings, loop = RunOutputConfig(log_frequency=1, save=False), LoopConfig(precision="fp32")
    distributed = DistributedConfig(wire="bf16")  # with buckets
    with Run.open(
        tmp_path / "run",
        settings=settings,
        loop=loop,
        distributed=distributed,
        worker=alone(tmp_path / "meet"),
    ) as run:
        model = run.data_parallel(net, average=average)
        assert isinstance(model, ManyWorkers) and not own._began_ns
        hook = model.hook

        def watched(group: Any, bucket: Any) -> Any:
            see("bucket")
            return hook(group, bucket)

        model.hook = watched
        net.register_forward_hook(lambda *_: see("forward"))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: see("step"))
        run.keep(model=net, optimizer=optimizer)
        monkeypatch.setattr(run._training.update, "on_servers", on_servers)
        data = torch.ones(16, 4)
        for step in run.steps(data, Sizes(global_batch_size=8, micro_batch_size=4), until=2):
            seen.clear()
            with step:
                for points in step:
                    loss: Tensor = model(points).square().sum()
                    step.backward(loss / step.num_samples)
                step.update(optimizer)
            assert seen == marked
            assert not own._began_ns
        run.finish()
