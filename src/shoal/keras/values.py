"""Provides collectives on numbers and arrays outside of training steps, with Horovod's names."""

from __future__ import annotations

from typing import Any

import numpy as np

from shoal.comm import arrays
from shoal.comm.horovod import check_keywords, check_reduction
from shoal.errors import UsageError
from shoal.keras import process


def allreduce(value: Any, op: Any = None, *, average: bool | None = None, **others: Any) -> Any:
    """Return the mean, or another reduction, of a number or array over all ranks.

    Args:
        value: what NumPy can convert, of the same shape and dtype on all ranks.
        op: ``mean`` (also if ``None``) of floating-point numbers, ``sum``, ``min``, ``max`` or ``prod``.
        average: the older keyword for ``mean`` and ``sum``.
        **others: Horovod's keywords that change nothing, such as ``name``: calls match by their order.

    Raises:
        CommError: a rank was lost, or ranks differ.
        TypeError: the dtype does not have the reduction.
        UsageError: ``init`` was not called.

    Example:
        >>> import shoal.keras as sk
        >>> sk.init()
        >>> float(sk.allreduce(2.5))
        2.5
        >>> sk.shutdown()
    """
    check_keywords("allreduce", others)
    reduction, result = check_reduction(op, average), np.array(value, order="C")
    arrays.all_reduce(process.group(), [result], "avg" if reduction == "mean" else reduction)
    return result


def allgather(value: Any, *, name: str | None = None) -> Any:
    """Return the arrays of all ranks, concatenated along the first dimension in rank order.

    Args:
        value: an array of shape ``(n, ...)``, where ``n`` may differ by rank.
        name: ignored: calls match by their order.

    Raises:
        CommError: a rank was lost, or ranks differ.
        UsageError: ``init`` was not called, or the value has no dimension.
    """
    own = np.array(value, order="C")
    if not own.ndim:
        raise UsageError("allgather of a number; give a list with it")
    group = process.group()
    lengths = arrays.all_gather(group, [np.array([len(own)], np.int64)])[0].ravel().tolist()
    padded = np.zeros((max(lengths), *own.shape[1:]), own.dtype)
    padded[: len(own)] = own
    gathered = arrays.all_gather(group, [padded])[0]
    return np.concatenate([part[:length] for part, length in zip(gathered, lengths, strict=True)])


def broadcast(value: Any, root_rank: int = 0, *, name: str | None = None) -> Any:
    """Return the number or array of rank ``root_rank`` on all ranks.

    Args:
        value: what NumPy can convert, of the same shape and dtype on all ranks.
        root_rank: rank whose value is sent.
        name: ignored: calls match by their order.

    Raises:
        CommError: a rank was lost, or ranks differ.
        UsageError: ``init`` was not called, or there is no such rank.
    """
    if not 0 <= root_rank < process.size():
        raise UsageError(f"root_rank {root_rank} is no rank; ranks are 0 to {process.size() - 1}")
    result = np.array(value, order="C")
    arrays.broadcast(process.group(), [result], root_rank)
    return result
