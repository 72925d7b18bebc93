"""Estimates the memory of a device, and finds the largest micro-batch that fits."""

from __future__ import annotations

from shoal.errors import UsageError
from shoal.planner.hardware import Accelerator
from shoal.planner.pipeline_bubble import fullest_share
from shoal.planner.step_time import Layout
from shoal.planner.workload import Workload

STATE_BYTES = 16
"""Bytes per trained parameter in mixed precision: 16-bit weight and gradient, fp32 weight and two moments
(Rajbhandari et al. 2020, arXiv 1910.02054, section 3.1)."""
RESERVED = 0.1
"""Share of the memory for the framework, workspaces and fragmentation."""


def device_memory(
    workload: Workload, layout: Layout, *, replicas: int, micro_batch: float, activation_bytes: int = 2
) -> float:
    """Return the bytes on the fullest accelerator of a layout.

    In a pipeline that is the device whose stages have the most parameters. The first of p stages keeps the
    activations of up to p micro-batches of its 1 / p of the layers.

    Args:
        replicas: number of replicas that share a sharded optimizer.
        micro_batch: samples per micro-batch.
        activation_bytes: bytes per element that is kept for the backward pass.
    """
    share = fullest_share(workload, stages=layout.stages, virtual=layout.virtual)
    own = workload.num_parameters * share / layout.tensor
    trained = own * workload.trainable
    shards = replicas if layout.sharded_optimizer else 1
    kept = workload.saved_bytes * activation_bytes / 2 * micro_batch / layout.tensor
    return 2 * own + 2 * trained + (STATE_BYTES - 4) * trained / shards + kept


def largest_micro_batch(
    workload: Workload, accelerator: Accelerator, *, share: float, activation_bytes: int = 2
) -> float:
    """Return the largest power-of-two part of a replica's ``share`` of the batch that fits on one device.

    Raises:
        UsageError: one sample does not fit.
    """
    room = accelerator.memory_bytes * (1 - RESERVED) - workload.num_parameters * STATE_BYTES
    most = room / (workload.saved_bytes * activation_bytes / 2)
    if most < min(1.0, share):
        needed = workload.num_parameters * STATE_BYTES + workload.saved_bytes * activation_bytes / 2
        raise UsageError(
            f"{workload.name} needs {needed / 2**30:.1f} GiB for one sample and {accelerator.name} has "
            f"{accelerator.memory_bytes / 2**30:.0f} GiB, {100 * RESERVED:.0f} % of it reserved; "
            "split the model (--stages), shard the optimizer, or take larger devices"
        )
    micro = share
    while micro > most:
        micro /= 2
    return micro
