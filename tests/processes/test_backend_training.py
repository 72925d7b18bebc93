"""Tests that torch.distributed training on backend ``"shoal"`` gives the same weights as on gloo.

Two workers: a sum of two numbers has one value in any order, so the weights must be equal to the last bit.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.checkpoint as dcp
from shoal_workers import exit_codes, group_counters, ops, run_group
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.usefixtures("both_groups_or_native")

SIZE = 2


def model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(20, 50), nn.BatchNorm1d(50), nn.ReLU(), nn.Linear(50, 3))


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(8, 20, generator=random), torch.randn(8, 3, generator=random)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        inputs, targets = batch(rank, step)
        optimizer.zero_grad()
        nn.functional.mse_loss(module(inputs).to(targets.dtype), targets).backward()
        optimizer.step()


def is_ours() -> bool:
    return dist.get_backend() == "shoal"


def only_the_engine(**least: int) -> None:
    """Check how often our engine was called, and that no gloo group hides behind it."""
    if is_ours():
        found = {kind: ops(kind) for kind in least}
        assert all(found[kind] >= least[kind] for kind in least), found


def ddp(rank: int) -> dict[str, Tensor]:
    module = DistributedDataParallel(model(), bucket_cap_mb=1e-3)
    train(module, torch.optim.SGD(module.parameters(), lr=0.1), rank, range(4))
    only_the_engine(all_reduce=1 + 3 * 2, broadcast=1)  # the first step has one bucket
    return module.module.state_dict()


def ddp_no_sync(rank: int) -> dict[str, Tensor]:
    module = DistributedDataParallel(model(), broadcast_buffers=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    before = ops("all_reduce") if is_ours() else 0
    with module.no_sync():
        for step in range(3):
            inputs, targets = batch(rank, step)
            nn.functional.mse_loss(module(inputs), targets).backward()
    assert not is_ours() or ops("all_reduce") == before, "no_sync communicates nothing"
    nn.functional.mse_loss(module(batch(rank, 3)[0]), batch(rank, 3)[1]).backward()
    optimizer.step()
    only_the_engine(all_reduce=before + 1)
    return {k: v for k, v in module.module.state_dict().items() if "running" not in k}


def ddp_hook(rank: int) -> dict[str, Tensor]:
    module = DistributedDataParallel(model(), gradient_as_bucket_view=True)
    module.register_comm_hook(None, default_hooks.fp16_compress_hook)
    train(module, torch.optim.SGD(module.parameters(), lr=0.1), rank, range(3))
    only_the_engine(all_reduce=3)
    return module.module.state_dict()


def ddp_builtin_hooks(rank: int) -> dict[str, Tensor]:
    weights = {}
    for hook in (dist.BuiltinCommHookType.FP16_COMPRESS, dist.BuiltinCommHookType.ALLREDUCE):
        module = DistributedDataParallel(model(), bucket_cap_mb=1e-3)
        module._register_builtin_comm_hook(hook)
        train(module, torch.optim.SGD(module.parameters(), lr=0.1), rank, range(3))
        weights.update({f"{hook.name} {name}": value for name, value in module.module.state_dict().items()})
    only_the_engine(all_reduce=10)
    return weights


def ddp_join(rank: int) -> dict[str, Tensor]:
    module = DistributedDataParallel(nn.Linear(20, 3))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(0.01)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with module.join():
        train(module, optimizer, rank, range(3 + 4 * rank))  # rank 1 has more to do
    only_the_engine(all_reduce=7)
    return module.module.state_dict()


def zero_1(rank: int) -> dict[str, Tensor]:
    module = DistributedDataParallel(model(), broadcast_buffers=False)
    optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=0.01)
    train(module, optimizer, rank, range(4))
    only_the_engine(all_reduce=4, broadcast=4)
    with Join([module, optimizer]):
        train(module, optimizer, rank, range(2 + rank))
    only_the_engine(all_reduce=4, broadcast=4)
    return {k: v for k, v in module.module.state_dict().items() if "running" not in k}


def _fsdp(rank: int, **settings: Any) -> dict[str, Tensor]:
    module = nn.Sequential(*(nn.Linear(20, 20) for _ in range(3)), nn.Linear(20, 3))
    torch.manual_seed(7)
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    mesh = init_device_mesh("cpu", (SIZE,))
    for layer in module:
        fully_shard(layer, mesh=mesh, **settings)
    fully_shard(module, mesh=mesh, **settings)
    train(module, torch.optim.AdamW(module.parameters(), lr=0.01), rank, range(3))
    # every layer is gathered and its gradient scattered in each of 3 steps
    if is_ours():
        group: Any = mesh.get_group()
        counters = group_counters(group)
        assert counters["ops_all_gather"] >= 3 * 4, counters
        assert counters["ops_reduce_scatter"] == 3 * 4, counters
    return {name: value.full_tensor() for name, value in module.state_dict().items()}


def fsdp(rank: int) -> dict[str, Tensor]:
    return _fsdp(rank)


def fsdp_bf16(rank: int) -> dict[str, Tensor]:
    return _fsdp(rank, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def functional(rank: int) -> dict[str, Tensor]:
    group: Any = dist.group.WORLD
    tensor = torch.arange(8.0) + rank
    found = {
        "all_reduce": funcol.all_reduce(tensor, "sum", group),
        "all_gather": funcol.all_gather_tensor(tensor, 0, group),
        "reduce_scatter": funcol.reduce_scatter_tensor(tensor, "sum", 0, group),
        "broadcast": funcol.broadcast(tensor, 1, group),
    }
    found["all_reduce_coalesced"] = torch.cat(funcol.all_reduce_coalesced([tensor, tensor * 2], "max", group))
    gathered = funcol.all_gather_into_tensor_coalesced([tensor, tensor[:2]], group)
    found["gather_coalesced"] = torch.cat([t + 0 for t in gathered])
    scattered = funcol.reduce_scatter_tensor_coalesced([tensor, tensor[:2]], "sum", [0, 0], group)
    found["scatter_coalesced"] = torch.cat([t + 0 for t in scattered])
    found = {name: value + 0 for name, value in found.items()}
    only_the_engine(all_reduce=2, all_gather=2, reduce_scatter=2, broadcast=1)
    exchanged = funcol.all_to_all_single(tensor, None, None, group)
    found["all_to_all"] = exchanged + 0
    return found


def checkpointed(rank: int, folder: Path) -> dict[str, Tensor]:
    """Train, save, train on; then load into a new model and train on: the weights must be the same."""
    mesh = init_device_mesh("cpu", (SIZE,))
    torch.manual_seed(7)
    module, again = (fully_shard(nn.Linear(20, 3), mesh=mesh) for _ in range(2))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    train(module, optimizer, rank, range(2))
    place = folder / f"checkpoint-{dist.get_backend()}"
    dcp.save({"model": module.state_dict()}, checkpoint_id=place)
    train(module, optimizer, rank, range(2, 4))
    state = {"model": again.state_dict()}
    dcp.load(state, checkpoint_id=place)
    again.load_state_dict(state["model"])
    train(again, torch.optim.SGD(again.parameters(), lr=0.1), rank, range(2, 4))
    weights = {name: value.full_tensor() for name, value in module.state_dict().items()}
    for name, value in again.state_dict().items():
        assert torch.equal(value.full_tensor(), weights[name]), name
    return weights


def _run(rank: int, case: Callable[..., dict[str, Tensor]], folder: Path, args: tuple[Any, ...]) -> None:
    weights = case(rank, *args)
    torch.save(weights, folder / f"{dist.get_backend()}-{rank}.pt")


@pytest.mark.parametrize(
    "case",
    [
        ddp,
        ddp_no_sync,
        ddp_hook,
        ddp_builtin_hooks,
        ddp_join,
        zero_1,
        fsdp,
        fsdp_bf16,
        functional,
        checkpointed,
    ],
)
def test_same_weights_as_with_gloo(tmp_path: Path, case: Callable[..., dict[str, Tensor]]) -> None:
    args = (tmp_path,) if case is checkpointed else ()
    for backend in ("gloo", "shoal"):
        run_group(_run, SIZE, tmp_path, case, tmp_path, args, backend=backend)
    for rank in range(SIZE):
        wanted, found = (
            torch.load(tmp_path / f"{b}-{rank}.pt", weights_only=True) for b in ("gloo", "shoal")
        )
        assert found.keys() == wanted.keys()
        for name in wanted:
            assert torch.equal(found[name], wanted[name]), name


def _shape_of(value: Any) -> Any:
    """Return the types and shapes in a future's value."""
    if isinstance(value, list | tuple):
        return type(value).__name__, [_shape_of(each) for each in value]
    return (type(value).__name__, list(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def _futures(rank: int, folder: Path) -> None:
    x, parts = torch.ones(4), [torch.ones(4), torch.ones(4)]
    works = {
        "all_reduce": dist.all_reduce(x, async_op=True),
        "all_reduce of fp16": dist.all_reduce(x.half(), async_op=True),
        "broadcast": dist.broadcast(x, 0, async_op=True),
        "reduce": dist.reduce(x, 0, async_op=True),
        "all_gather": dist.all_gather(parts, x, async_op=True),
        "all_gather_into_tensor": dist.all_gather_into_tensor(torch.ones(8), x, async_op=True),
        "reduce_scatter_tensor": dist.reduce_scatter_tensor(x, torch.ones(8), async_op=True),
        "all_to_all_single": dist.all_to_all_single(torch.ones(4), x, async_op=True),
    }
    shapes = {}
    for name, work in works.items():
        work.wait()
        try:
            shapes[name] = _shape_of(work.get_future().wait())
        except RuntimeError as error:
            assert "getFuture not implemented" in str(error) and not is_ours(), name
    if rank == 0:
        (folder / f"{dist.get_backend()}.json").write_text(json.dumps(shapes))


def test_futures_hold_what_gloos_hold(tmp_path: Path) -> None:
    for backend in ("gloo", "shoal"):
        run_group(_futures, SIZE, tmp_path, tmp_path, backend=backend)
    wanted, found = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("gloo", "shoal"))
    assert found.pop("all_gather_into_tensor") == [
        "list",
        [["Tensor", [8]]],
    ]  # as NCCL's; gloo's are chunks of it
    del wanted["all_gather_into_tensor"]
    assert len(wanted) >= 4 and {name: found[name] for name in wanted} == wanted


def _grid(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(1)
    module = nn.Linear(20, 3)
    single = nn.Linear(20, 3)
    single.load_state_dict(module.state_dict())
    fully_shard(module, mesh=mesh)
    train(module, torch.optim.SGD(module.parameters(), lr=0.1), rank, range(3))
    optimizer = torch.optim.SGD(single.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        losses = [nn.functional.mse_loss(single(batch(r, step)[0]), batch(r, step)[1]) for r in range(4)]
        (sum(losses) / 4).backward()  # type: ignore[union-attr]
        optimizer.step()
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value.full_tensor(), single.state_dict()[name])
    shard: Any = mesh.get_group("shard")
    replicate: Any = mesh.get_group("replicate")
    assert group_counters(shard)["ops_reduce_scatter"] == 3
    assert group_counters(replicate)["ops_all_reduce"] == 3


def test_hybrid_sharding_on_a_mesh(tmp_path: Path) -> None:
    run_group(_grid, 4, tmp_path, hosts=("a", "a", "b", "b"))


def _lose_a_worker(rank: int, folder: Path) -> None:
    module = DistributedDataParallel(model(), broadcast_buffers=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    train(module, optimizer, rank, range(2))
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError, match="rank 2"):
        train(module, optimizer, rank, range(2, 4))
    (folder / f"told{rank}").touch()
    os._exit(0)


def test_ddp_raises_the_named_error_when_a_worker_dies(tmp_path: Path) -> None:
    codes = exit_codes(_lose_a_worker, 3, tmp_path, tmp_path)
    assert codes == [0, 0, -signal.SIGKILL]
    assert (tmp_path / "told0").exists()
    assert (tmp_path / "told1").exists()
