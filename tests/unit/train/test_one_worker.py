"""One worker has no buckets: its steps have the bits of DistributedDataParallel without its copies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from shoal.env.worker import alone
from shoal.optim.lamb import Lamb
from shoal.train.config import DistributedConfig, LoopConfig, RunOutputConfig, ServersConfig
from shoal.train.gradients import DataParallel, ManyWorkers, OneWorker
from shoal.train.model_setup import wrap_model
from shoal.train.run import Run, Sizes

NUM_LAYERS = 9


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(NUM_LAYERS))
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + nn.functional.dropout(layer(x).tanh(), 0.1)
        return self.norm(x)


def data() -> Tensor:
    return torch.randn(64, 6, generator=torch.Generator().manual_seed(4))


def opened(folder: Path, **sections: Any) -> Any:
    (folder / "meet").mkdir(parents=True)
    settings, loop = RunOutputConfig(log_frequency=1, save=False), LoopConfig(precision="fp32")
    return Run.open(folder / "run", settings=settings, loop=loop, worker=alone(folder / "meet"), **sections)


def trained(folder: Path, wrap: Callable[[Run, nn.Module], DataParallel]) -> tuple[dict[str, Tensor], int]:
    """Return weights and statistics after three steps of two micro-batches, and the copies of a step."""
    torch.manual_seed(2)
    net = Net()
    with opened(folder) as run:
        model = wrap(run, net)
        optimizer = Lamb(net.parameters(), lr=0.1)
        run.keep(model=net, optimizer=optimizer)
        for step in run.steps(data(), Sizes(global_batch_size=8, micro_batch_size=4), until=3):
            with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler, step:
                for points in step:
                    step.backward(model(points).square().sum() / step.num_samples)
                step.update(optimizer, max_norm=0.5)
        copies = sum(each.count for each in profiler.key_averages() if each.key == "aten::copy_")
        run.finish()
    return dict(net.state_dict()), copies


@pytest.mark.parametrize("average", [True, False], ids=["clip global", "clip per worker"])
def test_a_step_has_the_bits_of_buckets_and_not_their_copies(average: bool, tmp_path: Path) -> None:
    def wrapped(run: Run, net: nn.Module, *, buckets: bool) -> DataParallel:
        args = (net, run.world, DistributedConfig(), run.precision, run.timer.lap)
        model = wrap_model(*args, on_servers=buckets)
        assert isinstance(model, ManyWorkers if buckets else OneWorker)
        model.average = average
        run._training.models.append(model)
        return model

    found, copies = trained(tmp_path / "found", lambda run, net: wrapped(run, net, buckets=False))
    wanted, copied = trained(tmp_path / "wanted", lambda run, net: wrapped(run, net, buckets=True))
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert copied - copies >= (2 * NUM_LAYERS if average else 0)  # of each weight and bias


@pytest.mark.parametrize(
    ("sections", "kind"),
    [
        pytest.param({}, OneWorker, id="fp32"),
        pytest.param({"distributed": DistributedConfig(wire="bf16")}, ManyWorkers, id="bf16"),
        pytest.param({"distributed": DistributedConfig(wire="int8")}, ManyWorkers, id="int8"),
        pytest.param({"servers": ServersConfig(mode="local", local_steps=2)}, ManyWorkers, id="local steps"),
    ],
)
def test_what_takes_gradients_from_buckets_has_them(
    sections: dict[str, Any], kind: type, tmp_path: Path
) -> None:
    with opened(tmp_path, **sections) as run:
        assert isinstance(run.data_parallel(Net()), kind)


def test_a_step_without_its_last_micro_batch_is_refused_as_with_buckets(tmp_path: Path) -> None:
    net = Net()
    with opened(tmp_path) as run:
        model, optimizer = run.data_parallel(net), torch.optim.SGD(net.parameters(), lr=0.1)
        run.keep(model=net, optimizer=optimizer)
        with pytest.raises(Exception, match="go through all micro-batches"):
            for step in run.steps(data(), Sizes(global_batch_size=8, micro_batch_size=4), until=1):
                with step:
                    for points in step:
                        step.backward(model(points).square().sum() / step.num_samples)
                        break
                    step.update(optimizer)
