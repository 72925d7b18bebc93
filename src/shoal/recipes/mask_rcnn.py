"""Trains Mask R-CNN (He et al. 2017, arXiv 1703.06870): objects in images, with their boxes and masks.

    python -m shoal.recipes.mask_rcnn --preset tiny
    torchrun --nproc-per-node 8 -m shoal.recipes.mask_rcnn --preset coco-1x --data.path /data/coco
    shoal train mask_rcnn --preset tiny --workers 2

In an optimizer step each worker takes its part of the global batch as micro-batches of images of one aspect,
which threads have decoded and augmented ahead. The loss of an image is a mean over its sampled anchors and
regions, and the loss of the step is the mean over the images of the global batch. The last backward averages
the gradients over the workers, and leaving the step updates the weights. All workers score the held-out
images by COCO's rules. The settings are in ``mask_rcnn_config.py``.
"""

# Annotations are types here, not texts, and what needs torch is imported in functions: `--help` is quick.

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.decide.batch import known_size
from shoal.decide.bucketing import GroupedOrder, aspect_groups
from shoal.env.worker import WorkerEnv
from shoal.errors import UsageError
from shoal.models.detection.config import MaskRCNNConfig
from shoal.optim.lr_schedules import learning_rate, set_learning_rate
from shoal.recipes import Sample, images, run_script
from shoal.recipes.mask_rcnn_config import MaskRCNNTrainConfig, make_plan
from shoal.recipes.model_source import NETWORK
from shoal.train.config import (
    required,
    settings_lines,
)
from shoal.train.run_dir import CONFIG_FILE

if TYPE_CHECKING:
    from torch import Tensor

    from shoal.data.coco.reader import DetectionReader
    from shoal.data.loader import Batch
    from shoal.data.sources import ReaderSource
    from shoal.models.detection.mask_rcnn import MaskRCNN
    from shoal.recipes.mask_rcnn_score import Scored
    from shoal.train.run import Run
    from shoal.train.world import World

# ------------------------------------------------------------------------------------------------- config

PRESETS = (
    "coco-1x",
    "coco-sgd-192",
    "coco-novograd-32",
    "coco-novograd-64",
    "coco-novograd-256",
    "coco-novograd-512",
    "tiny",
)

IMMUTABLE = (
    "model",
    "augment",
    "data.made_images",
    "data.made_size",
    "train.seed",
    "train.global_batch_size",
    "train.micro_batch_size",
    "optim.optimizer",
)
"""Settings that must stay when a run continues: weights, optimizer state or data order depend on them."""


def main(config: MaskRCNNTrainConfig, worker: WorkerEnv | None = None) -> int:
    """Train until the last step, a signal, or a loss that stays not finite; return the exit code.

    Raises:
        UsageError: settings that do not go together, or with the images or the run that is there.
        ShoalError: damaged images or checkpoints, a lost worker, no memory, a loss that is not finite.
    """
    import torch

    from shoal.data.coco.source import CATEGORIES
    from shoal.data.coco.synthetic import make_coco
    from shoal.data.images.normalise import Normalisation
    from shoal.models.detection.mask_rcnn import MaskRCNN
    from shoal.recipes.mask_rcnn_export import load_weights
    from shoal.recipes.mask_rcnn_score import Scored, evaluate, gather_results, recorded
    from shoal.train.optimizers import build_optimizer
    from shoal.train.run import Run
    from shoal.train.world import run_on_all

    with Run.open(config=config, recipe="mask_rcnn", immutable=IMMUTABLE, worker=worker) as run:
        # ----------------------------------------------------------------------------------------- data
        images.make_images(config, run.world, make_coco, last_file=CATEGORIES)
        in_bytes, normalise = images.copies_bytes(run.world), Normalisation(run.world.device)
        source, held_out = open_data(config, run.world, in_bytes=in_bytes)
        images.keep_description(config, run, CATEGORIES)
        categories, num_images = held_out.categories, source.reader.num_examples
        plan = make_plan(config, num_examples=num_images, num_workers=run.world.num_workers)

        # ----------------------------------------------------------------------------------------- model
        torch.manual_seed(run.seed)
        model = MaskRCNN(config.model, len(categories)).to(run.world.device)
        if config.train.channels_last:
            model.to(memory_format=torch.channels_last)
        ddp = run.data_parallel(model, average=config.optim.clip == "global")
        run.compile(model.backbone, by_default=False)
        optimizer = build_optimizer(model.named_parameters(), config.optim)
        run.keep(model=model, optimizer=optimizer)
        weights = "the checkpoint" if run.step else "random"
        if (path := config.model.weights) is not None and not run.step:
            weights = run_on_all(run.world.control, lambda: load_weights(model, path))[0]

        # ----------------------------------------------------------------------------------------- evaluation
        def score() -> Scored:
            """Find objects in the held-out images and write COCO's figures to the record."""
            batch_size = config.validation.batch_size
            scored = evaluate(model, held_out, run.world, run.precision, batch_size=batch_size)
            run.evaluation("validation", recorded(scored.scores), num_samples=held_out.num_examples)
            return scored

        # ----------------------------------------------------------------------------------------- loop
        scored: Scored | None = None
        steps = run.steps(
            source,
            plan.batch,
            until=config.train.total_steps,
            on_host=True,
            notes=[
                *plan.lines,
                f"weights      {weights}; {learning(config.model)}",
                f"held out     {held_out.num_examples:,} images of {len(categories)} categories",
            ],
        )
        for step in steps:
            with step:
                set_learning_rate(optimizer, learning_rate(plan.schedule, step.number - 1))
                for batch in step:
                    targets = run.to_device({name: batch[name] for name in TARGETS})
                    inputs, keys = run.to_device((batch["images"], sampling_keys(run.seed, batch)))
                    if in_bytes:
                        inputs = normalise(inputs, targets["sizes"])
                    losses = mean_losses(ddp(images.like_weights(inputs, model), targets, keys))
                    step.backward(losses.sum() / step.num_samples)
                    step.add(step.num_samples, **dict(zip(LOSSES, losses, strict=True)))
                step.update(optimizer, max_norm=config.optim.max_grad_norm)
            if step.is_done and run.due(config.run.validation_frequency, evaluation=True):
                scored = score()
        results = None
        if not run.stopped and not run.is_over:
            scored = scored or score()  # a kill came before the end
            results = gather_results(run.world, scored.found)
        return export(config, run, model, categories, scored, results)


# ------------------------------------------------------------------------------------------------- loss

LOSSES = {
    "loss_objectness": "count_proposal",
    "loss_rpn_box_reg": "count_proposal",
    "loss_classifier": "count_region",
    "loss_box_reg": "count_region",
    "loss_mask": "count_mask",
}
"""Parts of the loss by torchvision's names; in every image each is divided by this count."""

TARGETS = ("sizes", "boxes", "labels", "num_objects", "masks", "mask_places")
"""Tensors of a batch that the model learns from."""


def mean_losses(found: "Mapping[str, Tensor]") -> "Tensor":
    """Return the parts of the loss, each the sum over images of the mean within one, ``[5]``.

    With a mean per image neither the number of workers nor the micro-batch changes the gradient (except by
    norms that learn).
    """
    import torch

    return torch.stack([(found[name] / found[count].clamp(min=1)).sum() for name, count in LOSSES.items()])


def sampling_keys(seed: int, batch: "Batch") -> "Tensor":
    """Return the keys int64 ``[B]`` that decide what is sampled of each image."""
    import numpy as np
    import torch

    from shoal.decide.rng import Stream, random_keys

    keys = random_keys(seed, Stream.ROI_SAMPLING, batch["epoch"].numpy(), batch["index"].numpy())
    return torch.from_numpy(keys.view(np.int64))


# ------------------------------------------------------------------------------------------------- data


def open_data(
    config: MaskRCNNTrainConfig, world: "World", *, in_bytes: bool = False
) -> "tuple[ReaderSource, DetectionReader]":
    """Return the training batches, each micro-batch of one aspect, and a reader of the held-out images.

    Args:
        in_bytes: training images are not normalised.
    """
    from shoal.data.coco.reader import DetectionReader
    from shoal.data.coco.source import read_categories
    from shoal.data.coco.transform import DetectionTransform
    from shoal.data.sources import ReaderSource

    train, held_out = images.open_shards(config, world)
    make_reader = partial(
        DetectionReader,
        categories=read_categories(images.location_of(config)),
        seed=config.train.seed,
        threads=images.decode_threads(config.data, world),
    )
    source = ReaderSource(
        reader=make_reader(
            train, DetectionTransform(config.augment), dtype="uint8" if in_bytes else "float32"
        ),
        order=GroupedOrder(
            aspect_groups(train.sizes),
            run_size=required(known_size(config.train.micro_batch_size)),
            seed=config.train.seed,
        ),
        processes=config.data.loader_processes,
    )
    return source, make_reader(held_out, DetectionTransform(config.validation.view))


# ------------------------------------------------------------------------------------------------- export

RESULTS, SCORES = "results.json", "scores.json"
"""Files of the run directory: what was found at the end, in COCO's form, and all figures."""


def export(
    config: MaskRCNNTrainConfig,
    run: "Run",
    model: "MaskRCNN",
    categories: dict[int, str],
    scored: "Scored | None",
    results: list[Any] | None,
) -> int:
    """Write what was found at the end, its figures and the detector; return the exit code of the run."""
    from shoal.atomic_io import write_json
    from shoal.data.coco import score as coco
    from shoal.data.coco.results import write_results
    from shoal.recipes.mask_rcnn_export import Exported, write_export

    directory, validation = required(run.directory), config.validation

    def write(_: Path) -> None:
        found = required(scored)
        write_results(directory / RESULTS, required(results))
        write_json(directory / SCORES, coco.as_tree(required(found.truth), found.scores))
        detector = Exported(
            model=model, categories=categories, shorter=validation.shorter, longer=validation.longer
        )
        write_export(detector, directory / NETWORK)

    return run.finish(
        write,
        lambda _: (
            f"{len(required(results)):,} objects in {directory / RESULTS}, all figures in "
            f"{directory / SCORES}, the model in {directory / NETWORK}"
        ),
    )


# ------------------------------------------------------------------------------------------------- dry run


def learning(model: MaskRCNNConfig) -> str:
    """Return in words the parts of the backbone that learn."""
    stages = f"{model.stages_frozen} of 5 stages stay" if model.stages_frozen else "all stages learn"
    return f"{stages}, norms {'stay' if model.norms_frozen else 'learn'}"


def check(config: MaskRCNNTrainConfig, num_workers: int, dry_run: bool) -> list[str]:
    """Check the settings for a number of workers before any starts; return the lines of a dry run.

    Raises:
        UsageError: sizes that do not divide, no images, or no weights where they are named.
    """
    data = config.data
    num_train, num_held_out = data.made_images, data.num_made_held_out
    if data.path is not None or not data.made_images:
        train, held_out = images.open_shards(config)
        num_train, num_held_out = len(train), len(held_out)
    plan = make_plan(config, num_examples=num_train, num_workers=num_workers)
    weights, begun = config.model.weights, (required(config.run.dir) / CONFIG_FILE).is_file()
    if weights is not None and not begun and not weights.is_file():
        raise UsageError(f"model.weights {weights} does not exist")
    if not dry_run:
        return []
    from shoal.recipes.workloads import memory_of, profile_of

    profile = profile_of(sample(config))
    return [
        *settings_lines(config),
        f"batch        {plan.batch}",
        *plan.lines,
        f"weights      {weights or 'random'}",
        f"held out     {num_held_out:,} images of {count_categories(config):,} categories",
        f"parameters   {profile.num_trainable:,} that learn",
        f"memory       {memory_of(profile, config, plan.batch.micro_batch_size)}",
    ]


# ------------------------------------------------------------------------------------------------- sample

COCO_CATEGORIES = 90
"""Categories of a model whose data is not named: COCO's numbers reach so far."""
DATA_OPERATIONS = 534
"""Kernels of a step that match, sample and suppress boxes: 1,200 operations of torchvision's Mask R-CNN on
one real image on the CPU, less the dense ones."""


def count_categories(config: MaskRCNNTrainConfig) -> int:
    """Return the number of categories of the images."""
    from shoal.data.coco.source import read_categories
    from shoal.data.coco.synthetic import NUM_CATEGORIES

    if config.data.path is not None:
        return len(read_categories(images.location_of(config)))
    return NUM_CATEGORIES if config.data.made_images else COCO_CATEGORIES


def sample(config: MaskRCNNTrainConfig) -> Sample:
    """Return two of the largest images; the heads of the detector get as many regions as they may."""
    import torch

    from shoal.models.detection.mask_rcnn import MaskRCNN, largest_step

    with torch.device("meta"):
        model = MaskRCNN(config.model, count_categories(config))
    return Sample(
        model=model,
        inputs={"images": torch.empty(2, 3, *config.augment.largest_batch, device="meta")},
        loss=lambda model, inputs: largest_step(model, inputs["images"]),
        num_samples=2,
        more_operations=DATA_OPERATIONS,
    )


def trial(config: MaskRCNNTrainConfig, folder: Path) -> MaskRCNNTrainConfig:
    """Return the settings of a short run from random weights, on scenes of one size if none are named."""
    data, augment = config.data, config.augment
    if data.path is None:  # 640 pixels are the longer side of most images of COCO
        data = replace(data, made_images=max(32, config.train.global_batch_size), made_size=640)
        augment = replace(augment, shorter=(max(augment.shorter),), scales=None)
    return replace(
        config,
        data=data,
        augment=augment,
        model=replace(config.model, weights=None),
        optim=replace(config.optim, learning_rate=1e-5),  # random weights stay finite without a warm-up
        validation=replace(config.validation, shorter=64, longer=64),
    )


if __name__ == "__main__":
    run_script("mask_rcnn")
