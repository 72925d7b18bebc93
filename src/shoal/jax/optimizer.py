"""Averages gradients over all ranks inside an optimizer of optax."""

from __future__ import annotations

from typing import Any, Literal

import optax

from shoal.jax.collectives import Reduction, all_reduce


def distributed(
    optimizer: Any, *, op: Reduction = "mean", wire: Literal["bfloat16"] | None = None
) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that first averages the gradients over all ranks.

    Use it around the whole chain, so that clipping sees the averages. For ``optax.MultiSteps``, wrap what it
    wraps: only complete gradients are sent then.

    Args:
        optimizer: an ``optax.GradientTransformation``.
        op: ``mean``, or ``sum`` for losses that are sums over the batch.
        wire: as of :func:`shoal.jax.all_reduce`.

    Returns:
        One with the same state, whose ``update`` runs inside ``jit`` or outside.

    Example:
        >>> import jax.numpy as jnp, optax, shoal.jax
        >>> shoal.jax.init()
        >>> tx = shoal.jax.distributed(optax.sgd(0.5))
        >>> params = {"w": jnp.ones(2)}
        >>> updates, state = tx.update({"w": jnp.ones(2)}, tx.init(params), params)
        >>> updates
        {'w': Array([-0.5, -0.5], dtype=float32)}
        >>> shoal.jax.shutdown()
    """
    inner = optax.with_extra_args_support(optimizer)

    def update(gradients: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        done: tuple[Any, Any] = inner.update(all_reduce(gradients, op, wire=wire), state, params, **extra)
        return done

    return optax.GradientTransformationExtraArgs(inner.init, update)
