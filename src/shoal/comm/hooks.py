"""Fewer bytes for DistributedDataParallel's gradients: hooks for ``register_comm_hook``.

    ddp.register_comm_hook(None, bf16_wire)                             # half the bytes of fp32
    ddp.register_comm_hook(None, EightBitWire(ddp.module.named_parameters()))     # about a quarter

``bf16_wire`` keeps no state. How :class:`EightBitWire` averages a bucket over n workers:

1.  Each worker adds its gradient / n to its *residual*: what earlier steps had to send and could not.
2.  The bucket is divided into n parts, and worker r serves part r: it gets that part from all others in 8-bit
    blocks (``blocks``), each sender keeping as residual what rounding took away.
3.  Worker r adds in float32 in rank order. Its own share of part r is added as it is: it does not travel.
4.  It rounds the sum to 8-bit blocks and sends them to all, itself included, so that all workers have the
    same bits. What this second rounding takes away becomes its residual of part r.

So each worker has one residual, as large as the gradient, and in every step and for every number

    sum of gradients / n + sum of residuals before = what all workers received + sum of residuals after

which is why nothing of a gradient is lost, only late. (Error feedback: Seide et al. 2014; Karimireddy et al.
2019; two-sided, with a server's own: Tang et al., DoubleSqueeze, 2019. Here the server's lives where its
worker's would be, because a worker's own part is never rounded before the sum.)
"""

# Annotations are types here, not texts: DDP refuses a hook whose annotations are texts.

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future

from shoal.comm import int8_blocks
from shoal.errors import UsageError


def bf16_wire(group: dist.ProcessGroup | None, bucket: GradBucket) -> Future[Tensor]:
    """Average a bucket of float32 gradients in bf16; other dtypes travel as they are.

    On backend shoal servers add in float32 and round once; gloo and NCCL round at every addition.
    """
    group = group or dist.group.WORLD
    buffer = bucket.buffer()
    if buffer.dtype != torch.float32:
        return default_hooks.allreduce_hook(group, bucket)  # type: ignore[arg-type]
    work = dist.all_reduce(buffer.to(torch.bfloat16), group=group, async_op=True)
    size = dist.get_world_size(group)

    def widen(total: Future[list[Tensor]]) -> Tensor:
        return buffer.copy_(total.value()[0]).div_(size)

    future: Future[Tensor] = work.get_future().then(widen)
    return future


@dataclass(kw_only=True)
class _Place:
    """What is kept for a bucket, whose numbers are made up with zeros to n parts of m whole blocks."""

    residual: Tensor
    """float32 [n, m, BLOCK]"""
    sent: Tensor
    received: Tensor
    """uint8 [n, m * BLOCK_BYTES]: row r goes to, or comes from, worker r."""
    served: Tensor
    """uint8 [m * BLOCK_BYTES]: the sum of the part that this worker serves."""
    sums: Tensor
    """uint8 [n, m * BLOCK_BYTES]: all workers' parts."""


@dataclass(kw_only=True)
class _Exchange:
    """A bucket on its way."""

    place: _Place
    buffer: Tensor
    work: Any
    begun: Future[Any] = field(default_factory=Future)
    error: Exception | None = None

    def outcome(self, _: Future[Any]) -> Tensor:
        if self.error is not None:
            raise self.error
        return self.buffer


class EightBitWire:
    """A DDP communication hook that averages float32 gradients in 8-bit blocks with error feedback.

    Other dtypes travel as they are. All workers of the group make one at the same place in the program; it
    makes a second group, over which the sums go back while later buckets still go out: so each group sees its
    collectives in the same order on all workers.

    Args:
        parameters: the model's, with their names, under which the residuals are saved.
        group: the workers that average; default: all.
        timeout: of a bucket's way back; default: torch's for the backend.

    Raises:
        UsageError: the group's ranks are not in order, as those of the second group would be.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
    ) -> None:
        world = dist.group.WORLD
        assert world is not None
        self._group = group or world
        ranks = dist.get_process_group_ranks(self._group)
        if ranks != sorted(ranks):
            raise UsageError(f"EightBitWire: the group has the ranks {ranks}; make it with them in order")
        back = dist.new_group(
            ranks,
            timeout=timeout,
            backend=dist.get_backend(self._group),
            use_local_synchronization=True,
        )
        assert isinstance(back, dist.ProcessGroup)
        self._back = back
        self._rank, self._size = dist.get_rank(self._group), dist.get_world_size(self._group)
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in parameters}
        self._residuals: dict[Tensor, Tensor] = {}
        self._places: dict[tuple[int, ...], _Place] = {}
        # One thread each: buckets go through a stage in the order in which they came.
        self._adding = ThreadPoolExecutor(1, "shoal-8bit-sums")
        self._reading = ThreadPoolExecutor(1, "shoal-8bit-results")
        self._is_aside = False
        self.__name__ = self.__qualname__ = type(self).__name__  # DDP asks a hook for them

    def __call__(self, state: object, bucket: GradBucket) -> Future[Tensor]:
        """Average a bucket. ``state`` is not used.

        Raises:
            UsageError: the gradients are not in the processor's memory.
        """
        buffer = bucket.buffer()
        if self._is_aside or buffer.dtype != torch.float32:
            return default_hooks.allreduce_hook(self._group, bucket)
        if buffer.device.type != "cpu":
            raise UsageError(
                f"8-bit gradients on {buffer.device}: EightBitWire takes CPU tensors; use bf16_wire there"
            )
        place = self._place(bucket)
        numbers = place.residual.view(-1)[: len(buffer)]
        numbers.add_(buffer.div_(self._size))
        if self._size == 1:  # nothing travels
            buffer.copy_(numbers)
            numbers.zero_()
            return _completed(buffer)
        values, scales = int8_blocks.parts(place.sent)
        for other in range(self._size):
            if other != self._rank:
                int8_blocks.encode(place.residual[other], values[other], scales[other])
        work = dist.all_to_all_single(place.received, place.sent, group=self._group, async_op=True)
        exchange = _Exchange(place=place, buffer=buffer, work=work)
        self._adding.submit(_guarded, self._add_up, exchange)
        return exchange.begun.then(exchange.outcome)

    def _add_up(self, exchange: _Exchange) -> None:
        """Sum the part that this worker serves, once all have sent theirs, and begin to send it to all."""
        exchange.work.wait()
        place = exchange.place
        own = place.residual[self._rank]
        int8_blocks.add_in_order(place.received, own, self._rank)
        int8_blocks.encode(own, *int8_blocks.parts(place.served))
        exchange.work = dist.all_gather_into_tensor(
            place.sums.view(-1), place.served, group=self._back, async_op=True
        )
        self._reading.submit(_guarded, self._read, exchange)

    def _read(self, exchange: _Exchange) -> None:
        exchange.work.wait()
        int8_blocks.write_out(exchange.place.sums, exchange.buffer)
        exchange.begun.set_result(None)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Surround backward passes whose gradients nobody uses: averaged unrounded, leaving no residual."""
        self._is_aside = True
        try:
            yield
        finally:
            self._is_aside = False

    # ---- residuals ----------------------------------------------------------------------------------------

    def _place(self, bucket: GradBucket) -> _Place:
        """Return what is kept for a bucket; where DDP has arranged its buckets anew, residuals move along."""
        parameters = tuple(bucket.parameters())
        key = tuple(map(id, parameters))
        if (found := self._places.get(key)) is not None:
            return found
        count = bucket.buffer().numel()
        num_blocks = int8_blocks.blocks_of(-(-count // self._size))
        rows = [
            torch.zeros(self._size, num_blocks * int8_blocks.BLOCK_BYTES, dtype=torch.uint8) for _ in range(3)
        ]
        place = _Place(
            residual=torch.zeros(self._size, num_blocks, int8_blocks.BLOCK),
            sent=rows[0],
            received=rows[1],
            served=torch.zeros(num_blocks * int8_blocks.BLOCK_BYTES, dtype=torch.uint8),
            sums=rows[2],
        )
        flat, begin = place.residual.view(-1), 0
        for parameter in parameters:
            view = flat[begin : begin + parameter.numel()].view(parameter.shape)
            begin += parameter.numel()
            if parameter in self._residuals:
                view.copy_(self._residuals[parameter])
            self._residuals[parameter] = view
        if begin != count:
            raise UsageError(
                f"a bucket of {count} numbers for parameters of {begin}: EightBitWire cannot tell which is "
                "whose; use bf16_wire"
            )
        moved = set(key)
        self._places = {k: p for k, p in self._places.items() if moved.isdisjoint(k)} | {key: place}
        return place

    def residuals(self) -> dict[str, Tensor]:
        """Return this worker's residuals by the names of their parameters: views, that later steps change."""
        return {self._names[parameter]: value for parameter, value in self._residuals.items()}

    def own_tensors(self) -> dict[str, Tensor]:
        """Return what a checkpoint holds of this worker: its residuals as RANK.NAME."""
        return {f"{self._rank}.{name}": value for name, value in self.residuals().items()}

    def tensors_to_read(self, saved: Iterable[str]) -> dict[str, Tensor]:
        """Return room for what this worker takes over of the names that any number of workers saved.

        Worker r of n takes the residuals of r, r + n, r + 2n, ...: of as many workers its own; of more, one
        or several, which :meth:`read` adds; of fewer, its own or none.
        """
        shapes = {name: parameter.shape for parameter, name in self._names.items()}
        wanted = {}
        for full in saved:
            rank, _, name = full.partition(".")
            if int(rank) % self._size == self._rank and name in shapes:
                wanted[full] = torch.empty(shapes[name])
        return wanted

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the residuals to what :meth:`tensors_to_read` gave room for: their sum is kept."""
        for value in self._residuals.values():
            value.zero_()
        parameters = {name: parameter for parameter, name in self._names.items()}
        for full in sorted(tensors, key=lambda full: int(full.partition(".")[0])):
            parameter = parameters[full.partition(".")[2]]
            if parameter in self._residuals:
                self._residuals[parameter].add_(tensors[full])
            else:
                self._residuals[parameter] = tensors[full].clone()


def _guarded(step: Callable[[_Exchange], None], exchange: _Exchange) -> None:
    """Run a stage of an exchange; its failure is DDP's to raise."""
    try:
        step(exchange)
    except Exception as problem:
        exchange.error = problem
        exchange.begun.set_result(None)


def _completed(tensor: Tensor) -> Future[Tensor]:
    future: Future[Tensor] = Future()
    future.set_result(tensor)
    return future
