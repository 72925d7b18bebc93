"""Averages gradients over all ranks inside an optimizer of Keras 3."""

from __future__ import annotations

from typing import Any

import keras

from shoal.comm.horovod import Wire, check_keywords
from shoal.errors import UsageError
from shoal.keras import gradients, process
from shoal.keras.gradients import Reduction

_HOOK = "_clip_gradients"
"""Method of Keras' optimizers that sees the gradients of each update once: complete, and not yet clipped."""
_MARK = "_shoal_reduces"


def DistributedOptimizer(
    optimizer: Any,
    *,
    op: Reduction = "mean",
    compression: Wire | None = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    **others: Any,
) -> Any:
    """Make an optimizer average the gradients over all ranks before it clips and applies them.

    With ``gradient_accumulation_steps`` only complete gradients are sent. Around a ``LossScaleOptimizer`` all
    ranks skip the steps in which a gradient of any of them is not finite. Models of policy
    ``mixed_float16`` get one from ``compile``, which :class:`~shoal.keras.callbacks.Broadcast` makes agree.

    Args:
        optimizer: of Keras 3, for its backend tensorflow, jax or torch. Its class becomes a subclass of the
            same name, so that saved models load without shoal.
        op: ``mean``, or ``sum`` for losses that are sums over the batch.
        compression: ``"bfloat16"`` or ``"float16"``, one of :class:`~shoal.comm.horovod.Compression`: sends
            half the bytes of float32. Operands are rounded, added in float32, and the sum is rounded once
            more.
        sparse_as_dense: on TensorFlow, whether gradients of embeddings are sent as dense tensors; else their
            rows are gathered.
        gradient_predivide_factor: divides gradients before they are sent, and multiplies the results: against
            overflow of float16.
        backward_passes_per_step: Horovod's name; only 1. More is ``gradient_accumulation_steps`` of Keras.
        average_aggregated_gradients: Horovod's name, of what one pass does not have.
        **others: Horovod's keywords that change nothing, such as ``name`` and ``num_groups``.

    Returns:
        The optimizer.

    Raises:
        UsageError: it averages already, a name is unknown, more passes than one are asked for, or this Keras
            calls its gradients another way.

    Example:
        >>> import keras, shoal.keras as sk
        >>> sk.init()
        >>> optimizer = sk.DistributedOptimizer(keras.optimizers.Adam(1e-3))
        >>> type(optimizer).__name__
        'Adam'
        >>> sk.shutdown()
    """
    check_keywords("DistributedOptimizer", others)
    if backward_passes_per_step != 1:
        raise UsageError(
            f"backward_passes_per_step {backward_passes_per_step} must be 1: Keras accumulates gradients "
            f"itself, by optimizer(..., gradient_accumulation_steps={backward_passes_per_step})"
        )
    if is_distributed(optimizer):
        raise UsageError("this optimizer averages gradients already; call DistributedOptimizer once")
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        DistributedOptimizer(
            optimizer.inner_optimizer,
            op=op,
            compression=compression,
            sparse_as_dense=sparse_as_dense,
            gradient_predivide_factor=gradient_predivide_factor,
        )
        return agree_on_overflow(optimizer)
    base = type(optimizer)
    if not hasattr(base, _HOOK):
        raise UsageError(
            f"an optimizer of type {base.__name__} of Keras {keras.__version__} has no {_HOOK}, in which "
            "shoal averages gradients; use an optimizer of Keras 3.10 to 3.15"
        )
    reduce = gradients.reducer(op, compression, sparse_as_dense, gradient_predivide_factor)
    if process.backend() == "jax":
        reduce = _of_updates(optimizer, reduce)

    def clip_gradients(self: Any, grads: Any) -> Any:
        return getattr(super(made, self), _HOOK)(reduce(grads))

    made = _subclass(base, {_HOOK: clip_gradients, _MARK: True})
    object.__setattr__(optimizer, "__class__", made)
    return optimizer


def is_distributed(optimizer: Any) -> bool:
    """Return whether an optimizer averages gradients over all ranks."""
    return bool(getattr(type(optimizer), _MARK, False))


def agree_on_overflow(optimizer: Any) -> Any:
    """Make a ``LossScaleOptimizer`` skip the steps in which a gradient of any rank is not finite.

    Args:
        optimizer: the optimizer, around one that averages gradients.

    Returns:
        It.
    """
    base = type(optimizer)

    def check_finite(self: Any, grads: Any) -> Any:
        return gradients.on_all(super(made, self).check_finite(grads))

    made = _subclass(base, {"check_finite": check_finite, _MARK: True})
    object.__setattr__(optimizer, "__class__", made)
    return optimizer


def _subclass(base: type, members: dict[str, Any]) -> Any:
    names = {"__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base.__name__, (base,), {**names, **members})


def _of_updates(optimizer: Any, reduce: Any) -> Any:
    """Return ``reduce`` for complete gradients only: on JAX, Keras computes an update in every micro-step."""
    steps = optimizer.gradient_accumulation_steps
    if not steps:
        return reduce
    import jax

    def reduce_if_complete(grads: Any) -> Any:
        complete = (optimizer._iterations.value + 1) % steps == 0
        return jax.lax.cond(complete, reduce, lambda unchanged: unchanged, list(grads))

    return reduce_if_complete
