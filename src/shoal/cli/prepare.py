"""Defines ``shoal prepare``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter

from shoal.data.images.prepare import ImagePrepareConfig
from shoal.data.images.prepare import prepare_images as prepare_source
from shoal.errors import UsageError

prepare = App(name="prepare")


prepare.command(
    "shoal.cli.prepare_text:prepare",
    name="text",
    help="Turn text into token shards. Run it again to continue after a stop or a crash.",
)


@prepare.command(name="images")
def prepare_images(
    source: Path,
    /,
    *,
    out: Path | None = None,
    validation: float | None = None,
    ground_truth: Path | None = None,
    synsets: Path | None = None,
    dry_run: bool = False,
    config: Annotated[ImagePrepareConfig, Parameter(name="*")] = ImagePrepareConfig(),  # noqa: B008
) -> None:
    """Turn images into shards. Run it again to continue after a stop or a crash.

    Parameters
    ----------
    source
        A folder with train/CLASS/ and val/CLASS/ (or validation/, test/), a folder of class folders, a .tar
        or .tar.gz of one, or the folder of ILSVRC2012_img_train.tar and ILSVRC2012_img_val.tar (or .tar.gz).
    out
        Directory for shards and manifest; needed unless it is a dry run.
    validation
        Fraction of each class held out if there are no validation images; default: 0.05.
    ground_truth
        Classes of ImageNet's validation images, one per line; default: found beside the tars.
    synsets
        meta.mat of ImageNet's development kit; default: found beside the tars.
    dry_run
        Write nothing; print the number of images, classes, shards and bytes.
    """
    from shoal.data.images.detect_source import detect_source
    from shoal.data.images.dry_run import dry_run as try_out

    if out is None and not dry_run:
        raise UsageError("--out is missing: the directory for shards and manifest")
    images = detect_source(
        source, validation=validation, seed=config.seed, ground_truth=ground_truth, synsets=synsets
    )
    if out is None or dry_run:
        lines = try_out(images, config)
        print("\n".join([images.description, *images.remarks, *lines]))
    else:
        prepare_source(images, out, config=config)


@prepare.command(name="coco")
def prepare_coco(
    *,
    images: Path,
    annotations: Path,
    out: Path,
    validation_images: Path | None = None,
    validation_annotations: Path | None = None,
    keep_empty: bool = False,
    masks: Literal["as-given", "run-lengths"] = "as-given",
    boxes_only: Literal["keep", "skip", "fill"] = "keep",
    config: Annotated[ImagePrepareConfig, Parameter(name="*")] = ImagePrepareConfig(),  # noqa: B008
) -> None:
    """Turn COCO's images and annotations into image shards. Run it again to continue after a stop or a crash.

    Parameters
    ----------
    images
        Images to train on: a folder, like train2017, or its zip, which is read in place.
    annotations
        Their annotations, like instances_train2017.json, or annotations_trainval2017.zip.
    out
        Directory for shards, manifest and categories.
    validation_images
        Images to score on, like val2017 or val2017.zip.
    validation_annotations
        Their annotations, like instances_val2017.json, or annotations_trainval2017.zip.
    keep_empty
        Also train on images without objects.
    masks
        as-given: polygons become masks in each training batch, exact at its size; run-lengths: here, once,
        at the size of the image.
    boxes_only
        Objects without a segmentation: keep them, for detectors of boxes; skip them; or fill, to take the
        box for the mask.
    """
    from shoal.data.coco.source import CocoSource, CocoSplit
    from shoal.data.coco.source import prepare_coco as prepare_split

    validation = None
    if validation_images and validation_annotations:
        validation = CocoSplit(validation_images, validation_annotations)
    elif validation_images or validation_annotations:
        raise UsageError(
            "--validation-images and --validation-annotations belong together; give both or none"
        )
    source = CocoSource(
        CocoSplit(images, annotations),
        validation,
        on_bad=config.on_bad,
        most_bad=config.most_bad,
        keep_empty=keep_empty,
        run_lengths=masks == "run-lengths",
        boxes_only=boxes_only,
    )
    prepare_split(source, out, config=config)
