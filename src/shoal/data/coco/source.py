"""Prepares COCO's images and annotations as image shards: ``shoal prepare coco``.

The annotations of an image are stored with it as ``KEY.json``, an object with ``image_id``, ``width`` and
``height`` (of the image that the boxes and masks refer to) and ``annotations``, COCO's valid objects. Where
an id is a text, or a number above int64, ``given_id`` is the id, and ``image_id`` a number in place of it.
The categories are in ``categories.json`` beside the manifest; labels are their positions in it, from 1.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import unicodedata
import zipfile
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import islice
from pathlib import Path, PurePosixPath
from tarfile import BLOCKSIZE
from typing import Any, Literal, NamedTuple

from shoal.atomic_io import archive_of, write_json
from shoal.data.bad_entries import MOST_BAD, BadEntries, BadEntry, OnBad
from shoal.data.coco.annotations import (
    CocoAnnotations,
    CocoImage,
    CocoObject,
    Segmentation,
    read_annotations,
    read_segmentation,
    shown,
)
from shoal.data.coco.masks import as_compressed
from shoal.data.images.folder import unique_keys
from shoal.data.images.manifest import ImageManifest
from shoal.data.images.prepare import ImagePrepareConfig, prepare_images
from shoal.data.images.shards import ImageShards
from shoal.data.images.sources import TRAIN, VALIDATION, SourceImage
from shoal.data.images.zips import SUFFIX, ZipImages, open_zip
from shoal.data.manifest import check_version, prepare_command
from shoal.data.storage import open_storage
from shoal.data.text.packed import peek
from shoal.errors import ShoalError, UsageError, cannot_read, no_such_file
from shoal.json_text import parse_json

CATEGORIES = "categories.json"
"""Format, version, the categories in the order of their labels (objects with id and name), and the number of
objects that have boxes only, by split."""
FORMAT = "shoal-coco"
VERSION = 1
BoxesOnly = Literal["keep", "skip", "fill"]
"""Objects that have a box and no segmentation: keep, leave out, or take the box for the mask."""
_NO_FILE = "an image whose file is missing"
_NO_NAME = "an image whose file_name no file can have"
MASKS_REMEDY = (
    "Mask R-CNN learns from masks: train on boxes only (--preset faster-rcnn-coco-1x, or --model.no-masks), "
    "or prepare the images again with --boxes-only skip (without such objects) or fill (a box is its mask)"
)


@dataclass(frozen=True)
class CocoSplit:
    """Images and their annotations, unpacked or in the zips in which they are downloaded.

    Attributes:
        images: a folder, or a zip of it (``train2017.zip``).
        annotations: the file, or a zip with ``instances_NAME.json``, where ``NAME`` is that of ``images``.
    """

    images: Path
    annotations: Path

    def truth_file(self) -> Path | zipfile.Path:
        """Return the file of annotations, which may be in a zip.

        Raises:
            UsageError: the zip has no such file, or is none.
            ShoalError: it cannot be read.
        """
        if self.annotations.suffix != SUFFIX:
            return self.annotations
        packed, member = open_zip(self.annotations), f"instances_{self.images.stem}.json"
        names = packed.namelist()
        for name in names:
            if PurePosixPath(name).name == member:
                return zipfile.Path(packed, name)
        raise UsageError(
            f"{self.annotations} has no {member}, the annotations of {self.images}; it has "
            f"{', '.join(names[:8]) or 'nothing'}. Unpack it and give the file"
        )


class CocoSource:
    """Images with annotations as a source (:class:`shoal.data.images.sources.ImageSource`)."""

    classes: tuple[str, ...] = ()
    """Empty: an image has objects and no label."""

    def __init__(
        self,
        train: CocoSplit,
        validation: CocoSplit | None = None,
        *,
        on_bad: OnBad = "skip",
        most_bad: float = MOST_BAD,
        keep_empty: bool = False,
        run_lengths: bool = False,
        boxes_only: BoxesOnly = "keep",
    ) -> None:
        """Read the annotations and find the images.

        Args:
            train: training images.
            validation: validation images, with the categories of ``train``.
            on_bad: leave out and count annotations and images that cannot be used, or refuse the first one.
            most_bad: see :class:`shoal.data.bad_entries.BadEntries`.
            keep_empty: keep training images without objects (crowds do not count); validation keeps all.
            run_lengths: convert every mask to run lengths of the whole image now; otherwise keep polygons,
                which are rasterised in each training batch.
            boxes_only: what becomes of objects without a segmentation.

        Raises:
            UsageError: a file is not COCO, too many entries cannot be used, or categories differ.
            ShoalError: an image cannot be read.
        """
        self._run_lengths = run_lengths
        splits = {TRAIN: train} | ({VALIDATION: validation} if validation else {})
        self._truth: dict[str, CocoAnnotations] = {}
        self._files: dict[str, list[tuple[CocoImage, _Place]]] = {}
        self.remarks: tuple[str, ...] = ()
        self.boxes_only: dict[str, int] = {}
        """Number of objects without a segmentation, by split."""
        digest = blake2b(digest_size=16)
        for name, split in splits.items():
            read = read_annotations(split.truth_file(), on_bad=on_bad, most_bad=most_bad)
            truth, num_boxes = _treat_boxes(read, boxes_only)
            self._truth[name] = truth
            images = _Images(split.images)
            if truth.categories != self.categories:
                raise UsageError(
                    f"{split.annotations} has other categories than {train.annotations}; "
                    "both must have the same"
                )
            num_empty = 0
            files = self._files[name] = []
            for index, image in enumerate(truth.images.values()):
                if name == TRAIN and not keep_empty and all(o.is_crowd for o in truth.objects[image.id]):
                    num_empty += 1
                    continue
                try:
                    extent, state = images.extent_of(image)
                except BadEntry as error:
                    truth.bad.add(error, f"images[{index}] (id {image.id})")
                else:
                    files.append((image, extent))
                    digest.update(f"{name}\0".encode() + state)
            digest.update(_state_of(split.annotations)[1])
            truth.bad.check(len(files) + num_empty)
            if name == TRAIN and not files:
                summary = truth.bad.summary()
                raise UsageError(
                    f"{split.annotations}: there is no image to train on, since none of {num_empty:,} has an "
                    f"object that is no crowd (--keep-empty keeps such images){summary and f'; {summary}'}"
                )
            self.remarks += (*truth.remarks(), *truth.bad.lines())
            if num_empty:
                self.remarks += (f"{num_empty:,} images without objects are left out (--keep-empty)",)
            self.boxes_only[name] = num_boxes if boxes_only == "keep" else 0
            if num_boxes:
                num_objects = sum(not one.is_crowd for some in truth.objects.values() for one in some)
                num_objects += num_boxes if boxes_only == "skip" else 0
                self.remarks += (
                    f"{num_boxes:,} of the {num_objects:,} objects of {split.annotations} have no "
                    f"segmentation, only a box: {_BOXES_ONLY_MEANS[boxes_only]}",
                )
        self.splits = tuple(splits)
        parts = [f"{split.images} with {split.annotations}" for split in splits.values()]
        self.description = f"COCO: {' and '.join(parts)}, {len(self.categories)} categories"
        self._state = f"{digest.hexdigest()} {on_bad} {keep_empty} {run_lengths} {boxes_only}"

    @property
    def categories(self) -> Mapping[int, str]:
        """Names by id, in the order of their labels."""
        return self._truth[TRAIN].categories

    def state(self) -> str:
        return self._state

    def images(self, split: str) -> Iterator[SourceImage]:
        truth, files = self._truth[split], self._files[split]
        keys = unique_keys([image.file_name for image, _ in files])
        for key, (image, extent) in zip(keys, files, strict=True):
            text = as_json(image, truth.objects[image.id], run_lengths=self._run_lengths)
            path, offset, size, member = extent
            shape = image.width, image.height
            yield SourceImage(key, path, offset, size, member=member, annotations=text, annotated_size=shape)


_BOXES_ONLY_MEANS = {
    "keep": "train Faster R-CNN on them (--preset faster-rcnn-coco-1x)",
    "skip": "they are left out",
    "fill": "their boxes are their masks",
}


def _treat_boxes(truth: CocoAnnotations, treatment: BoxesOnly) -> tuple[CocoAnnotations, int]:
    """Return the annotations with objects without a segmentation treated, and the number of these.

    Crowds stay as they are.
    """
    count, objects = 0, dict(truth.objects)
    for image, all_of_it in truth.objects.items():
        boxes = {one.id for one in all_of_it if one.segmentation is None and not one.is_crowd}
        count += len(boxes)
        if boxes and treatment == "skip":
            objects[image] = tuple(one for one in all_of_it if one.id not in boxes)
        elif boxes and treatment == "fill":
            objects[image] = tuple(_boxed(one) if one.id in boxes else one for one in all_of_it)
    return replace(truth, objects=objects), count


def _boxed(one: CocoObject) -> CocoObject:
    """Return an object whose mask is its box."""
    x, y, width, height = one.box
    polygon = array("d", [x, y, x + width, y, x + width, y + height, x, y + height])
    return replace(one, segmentation=(polygon,))


def prepare_coco(source: CocoSource, out: Path, *, config: ImagePrepareConfig) -> ImageManifest:
    """Prepare ``source`` into ``out``: image shards, their manifest, and :data:`CATEGORIES`.

    Raises:
        UsageError: as :func:`shoal.data.images.prepare.prepare_images`.
        ShoalError: likewise.
    """
    manifest = prepare_images(source, out, config=config)
    write_categories(out, source.categories, source.boxes_only)
    return manifest


def write_categories(
    out: Path, categories: Mapping[int, str], boxes_only: Mapping[str, int] | None = None
) -> None:
    """Write :data:`CATEGORIES`.

    Args:
        boxes_only: number of objects without a segmentation, by split; default: none.

    Raises:
        ShoalError: the disk is full or the folder cannot be written.
    """
    entries = [{"id": number, "name": name} for number, name in categories.items()]
    tree = {"format": FORMAT, "version": VERSION, "categories": entries, "boxes_only": dict(boxes_only or {})}
    write_json(out / CATEGORIES, tree)


def read_categories(location: Path | str) -> dict[int, str]:
    """Return the names of the categories by id, in the order of their labels 1, 2, ….

    Args:
        location: the directory, or s3://BUCKET/PREFIX of one.

    Raises:
        UsageError: the directory was not prepared from COCO.
        ShoalError: the file cannot be read, is damaged or has another format version.
    """
    path, tree = _read_description(location)
    try:
        return {int(entry["id"]): str(entry["name"]) for entry in tree["categories"]}
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise ShoalError(f"{path}: a field is missing or wrong ({error}); prepare the images again") from None


def check_masks(location: Path | str) -> None:
    """Check that all objects have masks, as far as the preparation has counted them.

    Raises:
        UsageError: some have boxes only.
        ShoalError: as for :func:`read_categories`.
    """
    _, tree = _read_description(location)
    counts = tree.get("boxes_only") or {}
    words = [f"{count:,} of {split}" for split, count in counts.items() if count]
    if words:
        raise UsageError(
            f"{location}: objects have a box but no segmentation ({', '.join(words)}). {MASKS_REMEDY}"
        )


def _read_description(location: Path | str) -> tuple[str, dict[str, Any]]:
    """Return the path and the content of :data:`CATEGORIES`."""
    path = f"{location}/{CATEGORIES}"
    try:
        data = open_storage(location).whole(CATEGORIES)
    except OSError:
        raise UsageError(
            f"{path} is missing, so the directory was not prepared from COCO; "
            f"run {prepare_command('coco', location)}"
        ) from None
    tree = parse_json(data, path, remedy="prepare the images again")
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        tree = {"categories": tree}  # version None
    check_version(tree.get("version"), VERSION, path, "coco")
    return path, tree


def as_json(image: CocoImage, objects: tuple[CocoObject, ...], *, run_lengths: bool = False) -> str:
    """Return ``KEY.json`` of an image; see the module's docstring."""
    annotations = [
        {
            "id": one.id,
            "category_id": one.category_id,
            "bbox": one.box,
            "area": one.area,
            "iscrowd": int(one.is_crowd),
            "segmentation": _stored(one.segmentation, image, run_lengths),
        }
        for one in objects
    ]
    tree = {"image_id": image.id, "width": image.width, "height": image.height, "annotations": annotations}
    if image.given_id is not None:
        tree["given_id"] = image.given_id
    return json.dumps(tree, separators=(",", ":"))


def _stored(shape: Segmentation | None, image: CocoImage, run_lengths: bool) -> Any:
    # damaged run lengths were refused by read_annotations
    if run_lengths and shape is not None and (rle := as_compressed(shape, image.height, image.width)):
        counts = rle["counts"]
        return {**rle, "counts": counts.decode("ascii") if isinstance(counts, bytes) else counts}
    return [polygon.tolist() for polygon in shape] if isinstance(shape, tuple) else shape


class _Place(NamedTuple):
    """Bytes of an image; ``member`` is its name in a zip, empty for a file of its own."""

    path: Path
    offset: int
    size: int
    member: str = ""


class _Images:
    """The images of a split, in a folder or a zip."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._zip = None if path.is_dir() else self._opened(path)
        self._state = _state_of(path)[1] if self._zip else b""
        self._names: dict[str, str] = {}
        """Names below the folder, to the names in the annotations."""
        self._is_hinted = False

    def _opened(self, path: Path) -> ZipImages:
        """Return the zip ``path``, whatever its name ends in.

        Raises:
            UsageError: it is none, or was cut short.
            ShoalError: it cannot be read.
        """
        packed = path.with_name(path.name + SUFFIX)
        if not path.exists() and packed.is_file():
            raise UsageError(f"{path}: there is no such folder; give {packed}, which is read as it is")
        if not path.exists():
            raise UsageError(no_such_file(path))
        kind = archive_of(peek(path, "", BLOCKSIZE)) if path.is_file() else "neither a file"
        if kind == "a zip" or (not kind and path.suffix.lower() == SUFFIX):
            return ZipImages(path)
        raise UsageError(
            f"{path} is {kind or 'a file'}, no folder of images and no zip of one; "
            f"{'unpack it, and ' if kind else ''}give the folder of the images"
        )

    def extent_of(self, image: CocoImage) -> tuple[_Place, bytes]:
        """Return the place of an image, and bytes that change with it.

        Raises:
            BadEntry: there is no such file in the folder or zip.
            UsageError: it is compressed in the zip.
            ShoalError: it cannot be read.
        """
        name = self._name_of(image.file_name)
        if self._zip is None:
            try:
                size, state = _state_of(self._path / name)
            except BadEntry as bad:
                kind, value = bad.args
                raise BadEntry(kind, value + self._hint()) from None
            return _Place(self._path / name, 0, size), state
        if name not in self._zip:
            raise BadEntry(_NO_FILE, f"{self._path}: {name}{self._hint()}")
        extent = _Place(self._path, *self._zip.extent(name), name)
        return extent, repr(extent).encode("utf-8", "surrogateescape") + self._state

    def _name_of(self, file_name: str) -> str:
        """Return the name below the folder, which no other image has.

        Raises:
            BadEntry: another image has it, or it leads out of the folder.
        """
        name = str(PurePosixPath(self._resolved(file_name)))
        if name in self._names:
            value = f"{file_name} and {self._names[name]}; let one image have the objects of both"
            raise BadEntry("an image whose file another one has", value)
        self._names[name] = file_name
        return name

    def _resolved(self, file_name: str) -> str:
        """Return the name below the folder. Tools also write paths of their own machine, or of Windows."""
        for form in ("NFC", "NFD"):  # macOS and others write the same letters in different ways
            if self._has(name := unicodedata.normalize(form, file_name)):
                file_name = name
        if self._has(file_name):
            return file_name
        parts = [part for part in re.split(r"[/\\]", file_name) if part]
        if ".." in parts or not parts:
            raise BadEntry("an image whose file_name leads out of the folder", repr(file_name))
        shorter = ["/".join(parts[first:]) for first in range(len(parts))]
        return next(filter(self._has, shorter), shorter[0])

    def _has(self, name: str) -> bool:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.name:
            return False
        if self._zip is not None:
            return name in self._zip
        try:
            return (self._path / path).is_file()
        except OSError:  # `_state_of` gives the reason
            return False

    def _hint(self) -> str:
        """Return in words the first names that are there, once."""
        if self._is_hinted:
            return ""
        self._is_hinted = True
        if self._zip:
            names = list(islice(self._zip.names(), 3))
        else:
            with os.scandir(self._path) as entries:
                names = [entry.name for entry in islice(entries, 3)]
        listed = ", ".join(map(repr, names))
        return f"; {self._path} has {listed or 'no file at all'}"


def _state_of(path: Path) -> tuple[int, bytes]:
    """Return the size of a file, and bytes that change with the file.

    Raises:
        BadEntry: there is no such file.
        ShoalError: it cannot be read.
    """
    try:
        facts = path.stat()
    except ValueError:  # a null, or half of a surrogate pair
        raise BadEntry(_NO_NAME, shown(path.name)) from None
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise BadEntry(_NO_NAME, shown(path.name)) from None
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise ShoalError(cannot_read(path, error)) from error
        raise BadEntry(_NO_FILE, cannot_read(path, error)) from None
    if not stat.S_ISREG(facts.st_mode):
        raise BadEntry(_NO_FILE, f"{path} is a folder, a pipe or a device")
    line = f"{path}\0{facts.st_size}\0{facts.st_mtime_ns}\n"
    return facts.st_size, line.encode("utf-8", "surrogateescape")


def prepared_truth(
    shards: ImageShards, categories: Mapping[int, str], numbers: Iterable[int]
) -> CocoAnnotations:
    """Return the annotations of the images ``numbers`` of ``shards``, to score detections against.

    Raises:
        ShoalError: the annotations of an image are invalid.
    """
    path = Path(str(shards.location))
    images: dict[int, CocoImage] = {}
    objects: dict[int, tuple[CocoObject, ...]] = {}
    for number in numbers:
        source = f"{shards.name(number)}: its annotations"
        tree = parse_json(bytes(shards.extra(number)), source, remedy="prepare the images again")
        try:
            size, given_id = (int(tree["width"]), int(tree["height"])), tree.get("given_id")
            image = CocoImage(int(tree["image_id"]), "", *size, given_id)
            images[image.id], objects[image.id] = image, tuple(map(_restored, tree["annotations"]))
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise ShoalError(f"{source} cannot be read ({error}); prepare the images again") from None
    return CocoAnnotations(
        path=path,
        images=images,
        categories=dict(sorted(categories.items())),
        objects=objects,
        bad=BadEntries(path, "refuse"),
    )


def _restored(tree: Mapping[str, Any]) -> CocoObject:
    x, y, width, height = map(float, tree["bbox"])
    return CocoObject(
        id=int(tree["id"]),
        category_id=int(tree["category_id"]),
        box=(x, y, width, height),
        area=float(tree["area"]),
        is_crowd=bool(tree["iscrowd"]),
        segmentation=read_segmentation(tree["segmentation"]),
    )
