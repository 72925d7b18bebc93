"""Provides Horovod's collectives on torch's tensors.

All ranks call them in the same order; names are ignored. Calls that end in ``_async`` return a
:class:`Handle` for :func:`poll` and :func:`synchronize`; those that end in ``_`` write into their tensor. The
others are differentiable, with Horovod's gradients: those of ``allgather`` and ``broadcast`` are averages.

Errors of all: CommError if a rank was lost or ranks differ, UsageError if ``init`` was not called, an
operation is unknown, or a process set is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shoal.comm.horovod import Average, Sum, check_keywords, check_reduction, check_wire
from shoal.errors import UsageError
from shoal.horovod_torch import process

Tensors = list[Tensor]
OPERATIONS = {
    "mean": dist.ReduceOp.AVG,
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "prod": dist.ReduceOp.PRODUCT,
}


class Handle:
    """A collective in flight.

    Args:
        works: of torch.
        finish: makes the result once they have completed.
    """

    def __init__(self, works: Sequence[Any], finish: Callable[[], Any]) -> None:
        self._works, self._finish, self._result = works, finish, None
        self._is_finished = False

    def is_completed(self) -> bool:
        """Return whether :meth:`wait` returns at once."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> Any:
        """Wait, and return the result."""
        if not self._is_finished:
            for work in self._works:
                work.wait()
            self._result, self._is_finished = self._finish(), True
        return self._result


def poll(handle: Handle) -> bool:
    """Return whether a collective has completed."""
    return handle.is_completed()


def synchronize(handle: Handle) -> Any:
    """Wait for a collective, and return its result."""
    return handle.wait()


# ---- reductions -----------------------------------------------------------------------------------------


def _reduce(tensors: Tensors, op: str, prescale: float, postscale: float) -> Handle:
    """Reduce tensors in place."""
    process.size()
    works = []
    for tensor in tensors:
        if prescale != 1.0:
            tensor.mul_(prescale)
        works.append(dist.all_reduce(tensor, op=OPERATIONS[op], async_op=True))

    def finish() -> Tensors:
        if postscale != 1.0:
            for tensor in tensors:
                tensor.mul_(postscale)
        return tensors

    return Handle(works, finish)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: None = None,
) -> Handle:
    """Begin to replace tensors by their reductions over all ranks.

    Args:
        tensors: of the same shapes and dtypes on all ranks.
        average: the older keyword for ``op``.
        name: ignored.
        op: ``Average`` (also if ``None``), ``Sum``, ``Min``, ``Max`` or ``Product``. Averages of whole
            numbers are truncated.
        prescale_factor: multiplies each tensor before it is sent.
        postscale_factor: multiplies each result.
        process_set: only ``None``.

    Returns:
        A handle, whose result are the tensors.
    """
    check_keywords("grouped_allreduce", {"process_set": process_set})
    own = [tensor.detach() for tensor in tensors]
    handle = _reduce(own, check_reduction(op, average), prescale_factor, postscale_factor)
    return Handle([handle], lambda: list(tensors))


def grouped_allreduce_(*arguments: Any, **options: Any) -> Tensors:
    """Replace tensors by their reductions; arguments of :func:`grouped_allreduce_async_`."""
    reduced: Tensors = grouped_allreduce_async_(*arguments, **options).wait()
    return reduced


def grouped_allreduce_async(tensors: Sequence[Tensor], *arguments: Any, **options: Any) -> Handle:
    """Begin reductions of several tensors; arguments of :func:`grouped_allreduce_async_`."""
    return grouped_allreduce_async_([tensor.detach().clone() for tensor in tensors], *arguments, **options)


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = None,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: None = None,
) -> Tensors:
    """Return the reductions of several tensors.

    Args:
        tensors: as of :func:`grouped_allreduce_async_`, as are the others.
        average: the older keyword for ``op``.
        name: ignored.
        compression: one of :class:`~shoal.comm.horovod.Compression`.
        op: the reduction.
        prescale_factor: multiplies each tensor before it is sent.
        postscale_factor: multiplies each result.
        process_set: only ``None``.
    """
    check_keywords("grouped_allreduce", {"process_set": process_set})
    reduction, wire = check_reduction(op, average), check_wire(compression)

    def run(operands: Tensors) -> Tensors:
        own = [tensor.clone() for tensor in operands]
        reduced: Tensors = _reduce(own, reduction, prescale_factor, postscale_factor).wait()
        return reduced

    def back(gradients: Tensors) -> Tensors:
        if reduction not in (Average, Sum):
            raise UsageError(f"the gradient of a {reduction} over ranks is not known; detach the tensor")
        return run(gradients)

    results = _differentiable(run, back, [on_the_wire(tensor, wire) for tensor in tensors])
    return [result.to(tensor.dtype) for result, tensor in zip(results, tensors, strict=True)]


def on_the_wire(tensor: Tensor, wire: str | None) -> Tensor:
    """Return a tensor in the format in which it is sent."""
    wide = tensor.dtype in (torch.float32, torch.float64)
    return tensor.to(getattr(torch, wire)) if wire and wide else tensor


def allreduce(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """Return the average, or another reduction, of a tensor; arguments of :func:`grouped_allreduce`.

    Example:
        >>> import torch, shoal.horovod_torch as hvd
        >>> hvd.init()
        >>> hvd.allreduce(torch.tensor([1.0, 2.0]), name="loss").tolist()
        [1.0, 2.0]
        >>> hvd.shutdown()
    """
    return grouped_allreduce([tensor], *arguments, **options)[0]


def allreduce_async(tensor: Tensor, *arguments: Any, **options: Any) -> Handle:
    """Begin the reduction of a tensor; arguments of :func:`grouped_allreduce_async_`."""
    return _only(grouped_allreduce_async([tensor], *arguments, **options))


def allreduce_async_(tensor: Tensor, *arguments: Any, **options: Any) -> Handle:
    """Begin to replace a tensor by its reduction; arguments of :func:`grouped_allreduce_async_`."""
    return _only(grouped_allreduce_async_([tensor], *arguments, **options))


def allreduce_(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """Replace a tensor by its reduction; arguments of :func:`grouped_allreduce_async_`."""
    return grouped_allreduce_([tensor], *arguments, **options)[0]


def sparse_allreduce_async(
    tensor: Tensor, name: str | None = None, op: Any = None, process_set: None = None
) -> Handle:
    """Begin the sum or average of a sparse COO tensor; ranks may have other elements of it."""
    check_keywords("sparse_allreduce_async", {"process_set": process_set})
    divide_by = process.size() if check_reduction(op, allowed=(Average, Sum)) == Average else 1
    total = tensor.detach().clone()
    work = dist.all_reduce(total, op=dist.ReduceOp.SUM, async_op=True)
    return Handle([work], lambda: total / divide_by)


# ---- parts and copies -----------------------------------------------------------------------------------


def _gather(tensors: Tensors) -> Handle:
    if any(tensor.dim() == 0 for tensor in tensors):
        raise UsageError("allgather of a tensor without dimensions; use tensor.view(1)")
    size = process.size()
    if not tensors:
        return Handle([], lambda: [])
    own = torch.tensor([len(tensor) for tensor in tensors], device=tensors[0].device)
    of_ranks = own.new_empty(size * len(own))
    dist.all_gather_into_tensor(of_ranks, own)
    rows = of_ranks.view(size, -1).T.tolist()  # tensors x ranks
    works, gathered = [], []
    for tensor, of_tensor in zip(tensors, rows, strict=True):
        padded = tensor.new_zeros(max(of_tensor), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        gathered.append(tensor.new_empty(size * len(padded), *tensor.shape[1:]))
        works.append(dist.all_gather_into_tensor(gathered[-1], padded, async_op=True))

    def joined(whole: Tensor, of_tensor: list[int]) -> Tensor:
        parts = whole.view(size, -1, *whole.shape[1:]) if len(whole) else whole.new_empty(size, *whole.shape)
        return torch.cat([part[:count] for part, count in zip(parts, of_tensor, strict=True)])

    return Handle(works, lambda: [joined(*pair) for pair in zip(gathered, rows, strict=True)])


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: None = None
) -> Handle:
    """Begin to gather several tensors; arguments of :func:`grouped_allgather`."""
    check_keywords("grouped_allgather", {"process_set": process_set})
    return _gather([tensor.detach() for tensor in tensors])


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: None = None
) -> Tensors:
    """Return the tensors of all ranks, concatenated along the first dimension in rank order.

    Args:
        tensors: of shapes ``(n, ...)``, where ``n`` may differ by rank.
        name: ignored.
        process_set: only ``None``.
    """
    check_keywords("grouped_allgather", {"process_set": process_set})

    def back(gradients: Tensors) -> Tensors:
        means = grouped_allreduce(gradients)
        counts = grouped_allgather([torch.tensor([len(tensor)]) for tensor in tensors])
        begins = [int(count[: process.rank()].sum()) for count in counts]
        return [
            mean[begin : begin + len(tensor)]
            for mean, begin, tensor in zip(means, begins, tensors, strict=True)
        ]

    return _differentiable(lambda operands: _gather(operands).wait(), back, list(tensors))


def allgather(tensor: Tensor, name: str | None = None, process_set: None = None) -> Tensor:
    """Return a tensor of all ranks, concatenated; arguments of :func:`grouped_allgather`."""
    return grouped_allgather([tensor], name, process_set)[0]


def allgather_async(tensor: Tensor, name: str | None = None, process_set: None = None) -> Handle:
    """Begin to gather a tensor; arguments of :func:`grouped_allgather`."""
    return _only(grouped_allgather_async([tensor], name, process_set))


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: None = None
) -> Handle:
    """Begin to replace a tensor by that of rank ``root_rank``.

    Args:
        tensor: of the same shape and dtype on all ranks.
        root_rank: rank whose tensor is sent.
        name: ignored.
        process_set: only ``None``.
    """
    check_keywords("broadcast", {"process_set": process_set})
    if not 0 <= root_rank < process.size():
        raise UsageError(f"root_rank {root_rank} is no rank; ranks are 0 to {process.size() - 1}")
    return Handle([dist.broadcast(tensor.detach(), src=root_rank, async_op=True)], lambda: tensor)


def broadcast_(tensor: Tensor, root_rank: int, name: str | None = None, process_set: None = None) -> Tensor:
    """Replace a tensor by that of rank ``root_rank``; arguments of :func:`broadcast_async_`."""
    broadcast_async_(tensor, root_rank, name, process_set).wait()
    return tensor


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: None = None
) -> Handle:
    """Begin to broadcast a tensor; arguments of :func:`broadcast_async_`."""
    return broadcast_async_(tensor.detach().clone(), root_rank, name, process_set)


def broadcast(tensor: Tensor, root_rank: int, name: str | None = None, process_set: None = None) -> Tensor:
    """Return the tensor of rank ``root_rank``; arguments of :func:`broadcast_async_`."""

    def back(gradients: Tensors) -> Tensors:
        mean = allreduce(gradients[0])
        return [mean if process.rank() == root_rank else torch.zeros_like(mean)]

    def run(operands: Tensors) -> Tensors:
        return [broadcast_async(operands[0], root_rank, name, process_set).wait()]

    return _differentiable(run, back, [tensor])[0]


def _exchange(tensor: Tensor, splits: Any) -> Handle:
    size = process.size()
    if splits is None:
        if tensor.dim() == 0 or len(tensor) % size:
            raise UsageError(
                f"alltoall of shape {tuple(tensor.shape)}: the first dimension must be a multiple of the "
                f"{size} ranks, or give splits"
            )
        sent = torch.full((size,), len(tensor) // size)
    else:
        sent = torch.as_tensor(splits, dtype=torch.int64, device="cpu")
        if sent.shape != (size,) or int(sent.sum()) > len(tensor) or bool((sent < 0).any()):
            raise UsageError(
                f"splits {sent.tolist()} of {len(tensor)} rows: give one number of rows for each of the "
                f"{size} ranks, together at most the rows"
            )
    sent = sent.to(tensor.device)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    counts = received.tolist()
    output = tensor.new_empty(sum(counts), *tensor.shape[1:])
    rows = tensor[: int(sent.sum())].contiguous()
    work = dist.all_to_all_single(output, rows, counts, sent.tolist(), async_op=True)
    return Handle([work], lambda: (output, received.to(torch.int32)))


def alltoall_async(
    tensor: Tensor, splits: Any = None, name: str | None = None, process_set: None = None
) -> Handle:
    """Begin an exchange; arguments of :func:`alltoall`. The result is a pair: rows, and their numbers."""
    check_keywords("alltoall", {"process_set": process_set})
    return _exchange(tensor.detach(), splits)


def alltoall(tensor: Tensor, splits: Any = None, name: str | None = None, process_set: None = None) -> Any:
    """Send rows of a tensor to each rank, and return those that the ranks sent here, in rank order.

    Args:
        tensor: of shape ``(n, ...)``.
        splits: number of rows for each rank; ``None``: equal parts.
        name: ignored.
        process_set: only ``None``.

    Returns:
        The rows; with ``splits`` a pair: the rows, and how many each rank sent (int32).
    """
    check_keywords("alltoall", {"process_set": process_set})
    received = torch.empty(0, dtype=torch.int32)

    def run(operands: Tensors) -> Tensors:
        nonlocal received
        rows, received = _exchange(operands[0], splits).wait()
        return [rows]

    def back(gradients: Tensors) -> Tensors:
        used: Tensor = _exchange(gradients[0], received).wait()[0]
        unused = len(tensor) - len(used)  # rows beyond the splits
        return [torch.cat([used, used.new_zeros(unused, *used.shape[1:])])]

    gathered = _differentiable(run, back, [tensor])[0]
    return gathered if splits is None else (gathered, received)


def _scatter(tensor: Tensor, op: str, prescale: float, postscale: float) -> Handle:
    size, rank = process.size(), process.rank()
    if tensor.dim() == 0:
        raise UsageError("reducescatter of a tensor without dimensions; use allreduce")
    counts = [len(tensor) // size + (each < len(tensor) % size) for each in range(size)]
    padded = tensor.new_zeros(size, counts[0], *tensor.shape[1:])
    for part, rows in zip(padded, torch.split(tensor, counts), strict=True):
        part[: len(rows)] = rows
    if prescale != 1.0:
        padded.mul_(prescale)
    own = torch.empty_like(padded[0])
    work = dist.reduce_scatter_tensor(own, padded.flatten(0, 1), op=OPERATIONS[op], async_op=True)
    return Handle(
        [work], lambda: own[: counts[rank]].mul_(postscale) if postscale != 1 else own[: counts[rank]]
    )


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: Any = Average,
    process_set: None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begin reductions that divide results over ranks; arguments of :func:`grouped_reducescatter`."""
    check_keywords("reducescatter", {"process_set": process_set})
    reduction = check_reduction(op)
    handles = [_scatter(each.detach(), reduction, prescale_factor, postscale_factor) for each in tensors]
    return Handle(handles, lambda: [handle.wait() for handle in handles])


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = None,
    op: Any = Average,
    process_set: None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensors:
    """Return this rank's parts of the reductions of tensors, divided along the first dimension.

    Args:
        tensors: of shapes ``(n, ...)``. Where ``n`` is no multiple of the number of ranks, the first ranks
            have a row more.
        name: ignored.
        compression: one of :class:`~shoal.comm.horovod.Compression`.
        op: the reduction.
        process_set: only ``None``.
        prescale_factor: multiplies each tensor before it is sent.
        postscale_factor: multiplies each result.
    """
    wire, factor = check_wire(compression), prescale_factor * postscale_factor

    def run(operands: Tensors) -> Tensors:
        options = (name, op, process_set, prescale_factor, postscale_factor)
        parts: Tensors = grouped_reducescatter_async(operands, *options).wait()
        return parts

    def back(gradients: Tensors) -> Tensors:
        scale = factor * (process.size() if check_reduction(op) == Sum else 1)
        return grouped_allgather([gradient * scale for gradient in gradients])

    results = _differentiable(run, back, [on_the_wire(tensor, wire) for tensor in tensors])
    return [part.to(tensor.dtype) for part, tensor in zip(results, tensors, strict=True)]


def reducescatter(tensor: Tensor, *arguments: Any, **options: Any) -> Tensor:
    """Return this rank's part of a reduction; arguments of :func:`grouped_reducescatter`."""
    return grouped_reducescatter([tensor], *arguments, **options)[0]


def reducescatter_async(tensor: Tensor, *arguments: Any, **options: Any) -> Handle:
    """Begin a reduction that divides its result; arguments of :func:`grouped_reducescatter_async`."""
    return _only(grouped_reducescatter_async([tensor], *arguments, **options))


# ---- gradients ------------------------------------------------------------------------------------------


def _only(handle: Handle) -> Handle:
    return Handle([handle], lambda: handle.wait()[0])


class _Collective(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Any, back: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.back = back
        return tuple(run([tensor.detach() for tensor in tensors]))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.back([gradient.contiguous() for gradient in gradients])


def _differentiable(
    run: Callable[[Tensors], Tensors], back: Callable[[Tensors], Tensors], tensors: Tensors
) -> Tensors:
    """Return ``run(tensors)``, whose gradients go through ``back`` if any is asked for."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return list(_Collective.apply(run, back, *tensors))
    return run([tensor.detach() for tensor in tensors])
