"""Provides collectives on pytrees of arrays, inside ``jax.jit`` and outside.

All ranks call them in the same order with trees of the same structure, shapes and dtypes. A call is one
operation of a compiled program, for any number of leaves; those below 64 KiB are sent together. It is
asynchronous: computations that do not depend on the result continue. Several calls run in program order.
They are not differentiable: reduce gradients, not losses.

Sums have the bits of backend ``"shoal"`` of ``torch.distributed``: added in rank order, in float32 for 16-bit
dtypes.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from shoal.errors import UsageError
from shoal.jax import ffi, process
from shoal.jax.program import jit

Reduction = Literal["mean", "sum", "min", "max", "prod"]
Tree = Any
"""A pytree of arrays."""
_SIXTEEN_BITS = 2

_compiled = partial(jit, static_argnames=("kind", "group", "size", "timeout_s", "op", "root"), inline=True)


@_compiled
def _kept(*leaves: jax.Array, **parameters: Any) -> list[jax.Array]:
    return ffi.bind(leaves, **parameters)


def all_reduce(tree: Tree, op: Reduction = "mean", *, wire: Literal["bfloat16"] | None = None) -> Tree:
    """Return the mean, or another reduction, of each leaf over all ranks.

    A leaf that nothing else uses is reduced in place: inside ``jit`` values of the program, such as
    gradients, and donated arguments. Other arrays are copied and not changed.

    Args:
        tree: arrays. Booleans have ``min`` and ``max`` only; unsigned and complex numbers ``sum``, complex
            ``mean`` too.
        op: ``mean`` of floating-point and complex numbers, ``sum``, ``min``, ``max`` or ``prod``.
        wire: ``"bfloat16"`` sends float32 and float64 as bfloat16, half the bytes or less. Operands are
            rounded, added in float32, and the sum is rounded once more.

    Raises:
        TypeError: the dtype of a leaf does not have the reduction.
        UsageError: :func:`init` was not called, or a name is unknown.
        jax.errors.JaxRuntimeError: when the result is used: a rank was lost, or ranks differ.

    Example:
        >>> import jax.numpy as jnp, shoal.jax
        >>> shoal.jax.init()
        >>> shoal.jax.all_reduce({"w": jnp.arange(3.0)}, "sum")
        {'w': Array([0., 1., 2.], dtype=float32)}
        >>> shoal.jax.shutdown()
    """
    leaves, structure = jax.tree.flatten(tree)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    _check(leaves, op)
    sent = [_on_the_wire(leaf, wire) for leaf in leaves]
    reduced = _call(sent, kind="all_reduce", op=op)
    done = [result.astype(leaf.dtype) for result, leaf in zip(reduced, leaves, strict=True)]
    return jax.tree.unflatten(structure, done)


def broadcast(tree: Tree, root: int = 0) -> Tree:
    """Return the leaves of rank ``root`` on all ranks.

    Args:
        tree: arrays, of the same shapes and dtypes on all ranks.
        root: rank whose arrays are sent.

    Raises:
        UsageError: :func:`init` was not called, or there is no such rank.
        jax.errors.JaxRuntimeError: when the result is used: a rank was lost, or ranks differ.

    Example:
        >>> import jax.numpy as jnp, shoal.jax
        >>> shoal.jax.init()
        >>> shoal.jax.broadcast([jnp.ones(2)])
        [Array([1., 1.], dtype=float32)]
        >>> shoal.jax.shutdown()
    """
    if not 0 <= root < process.size():
        raise UsageError(f"root {root} is no rank; ranks are 0 to {process.size() - 1}")
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(
        structure, _call([jnp.asarray(each) for each in leaves], kind="broadcast", root=root)
    )


def all_gather(tree: Tree, *, tiled: bool = False) -> Tree:
    """Return each leaf of all ranks, in rank order.

    Args:
        tree: arrays, of the same shapes and dtypes on all ranks.
        tiled: whether to concatenate along the first dimension, as ``jax.lax.all_gather`` does, instead of
            adding one.

    Returns:
        For a leaf of shape ``(n, ...)`` one of ``(size, n, ...)``; tiled, of ``(size * n, ...)``.

    Raises:
        UsageError: :func:`init` was not called, or a leaf without dimensions is to be tiled.
        jax.errors.JaxRuntimeError: when the result is used: a rank was lost, or ranks differ.

    Example:
        >>> import jax.numpy as jnp, shoal.jax
        >>> shoal.jax.init()
        >>> shoal.jax.all_gather(jnp.ones(2)).shape
        (1, 2)
        >>> shoal.jax.shutdown()
    """
    leaves, structure = jax.tree.flatten(tree)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    results = _call(leaves, kind="all_gather")
    if tiled:
        if not all(leaf.ndim for leaf in leaves):
            raise UsageError("all_gather(tiled=True) has a leaf without dimensions; use tiled=False")
        results = [result.reshape(-1, *leaf.shape[1:]) for result, leaf in zip(results, leaves, strict=True)]
    return jax.tree.unflatten(structure, results)


def reduce_scatter(tree: Tree, op: Reduction = "mean") -> Tree:
    """Return this rank's part of the reduction of each leaf, divided along the first dimension.

    Args:
        tree: arrays; the length of the first dimension is a multiple of the number of ranks.
        op: as of :func:`all_reduce`.

    Returns:
        For a leaf of shape ``(size * n, ...)`` one of ``(n, ...)``: rank 0 has the first ``n``.

    Raises:
        TypeError: the dtype of a leaf does not have the reduction.
        UsageError: :func:`init` was not called, or a length is no multiple.
        jax.errors.JaxRuntimeError: when the result is used: a rank was lost, or ranks differ.

    Example:
        >>> import jax.numpy as jnp, shoal.jax
        >>> shoal.jax.init()
        >>> shoal.jax.reduce_scatter(jnp.arange(4.0), "sum").shape
        (4,)
        >>> shoal.jax.shutdown()
    """
    leaves, structure = jax.tree.flatten(tree)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    _check(leaves, op)
    for leaf in leaves:
        if not leaf.ndim or leaf.shape[0] % process.size():
            raise UsageError(
                f"reduce_scatter of an array of shape {leaf.shape}: the first dimension must be a multiple "
                f"of the {process.size()} ranks; pad it"
            )
    return jax.tree.unflatten(structure, _call(leaves, kind="reduce_scatter", op=op))


def _call(leaves: list[jax.Array], **parameters: Any) -> list[jax.Array]:
    if not leaves:
        process.group()
        return []
    return list(
        _kept(
            *leaves,
            group=process.group_number(),
            size=process.size(),
            timeout_s=process.group().timeout_s,
            **parameters,
        )
    )


def _on_the_wire(leaf: jax.Array, wire: str | None) -> jax.Array:
    if wire not in (None, "bfloat16"):
        raise UsageError(f"wire {wire!r} is not known; it is 'bfloat16' or None")
    wide = jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize > _SIXTEEN_BITS
    return leaf.astype(jnp.bfloat16) if wire and wide else leaf


def _check(leaves: list[jax.Array], op: str) -> None:
    if op not in ffi.REDUCTIONS:
        raise UsageError(f"op {op!r} is not known; it is one of {', '.join(ffi.REDUCTIONS)}")
    for leaf in leaves:
        kind, name = leaf.dtype, leaf.dtype.name
        real = jnp.issubdtype(kind, jnp.floating) and leaf.dtype.itemsize >= _SIXTEEN_BITS
        signed = name in ("int8", "int32", "int64", "uint8")
        unsigned = name in ("uint32", "uint64")
        is_complex = jnp.issubdtype(kind, jnp.complexfloating)
        has = {
            "mean": real or is_complex,
            "sum": real or is_complex or signed or unsigned,
        }.get(op, real or signed or (name == "bool" and op != "prod"))
        if not has:
            raise TypeError(
                f"an array of dtype {name} has no {op} over ranks; convert it, as to float32 or int32"
            )
