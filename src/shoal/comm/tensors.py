"""Converts tensors to what the engine takes: an address, a count and a dtype name.

:class:`CollectiveRequest` is a collective from the process group to the engine or the copy pipeline.

A tensor that is not contiguous is copied into a contiguous buffer, and the result is copied back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

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


@dataclass(kw_only=True)
class CollectiveRequest:
    """A collective on two contiguous tensors of one device, in the terms of ``engine.Operation``."""

    kind: str
    input: Tensor
    output: Tensor
    op: str = "sum"
    root: int = 0
    shape: Sequence[int] = ()
    priority: int = 0
    timeout: timedelta = timedelta(0)
    """0: the group's"""
    result: Any = None
    """returned by the work's future"""
    finish: Finish | None = None
    """completes the result after the engine has written ``output``"""

    @property
    def count(self) -> int:
        return (self.output if self.kind == "reduce_scatter" else self.input).numel()

    @property
    def dtype(self) -> str:
        return ENGINE_DTYPES[self.input.dtype]


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
        given: Any = op
        name, factor = "sum", given.factor if hasattr(given, "factor") else given.__getstate__()[1]
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
    found = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if len(found) != 1:
        raise UsageError(
            f"{name}: {len(found)} tensors; one per rank is possible (or the coalesced form, for many)"
        )
    return found


def options_of(opts: Any, kind: type, timeout: timedelta = timedelta(0)) -> Any:
    """Return an options object: the given one, or one made from the short forms (an operation, a rank)."""
    if isinstance(opts, kind):
        return opts
    made = kind()
    if isinstance(opts, int):
        made.rootRank = opts
    elif opts is not None and hasattr(made, "reduceOp"):
        made.reduceOp = opts
    made.timeout = timeout
    return made
