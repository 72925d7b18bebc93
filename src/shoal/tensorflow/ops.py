"""Provides collectives on tensors, with Horovod's names, in eager programs and inside ``tf.function``.

All ranks call them in the same order with tensors of the same dtypes and, except for :func:`allgather`, the
same shapes. They are not differentiable: reduce gradients, not losses. Each argument may also be a Keras
variable.

Sums have the bits of backend ``"shoal"`` of ``torch.distributed``: added in rank order, in float32 for 16-bit
dtypes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import tensorflow as tf

from shoal.comm.horovod import Average, Wire, check_keywords, check_reduction, check_wire, from_json, to_json
from shoal.errors import UsageError
from shoal.json_text import parse_json
from shoal.tensorflow import op as operation
from shoal.tensorflow import process

_MEANS = ("mean", "sum")
_Function = TypeVar("_Function", bound=Callable[..., Any])


def _as_it_is(function: _Function) -> _Function:
    """Keep AutoGraph from translating a function inside ``tf.function`` that has nothing for it."""
    kept: _Function = tf.autograph.experimental.do_not_convert(function)
    return kept


@_as_it_is
def allreduce(
    tensor: Any,
    average: bool | None = None,
    *,
    op: Any = None,
    compression: Wire | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    **others: Any,
) -> Any:
    """Return the mean, or another reduction, of a tensor over all ranks.

    Args:
        tensor: a tensor, or ``tf.IndexedSlices``, whose rows are gathered.
        average: the older argument for ``Average`` and ``Sum``.
        op: ``Average`` (also if ``None``) of floating-point and complex numbers, ``Sum``, ``Min``, ``Max`` or
            ``Product``.
        compression: one of :class:`~shoal.comm.horovod.Compression`. Operands are rounded, added in float32,
            and the sum is rounded once more.
        prescale_factor: multiplies the tensor before it is sent.
        postscale_factor: multiplies the result.
        **others: Horovod's keywords that change nothing, such as ``name``: calls match by their order.

    Raises:
        TypeError: the dtype does not have the reduction.
        UsageError: :func:`~shoal.tensorflow.process.init` was not called, or a name is unknown.
        tf.errors.AbortedError: a rank was lost, or ranks differ.

    Example:
        >>> import tensorflow as tf, shoal.tensorflow as st
        >>> st.init()
        >>> st.allreduce(tf.constant([1.0, 2.0]), op=st.Sum).numpy().tolist()
        [1.0, 2.0]
        >>> st.shutdown()
    """
    return grouped_allreduce(
        [tensor],
        average,
        op=op,
        compression=compression,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        **others,
    )[0]


@_as_it_is
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    *,
    op: Any = None,
    compression: Wire | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    sparse_as_dense: bool = False,
    **others: Any,
) -> list[Any]:
    """Return the reductions of several tensors, in one call; those below 64 KiB are sent together.

    Args:
        tensors: tensors, ``tf.IndexedSlices``, or ``None``, which stays as it is.
        average: as of :func:`allreduce`.
        op: as of :func:`allreduce`.
        compression: as of :func:`allreduce`.
        prescale_factor: multiplies each tensor before it is sent.
        postscale_factor: multiplies each result.
        sparse_as_dense: whether to convert ``tf.IndexedSlices`` to dense tensors instead of gathering rows.
        **others: as of :func:`allreduce`.

    Raises:
        TypeError: the dtype of a tensor does not have the reduction.
        UsageError: :func:`~shoal.tensorflow.process.init` was not called, or a name is unknown.
        tf.errors.AbortedError: a rank was lost, or ranks differ.
    """
    check_keywords("allreduce", others)
    reduction, wire = check_reduction(op, average), check_wire(compression)
    reduced: list[Any] = list(tensors)
    dense: dict[int, Any] = {}
    for index, tensor in enumerate(reduced):
        if isinstance(tensor, tf.IndexedSlices) and not sparse_as_dense:
            reduced[index] = _gathered_rows(tensor, reduction, prescale_factor * postscale_factor)
        elif tensor is not None:
            dense[index] = tf.convert_to_tensor(tensor)
            _check(dense[index], reduction)
    sent = [_on_the_wire(_scaled(each, prescale_factor), wire) for each in dense.values()]
    if sent:
        results = _call(sent, kind="all_reduce", op=reduction)
        for (index, tensor), result in zip(dense.items(), results, strict=True):
            reduced[index] = _scaled(tf.cast(result, tensor.dtype), postscale_factor)
    else:
        process.group()
    return reduced


@_as_it_is
def broadcast(tensor: Any, root_rank: int = 0, *, name: str | None = None) -> Any:
    """Return the tensor of rank ``root_rank`` on all ranks.

    Args:
        tensor: of the same shape and dtype on all ranks.
        root_rank: rank whose tensor is sent.
        name: ignored: calls match by their order.

    Raises:
        UsageError: :func:`~shoal.tensorflow.process.init` was not called, or there is no such rank.
        tf.errors.AbortedError: a rank was lost, or ranks differ.
    """
    return _broadcast([tf.convert_to_tensor(tensor)], root_rank)[0]


@_as_it_is
def broadcast_variables(variables: Iterable[Any], root_rank: int = 0) -> None:
    """Give variables the values of rank ``root_rank``.

    Args:
        variables: of TensorFlow or Keras, with the same shapes and dtypes on all ranks.
        root_rank: rank whose values are sent.

    Raises:
        UsageError: :func:`~shoal.tensorflow.process.init` was not called, or there is no such rank.
        tf.errors.AbortedError: a rank was lost, or ranks differ.
    """
    targets = list(variables)
    values = _broadcast([tf.convert_to_tensor(each) for each in targets], root_rank) if targets else []
    for target, value in zip(targets, values, strict=True):
        target.assign(value)


def broadcast_object(value: Any, root_rank: int = 0, *, name: str | None = None) -> Any:
    """Return the value of rank ``root_rank`` on all ranks.

    Args:
        value: numbers, strings, ``None``, lists, tuples and dicts. Objects of other types are refused, as
            they would have to be unpickled.
        root_rank: rank whose value is sent.
        name: ignored: calls match by their order.

    Raises:
        CommError: a rank was lost.
        TypeError: the value is of another type.
        UsageError: :func:`~shoal.tensorflow.process.init` was not called, or there is no such rank.
    """
    _check_root(root_rank)
    sent = json.dumps(to_json(value)).encode() if process.rank() == root_rank else b""
    sender = f"rank {root_rank}"
    return from_json(parse_json(process.group().broadcast_bytes(sent, root_rank), sender), sender)


def allgather_object(value: Any, *, name: str | None = None) -> list[Any]:
    """Return the values of all ranks, in rank order.

    Args:
        value: as of :func:`broadcast_object`.
        name: ignored: calls match by their order.

    Raises:
        CommError: a rank was lost.
        TypeError: the value is of another type.
        UsageError: :func:`~shoal.tensorflow.process.init` was not called.
    """
    return [broadcast_object(value, root) for root in range(process.size())]


@_as_it_is
def allgather(tensor: Any, *, name: str | None = None) -> Any:
    """Return the tensors of all ranks, concatenated along the first dimension in rank order.

    Args:
        tensor: of shape ``(n, ...)``, where ``n`` may differ by rank.
        name: ignored: calls match by their order.

    Raises:
        UsageError: :func:`~shoal.tensorflow.process.init` was not called, or the tensor has no dimension.
        tf.errors.AbortedError: a rank was lost, or ranks differ.
    """
    return grouped_allgather([tensor])[0]


@_as_it_is
def grouped_allgather(tensors: Sequence[Any], *, name: str | None = None) -> list[Any]:
    """Return the concatenations of several tensors, in two calls.

    Args:
        tensors: as of :func:`allgather`.
        name: ignored: calls match by their order.

    Raises:
        UsageError: :func:`~shoal.tensorflow.process.init` was not called, or a tensor has no dimension.
        tf.errors.AbortedError: a rank was lost, or ranks differ.
    """
    operands = [tf.convert_to_tensor(each) for each in tensors]
    if any(each.shape.rank == 0 for each in operands):
        raise UsageError("allgather of a tensor without dimensions; use tf.reshape(tensor, [1])")
    if not operands:
        process.group()
        return []
    rows = tf.stack([tf.shape(each, tf.int64)[0] for each in operands])
    of_ranks = _call([rows], kind="all_gather")[0]  # ranks x tensors
    most = tf.reduce_max(of_ranks, axis=0)
    padded = [_padded(each, most[index]) for index, each in enumerate(operands)]
    gathered = _call(padded, kind="all_gather")
    return [_joined(whole, of_ranks[:, index]) for index, whole in enumerate(gathered)]


@_as_it_is
def reducescatter(tensor: Any, *, op: Any = Average, name: str | None = None) -> Any:
    """Return this rank's part of the reduction of a tensor, divided along the first dimension.

    Args:
        tensor: of shape ``(rows, ...)``, the same on all ranks.
        op: as of :func:`allreduce`.
        name: ignored: calls match by their order.

    Returns:
        A tensor of shape ``(n, ...)``: rank 0 has the first rows. Where they do not divide, the first ranks
        have one more, as in Horovod.

    Raises:
        TypeError: the dtype does not have the reduction.
        UsageError: :func:`~shoal.tensorflow.process.init` was not called, or the tensor has no dimension.
        tf.errors.AbortedError: a rank was lost, or ranks differ.
    """
    operand = tf.convert_to_tensor(tensor)
    _check(operand, op)
    if operand.shape.rank == 0:
        raise UsageError("reducescatter of a tensor without dimensions; use allreduce")
    if operand.shape.rank and operand.shape[0] is not None and operand.shape[0] % process.size() == 0:
        return _call([operand], kind="reduce_scatter", op=op)[0]
    size, rows = process.size(), tf.shape(operand, tf.int64)[0]
    more = rows % size  # ranks that have one row more
    most = (rows + size - 1) // size
    ranks = tf.range(size, dtype=tf.int64)
    starts = ranks * (rows // size) + tf.minimum(ranks, more)
    indices = tf.reshape(starts[:, None] + tf.range(most), [-1])
    alike = tf.gather(operand, tf.minimum(indices, rows - 1))  # shorter parts end with a row that is cut off
    own = rows // size + tf.cast(process.rank() < more, tf.int64)
    return _call([alike], kind="reduce_scatter", op=op)[0][:own]


def _call(tensors: Sequence[Any], *, kind: str, op: str = "sum", root: int = 0) -> list[Any]:
    return operation.call(
        tensors, group=process.group(), number=process.group_number(), kind=kind, op=op, root=root
    )


def _check_root(root: int) -> None:
    if not 0 <= root < process.size():
        raise UsageError(f"root_rank {root} is no rank; ranks are 0 to {process.size() - 1}")


def _broadcast(tensors: Sequence[Any], root: int) -> list[Any]:
    _check_root(root)
    return _call(tensors, kind="broadcast", root=root)


def _check(tensor: Any, op: str) -> None:
    kind = tensor.dtype
    real = kind in (tf.float16, tf.bfloat16, tf.float32, tf.float64)
    whole = kind in (tf.int8, tf.uint8, tf.int32, tf.int64)
    has = {"mean": real or kind.is_complex, "sum": real or whole or kind.is_complex}.get(op, real or whole)
    if not has:
        raise TypeError(
            f"a tensor of dtype {kind.name} has no {op} over ranks; convert it, as to float32 or int32"
        )


def _scaled(tensor: Any, factor: float) -> Any:
    return tensor if factor == 1.0 else tensor * tf.cast(factor, tensor.dtype)


def _on_the_wire(tensor: Any, compression: Wire | None) -> Any:
    wide = tensor.dtype in (tf.float32, tf.float64)
    return tf.cast(tensor, compression) if compression and wide else tensor


def _gathered_rows(slices: Any, op: str, factor: float) -> Any:
    """Return the rows of all ranks; those of one index are added by whatever applies them."""
    if op not in _MEANS:
        raise TypeError(f"tf.IndexedSlices have no {op} over ranks; use tf.convert_to_tensor")
    values, indices = grouped_allgather([slices.values, slices.indices])
    share = factor / process.size() if op == "mean" else factor
    return tf.IndexedSlices(_scaled(values, share), indices, slices.dense_shape)


def _joined(whole: Any, rows: Any) -> Any:
    """Return the first ``rows`` of each rank's part of ``whole``, one after the other."""
    joined = tf.cond(
        tf.reduce_all(rows == tf.shape(whole, tf.int64)[1]),
        lambda: tf.reshape(whole, tf.concat([[-1], tf.shape(whole)[2:]], axis=0)),  # a view
        lambda: tf.concat([whole[rank, : rows[rank]] for rank in range(process.size())], axis=0),
    )
    joined.set_shape([None, *whole.shape[2:]])
    return joined


def _padded(tensor: Any, rows: Any) -> Any:
    missing = rows - tf.shape(tensor, tf.int64)[0]
    zeros = tf.zeros_like(tf.shape(tensor, tf.int64))
    after = tf.concat([[missing], zeros[1:]], axis=0)
    return tf.pad(tensor, tf.stack([zeros, after], axis=1))
