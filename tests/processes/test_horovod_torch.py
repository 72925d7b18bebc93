"""Tests ``shoal.horovod_torch`` on 3 and 5 workers: training against one process over the whole batch.

Weights and gradients are float64, so that only the order of additions differs.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from shoal_workers import ops, run_group
from torch import Tensor, nn

import shoal.comm
import shoal.horovod_torch as hvd
from forked import fork_process, free_port, wait_for
from shoal.errors import UsageError

SIZES = [3, 5]
ROWS = 4
"""Of a worker's part of a batch."""
STEPS = 4
CLOSE = {"rtol": 0.0, "atol": 1e-12}


def net(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3)).double()


def batch(step: int, rank: int | None, size: int) -> tuple[Tensor, Tensor]:
    """Return a worker's part of a batch, or the whole."""
    random = torch.Generator().manual_seed(step)
    inputs = torch.randn(ROWS * size, 6, generator=random, dtype=torch.float64)
    targets = torch.randn(ROWS * size, 3, generator=random, dtype=torch.float64)
    part = slice(None) if rank is None else slice(ROWS * rank, ROWS * (rank + 1))
    return inputs[part], targets[part]


def mse(model: nn.Module, step: int, rank: int | None, size: int) -> Tensor:
    inputs, targets = batch(step, rank, size)
    return nn.functional.mse_loss(model(inputs), targets)


def same_everywhere(model: nn.Module) -> None:
    content = b"".join(each.detach().numpy().tobytes() for each in model.state_dict().values())
    assert len(set(hvd.allgather_object(hashlib.sha256(content).hexdigest()))) == 1


def compare(model: nn.Module, alone: nn.Module, **tolerance: float) -> None:
    same_everywhere(model)
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, **(tolerance or CLOSE))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


# ---- training -------------------------------------------------------------------------------------------


def in_one_process(size: int, optimizer: Callable[[nn.Module], Any] = sgd, model: Any = None) -> nn.Module:
    alone = model or net(0)
    update = optimizer(alone)
    for step in range(STEPS):
        update.zero_grad()
        mse(alone, step, None, size).backward()
        update.step()
    return alone


def train(rank: int, optimizer: Any = sgd, **options: Any) -> nn.Module:
    model = net(rank)
    update = optimizer(model)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(update, root_rank=0)
    update = hvd.DistributedOptimizer(update, named_parameters=model.named_parameters(), **options)
    for step in range(STEPS):
        update.zero_grad()
        mse(model, step, rank, hvd.size()).backward()
        update.step()
    return model


def training(rank: int) -> None:
    hvd.init()
    size = hvd.size()
    alone = in_one_process(size)
    compare(train(rank), alone)
    compare(train(rank, gradient_predivide_factor=4.0, num_groups=2, groups=None), alone)
    compare(train(rank, compression=hvd.Compression.bf16), alone, rtol=0.0, atol=0.05)

    def adam(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1)

    compare(train(rank, adam), in_one_process(size, adam), rtol=0.0, atol=1e-9)

    def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(model.parameters(), max_iter=3)

    model, single = net(0), net(0)
    ours, theirs = hvd.DistributedOptimizer(lbfgs(model)), lbfgs(single)
    for part, update, of in ((model, ours, rank), (single, theirs, None)):

        def closure(part: Any = part, update: Any = update, of: Any = of) -> Tensor:
            update.zero_grad()
            loss = mse(part, 0, of, size)
            loss.backward()
            return hvd.allreduce(loss.detach()) if of is not None else loss

        update.step(closure)
    compare(model, single, rtol=0.0, atol=1e-9)


def passes(rank: int) -> None:
    """Add up gradients of two passes, clip the averages, and take steps at a schedule's rate."""
    hvd.init()
    model, alone = net(0), net(0)
    results = []
    for part, of in ((model, rank), (alone, None)):
        update = sgd(part)
        schedule = torch.optim.lr_scheduler.StepLR(update, 1, 0.5)  # made first, of the same object
        if of is not None:
            update = hvd.DistributedOptimizer(update, backward_passes_per_step=2, op=hvd.Average)
        before = ops("all_reduce")
        for step in range(STEPS):
            update.zero_grad()
            for micro in range(2):
                mse(part, 2 * step + micro, of, hvd.size()).backward()
            if of is not None:
                update.synchronize()
            nn.utils.clip_grad_norm_(part.parameters(), 0.3)
            if of is not None:
                with update.skip_synchronize():
                    update.step()
            else:
                update.step()
            schedule.step()
        results.append(ops("all_reduce") - before)
    assert results == [STEPS, 0]  # one bucket a step
    compare(model, alone)

    summed = net(0)
    update = hvd.DistributedOptimizer(torch.optim.SGD(summed.parameters(), lr=0.1 / hvd.size()), op=hvd.Sum)
    mse(summed, 0, rank, hvd.size()).backward()
    update.step()
    alone = net(0)
    mse(alone, 0, None, hvd.size()).backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    compare(summed, alone)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(30, 4, sparse=True).double()
        self.out = nn.Linear(4, 2).double()
        self.never = nn.Linear(4, 2).double()
        self.sometimes = nn.Linear(4, 2).double()

    def forward(self, words: Tensor, extra: Tensor) -> Tensor:
        found = self.words(words).mean(1)
        return self.out(found) + torch.where(extra[:, None], 1.0, 0.0) * self.sometimes(found)


def sparse_and_unused(rank: int) -> None:
    """Train an embedding with sparse gradients, a layer that one rank alone uses, and one that none does."""
    hvd.init()
    size = hvd.size()
    random = torch.Generator().manual_seed(3)
    words = torch.randint(0, 30, (STEPS, ROWS * size, 5), generator=random)
    extra = torch.arange(ROWS * size) // ROWS == size - 1
    own = slice(ROWS * rank, ROWS * (rank + 1))
    for dense in (False, True):
        model, alone = Sparse(), Sparse()
        made = [
            torch.optim.SGD(each.parameters(), lr=0.5, weight_decay=0.0, momentum=0.0)
            for each in (model, alone)
        ]
        update = hvd.DistributedOptimizer(made[0], sparse_as_dense=dense)
        for step in range(STEPS):
            for part, rows in ((model, own), (alone, slice(None))):
                part.zero_grad()
                if part is model and rank != size - 1:
                    out = part.out(part.words(words[step][rows]).mean(1))  # no gradient of ``sometimes``
                else:
                    out = part(words[step][rows], extra[rows])
                out.square().mean().backward()
            update.step()
            made[1].step()
            assert model.words.weight.grad.is_sparse and model.never.weight.grad is None
        compare(model, alone)


def grown(rank: int) -> None:
    """Thaw a layer, and add parameters to the optimizer, after it was wrapped."""
    hvd.init()
    model, alone = net(0), net(0)
    for part, of in ((model, rank), (alone, None)):
        part[0].requires_grad_(False)
        update = torch.optim.SGD(part[2].parameters(), lr=0.1)
        if of is not None:
            update = hvd.DistributedOptimizer(update)
        for step in range(STEPS):
            if step == 2:
                part[0].requires_grad_(True)
                update.add_param_group({"params": part[0].parameters()})
            part.zero_grad()
            mse(part, step, of, hvd.size()).backward()
            update.step()
    compare(model, alone)


def lazy(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.LazyLinear(9), nn.Tanh(), nn.LazyBatchNorm1d(), nn.LazyLinear(3)).double()


def built_in_the_first_batch(rank: int) -> None:
    """Broadcast a model without shapes: the first step is that of rank 0's weights on all ranks."""
    hvd.init()
    model = lazy(rank)
    model[2].eval()
    update = sgd(model)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(update, root_rank=0)
    update = hvd.DistributedOptimizer(update, named_parameters=model.named_parameters())
    alone = lazy(0)
    alone[2].eval()
    torch.manual_seed(rank)  # as before the first batch of the rank
    for step in range(STEPS):
        update.zero_grad()
        mse(model, step, rank, hvd.size()).backward()
        update.step()
    torch.manual_seed(0)
    compare(model, in_one_process(hvd.size(), model=alone))
    with pytest.raises(UsageError, match=r"bias has no shape yet on 1 of \d ranks; run the first batch"):
        part = nn.Linear(2, 2) if rank else nn.LazyLinear(2)
        hvd.broadcast_parameters(part.state_dict(), 0)


# ---- collectives ----------------------------------------------------------------------------------------


def collectives(rank: int) -> None:
    hvd.init()
    size = hvd.size()
    every = torch.arange(size * (2 * size + 1) * 3).view(size, -1, 3) % 97
    mine = every[rank]
    assert torch.equal(hvd.allreduce(mine, op=hvd.Sum), every.sum(0))
    assert torch.equal(hvd.allreduce(mine), every.sum(0) // size)
    assert torch.equal(hvd.allreduce(mine, average=False, name="old"), every.sum(0))
    assert torch.equal(hvd.allreduce(mine, op=hvd.Max), every.amax(0))
    assert torch.equal(hvd.allreduce(mine, op=hvd.Min), every.amin(0))
    assert torch.equal(hvd.allreduce(mine % 3, op=hvd.Product), (every % 3).prod(0))
    scaled = hvd.allreduce(torch.ones(3), op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    assert scaled.tolist() == [2.0 * size] * 3
    assert hvd.allreduce(torch.tensor(1 + 2**-12), compression=hvd.Compression.fp16).item() == 1.0
    one, other = hvd.grouped_allreduce([mine, mine[:1]], op=hvd.Sum)
    assert torch.equal(one, every.sum(0)) and torch.equal(other, every.sum(0)[:1])
    own = mine.clone()
    handle = hvd.allreduce_async_(own, op=hvd.Sum, name="a")
    assert hvd.synchronize(handle) is own and hvd.poll(handle) and torch.equal(own, every.sum(0))
    assert torch.equal(hvd.synchronize(hvd.allreduce_async(mine, op=hvd.Sum)), every.sum(0))
    assert torch.equal(hvd.allreduce_(mine.clone(), op=hvd.Sum), every.sum(0))
    copies = [mine.clone(), mine.clone()]
    hvd.grouped_allreduce_(copies, op=hvd.Sum)
    assert torch.equal(copies[1], every.sum(0))
    assert torch.equal(hvd.synchronize(hvd.grouped_allreduce_async([mine], op=hvd.Sum))[0], every.sum(0))

    uneven = [torch.full((each, 2), each) for each in range(size)]
    assert torch.equal(hvd.allgather(uneven[rank], name="b"), torch.cat(uneven))
    assert torch.equal(hvd.synchronize(hvd.allgather_async(mine)), every.flatten(0, 1))
    assert hvd.allgather(torch.empty(0, 3)).shape == (0, 3)
    several = hvd.grouped_allgather([uneven[rank], torch.tensor([rank == 1])])
    assert torch.equal(several[0], torch.cat(uneven)) and several[1].tolist().index(True) == 1

    assert torch.equal(hvd.broadcast(mine, root_rank=size - 1), every[-1])
    assert torch.equal(hvd.synchronize(hvd.broadcast_async(mine, 1)), every[1])
    parameter = nn.Parameter(torch.full((3,), float(rank)))
    hvd.broadcast_(parameter, root_rank=2)
    assert parameter.tolist() == [2.0] * 3

    equal = hvd.alltoall(torch.arange(2 * size) + 100 * rank)
    assert equal.tolist() == [100 * each + 2 * rank + more for each in range(size) for more in (0, 1)]
    rows = torch.arange(size).repeat_interleave(torch.arange(size))  # each rank gets its number of rows
    found, counts = hvd.alltoall(rows, splits=torch.arange(size))
    assert found.tolist() == [rank] * rank * size and counts.tolist() == [rank] * size
    assert hvd.synchronize(hvd.alltoall_async(rows, splits=list(range(size))))[0].tolist() == found.tolist()

    parts = every.sum(0).split([3] + [2] * (size - 1))  # 2 size + 1 rows: the first rank has one more
    assert torch.equal(hvd.reducescatter(mine, op=hvd.Sum), parts[rank])
    assert torch.equal(hvd.grouped_reducescatter([mine], op=hvd.Sum)[0], parts[rank])
    assert torch.equal(hvd.synchronize(hvd.reducescatter_async(mine, op=hvd.Sum)), parts[rank])

    indices = torch.tensor([[0, rank]])
    total = hvd.synchronize(
        hvd.sparse_allreduce_async(torch.sparse_coo_tensor(indices, [1.0, 2.0], (size,)), "c")
    )
    expected = torch.full((size,), 2.0 / size)
    expected[0] += 1.0
    torch.testing.assert_close(total.to_dense(), expected)
    hvd.barrier()


def objects(rank: int) -> None:
    hvd.init()
    size = hvd.size()
    value = {
        3: (1, [2.5, None, True]), "name": "ü", (0, "a"): {}, "weights": torch.arange(6.0).view(2, 3) + rank,
        "scalar": torch.tensor(rank, dtype=torch.bfloat16), "empty": torch.empty(0, 2),
    }  # fmt: skip
    found = hvd.broadcast_object(value, root_rank=size - 1)
    assert list(map(type, found)) == list(map(type, value)) and found[3] == (1, [2.5, None, True])
    assert torch.equal(found["weights"], torch.arange(6.0).view(2, 3) + size - 1)
    assert found["scalar"].dtype == torch.bfloat16 and found["empty"].shape == (0, 2)
    assert hvd.allgather_object({rank: "x" * rank}) == [{each: "x" * each} for each in range(size)]
    if rank == 0:
        with pytest.raises(
            TypeError, match="an object of type PosixPath is not sent, as it would have to be"
        ):
            hvd.broadcast_object({"path": Path()})
    hvd.barrier()

    model = net(0)
    update = torch.optim.Adam(model.parameters(), lr=0.1 * (rank + 1), betas=(0.5, 0.9))
    if rank == 1:  # this rank alone has read a checkpoint
        mse(model, 0, 0, 1).backward()
        update.step()
    hvd.broadcast_optimizer_state(update, root_rank=1)
    hvd.broadcast_parameters(list(model.named_parameters()), root_rank=1)
    assert update.param_groups[0]["lr"] == 0.2 and len(update.state) == 4
    for part in range(2):
        model.zero_grad()
        mse(model, part, None, 1).backward()
        update.step()
    same_everywhere(model)


def gradients(rank: int) -> None:
    """Compare gradients of collectives with Horovod's."""
    hvd.init()
    size = hvd.size()
    weight = torch.arange(1.0, 3.0) * (rank + 1)

    def slope(function: Callable[[Tensor], Tensor], rows: int) -> Tensor:
        given = torch.ones(rows, 2, requires_grad=True)
        out = function(given)
        (out * weight).sum().backward()
        assert given.grad is not None
        return given.grad

    total = sum(range(1, size + 1)) * torch.arange(1.0, 3.0)
    for op, expected in ((hvd.Sum, total), (hvd.Average, total / size)):
        torch.testing.assert_close(slope(lambda x, op=op: hvd.allreduce(x, op=op), 2), expected.expand(2, 2))
    mean = (total / size).expand(rank + 1, 2)
    torch.testing.assert_close(slope(hvd.allgather, rank + 1), mean)
    of_root = slope(lambda x: hvd.broadcast(x, 1), 2)
    torch.testing.assert_close(of_root, (total / size * (rank == 1)).expand(2, 2))
    senders = torch.arange(1.0, size + 1)[:, None] * torch.arange(1.0, 3.0)
    torch.testing.assert_close(slope(hvd.alltoall, size), senders)
    torch.testing.assert_close(slope(lambda x: hvd.alltoall(x, [1] * size)[0], size), senders)
    torch.testing.assert_close(slope(lambda x: hvd.reducescatter(x, op=hvd.Average), size), senders)
    torch.testing.assert_close(slope(lambda x: hvd.reducescatter(x, op=hvd.Sum), size), senders * size)


def refusals(rank: int) -> None:
    hvd.init()
    size = hvd.size()
    for call, text in (
        (
            lambda: hvd.allreduce(torch.ones(1), op="median"),
            "op 'median' is not known; it is one of mean, sum",
        ),
        (lambda: hvd.allreduce(torch.ones(1), process_set=[0, 1]), "all processes take part in each call"),
        (lambda: hvd.allreduce(torch.ones(1), compression="int8"), "compression 'int8' is not known"),
        (lambda: hvd.allgather(torch.tensor(1.0)), "without dimensions"),
        (lambda: hvd.broadcast(torch.ones(1), size), f"root_rank {size} is no rank"),
        (lambda: hvd.alltoall(torch.ones(size + 1)), f"a multiple of the {size} ranks, or give splits"),
        (lambda: hvd.alltoall(torch.ones(2), splits=[1]), "give one number of rows for each"),
        (lambda: hvd.broadcast_parameters({"n": 3}), "n is a int, which broadcast_parameters does not send"),
    ):
        with pytest.raises(UsageError, match=text):
            call()
    with pytest.raises(TypeError, match="keyword"):
        hvd.allreduce(torch.ones(1), colour="red")

    model = net(0)
    update = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    with pytest.raises(UsageError, match=r"timeout_s=5\): the process group exists already"):
        hvd.init(timeout_s=5)
    with pytest.raises(UsageError, match="averages gradients already"):
        hvd.DistributedOptimizer(update)
    with pytest.raises(UsageError, match="op 'max' is not known; it is one of mean, sum"):
        hvd.DistributedOptimizer(sgd(model), op=hvd.Max)
    with pytest.raises(UsageError, match="gradient_predivide_factor is for op=Average"):
        hvd.DistributedOptimizer(sgd(model), op=hvd.Sum, gradient_predivide_factor=2.0)
    mse(model, 0, rank, size).backward()
    with pytest.raises(UsageError, match=r"2\.(bias|weight) got a gradient 2 times since the last"):
        mse(model, 0, rank, size).backward()
    with pytest.raises(UsageError, match="was changed between"):
        update.synchronize()


def changed(rank: int) -> None:
    """Change gradients after they were sent: an error says what to call, on all ranks."""
    hvd.init()
    for change in (
        lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 0.01),
        lambda _, update: update.zero_grad(),
        lambda _, update: update.zero_grad(set_to_none=False),
    ):
        model = net(0)
        update = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
        mse(model, 0, rank, hvd.size()).backward()
        change(model, update)
        with pytest.raises(
            UsageError, match="was changed between the backward pass and the average: call opt"
        ):
            update.step()
    model = net(0)
    update = hvd.DistributedOptimizer(sgd(model))
    mse(model, 0, rank, hvd.size()).backward()
    with pytest.raises(UsageError, match=r"without optimizer\.synchronize"), update.skip_synchronize():
        update.step()
    update.synchronize()


WEIGHTS = (training, passes, sparse_and_unused, grown, built_in_the_first_batch)
CALLS = (collectives, objects, gradients, refusals, changed)


def one_after_the_other(rank: int, programs: tuple[Callable[[int], None], ...]) -> None:
    for program in programs:
        program(rank)


@pytest.mark.parametrize("size", SIZES)
def test_weights_are_those_of_one_process(size: int, tmp_path: Path) -> None:
    run_group(one_after_the_other, size, tmp_path, WEIGHTS)


@pytest.mark.parametrize("size", SIZES)
def test_calls(size: int, tmp_path: Path) -> None:
    run_group(one_after_the_other, size, tmp_path, CALLS)


def joins_by_itself(rank: int, size: int, port: int) -> None:
    shoal.comm.register()
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank % 2), LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
    )  # fmt: skip
    hvd.init(timeout_s=60)
    hvd.init()
    assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (rank, size, rank % 2, 2)
    assert (hvd.cross_rank(), hvd.cross_size()) == (rank // 2, 2) and hvd.is_initialized()
    assert hvd.allreduce(torch.tensor(float(rank))).item() == 1.5
    hvd.shutdown()
    assert not hvd.is_initialized() and not torch.distributed.is_initialized()
    with pytest.raises(UsageError, match=r"init\(\) was not called"):
        hvd.allreduce(torch.ones(1))


def test_joins_the_processes_of_the_launcher() -> None:
    port = free_port()
    assert wait_for([fork_process(joins_by_itself, rank, 4, port) for rank in range(4)]) == [0] * 4
