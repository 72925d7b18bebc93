"""Turns collectives on tensors and lists of tensors into requests on contiguous buffers.

Several tensors become one operation: its bytes are divided evenly among the servers, whatever the sizes of
the tensors. Below, a *row* is the data of one rank; ``all_gather`` fills rows, ``reduce_scatter`` reduces
them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Work

from shoal.comm.tensors import (
    CollectiveRequest,
    Finish,
    as_bytes,
    as_contiguous,
    as_movable,
    as_reducible,
    copy_back,
    is_plain_contiguous,
    output_buffer,
    overlaps,
    reduction_of,
)
from shoal.comm.work import JoinedWork
from shoal.errors import UsageError


class Coalescer:
    """The collectives of one group that may take several tensors.

    Args:
        submit: submits a request of the group.
        rank: of this process in the group.
        size: number of ranks.
    """

    def __init__(self, submit: Callable[[CollectiveRequest], Work], rank: int, size: int) -> None:
        self._submit = submit
        self._rank = rank
        self._size = size

    def reduce(self, tensors: list[Tensor], opts: Any, root: int | None = None, priority: int = 0) -> Work:
        """Reduce tensors in place, on all ranks or on ``root`` only."""
        works: list[Work] = []
        for same in _by_dtype(tensors, tensors):
            group = [tensors[index] for index in same]
            op = reduction_of(opts.reduceOp, group[0])
            if len(group) == 1:
                output, finish = output_buffer(group[0])
                source = as_contiguous(group[0])
            else:
                output = source = torch.cat([as_contiguous(tensor).view(-1) for tensor in group])
                finish = copy_back(group, output)
            finish = op.after(output, self._size, finish) if root in (None, self._rank) else None
            request = CollectiveRequest(
                kind="all_reduce" if root is None else "reduce",
                input=as_reducible(op.before(source)), output=as_reducible(output),
                op=op.name, root=root or 0, shape=output.shape, priority=priority, timeout=opts.timeout,
                result=group, finish=finish,
            )  # fmt: skip
            works.append(self._submit(request))
        return _joined(works, tensors)

    def all_gather(
        self,
        outputs: list[Tensor],
        inputs: list[Tensor],
        opts: Any,
        unpack: Finish | None = None,
        result: Any = None,
    ) -> Work:
        """Gather each input into ``size`` rows of its output.

        Args:
            outputs: each with ``size`` times the elements of its input.
            inputs: one per output.
            opts: torch's options.
            unpack: runs after the outputs are written.
            result: of the work; default: ``outputs``.
        """
        for output, input in zip(outputs, inputs, strict=True):
            check_rows(self._size, "all_gather_into_tensor", "output", output, "input", input)
        if len(inputs) == 1 and unpack is None:
            return self._all_gather_one(outputs[0], inputs[0], opts)
        source = torch.cat([as_bytes(tensor) for tensor in inputs])
        rows = source.new_empty(self._size, source.numel())
        staged = [output_buffer(output) for output in outputs]

        def finish() -> None:
            begin = 0
            for block, copy in staged:
                mine = block.view(-1).view(torch.uint8).view(self._size, -1)
                mine.copy_(rows[:, begin : begin + mine.shape[1]])
                begin += mine.shape[1]
                if copy is not None:
                    copy()
            if unpack is not None:
                unpack()

        return self._submit(
            CollectiveRequest(
                kind="all_gather", input=source, output=rows, shape=source.shape, timeout=opts.timeout,
                result=outputs if result is None else result, finish=finish,
            )
        )  # fmt: skip

    def _all_gather_one(self, output: Tensor, input: Tensor, opts: Any) -> Work:
        source, (target, finish) = as_contiguous(input), output_buffer(output)
        offset = source.data_ptr() - target.data_ptr()
        if overlaps(source, target) and offset != self._rank * source.numel() * source.element_size():
            source = source.clone()
        return self._submit(
            CollectiveRequest(
                kind="all_gather", input=as_movable(source), output=as_movable(target),
                shape=input.shape, timeout=opts.timeout, result=[output], finish=finish,
            )
        )  # fmt: skip

    def all_gather_list(self, outputs: list[Tensor], input: Tensor, opts: Any) -> Work:
        """Gather rank r's tensor into output r. Sizes may differ by rank; all ranks pass the same ones."""
        self._check_list("all_gather", "output", outputs, "input", input)
        width = max(output.numel() for output in outputs)
        source = as_contiguous(input).view(-1)
        if source.numel() < width:
            source = torch.cat([source, source.new_zeros(width - source.numel())])
        rows = source.new_empty(self._size, width)

        def finish() -> None:
            for row, output in zip(rows, outputs, strict=True):
                output.detach().copy_(row[: output.numel()].view(output.shape))

        return self._submit(
            CollectiveRequest(
                kind="all_gather", input=as_movable(source), output=as_movable(rows),
                shape=input.shape, timeout=opts.timeout, result=outputs, finish=finish,
            )
        )  # fmt: skip

    def all_gather_lists(self, output_lists: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Work:
        """Gather rank r's tensor i into ``output_lists[r][i]``."""
        wanted = [input.numel() for input in inputs]
        given = [[output.numel() for output in outputs] for outputs in output_lists]
        if given != [wanted] * self._size:
            raise UsageError(
                f"all_gather_coalesced: output tensors of {given} elements for {self._size} ranks with "
                f"{wanted} elements each; give a list of such tensors per rank"
            )
        tables = [input.new_empty(self._size, input.numel()) for input in inputs]

        def finish() -> None:
            for table, outputs in zip(tables, zip(*output_lists, strict=True), strict=True):
                for row, output in zip(table, outputs, strict=True):
                    output.detach().copy_(row.view(output.shape))

        return self.all_gather(tables, inputs, opts, finish, output_lists)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Work:
        """Reduce inputs of ``size`` rows; row r of each result goes to rank r's output."""
        for output, input in zip(outputs, inputs, strict=True):
            check_rows(self._size, "reduce_scatter_tensor", "input", input, "output", output)
        works = []
        for same in _by_dtype(outputs, inputs):
            tables = [as_contiguous(inputs[index]).view(self._size, -1) for index in same]
            table = tables[0] if len(tables) == 1 else torch.cat(tables, dim=1)
            works.append(self._reduce_scatter_table([outputs[index] for index in same], table, opts))
        return _joined(works, outputs)

    def reduce_scatter_list(self, output: Tensor, inputs: list[Tensor], opts: Any) -> Work:
        """Reduce input r of all ranks into rank r's output. Sizes may differ, but not between ranks."""
        self._check_list("reduce_scatter", "input", inputs, "output", output)
        width = max(input.numel() for input in inputs)
        table = output.new_zeros(self._size, width)
        for row, input in zip(table, inputs, strict=True):
            row[: input.numel()].copy_(as_contiguous(input).view(-1))
        return self._reduce_scatter_table([output], table, opts)

    def _check_list(self, name: str, listed: str, tensors: list[Tensor], alone: str, tensor: Tensor) -> None:
        """Check that a list has a tensor per rank, this rank's as large as the other tensor it gives."""
        if len(tensors) != self._size:
            raise UsageError(
                f"{name}: {len(tensors)} {listed} tensors for {self._size} ranks; give one per rank"
            )
        if tensors[self._rank].numel() != tensor.numel() or {each.dtype for each in tensors} != {
            tensor.dtype
        }:
            raise UsageError(
                f"{name}: the {alone} is {tensor.dtype} of shape {tuple(tensor.shape)}, the {listed}s are "
                f"{[(str(each.dtype), tuple(each.shape)) for each in tensors]}; all dtypes must be the same, "
                f"and this rank's {listed} as large as its {alone}"
            )

    def _reduce_scatter_table(self, outputs: list[Tensor], table: Tensor, opts: Any) -> Work:
        op = reduction_of(opts.reduceOp, table)
        table = op.before(table)
        target, finish = outputs[0].detach(), None
        direct = len(outputs) == 1 and is_plain_contiguous(target) and target.numel() == table.shape[1]
        if not direct or overlaps(target, table):
            target = table.new_empty(table.shape[1])
            finish = copy_back(outputs, target)
        finish = op.after(target, self._size, finish)
        return self._submit(
            CollectiveRequest(
                kind="reduce_scatter", input=as_reducible(table), output=as_reducible(target), op=op.name,
                shape=outputs[0].shape if len(outputs) == 1 else target.shape,
                timeout=opts.timeout, result=outputs, finish=finish,
            )
        )  # fmt: skip


def check_rows(size: int, name: str, large_name: str, large: Tensor, small_name: str, small: Tensor) -> None:
    """Check that a tensor has ``size`` rows of another.

    Raises:
        UsageError: it has not, or their dtypes differ.
    """
    if large.dtype != small.dtype:
        raise UsageError(
            f"{name}: the input and output tensors are {large.dtype} and {small.dtype}; convert one"
        )
    if large.numel() != size * small.numel():
        raise UsageError(
            f"{name}: the {large_name} tensor has shape {tuple(large.shape)} and the {small_name} tensor "
            f"{tuple(small.shape)}; the {large_name} must have {size} (the ranks of the group) times as "
            "many elements"
        )


def _by_dtype(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> list[list[int]]:
    if not outputs:
        raise UsageError("a collective of an empty list of tensors: give at least one")
    groups: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(inputs):
        groups.setdefault(tensor.dtype, []).append(index)
    return list(groups.values())


def _joined(works: Sequence[Work], result: Any) -> Work:
    return works[0] if len(works) == 1 else JoinedWork(works, result)
