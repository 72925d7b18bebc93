"""Averages the gradients of a ``tf.GradientTape`` over all ranks."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from shoal.comm.horovod import Average, Wire, check_keywords
from shoal.tensorflow.ops import grouped_allreduce


class DistributedGradientTape:
    """A tape whose :meth:`gradient` returns averages over all ranks.

    Everything else is that of the tape inside.

    Args:
        gradtape: the tape, which has recorded, or will.
        op: ``Average``, or ``Sum`` for losses that are sums over the batch.
        compression: one of :class:`~shoal.comm.horovod.Compression`.
        sparse_as_dense: whether to convert ``tf.IndexedSlices`` to dense tensors instead of gathering rows.
        gradient_predivide_factor: divides gradients before they are sent, and the average is multiplied by it
            afterwards: against overflow of float16.
        **others: Horovod's keywords that change nothing, such as ``device_dense`` and ``num_groups``.

    Example:
        >>> import tensorflow as tf, shoal.tensorflow as st
        >>> st.init()
        >>> weight = tf.Variable(3.0)
        >>> with tf.GradientTape() as tape:
        ...     loss = weight * weight
        >>> tape = st.DistributedGradientTape(tape)
        >>> float(tape.gradient(loss, [weight])[0])
        6.0
        >>> st.shutdown()
    """

    def __init__(
        self,
        gradtape: Any,
        *,
        op: Any = Average,
        compression: Wire | None = None,
        sparse_as_dense: bool = False,
        gradient_predivide_factor: float = 1.0,
        **others: Any,
    ) -> None:
        check_keywords("DistributedGradientTape", others)
        self._tape = gradtape
        self._options: dict[str, Any] = {
            "op": op,
            "compression": compression,
            "sparse_as_dense": sparse_as_dense,
        }
        self._divide_by = gradient_predivide_factor

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator,unused-ignore]
    def gradient(self, target: Any, sources: Any, *arguments: Any, **options: Any) -> Any:
        """Return the averages of the gradients, in the structure of ``sources``.

        Args:
            target: as of ``tf.GradientTape.gradient``.
            sources: as of ``tf.GradientTape.gradient``.
            *arguments: of ``tf.GradientTape.gradient``.
            **options: of ``tf.GradientTape.gradient``.

        Raises:
            tf.errors.AbortedError: a rank was lost, or ranks differ.
            UsageError: ``init`` was not called.
        """
        gradients = self._tape.gradient(target, sources, *arguments, **options)
        leaves = tf.nest.flatten(gradients, expand_composites=False)
        averages = grouped_allreduce(
            leaves,
            prescale_factor=1.0 / self._divide_by,
            postscale_factor=self._divide_by,
            **self._options,
        )
        return tf.nest.pack_sequence_as(gradients, averages)

    def __enter__(self) -> DistributedGradientTape:
        self._tape.__enter__()
        return self

    def __exit__(self, *reason: Any) -> None:
        self._tape.__exit__(*reason)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tape, name)
