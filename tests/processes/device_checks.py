"""Checks of backend "shoal" on tensors of a device: a GPU (``tests/gpu``), or a runtime of CUDA without one.

Each check is a worker's; all workers run it. Numbers are small and whole: sums are exact in every dtype and
order. gloo does the same on CPU copies.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.memory_device import MemoryDevice
from shoal_workers import shoal_group
from staged_group import PYTHON_GROUP, device_of, small_pieces, stage_all, staged
from test_backend_work import raises
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from shoal.comm.collectives import collective
from shoal.comm.cuda_device import CudaDevice
from shoal.comm.devices import Device
from shoal.comm.engine import CommError, SingleProcessEngine
from shoal.comm.hooks import EightBitWire, bf16_wire
from shoal.comm.native_group import python_group
from shoal.comm.routes import HierarchicalRoutes, RankLayout
from shoal.comm.staging import DeviceWork, Staging, Transfer
from shoal.errors import UsageError
from shoal.optim.adafactor import Adafactor
from shoal.optim.adamw import AdamW
from shoal.optim.lamb import Lamb
from shoal.optim.sgd import SGD
from shoal.train.servers.local import local_steps
from shoal.train.servers.update import update_on_servers
from shoal.train.servers.waiting import bound_waiting

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8)
CYCLES = 200_000_000
"""of a GPU's clock: about a tenth of a second"""
SLEEP_S = 0.02
LIMIT = timedelta(seconds=60)
SERVED_BUFFER_BYTES = 8 * 16_384
"""The least buffer for weights on servers: a gradient and weights of one block."""


class Gpu:
    """A CUDA device.

    Attributes:
        count: elements of a tensor that travels in several chunks of ``piece_bytes``.
        wraps: ways to train that give the CPU's weights, to rounding.
        environment: of the workers.
    """

    count, piece_bytes = 300_001, 1 << 18
    wraps: tuple[str, ...] = ("ddp", "fsdp")
    type = "cuda"
    environment: dict[str, str] = {}  # noqa: RUF012

    @contextmanager
    def used(self, seed: int | None = None) -> Iterator[None]:
        """Let collectives of tensors that :meth:`put` has returned go by way of the device."""
        yield

    def put(self, tensor: Tensor) -> Tensor:
        return tensor.cuda()

    def streams(self) -> list[Any]:
        return [torch.cuda.current_stream(), torch.cuda.Stream()]

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def device(self) -> Device:
        return CudaDevice(torch.device("cuda"))

    def block(self) -> Callable[[], object]:
        """Keep the current stream busy, at most until the returned function is called."""
        torch.cuda._sleep(CYCLES)
        return lambda: None

    def kernel(self, step: Callable[[], object]) -> None:
        """Queue a step on the current stream."""
        step()

    def is_busy(self) -> bool:
        return not torch.cuda.current_stream().query()

    def synchronize(self) -> None:
        torch.cuda.current_stream().synchronize()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Capture a graph, in the mode that forbids other threads to wait."""
        side, graph, cell = torch.cuda.Stream(), torch.cuda.CUDAGraph(), torch.zeros(1, device="cuda")
        with torch.cuda.stream(side):  # torch.cuda.graph would synchronize the device first
            graph.capture_begin()
            cell.add_(1)
            yield
            graph.capture_end()

    def has_same_weights(self, found: list[Tensor], wanted: list[Tensor]) -> None:
        for mine, plain in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine, plain, rtol=1e-4, atol=1e-5)

    def stage_all(self) -> None:
        """Let all collectives from now on go by way of the device, in chunks of one block of numbers."""
        small_pieces(num_bytes=SERVED_BUFFER_BYTES, num_buffers=3)


class FakeGpu(Gpu):
    """CPU tensors, on a runtime of CUDA whose streams are threads. They must have the plain way's bits."""

    count, piece_bytes = 3_001, 1 << 10
    wraps = ("ddp", "bf16", "fsdp")
    type = "cpu"
    environment = PYTHON_GROUP

    _device: MemoryDevice

    @contextmanager
    def used(self, seed: int | None = None) -> Iterator[None]:
        with staged(seed=seed) as side:
            self._device = device_of(side)
            yield

    def put(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def stage_all(self) -> None:
        stage_all(SERVED_BUFFER_BYTES, seed=7)

    def streams(self) -> list[Any]:
        return [self._device.new_stream()]

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return self._device.on(stream)

    def device(self) -> Device:
        return MemoryDevice(seed=5)

    def _stream(self) -> Any:
        return self._device.current_stream()

    def block(self) -> Callable[[], object]:
        go_on = threading.Event()
        self._stream().call(go_on.wait)
        return go_on.set

    def kernel(self, step: Callable[[], object]) -> None:
        self._stream().call(step)

    def is_busy(self) -> bool:
        return not self._stream().record_event().query()

    def synchronize(self) -> None:
        self._stream().record_event().synchronize()

    def capturing(self) -> AbstractContextManager[None]:
        return self._device.capturing()

    def has_same_weights(self, found: list[Tensor], wanted: list[Tensor]) -> None:
        assert all(map(torch.equal, found, wanted))


def part(rank: int, dtype: torch.dtype, count: int) -> Tensor:
    return torch.randint(1, 4, (count,), generator=torch.Generator().manual_seed(rank)).to(dtype)


# ---- collectives ----------------------------------------------------------------------------------------


def check_collectives(rank: int, gpu: Gpu, size: int, is_hierarchical: bool) -> None:
    small_pieces(num_bytes=gpu.piece_bytes)
    gloo = dist.new_group(backend="gloo")

    def same(call: Any, *tensors: Tensor) -> None:
        cpu = [tensor.float() if tensor.dtype == torch.bfloat16 else tensor.clone() for tensor in tensors]
        call(*cpu, group=gloo)
        found = [gpu.put(tensor) for tensor in tensors]
        call(*found, group=dist.group.WORLD)
        for one, other in zip(cpu, found, strict=True):
            torch.testing.assert_close(other.cpu(), one.to(other.dtype), rtol=0, atol=0)

    with gpu.used(seed=rank):
        for dtype in DTYPES:
            _check_dtype(rank, gpu, size, dtype, same)
        _check_layouts_and_messages(rank, gpu, size, same)
    (device_group,) = shoal_group().device_groups.values()
    assert (device_group._hierarchical is not None) == is_hierarchical


def _check_dtype(rank: int, gpu: Gpu, size: int, dtype: torch.dtype, same: Any) -> None:
    mine = partial(part, rank, dtype)
    for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        same(partial(dist.all_reduce, op=op), mine(gpu.count))
        if dtype != torch.float64:  # gloo's reduce leaves partial sums on the other ranks
            reduced, wanted = gpu.put(mine(gpu.count)), mine(gpu.count)
            dist.reduce(reduced, 1, op)
            if rank == 1:
                rows = torch.stack([part(each, dtype, gpu.count) for each in range(size)]).double()
                reduce = {"SUM": rows.sum, "PRODUCT": rows.prod, "MIN": rows.amin, "MAX": rows.amax}
                wanted = reduce[op.name](0).to(dtype)
            assert torch.equal(reduced.cpu(), wanted)
    for root in range(size):
        same(lambda tensor, group, root=root: dist.broadcast(tensor, root, group), mine(gpu.count))
    same(dist.all_gather_into_tensor, torch.zeros(size * gpu.count, dtype=dtype), mine(gpu.count))
    rows = [torch.zeros(7, dtype=dtype)] * size
    same(lambda given, *rows, group: dist.all_gather(list(rows), given, group), mine(7), *rows)
    sums = gpu.put(torch.empty(1000, dtype=dtype))
    dist.reduce_scatter_tensor(sums, gpu.put(mine(size * 1000)))
    total = sum(part(each, dtype, size * 1000).double() for each in range(size))
    assert torch.equal(sums.cpu().double(), Tensor(total).view(size, -1)[rank])


def _check_layouts_and_messages(rank: int, gpu: Gpu, size: int, same: Any) -> None:
    average = gpu.put(part(rank, torch.float32, gpu.count))
    dist.all_reduce(average, dist.ReduceOp.AVG)
    wanted = torch.stack([part(each, torch.float32, gpu.count) for each in range(size)]).sum(0) / size
    assert torch.equal(average.cpu(), wanted)
    strided = part(rank, torch.float32, 12).view(3, 4)
    same(lambda tensor, group: dist.all_reduce(tensor.t(), group=group), strided)
    same(
        lambda to, given, group: dist.all_to_all_single(to, given, group=group),
        torch.zeros(size),
        torch.arange(size) + 10.0 * rank,
    )
    for root in range(size):
        _check_rooted_messages(rank, gpu, size, root)
    _check_uneven(rank, gpu, size)
    received = gpu.put(torch.zeros(4))
    works: Any = [
        dist.isend(gpu.put(torch.full((4,), float(rank))), (rank + 1) % size),
        dist.irecv(received, (rank - 1) % size),
    ]
    for work in works:
        work.wait()
    assert received.tolist() == [(rank - 1) % size] * 4
    if rank == 0:
        sources = [dist.recv(received) for _ in range(size - 1)]  # of any rank
        assert sorted(sources) == list(range(1, size)) and received.tolist() == [sources[-1]] * 4
    else:
        dist.send(gpu.put(torch.full((4,), float(rank))), 0)
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, rank)
    assert objects == list(range(size))


def _check_rooted_messages(rank: int, gpu: Gpu, size: int, root: int) -> None:
    numbers = [part(10 * root + each, torch.float32, gpu.count) for each in range(size)]
    is_root, rows = rank == root, [gpu.put(torch.zeros(gpu.count)) for _ in range(size)]
    dist.gather(gpu.put(numbers[rank]), rows if is_root else None, root)
    assert not is_root or all(torch.equal(row.cpu(), each) for row, each in zip(rows, numbers, strict=True))
    mine = gpu.put(torch.zeros(2, gpu.count).t())[:, 0]  # its elements are apart
    dist.scatter(mine, [gpu.put(each) for each in numbers] if is_root else None, root)
    assert torch.equal(mine.cpu(), numbers[rank])


def _check_uneven(rank: int, gpu: Gpu, size: int) -> None:
    """Each pair of ranks exchanges another number of elements, some none."""

    def count(source: int, target: int) -> int:
        return (source + 2 * target) % 3 * gpu.count // 2

    given = [gpu.put(torch.full((count(rank, each),), 10.0 * rank + each)) for each in range(size)]
    got = [gpu.put(torch.zeros(count(each, rank))) for each in range(size)]
    dist.all_to_all(got, given)
    whole = torch.zeros(sum(count(each, rank) for each in range(size)))
    found = gpu.put(whole)
    sizes = [[count(each, rank) for each in range(size)], [count(rank, each) for each in range(size)]]
    dist.all_to_all_single(found, torch.cat(given), *sizes)
    wanted = [torch.full((count(each, rank),), 10.0 * each + rank) for each in range(size)]
    assert all(torch.equal(mine.cpu(), each) for mine, each in zip(got, wanted, strict=True))
    assert torch.equal(found.cpu(), torch.cat(wanted))


# ---- several devices in a host ----------------------------------------------------------------------------


def check_rails(rank: int, gpu: Gpu, size: int) -> None:
    """Take the way of several GPUs in a host with one in each: the group inside the host has one rank."""
    of_records = RankLayout.of
    RankLayout.of = lambda *given: replace(of_records(*given), is_hierarchical=True)  # type: ignore[method-assign]
    check_collectives(rank, gpu, size, True)


class GroupOfOne:
    """A process group of one rank, as staging uses it."""

    def error(self) -> str | None:
        return None

    def abort(self, reason: str) -> None:
        raise AssertionError(reason)

    def explain(self, problem: Exception) -> Exception:
        return problem


def check_rails_of_one_rank(rank: int, gpu: Gpu) -> None:
    """Pass tensors through the group inside a host and a rail's engine: each result is what was given."""
    device, group, store = gpu.device(), GroupOfOne(), dist.HashStore()
    staging = Staging(device, group, num_buffers=2, buffer_bytes=gpu.piece_bytes)
    inside = [
        device.intra_host_group(dist.PrefixStore(side, store), 0, 1, LIMIT, side) for side in ("out", "back")
    ]
    routes = HierarchicalRoutes(
        layout=RankLayout(((0,),), 0, True), rail=SingleProcessEngine(),
        d2h_ranks=inside[0], h2d_ranks=inside[1], widen=True,
    )  # fmt: skip
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for kind in ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter"):
            source, wanted = gpu.put(part(3, dtype, gpu.count)), part(3, dtype, gpu.count)
            in_place = kind in ("all_reduce", "reduce", "broadcast")
            target = source if in_place else torch.zeros_like(source)
            work = DeviceWork(device, kind, [target], group, lambda: None)
            route = routes.route(collective(kind, source, target))
            ready = device.current_stream().record_event()
            staging.begin(Transfer(route=route, ready=ready, timeout_s=60, work=work, on_end=lambda: None))
            work.wait(LIMIT)
            assert torch.equal(target.cpu(), wanted), (kind, dtype)
    counts = staging.lane.counters()
    assert counts["chunks"] > 15 and counts["events"] <= 2 * counts["chunks"]
    staging.stop()
    for each in inside:
        each.close()


def check_rails_with_a_helper(rank: int, gpu: Gpu, size: int) -> None:
    """Each rail's sums are made on the helper."""
    small_pieces(num_bytes=gpu.piece_bytes)
    with gpu.used(seed=rank):
        tensor = gpu.put(part(rank, torch.float32, gpu.count))
        dist.all_reduce(tensor)
    assert torch.equal(
        tensor.cpu(), torch.stack([part(each, torch.float32, gpu.count) for each in range(size)]).sum(0)
    )
    (side,) = shoal_group().device_groups.values()
    assert side._hierarchical is not None
    (rail,) = side._engines
    assert rail.counters()["bytes_sent"] >= gpu.count * 4 // 2


# ---- orders -----------------------------------------------------------------------------------------------


def check_orders(rank: int, gpu: FakeGpu, seeds: range) -> None:
    """Begin collectives and messages at once, wait in any order, on streams that are late by each seed.

    All ranks begin the same collectives in one order, and messages between them wherever they like.
    """
    for seed in seeds:
        group = dist.new_group()
        small_pieces(group, gpu.piece_bytes, 2 + seed % 3)
        with staged(group=group, seed=2 * seed + rank):
            _check_order(rank, gpu, group, seed)
        dist.destroy_process_group(group)


def _check_order(rank: int, gpu: FakeGpu, group: Any, seed: int) -> None:
    alike, mine = random.Random(seed), random.Random(2 * seed + rank)
    size = dist.get_world_size()
    expected: list[tuple[Tensor, Tensor]] = []
    begun: list[Callable[[], Any]] = []
    kept: list[Any] = []

    def numbers(each: int, number: int, count: int) -> Tensor:
        return part(1_000 * seed + 10 * number + each, torch.float32, count)

    for number in range(8):
        count = alike.choice((1, 70, 900))
        of_ranks = [numbers(each, number, count) for each in range(size)]
        given, rows = of_ranks[rank].clone(), torch.zeros(size, count)
        kept.append(given)
        match alike.randrange(6):
            case 0:
                begun.append(partial(dist.all_reduce, given, group=group, async_op=True))
                expected.append((given, torch.stack(of_ranks).sum(0)))
            case 1:
                begun.append(partial(dist.broadcast, given, 1, group=group, async_op=True))
                expected.append((given, of_ranks[1]))
            case 2:
                begun.append(partial(dist.all_gather_into_tensor, rows, given, group=group, async_op=True))
                expected.append((rows, torch.stack(of_ranks)))
            case 3:
                full = given.repeat(size)
                kept.append(full)
                begun.append(partial(dist.reduce_scatter_tensor, given, full, group=group, async_op=True))
                expected.append((given, torch.stack(of_ranks).sum(0)))
            case 4:
                full = given.repeat(size)
                kept.append(full)
                begun.append(partial(dist.all_to_all_single, rows.view(-1), full, group=group, async_op=True))
                expected.append((rows, torch.stack(of_ranks)))
            case _:
                parts = list(rows.unbind()) if rank == 0 else None
                begun.append(partial(dist.gather, given, parts, 0, group=group, async_op=True))
                expected.append((rows, torch.stack(of_ranks) if rank == 0 else torch.zeros(size, count)))
    for tag in range(4):  # somewhere between them, and the receive before the send or behind it
        count = alike.choice((1, 70, 900))
        given, target = numbers(rank, 100 + tag, count), torch.zeros(count)
        kept.append(given)
        for call in (
            partial(dist.isend, given, (rank + 1) % size, group=group, tag=tag),
            partial(dist.irecv, target, (rank - 1) % size, group=group, tag=tag),
        ):
            begun.insert(mine.randrange(len(begun) + 1), call)
        expected.append((target, numbers((rank - 1) % size, 100 + tag, count)))
    works = [call() for call in begun]
    mine.shuffle(works)
    for work in works:
        work.wait()
    wrong = [place for place, (found, wanted) in enumerate(expected) if not torch.equal(found, wanted)]
    assert not wrong, f"seed {seed}: {wrong}"


# ---- streams and graphs -------------------------------------------------------------------------------


def check_streams(rank: int, gpu: Gpu) -> None:
    small_pieces(num_bytes=gpu.piece_bytes)
    with gpu.used(seed=rank):
        tensor = gpu.put(torch.zeros(gpu.count))
        seen = torch.zeros_like(tensor)
        dist.all_reduce(tensor)  # the first one meets the others
        for stream in gpu.streams():
            with gpu.on(stream):
                for step in range(5):
                    go_on = gpu.block()
                    gpu.kernel(partial(tensor.fill_, step + rank))
                    work: Any = dist.all_reduce(tensor, async_op=True)
                    assert gpu.is_busy(), "the call does not wait for the kernels before it"
                    go_on()
                    work.wait()
                    gpu.kernel(partial(seen.copy_, tensor))
                    gpu.kernel(partial(tensor.fill_, -1))  # must not overtake the copy back
                    gpu.synchronize()
                    assert (seen == 2 * step + 1).all()
                    assert work.is_completed() and work.is_success()
                _check_given_memory(gpu)
        last = gpu.put(torch.full((gpu.count,), 1.0))
        work = dist.all_reduce(last, async_op=True)
        future = work.get_future().then(lambda done: done.value()[0] * 3)
        assert (future.wait() == 6).all()


def _check_given_memory(gpu: Gpu) -> None:
    """Give inputs away while they are read: nobody else keeps them."""
    rows = [gpu.put(torch.empty(2 * gpu.count)) for _ in range(20)]
    works: list[Any] = []
    for step, row in enumerate(rows):
        given = gpu.put(torch.full((gpu.count,), float(step)))
        works.append(dist.all_gather_into_tensor(row, given, async_op=True))
        del given
        gpu.put(torch.full((gpu.count,), float("nan")))
    for work in works:
        work.wait()
    gpu.synchronize()
    for step, row in enumerate(rows):
        assert (row == step).all()


def check_messages(rank: int, gpu: Gpu) -> None:
    """Messages leave after the kernels before them, and a receive that waits holds up nothing."""
    small_pieces(num_bytes=gpu.piece_bytes)
    other = 1 - rank
    with gpu.used(seed=rank):
        for stream in gpu.streams():
            late, soon, seen, given = (gpu.put(torch.zeros(gpu.count)) for _ in range(4))
            total = gpu.put(torch.full((gpu.count,), 1.0))
            with gpu.on(stream):
                waiting: Any = dist.irecv(late, other, tag=9)
                go_on = gpu.block()
                gpu.kernel(partial(given.fill_, rank + 1.0))
                works: list[Any] = [dist.isend(given, other), dist.irecv(soon, other)]
                assert gpu.is_busy(), "the call does not wait for the kernels before it"
                go_on()
                for work in works:
                    work.wait()
                gpu.kernel(partial(seen.copy_, soon))
                gpu.kernel(partial(soon.fill_, -1))  # must not overtake the copy back
                dist.all_reduce(total)
                work = dist.isend(given, other, tag=9)
                assert (waiting.get_future().wait()[0] == other + 1).all()
                waiting.wait()
                work.wait()
                gpu.synchronize()
            assert (seen == other + 1).all() and (late == other + 1).all() and (total == 2).all()
            assert work.is_completed() and work.is_success()
        dist.irecv(late, other, tag=77)  # never sent: it ends with the group


def check_captures_beside_collectives(rank: int, gpu: Gpu) -> None:
    """The threads that copy wait for events and allocate while another thread captures."""
    small_pieces(num_bytes=gpu.piece_bytes)
    with gpu.used(seed=rank):
        for step in range(5):
            with gpu.on(gpu.streams()[-1]):
                large = gpu.put(torch.full((8 * gpu.count,), float(rank + step)))
                go_on = gpu.block()  # copies wait for it, so the sum is under way during the capture
                work: Any = dist.all_reduce(large, async_op=True)
                with gpu.capturing():
                    go_on()
                    time.sleep(SLEEP_S)
                work.wait()
                gpu.synchronize()
                assert (large == 2 * step + 1).all()


# ---- training -----------------------------------------------------------------------------------------


def trained(rank: int, device: str, wrap: str) -> list[Tensor]:
    torch.manual_seed(5)
    module: Any = nn.Sequential(nn.Linear(20, 60), nn.ReLU(), nn.Linear(60, 3)).to(device)
    if wrap == "fsdp":
        module = fully_shard(module, mesh=dist.init_device_mesh(device, (2,)))
    else:
        module = DistributedDataParallel(module, bucket_cap_mb=0.003)
        if wrap == "bf16":
            module.register_comm_hook(None, bf16_wire)
        if wrap == "int8":
            module.register_comm_hook(None, EightBitWire(module.module.named_parameters()))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for step in range(3):
        inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * step + rank)).to(device)
        optimizer.zero_grad()
        module(inputs).square().mean().backward()
        optimizer.step()
    return [
        getattr(each, "full_tensor", lambda each=each: each)().detach().cpu() for each in module.parameters()
    ]


def check_training(rank: int, gpu: Gpu) -> None:
    small_pieces()
    for wrap in gpu.wraps:
        plain = trained(rank, "cpu", wrap)
        with gpu.used(seed=7 + rank):
            found = trained(rank, gpu.type, wrap)
        gpu.has_same_weights(found, plain)


def sums_in_eight_bits(rank: int, put: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Return the sums of three steps, and the residuals after them."""
    parameters = [nn.Parameter(put(torch.zeros(shape))) for shape in ((700,), (41, 30), (1,))]
    wire = EightBitWire([(str(number), each) for number, each in enumerate(parameters)])
    count = sum(each.numel() for each in parameters)
    sums = []
    for step in range(3):
        numbers = torch.randn(count, generator=torch.Generator().manual_seed(100 * step + rank))
        if step == 1:
            numbers[5] = torch.inf  # a block that arrives as NaN and leaves no residual
        sums.append(wire.sum(put(numbers), parameters).wait().cpu())
    return [*sums, *(each.cpu() for each in wire.residuals().values())]


def check_eight_bits(rank: int, gpu: Gpu) -> None:
    small_pieces()
    plain = sums_in_eight_bits(rank, torch.clone)
    exact = trained(rank, "cpu", "ddp")
    with gpu.used(seed=7 + rank):
        found = sums_in_eight_bits(rank, gpu.put)
        weights = trained(rank, gpu.type, "int8")
    assert plain[1].isnan().sum() == 256
    for mine, wanted in zip(found, plain, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=0, equal_nan=True)
    for mine, wanted in zip(weights, exact, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=0, atol=1e-3)


def check_lost(rank: int, gpu: Gpu, size: int) -> None:
    small_pieces()
    with gpu.used():
        tensor = gpu.put(torch.ones(gpu.count))
        dist.all_reduce(tensor)
        if rank == size - 1:
            dist.all_reduce(tensor, async_op=True)
            os.kill(os.getpid(), signal.SIGKILL)
        with raises(CommError, f"rank {size - 1}", "was lost"):
            for _ in range(1000):
                dist.all_reduce(tensor)
        with raises(CommError, f"rank {size - 1}"):
            dist.all_reduce(tensor)
        dist.destroy_process_group()


# ---- weights on servers -------------------------------------------------------------------------------


class Slopes(nn.Module):
    """Has the gradients that it is given, to the bit, whatever its weights and its device are."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(5)
        self.weights = nn.ParameterList(
            torch.randn(shape, generator=draw) for shape in ((3, 15_000), (2_049,), (7,))
        )

    def forward(self, slopes: list[Tensor]) -> Tensor:
        products = (weight * slope for weight, slope in zip(self.weights, slopes, strict=True))
        return torch.stack([each.sum() for each in products]).sum()


def slopes(rank: int, step: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randint(-8, 9, weight.shape, generator=draw).float() for weight in Slopes().weights]


def on_device(gpu: Gpu) -> DistributedDataParallel:
    model = Slopes()
    for parameter in model.parameters():
        parameter.data = gpu.put(parameter.data)
    return DistributedDataParallel(model, bucket_cap_mb=0.05, broadcast_buffers=False)


def stepped(optimizer: Any, num_steps: int) -> Slopes:
    """Return a model on the CPU after steps with the mean gradients of all ranks, whose sums are exact."""
    model = Slopes()
    by_itself = optimizer(model)
    size = dist.get_world_size()
    for step in range(num_steps):
        of_ranks = zip(*(slopes(rank, step) for rank in range(size)), strict=True)
        for parameter, gradients in zip(model.parameters(), of_ranks, strict=True):
            parameter.grad = torch.stack(gradients).sum(0) / size
        by_itself.step()
    return model


def require_weights(found: nn.Module, wanted: nn.Module, gpu: Gpu) -> None:
    for mine, plain in zip(found.parameters(), wanted.parameters(), strict=True):
        assert mine.device.type == gpu.type, "weights stay on the device"
        assert torch.equal(mine.detach().cpu(), plain)


def check_served(rank: int, gpu: Gpu) -> None:
    """Servers step with gradients of a device: the bits are those of one process on the CPU."""
    gpu.stage_all()
    for optimizer, max_norm in (
        (lambda model: AdamW(model.parameters(), lr=0.01), None),
        (lambda model: SGD(model.parameters(), lr=0.1, momentum=0.9), float("inf")),
        (lambda model: Lamb(model.parameters(), lr=0.01), None),
        (lambda model: Adafactor(model.parameters(), lr=0.01, min_factored_size=3), None),
    ):
        model = on_device(gpu)
        stepper = optimizer(model)
        with update_on_servers(model, stepper, max_norm=max_norm):
            for step in range(4):
                model([gpu.put(each) for each in slopes(rank, step)]).backward()
                stepper.step()
                stepper.zero_grad()
        want = stepped(optimizer, 4)
        require_weights(model, want, gpu)
    (side,) = python_group(dist.group.WORLD).device_groups.values()
    assert side.staging.lane.counters()["bytes_to_device"] > 0


def check_first_use_by_two_threads(rank: int) -> None:
    """A thread that sends and one that receives, both for the first time, open one device, its two lanes."""
    group = python_group(dist.group.WORLD)
    opened: list[str] = []

    def open_device(_: torch.device) -> Device:
        opened.append("device")
        time.sleep(0.2)
        device = MemoryDevice()
        open_lane = device.open_lane

        def open_lane_slowly(*args: Any) -> Any:
            opened.append("lane")
            time.sleep(0.2)
            return open_lane(*args)

        device.open_lane = open_lane_slowly  # type: ignore[method-assign]
        return device

    group.devices["cpu"] = open_device
    got = [torch.zeros(3) for _ in range(2)]
    begin = threading.Barrier(2)

    def receive() -> None:
        begin.wait()
        for each in got:
            dist.recv(each, 1 - rank)

    receiver = threading.Thread(target=receive)
    receiver.start()
    begin.wait()
    for number in (1.0, 2.0):
        dist.send(torch.full((3,), number), 1 - rank)
    receiver.join()
    assert [each.tolist() for each in got] == [[1.0] * 3, [2.0] * 3]
    assert opened == ["device", "lane", "lane"]
    del group.devices["cpu"]


def check_no_servers(rank: int, gpu: Gpu) -> None:
    """Where all ranks share a host the error says so, and the group goes on."""
    gpu.stage_all()
    model = on_device(gpu)
    with (
        raises(UsageError, "all ranks of group", "share a host", "start it on two hosts or more"),
        update_on_servers(model, AdamW(model.parameters(), lr=0.01)),
    ):
        pass
    tensor = gpu.put(torch.ones(5))
    dist.all_reduce(tensor)
    assert tensor.tolist() == [2] * 5


def check_rounded(rank: int, gpu: Gpu) -> None:
    """Weights come to the device in bf16, and the servers' float32 ones at the end."""
    gpu.stage_all()
    model = on_device(gpu)
    stepper = AdamW(model.parameters(), lr=0.01)
    with update_on_servers(model, stepper, weights="bf16") as update:
        for step in range(4):
            model([gpu.put(each) for each in slopes(rank, step)]).backward()
            stepper.step()
            stepper.zero_grad()
        want = stepped(lambda each: AdamW(each.parameters(), lr=0.01), 4)
        for mine, plain in zip(model.parameters(), want.parameters(), strict=True):
            assert torch.equal(mine.detach().cpu(), plain.detach().bfloat16().float())
        update.bring_state()
        require_weights(model, want, gpu)


def check_bounded(rank: int, gpu: Gpu) -> None:
    """Workers run ahead by a step; the gradients here do not depend on the weights."""
    gpu.stage_all()
    model = on_device(gpu)
    stepper = AdamW(model.parameters(), lr=0.01)
    with bound_waiting(model, stepper, staleness=1) as steps:
        for step in steps.batches(range(5)):
            model([gpu.put(each) for each in slopes(rank, step)]).backward()
            stepper.step()
            stepper.zero_grad()
    require_weights(model, stepped(lambda each: AdamW(each.parameters(), lr=0.01), 5), gpu)


def check_local(rank: int, gpu: Gpu) -> None:
    """Each worker steps on the device; its moves go to the servers, and their weights come back."""
    gpu.stage_all()
    model = on_device(gpu)
    inner = torch.optim.SGD(model.parameters(), lr=0.25)  # whose products are exact on any device
    outer = SGD(model.parameters(), lr=0.5, momentum=0.5)
    with local_steps(model, inner, outer, every=2):
        for step in range(4):
            model([gpu.put(each) for each in slopes(rank, step)]).backward()
            inner.step()
            inner.zero_grad()
    whole = Slopes()
    stepper = SGD(whole.parameters(), lr=0.5, momentum=0.5)
    for first in (0, 2):
        moves = [moves_of(whole, each, first) for each in range(2)]
        for parameter, mine, other in zip(whole.parameters(), *moves, strict=True):
            parameter.grad = mine * 0.5 + other * 0.5
        stepper.step()
    require_weights(model, whole, gpu)


def moves_of(whole: Slopes, rank: int, first: int) -> list[Tensor]:
    """Return the negative moves of a rank in two local steps from these weights."""
    weights = [parameter.detach().clone() for parameter in whole.parameters()]
    for step in (first, first + 1):
        for weight, slope in zip(weights, slopes(rank, step), strict=True):
            weight.sub_(slope * 0.25)
    return [before.detach() - now for before, now in zip(whole.parameters(), weights, strict=True)]
