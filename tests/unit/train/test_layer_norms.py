"""Norms of gradients by layer, against autograd's own gradients of the whole batch."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.record import Step, read_record
from shoal.train.config import LoopConfig, RunOutputConfig, ServersConfig
from shoal.train.run import Run, Sizes
from shoal.train.step import before_clipping


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(3))
        self.head = nn.Linear(5, 1)
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x) * self.scale + self.frozen


DATA = torch.randn(32, 5, generator=torch.Generator().manual_seed(5))


def opened(directory: Path, **sections: object) -> object:
    settings = RunOutputConfig(layer_norms=True, log_frequency=2, save=False)
    return Run.open(directory, settings=settings, loop=LoopConfig(precision="fp32"), **sections)  # type: ignore[arg-type]


@pytest.mark.parametrize("max_norm", [None, 0.01])
def test_lines_have_the_norms_before_clipping(max_norm: float | None, tmp_path: Path) -> None:
    wanted: dict[int, dict[str, float]] = {}
    torch.manual_seed(2)
    with opened(tmp_path) as run:  # type: ignore[attr-defined]
        net = Net()
        model = run.data_parallel(net)
        optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
        run.keep(model=net, optimizer=optimizer)
        for step in run.steps(DATA, Sizes(global_batch_size=8, micro_batch_size=4), until=4):
            with step:
                rows = []
                for points in step:
                    rows.append(points)
                    step.backward(model(points).square().sum() / step.num_samples)
                parts = [*net.layers, net.head]
                batch = torch.cat(rows)
                loss = net(batch).square().sum() / len(batch)
                names = ["layers.0", "layers.1", "layers.2", "head", "scale"]
                tensors = [*(list(part.parameters()) for part in parts), [net.scale]]
                gradients = [torch.autograd.grad(loss, each, retain_graph=True) for each in tensors]
                wanted[step.number] = {
                    name: math.sqrt(sum(float(g.square().sum()) for g in each))
                    for name, each in zip(names, gradients, strict=True)
                }
                step.update(optimizer, max_norm=max_norm)
        run.finish()
    lines = [row for row in read_record(tmp_path) if isinstance(row, Step)]
    assert [row.step for row in lines] == [2, 4]
    for row in lines:
        assert row.layer_norms == pytest.approx(wanted[row.step], rel=1e-5)


def test_norms_that_are_not_finite_stay_as_they_are() -> None:
    assert before_clipping({"a": 3.0, "b": 4.0}, 10.0) == {"a": 6.0, "b": 8.0}
    assert before_clipping({"a": 0.0}, 0.0) == {"a": 0.0}
    assert before_clipping({"a": math.inf, "b": 4.0}, math.inf) == {"a": math.inf, "b": 4.0}
    assert before_clipping({}, 1.0) == {}


def test_servers_have_the_gradients(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"run\.layer_norms does not go with servers\.mode sync"):
        with opened(tmp_path, servers=ServersConfig(mode="sync")):  # type: ignore[attr-defined]
            pass
