"""Writes image shards, and reads any image of a split by its number.

A shard ``NAME`` is two files. ``NAME.tar`` has WebDataset's layout: an image is two members, ``KEY.jpg`` (or
``.png``, ``.webp``) and
``KEY.cls`` (its label in ASCII), or ``KEY.json`` for its annotations. Members have no owner, time or mode, so
the same images give the same bytes. Instead of it there may be ``NAME.tfrecord``, for TensorFlow
(:mod:`shoal.data.tfrecord`). ``NAME.index`` is nothing but records of ``RECORD``, one per image, in the order
of that file. The reader maps or fetches the bytes ``[offset, offset + size)`` and never parses the tar or the
TFRecord.

Images are numbered through the shards in the order of the manifest. Opening a split checks the sizes of the
files, the checksum of each index, and every offset and label in it; of local shards also that the first and
the last image have the header that the index implies, which those of another preparation do not.
"""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Iterable, Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from shoal.atomic_io import AtomicFile
from shoal.data import tfrecord
from shoal.data.cache import CacheConfig, CacheCounts, Prefetch, ShardCache
from shoal.data.images.manifest import INDEX, TAR, ImageManifest, ImageShardInfo
from shoal.data.manifest import TFRECORD
from shoal.data.storage import Bytes, LocalStorage, open_storage
from shoal.errors import ShoalError, UsageError

RECORD = np.dtype(
    [
        ("offset", "<i8"),
        ("size", "<i4"),
        ("label", "<i4"),
        ("width", "<i4"),
        ("height", "<i4"),
        ("extra_offset", "<i8"),
        ("extra_size", "<i4"),
        ("head", "<i4"),
    ]
)
"""``offset`` and ``size``: the bytes of the image in the file; ``width`` and ``height`` in pixels.

``label`` is -1 if there is none. ``extra_*`` are the image's annotations (``.json``) if it has some; else, in
a tar, its label (``.cls``). ``head`` counts the bytes of a TFRecord's record before the image; 0 in a tar."""

Records = npt.NDArray[np.void]
Int64Array = npt.NDArray[np.int64]

_BLOCK = tarfile.BLOCKSIZE
"""Two blocks of zeros end a tar, which is padded to a whole number of records of 20 blocks."""


class ImageShardWriter:
    """Writes one shard. Images are streamed to the file; only their records (40 bytes each) stay in memory.

    Use it as a context manager: leaving the block without ``finish`` (an exception) removes the temporary
    files.
    """

    def __init__(self, directory: Path, name: str, container: Literal["tar", "tfrecord"] = "tar") -> None:
        """Start the shard ``name`` in ``directory``.

        Raises:
            ShoalError: the file cannot be created.
        """
        self.num_images = 0
        self._directory = directory
        self._name = name
        self._records = bytearray()
        self._container = container
        self._file = AtomicFile(directory / f"{name}.{container}")

    def add(
        self,
        key: str,
        data: bytes,
        *,
        width: int,
        height: int,
        suffix: str = "jpg",
        label: int = -1,
        annotations: bytes | None = None,
    ) -> None:
        """Append an image.

        Args:
            key: its name in the file; without a dot after its last slash, where WebDataset's suffix begins.
            data: the bytes of the file.
            width, height: in pixels.
            suffix: of its format.
            label: its class, or -1.
            annotations: JSON to store as ``KEY.json``, or ``None``.

        Raises:
            ShoalError: the disk is full.
        """
        name, head, extra = f"{key}.{suffix}", 0, (0, 0)
        if self._container == TFRECORD:
            begin = self._file.num_bytes
            made, head, extra_at = tfrecord.image_record(
                name,
                data,
                label=label if label >= 0 else None,
                width=width,
                height=height,
                annotations=annotations,
            )
            self._file.write(made)
            offset = begin + head
            if annotations is not None:
                extra = begin + extra_at, len(annotations)
        else:
            offset = self._member(name, data)
            if label >= 0:
                text = str(label).encode()
                extra = self._member(f"{key}.cls", text), len(text)
            if annotations is not None:
                extra = self._member(f"{key}.json", annotations), len(annotations)
        record = (offset, len(data), label, width, height, *extra, head)
        self._records += np.array([record], dtype=RECORD).tobytes()
        self.num_images += 1

    def finish(self) -> ImageShardInfo:
        """Write the index, force both files to the disk and give them their names.

        Raises:
            ShoalError: the disk is full; the temporaries are gone, finished shards untouched.
        """
        if self._container == TAR:
            fill = -(self._file.num_bytes + 2 * _BLOCK) % tarfile.RECORDSIZE
            self._file.write(bytes(2 * _BLOCK + fill))
        with self._file, AtomicFile(self._directory / f"{self._name}.{INDEX}") as index:
            index.write(bytes(self._records))
            files = {self._container: self._file.close(), INDEX: index.close()}
            # The index comes last: a shard with an index is complete.
            self._file.publish()
            index.publish()
        return ImageShardInfo(name=self._name, num_images=self.num_images, files=files)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.discard()

    def _member(self, name: str, data: bytes) -> int:
        """Append a member; return the offset of its bytes."""
        member = tarfile.TarInfo(name)
        member.size = len(data)
        header = member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")
        offset = self._file.num_bytes + len(header)
        self._file.write(header + data + bytes(-len(data) % _BLOCK))
        return offset


class ImageShards:
    """Reads the encoded images of one split by their number, from local shards or from S3. Thread-safe.

    Only location and settings are pickled, so a loader process opens the shards itself.

    Args:
        location: folder written by ``shoal prepare images``, or ``s3://bucket/prefix``.
        split: ``"train"`` or ``"validation"``.
        verify: ``"sizes"`` checks file sizes, indexes, and the first and last image of each shard;
            ``"checksums"`` also reads every byte once, of local shards only.
        cache: keeps local copies of shards, each compared with its checksum. Default: none.

    Raises:
        UsageError: no manifest, no such split, no access, or no cache folder.
        ShoalError: a file is missing, truncated, damaged, or of another preparation.

    Example (``runs/images`` was written by ``shoal prepare images``):

        >>> shards = ImageShards("runs/images", "train")
        >>> len(shards), len(shards.manifest.classes)
        (20, 10)
    """

    def __init__(
        self,
        location: Path | str,
        split: str,
        *,
        verify: Literal["sizes", "checksums"] = "sizes",
        cache: CacheConfig | None = None,
    ) -> None:
        """Open the shards of ``split`` below a folder or ``s3://bucket/prefix``.

        Raises:
            UsageError: no manifest, no such split, no access, or no cache folder.
            ShoalError: a file is missing, cut short, damaged, or of another preparation.
        """
        self.location = location
        self.split = split
        self._verify: Literal["sizes", "checksums"] = verify
        self._cache_config = cache
        self._storage = open_storage(location)
        self.manifest = self._storage.manifest(ImageManifest)
        self.shards = self.manifest.shards(split)
        self._records = [
            _checked(data, info, len(self.manifest.classes), self._storage.path(info.file(INDEX)))
            for info, data in zip(
                self.shards, self._storage.wholes(info.file(INDEX) for info in self.shards), strict=True
            )
        ]
        if isinstance(self._storage, LocalStorage):
            for number, info in enumerate(self.shards):
                self._storage.open(info.images)
                if verify == "checksums":
                    info.check(self._storage.directory)
                self._check_headers(number)
        elif verify == "checksums":
            raise UsageError(
                f"verify='checksums' of {location} would fetch every shard; leave it out: shards are "
                "compared with their checksums when they enter the cache"
            )
        self._cache = ShardCache(cache, cache.kept(self.manifest.files())) if cache else None
        self._prefetch: Prefetch | None = None
        counts = [info.num_images for info in self.shards]
        self.first_images: Int64Array = np.cumsum([0, *counts], dtype=np.int64)
        """Number of the first image of each shard, and the number of all images, ``[shards + 1]``."""

    def __reduce__(self) -> tuple[Any, ...]:
        again = partial(ImageShards, verify=self._verify, cache=self._cache_config)
        return (again, (self.location, self.split))

    def __len__(self) -> int:
        return int(self.first_images[-1])

    @cached_property
    def labels(self) -> Int64Array:
        """The label of each image, -1 where it has none, int64 ``[N]``."""
        return self._column("label").astype(np.int64)

    @cached_property
    def sizes(self) -> Int64Array:
        """Width and height of each image in pixels, int64 ``[N, 2]``."""
        return np.stack([self._column("width"), self._column("height")], axis=1).astype(np.int64)

    @property
    def num_image_bytes(self) -> int:
        """Bytes of all encoded images."""
        return int(self._column("size").sum(dtype=np.int64))

    def read(self, number: int) -> Bytes:
        """Return the encoded image: a view of the mapped shard, or fetched bytes.

        Raises:
            ShoalError: a remote shard cannot be read, or what was to be cached is not the manifest's.
        """
        return self._part(number, "offset", "size")

    def extra(self, number: int) -> Bytes:
        """Return the annotations of an image, or else, of a tar, its label as text.

        Raises:
            ShoalError: as for ``read``.
        """
        return self._part(number, "extra_offset", "extra_size")

    def name(self, number: int) -> str:
        """Return the shard and the key of an image for messages: ``DIR/train-00000.tar: n01440764/10026``."""
        shard, record = self._record(number)
        offset, head = int(record["offset"]), int(record["head"])
        if head:
            skipped = tfrecord.HEAD_BYTES
            data = self._read(shard, offset - head + skipped, head - skipped)
            key = tfrecord.name_in(bytes(data))
        else:
            header = _member(self._read(shard, offset - _BLOCK, _BLOCK))
            key = header.name if header else f"image {number}"
        return f"{self._storage.path(self.shards[shard].images)}: {key.rpartition('.')[0] or key}"

    def will_need(self, numbers: Iterable[int]) -> None:
        """Prefetch images of a local folder (``madvise``); ``read`` follows soon after."""
        if self._cache is None and isinstance(self._storage, LocalStorage):
            for number in numbers:
                shard, record = self._record(number)
                self._storage.will_need(self.shards[shard].images, int(record["offset"]), int(record["size"]))

    def prefetch(self, steps: Iterable[Int64Array]) -> None:
        """Copy shards into the cache in the order in which steps use their images, instead of any before.

        Args:
            steps: the numbers of the images of each step.
        """
        if self._prefetch is not None:
            self._prefetch.close()
        if self._cache is not None:
            numbers = (np.searchsorted(self.first_images, images, side="right") - 1 for images in steps)
            tars = [info.images for info in self.shards]
            self._prefetch = Prefetch(self._cache, tars, numbers, self._storage)

    @property
    def cache_policy(self) -> str:
        """Part that the host keeps (:mod:`shoal.decide.cache_policy`); empty without a cache."""
        return self._cache.kept.policy if self._cache else ""

    @property
    def cache_counts(self) -> CacheCounts | None:
        """Counts of the cache in this process, or ``None`` without a cache."""
        return self._cache.counts if self._cache else None

    @property
    def counts_folder(self) -> Path | None:
        """The folder in which the host's processes count what they read, see :class:`CacheConfig`."""
        return self._cache_config.counts if self._cache_config else None

    @property
    def cache_problems(self) -> Mapping[tuple[str, str], int]:
        """Number of failures of peers in this process, by the host's name and their kind."""
        return self._cache.peer_problems if self._cache else {}

    def _record(self, number: int) -> tuple[int, Any]:
        if not 0 <= number < len(self):
            raise IndexError(f"image {number} of {len(self)}")
        shard = int(np.searchsorted(self.first_images, number, side="right")) - 1
        return shard, self._records[shard][number - int(self.first_images[shard])]

    def _part(self, number: int, start: str, size: str) -> Bytes:
        shard, record = self._record(number)
        return self._read(shard, int(record[start]), int(record[size]))

    def _column(self, name: str) -> npt.NDArray[Any]:
        return np.concatenate([np.zeros(0, RECORD[name]), *(records[name] for records in self._records)])

    def _read(self, shard: int, start: int, size: int) -> Bytes:
        file = self.shards[shard].images
        if self._cache is not None:
            return self._cache.read(file, start, size, self._storage)
        return self._storage.read(file, start, size)

    def _check_headers(self, number: int) -> None:
        """Compare the first and the last image's header in the tar or the TFRecord with the index."""
        info, records = self.shards[number], self._records[number]
        for record in records[[0, -1]] if len(records) else ():
            offset, size, head = int(record["offset"]), int(record["size"]), int(record["head"])
            if head:
                found = self._storage.read(info.images, offset - head, tfrecord.HEAD_BYTES)
                fits = tfrecord.check_head(bytes(found), head - tfrecord.HEAD_BYTES + size)
                actual = "no record of its size"
            else:
                header = _member(self._storage.read(info.images, offset - _BLOCK, _BLOCK))
                fits = header is not None and header.size == size
                actual = "no member" if header is None else f"{header.name!r} of {header.size:,} bytes"
            if not fits:
                raise ShoalError(
                    f"{self._storage.path(info.images)} does not fit its index: {size:,} bytes of an "
                    f"image should begin at {offset:,}, and it has {actual} there; it is of another "
                    "preparation or was damaged: copy it again or prepare the images again"
                )


def _checked(data: bytes, info: ImageShardInfo, num_classes: int, path: str) -> Records:
    """Return the records of an index after checking each of them.

    Raises:
        ShoalError: the index is not the manifest's, or contradicts it.
    """
    info.check_facts(path, len(data), hashlib.sha256(data).hexdigest(), info.files[INDEX])
    if len(data) != info.num_images * RECORD.itemsize:
        raise _inconsistent(path, f"{len(data):,} bytes are not the records of {info.num_images:,} images")
    records = np.frombuffer(data, dtype=RECORD)
    file, is_tar = info.images, info.images.suffix == TAR
    least_offset = _BLOCK if is_tar else tfrecord.HEAD_BYTES
    head = records["head"]
    wrong = (head != 0) if is_tar else (head <= tfrecord.HEAD_BYTES) | (head > records["offset"])
    if wrong.any():
        raise _inconsistent(path, f"image {int(wrong.argmax())} has no head of a record of a {file.suffix}")
    for offset, size, least in (("offset", "size", 1), ("extra_offset", "extra_size", 0)):
        first, count = records[offset], records[size].astype(np.int64)
        wrong = (count < least) | ((count > 0) & ((first < least_offset) | (first > file.num_bytes - count)))
        if wrong.any():
            at = int(wrong.argmax())
            raise _inconsistent(
                path,
                f"image {at} has {count[at]:,} bytes at {first[at]:,} of a {file.suffix} of "
                f"{file.num_bytes:,} bytes",
            )
    wrong = (records["label"] < -1) | (records["label"] >= num_classes)
    if wrong.any():
        at = int(wrong.argmax())
        raise _inconsistent(path, f"image {at} has label {records['label'][at]} of {num_classes} classes")
    return records


def _member(header: Bytes) -> tarfile.TarInfo | None:
    try:
        return tarfile.TarInfo.frombuf(bytes(header), "utf-8", "surrogateescape")
    except tarfile.HeaderError:
        return None


def _inconsistent(path: str, reason: str) -> ShoalError:
    return ShoalError(
        f"{path}: this index contradicts itself or the manifest: {reason}; prepare the images again"
    )
