"""Workers that share the optimizer's state (ZeRO-1) compute the bits of workers that each have all of it."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from forked_workers import run_workers
from job_workers import run_script
from staged_parameters import OPTIMIZERS, SHAPES, make_parameters, set_gradient
from torch import Tensor, nn
from torch.optim import LBFGS, Muon, Optimizer
from torch.utils.data import TensorDataset

from shoal.decide.ownership import assign_owners
from shoal.env.worker import WorkerEnv
from shoal.errors import EXIT_OK, EXIT_USAGE, UsageError
from shoal.optim.lamb import Lamb, parameter_groups
from shoal.optim.optimizer_shards import OptimizerShards
from shoal.record import Step, read_record
from shoal.train.config import DistributedConfig, LoopConfig, RunConfig, ServersConfig
from shoal.train.gradients import Update
from shoal.train.run import Run, Sizes

NUM_STEPS, OVERFLOWS_AT = 4, 2


def state_bytes(optimizer: Optimizer) -> int:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(value.nbytes for value in values if isinstance(value, Tensor))


def updated(name: str, shards: OptimizerShards | None) -> tuple[dict[str, nn.Parameter], Optimizer]:
    """Return parameters after some updates, one of which is skipped, and their optimizer."""
    named = make_parameters(SHAPES)
    optimizer, update = OPTIMIZERS[name](parameter_groups(named.items(), 0.02)), Update(shards=shards)
    for step in range(NUM_STEPS):
        for each, parameter in named.items():
            overflows = each == "second.scale" and step == OVERFLOWS_AT
            set_gradient(each, parameter, step, math.inf if overflows else 1.0)
        norm = update.finish_gradients(optimizer, max_norm=5.0, per_worker=False, loss_scale=2.0)
        if math.isfinite(norm):
            update.apply(optimizer)
        optimizer.zero_grad()
    return named, optimizer


def _compare(rank: int, num_workers: int) -> None:
    torch.set_num_threads(1)
    for name in OPTIMIZERS:
        alone, whole = updated(name, None)
        named, optimizer = updated(name, OptimizerShards())
        for each, parameter in named.items():
            assert torch.equal(parameter, alone[each]), (name, each)
        owners = assign_owners([p.nbytes for p in alone.values()], [0] * num_workers)
        own = {each for each, owner in zip(alone, owners, strict=True) if owner == rank}
        assert {each for each, parameter in named.items() if optimizer.state.get(parameter)} <= own, name
        expected = sum(
            value.nbytes
            for each in own
            for value in whole.state[alone[each]].values()
            if isinstance(value, Tensor)
        )
        assert state_bytes(optimizer) == expected, name
        assert [len(g["params"]) for g in optimizer.param_groups] == [
            len(g["params"]) for g in whole.param_groups
        ]


@pytest.mark.parametrize("num_workers", [2, 3, 5, 7])
def test_each_optimizer_has_the_bits_of_the_whole_and_a_part_of_the_state(
    tmp_path: Path, num_workers: int
) -> None:
    """Of seven workers one owns nothing."""
    assert run_workers(_compare, num_workers, tmp_path / "meeting", num_workers) == [0] * num_workers


def _mixed(rank: int) -> None:
    """Send weights of two types and layouts, of two optimizers, some larger than a message."""
    torch.manual_seed(3)
    shapes = [(3000, 2500), (7,), (5, 4), (4, 3, 2, 2), ()]
    made = [nn.Parameter(torch.full(shape, float(index))) for index, shape in enumerate(shapes)]
    made += [nn.Parameter(torch.full((9,), 9.0, dtype=torch.bfloat16))]
    made[3] = nn.Parameter(made[3].detach().to(memory_format=torch.channels_last))
    optimizers = [torch.optim.SGD(made[:3], lr=1.0), torch.optim.SGD(made[3:], lr=1.0)]
    shards = OptimizerShards()
    for optimizer in optimizers:
        for parameter in shards.owned(optimizer):
            parameter.data += torch.arange(parameter.numel()).view_as(parameter).to(parameter.dtype)
    shards.broadcast(optimizers)
    for index, parameter in enumerate(made):
        first = 9.0 if parameter.dtype == torch.bfloat16 else float(index)
        expected = torch.full_like(parameter, first) + torch.arange(parameter.numel()).view_as(parameter)
        assert torch.equal(parameter, expected.to(parameter.dtype)), index


def test_weights_of_any_type_layout_and_size_arrive(tmp_path: Path) -> None:
    assert run_workers(_mixed, 3, tmp_path / "meeting") == [0, 0, 0]


def _refuse(rank: int) -> None:
    with pytest.raises(UsageError, match="LBFGS steps all parameters as one"):
        OptimizerShards().owned(LBFGS([nn.Parameter(torch.zeros(2))]))


def test_an_optimizer_that_steps_all_as_one_is_refused(tmp_path: Path) -> None:
    assert run_workers(_refuse, 2, tmp_path / "meeting") == [0, 0]


# ---- whole runs --------------------------------------------------------------------------------------------

TOTAL = 7


def script(
    directory: Path,
    worker: WorkerEnv,
    *,
    shard: bool = True,
    backend: str = "gloo",
    kill_at: int = 0,
    several: bool = False,
    servers: str = "off",
) -> int:
    loop = LoopConfig(seed=5, precision="fp32", shard_optimizer=shard)
    output = RunConfig(name="test", log_frequency=1, checkpoint_frequency=3)
    distributed = DistributedConfig(backend=backend, device="cpu")
    modes: Any = ServersConfig(mode=servers)  # type: ignore[arg-type]
    points = torch.randn(60, 2, generator=torch.Generator().manual_seed(3))
    with Run.open(
        directory, settings=output, loop=loop, distributed=distributed, servers=modes, worker=worker
    ) as run:
        torch.manual_seed(1)
        module = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
        model = run.data_parallel(module)
        groups = parameter_groups(module.named_parameters(), 0.1)
        made: dict[str, Optimizer] = {"optimizer": Lamb(groups, 0.01)}
        if several:
            matrices = [p for p in module.parameters() if p.ndim == 2]
            others = [p for p in module.parameters() if p.ndim != 2]
            made = {"muon": Muon(matrices, lr=0.02), "adamw": torch.optim.AdamW(others, lr=0.01)}
        run.keep(model=module, **made)
        data = TensorDataset(points, (points.norm(dim=1) < 1).long())
        for step in run.steps(data, Sizes(global_batch_size=30), until=TOTAL):
            with step:
                for inputs, inside in step:
                    step.backward(F.cross_entropy(model(inputs), inside, reduction="sum") / step.num_samples)
                step.update(*made.values(), max_norm=0.5)
            if step.number == kill_at:
                run.save(wait=True)
                os._exit(9)
        (directory / f"state-{worker.ranks.rank}").write_text(str(sum(map(state_bytes, made.values()))))
        return run.finish(lambda directory: torch.save(module.state_dict(), directory / "model.pt"))


def train(directory: Path, num_workers: int, **options: Any) -> list[int | None]:
    return run_script(script, directory, num_workers, **options)


def check_same(one: Path, other: Path) -> None:
    rows = [[row for row in read_record(d) if isinstance(row, Step)] for d in (one, other)]
    figures = [{row.step: (row.loss, row.grad_norm, row.weight_norm) for row in each} for each in rows]
    assert figures[0] == figures[1] and len(figures[0]) == TOTAL
    a, b = (torch.load(directory / "model.pt", weights_only=True) for directory in (one, other))
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    ("num_workers", "backend"),
    [(2, "gloo"), (3, "shoal"), pytest.param(5, "shoal", marks=pytest.mark.slow)],
    ids=str,
)
def test_a_killed_run_continues_with_the_bits_of_unsharded_workers(
    tmp_path: Path, num_workers: int, backend: str
) -> None:
    done = [EXIT_OK] * num_workers
    assert train(tmp_path / "whole", num_workers, shard=False, backend=backend) == done
    assert train(tmp_path / "run", num_workers, kill_at=5, backend=backend) == [9] * num_workers
    assert train(tmp_path / "run", num_workers, backend=backend) == done
    check_same(tmp_path / "run", tmp_path / "whole")
    said = (tmp_path / "run" / "worker-0.log").read_text()
    assert f"optimizer state divided over {num_workers} workers (ZeRO-1)" in said
    kept, whole = (
        [int((tmp_path / name / f"state-{rank}").read_text()) for rank in range(num_workers)]
        for name in ("run", "whole")
    )
    assert sum(kept) == whole[0] == 82 * 8 + 4 * 4  # two moments of each weight, and four counts of steps


@pytest.mark.parametrize("several", [False, True], ids=["lamb", "muon and adamw"])
def test_any_number_of_workers_continues_a_sharded_run(tmp_path: Path, several: bool) -> None:
    """Two workers, then three, then one that has all the state."""
    for name, shard in (("whole", False), ("run", True)):
        directory = tmp_path / name
        assert train(directory, 2, shard=shard, several=several, kill_at=4) == [9, 9]
        assert train(directory, 3, shard=shard, several=several, kill_at=6) == [9, 9, 9]
        assert train(directory, 1, shard=shard, several=several) == [EXIT_OK]
    check_same(tmp_path / "run", tmp_path / "whole")
    said = (tmp_path / "run" / "worker-0.log").read_text()
    assert "train.shard_optimizer has no effect: one worker has the whole optimizer state" in said


def test_servers_that_keep_the_state_refuse_to_divide_it(tmp_path: Path) -> None:
    assert train(tmp_path, 1, backend="shoal", servers="sync") == [EXIT_USAGE]
    said = (tmp_path / "worker-0.log").read_text()
    assert "servers.mode sync with train.shard_optimizer: the optimizer's state is on the servers" in said
