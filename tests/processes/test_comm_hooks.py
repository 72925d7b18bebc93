"""Tests compressed DDP gradients against NumPy, over gloo and shoal: values, bytes, residuals."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from shoal_workers import exit_codes, group_counters, run_group
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import wire_oracle as oracle
from shoal.comm.hooks import EightBitWire, bf16_wire
from shoal.comm.int8_blocks import BLOCK, BLOCK_BYTES
from shoal.pipelining.device_placement import Bf16ReduceScatter
from shoal.train.checkpoint import Checkpointer

HOSTS = ("a", "b", "c", "d")
SHAPES: Sequence[tuple[int, ...]] = ((40, 50), (7,), (300, 3), (1,), (2, 3, 5, 7), (1111,))


class Given(nn.Module):
    """Parameters whose gradients are what :func:`gradient` says."""

    def __init__(self, shapes: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)

    def forward(self, gradients: Sequence[Tensor]) -> Tensor:
        return torch.stack([(w * g).sum() for w, g in zip(self.weights, gradients, strict=True)]).sum()


def gradient(shape: Sequence[int], number: int, rank: int, step: int) -> Tensor:
    """A gradient of its own for each parameter, worker and step, of sizes that differ along the tensor."""
    random = torch.Generator().manual_seed(1000 * step + 10 * rank + number)
    flat = torch.randn(torch.Size(shape).numel(), generator=random)
    return (flat * torch.logspace(-4, 1, len(flat))).view(shape)


def gradients(shapes: Sequence[tuple[int, ...]], rank: int, step: int) -> list[Tensor]:
    return [gradient(shape, number, rank, step) for number, shape in enumerate(shapes)]


def backward(
    ddp: DistributedDataParallel, shapes: Sequence[tuple[int, ...]], rank: int, step: int
) -> list[Tensor]:
    """Return what each parameter's gradient is after a step's average."""
    ddp.zero_grad()
    ddp(gradients(shapes, rank, step)).backward()
    return [p.grad.clone() for p in ddp.parameters() if p.grad is not None]


def wired(
    shapes: Sequence[tuple[int, ...]], bucket_mb: float = 25.0
) -> tuple[DistributedDataParallel, EightBitWire]:
    ddp = DistributedDataParallel(Given(shapes), bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True)
    wire = EightBitWire(ddp.module.named_parameters())
    ddp.register_comm_hook(None, wire)
    return ddp, wire


# ---- against numpy ----------------------------------------------------------------------------------------


def one_tensor(rank: int, count: int, steps: int, out: Path) -> None:
    ddp, wire = wired([(count,)])
    found = [backward(ddp, [(count,)], rank, step)[0].numpy() for step in range(steps)]
    np.savez(out / f"{rank}.npz", averages=np.array(found), residual=wire.residuals()["weights.0"].numpy())


@pytest.mark.parametrize(
    ("backend", "size", "count"), [("shoal", 3, 5000), ("shoal", 2, 300), ("gloo", 3, 2500)]
)
def test_averages_and_residuals_are_numpys(tmp_path: Path, backend: str, size: int, count: int) -> None:
    hosts = HOSTS[:size] if backend == "shoal" else None
    run_group(one_tensor, size, tmp_path, count, 4, tmp_path, backend=backend, hosts=hosts)
    residuals = [np.zeros(count, np.float32) for _ in range(size)]
    wanted = [
        oracle.exchange([gradient((count,), 0, rank, step).numpy() for rank in range(size)], residuals)
        for step in range(4)
    ]
    for rank in range(size):
        with np.load(tmp_path / f"{rank}.npz") as found:
            np.testing.assert_array_equal(found["averages"], wanted)
            np.testing.assert_array_equal(found["residual"], residuals[rank])
            assert np.count_nonzero(found["residual"]) > count / 2


def many_tensors(rank: int, out: Path) -> None:
    """With buckets of a few tensors, which DDP rebuilds after the first step."""
    ddp, wire = wired(SHAPES, bucket_mb=0.003)
    total = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
    for step in range(6):
        with wire.no_error_feedback() if step == 2 else nullcontext():
            averages = backward(ddp, SHAPES, rank, step)
        for sum_, average in zip(total, averages, strict=True):
            sum_.add_(average)
    assert len(wire._buffers) > 2, "several buckets"
    residuals = [wire.residuals()[f"weights.{number}"] for number in range(len(SHAPES))]
    torch.save((total, residuals), out / f"{rank}.pt")


def test_nothing_of_a_gradient_is_lost_however_buckets_change(tmp_path: Path) -> None:
    """Sum of what was received + sum of the residuals = sum of the gradients / n, to float32's rounding."""
    run_group(many_tensors, 3, tmp_path, tmp_path, hosts=HOSTS[:3])
    parts = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(3)]
    for number, shape in enumerate(SHAPES):
        received = parts[0][0][number]
        assert all(torch.equal(received, other[0][number]) for other in parts), "the same bits on all workers"
        left = sum(part[1][number].double() for part in parts)
        given = [gradient(shape, number, rank, step).double() for step in range(6) for rank in range(3)]
        scale = max(float(g.abs().max()) for g in given)
        error = (received + left - sum(given) / 3).abs().max()
        assert error < 2e-6 * scale, (number, error / scale)
        assert left.abs().max() > 1e-4 * scale, "something was rounded"


def in_bf16(rank: int, out: Path) -> None:
    ddp = DistributedDataParallel(Given(SHAPES))
    ddp.register_comm_hook(None, bf16_wire)
    torch.save(backward(ddp, SHAPES, rank, 0), out / f"{rank}.pt")


def test_bf16_is_added_in_float32_and_rounded_once(tmp_path: Path) -> None:
    run_group(in_bf16, 3, tmp_path, tmp_path, hosts=HOSTS[:3])
    for rank in range(3):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for number, shape in enumerate(SHAPES):
            a, b, c = (gradient(shape, number, other, 0).bfloat16().float() for other in range(3))
            assert torch.equal(found[number], ((a + b) + c).bfloat16().float() / 3)


def shards_in_bf16(rank: int, out: Path) -> None:
    module: Any = fully_shard(Given(SHAPES), mesh=dist.init_device_mesh("cpu", (3,)))
    module.set_custom_reduce_scatter(Bf16ReduceScatter())
    module.set_force_sum_reduction_for_comms(True)
    module.set_gradient_divide_factor(1.0)
    for step in range(2):  # gradients of two micro-batches
        module(gradients(SHAPES, rank, step)).backward()
    torch.save([parameter.grad.full_tensor() for parameter in module.parameters()], out / f"{rank}.pt")


def test_shards_of_fsdp_get_sums_in_bf16_that_are_rounded_once(tmp_path: Path) -> None:
    run_group(shards_in_bf16, 3, tmp_path, tmp_path, hosts=HOSTS[:3])
    for rank in range(3):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        for number, shape in enumerate(SHAPES):
            wanted = torch.zeros(shape)
            for step in range(2):
                a, b, c = (gradient(shape, number, other, step).bfloat16().float() for other in range(3))
                wanted += ((a + b) + c).bfloat16()
            assert torch.equal(found[number], wanted)


# ---- bytes ------------------------------------------------------------------------------------------------


def bytes_sent(group: Any) -> int:
    return group_counters(group)["bytes_sent"]


def count_bytes(rank: int, count: int) -> None:
    steps, ddps = 3, {}
    for name, hook in (("fp32", default_hooks.allreduce_hook), ("bf16", bf16_wire)):
        ddps[name] = DistributedDataParallel(Given([(count,)]))
        ddps[name].register_comm_hook(None, hook)
    ddps["int8"], wire = wired([(count,)])
    found = {}
    for name, ddp in ddps.items():
        backward(ddp, [(count,)], rank, 0)
        dist.barrier()
        before, counted = bytes_sent(dist.group.WORLD) + bytes_sent(wire._back), group_counters()
        for step in range(steps):
            backward(ddp, [(count,)], rank, step)
        dist.barrier()
        found[name] = (bytes_sent(dist.group.WORLD) + bytes_sent(wire._back) - before) / steps
    # Each of 3 hosts sends two thirds of its gradient to the others' servers, and its own sums to two others.
    assert 4 / 3 * 4 * count < found["fp32"] < 1.05 * 4 / 3 * 4 * count, found
    assert 4 / 3 * 2 * count < found["bf16"] < 1.05 * 4 / 3 * 2 * count, found
    # The way out is an all_to_all, the way back, of the same size, an all_gather.
    row = count // 3 // BLOCK * BLOCK_BYTES
    after = group_counters()
    name = "bytes_all_to_all"
    assert after[name] - counted.get(name, 0) == steps * 3 * row, "a third of which is this worker's own"
    assert 4 * row < found["int8"] < 1.08 * 4 * row, found
    assert 4 * row < 0.255 * 4 / 3 * 4 * count


def test_the_bytes_of_each_wire(tmp_path: Path) -> None:
    run_group(count_bytes, 3, tmp_path, 3 * 200 * BLOCK, hosts=HOSTS[:3])


# ---- what is not finite, errors ---------------------------------------------------------------------------


def overflow(rank: int) -> None:
    ddp, wire = wired([(3000,)])
    for step in range(3):
        given = gradients([(3000,)], rank, step)
        if (rank, step) == (1, 1):
            given[0][2000] = torch.inf
        ddp.zero_grad()
        ddp(given).backward()
        (grad,) = (p.grad for p in ddp.parameters())
        assert grad is not None and bool(grad.isfinite().all()) == (step != 1)
        assert wire.residuals()["weights.0"].isfinite().all()


def test_a_gradient_that_is_not_finite_is_seen_by_all_and_spoils_no_later_step(tmp_path: Path) -> None:
    run_group(overflow, 2, tmp_path, hosts=HOSTS[:2])


def lose_one(rank: int) -> None:
    ddp, _ = wired([(3000,)])
    backward(ddp, [(3000,)], rank, 0)
    if rank == 1:
        return
    with pytest.raises(Exception, match=r"rank 1|closed|reset|refused|Connection"):
        backward(ddp, [(3000,)], rank, 1)
    raise SystemExit(7)  # the group has failed: nothing is left to end in order


def test_a_lost_worker_is_an_error_of_backward(tmp_path: Path) -> None:
    assert exit_codes(lose_one, 2, tmp_path, hosts=HOSTS[:2])[0] == 7


def other_types(rank: int) -> None:
    """float64 gradients are averaged as they are."""
    for hook in ("bf16", "int8"):
        ddp = DistributedDataParallel(Given([(40,)]).double())
        wire = bf16_wire if hook == "bf16" else EightBitWire(ddp.module.named_parameters())
        ddp.register_comm_hook(None, wire)
        ddp([gradient((40,), 0, rank, 0).double()]).backward()
        (grad,) = (p.grad for p in ddp.parameters())
        wanted = sum(gradient((40,), 0, other, 0).double() for other in range(2)) / 2
        assert grad is not None and torch.equal(grad, wanted)


def test_float64_gradients_are_not_rounded(tmp_path: Path) -> None:
    run_group(other_types, 2, tmp_path, hosts=HOSTS[:2])


# ---- saved, restored, shared out again --------------------------------------------------------------------


def save_and_go_on(rank: int, out: Path) -> None:
    ddp, wire = wired(SHAPES, bucket_mb=0.003)
    checkpointer = Checkpointer(out / "run")
    for step in range(5):
        averages = backward(ddp, SHAPES, rank, step)
        if step == 2:
            checkpointer.save(step, {"model": ddp, "wire": wire}, wait=True)
            np.savez(out / f"saved-{rank}.npz", **{n: t.numpy() for n, t in wire.residuals().items()})
    torch.save(averages, out / f"last-{rank}.pt")


def restore_and_go_on(rank: int, out: Path, size: int) -> None:
    ddp, wire = wired(SHAPES, bucket_mb=0.003)
    with wire.no_error_feedback():  # as a recipe warms up: DDP arranges its buckets
        backward(ddp, SHAPES, rank, 99)
    restored = Checkpointer(out / "run").restore({"model": ddp, "wire": wire})
    assert restored is not None and "wire" not in restored.values
    saved = []
    for other in range(3):
        with np.load(out / f"saved-{other}.npz") as file:
            saved.append({name: file[name] for name in file.files})
    mine = [saved[other] for other in range(rank, 3, size)]
    for name, value in wire.residuals().items():
        wanted = np.zeros_like(value.numpy())
        for part in mine:
            wanted = wanted + part[name]
        np.testing.assert_array_equal(value.numpy(), wanted)
    if size == 3:
        averages = [backward(ddp, SHAPES, rank, step) for step in (3, 4)][-1]
        last = torch.load(out / f"last-{rank}.pt", weights_only=True)
        assert all(torch.equal(a, b) for a, b in zip(averages, last, strict=True)), "as if never interrupted"
    else:
        backward(ddp, SHAPES, rank, 3)
    names = set(wire.residuals())
    assert names == {f"weights.{number}" for number in range(len(SHAPES))}


def test_residuals_go_on_with_as_many_workers_and_their_sum_with_others(tmp_path: Path) -> None:
    run_group(save_and_go_on, 3, tmp_path, tmp_path, backend="gloo")
    for size in (3, 2, 4):
        run_group(restore_and_go_on, size, tmp_path, tmp_path, size, backend="gloo")
    restore_alone = tmp_path / "alone"
    run_group(deliver_alone, 1, restore_alone, tmp_path, backend="gloo")


def deliver_alone(rank: int, out: Path) -> None:
    """A single worker takes all residuals over and hands them to its first step."""
    ddp, wire = wired(SHAPES)
    Checkpointer(out / "run").restore({"model": ddp, "wire": wire})
    before = {name: value.clone() for name, value in wire.residuals().items()}
    averages = backward(ddp, SHAPES, rank, 3)
    for number, shape in enumerate(SHAPES):
        wanted = before[f"weights.{number}"] + gradient(shape, number, rank, 3)
        assert torch.equal(averages[number], wanted)
        assert not wire.residuals()[f"weights.{number}"].any()


def begin_without(rank: int, out: Path) -> None:
    ddp, wire = wired([(3000,)])
    checkpointer = Checkpointer(out / "older")
    checkpointer.save(1, {"model": ddp}, wait=True)
    backward(ddp, [(3000,)], rank, 0)
    assert wire.residuals()["weights.0"].any()
    assert checkpointer.restore({"model": ddp, "wire": wire}) is not None
    assert not wire.residuals()["weights.0"].any()


def test_a_checkpoint_without_residuals_begins_at_zero(tmp_path: Path) -> None:
    run_group(begin_without, 2, tmp_path, tmp_path, backend="gloo")
