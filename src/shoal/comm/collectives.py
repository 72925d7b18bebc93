"""Builds the collectives that servers and hosts sum or forward, as operations of the engine.

Those that are messages between two ranks are in :mod:`shoal.comm.messages`. The engine takes memory that is
flat, contiguous and of a dtype that it knows. A tensor that is not contiguous is copied into a contiguous
buffer, and the result is copied back. Several tensors become one operation: its bytes are divided evenly
among the servers, whatever the sizes of the tensors. Below, a *row* is the data of one rank; ``all_gather``
fills rows, ``reduce_scatter`` reduces them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from shoal.comm.engine import Operation
from shoal.errors import UsageError

ENGINE_DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int8: "int8",
    torch.uint8: "uint8",
    torch.int32: "int32",
    torch.int64: "int64",
}
"""The core's name of each dtype that it reduces."""
DEVICES = ("cpu", "cuda")
"""Device types of the tensors that the backend accepts."""
_OPS = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "avg",
    ReduceOp.PRODUCT: "prod",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.BAND: "band",
    ReduceOp.BOR: "bor",
    ReduceOp.BXOR: "bxor",
}
_BITWISE = frozenset({"band", "bor", "bxor"})
# A bool is a byte that is 0 or 1, and must stay so.
_BOOL_OPS = {"sum": "max", "prod": "min", "min": "min", "max": "max"} | {op: op for op in _BITWISE}
_COMPLEX_PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}

Finish = Callable[[], None]
"""Completes a result after the engine has written it."""
UNSET_TIMEOUT = timedelta(milliseconds=-1)
"""torch's timeout of operations that have that of their process group."""
_PASSED_S = 1e-9


def seconds_of(timeout: timedelta) -> float:
    """Return a timeout in seconds; as in gloo, one of zero or less has passed as the operation begins."""
    return max(timeout.total_seconds(), _PASSED_S)


def limit_s(timeout: timedelta) -> float:
    """Return a timeout as :class:`Operation` takes it: 0 is the process group's."""
    return 0.0 if timeout == UNSET_TIMEOUT else seconds_of(timeout)


def collective(
    kind: str, source: Tensor, target: Tensor, *, timeout: timedelta = UNSET_TIMEOUT, **fields: Any
) -> Operation:
    """Return a collective on two contiguous tensors, with these fields of :class:`Operation`."""
    return Operation(
        kind=kind, input=source.data_ptr(), output=target.data_ptr(), dtype=ENGINE_DTYPES[source.dtype],
        count=(target if kind == "reduce_scatter" else source).numel(),
        source=source, target=target, timeout_s=limit_s(timeout), **fields,
    )  # fmt: skip


@dataclass(frozen=True)
class CollectiveBuilder:
    """Builds the operations of each collective: one, or one per dtype of a list of tensors.

    Args:
        rank: of this process in the group.
        size: number of ranks.
    """

    rank: int
    size: int

    def reduce(
        self, tensors: list[Tensor], opts: Any, root: int | None = None, priority: int = 0
    ) -> list[Operation]:
        """Reduce tensors in place, on all ranks or on ``root`` only."""
        operations = []
        for same in _by_dtype(tensors):
            group = [tensors[index] for index in same]
            op = reduction_of(opts.reduceOp, group[0])
            if len(group) == 1:
                output, finish = output_buffer(group[0])
                source = as_contiguous(group[0])
            else:
                output = source = torch.cat([as_contiguous(tensor).view(-1) for tensor in group])
                finish = copy_back(group, output)
            finish = op.after(output, self.size, finish) if root in (None, self.rank) else None
            operations.append(
                collective(
                    "all_reduce" if root is None else "reduce",
                    as_reducible(op.before(source)), as_reducible(output),
                    op=op.name, root=root or 0, shape=output.shape, priority=priority,
                    timeout=opts.timeout, result=group, finish=finish,
                )
            )  # fmt: skip
        return operations

    def broadcast(self, tensor: Tensor, opts: Any) -> list[Operation]:
        """Copy the root's tensor to all ranks."""
        output, finish = output_buffer(tensor)
        is_root = opts.rootRank == self.rank
        return [
            collective(
                "broadcast", as_movable(as_contiguous(tensor) if is_root else output), as_movable(output),
                root=opts.rootRank, shape=tensor.shape, timeout=opts.timeout,
                result=[tensor], finish=None if is_root else finish,
            )
        ]  # fmt: skip

    def all_gather(
        self,
        outputs: list[Tensor],
        inputs: list[Tensor],
        opts: Any,
        unpack: Finish | None = None,
        result: Any = None,
    ) -> list[Operation]:
        """Gather each input into ``size`` rows of its output.

        Args:
            outputs: each with ``size`` times the elements of its input.
            inputs: one per output.
            opts: torch's options.
            unpack: runs after the outputs are written.
            result: value of the future; default: ``outputs``.
        """
        for output, input in zip(outputs, inputs, strict=True):
            check_rows(self.size, "all_gather_into_tensor", "output", output, "input", input)
        if len(inputs) == 1 and unpack is None:
            return self._all_gather_one(outputs[0], inputs[0], opts)
        source = torch.cat([as_bytes(tensor) for tensor in inputs])
        rows = source.new_empty(self.size, source.numel())
        staged = [output_buffer(output) for output in outputs]

        def finish() -> None:
            begin = 0
            for block, copy in staged:
                mine = block.view(-1).view(torch.uint8).view(self.size, -1)
                mine.copy_(rows[:, begin : begin + mine.shape[1]])
                begin += mine.shape[1]
                if copy is not None:
                    copy()
            if unpack is not None:
                unpack()

        return [
            collective(
                "all_gather", source, rows, shape=source.shape, timeout=opts.timeout,
                result=outputs if result is None else result, finish=finish,
            )
        ]  # fmt: skip

    def _all_gather_one(self, output: Tensor, input: Tensor, opts: Any) -> list[Operation]:
        source, (target, finish) = as_contiguous(input), output_buffer(output)
        offset = source.data_ptr() - target.data_ptr()
        if overlaps(source, target) and offset != self.rank * source.numel() * source.element_size():
            source = source.clone()
        return [
            collective(
                "all_gather", as_movable(source), as_movable(target), shape=input.shape,
                timeout=opts.timeout, result=[output], finish=finish,
            )
        ]  # fmt: skip

    def all_gather_list(
        self,
        outputs: list[Tensor],
        input: Tensor,
        opts: Any,
        unpack: Finish | None = None,
        result: Any = None,
    ) -> list[Operation]:
        """Gather rank r's tensor into output r. Sizes may differ by rank; all ranks pass the same ones.

        ``unpack`` runs after the outputs are written; ``result`` is the future's value, else ``outputs``.
        """
        self._check_list("all_gather", "output", outputs, "input", input)
        width = max(output.numel() for output in outputs)
        source = as_contiguous(input).view(-1)
        if source.numel() < width:
            source = torch.cat([source, source.new_zeros(width - source.numel())])
        rows = source.new_empty(self.size, width)

        def finish() -> None:
            for row, output in zip(rows, outputs, strict=True):
                output.detach().copy_(row[: output.numel()].view(output.shape))
            if unpack is not None:
                unpack()

        return [
            collective(
                "all_gather", as_movable(source), as_movable(rows), shape=input.shape,
                timeout=opts.timeout, result=outputs if result is None else result, finish=finish,
            )
        ]  # fmt: skip

    def all_gather_lists(
        self, output_lists: list[list[Tensor]], inputs: list[Tensor], opts: Any
    ) -> list[Operation]:
        """Gather rank r's tensor i into ``output_lists[r][i]``."""
        input_sizes = [input.numel() for input in inputs]
        output_sizes = [[output.numel() for output in outputs] for outputs in output_lists]
        if output_sizes != [input_sizes] * self.size:
            raise UsageError(
                f"all_gather_coalesced: output tensors of {output_sizes} elements for {self.size} ranks with "
                f"{input_sizes} elements each; give a list of such tensors per rank"
            )
        tables = [input.new_empty(self.size, input.numel()) for input in inputs]

        def finish() -> None:
            for table, outputs in zip(tables, zip(*output_lists, strict=True), strict=True):
                for row, output in zip(table, outputs, strict=True):
                    output.detach().copy_(row.view(output.shape))

        return self.all_gather(tables, inputs, opts, finish, output_lists)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> list[Operation]:
        """Reduce inputs of ``size`` rows; row r of each result goes to rank r's output."""
        for output, input in zip(outputs, inputs, strict=True):
            check_rows(self.size, "reduce_scatter_tensor", "input", input, "output", output)
        operations = []
        for same in _by_dtype(inputs):
            tables = [as_contiguous(inputs[index]).view(self.size, -1) for index in same]
            table = tables[0] if len(tables) == 1 else torch.cat(tables, dim=1)
            operations += self._reduce_scatter_table([outputs[index] for index in same], table, opts)
        return operations

    def reduce_scatter_list(self, output: Tensor, inputs: list[Tensor], opts: Any) -> list[Operation]:
        """Reduce input r of all ranks into rank r's output. Sizes may differ, but not between ranks."""
        self._check_list("reduce_scatter", "input", inputs, "output", output)
        width = max(input.numel() for input in inputs)
        table = output.new_zeros(self.size, width)
        for row, input in zip(table, inputs, strict=True):
            row[: input.numel()].copy_(as_contiguous(input).view(-1))
        return self._reduce_scatter_table([output], table, opts)

    def _check_list(self, name: str, listed: str, tensors: list[Tensor], alone: str, tensor: Tensor) -> None:
        """Check that a list has a tensor per rank, this rank's as large as the other tensor it gives."""
        if len(tensors) != self.size:
            raise UsageError(
                f"{name}: {len(tensors)} {listed} tensors for {self.size} ranks; give one per rank"
            )
        if tensors[self.rank].numel() != tensor.numel() or {each.dtype for each in tensors} != {tensor.dtype}:
            raise UsageError(
                f"{name}: the {alone} is {tensor.dtype} of shape {tuple(tensor.shape)}, the {listed}s are "
                f"{[(str(each.dtype), tuple(each.shape)) for each in tensors]}; all dtypes must be the same, "
                f"and this rank's {listed} as large as its {alone}"
            )

    def _reduce_scatter_table(self, outputs: list[Tensor], table: Tensor, opts: Any) -> list[Operation]:
        op = reduction_of(opts.reduceOp, table)
        table = op.before(table)
        target, finish = outputs[0].detach(), None
        direct = len(outputs) == 1 and is_plain_contiguous(target) and target.numel() == table.shape[1]
        if not direct or overlaps(target, table):
            target = table.new_empty(table.shape[1])
            finish = copy_back(outputs, target)
        finish = op.after(target, self.size, finish)
        return [
            collective(
                "reduce_scatter", as_reducible(table), as_reducible(target), op=op.name,
                shape=outputs[0].shape if len(outputs) == 1 else target.shape,
                timeout=opts.timeout, result=outputs, finish=finish,
            )
        ]  # fmt: skip


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


def _by_dtype(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the indices of the tensors of each dtype.

    Raises:
        UsageError: there are no tensors.
    """
    if not tensors:
        raise UsageError("a collective of an empty list of tensors: give at least one")
    groups: dict[torch.dtype, list[int]] = {}
    for index, tensor in enumerate(tensors):
        groups.setdefault(tensor.dtype, []).append(index)
    return list(groups.values())


@dataclass(frozen=True)
class Reduction:
    """The engine's operation for a torch reduction, with the steps before and after it."""

    name: str
    factor: float | Tensor | None = None
    divides: bool = False
    """Divide the sum by the number of ranks and truncate toward zero, as NCCL averages integers."""

    def before(self, block: Tensor) -> Tensor:
        """Return the engine's input: the tensor, or a copy multiplied by the factor."""
        return block if self.factor is None else block * self.factor

    def after(self, output: Tensor, size: int, finish: Finish | None) -> Finish | None:
        """Return the step that completes the operation once ``output`` holds the engine's result."""
        if not self.divides:
            return finish

        def divide() -> None:
            output.div_(size, rounding_mode="trunc")
            if finish is not None:
                finish()

        return divide


def reduction_of(op: ReduceOp | ReduceOp.RedOpType, tensor: Tensor) -> Reduction:
    """Return the engine's operation for a torch reduction of this tensor.

    Raises:
        UsageError: the dtype does not support the reduction.
    """
    kind: Any = getattr(op, "op", op)
    name, factor = _OPS.get(kind, ""), None
    if kind == ReduceOp.PREMUL_SUM:
        premul: Any = op
        name, factor = "sum", premul.factor if hasattr(premul, "factor") else premul.__getstate__()[1]
    dtype = tensor.dtype
    if not name:
        raise UsageError(f"reduce operation {op}: backend shoal has {', '.join(_OPS.values())}, premul_sum")
    if dtype == torch.bool and name in _BOOL_OPS:
        return Reduction(_BOOL_OPS[name])
    if dtype.is_complex:
        allowed = name in ("sum", "avg") and dtype in _COMPLEX_PARTS
    elif dtype.is_floating_point:
        allowed = name not in _BITWISE and dtype in ENGINE_DTYPES
    else:
        allowed = factor is None and dtype in ENGINE_DTYPES
    if not allowed:
        known = ", ".join(ENGINE_DTYPES.values())
        raise UsageError(
            f"{name} of a {dtype} tensor: backend shoal reduces {known}, bool and complex tensors, with "
            "premul_sum only floating ones, with band, bor and bxor only whole ones and bool, with avg all "
            "but bool, and complex ones with sum and avg; convert the tensor first"
        )
    if name == "avg" and not (dtype.is_complex or dtype.is_floating_point):
        return Reduction("sum", divides=True)
    return Reduction(name, factor)


def as_contiguous(tensor: Tensor) -> Tensor:
    """Return the tensor's elements in order as contiguous memory: the tensor, or a copy if it is not."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous()


def is_plain_contiguous(tensor: Tensor) -> bool:
    """Return whether the tensor's memory holds its elements, in order and without a lazy conjugation."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def output_buffer(tensor: Tensor) -> tuple[Tensor, Finish | None]:
    """Return contiguous memory for a result, and the copy into the tensor if they are not the same."""
    if is_plain_contiguous(tensor):
        return tensor.detach(), None
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise UsageError(
            f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} has elements that share "
            "memory and cannot take a result; clone() it first"
        )
    buffer = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return buffer, copy_back([tensor], buffer.view(-1))


def copy_back(tensors: Sequence[Tensor], flat: Tensor) -> Finish:
    """Return a function that copies consecutive parts of ``flat`` into tensors."""

    def finish() -> None:
        begin = 0
        for tensor in tensors:
            tensor.detach().copy_(flat[begin : begin + tensor.numel()].view(tensor.shape))
            begin += tensor.numel()

    return finish


def as_reducible(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor as flat numbers that the engine reduces."""
    if tensor.dtype == torch.bool:
        tensor = tensor.view(torch.uint8)
    elif tensor.dtype in _COMPLEX_PARTS:
        tensor = torch.view_as_real(tensor)
    return tensor.view(-1)


def as_movable(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor flat, for transport without change: as its dtype if known, else as bytes."""
    flat = tensor.view(-1)
    return flat if flat.dtype in ENGINE_DTYPES else flat.view(torch.uint8)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the tensor's elements as a flat uint8 tensor."""
    return as_contiguous(tensor).view(-1).view(torch.uint8)


def overlaps(one: Tensor, other: Tensor) -> bool:
    """Return whether the memory of two contiguous tensors overlaps."""
    begin, end = one.data_ptr(), one.data_ptr() + one.numel() * one.element_size()
    return begin < other.data_ptr() + other.numel() * other.element_size() and other.data_ptr() < end


def check_tensors(tensors: Sequence[Tensor], name: str) -> None:
    """Check that tensors are dense and on one supported device.

    Raises:
        UsageError: a tensor is on an unsupported device, or sparse, or they are on several devices.
    """
    for tensor in tensors:
        if tensor.device.type not in DEVICES:
            raise UsageError(
                f"{name} of a tensor on {tensor.device}: backend shoal takes CPU and CUDA tensors; "
                "move it with .cpu(), or use a group of another backend for it"
            )
        if tensor.layout != torch.strided:
            raise UsageError(f"{name} of a {tensor.layout} tensor: make it dense first (.to_dense())")
        if tensor.device != tensors[0].device:
            raise UsageError(
                f"{name} of tensors on {tensors[0].device} and {tensor.device}: move them to one device"
            )


def single_tensor(tensors: Any, name: str) -> list[Tensor]:
    """Return the list of the one tensor that each rank gives.

    Raises:
        UsageError: there are several.
    """
    listed = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if len(listed) != 1:
        raise UsageError(
            f"{name}: {len(listed)} tensors; one per rank is possible (or the coalesced form, for many)"
        )
    return listed


def options_of(opts: Any, kind: type, timeout: timedelta | None = None) -> Any:
    """Return an options object: the given one, or a new one from the short forms (an operation, a rank)."""
    if isinstance(opts, kind):
        return opts
    options = kind()
    if isinstance(opts, int):
        options.rootRank = opts
    elif opts is not None and hasattr(options, "reduceOp"):
        options.reduceOp = opts
    options.timeout = UNSET_TIMEOUT if timeout is None else timeout
    return options
