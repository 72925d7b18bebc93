"""Batch norms' statistics taken again: torch's cumulative average, and all else left as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from forked_workers import run_workers
from torch import Tensor, nn

from shoal.errors import UsageError
from shoal.train.weight_averaging import reestimate_norms


class Model(nn.Module):
    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4, momentum=momentum)
        self.dropout = nn.Dropout(0.0 if momentum is None else 0.5)
        self.last = nn.Conv2d(4, 2, 1)
        self.after = nn.BatchNorm2d(2, momentum=momentum)
        self.untracked = nn.BatchNorm2d(2, track_running_stats=False)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.dropout(torch.relu(self.norm(self.first(images))))
        out: Tensor = self.untracked(self.after(self.last(hidden)))
        return out


def batches(numbers: range) -> list[Tensor]:
    return [
        torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(n)) * (1 + n) + n for n in numbers
    ]


def assert_statistics(model: Model, expected: Model) -> None:
    for name, value in expected.named_buffers():
        if value.is_floating_point():
            torch.testing.assert_close(model.get_buffer(name), value, rtol=2e-6, atol=2e-6)
        else:
            assert torch.equal(model.get_buffer(name), value), name


def by_torch() -> Model:
    """The model after torch's own cumulative average over five batches."""
    model = Model(momentum=None).train()
    with torch.no_grad():
        for batch in batches(range(5)):
            model(batch)
    return model


def test_they_are_the_cumulative_average_and_nothing_else_changes() -> None:
    model = Model()
    model.norm.running_mean.fill_(7.0)  # of other weights
    model.train()
    model.dropout.eval()
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    assert reestimate_norms(model, batches(range(5)), model) == 5
    assert_statistics(model, by_torch())
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))
    assert (model.training, model.norm.training, model.dropout.training) == (True, True, False)
    assert (model.norm.momentum, model.after.momentum) == (0.1, 0.1)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_order_of_the_batches_does_not_count() -> None:
    model, backwards = Model(), Model()
    reestimate_norms(model, batches(range(5)), model)
    reestimate_norms(backwards, batches(range(5))[::-1], backwards)
    assert_statistics(model, backwards)


def test_a_failure_leaves_the_model_usable() -> None:
    model = Model().eval()
    with pytest.raises(RuntimeError):
        reestimate_norms(model, [torch.zeros(4, 5, 6, 6)], model)
    assert (model.norm.training, model.norm.momentum) == (False, 0.1)


def test_no_batch_and_no_norm() -> None:
    model = Model()
    with pytest.raises(UsageError, match="from 0 batches"):
        reestimate_norms(model, [], model)
    plain = nn.Conv2d(3, 4, 3)
    assert reestimate_norms(plain, batches(range(2)), plain) == 0


def share_the_batches(rank: int) -> None:
    """Two and three batches on two workers, and none on a third, are the five of one."""
    model = Model().eval()
    group = dist.new_group(backend="gloo")
    assert isinstance(group, dist.ProcessGroup)
    own = (range(2), range(2, 5), range(0))[rank]
    assert reestimate_norms(model, batches(own), model, group) == 5
    assert_statistics(model, by_torch())
    alone = Model().eval()
    reestimate_norms(alone, batches(range(5)), alone)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), alone.buffers(), strict=True))


def test_workers_share_the_batches(tmp_path: Path) -> None:
    assert run_workers(share_the_batches, 3, tmp_path / "meet") == [0] * 3
