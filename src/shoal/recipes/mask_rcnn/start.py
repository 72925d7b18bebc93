"""Checks what can be checked before workers start, and tells what a run would be."""

from __future__ import annotations

from shoal.decide.memory_estimate import MemoryEstimate
from shoal.errors import UsageError
from shoal.recipes.mask_rcnn.config import MaskRCNNTrainConfig
from shoal.recipes.mask_rcnn.data import counts_of
from shoal.recipes.mask_rcnn.plan import make_plan
from shoal.train.config import as_tree, required, to_toml
from shoal.train.run_dir import CONFIG_FILE

_SIDE_STEP = 32


def describe(config: MaskRCNNTrainConfig, num_workers: int, dry_run: bool) -> list[str]:
    """Check the settings; return what a dry run prints: settings, arithmetic, parameters, memory.

    Raises:
        UsageError: sizes that do not divide, no images, or no weights where they are named.
    """
    num_train, num_held_out, num_categories = counts_of(config)
    plan = make_plan(config, num_examples=num_train, num_workers=num_workers)
    weights, begun = config.model.weights, (required(config.run.dir) / CONFIG_FILE).is_file()
    if weights is not None and not begun and not weights.is_file():
        raise UsageError(f"model.weights {weights} does not exist")
    if not dry_run:
        return []
    num_parameters, memory = estimate(config, num_categories)
    return [
        to_toml(as_tree(config)),
        *plan.lines(),
        f"weights      {weights or 'random'}",
        f"held out     {num_held_out:,} images of {num_categories:,} categories",
        f"parameters   {num_parameters:,} that learn",
        f"memory       {memory}",
    ]


def largest_sides(config: MaskRCNNTrainConfig) -> tuple[int, int]:
    """Return height and width of the largest batch to train on, in pixels."""
    augment = config.augment
    if augment.scales is not None:
        sides = (augment.canvas, augment.canvas)
    else:
        sides = (min(max(augment.shorter), augment.longer), augment.longer)
    height, width = (-(-side // _SIDE_STEP) * _SIDE_STEP for side in sides)
    return height, width


def estimate(config: MaskRCNNTrainConfig, num_categories: int) -> tuple[int, MemoryEstimate]:
    """Return the parameters that learn, and a worker's memory at the largest images.

    Activations are counted on a model without data whose heads see as many regions as they may.
    """
    import torch

    from shoal.models.detection.mask_rcnn import MaskRCNN, largest_step
    from shoal.models.profile import profile_step

    num_images = config.train.micro_batch_size
    with torch.device("meta"):
        model = MaskRCNN(config.model, num_categories)
        images = torch.empty(num_images, 3, *largest_sides(config))
    profile = profile_step(model, lambda: largest_step(model, images), num_samples=num_images)
    weights_bytes = 4 * profile.num_trainable
    moments = {"sgd": 1, "lars": 1, "novograd": 1}.get(config.optim.optimizer, 2)
    halves = config.train.precision in ("bf16", "fp16")
    return profile.num_trainable, MemoryEstimate(
        weights_bytes=weights_bytes,
        gradients_bytes=weights_bytes,
        optimizer_bytes=moments * weights_bytes,
        activations_bytes=profile.saved_bytes // (2 if halves else 1),
    )
