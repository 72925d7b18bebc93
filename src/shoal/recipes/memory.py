"""Counts the memory that a worker of a recipe needs, for its dry run and for the planner."""

# What needs torch is imported in functions: `shoal plan` needs none for the workloads of the catalog.

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from shoal.decide.batch import BatchPlan, StagesConfig
from shoal.decide.footprint import (
    Activations,
    CountedActivations,
    Footprint,
    Numerics,
    optimizer_state_bytes,
)
from shoal.decide.layout import RESERVED, Layout, footprint_of
from shoal.decide.workload import LayerPart, Workload
from shoal.errors import UsageError
from shoal.planner.hardware import Machines, require_accelerators
from shoal.recipes import Sample
from shoal.train.config import ServersConfig, precision_here, refuses_fp16

if TYPE_CHECKING:
    from torch import Tensor, nn

    from shoal.models.profile import StepProfile


def profile_of(sample: Sample) -> StepProfile:
    """Count a training step of a sample on the meta device."""
    import torch

    from shoal.data.loader import to_device
    from shoal.models.profile import profile_step

    model, inputs = sample.model.train(), to_device(sample.inputs, torch.device("meta"))
    return profile_step(model, lambda: sample.loss(model, inputs), num_samples=sample.num_samples)


def activations_of(sample: Sample, numerics: Numerics) -> Activations:
    """Return what the forward pass of a sample keeps, with the dropout of the training."""
    from shoal.models.step_memory import kept_activations

    def kept(model: nn.Module) -> Activations:
        return kept_activations(
            model.train(),
            sample.inputs,
            with_keys,
            num_samples=sample.num_samples,
            numerics=numerics,
            apart=sample.recompute is not None,
        )

    def with_keys(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        import torch

        from shoal.dropout import SampleDropout

        device = next(model.parameters()).device
        with SampleDropout(torch.empty(sample.num_samples, dtype=torch.int64, device=device)):
            loss: Tensor = sample.loss(model, inputs)
            return loss

    whole = kept(sample.model)
    if sample.recompute is None:
        return whole
    recomputing = copy.deepcopy(sample.model)
    sample.recompute(recomputing)
    return kept(recomputing).with_recomputed(whole, sample.num_recomputed)


@dataclass(frozen=True)
class MemoryCount:
    """Counts the memory of workers on some hosts.

    Attributes:
        machines: hosts of the catalog; ``None``: this one, whatever memory it has.
    """

    machines: Machines | None = None

    def memory_line(self, config: Any, *phases: tuple[Sample, BatchPlan]) -> str:
        """Return the lines about memory; :class:`shoal.recipes.DryRun` has the arguments."""
        needed = max(
            (memory_of(sample, config, batch, self.machines) for sample, batch in phases),
            key=lambda estimate: estimate.total_bytes,
        )
        lines = [f"memory       {needed}"]
        if self.machines is not None:
            lines += _lines_about(self.machines, numerics_of(config, self.machines).precision, needed)
        return "\n".join(lines)


def _lines_about(machines: Machines, precision: str, needed: Footprint) -> list[str]:
    """Return lines about the devices and the network of the machines, and whether a worker fits."""
    accelerator, instance = require_accelerators(machines), machines.instance
    usable = usable_bytes(machines)
    lacks = needed.total_bytes - usable
    outcome = "" if lacks <= 0 else f", and a worker lacks {lacks / 2**30:.2f} GiB: it does not fit"
    return [
        f"devices      {machines.num_accelerators:,} {accelerator.name} in {precision}; "
        f"{usable / 2**30:.2f} of {accelerator.memory_bytes / 2**30:.0f} GiB count{outcome}",
        f"network      {instance.nic_bytes_per_s * 8 / 1e9:g} Gbit/s a host ({instance.network.name})",
    ]


def usable_bytes(machines: Machines) -> int:
    """Return the memory of a device, without what the framework, workspaces and fragments take."""
    return int((1 - RESERVED) * require_accelerators(machines).memory_bytes)


def numerics_of(config: Any, machines: Machines | None) -> Numerics:
    """Return the numerics of a training on hosts of the catalog; ``None``: on this one."""
    if machines is None:
        return _numerics_here(config)
    device, precision = require_accelerators(machines), config.train.precision
    if precision != "auto":
        return device.numerics(precision)
    servers = getattr(config, "servers", ServersConfig())
    no_fp16 = refuses_fp16(config, config.train, config.distributed, servers)
    return device.numerics(machines.instance.precision(refuses_fp16=bool(no_fp16)))


def _numerics_here(config: Any) -> Numerics:
    import torch

    from shoal.attention import runs_kernels

    precision, device_type = precision_here(config)
    has_kernels = runs_kernels(torch.device(device_type))
    return Numerics.of(precision, is_cpu=device_type == "cpu", has_kernels=has_kernels)


def memory_of(sample: Sample, config: Any, batch: BatchPlan, machines: Machines | None = None) -> Footprint:
    """Return the memory of a worker: weights, gradients, optimizer, activations.

    Args:
        batch: ``train.shard_optimizer`` and ``parallel.shard`` divide state among its workers, or replicas.
        machines: hosts of the catalog; ``None``: this one.
    """
    return memory_by_batch(sample, config, machines)(batch)


def memory_by_batch(
    sample: Sample, config: Any, machines: Machines | None = None
) -> Callable[[BatchPlan], Footprint]:
    """Return :func:`memory_of` as a function of the batch, for which the forward pass is counted once."""
    numerics = numerics_of(config, machines)
    parallel = getattr(config, "parallel", StagesConfig())
    counted = _counted(sample, config, parallel.pipeline, parallel.tensor)

    def of_batch(batch: BatchPlan) -> Footprint:
        return footprint_of(
            counted,
            Layout(
                global_batch=batch.global_batch_size,
                stages=parallel.pipeline,
                virtual=parallel.virtual_stages or 1,
                tensor=parallel.tensor,
                shard=parallel.shard,
                sharded_optimizer=config.train.shard_optimizer,
            ),
            micro_batch=batch.micro_batch_size,
            num_micro_batches=batch.accumulation_steps,
            replicas=batch.num_workers,
            numerics=numerics,
        )

    return of_batch


def part_of(sample: Sample, num_workers: int) -> Sample:
    """Return the sample with the layers of one of the workers that divide each of them.

    Raises:
        UsageError: the layers cannot be divided so.
    """
    if num_workers == 1:
        return sample
    if sample.divide is None:
        raise UsageError(
            f"parallel.tensor {num_workers} does not go with {type(sample.model).__name__}, for whose layers "
            "there is no plan; leave it out, or use parallel.shard"
        )
    model, blocks = copy.deepcopy((sample.model, list(sample.blocks)))
    sample.divide(model, num_workers)
    return replace(sample, model=model, blocks=blocks)


def _counted(sample: Sample, config: Any, stages: int, tensor: int) -> Workload:
    """Return what memory depends on; layers are only counted where stages divide them."""
    from shoal.models.profile import StepProfile
    from shoal.planner.counting import weight_sizes, workload_of_profile

    whole = StepProfile(layers=(("model", sample.num_parameters, 0.0),), num_operations=0, num_samples=1)
    profile = profile_of(sample) if stages > 1 else whole
    part = part_of(sample, tensor)
    activations = CountedActivations(partial(activations_of, part))
    return workload_of_profile(
        type(sample.model).__name__,
        profile,
        activations,
        parts={tensor: LayerPart(num_parameters=part.num_parameters, activations=activations)},
        gathered=sample.gathered,
        state_bytes=state_bytes(config, sample.model),
        weight_sizes=weight_sizes(sample.model),
        trainable=sample.num_trainable / sample.num_parameters,
        explicit_stages=getattr(config, "explicit_stages", False),
    )


def state_bytes(config: Any, model: Any) -> float:
    """Return the bytes of optimizer state per trained number; Muon has one moment, and AdamW beside it two.

    Args:
        model: whose matrices Muon updates.
    """
    name = getattr(getattr(config, "optim", None), "optimizer", "")
    if name != "muon":
        return optimizer_state_bytes(name)
    matrices, sizes = model.hidden_matrices(), {n: p.numel() for n, p in model.named_parameters()}
    share: float = sum(sizes[name] for name in matrices) / sum(sizes.values())
    return share * optimizer_state_bytes("muon") + (1 - share) * optimizer_state_bytes("adamw")
