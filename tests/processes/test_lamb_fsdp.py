"""LAMB and LANS on FSDP2 shards take the norms of whole tensors: two gloo processes equal one process."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from forked_workers import run_workers
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from shoal.optim.lamb import Lamb, parameter_groups
from shoal.optim.lans import Lans

NUM_STEPS = 3
OPTIMIZERS = ("lamb", "lamb clipped", "lans")


class Model(nn.Module):
    """Shapes that do not divide by two, and a tensor whose second shard is empty."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 12)
        self.dense = nn.Linear(12, 7)
        self.norm = nn.LayerNorm(7)
        self.head = nn.Linear(7, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.norm(torch.tanh(self.dense(self.embedding(tokens)))))
        return out


def make_model() -> Model:
    torch.manual_seed(11)
    return Model()


def make_optimizer(model: nn.Module, name: str) -> Lamb | Lans:
    groups = parameter_groups(model.named_parameters(), 0.02)
    if name == "lans":
        return Lans([{k: group[k] for k in ("params", "weight_decay")} for group in groups], lr=0.05)
    return Lamb(groups, lr=0.05, max_grad_norm=0.5 if name == "lamb clipped" else None)


def train_step(model: nn.Module, optimizer: Lamb | Lans, step: int) -> tuple[float, float]:
    """Every worker sees the same batch: the mean of the gradients is that of one process."""
    tokens = torch.randint(0, 17, (6, 5), generator=torch.Generator().manual_seed(step))
    (model(tokens) - 0.3).pow(2).mean().backward()
    optimizer.step(grad_scale=4.0)
    optimizer.zero_grad()
    return optimizer.norms()


def train_alone(name: str) -> tuple[list[Tensor], list[tuple[float, float]]]:
    model = make_model()
    optimizer = make_optimizer(model, name)
    norms = [train_step(model, optimizer, step) for step in range(NUM_STEPS)]
    return [parameter.detach() for parameter in model.parameters()], norms


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def worker(rank: int, folder: Path, mesh_shape: tuple[int, ...]) -> None:
    axes = ("replicate", "shard") if len(mesh_shape) == 2 else ("shard",)
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=axes)
    results = {name: train_sharded(mesh, name) for name in OPTIMIZERS}
    if rank == 0:
        torch.save(results, folder / "results.pt")


def train_sharded(mesh: DeviceMesh, name: str) -> dict[str, Any]:
    model = make_model()
    fully_shard(model.dense, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = make_optimizer(model, name)
    norms = [train_step(model, optimizer, step) for step in range(NUM_STEPS)]
    weights = [whole(parameter.detach()) for parameter in model.parameters()]
    assert all(isinstance(state["exp_avg"], DTensor) for state in optimizer.state.values())

    # its state goes through torch's distributed state dict into a fresh optimizer, which then continues alike
    options = StateDictOptions(full_state_dict=True)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    fresh = make_optimizer(model, name)
    set_optimizer_state_dict(model, fresh, state, options=options)
    assert all(torch.equal(whole(p.detach()), w) for p, w in zip(model.parameters(), weights, strict=True))
    for parameter in model.parameters():
        ours, theirs = optimizer.state[parameter], fresh.state[parameter]
        assert float(ours["step"]) == float(theirs["step"]) == NUM_STEPS
        assert torch.equal(whole(ours["exp_avg"]), whole(theirs["exp_avg"]))
        assert torch.equal(whole(ours["exp_avg_sq"]), whole(theirs["exp_avg_sq"]))
    return {"weights": weights, "norms": norms}


@pytest.mark.parametrize(
    "mesh_shape",
    [
        pytest.param((2,), id="sharded"),
        pytest.param((2, 2), id="replicated-and-sharded", marks=pytest.mark.slow),
    ],
)
def test_shards_equal_one_process(tmp_path: Path, mesh_shape: tuple[int, ...]) -> None:
    num_workers = math.prod(mesh_shape)
    codes = run_workers(worker, num_workers, tmp_path / "meet", tmp_path, mesh_shape)
    assert codes == [0] * num_workers
    results = torch.load(tmp_path / "results.pt", weights_only=True)
    for name in OPTIMIZERS:
        weights, norms = train_alone(name)
        result = results[name]
        for sharded, alone in zip(result["weights"], weights, strict=True):
            assert float((sharded - alone).abs().max()) <= 1e-6 * float(alone.abs().max())
        for sharded, alone in zip(result["norms"], norms, strict=True):
            assert sharded == pytest.approx(alone, rel=1e-6)
