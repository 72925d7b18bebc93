"""ImageNet as it is downloaded as a source: a tar of a tar for each class, and a tar of validation images.

Nothing is unpacked: images are listed by their places in ``ILSVRC2012_img_train.tar`` and
``ILSVRC2012_img_val.tar`` and read there. Labels number the synsets in sorted order, as everybody's do.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from hashlib import blake2b
from pathlib import Path, PurePosixPath

from shoal.data.images.ground_truth import find_ground_truth
from shoal.data.images.sources import TRAIN, VALIDATION, SourceImage
from shoal.data.images.tar_members import Member, members
from shoal.errors import ShoalError, UsageError

TRAIN_TAR = "ILSVRC2012_img_train.tar"
VALIDATION_TAR = "ILSVRC2012_img_val.tar"

_THREADS = 16
"""Tars that are listed at once: each image's header is a read of its own, slow where a disk is far away."""


class ImageNetSource:
    """The two tars of ImageNet; see the module's docstring."""

    splits = (TRAIN, VALIDATION)

    def __init__(
        self, folder: Path, *, ground_truth: Path | None = None, synsets: Path | None = None
    ) -> None:
        """Look at the outer tar and at the ground truth.

        Args:
            folder: where both tars lie, and the development kit.
            ground_truth: a file of one synset or number a line; ``None`` finds it in ``folder``.
            synsets: ``meta.mat``, or the synsets in the order of the numbers.

        Raises:
            UsageError: a tar, the ground truth or what its numbers mean is missing; the tar has no classes.
            ShoalError: a file cannot be read or is damaged.
        """
        self._train, self._validation = folder / TRAIN_TAR, folder / VALIDATION_TAR
        for path in (self._train, self._validation):
            if not path.is_file():
                raise UsageError(f"{path}: there is no such file, and ImageNet is prepared from both tars")
        self._truth = find_ground_truth(folder, ground_truth, synsets)
        self._tars = {
            PurePosixPath(member.name).stem: member
            for member in members(self._train)
            if member.name.endswith(".tar")
        }
        if not self._tars:
            raise UsageError(f"{self._train} has no tars of classes (n01440764.tar, …); is it ImageNet's?")
        self.classes = tuple(sorted(self._tars))
        self._labels = self._truth.labels(self.classes, len(self._validation_members))

    @property
    def description(self) -> str:
        return f"ImageNet in {self._train.parent}, {len(self.classes)} classes"

    @property
    def remarks(self) -> tuple[str, ...]:
        return ()

    def state(self) -> str:
        digest = blake2b(digest_size=16)
        for path in (self._train, self._validation):
            facts = path.stat()
            digest.update(f"{path.name}\0{facts.st_size}\0{facts.st_mtime_ns}\n".encode())
        digest.update(repr(self._labels).encode())
        return digest.hexdigest()

    def images(self, split: str) -> Iterator[SourceImage]:
        if split == VALIDATION:
            for member, label in zip(self._validation_members, self._labels, strict=True):
                yield _image(self._validation, member, label, member.name)
            return
        tars = [self._tars[name] for name in self.classes]
        with ThreadPoolExecutor(_THREADS) as pool:
            for first in range(0, len(tars), _THREADS):  # no more of them at once: memory
                some = tars[first : first + _THREADS]
                listed = pool.map(lambda tar: list(members(self._train, tar)), some)
                for label, (tar, found) in enumerate(zip(some, listed, strict=True), first):
                    for member in found:
                        yield _image(self._train, member, label, f"{tar.name}: {member.name}")

    @cached_property
    def _validation_members(self) -> list[Member]:
        found = sorted(members(self._validation))
        if not found:
            raise ShoalError(f"{self._validation} holds no images; get it again")
        return found


def _image(path: Path, member: Member, label: int, name: str) -> SourceImage:
    key = PurePosixPath(member.name).stem.replace(".", "_")
    return SourceImage(key, path, member.offset, member.size, label, name)
