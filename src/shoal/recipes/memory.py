"""Counts the memory that a worker of a recipe needs, for its dry run and for the planner."""

# What needs torch is imported in functions: `shoal plan` needs none for the workloads of the catalog.

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shoal.decide.batch import BatchPlan
from shoal.decide.footprint import Activations, Footprint, footprint, optimizer_state_bytes
from shoal.decide.ownership import largest_share
from shoal.recipes import Sample
from shoal.train.config import precision_here

if TYPE_CHECKING:
    from torch import Tensor, nn


def activations_of(sample: Sample, precision: str, device_type: str = "cuda") -> Activations:
    """Return what the forward pass of a sample keeps, with the dropout of the training.

    Args:
        precision: ``fp32``, ``bf16`` or ``fp16``.
        device_type: ``cuda`` or ``cpu``; no such device is needed.
    """
    from shoal.models.step_memory import kept_activations

    def kept() -> Activations:
        return kept_activations(
            sample.model.train(),
            sample.inputs,
            with_keys,
            num_samples=sample.num_samples,
            precision=precision,
            device_type=device_type,
        )

    def with_keys(model: nn.Module, inputs: Mapping[str, Any]) -> Tensor:
        import torch

        from shoal.dropout import SampleDropout

        device = next(model.parameters()).device
        with SampleDropout(torch.empty(sample.num_samples, dtype=torch.int64, device=device)):
            loss: Tensor = sample.loss(model, inputs)
            return loss

    whole = kept()
    if sample.recompute is None:
        return whole
    sample.recompute(sample.model)
    return kept().with_recomputed(whole, sample.num_recomputed)


def memory_line(config: Any, *phases: tuple[Sample, BatchPlan], stages: int = 1) -> str:
    """Return the line about a worker's memory; :class:`shoal.recipes.DryRun` has the arguments."""
    needed = [memory_of(sample, config, batch, stages=stages) for sample, batch in phases]
    return f"memory       {max(needed, key=lambda estimate: estimate.total_bytes)}"


def memory_of(sample: Sample, config: Any, batch: BatchPlan, *, stages: int = 1) -> Footprint:
    """Return the memory of a worker on this host: weights, gradients, optimizer, activations.

    Args:
        batch: ``train.shard_optimizer`` divides the optimizer's state among its workers.
        stages: equal stages of the pipeline; each keeps as many micro-batches as there are stages.
    """
    share = 1.0
    if config.train.shard_optimizer:  # the fullest worker's
        trained = [p.nbytes for p in sample.model.parameters() if p.requires_grad]
        share = largest_share(trained, batch.num_workers)
    num_samples = batch.micro_batch_size * min(stages, batch.accumulation_steps)
    return footprint(
        sample.num_parameters / stages,
        trainable=sample.num_trainable / sample.num_parameters,
        state_bytes=share * state_bytes(config),
        activations_bytes=activations_of(sample, *precision_here(config)).of(num_samples, 1 / stages),
    )


def state_bytes(config: Any) -> float:
    """Return the bytes of optimizer state per trained number."""
    return optimizer_state_bytes(getattr(getattr(config, "optim", None), "optimizer", ""))
