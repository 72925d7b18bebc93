"""Prepares the collectives of JAX and TensorFlow programs, for ``shoal bench comm``."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from shoal.comm.store import Store
from shoal.errors import import_extra

Call = Callable[[], object]
Prepare = Callable[[str, torch.Tensor], tuple[Call, torch.Tensor | None]]
"""Takes the name of a collective and this rank's operand.

Returns a call on zeros, and the result of a call on the operand, in float64; ``None`` of a barrier.
"""


def join(backend: str, store: Store, timeout: timedelta) -> Prepare:
    """Join the ranks of a framework.

    Args:
        backend: one of :data:`~shoal.bench.comm_options.FRAMEWORKS`.
        store: that all ranks reach already.
        timeout: limit for each rank's arrival and for each collective.

    Raises:
        UsageError: the framework is not installed.
    """
    framework = backend.removeprefix("shoal-")
    import_extra(framework, framework, f"--backends {backend} needs {framework}")
    return {"jax": _join_jax, "tensorflow": _join_tensorflow}[framework](store, timeout.total_seconds())


def _join_jax(store: Store, timeout_s: float) -> Prepare:
    import jax

    import shoal.jax as sj

    jax.config.update("jax_enable_x64", True)
    sj.init(store=store, timeout_s=timeout_s)
    functions: dict[str, Callable[[Any], Any]] = {
        "all_reduce": lambda x: sj.all_reduce(x, "sum"),
        "broadcast": sj.broadcast,
        "reduce_scatter": lambda x: sj.reduce_scatter(x, "sum"),
        "all_gather": lambda x: sj.all_gather(x, tiled=True),
    }

    def prepare(collective: str, operand: torch.Tensor) -> tuple[Call, torch.Tensor | None]:
        if collective == "barrier":
            return sj.barrier, None
        in_place = collective in ("all_reduce", "broadcast")
        run = jax.jit(functions[collective], donate_argnums=0 if in_place else ())
        first = run(jax.numpy.asarray(_numpy(operand)))
        state = [jax.numpy.zeros(len(operand), first.dtype)]

        def call() -> None:
            result = run(state[0]).block_until_ready()
            if in_place:
                state[0] = result

        return call, torch.from_numpy(np.array(first, np.float64))

    return prepare


def _join_tensorflow(store: Store, timeout_s: float) -> Prepare:
    import tensorflow as tf

    import shoal.tensorflow as st

    st.init(store=store, timeout_s=timeout_s)
    functions: dict[str, Callable[[Any], Any]] = {
        "all_reduce": lambda x: st.allreduce(x, op=st.Sum),
        "broadcast": lambda x: st.broadcast(x, 0),
        "reduce_scatter": lambda x: st.reducescatter(x, op=st.Sum),
        "all_gather": st.allgather,
    }

    def prepare(collective: str, operand: torch.Tensor) -> tuple[Call, torch.Tensor | None]:
        if collective == "barrier":
            return st.barrier, None
        run = tf.function(functions[collective])
        tensor = tf.convert_to_tensor(_numpy(operand))
        first = run(tensor)
        zeros = tf.zeros_like(tensor)
        return lambda: run(zeros), torch.from_numpy(np.array(first, np.float64))

    return prepare


def _numpy(operand: torch.Tensor) -> np.ndarray[Any, Any]:
    if operand.dtype != torch.bfloat16:
        return np.array(operand.numpy())
    import ml_dtypes

    return np.array(operand.view(torch.int16).numpy()).view(ml_dtypes.bfloat16)
