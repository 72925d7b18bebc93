"""Which class each validation image of ImageNet has, from the files in which that is published.

The tar of validation images says nothing of classes. ``ILSVRC2012_validation_ground_truth.txt`` of the
development kit has a number a line; ``meta.mat`` beside it says which synset a number means. Those numbers
are not the labels, which follow the sorted synsets. Other lists name the synset itself in each line.
"""

from __future__ import annotations

import gzip
import io
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from shoal.data.files import MAX_WHOLE_BYTES, read_whole
from shoal.data.images.matlab import read_synsets, read_synsets_file
from shoal.errors import ShoalError, UsageError, did_you_mean

DEVKIT = "ILSVRC2012_devkit_t12"
TRUTH = "ILSVRC2012_validation_ground_truth.txt"
NAMED_TRUTH = "imagenet_2012_validation_synset_labels.txt"
META = "meta.mat"


@dataclass(frozen=True, kw_only=True)
class GroundTruth:
    """The lines of a ground truth file, and the synset of each number if numbers are in it."""

    name: str
    lines: tuple[str, ...]
    synsets: dict[int, str] | None
    synsets_name: str

    def labels(self, classes: tuple[str, ...], num_images: int) -> list[int]:
        """Return the label of each validation image in the order of their names.

        Raises:
            UsageError: the number of lines is not that of the images, a line names no class, or there are
                numbers and nothing that says what they mean.
        """
        if len(self.lines) != num_images:
            raise UsageError(
                f"{self.name} has {len(self.lines):,} lines for {num_images:,} validation images; there must "
                "be one for each"
            )
        label_of = {name: label for label, name in enumerate(classes)}
        labels = []
        for number, line in enumerate(self.lines, 1):
            synset = self._synset(line, number) if line.isdecimal() else line
            if synset not in label_of:
                raise UsageError(
                    f"{self.name}, line {number}: {line!r} is not a class of the training images."
                    + did_you_mean(synset, classes)
                )
            labels.append(label_of[synset])
        return labels

    def _synset(self, line: str, number: int) -> str:
        if self.synsets is None:
            raise UsageError(
                f"{self.name} has numbers, and what they mean is missing: put {META} of the development kit "
                f"({DEVKIT}.tar.gz) beside the tars, or give it as --synsets"
            )
        if int(line) not in self.synsets:
            raise UsageError(f"{self.name}, line {number}: {self.synsets_name} has no number {line}")
        return self.synsets[int(line)]


def find_ground_truth(folder: Path, truth: Path | None = None, synsets: Path | None = None) -> GroundTruth:
    """Read the ground truth: the given files, else what lies in ``folder``.

    That is the development kit, packed (``ILSVRC2012_devkit_t12.tar.gz``) or not, or its files beside the
    tars, or ``imagenet_2012_validation_synset_labels.txt``, which names synsets.

    Raises:
        UsageError: there is none, or a given file does not exist.
        ShoalError: a file cannot be read, or is too large to be one of these.
    """
    places = (folder, folder / "data", folder / DEVKIT / "data")
    packed = folder / f"{DEVKIT}.tar.gz"
    truth = truth or _first([*(place / TRUTH for place in places), folder / NAMED_TRUTH])
    found = synsets or _first([place / META for place in places])
    if truth is not None:
        name, text = str(truth), _read(truth)
    elif packed.is_file():
        name, text = f"{packed}: {TRUTH}", _unpack(packed, TRUTH)
    else:
        raise UsageError(
            f"{folder} has no ground truth of the validation images; put {packed.name} of the ImageNet site "
            f"there, or {NAMED_TRUTH}, or give a file of one line an image as --ground-truth"
        )
    meanings, where = None, ""
    if found is not None:
        where = str(found)
        meanings = read_synsets_file(found) if found.suffix == ".mat" else _text_synsets(found)
    elif packed.is_file():
        where = f"{packed}: {META}"
        meanings = read_synsets(_unpack(packed, META), where)
    return GroundTruth(name=name, lines=_first_words(text), synsets=meanings, synsets_name=where)


def _text_synsets(path: Path) -> dict[int, str]:
    """Return the synset of each line, counted from 1 as the development kit does.

    Raises:
        UsageError: the list is sorted, so its lines are labels and not the numbers of the development kit.
    """
    lines = _first_words(_read(path))
    if list(lines) == sorted(lines):
        raise UsageError(
            f"{path} lists the synsets in sorted order, which is not that of the development kit's numbers; "
            f"give its {META}, or a ground truth that names synsets"
        )
    return dict(enumerate(lines, 1))


def _first_words(text: bytes) -> tuple[str, ...]:
    lines = (line.split() for line in text.decode("utf-8", "replace").splitlines())
    return tuple(words[0] for words in lines if words)


def _first(paths: list[Path]) -> Path | None:
    return next((path for path in paths if path.is_file()), None)


def _read(path: Path) -> bytes:
    try:
        return read_whole(path)
    except FileNotFoundError:
        raise UsageError(f"{path}: there is no such file") from None
    except OSError as error:
        raise ShoalError(f"{path} cannot be read: {error.strerror}") from error


def _unpack(path: Path, name: str) -> bytes:
    """Return the bytes of the member of a packed development kit whose last part is ``name``."""
    try:
        # All is unpacked first, in a known amount: tarfile reads extended headers of any size.
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
