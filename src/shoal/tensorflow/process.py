"""Joins this process to the others, and returns its rank."""

from __future__ import annotations

import ctypes

from shoal.comm.engine import EngineOptions
from shoal.comm.job_group import TIMEOUT_S, GlobalGroup, JobGroup
from shoal.comm.store import Store
from shoal.env.secret import reportable
from shoal.tensorflow import op

_WORLD_GROUP = 1
"""Number of the group of all processes in programs; 0 is that of one process alone."""


def _joined(group: JobGroup) -> None:
    if group.size > 1:
        op.set_group(_WORLD_GROUP, group.c_group())


def _finish() -> None:
    op.set_group(_WORLD_GROUP, 0)


def _keep_freed_memory() -> None:
    """Make glibc keep the memory of tensors for the next step, unless the environment sets its limits.

    It returns much of it to the kernel otherwise, and a step of training has thousands of page faults.
    """
    trim, top_pad, mmap = -1, -2, -3  # M_TRIM_THRESHOLD, M_TOP_PAD and M_MMAP_THRESHOLD of malloc.h
    libc, chosen = ctypes.CDLL(None), any(name.startswith("MALLOC_") for name in reportable())
    if hasattr(libc, "mallopt") and not chosen:
        libc.mallopt(top_pad, 64 << 20)  # a thread's heaps have this size, and are returned as a whole
        libc.mallopt(trim, 1 << 30)
        libc.mallopt(mmap, 32 << 20)  # its maximum


def _prepare() -> None:
    _keep_freed_memory()
    op.compiled()


_job = GlobalGroup("shoal.tensorflow", prepare=_prepare, joined=_joined, finish=_finish)
group = _job.group
rank = _job.rank
size = _job.size
local_rank = _job.local_rank
local_size = _job.local_size
is_initialized = _job.is_initialized


def init(
    *, timeout_s: float = TIMEOUT_S, options: EngineOptions | None = None, store: Store | None = None
) -> None:
    """Join the processes that the launcher has started together; again: does nothing.

    The launcher (``shoal launch``, ``shoal emulate``, ``mpirun``, ``srun``) sets the rank. A process without
    one is alone: its collectives return their operands.

    The TensorFlow operation is compiled on first use. Without a compiler ``tf.numpy_function`` is used
    instead, with a log line.

    Args:
        timeout_s: limit for each rank's arrival and for each collective, in seconds.
        options: of the engine, the same on all ranks.
        store: that all ranks reach already, such as the one of a ``torch.distributed`` group; ``None``: rank
            0 makes one.

    Raises:
        CommError: a rank did not come in time, or has another secret.
        UsageError: it was called before with other options, an environment variable is wrong,
            or rank 0's port is taken.

    Example:
        >>> import shoal.tensorflow as st
        >>> st.init()
        >>> st.rank(), st.size()
        (0, 1)
        >>> st.shutdown()
    """
    _job.init(timeout_s=timeout_s, options=options, store=store)


def shutdown() -> None:
    """Leave the other processes. A program's end does it too."""
    _job.shutdown()


def group_number() -> int:
    """Return the number by which programs name the group of all processes."""
    return _WORLD_GROUP if size() > 1 else 0


def barrier() -> None:
    """Wait until all ranks have called it.

    Raises:
        CommError: a rank was lost, or did not come in time.
        UsageError: :func:`init` was not called.
    """
    group().barrier()
