"""Muon on FSDP2's shards orthogonalises whole matrices: two gloo processes equal torch's Muon in one."""

from __future__ import annotations

from pathlib import Path

import torch
from forked_workers import run_workers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Muon

from shoal.optim.muon import Muon as ShardedMuon

NUM_STEPS = 4
OPTIONS = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "adjust_lr_fn": "match_rms_adamw"}


def make_model() -> nn.Sequential:
    """Return matrices whose rows do not divide by two, and one with a single row, an empty second shard."""
    torch.manual_seed(3)
    layers = [nn.Linear(12, 7, bias=False), nn.Linear(7, 9, bias=False), nn.Linear(9, 1, bias=False)]
    return nn.Sequential(*layers)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Train on the same batches on every worker, whose mean gradient is that of one process."""
    for step in range(NUM_STEPS):
        inputs = torch.randn(5, 12, generator=torch.Generator().manual_seed(step))
        (model(inputs) - 0.3).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = [parameter.detach() for parameter in model.parameters()]
    return [weight.full_tensor() if isinstance(weight, DTensor) else weight for weight in weights]


def worker(rank: int, folder: Path) -> None:
    model, mesh = make_model(), init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh, ignored_params={model[1].weight})  # which stays whole
    optimizer = ShardedMuon(model.parameters(), **OPTIONS)  # type: ignore[arg-type]
    weights = train(model, optimizer)
    for parameter in model.parameters():
        buffer = optimizer.state[parameter]["momentum_buffer"]
        assert isinstance(buffer, DTensor) == isinstance(parameter, DTensor)
    torch.save(weights, folder / f"weights-{rank}.pt")


def test_shards_equal_one_process(tmp_path: Path) -> None:
    assert run_workers(worker, 2, tmp_path / "meet", tmp_path, deadline_s=500) == [0, 0]
    model = make_model()
    wanted = train(model, Muon(model.parameters(), **OPTIONS))  # type: ignore[arg-type]
    for rank in range(2):
        for found, weight in zip(
            torch.load(tmp_path / f"weights-{rank}.pt", weights_only=True), wanted, strict=True
        ):
            assert float((found - weight).abs().max()) <= 1e-6 * float(weight.abs().max())
