"""Tensors as the engine sees them: an address, a count and the name of a dtype.

What is not one block of memory is copied into one, and the result is copied back when it has come.
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
"""Types of the devices whose tensors the backend takes."""
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
# Of truth values: a byte that is 0 or 1 stays one.
_OPS_OF_BOOL = {"sum": "max", "prod": "min", "min": "min", "max": "max"} | dict.fromkeys(_BITWISE, "")
_COMPLEX_PARTS = {torch.complex64: torch.float32, torch.complex128: torch.float64}

Finish = Callable[[], None]


@dataclass(frozen=True)
class Reduction:
    """Describes a reduction: the engine's name of the operation, and what precedes and follows it."""

    name: str
    factor: float | Tensor | None = None
    divides: bool = False
    """The sum is divided by the number of ranks and truncated toward zero, as NCCL averages integers."""

    def before(self, block: Tensor) -> Tensor:
        """Return what goes into the engine: the block, or a copy times the factor."""
        return block if self.factor is None else block * self.factor

    def after(self, output: Tensor, size: int, finish: Finish | None) -> Finish | None:
        """Return what ends the operation once ``output``, a block, holds the engine's result."""
        if not self.divides:
            return finish

        def divide() -> None:
            output.div_(size, rounding_mode="trunc")
            if finish is not None:
                finish()

        return divide


def reduction_of(op: ReduceOp | ReduceOp.RedOpType, tensor: Tensor) -> Reduction:
    """Return the engine's operation on this tensor.

    Raises:
        UsageError: this dtype cannot be reduced so.
    """
    kind: Any = getattr(op, "op", op)
    name, factor = _OPS.get(kind, ""), None
    if kind == ReduceOp.PREMUL_SUM:
        given: Any = op
        name, factor = "sum", given.factor if hasattr(given, "factor") else given.__getstate__()[1]
    dtype = tensor.dtype
    if not name:
        raise UsageError(f"reduce operation {op}: backend shoal has {', '.join(_OPS.values())}, premul_sum")
    if dtype == torch.bool and _OPS_OF_BOOL.get(name) is not None:
        return Reduction(_OPS_OF_BOOL[name] or name)
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
    """Return the tensor's elements in order as one block of memory: itself, or a copy if it is not one."""
    tensor = tensor.detach()
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous()


def is_plain_contiguous(tensor: Tensor) -> bool:
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def output_buffer(tensor: Tensor) -> tuple[Tensor, Finish | None]:
    """Return a block of the tensor's size to write to, and what then brings it into the tensor, if needed."""
    if is_plain_contiguous(tensor):
        return tensor.detach(), None
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise UsageError(
            f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} has elements that share "
            "memory and cannot take a result; clone() it first"
        )
    staged = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return staged, lambda: _copy(tensor, staged)


def _copy(tensor: Tensor, value: Tensor) -> None:
    tensor.detach().copy_(value)


def copy_back(tensors: Sequence[Tensor], flat: Tensor) -> Finish:
    """Return what brings the elements of one block into tensors that share it, one after the other."""

    def finish() -> None:
        begin = 0
        for tensor in tensors:
            tensor.detach().copy_(flat[begin : begin + tensor.numel()].view(tensor.shape))
            begin += tensor.numel()

    return finish


def as_reducible(tensor: Tensor) -> tuple[Tensor, str]:
    """Return a block of memory as the numbers that the engine reduces, flat, and the name of their dtype."""
    if tensor.dtype == torch.bool:
        tensor = tensor.view(torch.uint8)
    elif tensor.dtype in _COMPLEX_PARTS:
        tensor = torch.view_as_real(tensor)
    return tensor.view(-1), ENGINE_DTYPES[tensor.dtype]


def as_movable(tensor: Tensor) -> tuple[Tensor, str]:
    """Return a block of memory as what the engine moves unchanged: its dtype if it knows it, else bytes."""
    flat = tensor.view(-1)
    if flat.dtype in ENGINE_DTYPES:
        return flat, ENGINE_DTYPES[flat.dtype]
    return flat.view(torch.uint8), "uint8"


def as_bytes(tensor: Tensor) -> Tensor:
    return as_contiguous(tensor).view(-1).view(torch.uint8)


def overlaps(one: Tensor, other: Tensor) -> bool:
    """Whether two blocks overlap."""
    begin, end = one.data_ptr(), one.data_ptr() + one.numel() * one.element_size()
    return begin < other.data_ptr() + other.numel() * other.element_size() and other.data_ptr() < end


def check_tensors(tensors: Sequence[Tensor], name: str) -> None:
    """
    Raises:
        UsageError: a tensor is on a device that is not ours, or is sparse, or they are on several devices.
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
    """Return the list of the one tensor that each rank gives."""
    found = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if len(found) != 1:
        raise UsageError(
            f"{name}: {len(found)} tensors; one a rank is possible (or the coalesced form, for many)"
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
