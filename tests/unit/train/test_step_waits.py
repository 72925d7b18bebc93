"""Waits of a step for a GPU around forward and backward, with tensors of the CPU that stand for a GPU's."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.gpu.counts import counting
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from shoal import record
from shoal.env.worker import alone
from shoal.errors import ShoalError
from shoal.optim import kernel_optimizer, moments
from shoal.optim.lamb import Lamb
from shoal.optim.lans import Lans
from shoal.optim.lars import Lars
from shoal.optim.novograd import Novograd
from shoal.train.config import LoopConfig, RunOutputConfig
from shoal.train.gradients import LossScale
from shoal.train.run import Run, Sizes
from shoal.train.step import Readback


class Points:
    factor = 1.0

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((4,), self.factor * index)


MAX_NORM = 20.0


class Steps:
    """Trains a small model with a real Run, in which tensors of the CPU stand for a GPU's.

    Attributes:
        norms: of the steps whose norms are known at their ends.
        waits: of each step, those of reading an earlier step's figures not counted.
        behind: by how many steps each step's figures were read late.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(moments, "_is_flat", lambda tensor: False)  # the norm is torch's, as on a GPU
        self.folder, self.patch = folder, monkeypatch
        self.waits: list[dict[str, int]] = []
        self.norms: list[float] = []
        self.behind: list[int] = []

    def train(
        self, optimizer: Callable[[nn.Module], list[Optimizer]], name: str, *, on_device: bool, bad: int = 0,
        average: bool = True, dynamic: bool = False, num_steps: int = 6,
    ) -> tuple[dict[str, Tensor], list[record.Step], dict[Any, Any]]:  # fmt: skip
        """Return weights, rows and the optimizers' state; the gradient of step ``bad`` is not finite."""
        self._watch_reads()
        torch.manual_seed(0)
        net = nn.Linear(4, 1)
        settings = RunOutputConfig(dir=self.folder / name, log_frequency=3, save=False)
        loop = LoopConfig(precision="fp32", max_nonfinite_steps=3)
        (meeting := self.folder / f"meet-{name}").mkdir()
        worker = alone(meeting)
        with Run.open(settings.dir, settings=settings, loop=loop, worker=worker) as run:
            run._training.scale = LossScale(enabled=dynamic, growth_interval=2)
            run._training.update.on_device = on_device  # type: ignore[attr-defined]
            model = run.data_parallel(net, average=average)
            made = optimizer(net)
            run.keep(model=net, **{f"optimizer_{k}": each for k, each in enumerate(made)})
            for step in run.steps(Points(), Sizes(global_batch_size=8, micro_batch_size=4), until=num_steps):
                self.number = step.number
                with counting() as counts, step:
                    for points in step:
                        loss = model(points + 0.1 * step.number).square().sum() / step.num_samples
                        step.backward(loss * (math.inf if step.number == bad else 1.0))
                    step.update(*made, max_norm=MAX_NORM)
                self.waits.append(dict(counts.waits))
                if not step.is_unread:
                    self.norms.append(step.grad_norm)
        rows = [row for row in record.read_record(self.folder / name) if isinstance(row, record.Step)]
        states = {
            (k, p): state for k, each in enumerate(made) for p, state in each.state_dict()["state"].items()
        }
        return dict(net.named_parameters()), rows, states

    def _watch_reads(self) -> None:
        made: dict[int, int] = {}
        begin, read = Readback.__init__, Readback.read

        def watched_begin(one: Readback, *values: Tensor) -> None:
            made[id(one)] = self.number
            begin(one, *values)

        def watched_read(one: Readback) -> list[float]:
            self.behind.append(self.number - made.pop(id(one)))
            with torch._C.DisableTorchFunction(), _disable_current_modes():  # its event has passed
                return read(one)

        self.patch.setattr(Readback, "__init__", watched_begin)
        self.patch.setattr(Readback, "read", watched_read)


OPTIMIZERS: dict[str, Callable[[nn.Module], list[Optimizer]]] = {
    "adamw": lambda net: [torch.optim.AdamW(net.parameters(), lr=0.05, fused=True)],
    "sgd": lambda net: [torch.optim.SGD(net.parameters(), lr=0.002, momentum=0.9, nesterov=True, fused=True)],
    "plain sgd": lambda net: [torch.optim.SGD(net.parameters(), lr=0.002, fused=True)],
    "lamb": lambda net: [Lamb(net.parameters(), lr=0.1, implementation="foreach")],
    "lans": lambda net: [Lans(net.parameters(), lr=0.1, implementation="foreach")],
    "lars": lambda net: [Lars(net.parameters(), lr=0.1, implementation="foreach")],
    "novograd": lambda net: [Novograd(net.parameters(), lr=0.1, implementation="foreach")],
    "both": lambda net: [
        torch.optim.AdamW([net.get_parameter("weight")], lr=0.05, fused=True),
        torch.optim.SGD([net.get_parameter("bias")], lr=0.002, fused=True),
    ],
}


@pytest.mark.parametrize(
    ("name", "first", "later"),
    [("adamw", 0, 0), ("sgd", 2, 0), ("plain sgd", 0, 0), ("both", 0, 0), ("lamb", 2 + 2, 2)],
)
def test_waits_of_a_step_around_forward_and_backward(
    name: str, first: int, later: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Optimizers that skip on the device: none, and figures are read a step late. Others: norm and loss, one
    after the other, as LAMB where it has no kernel, which first reads the steps of states. SGD has no momenta
    in its first step."""
    steps = Steps(tmp_path, monkeypatch)
    steps.train(OPTIMIZERS[name], "run", on_device=True)
    found = [each.get("_local_scalar_dense", 0) for each in steps.waits]
    assert found[0] == first
    assert [found[k] for k in (1, 3, 4)] == [later] * 3, steps.waits  # after 2 and 5 a line is written
    assert all(set(each) <= {"_local_scalar_dense", "tolist", "cpu"} for each in steps.waits), steps.waits
    assert all(not steps.waits[k].keys() - {"_local_scalar_dense"} for k in (0, 1, 3, 4)), steps.waits
    if later == 0:  # late but before a line of the record
        assert steps.behind[-5:] == [1, 0, 1, 1, 0]


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("name", [*OPTIMIZERS])
@pytest.mark.parametrize("bad", [0, 1, 4])
def test_a_decision_on_the_device_has_the_bits_of_one_on_the_host(
    name: str, bad: int, average: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clipped, not clipped and skipped steps; the record has the same losses, norms and skipped steps."""
    monkeypatch.setattr(kernel_optimizer, "suits_kernel", lambda parameter: True)  # the kernels are of a GPU
    steps = Steps(tmp_path, monkeypatch)
    host, device = (
        steps.train(OPTIMIZERS[name], f"{on}", on_device=on, bad=bad, average=average) for on in (False, True)
    )
    assert all(torch.equal(host[0][key], device[0][key]) for key in host[0])
    assert all(torch.isfinite(weights).all() for weights in device[0].values())
    for key, state in host[2].items():
        assert all(
            torch.equal(value, device[2][key][part]) for part, value in state.items() if value is not None
        )
    for ours, theirs in zip(device[1], host[1], strict=True):
        same = ("step", "grad_norm", "weight_norm", "num_skipped")
        assert [getattr(ours, each) for each in same] == [getattr(theirs, each) for each in same]
        assert repr(ours.loss) == repr(theirs.loss)  # of a step that is skipped it is not finite
    assert sum(row.num_skipped for row in device[1]) == (bad > 0)
    assert max(norm for norm in steps.norms if math.isfinite(norm)) > 0.999 * MAX_NORM, steps.norms  # clipped


def test_a_loss_scale_that_adapts_is_decided_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps(tmp_path, monkeypatch)
    host, device = (
        steps.train(OPTIMIZERS["adamw"], f"{on}", on_device=on, bad=2, dynamic=True) for on in (False, True)
    )
    assert all(torch.equal(host[0][key], device[0][key]) for key in host[0])
    scales = [row.loss_scale for row in device[1]]
    assert scales == [row.loss_scale for row in host[1]] and scales[0] != scales[1]
    assert set(steps.behind) == {0}


def test_a_loss_that_stays_not_finite_ends_the_run_and_names_its_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device's figures come a step later; step and samples are those of the host's."""
    steps, told = Steps(tmp_path, monkeypatch), []
    monkeypatch.setattr(Points, "factor", math.nan)
    for on_device in (False, True):
        with pytest.raises(ShoalError, match="3 steps in a row, up to step 3; samples") as raised:
            steps.train(OPTIMIZERS["adamw"], f"{on_device}", on_device=on_device)
        told.append(str(raised.value))
        assert steps.number == (4 if on_device else 3)
    assert told[0] == told[1]
