"""Reads images from class folders: ``train/CLASS/…`` with ``val/CLASS/…``, or ``CLASS/…`` alone.

The folders may be in a tar, whose images are read in their places (``tars``).

Labels number the classes in the order of their names, as in torchvision's ``ImageFolder``, and images are
recognised by their suffix. Other files are ignored. If there is no folder of validation images, a fraction of
each class is held out.
"""

from __future__ import annotations

import os
import re
import stat
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path, PurePath, PurePosixPath
from typing import NamedTuple, NoReturn

from shoal.data.images.sources import TRAIN, VALIDATION, SourceImage
from shoal.data.images.tars import members
from shoal.errors import ShoalError, UsageError, cannot_read, did_you_mean
from shoal.formatting import without_unseen

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp", ".gif"})
VALIDATION_NAMES = ("val", "valid", "validation", "test")
"""Names of the folder of validation images; the first that exists is used."""
_SPLIT = re.compile(r"(?i)train(ing)?|val(id|idation)?|dev|eval|test(ing)?")
"""Names of folders that are no classes, if all are such names."""
DEFAULT_SHARE = 0.05
_ARCHIVE = re.compile(r"\.(?:tar|tgz|zip|rar|7z)(?:\.|$)")


class _File(NamedTuple):
    name: str  # relative to the folder of the class, with slashes
    size: int
    changed_ns: int
    offset: int = 0


class _Disk:
    """Folders on a disk, where links are followed."""

    links: Sequence[str] = ()

    def folders(self, path: Path) -> list[str]:
        """Return the sorted names of the folders in ``path`` that are not hidden."""
        return _folders(path)

    def files(self, folder: Path) -> list[_File]:
        """Return the images below a class folder, sorted by name."""
        return _files(folder)

    def names(self, root: Path, leading_back: list[Path]) -> Iterator[PurePath]:
        """Yield the paths of all files; links that lead back are appended to ``leading_back``."""
        return _visible(root, leading_back)

    def image(self, path: Path, file: _File, key: str, label: int) -> SourceImage:
        """Return a file below the class folder ``path`` as an image."""
        return SourceImage(key, path / file.name, 0, file.size, label)


class _Tar:
    """Folders in a tar; paths begin with that of the tar. Members whose names begin with a dot are hidden."""

    def __init__(self, path: Path, called: Path) -> None:
        """List the tar ``path``, which messages call ``called``, and leave out a folder around all others."""
        self._path = path
        self.links: list[str] = []
        """Names of links and devices."""
        changed_ns = path.stat().st_mtime_ns
        self._files: dict[str, _File] = {}
        for name, offset, size in members(path, name=called, others=self.links):
            if not any(map(_is_hidden, name.split("/"))):
                self._files[name] = _File(name, size, changed_ns, offset)  # a later one replaces an earlier
        self._sorted = sorted(self._files)
        self.root = path
        while len(names := self.folders(self.root)) == 1 and all(
            "/" in name for name in self._below(self.root)
        ):
            self.root = self.root / names[0]

    def _begin(self, path: Path) -> str:
        return "".join(f"{part}/" for part in path.relative_to(self._path).parts)

    def _below(self, path: Path) -> list[str]:
        """Return the sorted names below ``path``, relative to it."""
        begin = self._begin(path)
        first = bisect_left(self._sorted, begin)
        last = bisect_left(self._sorted, f"{begin[:-1]}0") if begin else len(self._sorted)  # 0 follows /
        return [name[len(begin) :] for name in self._sorted[first:last]]

    def folders(self, path: Path) -> list[str]:
        return sorted({name.partition("/")[0] for name in self._below(path) if "/" in name})

    def files(self, folder: Path) -> list[_File]:
        begin = self._begin(folder)
        names = (name for name in self._below(folder) if PurePosixPath(name).suffix.lower() in SUFFIXES)
        return [self._files[begin + name]._replace(name=name) for name in names]

    def names(self, root: Path, leading_back: list[Path]) -> Iterator[PurePath]:
        return map(PurePosixPath, self._below(root))

    def image(self, path: Path, file: _File, key: str, label: int) -> SourceImage:
        member = self._begin(path) + file.name
        return SourceImage(key, self._path, file.offset, file.size, label, member)


class FolderSource:
    """Class folders as a source (:class:`shoal.data.images.sources.ImageSource`)."""

    def __init__(
        self, path: Path, *, validation: float | None = None, seed: int = 0, name: Path | None = None
    ) -> None:
        """List the class folders of ``path``.

        Args:
            path: the folder, or a tar of it; either may hold one folder around all others.
            validation: fraction of each class that is held out if there is no folder of validation images;
                ``None``: 0.05, 0: none.
            seed: another seed holds out other images.
            name: of the source in its description; default: ``path``.

        Raises:
            UsageError: there are no class folders, they differ between train and validation, or a fraction
                is given for a source that has validation images.
            ShoalError: a folder cannot be read.
        """
        self._seed, self._path = seed, path
        self._called = name = name or path
        self._tree: _Disk | _Tar = _Disk()
        if path.is_dir():
            path = _inside(path)
        else:
            self._tree = tar = _Tar(path, name)
            path = tar.root
        folders = self._tree.folders(path)
        self._roots = {TRAIN: path}
        self._left_alone: list[str] = []
        if TRAIN in folders:
            self._roots = {TRAIN: path / TRAIN}
            if used := next((name for name in VALIDATION_NAMES if name in folders), None):
                self._roots[VALIDATION] = path / used
            self._left_alone = [name for name in folders if name not in (TRAIN, used)]
        elif folders and all(map(_SPLIT.fullmatch, folders)):
            raise UsageError(
                f"{path} has {', '.join(folders)}, but no train; name the training images train, "
                "those for validation val"
            )
        if validation is not None and VALIDATION in self._roots:
            raise UsageError(
                f"--validation {validation} holds out training images, but {self._roots[VALIDATION]} has "
                "validation images; leave the option out, or move that folder away"
            )
        share = DEFAULT_SHARE if validation is None else validation
        if not 0 <= share < 1:
            raise UsageError(f"validation={share} must be at least 0 and below 1")
        self._share = 0.0 if VALIDATION in self._roots else share
        self.classes = tuple(self._tree.folders(self._roots[TRAIN]))
        self._check_classes()
        self.splits = (TRAIN, VALIDATION) if self._share or VALIDATION in self._roots else (TRAIN,)
        held_out = f", {self._share:g} of each class held out" if self._share else ""
        self.description = f"{name}, {len(self.classes)} classes{held_out}"

    @property
    def remarks(self) -> tuple[str, ...]:
        lines = []
        if self._left_alone:
            used, others = self._roots.get(VALIDATION), ", ".join(self._left_alone)
            validation = f"those of {used.name}" if used else "held out" if self._share else "none"
            lines.append(f"validation images are {validation}; {others} is left alone")
        folded: dict[str, list[str]] = {}
        for name in self.classes:
            folded.setdefault(name.casefold(), []).append(name)
        lines += [
            f"the classes {' and '.join(names)} differ in capitals alone; join their folders if they are one"
            for names in folded.values()
            if len(names) > 1
        ]
        leading_back: list[Path] = []
        each = [
            (root, path) for root in self._roots.values() for path in self._tree.names(root, leading_back)
        ]
        loose = [
            path.name
            for root, path in each
            if path.parent in (root, PurePosixPath()) and path.suffix.lower() in SUFFIXES
        ]
        if loose:
            lines.append(f"images beside the class folders are left alone: {_listed(loose)}")
        suffixes = (path.suffix.lower() for _, path in each)
        counts = Counter(suffix or "without suffix" for suffix in suffixes if suffix not in SUFFIXES)
        if counts:
            listed = ", ".join(f"{count:,} {suffix}" for suffix, count in sorted(counts.items())[:8])
            lines.append(f"files that are no images by their suffix are left alone: {listed}")
        if self._tree.links:
            lines.append(f"links and devices in the tar are left alone: {self._links()}")
        if leading_back:
            listed = ", ".join(map(str, leading_back[:3])) + " …" * (len(leading_back) > 3)
            lines.append(
                f"links to folders that are read already, or that lead back, are left alone: {listed}"
            )
        return tuple(lines)

    def state(self) -> str:
        digest = blake2b(digest_size=16)
        for root in self._roots.values():
            for name in self.classes:
                for file in self._tree.files(root / name):
                    line = f"{root.name}/{name}/{file.name}\0{file.size}\0{file.changed_ns}\n"
                    digest.update(line.encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    def images(self, split: str) -> Iterator[SourceImage]:
        root = self._roots.get(split, self._roots[TRAIN])
        for label, name in enumerate(self.classes):
            files = self._tree.files(root / name)
            keys = unique_keys([f"{name}/{file.name}" for file in files])
            chosen: Sequence[int] = range(len(files))
            if self._share:
                held_out = set(self._held_out(keys))
                chosen = [at for at in chosen if (at in held_out) == (split == VALIDATION)]
            for at in chosen:
                yield self._tree.image(root / name, files[at], keys[at], label)

    def _held_out(self, keys: Sequence[str]) -> list[int]:
        """Return the indices of a class's validation images, by a hash; at least one if it has two images."""
        count = min(max(round(len(keys) * self._share), 1), len(keys) - 1)
        salt = (self._seed % (1 << 64)).to_bytes(8, "little")
        ranks = [
            (blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8, salt=salt).digest(), at)
            for at, key in enumerate(keys)
        ]
        return [at for _, at in sorted(ranks)[: max(count, 0)]]

    def _check_classes(self) -> None:
        train = self._roots[TRAIN]
        if not self.classes:
            raise UsageError(
                f"{self._called / train.relative_to(self._path)} has no class folders; images belong in "
                "CLASS/, or for validation images of their own in train/CLASS/ and val/CLASS/."
                + self._content(train)
            )
        first_of: dict[str, str] = {}
        for name in self.classes:
            if (first := first_of.setdefault(without_unseen(name), name)) != name:
                raise UsageError(
                    f"{self._called}: the class folders {first!a} and {name!a} differ in blanks or in the "
                    "form of a letter; join them"
                )
        if VALIDATION not in self._roots:
            return
        other = self._roots[VALIDATION]
        names = self._tree.folders(other)
        extra = [name for name in names if name not in self.classes]
        missing = [name for name in self.classes if name not in names]
        if extra:
            raise UsageError(
                f"{train} has no class {_listed(extra)}, which {other} has; both must have the same class "
                f"folders.{did_you_mean(extra[0], missing or self.classes)}"
            )
        if missing:
            raise UsageError(
                f"{other} has no class {_listed(missing)}, which {train} has; both must have the same class "
                "folders: an empty one if there are no images for it"
            )

    def _links(self) -> str:
        """Return the number of links and devices of the tar, the first, and the remedy."""
        links = self._tree.links
        return (
            f"{len(links):,} ({_listed(links)}); pack the files that they lead to: tar --dereference "
            "--hard-dereference"
        )

    def _content(self, root: Path) -> str:
        """Return in words what is below a folder without class folders, with the remedy."""
        names = [path.name for path in self._tree.names(root, [])]
        kinds = {
            " Their names have a backslash for each slash, as on Windows; pack or copy them again": [
                name for name in names if "\\" in name
            ],
            " There are archives; unpack each into a folder": [
                name for name in names if _ARCHIVE.search(name.lower())
            ],
            " There are images beside": [
                name for name in names if PurePosixPath(name).suffix.lower() in SUFFIXES
            ],
        }
        words = next(
            (f"{words}: {_listed(some)}." for words, some in kinds.items() if some), " It has no image."
        )
        return words + (f" Links and devices are left alone: {self._links()}" if self._tree.links else "")


def unique_keys(names: Sequence[str]) -> list[str]:
    """Return a key for each file name: without suffix, and without dots after the last slash.

    Of equal keys (``1.jpg`` and ``1.png``), the later ones get ``~2``, ``~3``, ….
    """
    keys: list[str] = []
    taken: set[str] = set()
    for name in names:
        path = PurePosixPath(name)
        key = plain = str(path.with_name(path.stem.replace(".", "_")))
        number = 2
        while key in taken:
            key = f"{plain}~{number}"
            number += 1
        taken.add(key)
        keys.append(key)
    return keys


def _is_hidden(name: str) -> bool:
    """Return whether a file or folder is left out: those with a dot, and what zips of macOS have beside."""
    return name.startswith(".") or name == "__MACOSX"


def _folders(path: Path) -> list[str]:
    """Return the sorted names of the folders in ``path`` that are not hidden."""
    try:
        with os.scandir(path) as entries:
            return sorted(e.name for e in entries if e.is_dir() and not _is_hidden(e.name))
    except OSError as error:
        _unreadable(error)


def _inside(path: Path) -> Path:
    """Return the one folder around all others that ``path`` may hold, else ``path``."""
    while len(names := _folders(path)) == 1 and not _SPLIT.fullmatch(names[0]):
        inner = path / names[0]
        has_images = any(file.suffix.lower() in SUFFIXES for file in inner.iterdir())
        if has_images or inner.is_symlink() or not _folders(inner):
            break
        path = inner
    return path


def _files(folder: Path) -> list[_File]:
    """Return the images below a class folder, sorted by name."""
    files = []
    try:
        for path in _visible(folder):
            if path.suffix.lower() in SUFFIXES:
                facts = path.stat()
                if not stat.S_ISREG(facts.st_mode):
                    raise UsageError(f"{path} has an image's name but is no file: remove or rename it")
                files.append(_File(path.relative_to(folder).as_posix(), facts.st_size, facts.st_mtime_ns))
    except OSError as error:
        _unreadable(error)
    return sorted(files)


def _visible(folder: Path, leading_back: list[Path] | None = None) -> Iterator[Path]:
    """Yield the files below a folder that are not hidden, nor in a hidden folder.

    Links are followed, but into no folder twice, nor into one around ``folder``: such links have no end. They
    are appended to ``leading_back``.
    """
    visited = {_identity(one) for one in (folder, *folder.resolve().parents)}
    for root, folders, names in os.walk(folder, onerror=_unreadable, followlinks=True):
        visible, folders[:] = sorted(name for name in folders if not _is_hidden(name)), []
        for path in (Path(root, name) for name in visible):
            if (identity := _identity(path)) not in visited:
                visited.add(identity)
                folders.append(path.name)
            elif leading_back is not None:
                leading_back.append(path)
        yield from (Path(root, name) for name in names if not _is_hidden(name))


def _identity(folder: Path) -> tuple[int, int]:
    facts = folder.stat()
    return facts.st_dev, facts.st_ino


def _unreadable(error: OSError) -> NoReturn:
    raise ShoalError(cannot_read(error.filename, error)) from error


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:4])) + f" (and {len(names) - 4} more)" * (len(names) > 4)
