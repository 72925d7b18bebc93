"""Estimates the memory of a device, and finds the largest micro-batch that fits."""

from __future__ import annotations

from shoal.decide.footprint import footprint
from shoal.errors import UsageError
from shoal.planner.hardware import Accelerator
from shoal.planner.pipeline_bubble import fullest_share
from shoal.planner.step_time import Layout
from shoal.planner.workload import Workload

RESERVED = 0.1
"""Share of the memory for the framework, workspaces and fragmentation."""


def device_memory(
    workload: Workload, layout: Layout, *, micro_batch: float, replicas: int = 1, precision: str = "fp16"
) -> int:
    """Return the bytes on the fullest accelerator of a layout.

    In a pipeline that is the device whose stages have the most parameters. The first of p stages keeps the
    activations of up to p micro-batches of its 1 / p of the layers, as many as one micro-batch of all layers.

    Args:
        micro_batch: samples per micro-batch.
        replicas: among which ``layout.sharded_optimizer`` divides the optimizer's state.
        precision: of the activations that are kept for the backward pass.
    """
    share = fullest_share(workload, stages=layout.stages, virtual=layout.virtual)
    return footprint(
        workload.num_parameters * share / layout.tensor,
        trainable=workload.trainable,
        state_bytes=workload.state_bytes,
        owned=workload.owned(replicas) if layout.sharded_optimizer else 1.0,
        activations_bytes=workload.activations[precision].of(micro_batch, 1 / layout.tensor),
    ).total_bytes


def largest_micro_batch(
    workload: Workload, accelerator: Accelerator, *, share: float, precision: str | None = None
) -> float:
    """Return the largest power-of-two part of a replica's ``share`` of the batch that fits on one device.

    Args:
        precision: default: the 16-bit type of the device.

    Raises:
        UsageError: one sample does not fit.
    """
    kept = workload.activations[precision or accelerator.precision]
    state_bytes = workload.num_parameters * (8 + workload.state_bytes) + kept.fixed_bytes
    sample_bytes = kept.sample_bytes
    most = (accelerator.memory_bytes * (1 - RESERVED) - state_bytes) / sample_bytes
    if most < min(1.0, share):
        raise UsageError(
            f"{workload.name} needs {(state_bytes + sample_bytes) / 2**30:.1f} GiB for one sample and "
            f"{accelerator.name} has {accelerator.memory_bytes / 2**30:.0f} GiB, {100 * RESERVED:.0f} % "
            "of it reserved; split the model or take larger devices"
        )
    micro = share
    while micro > most:
        micro /= 2
    return micro
