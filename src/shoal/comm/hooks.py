"""Compresses DistributedDataParallel's gradients on the wire: hooks for ``register_comm_hook``.

    ddp.register_comm_hook(None, bf16_wire)                             # half the bytes of fp32
    ddp.register_comm_hook(None, EightBitWire(ddp.module.named_parameters()))     # about a quarter

``bf16_wire`` is stateless. :class:`EightBitWire` averages a bucket over n workers as follows:

1.  Each worker adds its gradient / n to its *residual*, the error that earlier steps have left.
2.  The bucket is divided into n parts, and worker r serves part r: all others send it that part in 8-bit
    blocks (``int8_blocks``) and keep the rounding error as their residual.
3.  Worker r adds in float32 in rank order. Its own share of part r is not sent, and so is added unrounded.
4.  It rounds the sum to 8-bit blocks and sends them to all workers, itself included, so that all have the
    same bits. The error of this second rounding becomes its residual of part r.

Each worker so has one residual, of the size of the gradient, and for every step and number

    sum of gradients / n + sum of residuals before = result on all workers + sum of residuals after

Nothing of a gradient is lost; it is only delayed. (Error feedback: Seide et al. 2014; Karimireddy et al.
2019; two-sided, with error feedback on the server: Tang et al., DoubleSqueeze, 2019. Here the server's
residual takes the place of its worker's, because a worker's own part is never rounded before the sum.)
"""

# No `from __future__ import annotations`: DDP refuses a hook whose annotations are strings.

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
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
    """Average a bucket of float32 gradients in bf16; other dtypes are sent unchanged.

    On backend shoal, servers add in float32 and round once; gloo and NCCL round at every addition.

    Args:
        group: the workers that average; ``None`` for all.
        bucket: DDP's bucket.

    Example (one process; under torchrun every rank does the same):

        >>> import torch.distributed as dist
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = DistributedDataParallel(nn.Linear(4, 2))
        >>> model.register_comm_hook(None, bf16_wire)
        >>> dist.destroy_process_group()
    """
    group = group or dist.group.WORLD
    buffer = bucket.buffer()
    if buffer.dtype != torch.float32:
        return default_hooks.allreduce_hook(group, bucket)  # type: ignore[arg-type]
    work = dist.all_reduce(buffer.to(torch.bfloat16), group=group, async_op=True)
    size = dist.get_world_size(group)

    def widen(total: Future[list[Tensor]]) -> Tensor:
        buffer.copy_(total.value()[0])
        return buffer.div_(int8_blocks.divisor(size, buffer))

    future: Future[Tensor] = work.get_future().then(widen)
    return future


@dataclass(kw_only=True)
class _BucketBuffers:
    """Buffers of one bucket; the gradient is zero-padded to n rows of m blocks."""

    residual: Tensor
    """float32 [n, m, BLOCK]"""
    sent: Tensor
    received: Tensor
    """uint8 [n, m * BLOCK_BYTES]: row r is sent to, or received from, worker r."""
    served: Tensor
    """uint8 [m * BLOCK_BYTES]: the reduced part that this worker serves."""
    sums: Tensor
    """uint8 [n, m * BLOCK_BYTES]: the reduced parts of all workers."""


@dataclass(kw_only=True)
class _Exchange:
    """A bucket in flight."""

    buffers: _BucketBuffers
    buffer: Tensor
    work: Any
    begun: Future[Tensor]
    error: Exception | None = None

    def outcome(self, _: Future[Tensor]) -> Tensor:
        if self.error is not None:
            raise self.error
        return self.buffer


class _Stage:
    """Takes the buckets through one part of an exchange, in order: a thread, and on a GPU a stream."""

    def __init__(self, name: str) -> None:
        self._thread = ThreadPoolExecutor(1, f"shoal-8bit-{name}")
        self._stream: torch.cuda.Stream | None = None

    def submit(self, step: Callable[[_Exchange], None], exchange: _Exchange) -> None:
        """Run a step of an exchange; DDP raises its error."""
        self._thread.submit(self._run, step, exchange)

    def _run(self, step: Callable[[_Exchange], None], exchange: _Exchange) -> None:
        try:
            with self._stream_of(exchange.buffer.device):
                step(exchange)
        except Exception as problem:  # noqa: BLE001  # raised by DDP
            exchange.error = problem
            exchange.begun.set_result(exchange.buffer)

    def _stream_of(self, device: torch.device) -> AbstractContextManager[Any]:
        if device.type != "cuda":
            return nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        return torch.cuda.stream(self._stream)


class EightBitWire:
    """A DDP communication hook that averages float32 gradients in 8-bit blocks with error feedback.

    Other dtypes are sent unchanged. All workers of the group construct it at the same point of the program.
    It creates a second group for the results, which are sent while later buckets are still being reduced, so
    that each group sees its collectives in the same order on all workers.

    Args:
        parameters: the model's named parameters; residuals are saved under these names.
        group: the workers that average; default: all.
        timeout: of the second group; default: torch's for the backend.
        group_number: of the group among those of a model in stages, from 0.
        holders: numbers of all groups that have a parameter, by its name. The first takes saved residuals of
            groups that no longer have it. Default: this group has all.

    Raises:
        UsageError: the group's ranks are not in ascending order, as those of the second group would be.

    Source: Seide et al. 2014 and Karimireddy et al. 2019 (arXiv 1901.09847), error feedback.

    Example (one process; under torchrun every rank does the same):

        >>> import torch.distributed as dist
        >>> from torch.nn.parallel import DistributedDataParallel
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> model = DistributedDataParallel(nn.Linear(4, 2))
        >>> model.register_comm_hook(None, EightBitWire(model.module.named_parameters()))
        >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
        *,
        group_number: int = 0,
        holders: Mapping[str, Sequence[int]] | None = None,
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
        self._group_number, self._holders = group_number, holders or {}
        self._names: dict[Tensor, str] = {parameter: name for name, parameter in parameters}
        self._residuals: dict[str, Tensor] = {}
        self._buffers: dict[tuple[int, ...], _BucketBuffers] = {}
        self._adding, self._reading = _Stage("sums"), _Stage("results")
        self._is_exact = False
        self.__name__ = self.__qualname__ = type(self).__name__  # DDP reads them

    def __call__(self, state: object, bucket: GradBucket) -> Future[Tensor]:
        """Average a bucket; ``state`` is unused."""
        buffer = bucket.buffer()
        if self._is_exact or buffer.dtype != torch.float32:
            return default_hooks.allreduce_hook(self._group, bucket)
        return self.sum(buffer.div_(int8_blocks.divisor(self._size, buffer)), bucket.parameters())

    def sum(self, buffer: Tensor, parameters: Iterable[Tensor]) -> Future[Tensor]:
        """Begin to replace float32 gradients by their sum over the workers; the future is for its end.

        Args:
            buffer: the gradients of ``parameters`` one after the other, ``[N]``.
            parameters: the same ones in the same order on every worker.
        """
        buffers = self._buffers_of(buffer, tuple(parameters))
        numbers = buffers.residual.view(-1)[: len(buffer)]
        numbers.add_(buffer)
        if self._size == 1:  # nothing to send
            buffer.copy_(numbers)
            numbers.zero_()
            future: Future[Tensor] = Future()
            future.set_result(buffer)
            return future
        values, scales = int8_blocks.values_and_scales(buffers.sent)
        for other in range(self._size):
            if other != self._rank:
                int8_blocks.encode(buffers.residual[other], values[other], scales[other])
        work = dist.all_to_all_single(buffers.received, buffers.sent, group=self._group, async_op=True)
        begun: Future[Tensor] = Future(devices=None if buffer.device.type == "cpu" else [buffer.device])
        exchange = _Exchange(buffers=buffers, buffer=buffer, work=work, begun=begun)
        self._adding.submit(self._add_up, exchange)
        return exchange.begun.then(exchange.outcome)

    def _add_up(self, exchange: _Exchange) -> None:
        """Reduce the part that this worker serves, and start sending it to all."""
        exchange.work.wait()
        buffers = exchange.buffers
        own = buffers.residual[self._rank]
        int8_blocks.add_in_order(buffers.received, own, self._rank)
        int8_blocks.encode(own, *int8_blocks.values_and_scales(buffers.served))
        exchange.work = dist.all_gather_into_tensor(
            buffers.sums.view(-1), buffers.served, group=self._back, async_op=True
        )
        self._reading.submit(self._read, exchange)

    def _read(self, exchange: _Exchange) -> None:
        exchange.work.wait()
        int8_blocks.decode_rows(exchange.buffers.sums, exchange.buffer)
        exchange.begun.set_result(exchange.buffer)

    @contextmanager
    def no_error_feedback(self) -> Iterator[None]:
        """Average without compression in this context, leaving residuals unchanged.

        For backward passes whose gradients are discarded.
        """
        self._is_exact = True
        try:
            yield
        finally:
            self._is_exact = False

    # ---- residuals ----------------------------------------------------------------------------------------

    def _buffers_of(self, buffer: Tensor, parameters: tuple[Tensor, ...]) -> _BucketBuffers:
        """Return the buffers of a bucket; if DDP has rebuilt its buckets, carry the residuals over."""
        key = tuple(map(id, parameters))
        if (known := self._buffers.get(key)) is not None:
            return known
        count = buffer.numel()
        num_blocks = -(-count // (self._size * int8_blocks.BLOCK))
        rows = buffer.new_zeros(self._size, num_blocks * int8_blocks.BLOCK_BYTES, dtype=torch.uint8)
        buffers = _BucketBuffers(
            residual=buffer.new_zeros(self._size, num_blocks, int8_blocks.BLOCK),
            sent=rows,
            received=rows.clone(),
            served=rows[0].clone(),
            sums=rows.clone(),
        )
        flat, begin = buffers.residual.view(-1), 0
        for parameter in parameters:
            view = flat[begin : begin + parameter.numel()].view(parameter.shape)
            begin += parameter.numel()
            name = self._names[parameter]
            if name in self._residuals:
                view.copy_(self._residuals[name])
            self._residuals[name] = view
        if begin != count:
            raise UsageError(
                f"a bucket of {count} numbers for parameters of {begin}: EightBitWire cannot assign them; "
                "use bf16_wire"
            )
        moved = set(key)
        self._buffers = {k: p for k, p in self._buffers.items() if moved.isdisjoint(k)} | {key: buffers}
        return buffers

    def residuals(self) -> dict[str, Tensor]:
        """Return this worker's residuals by parameter name, as views that later steps change."""
        return dict(self._residuals)

    def own_tensors(self) -> dict[str, Tensor]:
        """Return this worker's part of a checkpoint: its residuals as ``NUMBER.NAME``.

        The number is ``group_number`` * workers of a group + rank in the group.
        """
        number = self._group_number * self._size + self._rank
        return {f"{number}.{name}": value for name, value in self._residuals.items()}

    def tensors_to_read(self, saved: Iterable[str]) -> dict[str, Tensor]:
        """Return empty tensors for the saved residuals that this worker loads.

        Rank r of n loads those of the numbers r, r + n, r + 2n, ... of a parameter, and :meth:`read` adds
        them. If several groups have the parameter, each loads its own.

        Args:
            saved: names in the checkpoint, saved by any number of workers.
        """
        shapes = {name: parameter.shape for parameter, name in self._names.items()}
        targets = {}
        for full in saved:
            number, _, name = full.partition(".")
            group_number, rank = divmod(int(number), self._size)
            holders = self._holders.get(name, (self._group_number,))
            reader = group_number if group_number in holders else holders[0]
            if (reader, rank) == (self._group_number, self._rank) and name in shapes:
                targets[full] = torch.empty(shapes[name])
        return targets

    def read(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the residuals to the sums of the tensors of :meth:`tensors_to_read`."""
        for value in self._residuals.values():
            value.zero_()
        for full in sorted(tensors, key=lambda full: int(full.partition(".")[0])):
            name = full.partition(".")[2]
            if name in self._residuals:
                self._residuals[name].add_(tensors[full].to(self._residuals[name].device))
            else:
                self._residuals[name] = tensors[full].clone()
