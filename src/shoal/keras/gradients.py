"""Reduces gradients over all ranks inside the training step of Keras' backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from shoal.comm.horovod import Average, Sum, Wire, check_reduction, check_wire
from shoal.errors import UsageError
from shoal.keras import process

Reduction = Literal["mean", "sum"]
Gradients = Sequence[Any]


def reducer(
    op: Reduction, compression: Wire | None, sparse_as_dense: bool, predivide: float = 1.0
) -> Callable[[Gradients], list[Any]]:
    """Return a function that reduces a list of gradients, in one call, inside a compiled step or outside.

    Args:
        op: ``mean`` or ``sum``.
        compression: format in which float32 and float64 are sent.
        sparse_as_dense: whether gradients of embeddings, on TensorFlow, become dense tensors.
        predivide: divides gradients before they are sent, and multiplies the results.

    Raises:
        UsageError: a name is unknown.
    """
    check_reduction(op, allowed=(Average, Sum))
    check_wire(compression)
    reduce: Callable[[Gradients], list[Any]] = {
        "jax": lambda gradients: _by_jax(gradients, op, compression),
        "tensorflow": lambda gradients: _by_tensorflow(
            gradients, op, compression, sparse_as_dense, predivide
        ),
        "torch": lambda gradients: _by_torch(gradients, op, compression),
    }[process.backend()]
    if predivide == 1.0 or process.backend() == "tensorflow":
        return reduce
    return lambda gradients: [each * predivide for each in reduce([each / predivide for each in gradients])]


def on_all(flag: Any) -> Any:
    """Return whether a flag of the training step, a scalar boolean tensor, is true on all ranks."""
    import keras

    number = keras.ops.cast(flag, "float32")
    least = {
        "jax": lambda: _jax_minimum(number),
        "tensorflow": lambda: _tensorflow_minimum(number),
        "torch": lambda: _torch([number], "min")[0],
    }[process.backend()]()
    return keras.ops.cast(least, "bool")


def _by_jax(gradients: Gradients, op: Reduction, compression: Wire | None) -> list[Any]:
    import jax.numpy as jnp

    from shoal.jax.collectives import all_reduce

    sent = [
        leaf.astype(compression) if compression and leaf.dtype in (jnp.float32, jnp.float64) else leaf
        for leaf in gradients
    ]
    reduced = all_reduce(sent, op)
    return [each.astype(leaf.dtype) for each, leaf in zip(reduced, gradients, strict=True)]


def _jax_minimum(number: Any) -> Any:
    from shoal.jax.collectives import all_reduce

    return all_reduce(number, "min")


def _by_tensorflow(
    gradients: Gradients, op: Reduction, compression: Wire | None, sparse_as_dense: bool, predivide: float
) -> list[Any]:
    from shoal.tensorflow.ops import grouped_allreduce

    reduced: list[Any] = grouped_allreduce(
        gradients,
        op=op,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        prescale_factor=1.0 / predivide,
        postscale_factor=predivide,
    )
    return reduced


def _tensorflow_minimum(number: Any) -> Any:
    from shoal.tensorflow.ops import allreduce

    return allreduce(number, op="min")


def _by_torch(gradients: Gradients, op: Reduction, compression: Wire | None) -> list[Any]:
    import torch

    wide = (torch.float32, torch.float64)
    wire = getattr(torch, compression) if compression else None
    sent = [leaf.to(wire) if wire and leaf.dtype in wide else leaf for leaf in gradients]
    reduced = _torch(sent, "avg" if op == "mean" else "sum")
    return [each.to(leaf.dtype) for each, leaf in zip(reduced, gradients, strict=True)]


def _torch(tensors: Sequence[Any], op: str) -> list[Any]:
    import ml_dtypes
    import torch

    from shoal.comm import arrays

    results = [tensor.detach().contiguous() for tensor in tensors]
    devices = list({tensor.device: None for tensor in tensors})
    if len(devices) > 1:
        raise UsageError(
            f"gradients of one step are on {' and '.join(map(str, devices))}; put the model on one device"
        )
    if results and (on_device := process.on_device(devices[0])) is not None:
        on_device.all_reduce(results, op)
        return results
    memory = [
        each.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        if each.dtype == torch.bfloat16
        else each.numpy()
        for each in results
    ]
    arrays.all_reduce(process.group(), memory, op)
    return results
