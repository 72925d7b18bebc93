"""Chooses the image source for a path: ImageNet's tars, class folders, or a tar of these."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from shoal.data.images.folder import FolderSource
from shoal.data.images.imagenet import TRAIN_TAR, VALIDATION_TAR, ImageNetSource
from shoal.data.images.sources import ImageSource, PackedSource
from shoal.data.images.tars import packing_of_tar, unpack
from shoal.data.text.packed import PACKINGS
from shoal.errors import UsageError, did_you_mean, no_such_file

_COCO_ZIPS = ("train2017.zip", "val2017.zip", "train2014.zip", "val2014.zip")


def detect_source(
    path: Path,
    *,
    validation: float | None = None,
    seed: int = 0,
    ground_truth: Path | None = None,
    synsets: Path | None = None,
) -> ImageSource | PackedSource:
    """Return the source in ``path``.

    Args:
        path: a folder, a tar of it, which may be compressed, or one of ImageNet's two tars.
        validation: fraction of each class of a folder that is held out.
        seed: of the held-out images.
        ground_truth: of ImageNet's validation images, instead of the file beside the tars.
        synsets: the list of synsets, instead of the file beside the tars.

    Raises:
        UsageError: the path does not exist or is neither, or an option does not fit it.
        ShoalError: something cannot be read.
    """
    if path.name.startswith((TRAIN_TAR, VALIDATION_TAR)) and path.is_file():
        path = path.parent
    if not path.exists():
        if path.is_symlink():
            raise UsageError(no_such_file(path))
        near = [entry.name for entry in path.parent.iterdir()] if path.parent.is_dir() else []
        raise UsageError(f"{path}: there is no such folder." + did_you_mean(path.name, near))
    tars = [_packed(path / name) for name in (TRAIN_TAR, VALIDATION_TAR)]
    if any(tar.is_file() for tar in tars):
        if validation is not None:
            raise UsageError(f"--validation {validation} is for folders; ImageNet has validation images")
        return _imagenet(path, tars[0], tars[1], ground_truth, synsets)
    if coco := next((path / name for name in _COCO_ZIPS if (path / name).is_file()), None):
        raise UsageError(f"{path} has no class folders. {_for_coco(coco)}")
    if classes := sorted(path.glob("n[0-9]*.tar")):
        raise UsageError(
            f"{path} has ImageNet's tars of classes ({classes[0].name}); give the folder of {TRAIN_TAR}, "
            "which holds them, or unpack each into a folder of its name"
        )
    for option, value in (("--ground-truth", ground_truth), ("--synsets", synsets)):
        if value is not None:
            raise UsageError(f"{option} {value} is for ImageNet's tars, and {path} has no {TRAIN_TAR}")
    if path.name in _COCO_ZIPS:
        raise UsageError(f"{path} has no class folders. {_for_coco(path)}")
    if path.is_dir() or not packing_of_tar(path):
        return FolderSource(path, validation=validation, seed=seed)
    return PackedSource(
        f"class folders in {path}",
        (path,),
        f"{validation} {seed}",
        lambda folder: FolderSource(unpack(path, folder), validation=validation, seed=seed, name=path),
    )


def _packed(tar: Path) -> Path:
    """Return a tar, or its compressed form if only that is there."""
    forms = (tar, *(tar.with_name(tar.name + packing) for packing in PACKINGS))
    return next((form for form in forms if form.is_file()), tar)


def _imagenet(
    folder: Path, train: Path, validation: Path, ground_truth: Path | None, synsets: Path | None
) -> ImageSource | PackedSource:
    """Return ImageNet by its two tars."""
    source = partial(ImageNetSource, folder, ground_truth=ground_truth, synsets=synsets)
    packed = [tar for tar in (train, validation) if tar.suffix != ".tar"]
    if not packed:
        return source()
    for tar in (train, validation):
        if not tar.is_file():
            raise UsageError(f"{tar}: there is no such file, and ImageNet is prepared from both tars")
    return PackedSource(
        f"ImageNet in {folder}",
        (train, validation),
        f"{ground_truth} {synsets}",
        lambda unpacked: source(tars=(unpack(train, unpacked), unpack(validation, unpacked))),
    )


def _for_coco(archive: Path) -> str:
    """Return the remedy for a zip of COCO."""
    return (
        f"{archive.name} is COCO's, which has no classes: shoal prepare coco --images {archive} "
        "--annotations annotations_trainval2017.zip"
    )
