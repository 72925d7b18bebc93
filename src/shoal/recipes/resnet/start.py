"""Checks what can be checked before workers start, and tells what a run would be."""

from __future__ import annotations

from shoal.decide.memory_estimate import MemoryEstimate
from shoal.recipes.resnet.config import ResNetTrainConfig
from shoal.recipes.resnet.data import counts_of, num_classes
from shoal.recipes.resnet.plan import Plan, make_plan
from shoal.train.config import as_tree, to_toml


def describe(config: ResNetTrainConfig, num_workers: int, dry_run: bool) -> list[str]:
    """Check the settings; return what a dry run prints: settings, arithmetic, parameters, memory.

    Raises:
        UsageError: sizes that do not divide, no images, or fewer classes than theirs.
    """
    num_train, num_held_out, found = counts_of(config)
    plan = make_plan(config, num_examples=num_train, num_workers=num_workers)
    classes = num_classes(config, found)
    if not dry_run:
        return []
    num_parameters, memory = estimate(config, plan, classes)
    return [
        to_toml(as_tree(config)),
        *plan.lines(config.train.total_epochs),
        f"held out     {num_held_out:,} images of {found:,} classes",
        f"parameters   {num_parameters:,}",
        f"memory       {memory}",
    ]


def estimate(config: ResNetTrainConfig, plan: Plan, num_classes: int) -> tuple[int, MemoryEstimate]:
    """Return the parameters, and a worker's memory: activations counted on a model without data."""
    import torch
    import torch.nn.functional as F

    from shoal.models.profile import profile_step
    from shoal.models.resnet import new_resnet

    size, num_images = config.augment.size, plan.batch.micro_batch_size
    with torch.device("meta"):
        model = new_resnet(config.model, num_classes)
        images, labels = torch.empty(num_images, 3, size, size), torch.empty(num_images, dtype=torch.int64)
    profile = profile_step(model, lambda: F.cross_entropy(model(images), labels), num_samples=num_images)
    weights_bytes = 4 * profile.num_trainable
    moments = {"sgd": 1, "lars": 1, "novograd": 1}.get(config.optim.optimizer, 2)
    halves = config.train.precision in ("bf16", "fp16")
    return profile.num_trainable, MemoryEstimate(
        weights_bytes=weights_bytes,
        gradients_bytes=weights_bytes,
        optimizer_bytes=moments * weights_bytes,
        activations_bytes=profile.saved_bytes // (2 if halves else 1),
    )
