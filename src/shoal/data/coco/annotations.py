"""Reads the ground truth of COCO: images, categories and objects.

The file is an object with the arrays ``images`` (id, file_name, width, height), ``categories`` (id, name) and
``annotations`` (id, image_id, category_id, bbox, area, iscrowd, segmentation), see
https://cocodataset.org/#format-data. The arrays may come in any order; other keys are ignored.
"""

from __future__ import annotations

import math
import zipfile
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from shoal.data.bad_entries import MOST_BAD, NO_AREA, BadEntries, BadEntry, OnBad
from shoal.data.json_stream import top_level_entries
from shoal.errors import UsageError, did_you_mean
from shoal.formatting import without_unseen

Polygons = tuple["array[float]", ...]
"""Each x0, y0, x1, y1, … in pixels of the image; together one object."""
Rle = dict[str, Any]
"""``size`` [height, width] and ``counts``: a list of runs down the columns, or COCO's string of them."""
Segmentation = Polygons | Rle
Boxes = Literal["keep", "check"]

_MIN_POLYGON = 6
_NUMBERS = {int, float, str}
"""Types of numbers, and of texts that may be ones; ``bool`` is none."""
_CROWD_WORDS = {"true": 1, "1": 1, "false": 0, "0": 0}
_MOST_DIGITS = 18
FAR = 100_000
"""Pixels outside of an image at which polygons and boxes may end."""
_SAMPLE = 100
"""Objects whose polygons are compared with their boxes."""
_END = 1 << 63
"""Ids are below, as int64."""


@dataclass(frozen=True, slots=True)
class CocoImage:
    """An image of the ground truth, sizes in pixels."""

    id: int
    file_name: str
    width: int
    height: int
    given_id: int | str | None = field(default=None, compare=False)
    """The id in the file if it is a text, or a number above int64; results have it too."""


@dataclass(frozen=True, slots=True)
class CocoObject:
    """One annotation: an object, or a crowd of them."""

    id: int
    category_id: int
    box: tuple[float, float, float, float]
    """x, y, width, height in pixels, as in the file."""
    area: float
    """In square pixels, as in the file; that of the box if the file has none."""
    is_crowd: bool
    segmentation: Segmentation | None


@dataclass(frozen=True, kw_only=True)
class CocoAnnotations:
    """The valid entries of a file of annotations."""

    path: Path
    images: Mapping[int, CocoImage]
    """By id, in the order of the file; images without objects too."""
    categories: Mapping[int, str]
    """Names by id, in the order of the ids."""
    objects: Mapping[int, tuple[CocoObject, ...]]
    """Objects by the id of their image, in the order of the file; has every image."""
    bad: BadEntries
    """Counts of what was left out."""
    numbers: Mapping[str, int] = field(default_factory=dict)
    """Ids of images in ``images`` by those in the file that are words, or numbers above int64."""
    category_numbers: Mapping[str, int] = field(default_factory=dict)
    """Ids in ``categories`` by those in the file that are words, or numbers above int64."""

    @property
    def has_masks(self) -> bool:
        """Return whether every object has a segmentation."""
        return all(one.segmentation for some in self.objects.values() for one in some)

    def image_of(self, value: Any) -> CocoImage | None:
        """Return the image that an id means, as a file of results has it: ``42``, ``42.0``, ``"a1f"``."""
        number = whole_number(value)
        if number is None and isinstance(value, str | int):
            number = self.numbers.get(str(value))
        return None if number is None else self.images.get(number)

    def category_of(self, value: Any) -> int | None:
        """Return the category that an id means, in a file of results: its number, or the word of the file."""
        number = whole_number(value)
        if number is None and isinstance(value, str | int):
            number = self.category_numbers.get(str(value))
        return number if number in self.categories else None

    def remarks(self) -> list[str]:
        """Return lines about categories: those of one name, and the numbers of those whose ids are words."""
        numbers_of: dict[str, list[int]] = {}
        for number, name in self.categories.items():
            numbers_of.setdefault(without_unseen(name).casefold(), []).append(number)
        lines = [
            f"{self.path}: the categories {', '.join(map(str, some))} all have the name "
            f"{self.categories[some[0]]!r}; if they are one, give their objects one category_id"
            for some in numbers_of.values()
            if len(some) > 1
        ]
        if not self.category_numbers:
            return lines
        numbers = [f"{number} {shown(word)}" for word, number in self.category_numbers.items()]
        listed = ", ".join(numbers[:8]) + (f" and {len(numbers) - 8:,} more" if len(numbers) > 8 else "")
        lines.append(
            f"{self.path}: ids of categories are words, numbered by the alphabet, in results too: {listed}"
        )
        return lines


def read_annotations(
    path: Path | zipfile.Path,
    *,
    on_bad: OnBad = "skip",
    most_bad: float = MOST_BAD,
    boxes: Boxes = "check",
) -> CocoAnnotations:
    """Read ``instances_*.json`` or any file of that form.

    Forms that annotation tools write are read too: ids and numbers as text, words as ids (those of categories
    are numbered by the alphabet, so that two files of one set agree), a flat list as one polygon,
    polygons of points (``[[x, y], …]``, or OpenCV's ``[[[x, y]], …]``), ``[[]]`` as no segmentation, ``null``
    and NaN for values that can be missing, a box that only the polygons give, ids of annotations that begin
    again, LVIS's ``coco_url`` in place of ``file_name``.

    An entry is invalid if its image or category does not exist, a value cannot be used, the id of an image or
    category is a duplicate, or an annotation is there twice. The objects of an invalid image are invalid too,
    and counted separately.

    Args:
        path: the file, which may be in a zip.
        on_bad: leave invalid entries out and count them, or refuse the file at the first one.
        most_bad: see :class:`shoal.data.bad_entries.BadEntries`.
        boxes: ``check`` treats an object as invalid if its box has no area inside the image, since training
            cannot use it; ``keep`` accepts it, as the official scorer does.

    Raises:
        UsageError: the file cannot be read, is not COCO, has invalid entries that are refused, or its boxes
            are fractions of their images, or corners.
    """
    return _Reader(path, on_bad, most_bad, boxes).read()


class _Reader:
    def __init__(self, path: Path | zipfile.Path, on_bad: OnBad, most_bad: float, boxes: Boxes) -> None:
        self._file, self._path = path, Path(str(path))
        self._bad = BadEntries(self._path, on_bad, most_bad)
        self._boxes = boxes
        self._images: dict[int, CocoImage] = {}
        self._categories: dict[int, str] = {}
        self._objects: list[tuple[int | str, int, CocoObject]] = []
        """Id of the image, index in the file, object."""
        self._ids: dict[int | str, int] = {}
        """Positions in ``_objects``."""
        self._has_objects = False
        self._names: dict[str, int] = {}
        """Numbers of images whose ids are words."""
        self._words: dict[str, int] = {}
        """Numbers above int64 that stand for words as ids of categories until the end of the file."""
        self._takers = {
            "images": self._take_image,
            "categories": self._take_category,
            "annotations": self._take_object,
        }

    def read(self) -> CocoAnnotations:
        keys: set[str] = set()
        for key, index, entry in top_level_entries(self._file):
            keys.add(key)
            if index is None and key in self._takers and entry != []:
                raise UsageError(f"{self._path}: {key!r} is no array; is it a file of COCO annotations?")
            if index is not None and key in self._takers:
                if isinstance(entry, dict):  # pandas writes NaN for what is missing
                    entry = {name: None if value != value else value for name, value in entry.items()}
                try:
                    self._takers[key](entry, index)
                except BadEntry as bad:
                    number = f" (id {entry['id']})" if isinstance(entry, dict) and "id" in entry else ""
                    self._bad.add(bad, f"{key}[{index}]{number}")
        self._check_keys(keys)
        category_numbers = self._number_words()
        check_pixels(self._path, [one.box for _, _, one in self._objects])
        objects = self._placed()
        shapes = ((one, self._images[number]) for number, some in objects.items() for one in some)
        check_corners(self._path, ((one.box, one.segmentation, image) for one, image in shapes))
        if self._boxes == "check":
            self._check_polygons(objects)
        if self._has_objects and not any(objects.values()):
            raise UsageError(
                f"{self._path}: no annotation can be used; {self._bad.summary()}; correct the file"
            )
        self._bad.check(len(self._images) + len(self._categories) + sum(map(len, objects.values())))
        return CocoAnnotations(
            path=self._path,
            images=self._images,
            categories=dict(sorted(self._categories.items())),
            objects=objects,
            numbers=self._names,
            category_numbers=category_numbers,
            bad=self._bad,
        )

    def _check_polygons(self, objects: Mapping[int, Sequence[CocoObject]]) -> None:
        """Raise if the first polygons are elsewhere than their boxes: fractions, shares, or y before x."""
        each = (one for some in objects.values() for one in some if isinstance(one.segmentation, tuple))
        sample = list(islice(each, _SAMPLE))
        apart = [one for one in sample if not _is_around(one)]
        if 2 * len(apart) > len(sample):
            one = apart[0]
            polygon = one.segmentation[0].tolist() if isinstance(one.segmentation, tuple) else []
            raise UsageError(
                f"{self._path}: polygons such as {shown(polygon)} are elsewhere than their boxes, here "
                f"{list(one.box)}: write x before y, in pixels and not in fractions of the image"
            )

    def _check_keys(self, keys: set[str]) -> None:
        if "" in keys:
            raise UsageError(
                f"{self._path}: is an array; that is the form of COCO results, but annotations are an object "
                "with 'images', 'categories' and 'annotations'"
            )
        for key in self._takers:
            if key not in keys:
                raise UsageError(
                    f"{self._path}: has no key {key!r}.{did_you_mean(key, keys)} "
                    "Is it a file of COCO annotations?"
                )
        for key, entries in (("images", self._images), ("categories", self._categories)):
            if not entries and (left_out := self._bad.summary()):
                raise UsageError(
                    f"{self._path}: no entry of {key!r} can be used; {left_out}; correct the file"
                )
            if not entries:
                raise UsageError(f"{self._path}: {key!r} is empty; is it a file of COCO annotations?")

    def _take_image(self, entry: Any, index: int) -> None:
        number = _id(entry, "id")
        if number in self._images or number in self._names:
            raise BadEntry("an image whose id another one has", f"id {number}")
        name = entry.get("file_name") or str(entry.get("coco_url") or "").rpartition("/")[2]
        if not isinstance(name, str) or not name:
            raise BadEntry("an image without a file_name", shown(entry.get("file_name")))
        if entry.get("width") is None or entry.get("height") is None:
            raise BadEntry("an image without width and height, which must be those of its file", "")
        width, height = _whole(entry, "width"), _whole(entry, "height")
        if width < 1 or height < 1:
            raise BadEntry("an image without a size", f"{width} x {height}")
        if isinstance(number, str):  # negative, so that it meets no number of the file
            number = self._names.setdefault(number, -1 - len(self._names))
        given_id = entry["id"] if isinstance(entry["id"], str) or number < 0 else None
        self._images[number] = CocoImage(number, name, width, height, given_id)

    def _take_category(self, entry: Any, index: int) -> None:
        number = self._category(entry, "id")
        if number in self._categories:
            raise BadEntry("a category whose id another one has", f"id {entry['id']}")
        name = str(entry["id"]) if entry.get("name") is None else entry["name"]
        if not isinstance(name, str):
            raise BadEntry("a category whose name is no text", repr(name))
        self._categories[number] = name

    def _category(self, entry: Any, key: str) -> int:
        """Return the id of a category, above int64 in place of a word."""
        number = _id(entry, key)
        return self._words.setdefault(number, _END + len(self._words)) if isinstance(number, str) else number

    def _number_words(self) -> dict[str, int]:
        """Number the categories whose ids are words, after the largest number that the file has."""
        words = sorted(word for word, number in self._words.items() if number in self._categories)
        largest = max((number for number in self._categories if number < _END), default=0)
        numbers = {word: number for number, word in enumerate(words, max(largest, 0) + 1)}
        ids = {self._words[word]: number for word, number in numbers.items()}
        self._categories = {ids.get(number, number): name for number, name in self._categories.items()}
        if ids:
            self._objects = [
                (image, index, replace(one, category_id=ids.get(one.category_id, one.category_id)))
                for image, index, one in self._objects
            ]
        return numbers

    def _take_object(self, entry: Any, index: int) -> None:
        self._has_objects = True
        is_numbered = isinstance(entry, dict) and entry.get("id") is None
        own = -1 - index if is_numbered else _id(entry, "id")
        is_known = own in self._ids
        number = -1 - index if isinstance(own, str) or is_known else own
        image, category = _id(entry, "image_id"), self._category(entry, "category_id")
        segmentation = self._segmentation(entry.get("segmentation"), f"annotations[{index}] (id {number})")
        box = self._box(entry.get("bbox"), segmentation)
        area = entry.get("area")
        areas = finite_numbers([box[2] * box[3] if area is None else area], 1)
        if areas is None:
            raise BadEntry("an annotation whose area is no finite number", shown(area))
        crowd = entry.get("iscrowd") or 0
        crowd = _CROWD_WORDS.get(crowd.casefold(), crowd) if isinstance(crowd, str) else crowd
        if crowd not in (0, 1):
            raise BadEntry("an annotation whose iscrowd is neither 0 nor 1", shown(entry["iscrowd"]))
        one = CocoObject(number, category, box, areas[0], bool(crowd), segmentation)
        if is_known:  # a tool may number the objects of each image from 1
            other_image, _, other = self._objects[self._ids[own]]
            if (other_image, other.category_id, other.box) == (image, category, box):
                raise BadEntry("an annotation that is there twice", f"id {own}")
        self._ids.setdefault(own, len(self._objects))
        self._objects.append((image, index, one))

    def _segmentation(self, shape: Any, location: str) -> Segmentation | None:
        """Return run lengths or the valid polygons, ``None`` if there are neither, as in ``[[]]``."""
        if isinstance(shape, list):
            shape = _flat_polygons(shape)
            polygons = tuple(polygon for polygon in map(_polygon, shape) if polygon is not None)
            if polygons and len(polygons) < len(shape):
                self._bad.add(
                    BadEntry("a polygon of fewer than 3 points; its object has others", ""), location
                )
            if polygons:
                return polygons
        if not shape:
            return None
        segmentation = read_segmentation(shape)
        if segmentation is None:
            problem, remedy = (
                "polygons are not lists of at least 3 points",
                "write [[x1, y1, x2, y2, x3, y3, …], …]",
            )
            if isinstance(shape, dict):
                problem, remedy = "run lengths are not COCO's", "write size [height, width] and counts"
            raise BadEntry(f"an annotation whose {problem}", f"{shown(shape)}; {remedy}")
        return segmentation

    def _box(self, value: Any, segmentation: Segmentation | None) -> tuple[float, float, float, float]:
        """Return the box of an object: that of its polygons if it has none, or none that can be trained."""
        box = finite_numbers(value, 4)
        is_missing = value is None or value == []
        if box is not None and self._boxes == "check":
            is_missing = min(box[2:]) <= 0
        if is_missing and isinstance(segmentation, tuple):
            (left, right), (top, bottom) = _extents(segmentation)
            box = [left, top, right - left, bottom - top]
        if box is None:
            raise BadEntry(
                "an annotation whose bbox is not 4 finite numbers",
                f"{shown(value)}; write [x, y, width, height]",
            )
        x, y, width, height = box
        return x, y, width, height

    def _placed(self) -> dict[int, tuple[CocoObject, ...]]:
        """Return the objects of each image, after the checks that need the whole file."""
        objects: dict[int, list[CocoObject]] = {number: [] for number in self._images}
        for image_id, index, one in self._objects:
            number = self._names.get(image_id) if isinstance(image_id, str) else image_id
            try:
                self._check_place(one, number, image_id)
            except BadEntry as bad:
                self._bad.add(bad, f"annotations[{index}] (id {one.id})")
            else:
                objects[number or 0].append(one)
        return {number: tuple(some) for number, some in objects.items()}

    def _check_place(self, one: CocoObject, number: int | None, image_id: int | str) -> None:
        image = None if number is None else self._images.get(number)
        if image is None:
            raise BadEntry("an annotation of an image that is not in the file", f"image_id {image_id}")
        if one.category_id not in self._categories:
            word = next((word for word, number in self._words.items() if number == one.category_id), None)
            value = one.category_id if word is None else shown(word)
            raise BadEntry("an annotation of a category that is not in the file", f"category_id {value}")
        if isinstance(rle := one.segmentation, dict):
            if rle["size"] != [image.height, image.width]:
                raise BadEntry(
                    "an annotation whose run lengths are for another size than the image's",
                    f"{rle['size']}, the image has {[image.height, image.width]}",
                )
            counts, num_pixels = rle["counts"], image.height * image.width
            if isinstance(counts, list) and sum(counts) != num_pixels:
                raise BadEntry(
                    "an annotation whose run lengths do not fill the image",
                    f"their sum is {sum(counts)}, not {num_pixels}",
                )
        if is_far_outside(one.segmentation, image) or max(map(abs, one.box)) > FAR + max(
            image.width, image.height
        ):
            rule = f"an annotation that ends more than {FAR:,} pixels outside of its image"
            raise BadEntry(rule, f"box {list(one.box)}")
        x, y, width, height = one.box
        is_inside = min(x + width, image.width) > max(x, 0) and min(y + height, image.height) > max(y, 0)
        if self._boxes == "check" and not is_inside:
            raise BadEntry(NO_AREA, f"{list(one.box)} in {image.width} x {image.height}")


def finite_numbers(value: Any, count: int) -> list[float] | None:
    """Return ``value`` if it is a list of ``count`` finite numbers, which may be texts, else ``None``."""
    if not isinstance(value, list) or len(value) != count:
        return None
    if not (types := {*map(type, value)}) <= _NUMBERS:
        return None
    try:
        numbers = value if types == {float} else list(map(float, value))
    except (ValueError, OverflowError):
        return None
    is_finite = math.isfinite(sum(numbers)) or all(map(math.isfinite, numbers))  # sums may overflow
    return numbers if is_finite else None


def shown(value: Any) -> str:
    """Return a JSON value, shortened for a message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _whole(entry: Any, key: str) -> int:
    """Return a whole number, which may be a float or a text."""
    if not isinstance(entry, dict):
        raise BadEntry("an entry that is no object", f"{shown(entry)}; write an object with {key!r}")
    if (number := whole_number(entry.get(key))) is None:
        raise BadEntry(f"an entry whose {key} is no whole number of 63 bits", shown(entry.get(key)))
    return number


def whole_number(value: Any) -> int | None:
    """Return the int64 that a JSON value is, as ``42``, ``42.0`` or ``"42"``; ``None`` for others."""
    if type(value) is int:
        return value if -_END <= value < _END else None
    if isinstance(value, float) and value.is_integer():
        return whole_number(int(value))
    is_number = isinstance(value, str) and value.isascii() and value.isdigit()
    return int(value) if is_number and len(value) <= _MOST_DIGITS else None


def _id(entry: Any, key: str) -> int | str:
    """Return an id: an int64, or as text a word or number that a tool gives."""
    value = entry.get(key) if isinstance(entry, dict) else None
    if (number := whole_number(value)) is not None:
        return number
    if (isinstance(value, str) and value) or type(value) is int:
        return str(value)
    return _whole(entry, key)


def check_pixels(path: Path, boxes: Sequence[Sequence[float]]) -> None:
    """Check that boxes x, y, width, height are in pixels.

    Raises:
        UsageError: all lie between 0 and 1, and not at whole numbers: they are fractions of their image.
    """
    ends = ((x, y, x + width, y + height) for x, y, width, height in boxes)
    if all(-0.01 <= value <= 1.01 for box in ends for value in box) and any(
        not value.is_integer() for box in boxes for value in box
    ):
        raise UsageError(
            f"{path}: all boxes lie between 0 and 1, as fractions of the image ({list(boxes[0])}), but "
            "COCO's are in pixels: multiply x and width by the image's width, y and height by its height, "
            "and polygons and areas likewise"
        )


def check_corners(
    path: Path, shapes: Iterable[tuple[Sequence[float], Segmentation | None, CocoImage]]
) -> None:
    """Check that boxes are x, y, width, height.

    Boxes are taken for two corners if all could be, and a quarter of them cannot be anything else: by their
    polygons, or because they would end outside of their images.

    Args:
        path: the file, for messages.
        shapes: boxes with their polygons, if any, and images.

    Raises:
        UsageError: they are two corners, x0, y0, x1, y1.
    """
    clear: list[tuple[Sequence[float], CocoImage]] = []
    count = 0
    for box, shape, image in shapes:
        count += 1
        x, y, right, bottom = box
        if not (-1 <= x < right <= image.width + 1 and -1 <= y < bottom <= image.height + 1):
            return
        ends = x + right, y + bottom
        if isinstance(shape, tuple):
            xs, ys = _extents(shape)
            corners, as_box = ((xs[1], ys[1]), (right, bottom)), ((xs[1], ys[1]), ends)
            is_clear = _are_near(*corners) and not _are_near(*as_box)
            if _are_near(*as_box) and not _are_near(*corners):
                return
        else:
            is_clear = ends[0] > image.width + 1 or ends[1] > image.height + 1
        if is_clear:
            clear.append((box, image))
    if clear and 4 * len(clear) >= count:
        box, image = clear[0]
        raise UsageError(
            f"{path}: boxes such as {list(box)} in an image of {image.width} x {image.height} are two "
            "corners, but COCO's are [x, y, width, height]: write [x0, y0, x1 - x0, y1 - y0]"
        )


def _are_near(first: Sequence[float], second: Sequence[float]) -> bool:
    """Return whether two points are at most two pixels apart in each direction."""
    return all(abs(a - b) <= 2 for a, b in zip(first, second, strict=True))


def _is_around(one: CocoObject) -> bool:
    """Return whether the box of an object is about that of its polygons."""
    if not isinstance(one.segmentation, tuple):
        return True
    extents = _extents(one.segmentation)
    starts, ends = zip(*extents, strict=True)
    first, last = one.box[:2], (one.box[0] + one.box[2], one.box[1] + one.box[3])
    if _are_near(starts, first) and _are_near(ends, last):
        return True
    sides = zip(starts, ends, first, last, strict=True)
    common = math.prod(max(0.0, min(b, d) - max(a, c)) for a, b, c, d in sides)
    areas = math.prod(end - start for start, end in extents), one.box[2] * one.box[3]
    return common > 0.5 * (sum(areas) - common)


def _extents(polygons: Polygons) -> list[tuple[float, float]]:
    """Return the first and last x, and the first and last y."""
    axes = ([value for polygon in polygons for value in polygon[axis::2]] for axis in (0, 1))
    return [(min(values), max(values)) for values in axes]


def _flat_polygons(shape: list[Any]) -> list[Any]:
    """Return polygons as lists of x0, y0, x1, y1, …, of one or several, of numbers or of points.

    Empty ones are left out. What is of no such form stays as it is.
    """
    if not shape or not isinstance(shape[0], list):
        return [shape] if shape else []
    if len(shape) > 2 and (points := _joined(shape)):
        return [points]
    return [_joined(polygon) or polygon for polygon in shape if polygon]


def _joined(points: Any) -> list[Any] | None:
    """Return the coordinates of points, ``None`` if one is neither [x, y] nor [[x, y]]."""
    joined = []
    for point in points if isinstance(points, list) else [None]:
        if isinstance(point, list) and len(point) == 1:
            point = point[0]
        if not isinstance(point, list) or len(point) != 2 or any(isinstance(one, list) for one in point):
            return None
        joined += point
    return joined


def is_far_outside(shape: Segmentation | None, image: CocoImage) -> bool:
    """Return whether a polygon is so large that drawing it would need all memory."""
    most = FAR + max(image.width, image.height)
    polygons = shape if isinstance(shape, tuple) else ()
    return any(max(polygon) > most or min(polygon) < -FAR for polygon in polygons)


def read_segmentation(value: Any) -> Segmentation | None:
    """Return polygons or run lengths, ``None`` if they are not well formed."""
    return _run_lengths(value) if isinstance(value, dict) else _polygons(value)


def _run_lengths(value: dict[str, Any]) -> Rle | None:
    """Return ``size`` and ``counts`` of run lengths of either form, ``None`` if they are not well formed."""
    size, counts = _as_whole(value.get("size")), _as_whole(value.get("counts"))
    if not isinstance(size, list) or len(size) != 2 or any(type(n) is not int or n < 1 for n in size):
        return None
    if isinstance(counts, list):
        return {"size": size, "counts": counts} if all(type(n) is int and n >= 0 for n in counts) else None
    if isinstance(counts, str) and all("0" <= char <= "o" for char in counts):
        return {"size": size, "counts": counts}
    return None


def _as_whole(values: Any) -> Any:
    """Return the floats of a list that are whole numbers as such."""
    if not isinstance(values, list):
        return values
    return [int(value) if isinstance(value, float) and value.is_integer() else value for value in values]


def _polygons(value: Any) -> Polygons | None:
    """Return polygons as arrays, ``None`` if one of them is none."""
    polygons = [_polygon(one) for one in value] if isinstance(value, list) else [None]
    valid = tuple(polygon for polygon in polygons if polygon is not None)
    return valid if len(valid) == len(polygons) else None


def _polygon(value: Any) -> array[float] | None:
    """Return a polygon as an array, ``None`` if it is not an even number of finite numbers, at least 6."""
    if not isinstance(value, list) or len(value) < _MIN_POLYGON or len(value) % 2:
        return None
    numbers = finite_numbers(value, len(value))
    return None if numbers is None else array("d", numbers)
