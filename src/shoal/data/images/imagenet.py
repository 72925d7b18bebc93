"""Reads ImageNet (ILSVRC2012) from the tars that are downloaded, without unpacking them.

``ILSVRC2012_img_train.tar`` has a tar per class, ``ILSVRC2012_img_val.tar`` all validation images. Images are
listed by their offsets in these files and read from there. Labels number the synsets in sorted order, as
usual.
"""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path, PurePosixPath

import numpy as np

from shoal.atomic_io import MAX_WHOLE_BYTES, read_whole
from shoal.data.images.sources import TRAIN, VALIDATION, SourceImage
from shoal.data.images.tars import TarMember, members
from shoal.errors import ShoalError, UsageError, cannot_read, did_you_mean

_MAT_HEADER_BYTES = 128
_MATRIX, _COMPRESSED = 14, 15  # types of elements
_STRUCT, _CHAR = 2, 4  # classes of matrices
_MAT_TYPES = {1: "<i1", 2: "<u1", 3: "<i2", 4: "<u2", 5: "<i4", 6: "<u4", 7: "<f4", 9: "<f8", 12: "<i8"}
_MAT_TYPES |= {13: "<u8", 16: "<u1", 17: "<u2"}  # UTF-8, UTF-16
_MAT_ERRORS = (ValueError, LookupError, TypeError, OverflowError, StopIteration, struct.error, zlib.error)


def read_synsets(data: bytes, source: str) -> dict[int, str]:
    """Parse ``meta.mat`` of the development kit (a MAT file of level 5): ILSVRC2012_ID to WordNet id.

    Raises:
        ShoalError: it is not such a file; ``source`` names it.
    """
    try:
        if data[126:128] != b"IM":
            raise ValueError("it is not a little-endian MAT file of level 5")
        for kind, body in _elements(data[_MAT_HEADER_BYTES:]):
            if kind == _COMPRESSED:
                kind, body = next(_elements(_decompress(body)))
            if kind == _MATRIX and (rows := _structures(body)):
                return {int(row["ILSVRC2012_ID"]): str(row["WNID"]) for row in rows}  # type: ignore[arg-type]
        raise ValueError("it has no array of structures")
    except _MAT_ERRORS as error:
        raise ShoalError(
            f"{source} is not the list of synsets of ImageNet's development kit ({error}); get it again, or "
            "give a text file of the synsets in its order as --synsets"
        ) from None


def _decompress(data: bytes) -> bytes:
    stream = zlib.decompressobj()
    content = stream.decompress(data, MAX_WHOLE_BYTES)
    if not stream.eof:
        raise ValueError(f"an element was cut short or unpacks to more than {MAX_WHOLE_BYTES:,} bytes")
    return content


def _elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (type, data) of consecutive elements."""
    at = 0
    while at + 8 <= len(data):
        kind, size = struct.unpack_from("<II", data, at)
        if kind >> 16:  # up to four bytes are stored in the tag itself
            kind, size, begin, following = kind & 0xFFFF, kind >> 16, at + 4, at + 8
        else:
            begin = at + 8
            following = begin + size if kind == _COMPRESSED else begin + -(-size // 8) * 8
        if begin + size > len(data):
            raise ValueError(f"an element of {size} bytes at byte {at} goes beyond the end")
        yield kind, data[begin : begin + size]
        at = following


def _structures(matrix: bytes) -> list[dict[str, str | float | None]]:
    """Return the rows of a matrix of structures; none for another matrix."""
    flags, _, _, *parts = (body for _, body in _elements(matrix))  # between them: dimensions, name
    if flags[0] != _STRUCT:
        return []
    width, names, cells = int.from_bytes(parts[0], "little"), parts[1], list(map(_value, parts[2:]))
    fields = [names[at : at + width].partition(b"\0")[0].decode() for at in range(0, len(names), width)]
    starts = range(0, len(cells), len(fields))
    return [dict(zip(fields, cells[at : at + len(fields)], strict=True)) for at in starts]


def _value(matrix: bytes) -> str | float | None:
    """Return a string or the first number of a matrix; ``None`` if it is empty."""
    (_, flags), _, _, *parts = list(_elements(matrix))
    if not parts:
        return None
    kind, data = parts[0]
    numbers = np.frombuffer(data, dtype=_MAT_TYPES[kind])
    if flags[0] == _CHAR:
        return "".join(map(chr, numbers.tolist()))
    return float(numbers[0]) if len(numbers) else None


DEVKIT = "ILSVRC2012_devkit_t12"
TRUTH = "ILSVRC2012_validation_ground_truth.txt"
NAMED_TRUTH = "imagenet_2012_validation_synset_labels.txt"
META = "meta.mat"


def read_ground_truth(
    folder: Path, truth: Path | None = None, synsets: Path | None = None
) -> tuple[str, list[tuple[str, str]]]:
    """Return the name of the ground truth and its lines, each with the synset that it means.

    It is in the given files, or in ``folder``.

    There it is the development kit, packed (``ILSVRC2012_devkit_t12.tar.gz``) or not, or its files beside the
    tars, or ``imagenet_2012_validation_synset_labels.txt``, which names synsets.

    Raises:
        UsageError: there is none, a given file does not exist, or lines are numbers and the list of synsets
            is missing or does not have them.
        ShoalError: a file cannot be read, or is too large to be one of these.
    """
    folders = (folder, folder / "data", folder / DEVKIT / "data")
    packed = folder / f"{DEVKIT}.tar.gz"
    truth_file = _find(truth, [*(directory / TRUTH for directory in folders), folder / NAMED_TRUTH], packed)
    if truth_file is None:
        raise UsageError(
            f"{folder} has no ground truth of the validation images; put {packed.name} of the ImageNet site "
            f"there, or {NAMED_TRUTH}, or give a file of one line an image as --ground-truth"
        )
    source, meanings = "", {}
    if meta := _find(synsets, [directory / META for directory in folders], packed):
        source, data = meta
        meanings = read_synsets(data, source) if source.endswith(".mat") else _text_synsets(data, source)
    name, data = truth_file
    lines = []
    for number, line in enumerate(_first_words(data), 1):
        if line.isdecimal() and not meanings:
            raise UsageError(
                f"{name} has numbers, and what they mean is missing: put {META} of the development kit "
                f"({DEVKIT}.tar.gz) beside the tars, or give it as --synsets"
            )
        if line.isdecimal() and int(line) not in meanings:
            raise UsageError(f"{name}, line {number}: {source} has no number {line}")
        lines.append((line, meanings[int(line)] if line.isdecimal() else line))
    return name, lines


def _find(chosen: Path | None, files: list[Path], packed: Path) -> tuple[str, bytes] | None:
    """Return name and bytes of a given file, else the first of ``files``, else of the packed kit."""
    path = chosen or next((file for file in files if file.is_file()), None)
    if path is not None:
        return str(path), _read(path)
    if packed.is_file():
        return f"{packed}: {files[0].name}", _unpack(packed, files[0].name)
    return None


def _text_synsets(data: bytes, source: str) -> dict[int, str]:
    """Return the synset of each line, numbered from 1 as in the development kit.

    Raises:
        UsageError: the list is sorted, so its line numbers are labels and not those of the development kit.
    """
    lines = _first_words(data)
    if lines == sorted(lines):
        raise UsageError(
            f"{source} lists the synsets in sorted order, which is not that of the development kit's "
            f"numbers; give its {META}, or a ground truth that names synsets"
        )
    return dict(enumerate(lines, 1))


def _first_words(text: bytes) -> list[str]:
    return [words[0] for line in text.decode("utf-8", "replace").splitlines() if (words := line.split())]


def _read(path: Path) -> bytes:
    try:
        return read_whole(path)
    except FileNotFoundError:
        raise UsageError(f"{path}: there is no such file") from None
    except OSError as error:
        raise ShoalError(cannot_read(path, error)) from error


def _unpack(path: Path, name: str) -> bytes:
    """Return the member of a packed development kit whose path ends in ``name``."""
    try:
        # All is decompressed first, up to a limit: tarfile reads extended headers of any size.
        with gzip.open(path) as packed:
            data = packed.read(MAX_WHOLE_BYTES + 1)
        if len(data) > MAX_WHOLE_BYTES:
            raise ShoalError(
                f"{path} unpacks to more than {MAX_WHOLE_BYTES:,} bytes; is it the development kit of "
                "ILSVRC2012?"
            )
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
            for member in tar:
                if Path(member.name).name == name and (file := tar.extractfile(member)) is not None:
                    return file.read()
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        raise ShoalError(f"{path} cannot be read: {error}") from error
    raise ShoalError(f"{path} has no {name}; is it the development kit of ILSVRC2012?")


TRAIN_TAR = "ILSVRC2012_img_train.tar"
VALIDATION_TAR = "ILSVRC2012_img_val.tar"

_THREADS = 16
"""Tars that are listed concurrently: each header is a read of its own, slow on network storage."""


class ImageNetSource:
    """The two tars of ImageNet as a source (:class:`shoal.data.images.sources.ImageSource`)."""

    splits = (TRAIN, VALIDATION)
    remarks: tuple[str, ...] = ()

    def __init__(
        self,
        folder: Path,
        *,
        ground_truth: Path | None = None,
        synsets: Path | None = None,
        tars: tuple[Path, Path] | None = None,
    ) -> None:
        """List the classes and read the ground truth.

        Args:
            folder: of both tars and the development kit.
            tars: those of training and of validation images, where they are not in ``folder``.
            ground_truth: a file of one synset or number per line; ``None`` finds it in ``folder``.
            synsets: ``meta.mat``, or a text file of the synsets in the order of the numbers.

        Raises:
            UsageError: a tar, the ground truth or the list of synsets is missing; the tar has no classes.
            ShoalError: a file cannot be read or is damaged.
        """
        self._train, self._validation = tars or (folder / TRAIN_TAR, folder / VALIDATION_TAR)
        for path in (self._train, self._validation):
            if not path.is_file():
                raise UsageError(f"{path}: there is no such file, and ImageNet is prepared from both tars")
        name, truth = read_ground_truth(folder, ground_truth, synsets)
        self._tars = {
            PurePosixPath(member.name).stem: member
            for member in members(self._train)
            if member.name.endswith(".tar")
        }
        if not self._tars:
            raise UsageError(f"{self._train} has no tars of classes (n01440764.tar, …); is it ImageNet's?")
        self.classes = tuple(sorted(self._tars))
        self.description = f"ImageNet in {folder}, {len(self.classes)} classes"
        self._members = sorted(members(self._validation))
        if not self._members:
            raise ShoalError(f"{self._validation} holds no images; get it again")
        self._labels = self._labels_of(name, truth)

    def state(self) -> str:
        digest = blake2b(digest_size=16)
        for path in (self._train, self._validation):
            facts = path.stat()
            digest.update(f"{path.name}\0{facts.st_size}\0{facts.st_mtime_ns}\n".encode())
        digest.update(repr(self._labels).encode())
        return digest.hexdigest()

    def images(self, split: str) -> Iterator[SourceImage]:
        if split == VALIDATION:
            for member, label in zip(self._members, self._labels, strict=True):
                yield _image(self._validation, member, label, member.name)
            return
        tars = [self._tars[name] for name in self.classes]
        with ThreadPoolExecutor(_THREADS) as pool:
            for first in range(0, len(tars), _THREADS):  # bounds memory
                some = tars[first : first + _THREADS]
                listed = pool.map(lambda tar: list(members(self._train, tar)), some)
                for label, (tar, of_class) in enumerate(zip(some, listed, strict=True), first):
                    for member in of_class:
                        yield _image(self._train, member, label, f"{tar.name}: {member.name}")

    def _labels_of(self, name: str, truth: list[tuple[str, str]]) -> list[int]:
        """Return the label of each validation image, in the order of their names."""
        if len(truth) != len(self._members):
            raise UsageError(
                f"{name} has {len(truth):,} lines for {len(self._members):,} validation images; there must "
                "be one for each"
            )
        label_of = {synset: label for label, synset in enumerate(self.classes)}
        for number, (line, synset) in enumerate(truth, 1):
            if synset not in label_of:
                raise UsageError(
                    f"{name}, line {number}: {line!r} is not a class of the training images."
                    + did_you_mean(synset, self.classes)
                )
        return [label_of[synset] for _, synset in truth]


def _image(path: Path, member: TarMember, label: int, name: str) -> SourceImage:
    key = PurePosixPath(member.name).stem.replace(".", "_")
    return SourceImage(key, path, member.offset, member.size, label, name)
