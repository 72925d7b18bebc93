"""Mistakes of a script on Run are refused in its first step, in one line that says how to mend them."""

from __future__ import annotations

import math
import threading
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import SGD, AdamW
from torch.utils.data import DataLoader, TensorDataset

from shoal import record
from shoal.data.sources import digest_of_rows
from shoal.env.worker import alone
from shoal.errors import RetryStep, ShoalError, UsageError
from shoal.train.config import DistributedConfig, LoopConfig, RunOutputConfig, ServersConfig
from shoal.train.run import Run, Sizes
from shoal.train.step import Step

ROWS = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
DATASET = TensorDataset(ROWS, ROWS.sum(dim=1, keepdim=True))


class Script:
    """A user's script of two steps; each test changes a part of it.

    Attributes:
        net: two layers, each of which has an optimizer.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
        self.sgd = SGD(self.net[0].parameters(), lr=0.1, momentum=0.9)
        self.adamw = AdamW(self.net[1].parameters(), lr=0.01)
        self.both = {"model": self.net, "sgd": self.sgd, "adamw": self.adamw}
        self.data: Any = DATASET
        self.wrap: Callable[[Run], nn.Module] = lambda run: run.data_parallel(self.net)
        self.keep: Callable[[Run], object] = lambda run: run.keep(**self.both)
        self.forward: Callable[[nn.Module, Tensor], Tensor] = lambda ddp, rows: ddp(rows)
        self.backward: Callable[[Step, Tensor], object] = lambda step, loss: step.backward(loss)
        self.update: Callable[[Step], object] = lambda step: step.update(self.sgd, self.adamw)
        self.loop = LoopConfig(precision="fp32", max_nonfinite_steps=2)
        self.distributed = DistributedConfig(device="cpu")
        self.servers = ServersConfig()
        self.checkpoint_frequency = 1

    def run(self, until: int = 2) -> list[record.Row]:
        """Run it on one worker and return its record."""
        settings = RunOutputConfig(log_frequency=1, checkpoint_frequency=self.checkpoint_frequency)
        (meeting := self.folder / "meeting").mkdir()
        with Run.open(
            self.folder / "run", settings=settings, loop=self.loop, distributed=self.distributed,
            servers=self.servers, worker=alone(meeting),
        ) as run:  # fmt: skip
            ddp = self.wrap(run)
            self.keep(run)
            for step in run.steps(self.data, Sizes(global_batch_size=8, micro_batch_size=4), until=until):
                with step:
                    for rows, sums in step:
                        loss = (self.forward(ddp, rows) - sums).square().sum() / step.num_samples
                        self.backward(step, loss)
                    self.update(step)
            run.finish()
        return record.read_record(self.folder / "run")


@pytest.fixture
def script(tmp_path: Path) -> Script:
    return Script(tmp_path)


def test_several_optimizers_update_as_one(script: Script, tmp_path: Path) -> None:
    """Weights and states have the bits of a plain loop, in which both clip together and both step."""
    (alike := tmp_path / "alike").mkdir()
    other, rows_of_steps = Script(alike), []
    script.update = lambda step: step.update(script.sgd, script.adamw, max_norm=0.5)
    script.forward = lambda ddp, rows: (rows_of_steps.append(rows), ddp(rows))[1]
    lines = [row for row in script.run(until=3) if isinstance(row, record.Step)]
    norms = []
    for number in range(3):
        for rows in rows_of_steps[2 * number : 2 * number + 2]:
            ((other.net(rows) - rows.sum(dim=1, keepdim=True)).square().sum() / 8).backward()
        norms.append(float(nn.utils.clip_grad_norm_(other.net.parameters(), 0.5)))
        for optimizer in (other.sgd, other.adamw):
            optimizer.step()
            optimizer.zero_grad()
    assert [line.grad_norm for line in lines] == pytest.approx(norms, rel=1e-6)
    for ours, theirs in zip(script.net.parameters(), other.net.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    assert lines[0].metrics == {"learning_rate_sgd": 0.1, "learning_rate_adamw": 0.01}


def test_a_norm_that_is_not_finite_skips_all_optimizers(script: Script) -> None:
    """The gradient of the first layer alone overflows; fp16's scale falls, and no optimizer steps."""
    script.loop = LoopConfig(precision="fp16")
    before = [p.detach().clone() for p in script.net.parameters()]
    script.net[0].weight.register_hook(lambda grad: grad * math.inf)
    lines = [row for row in script.run(until=2) if isinstance(row, record.Step)]
    assert [line.num_skipped for line in lines] == [1, 1]
    assert [line.loss_scale for line in lines] == [32_768.0, 16_384.0]
    assert all(map(torch.equal, before, script.net.parameters()))
    assert not script.sgd.state and not script.adamw.state


def test_an_optimizer_that_is_left_out_leaves_no_gradients(script: Script) -> None:
    script.update = lambda step: step.update(script.sgd)
    script.run()
    assert all(p.grad is None for p in script.net.parameters())


def test_a_step_of_shards_that_is_repeated_leaves_no_gradients(tmp_path: Path) -> None:
    """FSDP2 has no wrapper of Run; its weights are those of a run without the failure."""
    weights = []
    for name, failures in (("whole", []), ("repeated", [1, 2])):
        (folder := tmp_path / name).mkdir()
        script = Script(folder)

        def shard(run: Run, script: Script = script) -> nn.Module:
            net = fully_shard(script.net, mesh=init_device_mesh("cpu", (1,)))
            script.sgd = SGD(net.parameters(), lr=0.1)
            script.both = {"model": net, "optimizer": script.sgd}
            return net

        def update(step: Step, script: Script = script, failures: list[int] = failures) -> None:
            if step.number in failures:
                failures.remove(step.number)
                raise RetryStep("again")
            step.update(script.sgd)

        script.wrap, script.update = shard, update
        weights.append([row.weight_norm for row in script.run() if isinstance(row, record.Step)])
    assert len(weights[0]) == 2 and weights[0] == weights[1]


def test_scores_may_be_tensors_and_numbers_of_numpy(script: Script) -> None:
    scores = {"loss": torch.tensor(0.5, requires_grad=True), "f1": torch.tensor([0.25]), "em": np.float32(1)}

    def evaluate(run: Run) -> None:
        run.keep(**script.both)
        script.update = lambda step: (
            step.update(script.sgd, script.adamw),
            run.evaluation("held out", scores, num_samples=4),
        )

    script.keep = evaluate
    (row, _) = [row for row in script.run() if isinstance(row, record.Evaluation)]
    assert row.metrics == {"loss": 0.5, "f1": 0.25, "em": 1.0}


def call_twice(script: Script) -> None:
    script.update = lambda step: (step.update(script.sgd), step.update(script.adamw))


def give_a_list(script: Script) -> None:
    script.update = lambda step: step.update([script.sgd, script.adamw])  # type: ignore[arg-type]


def give_nothing(script: Script) -> None:
    script.update = lambda step: step.update()


def share_weights(script: Script) -> None:
    script.adamw.add_param_group({"params": [script.net[0].weight]})


def keep_nothing(script: Script) -> None:
    script.keep = lambda run: None


def keep_no_weights(script: Script) -> None:
    script.keep = lambda run: run.keep(epoch=3)


def keep_one_optimizer(script: Script) -> None:
    script.keep = lambda run: run.keep(model=script.net, sgd=script.sgd)


def keep_later(script: Script) -> None:
    script.keep = lambda run: (run.keep(model=script.net), run.keep(sgd=script.sgd, adamw=script.adamw))


def leave_backward_out(script: Script) -> None:
    script.backward = lambda step, loss: None


def call_torch(script: Script) -> None:
    script.backward = lambda step, loss: loss.backward()  # type: ignore[no-untyped-call]


def pass_by_the_wrapper(script: Script) -> None:
    script.forward = lambda ddp, rows: script.net(rows)


def score_many(script: Script) -> None:
    script.keep = lambda run: run.evaluation("held out", {"recall": torch.ones(3)}, num_samples=3)


def batch_by_three(script: Script) -> None:
    script.data = DataLoader(DATASET, batch_size=3)


def iterate_over_rows(script: Script) -> None:
    script.data = DataLoader(TensorDataset(torch.randn(32, 6), torch.arange(32)), batch_size=None)


def wrap_twice(script: Script) -> None:
    script.keep = lambda run: run.data_parallel(run.data_parallel(nn.Linear(2, 2)))


def wrap_what_is_frozen(script: Script) -> None:
    script.keep = lambda run: run.data_parallel(nn.Linear(2, 2).requires_grad_(False))


def wrap_shards(script: Script) -> None:
    def keep(run: Run) -> None:
        run.data_parallel(fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1,))))

    script.keep = keep


def use_mpi(script: Script) -> None:
    script.distributed = DistributedConfig(device="cpu", backend="mpi")


def serve_two(script: Script) -> None:
    script.distributed = DistributedConfig(device="cpu", backend="shoal")
    script.servers = ServersConfig(mode="sync")


def go_ahead_with_two(script: Script) -> None:
    script.distributed = DistributedConfig(device="cpu", backend="shoal")
    script.servers = ServersConfig(mode="bounded", staleness=1)


def step_locally_with_two(script: Script) -> None:
    script.distributed = DistributedConfig(device="cpu", backend="shoal")
    script.servers = ServersConfig(mode="local", local_steps=2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (call_twice, r"step 1 has a second step\.update\(\): give all optimizers to one call"),
        (give_a_list, r"step\.update\(\) was given list: give it optimizers, one by one"),
        (give_nothing, r"step\.update\(\) was given nothing"),
        (share_weights, "step 1: .* optimizers with the same parameters"),
        (keep_nothing, r"checkpoints would be empty: call run\.keep\(model=model, optimizer=optimizer\)"),
        (keep_no_weights, "checkpoints would be empty"),
        (keep_one_optimizer, r"step 1: .* optimizer whose state is not in checkpoints: .* run\.keep"),
        (keep_later, r"run\.keep\(\) was called before without adamw, sgd"),
        (leave_backward_out, r"step 1: it has no backward pass: call step\.backward\(loss\)"),
        (call_torch, r"step 1: its gradients are those of loss\.backward\(\): call step\.backward"),
        (pass_by_the_wrapper, r"step 1: gradients were not averaged .* ddp\(inputs\) instead of model"),
        (score_many, r"run\.evaluation: the score 'recall' is a Tensor of shape \[3\]"),
        (batch_by_three, "first micro-batch of the data has 3 rows, and the run's micro_batch_size is 4:"),
        (iterate_over_rows, r"has 6 rows, .* DataLoader\(\.\.\., batch_size=4\) does, .*checked=False"),
        (wrap_twice, "DistributedDataParallel has wrapped already"),
        (wrap_what_is_frozen, "a Linear without parameters that require gradients"),
        (wrap_shards, r"parameters are sharded \(DTensor\): FSDP2"),
        (use_mpi, r"distributed\.backend 'mpi': torch .* is built without it; it has .*gloo"),
        (serve_two, r"servers\.mode sync is for one optimizer, .* keeps sgd, adamw: leave it out"),
        (go_ahead_with_two, r"servers\.mode bounded is for one optimizer"),
        (step_locally_with_two, r"servers\.mode local is for one optimizer"),
    ],
)  # fmt: skip
def test_what_cannot_be_right_is_refused(
    script: Script, change: Callable[[Script], None], message: str
) -> None:
    change(script)
    with pytest.raises(UsageError, match=message) as raised:
        script.run()
    assert "\n" not in str(raised.value)
    assert not dist.is_initialized()


def batch_of_images(size: int) -> Any:
    return [torch.zeros(3, 5 + k, 7) for k in range(size)], [
        {"boxes": torch.zeros(k, 4)} for k in range(size)
    ]


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(8, 3),
        (torch.zeros(8, 3), torch.zeros(8)),
        {"ids": torch.zeros(8, 128), "more": {"mask": torch.zeros(8, 128)}, "count": 3},
        UserDict(ids=torch.zeros(8, 128)),
        batch_of_images(8),
        list(zip(*batch_of_images(8), strict=True)),
        ["a text"] * 8,
        np.zeros((8, 2)),
        {"graph": object(), "count": 3},
        (torch.zeros(8, 3), torch.tensor(0.5)),
        torch.eye(8).to_sparse(),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)] * 4, layout=torch.jagged),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_batches_of_many_forms_have_the_right_size(batch: Any) -> None:
    digest_of_rows([batch], 8)


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        (torch.zeros(7, 3), "7 rows"),
        ({"ids": torch.zeros(7, 128), "labels": torch.zeros(7)}, "7 rows"),
        ({"ids": torch.zeros(128), "label": torch.tensor(1)}, "128 rows"),
        ((torch.tensor(0.5), torch.tensor(1)), "no rows"),
        ({"text": "a text", "label": 1}, "no rows"),
        (batch_of_images(7), "3 or "),
    ],
)
def test_batches_of_another_size_and_single_rows_are_refused(batch: Any, found: str) -> None:
    with pytest.raises(UsageError, match=rf"first micro-batch of the data has .*{found}.*, and the run's"):
        digest_of_rows([batch, torch.zeros(8)], 8)
    digest_of_rows([batch], None)


def test_a_digest_is_of_all_rows_that_differ() -> None:
    """Values of one kind say nothing: toy data may be the same on all workers."""
    rows = torch.arange(6.0).view(3, 2)
    digests = [
        digest_of_rows(batches, 3)
        for batches in (
            [rows],
            [rows, rows],
            [rows.T.reshape(3, 2)],
            [{"x": rows.bfloat16()}],
            [["a", "b", "c"]],
        )
    ]
    assert len(set(digests)) == 5 and 0 not in digests
    assert digest_of_rows([[rows, torch.ones(3)]], 3) == digests[0]
    assert digest_of_rows([torch.ones(3, 2), torch.zeros(3).bool(), torch.zeros(3, 0)], 3) == 0


def test_a_save_that_fails_ends_the_run_at_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at the next save, which may be hours later."""
    script, steps = Script(tmp_path), []

    def full(*args: object) -> None:
        raise ShoalError("cannot write: No space left on device")

    def forward(ddp: nn.Module, rows: Tensor) -> Tensor:
        steps.append(len(steps))
        for thread in threading.enumerate():
            if thread.name == "checkpoint":
                thread.join()
        return ddp(rows)

    monkeypatch.setattr("shoal.train.checkpoint.write_file", full)
    script.forward, script.checkpoint_frequency = forward, 4
    with pytest.raises(ShoalError, match="No space left on device"):
        script.run(until=12)
    assert len(steps) in (2 * 4, 2 * 5), "the step of the save, if it has failed by then, or the next"
