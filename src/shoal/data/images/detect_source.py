"""Chooses the image source for a path: ImageNet's tars, or a folder of class folders."""

from __future__ import annotations

from pathlib import Path

from shoal.data.images.folder import FolderSource
from shoal.data.images.imagenet import TRAIN_TAR, VALIDATION_TAR, ImageNetSource
from shoal.data.images.sources import ImageSource
from shoal.errors import UsageError, did_you_mean

_COCO_ZIPS = ("train2017.zip", "val2017.zip", "train2014.zip", "val2014.zip")
_UNPACK = (
    ((".zip",), "unzip -q"),
    ((".tar",), "tar -xf"),
    ((".tar.gz", ".tgz"), "tar -xzf"),
    ((".tar.bz2",), "tar -xjf"),
)


def detect_source(
    path: Path,
    *,
    validation: float | None = None,
    seed: int = 0,
    ground_truth: Path | None = None,
    synsets: Path | None = None,
) -> ImageSource:
    """Return the source in ``path``.

    Args:
        path: a folder, or ImageNet's tar of training images.
        validation: fraction of each class of a folder that is held out.
        seed: of the held-out images.
        ground_truth: of ImageNet's validation images, instead of the file beside the tars.
        synsets: the list of synsets, instead of the file beside the tars.

    Raises:
        UsageError: the path does not exist or is neither, or an option does not fit it.
        ShoalError: something cannot be read.
    """
    if path.name in (TRAIN_TAR, VALIDATION_TAR) and path.is_file():
        path = path.parent
    if not path.exists():
        near = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UsageError(f"{path}: there is no such folder." + did_you_mean(path.name, near))
    if not path.is_dir():
        raise UsageError(
            f"{path} is a file; give a folder of class folders, or the folder of {TRAIN_TAR}. "
            + _remedy(path)
        )
    if any((path / name).is_file() for name in (TRAIN_TAR, VALIDATION_TAR)):
        if validation is not None:
            raise UsageError(f"--validation {validation} is for folders; ImageNet has validation images")
        return ImageNetSource(path, ground_truth=ground_truth, synsets=synsets)
    if coco := next((path / name for name in _COCO_ZIPS if (path / name).is_file()), None):
        raise UsageError(f"{path} has no class folders. {_remedy(coco)}")
    if classes := sorted(path.glob("n[0-9]*.tar")):
        raise UsageError(
            f"{path} has ImageNet's tars of classes ({classes[0].name}); give the folder of {TRAIN_TAR}, "
            "which holds them, or unpack each into a folder of its name"
        )
    for option, value in (("--ground-truth", ground_truth), ("--synsets", synsets)):
        if value is not None:
            raise UsageError(f"{option} {value} is for ImageNet's tars, and {path} has no {TRAIN_TAR}")
    return FolderSource(path, validation=validation, seed=seed)


def _remedy(archive: Path) -> str:
    """Return the remedy for a file that is not a source of classified images."""
    if archive.name in _COCO_ZIPS:
        return (
            f"{archive.name} is COCO's, which has no classes: shoal prepare coco --images {archive} "
            "--annotations annotations_trainval2017.zip"
        )
    for suffixes, command in _UNPACK:
        if archive.name.endswith(suffixes):
            return f"Unpack {archive.name} first: {command} {archive}"
    return "Other archives have to be unpacked first"
