"""Compiles and loads the operation by which a collective enters a TensorFlow program.

The operation needs TensorFlow's C++ interface, which changes with every version, so it is built on first use
with the headers and flags of the installed one (``tf.sysconfig``). Without a compiler, ``tf.numpy_function``
takes its place.
"""

from __future__ import annotations

import ctypes
import platform
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from shoal.comm import arrays, native_build
from shoal.comm.job_group import JobGroup
from shoal.errors import ShoalError, UsageError

KINDS = {"all_reduce": 0, "broadcast": 2, "all_gather": 3, "reduce_scatter": 4}
"""Numbers of ``shoal_kind`` in ``shoal.h``."""
REDUCTIONS = {"sum": 0, "mean": 1, "prod": 2, "min": 3, "max": 4}
"""Numbers of ``shoal_reduction`` in ``shoal.h``."""
_OF_ENGINE = {"mean": "avg"}
_REDUCING = ("all_reduce", "reduce_scatter")


@cache
def library() -> Any:
    """Return the module with the operation, compiled when the cache lacks it.

    Raises:
        UsageError: there is no compiler.
        ShoalError: it cannot be compiled or loaded.
    """
    flags = tuple(tf.sysconfig.get_compile_flags())
    path = native_build.build(
        native_build.Library(
            title="its operation for TensorFlow",
            kind="tensorflow",
            name="libshoal_tensorflow",
            sources=Path(__file__).parent / "native",
            versions=(str(tf.version.VERSION), str(tf.version.GIT_VERSION), *flags, platform.machine()),
            includes=(Path(tf.sysconfig.get_include()),),
            shared=(native_build.TREE_CALL,),
            flags=(*(each for each in flags if not each.startswith("-I")), "-std=c++17", "-DNDEBUG"),
            links=tuple(tf.sysconfig.get_link_flags()),
        )
    )
    try:
        module = tf.load_op_library(str(path))
    except tf.errors.OpError as problem:
        raise native_build.not_loaded(path, problem) from None
    set_group = ctypes.CDLL(str(path)).shoal_tensorflow_set_group
    set_group.argtypes, set_group.restype = (ctypes.c_int64, ctypes.c_void_p), None
    module.set_group = set_group
    return module


@cache
def compiled() -> Any | None:
    """Return :func:`library`, or ``None`` after one line that says why numpy_function takes its place."""
    try:
        return library()
    except (ShoalError, OSError) as problem:
        print(
            f"shoal.tensorflow: using tf.numpy_function, which copies and waits, as its operation for "
            f"TensorFlow cannot be compiled: {problem}",
            file=sys.stderr,
            flush=True,
        )
        return None


def set_group(number: int, group: int) -> None:
    """Register a group under its number for programs.

    Args:
        number: above 0.
        group: address of a reference to a ``shoal_group``, which this takes over; 0: none any more.
    """
    if (module := compiled()) is not None:
        module.set_group(number, group)


def call(
    tensors: Sequence[Any], *, group: JobGroup, number: int, kind: str, op: str = "sum", root: int = 0
) -> list[Any]:
    """Return the results of one collective on several tensors.

    Args:
        tensors: at least one.
        group: group of all processes.
        number: of the group in programs.
        kind: one of :data:`KINDS`.
        op: one of :data:`REDUCTIONS`.
        root: source of a broadcast.

    Returns:
        For each tensor of shape ``s``: ``s``; of an all_gather ``(size, *s)``; of a reduce_scatter ``s`` with
        the first dimension divided by ``size``.

    Raises:
        UsageError: XLA compiles the program.
    """
    _refuse_xla()
    if (module := compiled()) is None:
        return _by_numpy(tensors, group, kind, op, root)
    with tf.device("CPU:0"):
        return list(
            module.shoal_collective(
                tensors=list(tensors),
                group=number,
                kind=KINDS[kind],
                size=group.size,
                reduction=REDUCTIONS[op],
                root=root,
                timeout_s=group.timeout_s,
            )
        )


def _refuse_xla() -> None:
    in_program = not tf.executing_eagerly()
    if in_program and control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise UsageError(
            "a collective inside of tf.function(jit_compile=True): XLA compiles only TensorFlow's own "
            "operations; compile what is before and after it, and call it between them, or leave "
            "jit_compile=True out (of Model.compile too)"
        )


def _by_numpy(tensors: Sequence[Any], group: JobGroup, kind: str, op: str, root: int) -> list[Any]:
    operation = _OF_ENGINE.get(op, op)
    run: Callable[[list[Any]], Any] = {
        "all_reduce": lambda leaves: arrays.all_reduce(group, leaves, operation),
        "broadcast": lambda leaves: arrays.broadcast(group, leaves, root),
        "all_gather": lambda leaves: arrays.all_gather(group, leaves),
        "reduce_scatter": lambda leaves: arrays.reduce_scatter(group, leaves, operation),
    }[kind]

    def moved(*values: Any) -> list[Any]:
        leaves = [np.array(value, order="C") for value in values]
        if kind not in _REDUCING:
            return run(leaves) or leaves
        real = [leaf.reshape(-1).view(leaf.real.dtype) for leaf in leaves]  # complex ones as pairs
        outputs = run(real) or real
        shapes = [_shape(leaf.shape, kind, group.size) for leaf in leaves]
        return [
            each.view(leaf.dtype).reshape(shape)
            for each, leaf, shape in zip(outputs, leaves, shapes, strict=True)
        ]

    # TensorFlow 2.21 makes no array of an eager bfloat16 without dimensions
    sent = [tf.reshape(each, [1]) if each.shape.rank == 0 else each for each in tensors]
    moved_arrays = tf.numpy_function(moved, sent, [each.dtype for each in tensors], stateful=True)
    results = list(moved_arrays) if isinstance(moved_arrays, list | tuple) else [moved_arrays]
    for result, tensor in zip(results, sent, strict=True):
        result.set_shape(_shape(tensor.shape, kind, group.size))
    return [
        tf.reshape(result, []) if tensor.shape.rank == 0 else result
        for result, tensor in zip(results, tensors, strict=True)
    ]


def _shape(shape: Any, kind: str, size: int) -> Any:
    """Return the shape of a result, as a list of lengths; ``None`` where nothing is known."""
    if isinstance(shape, tf.TensorShape):
        if shape.rank is None:
            return shape
        shape = shape.as_list()
    if kind == "all_gather":
        return [size, *shape]
    if kind == "reduce_scatter":
        return [shape[0] and shape[0] // size, *shape[1:]]
    return list(shape)
