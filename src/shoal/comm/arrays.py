"""Provides collectives on lists of NumPy arrays, in a :class:`~shoal.comm.job_group.JobGroup`.

For values that cross between processes outside of compiled programs: weights at the beginning, metrics at
the end of an epoch, gradients of eager programs. A call returns when all of its operations have completed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal.comm.engine import Operation
from shoal.comm.job_group import JobGroup

FUSED_BELOW_BYTES = 64 << 10
"""Arrays below this travel together. As in ``native_call/tree_call.h``, which can run on the other ranks."""
_DTYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64")
"""In the order of ``shoal_dtype`` in ``shoal.h``, by which fused arrays are sent."""
Array = np.ndarray[Any, Any]


def all_reduce(group: JobGroup, arrays: Sequence[Array], op: str = "avg") -> None:
    """Replace each array by its reduction over all ranks.

    Args:
        group: group of all processes.
        arrays: contiguous, of the same shapes and dtypes on all ranks: float32, float64, float16, bfloat16
            (of ``ml_dtypes``), int8, uint8, int32 or int64.
        op: ``avg`` of floating-point numbers, ``sum``, ``min``, ``max`` or ``prod``.

    Raises:
        CommError: a rank was lost, or ranks differ.
        TypeError: a dtype is another one.

    Example:
        >>> import numpy as np
        >>> from shoal.comm.job_group import join
        >>> group, values = join(), [np.ones(2, np.float32)]
        >>> all_reduce(group, values, "sum")
        >>> values
        [array([1., 1.], dtype=float32)]
        >>> group.close()
    """
    _fused(group, arrays, Operation(kind="all_reduce", op=op))


def broadcast(group: JobGroup, arrays: Sequence[Array], root: int = 0) -> None:
    """Replace each array by that of rank ``root``.

    Args:
        group: group of all processes.
        arrays: contiguous, of the same shapes and dtypes on all ranks; booleans and complex numbers too.
        root: rank whose arrays are sent.

    Raises:
        CommError: a rank was lost, or ranks differ.
    """
    _fused(group, [_bytes_of(each) for each in arrays], Operation(kind="broadcast", root=root))


def all_gather(group: JobGroup, arrays: Sequence[Array]) -> list[Array]:
    """Return the arrays of all ranks, each with a first dimension for the ranks.

    Args:
        group: group of all processes.
        arrays: contiguous, of the same shapes and dtypes on all ranks.

    Raises:
        CommError: a rank was lost, or ranks differ.
    """
    gathered = [np.empty((group.size, *each.shape), each.dtype) for each in arrays]
    if group.size == 1:
        return [np.array(each[None]) for each in arrays]
    pairs = [(_bytes_of(each), whole) for each, whole in zip(arrays, gathered, strict=True)]
    _run(group, [(each, whole, each.size) for each, whole in pairs], Operation(kind="all_gather"))
    return gathered


def reduce_scatter(group: JobGroup, arrays: Sequence[Array], op: str = "avg") -> list[Array]:
    """Return this rank's part of the reduction of each array, divided along the first dimension.

    Args:
        group: group of all processes.
        arrays: contiguous; the length of the first dimension is a multiple of the number of ranks.
        op: as of :func:`all_reduce`.

    Raises:
        CommError: a rank was lost, or ranks differ.
        TypeError: a dtype is not one of those that can be added.
    """
    scattered = [np.empty((each.shape[0] // group.size, *each.shape[1:]), each.dtype) for each in arrays]
    if group.size == 1:
        return [each.copy() for each in arrays]
    pairs = zip(arrays, scattered, strict=True)
    operation = Operation(kind="reduce_scatter", op=op)
    _run(group, [(each, part, part.size) for each, part in pairs], operation)
    return scattered


def _bytes_of(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)


def _dtype(array: Array) -> str:
    name = str(array.dtype.name)
    if name not in _DTYPES:
        raise TypeError(f"an array of dtype {name} is not reduced over ranks; convert it, as to float32")
    return name


def _fused(group: JobGroup, arrays: Sequence[Array], operation: Operation) -> None:
    if not all(each.flags.c_contiguous for each in arrays):
        raise ValueError("arrays must be contiguous; use numpy.ascontiguousarray")
    named = [(_dtype(each), each.reshape(-1)) for each in arrays]
    if group.size == 1:
        return
    flat, blocks = [each for _, each in named if each.size], []
    for dtype in _DTYPES:
        small = [
            each for name, each in named if name == dtype and 0 < each.nbytes < FUSED_BELOW_BYTES
        ]  # fmt: skip
        if len(small) > 1:
            blocks.append((np.concatenate(small), small))
    fused = {id(each) for _, small in blocks for each in small}
    sent = [*(block for block, _ in blocks), *(each for each in flat if id(each) not in fused)]
    _run(group, [(each, each, each.size) for each in sent], operation)
    for block, small in blocks:
        at = 0
        for each in small:
            each[:] = block[at : at + each.size]
            at += each.size


def _run(group: JobGroup, parts: Sequence[tuple[Array, Array, int]], operation: Operation) -> None:
    """Submit one operation per input and output, and wait for all."""
    handles = [
        group.engine.submit(
            Operation(
                kind=operation.kind,
                op=operation.op,
                root=operation.root,
                input=source.ctypes.data,
                output=target.ctypes.data,
                count=count,
                dtype=_dtype(source),
                timeout_s=group.timeout_s,
            )
        )
        for source, target, count in parts
        if count
    ]
    for handle in handles:
        group.engine.wait(handle)
