"""Trains Mask R-CNN (He et al. 2017, arXiv 1703.06870): objects in images, with their boxes and masks.

Without masks (``--model.no-masks``, the presets faster-rcnn-…) it is Faster R-CNN, which learns from boxes.

    python -m shoal.recipes.mask_rcnn --preset tiny
    torchrun --nproc-per-node 8 -m shoal.recipes.mask_rcnn --preset coco-1x --data.path /data/coco
    shoal train mask_rcnn --preset tiny --workers 2

In an optimizer step each worker takes its part of the global batch as micro-batches of images of one aspect,
which threads have decoded and augmented ahead. The loss of an image is a mean over its sampled anchors and
regions, and the loss of the step is the mean over the images of the global batch. The last backward averages
the gradients over the workers, and leaving the step updates the weights. All workers score the held-out
images by COCO's rules.
"""

# Annotations are types here, not texts, and what needs torch is imported in functions: `--help` is quick.

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from cyclopts import Parameter

from shoal.data.coco.augment import DetectionAugmentConfig
from shoal.data.images.shards import ImageShards
from shoal.decide.batch import BatchPlan, MicroBatch, known_size, plan_batch
from shoal.decide.bucketing import GroupedOrder, aspect_groups
from shoal.env.worker import WorkerEnv
from shoal.errors import ShoalError, UsageError, did_you_mean, require_positive
from shoal.models.detection.config import MaskRCNNConfig
from shoal.optim.lr_schedules import Cosine, Steps, learning_rate, set_learning_rate
from shoal.recipes import DryRun, Row, Sample, images, run_script
from shoal.recipes.model_source import NETWORK, find_run
from shoal.recipes.using import EvaluateConfig, PredictConfig
from shoal.train.config import REQUIRED, LoopConfig, RunOutputConfig, load_toml, required, settings_lines
from shoal.train.optim_config import VisionOptimizerConfig, check_warmup
from shoal.train.run_dir import CONFIG_FILE, description_in, require_writable

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from shoal.data.coco.annotations import CocoAnnotations
    from shoal.data.coco.drawing import Drawn
    from shoal.data.coco.reader import DetectionReader
    from shoal.data.coco.results import Detection, Kind
    from shoal.data.coco.score import CocoScore
    from shoal.data.images.pixels import Pixels
    from shoal.data.loader import Batch
    from shoal.data.sources import ReaderSource
    from shoal.models.detection.mask_rcnn import Detections, MaskRCNN
    from shoal.train.gradients import Precision
    from shoal.train.run import Run
    from shoal.train.world import World

    Objects = dict[Kind, dict[int, list[Detection]]]  # objects by kind and id of the image

# ------------------------------------------------------------------------------------------------- config

PRESETS = (
    "coco-1x",
    "coco-sgd-192",
    "coco-novograd-32",
    "coco-novograd-64",
    "coco-novograd-256",
    "coco-novograd-512",
    "tiny",
    "faster-rcnn-coco-1x",
    "faster-rcnn-tiny",
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig(LoopConfig):
    """Length of the run, batch, and memory format."""

    total_steps: int = 90_000
    """Optimizer steps of the whole run."""
    global_batch_size: int = 16
    """Images in one optimizer step, over all workers."""
    micro_batch_size: MicroBatch = 2
    """Images per worker and forward pass, all wide or all tall; trained norms average over them; auto: the
    largest that fits into memory."""
    compile: bool | None = None
    """Compile the backbone with torch.compile, once for each of at most 6 sizes; default: on a GPU."""
    channels_last: bool = True
    """Use the channels-last memory format, which matrix units prefer."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig(VisionOptimizerConfig):
    """Optimizer and schedule, in optimizer steps."""

    learning_rate: float = 0.02
    """Learning rate at the end of the warm-up."""
    warmup_steps: int = 1_000
    """Steps of linear warm-up."""
    warmup_factor: float = 0.001
    """First learning rate of the warm-up, as a fraction of the learning rate."""
    decay: Literal["steps", "cosine"] = "steps"
    """Decay after the warm-up: steps at milestones, or half a cosine."""
    milestones: tuple[int, ...] = (60_000, 80_000)
    """With decay steps: optimizer steps after which the rate is multiplied by milestone_factor."""
    milestone_factor: float = 0.1
    """With decay steps: factor of the learning rate at a milestone."""
    end_factor: float = 0.0
    """With decay cosine: last learning rate, as a fraction of the learning rate."""

    def __post_init__(self) -> None:
        super().__post_init__()
        names = ("warmup_factor", "milestone_factor", "end_factor")
        require_positive("optim", self, *names, least=0, most=1)


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """Evaluation on held-out images."""

    shorter: int = 800
    """Length of an image's shorter side, in pixels, unless the longer one would exceed its limit."""
    longer: int = 1_333
    """Limit of the longer side, in pixels."""
    batch_size: int = 1
    """Images per worker and evaluation batch; independent of the number of workers, as are the scores. More
    than one changes scores slightly, because images of a batch are padded to one size."""

    def __post_init__(self) -> None:
        require_positive("validation", self, "shorter", "longer", "batch_size")

    @property
    def view(self) -> DetectionAugmentConfig:
        """Size of images in the evaluation; nothing is drawn at random."""
        return DetectionAugmentConfig(shorter=(self.shorter,), longer=self.longer, flip=0.0)


@dataclass(frozen=True, kw_only=True)
class DetectionRunConfig(RunOutputConfig):
    """Place of the run, and when it writes lines, scores and checkpoints."""

    log_frequency: int = 20
    """Steps between log lines."""
    validation_frequency: int = 5_000
    """Steps between evaluations on held-out images; 0: only at the end."""
    checkpoint_frequency: int = 1_000
    """Steps between checkpoints."""


@dataclass(frozen=True, kw_only=True)
class MaskRCNNTrainConfig(images.ImageTrainConfig):
    """All settings of training a detector; presets are TOML files in ``presets/mask_rcnn``."""

    longer: ClassVar[str] = "--train.total-steps"
    prepare: ClassVar[str] = "shoal prepare coco"

    model: MaskRCNNConfig = field(default_factory=MaskRCNNConfig)
    augment: DetectionAugmentConfig = field(default_factory=DetectionAugmentConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    run: DetectionRunConfig = field(default_factory=DetectionRunConfig)

    @property
    def scores(self) -> dict[str, tuple[str, ...]]:
        """Names of the scores in the record, by split."""
        names = tuple(f"{NAMES[kind]}_{name}" for kind in kinds_of(self.model) for name in _RECORDED)
        return {"validation": names}


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
    """Train until the last step, a signal, or a loss that stays not finite; return the exit code."""
    import torch

    from shoal.data.coco.source import CATEGORIES
    from shoal.data.coco.synthetic import make_coco
    from shoal.data.images.normalise import Normalisation
    from shoal.models.detection.mask_rcnn import MaskRCNN, load_weights
    from shoal.recipes.shard_cache import record_reads
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
        run.compile(model.backbone, dynamic=False)
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

        def last_objects() -> "tuple[Scored, list[Any] | None]":
            """Return what was found with the last weights, by the workers that are there now."""
            is_whole = scored is not None and scored.num_workers == run.world.num_workers
            last = required(scored) if is_whole else score()  # a kill came before the end
            return last, gather_results(run.world, last)

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
                    step.add(step.num_samples, **dict(zip(LOSSES, losses, strict=False)))
                    if config.data.on_bad == "skip":
                        step.add(0, replaced_images=batch["replaced"].sum())
                step.update(optimizer, max_norm=config.optim.max_grad_norm)
            if step.is_done and run.due(config.run.validation_frequency, evaluation=True):
                scored = run.workers.together(score)
        record_reads(run, held_out.shards)
        results = None
        if not run.stopped and not run.is_over:
            scored, results = run.workers.together(last_objects)
        return export(config, run, model, categories, scored, results)


# ------------------------------------------------------------------------------------------------- loss

LOSSES = {
    "loss_objectness": "count_proposal",
    "loss_rpn_box_reg": "count_proposal",
    "loss_classifier": "count_region",
    "loss_box_reg": "count_region",
    "loss_mask": "count_mask",
}
"""Parts of the loss by torchvision's names (the last one with masks); in every image each is divided by this
count."""

TARGETS = ("sizes", "boxes", "labels", "num_objects", "masks", "mask_places")
"""Tensors of a batch that the model learns from."""


def mean_losses(parts: "Mapping[str, Tensor]") -> "Tensor":
    """Return the parts of the loss, each the sum over images of the mean within one, ``[5]``; or 4 of boxes.

    With a mean per image neither the number of workers nor the micro-batch changes the gradient (except by
    norms that learn).
    """
    import torch

    there = {name: count for name, count in LOSSES.items() if name in parts}
    return torch.stack([(parts[name] / parts[count].clamp(min=1)).sum() for name, count in there.items()])


def sampling_keys(seed: int, batch: "Batch") -> "Tensor":
    """Return the keys int64 ``[B]`` that determine the samples of each image."""
    import numpy as np
    import torch

    from shoal.decide.rng import Stream, random_keys

    keys = random_keys(seed, Stream.ROI_SAMPLING, batch["epoch"].numpy(), batch["index"].numpy())
    return torch.from_numpy(keys.view(np.int64))


# ------------------------------------------------------------------------------------------------- plan


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """Arithmetic of a run."""

    batch: BatchPlan
    schedule: Cosine | Steps
    lines: tuple[str, ...]
    """Epochs and learning rates in words."""


def make_plan(config: MaskRCNNTrainConfig, *, num_examples: int, num_workers: int) -> RunPlan:
    """Return batch, schedule and epochs for so many training images.

    Raises:
        UsageError: the sizes do not divide, or the schedule does not fit the run.
    """
    train = config.train
    batch = plan_batch(train, num_workers, unit="images")
    schedule, decay = make_schedule(config.optim, train.total_steps)
    epochs = train.total_steps * train.global_batch_size / num_examples
    lines = (
        f"steps        {train.total_steps:,} = {epochs:,.2f} epochs of {num_examples:,} images",
        f"rate         {schedule.warmup_from:g} to {schedule.base:g} in {schedule.warmup_steps:,} steps, "
        f"then {decay}",
    )
    return RunPlan(batch=batch, schedule=schedule, lines=lines)


def make_schedule(optim: OptimConfig, total_steps: int) -> tuple[Cosine | Steps, str]:
    """Return the schedule that the settings name, and its decay in words.

    Raises:
        UsageError: warm-up or milestones do not fit into the run.
    """
    check_warmup("optim", optim.warmup_steps, "train", total_steps)
    base, end = optim.learning_rate, optim.end_factor * optim.learning_rate
    warmed = {
        "base": base,
        "warmup_steps": optim.warmup_steps,
        "warmup_from": optim.warmup_factor * base,
    }
    if optim.decay == "cosine":
        return Cosine(**warmed, total_steps=total_steps, end=end), f"to {end:g} along a cosine"  # type: ignore[arg-type]
    if optim.milestones and optim.milestones[-1] >= total_steps:
        raise UsageError(
            f"optim.milestones {optim.milestones} must lie within train.total_steps {total_steps}: lower "
            "them, or choose --optim.decay cosine"
        )
    words = ", ".join(f"{step:,}" for step in optim.milestones)
    steps = Steps(**warmed, milestones=optim.milestones, factor=optim.milestone_factor)  # type: ignore[arg-type]
    return steps, f"times {optim.milestone_factor:g} after {words or 'no step'}"


# ------------------------------------------------------------------------------------------------- data


def open_data(
    config: MaskRCNNTrainConfig, world: "World", *, in_bytes: bool = False
) -> "tuple[ReaderSource, DetectionReader]":
    """Return the training batches, each micro-batch of one aspect, and a reader of the held-out images.

    Args:
        in_bytes: training images are not normalised.

    Raises:
        UsageError: there are none, or objects lack the masks that the network learns from.
    """
    from shoal.data.coco.reader import DetectionReader
    from shoal.data.coco.source import check_masks, read_categories
    from shoal.data.coco.transform import DetectionTransform
    from shoal.data.sources import ReaderSource

    train, held_out = images.open_shards(config, world)
    masks = config.model.masks
    if masks:
        check_masks(images.location_of(config))
    make_reader = partial(
        DetectionReader,
        categories=read_categories(images.location_of(config)),
        seed=config.train.seed,
    )
    num_processes = images.loader_processes(config.data, world)
    source = ReaderSource(
        reader=make_reader(
            train,
            DetectionTransform(config.augment, masks=masks),
            threads=images.decode_threads(config.data, world, num_processes),
            dtype="uint8" if in_bytes else "float32",
            canvases=config.augment.canvases,
            **config.data.bad_images,
        ),
        order=GroupedOrder(
            aspect_groups(train.sizes),
            run_size=required(known_size(config.train.micro_batch_size)),
            seed=config.train.seed,
        ),
        processes=num_processes,
    )
    view = DetectionTransform(config.validation.view, masks=masks)
    return source, make_reader(held_out, view, threads=images.decode_threads(config.data, world))


# ------------------------------------------------------------------------------------------------- evaluation

NAMES: "dict[Kind, str]" = {"bbox": "box", "segm": "mask"}
_RECORDED = ("AP", "AP50", "AP75")


def kinds_of(network: MaskRCNNConfig) -> "tuple[Kind, ...]":
    """Return what a network finds: boxes, and masks if it has them."""
    return ("bbox", "segm") if network.masks else ("bbox",)


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Objects that were found; on the main worker their scores, too."""

    objects: "Objects"
    """This worker's part."""
    num_workers: int = 1
    """Workers that had a part."""
    truth: "CocoAnnotations | None" = None
    scores: "list[CocoScore]" = field(default_factory=list)
    """Of boxes, and of masks if the network has them."""


def evaluate(
    model: "MaskRCNN",
    reader: "DetectionReader",
    world: "World",
    precision: "Precision",
    *,
    batch_size: int,
) -> Scored:
    """Find objects in all images of ``reader`` and score them; all workers call it.

    The images are cut into the same batches however many workers share them, and an image belongs to one of
    them, so the figures are the same to the last digit. A batch has images of similar aspect, with little
    padding, as in training.

    Raises:
        UsageError: an object of the ground truth has no mask.
        ShoalError: an image or its annotations cannot be read.
    """
    import numpy as np
    import torch

    from shoal.data.coco.source import prepared_truth
    from shoal.train.world import infer

    def detect(batch: "Batch") -> "tuple[Detections, Batch]":
        inputs = images.like_weights(batch["images"], model)
        with precision.autocast():
            return model.detect(inputs, batch["sizes"].to(world.device, non_blocking=True)), batch

    objects: Objects = {kind: {} for kind in kinds_of(model.config)}
    numbers: list[int] = []
    was_training = model.training
    model.eval()
    width, height = reader.shards.sizes.T
    by_aspect = np.argsort(width / height, kind="stable")
    batches = images.shared_batches(reader, world, batch_size, indices=by_aspect)
    with torch.compiler.set_stance("force_eager"):  # batches have any size here
        for detections, batch in infer(detect, batches, world.device):
            add_objects(objects, detections, batch, list(reader.categories))
            numbers += batch["index"].tolist()
    model.train(was_training)
    truth = prepared_truth(
        reader.shards, reader.categories, range(reader.num_examples) if world.is_main else numbers
    )
    scores = [score_across_workers(world, truth, objects[kind], kind) for kind in objects]
    there = [score for score in scores if score]
    return Scored(
        objects=objects, num_workers=world.num_workers, truth=truth if there else None, scores=there
    )


def score_across_workers(
    world: "World",
    annotations: "CocoAnnotations",
    detections: "Mapping[int, Sequence[Detection]]",
    kind: "Kind",
) -> "CocoScore | None":
    """Return the figures on the main worker, ``None`` on the others; to the last digit those of one worker.

    Masks are not sent: each worker measures the overlaps of its own, and the main worker sums up scores,
    areas and overlaps, some 50 bytes per detection.

    Args:
        detections: objects that this worker found, by id of the image. An image belongs to one worker.

    Raises:
        UsageError: two workers bring detections of the same image (on the main one); see
            :func:`~shoal.data.coco.score.overlaps_of` too.
    """
    from shoal.data.coco.score import Overlaps, overlaps_of, summarise
    from shoal.train.world import gather_arrays

    own = overlaps_of(annotations, detections, kind)
    columns = {field.name: gather_arrays(world, getattr(own, field.name)) for field in fields(Overlaps)}
    parts = [
        Overlaps(**{name: column[rank] for name, column in columns.items() if column is not None})
        for rank in range(world.num_workers)
        if world.is_main
    ]
    return summarise(annotations, parts, kind) if world.is_main else None


def recorded(scores: "Sequence[CocoScore]") -> dict[str, float]:
    """Return the figures for the record, without those that have no object to find."""
    figures = {f"{NAMES[one.kind]}_{name}": one.figures[name] for one in scores for name in _RECORDED}
    return {name: value for name, value in figures.items() if value >= 0}


def add_objects(
    objects: "Objects", detections: "Detections", batch: "Batch", categories: Sequence[int]
) -> None:
    """Add the detections of a batch, in the images' own sizes.

    Args:
        objects: by kind and id of the image; both kinds in the same order, or boxes only.
        detections: of the batch.
        batch: its ``sizes``, ``original_size`` and ``image_id``, as of ``DetectionReader.batch``.
        categories: their ids in the order of the labels.
    """
    import numpy as np

    from shoal.data.coco.masks import areas, encoded
    from shoal.data.coco.results import Detection

    sizes = batch["original_size"]
    boxes = detections.scaled(batch["sizes"], sizes)
    bitmaps = detections.bitmaps(boxes, [(int(height), int(width)) for height, width in sizes])
    labels, scores, corners = detections.labels.tolist(), detections.scores.tolist(), boxes.tolist()
    first = 0
    counted = zip(batch["image_id"].tolist(), detections.counts, strict=True)
    for (image, count), masks in zip_longest(counted, bitmaps):
        part = slice(first, first + count)
        names = [categories[label - 1] for label in labels[part]]
        shapes = [[x1, y1, x2 - x1, y2 - y1] for x1, y1, x2, y2 in corners[part]]
        objects["bbox"][image] = [
            Detection(name, score, box, box[2] * box[3])
            for name, score, box in zip(names, scores[part], shapes, strict=True)
        ]
        first += count
        if masks is None:
            continue
        rles = encoded(masks.cpu().numpy().astype(np.uint8))
        objects["segm"][image] = [
            Detection(name, score, rle, area)
            for name, score, rle, area in zip(names, scores[part], rles, areas(rles), strict=True)
        ]


def results_of(
    objects: "Mapping[Kind, Mapping[int, Sequence[Detection]]]", image: int
) -> list[dict[str, Any]]:
    """Return the objects of an image as in COCO's results."""
    results: list[dict[str, Any]] = [
        {"category_id": box.category_id, "score": box.score, "bbox": box.shape}
        for box in objects["bbox"][image]
    ]
    if "segm" in objects:
        for result, mask in zip(results, objects["segm"][image], strict=True):
            result["segmentation"] = mask.shape
    return results


def gather_results(world: "World", scored: Scored) -> list[Any] | None:
    """Return COCO's results of all workers by image id on the main worker, ``None`` on the others.

    Ids of images are those of the annotations that the data was prepared from.
    """
    import numpy as np

    from shoal.json_text import parse_json
    from shoal.train.world import gather_arrays

    own = [
        {"image_id": image, **result}
        for image in scored.objects["bbox"]
        for result in results_of(scored.objects, image)
    ]
    parts = gather_arrays(world, np.frombuffer(json.dumps(own).encode(), dtype=np.uint8))
    if scored.truth is None or parts is None:
        return None
    given = {image.id: image.given_id for image in scored.truth.images.values() if image.given_id is not None}
    entries = [
        entry
        for rank, part in enumerate(parts)
        for entry in parse_json(part.tobytes(), f"the detections of worker {rank}")
    ]
    entries.sort(key=lambda entry: int(entry["image_id"]))
    return [{**entry, "image_id": given.get(entry["image_id"], entry["image_id"])} for entry in entries]


# ------------------------------------------------------------------------------------------------- export

FORMAT = "shoal-mask-rcnn"


@dataclass(frozen=True, kw_only=True)
class ExportedDetector:
    """A detector, its categories, and the sizes of its inputs; images are normalised as ImageNet's."""

    model: "MaskRCNN"
    categories: dict[int, str]
    """Names by id, in the order of the labels 1, 2, …."""
    shorter: int
    """Length of an image's shorter side, in pixels, unless the longer one would exceed its limit."""
    longer: int
    """Limit of the longer side, in pixels."""


def _network(tree: Mapping[str, Any]) -> MaskRCNNConfig:
    """Return the form of a network that was written; what depends on ``weights`` is spelt out."""
    known = {one.name for one in fields(MaskRCNNConfig)}
    if strange := [name for name in tree if name not in known]:
        raise TypeError(f"no setting of a detector is called {strange[0]}")
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in tree.items()
    }
    weights = values.pop("weights", None)
    config = MaskRCNNConfig(**values, weights=Path(weights) if weights else None)
    return replace(config, weights=None, frozen_stages=config.stages_frozen, frozen_norms=config.norms_frozen)


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

    directory, validation = required(run.directory), config.validation

    def write(_: Path) -> None:
        last = required(scored)
        write_results(directory / RESULTS, required(results))
        write_json(directory / SCORES, coco.as_tree(required(last.truth), last.scores))
        detector = ExportedDetector(
            model=model, categories=categories, shorter=validation.shorter, longer=validation.longer
        )
        use.write_export(detector, directory / NETWORK)

    return run.finish(
        write,
        lambda _: (
            f"{len(required(results)):,} objects in {directory / RESULTS}, all figures in "
            f"{directory / SCORES}, the model in {directory / NETWORK}"
        ),
    )


# ------------------------------------------------------------------------------------------------- use

DETECTED = ".objects"
"""Between the name of an image and those of the files about its objects."""


@dataclass(frozen=True, kw_only=True)
class MaskRCNNPredictConfig(PredictConfig):
    """The detector, the objects to look for, and where pictures and lists of them go."""

    model: Annotated[Path, Parameter(name=("--model", "--checkpoint"), group=REQUIRED)]
    """A run of `shoal train mask_rcnn`, one of its checkpoints, or a directory that `shoal export` wrote."""
    out: Path = Path("predictions")
    """Output folder."""
    min_score: float = 0.5
    """Minimum score of an object."""
    classes: tuple[str, ...] = ()
    """Categories to detect; default: all."""
    batch_size: Annotated[int, Parameter(parse=False)] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.min_score <= 1:
            raise UsageError(f"--min-score {self.min_score} must be from 0 to 1")

    def check_out(self) -> None:
        """Leave the folder to the workers, which make it."""

    def write(self, rows: Iterable[Row]) -> None:
        """Print a line for each image; its files are written."""
        for row in rows:
            print(f"{row['image']}: {row['found']} ({row['picture']})")


@dataclass(frozen=True, kw_only=True)
class MaskRCNNEvaluateConfig(EvaluateConfig):
    """The detector, the images, and where figures go."""

    model: Annotated[Path, Parameter(group=REQUIRED)]
    """A run of `shoal train mask_rcnn`, one of its checkpoints, or a directory that `shoal export` wrote."""
    data: Annotated[str, Parameter(group=REQUIRED)]
    """Directory that `shoal prepare coco` wrote, or s3://BUCKET/PREFIX of one."""
    split: Literal["validation", "train"] = "validation"
    """Part of its images to score."""
    batch_size: int = 1
    """Images a worker computes at once. It does not follow the number of workers, so scores do not."""
    channels_last: bool = False
    """Compute with channels last."""
    out: Path | None = None
    """Folder for results.json, objects in COCO's form, and scores.json; default: only print the scores."""


class Detecting(images.ImageUse):
    """Detects objects in images, lists them in JSON and draws them."""

    Predict, Evaluate = MaskRCNNPredictConfig, MaskRCNNEvaluateConfig

    @classmethod
    def read_checkpoint(cls, source: Path) -> tuple[ExportedDetector, int]:
        from shoal.data.coco.source import read_categories
        from shoal.models.detection.mask_rcnn import MaskRCNN
        from shoal.train.checkpoint import load_model

        run_dir = find_run(source, "--model")
        config = load_toml(run_dir / CONFIG_FILE)
        try:
            network, validation = _network(config["model"]), config["validation"]
            shorter, longer = int(validation["shorter"]), int(validation["longer"])
        except (KeyError, TypeError) as error:
            raise UsageError(f"{run_dir} is not a run of `shoal train mask_rcnn` ({error})") from None
        categories = read_categories(description_in(run_dir))
        model = MaskRCNN(network, len(categories))
        step = load_model(source, model)
        return ExportedDetector(model=model, categories=categories, shorter=shorter, longer=longer), step

    @classmethod
    def read_export(cls, directory: Path) -> ExportedDetector:
        from safetensors.torch import load_file

        from shoal.models.detection.mask_rcnn import MaskRCNN

        with images.reading(directory):
            tree = images.read_tree(directory, FORMAT)
            categories = {int(one["id"]): str(one["name"]) for one in tree["categories"]}
            model = MaskRCNN(_network(tree["model"]), len(categories))
            model.load_state_dict(load_file(directory / images.WEIGHTS))
            shorter, longer = int(tree["shorter"]), int(tree["longer"])
        return ExportedDetector(model=model, categories=categories, shorter=shorter, longer=longer)

    @classmethod
    def write_export(cls, network: ExportedDetector, out: Path) -> None:
        tree = {
            "format": FORMAT,
            "model": {
                name: value for name, value in asdict(network.model.config).items() if name != "weights"
            },
            "categories": [{"id": number, "name": name} for number, name in network.categories.items()],
            "shorter": network.shorter,
            "longer": network.longer,
        }
        images.write_directory(out, network.model, tree)

    def read(self, inputs: tuple[Path, ...]) -> list[list[Path]]:
        """Return the images; two that would be written under one name are refused."""
        (files,) = super().read(inputs)
        names: dict[str, Path] = {}
        for file in files:
            other = names.setdefault(file.stem, file)
            if other != file:
                raise UsageError(
                    f"{other} and {file}: both would be written as {file.stem}{DETECTED}.png; predict them "
                    "into different folders (--out)"
                )
        return [list(dict.fromkeys(files))]

    def read_model(self) -> None:
        self.detector: ExportedDetector = self.read_network(self.settings.model)
        self.detector.model.to(self.world.device).eval()

    def outputs(self, data: list[Path]) -> list[Row] | None:
        """Write the objects of this worker's images; return a row about each image of all workers."""
        from shoal.train.world import all_gather_json, infer

        world, precision, settings = self.world, self.precision, self.settings
        classes = known_classes(settings.classes, settings.model, [*self.detector.categories.values()])
        require_writable(settings.out)

        def detect(path: Path) -> "tuple[Path, Pixels, list[dict[str, Any]]]":
            pixels = pixels_of(path)
            return path, pixels, objects_in(self.detector, pixels, world.device, precision)

        rows = []
        for path, pixels, detected in infer(detect, data[world.rank :: world.num_workers], world.device):
            sure = [one for one in detected if one["score"] >= settings.min_score]
            objects = [one for one in sure if one["category"] in classes]
            rows.append(write_objects(settings.out, path, pixels, objects, self.detector, precision))
        parts = all_gather_json(world.control, rows)
        in_order = [row for part in zip_longest(*parts) for row in part if row is not None]
        return in_order if world.is_main else None

    def rows(self, data: list[Path], outputs: list[Row]) -> Iterator[Row]:
        return iter(outputs)

    def labelled(self, inputs: tuple[Path, ...]) -> list[ImageShards]:
        from shoal.data.coco.source import check_masks, read_categories

        model, data = self.settings.model, self.settings.data
        if self.detector.model.config.masks:
            check_masks(data)
        if self.detector.categories != read_categories(data):
            raise UsageError(f"--model {model}: its categories are not those of the images {data}")
        return [ImageShards(data, self.settings.split)]

    def score(self, data: ImageShards) -> str | None:
        """Return COCO's metrics of boxes, and of masks if the detector finds them."""
        import torch

        from shoal.atomic_io import write_json
        from shoal.data.coco import score as coco
        from shoal.data.coco.reader import DetectionReader
        from shoal.data.coco.results import write_results
        from shoal.data.coco.transform import DetectionTransform

        detector, world, out = self.detector, self.world, self.settings.out
        if self.settings.channels_last:
            detector.model.to(memory_format=torch.channels_last)
        reader = DetectionReader(
            data,
            DetectionTransform(
                ValidationConfig(shorter=detector.shorter, longer=detector.longer).view,
                masks=detector.model.config.masks,
            ),
            categories=detector.categories,
            seed=0,
            threads=world.cores,
        )
        size = self.settings.batch_size
        scored = evaluate(detector.model, reader, world, self.precision, batch_size=size)
        results = gather_results(world, scored)
        if results is None or scored.truth is None:
            return None
        if out is not None:
            write_results(out / RESULTS, results)
            write_json(out / SCORES, coco.as_tree(scored.truth, scored.scores))
        return "\n".join(
            f"{NAMES[score.kind]}, in {self.precision.name}\n{score.table()}" for score in scored.scores
        )


def objects_in(
    detector: ExportedDetector, pixels: "Pixels", device: "torch.device", precision: "Precision"
) -> list[dict[str, Any]]:
    """Return the objects of a picture uint8 ``[H, W, 3]``, the surest first, as in COCO's results.

    Each has ``category_id``, ``category`` (its name), ``score``, ``bbox`` (x, y, width, height in pixels) and
    ``segmentation`` (run lengths) if the network has masks. The picture is brought to the form of the run's
    validation images.
    """
    import numpy as np
    import torch

    from shoal.data.coco.augment import in_steps, placement
    from shoal.data.coco.transform import unflipped_pixels
    from shoal.data.images.augment import IMAGENET_MEAN, IMAGENET_STD
    from shoal.data.images.pixels import finish
    from shoal.data.images.transform import normalisation

    height, width, _ = pixels.shape
    view = DetectionAugmentConfig(shorter=(detector.shorter,), longer=detector.longer, flip=0.0)
    fitted = placement(view, (0, 0, 0), height, width)
    frame = list(in_steps(fitted.frame))
    image = np.zeros((1, 3, *frame), dtype=np.float32)
    scale, shift = normalisation(IMAGENET_MEAN, IMAGENET_STD)
    part = image[0, :, : fitted.frame[0], : fitted.frame[1]]
    finish(unflipped_pixels(pixels, fitted), part, scale=scale, shift=shift)
    batch = {
        "sizes": torch.tensor([fitted.frame]),
        "original_size": torch.tensor([[height, width]]),
        "image_id": torch.tensor([0]),
    }
    with torch.inference_mode(), precision.autocast():
        detections = detector.model.detect(torch.from_numpy(image).to(device), batch["sizes"].to(device))
    objects: Objects = {kind: {} for kind in kinds_of(detector.model.config)}
    add_objects(objects, detections, batch, list(detector.categories))
    return [{"category": detector.categories[one["category_id"]], **one} for one in results_of(objects, 0)]


def pixels_of(path: Path) -> "Pixels":
    """Return an image as ``[H, W, 3]``, upright.

    Raises:
        UsageError: it cannot be decoded.
    """
    from shoal.data.images.files import read_image
    from shoal.data.images.transform import decode

    image = read_image(path)
    try:
        return decode(image)
    except ShoalError as error:
        raise UsageError(f"{path}: {error}") from None


def known_classes(classes: Sequence[str], model: Path, known: Sequence[str]) -> set[str]:
    """Return the categories to detect; those of ``classes``, or all.

    Raises:
        UsageError: the model does not know one.
    """
    for name in classes:
        if name not in known:
            raise UsageError(
                f"--classes {name!r} is none of the {len(known)} that the model {model} knows: "
                f"{', '.join(known[:5])}{', …' * (len(known) > 5)}.{did_you_mean(name, known)}"
            )
    return set(classes or known)


def write_objects(
    out: Path,
    path: Path,
    pixels: "Pixels",
    objects: Sequence[dict[str, Any]],
    detector: ExportedDetector,
    precision: "Precision",
) -> dict[str, str]:
    """Write the objects of an image as JSON and drawn; return a row about them.

    Raises:
        ShoalError: a file cannot be written.
    """
    from shoal.atomic_io import write_atomically
    from shoal.data.coco.drawing import drawn, png

    height, width, _ = pixels.shape
    tree = {"image": str(path), "height": height, "width": width, "objects": objects}
    text = json.dumps({**tree, "precision": precision.name}, indent=1, ensure_ascii=False)
    target = out / f"{path.stem}{DETECTED}"
    write_atomically(target.with_name(f"{target.name}.json"), f"{text}\n".encode())
    picture = target.with_name(f"{target.name}.png")
    write_atomically(picture, png(drawn(pixels, _drawn_objects(objects, detector, height, width))))
    counts = Counter(one["category"] for one in objects)
    summary = ", ".join(f"{count} {name}" for name, count in counts.most_common()) or "nothing found"
    return {"image": str(path), "found": summary, "picture": str(picture)}


def _drawn_objects(
    objects: Sequence[dict[str, Any]], detector: ExportedDetector, height: int, width: int
) -> "list[Drawn]":
    """Return them as they are drawn, the surest last."""
    from shoal.data.coco.drawing import Drawn
    from shoal.data.coco.masks import bitmaps

    labels = {number: label for label, number in enumerate(detector.categories, 1)}
    rles = [one["segmentation"] for one in objects if "segmentation" in one]
    drawn = []
    for one, mask in zip_longest(objects, bitmaps(rles, height, width).astype(bool)):
        x, y, w, h = one["bbox"]
        text = f"{one['category']} {one['score']:.0%}"
        label = labels[one["category_id"]]
        drawn.append(Drawn(label=label, text=text, box=(x, y, x + w, y + h), mask=mask))
    return drawn[::-1]


use = Detecting


# ------------------------------------------------------------------------------------------------- dry run


def learning(model: MaskRCNNConfig) -> str:
    """Return in words the parts of the backbone that learn."""
    stages = f"{model.stages_frozen} of 5 stages stay" if model.stages_frozen else "all stages learn"
    return f"{stages}, norms {'stay' if model.norms_frozen else 'learn'}"


def check(config: MaskRCNNTrainConfig, num_workers: int, dry_run: DryRun | None) -> list[str]:
    """Check the settings for a number of workers before any starts; return the lines of a dry run."""
    data = config.data
    num_train, num_held_out = data.made_images, data.num_made_held_out
    if data.path is not None or not data.made_images:
        from shoal.data.coco.source import check_masks

        train, held_out = images.open_shards(config)
        num_train, num_held_out = len(train), len(held_out)
        if config.model.masks:
            check_masks(images.location_of(config))
    plan = make_plan(config, num_examples=num_train, num_workers=num_workers)
    weights, begun = config.model.weights, (required(config.run.dir) / CONFIG_FILE).is_file()
    if weights is not None and not begun and not weights.is_file():
        raise UsageError(f"model.weights {weights} does not exist")
    if not dry_run:
        return []
    counted = sample(config)
    return [
        *settings_lines(config),
        f"batch        {plan.batch}",
        *plan.lines,
        f"weights      {weights or 'random'}",
        f"held out     {num_held_out:,} images of {count_categories(config):,} categories",
        f"parameters   {counted.num_trainable:,} that learn",
        dry_run.memory_line(config, (counted, plan.batch)),
    ]


# ------------------------------------------------------------------------------------------------- sample

COCO_CATEGORIES = 90
"""Categories of a model whose data is not named: COCO's numbers reach so far."""
DATA_OPERATIONS = 534
"""Kernels of a step that match, sample and suppress boxes: 1,200 operations of torchvision's Mask R-CNN on
one real image on the CPU, less the dense ones."""
AREA_SPREAD = 0.1
"""Of COCO's images at this size: standard deviation of the area over its mean, 0.102 to 0.107 in samples of
50 and 100 images of train2017, val2017 and val2014."""
READ_S = 1 / 68.9
"""One core of an EPYC reads 68.9 images of COCO a second (``benchmarks.detection_loader``, 2026-11-21)."""


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
        work_spread=AREA_SPREAD,
        input_s=READ_S,
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
