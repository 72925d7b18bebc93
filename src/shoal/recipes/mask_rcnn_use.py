"""Scores a trained detector on labelled images: ``shoal evaluate mask_rcnn``."""

# Annotations are types here, not texts, and what needs torch is imported in functions: `--help` is quick.

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from shoal.data.images.shards import ImageShards
from shoal.errors import UsageError
from shoal.recipes import images, using
from shoal.recipes.mask_rcnn import RESULTS, SCORES
from shoal.recipes.mask_rcnn_config import ValidationConfig
from shoal.recipes.using import UseConfig
from shoal.train.config import REQUIRED
from shoal.train.run_dir import require_writable

if TYPE_CHECKING:
    from shoal.train.gradients import Precision
    from shoal.train.world import World


@dataclass(frozen=True, kw_only=True)
class Evaluate(UseConfig):
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


def check_evaluation(what: Evaluate, inputs: tuple[Path, ...]) -> list[str]:
    """Check what can be checked without torch; return the lines of a dry run.

    Raises:
        UsageError: no detector, no images, or a folder that cannot be written.
    """
    images.find_network(what.model)
    shards = ImageShards(what.data, what.split)
    if what.out is not None:
        require_writable(what.out)
    return [f"images       {len(shards):,} of {what.data}"]


def evaluate(
    what: Evaluate, inputs: tuple[Path, ...], world: "World", precision: "Precision"
) -> Iterator[str]:
    """Yield COCO's metrics of boxes and masks, on the first worker; all workers call it.

    Raises:
        UsageError: the model is no detector, or its categories are not those of the images.
        ShoalError: files are damaged, or one cannot be written.
    """
    import torch

    from shoal.atomic_io import write_json
    from shoal.data.coco import score as coco
    from shoal.data.coco.reader import DetectionReader
    from shoal.data.coco.results import write_results
    from shoal.data.coco.source import read_categories
    from shoal.data.coco.transform import DetectionTransform
    from shoal.data.images.reader import default_decode_threads
    from shoal.recipes import mask_rcnn_score
    from shoal.recipes.mask_rcnn_predict import read_detector

    using.make_folder(what.out, world)
    detector, categories = read_detector(what.model), read_categories(what.data)
    if detector.categories != categories:
        raise UsageError(f"--model {what.model}: its categories are not those of the images {what.data}")
    model = detector.model.to(world.device)
    if what.channels_last:
        model.to(memory_format=torch.channels_last)
    reader = DetectionReader(
        ImageShards(what.data, what.split),
        DetectionTransform(ValidationConfig(shorter=detector.shorter, longer=detector.longer).view),
        categories=categories,
        seed=0,
        threads=default_decode_threads(world.place.num_local_workers),
    )
    scored = mask_rcnn_score.evaluate(model, reader, world, precision, batch_size=what.batch_size)
    results = mask_rcnn_score.gather_results(world, scored.found)
    if results is None or scored.truth is None:
        return
    if what.out is not None:
        write_results(what.out / RESULTS, results)
        write_json(what.out / SCORES, coco.as_tree(scored.truth, scored.scores))
    for score in scored.scores:
        yield f"{mask_rcnn_score.NAMES[score.kind]}, in {precision.name}\n{score.table()}"
