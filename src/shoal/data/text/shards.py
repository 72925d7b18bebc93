"""Writes and reads token shards: flat files of token ids with sentence and document offsets.

A shard ``NAME`` is two files. ``NAME.tokens`` holds token ids only, little-endian, two bytes each (four if
the vocabulary has more than 65,536 entries). ``NAME.index`` is a header of 64 bytes (magic, version, bytes
per token, counts) and three arrays of little-endian int64, each one longer than its count:

- ``sentence_offsets``: the first token of each sentence;
- ``document_offsets``: the first sentence of each document;
- ``document_token_offsets``: the first token of each document, so that opening a shard does not touch the
  large array of sentences.

A third file, ``NAME.tfrecord``, is written on request; nothing here reads it.

``ShardWriter`` writes them; ``TextShards`` maps those of a split into memory.
"""

from __future__ import annotations

import mmap
import struct
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import numpy.typing as npt

from shoal.atomic_io import AtomicFile
from shoal.data.manifest import (
    MANIFEST,
    TFRECORD,
    VERSION,
    Manifest,
    ShardFile,
    ShardInfo,
    check_version,
    map_file,
)
from shoal.data.storage import RemoteStorage, open_storage
from shoal.errors import ShoalError, UsageError

if TYPE_CHECKING:
    from shoal.data.cache import CacheConfig

Int64Array = npt.NDArray[np.int64]

MAGIC = b"SHOALTXT"
HEADER = struct.Struct("<8sIIqqq24x")
Buffer = mmap.mmap | bytes | memoryview


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the type of stored token ids: uint16 if those of the vocabulary fit, else uint32."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


class Shard:
    """One shard, mapped into memory.

    Attributes:
        tokens: token ids, uint16 or uint32 ``[num_tokens]``.
        sentence_offsets: int64 ``[num_sentences + 1]``, in tokens.
        document_offsets: int64 ``[num_documents + 1]``, in sentences.
        document_token_offsets: int64 ``[num_documents + 1]``, in tokens.
    """

    def __init__(
        self,
        directory: Path,
        info: ShardInfo,
        vocab_size: int,
        data_of: Callable[[ShardFile], Buffer] | None = None,
    ) -> None:
        """Map the files of ``info`` and check their sizes and the ends of their offsets.

        Args:
            directory: of the shards.
            info: the manifest's.
            vocab_size: of the tokens.
            data_of: returns the bytes of a file; default: maps it.

        Raises:
            ShoalError: a file is missing, has another size or format version, or the index contradicts the
                manifest.
        """
        self.path = directory / info.name
        dtype = token_dtype(vocab_size)
        data_of = data_of or (lambda file: map_file(directory / file.name, file))
        tokens, index = map(data_of, info.file_list())
        counts = (info.num_documents, info.num_sentences, info.num_tokens)
        lengths = (info.num_sentences + 1, info.num_documents + 1, info.num_documents + 1)
        expected_bytes = HEADER.size + 8 * sum(lengths)
        if len(index) != expected_bytes or len(tokens) != info.num_tokens * dtype.itemsize:
            raise self._inconsistent("its counts do not fit the sizes of its files")
        magic, version, *rest = HEADER.unpack_from(index)
        if magic == MAGIC:
            check_version(version, VERSION, f"{self.path}.index", "text")
        if magic != MAGIC or rest != [dtype.itemsize, *counts]:
            raise self._inconsistent("the header of its index differs from the manifest")
        self.tokens: npt.NDArray[Any] = np.frombuffer(tokens, dtype=dtype)
        offsets = np.frombuffer(index, dtype="<i8", offset=HEADER.size)
        self.sentence_offsets: Int64Array
        self.document_offsets: Int64Array
        self.document_token_offsets: Int64Array
        self.sentence_offsets, self.document_offsets, self.document_token_offsets = np.split(
            offsets, np.cumsum(lengths[:-1])
        )
        for array_, last in (
            (self.sentence_offsets, info.num_tokens),
            (self.document_offsets, info.num_sentences),
            (self.document_token_offsets, info.num_tokens),
        ):
            if array_[0] != 0 or array_[-1] != last:
                raise self._inconsistent(f"its offsets run from {array_[0]} to {array_[-1]}, not 0 to {last}")

    def check(self, vocab_size: int) -> None:
        """Check the order of the offsets, and token ids.

        Raises:
            ShoalError: names the file and what is wrong with it.
        """
        if (np.diff(self.sentence_offsets) <= 0).any() or (np.diff(self.document_offsets) <= 0).any():
            raise self._inconsistent("its offsets do not increase")
        if (self.sentence_offsets[self.document_offsets] != self.document_token_offsets).any():
            raise self._inconsistent("documents do not begin where their first sentence begins")
        if self.tokens.size and int(self.tokens.max()) >= vocab_size:
            raise self._inconsistent(f"it has token id {self.tokens.max()} in a vocabulary of {vocab_size}")

    def _inconsistent(self, reason: str) -> ShoalError:
        return ShoalError(
            f"{self.path}: this shard contradicts itself or the manifest: {reason}; prepare the text again"
        )


class TextShards:
    """Maps the token shards of one split into memory, as one sequence of documents.

    Only paths are pickled, so a loader process maps the same files again.

    Args:
        location: folder that ``shoal prepare text`` wrote, or ``s3://bucket/prefix`` of one, which needs a
            cache that all of it fits into.
        split: ``"train"`` or ``"validation"``.
        verify: ``"sizes"`` checks sizes, headers and counts, at no cost; ``"checksums"`` also reads every
            byte once, at 1.5 GB/s per core.
        manifest: of the directory, if it was read already.
        cache: keeps local copies of all files, each compared with its checksum; a file without room is mapped
            where it is. Default: none.

    Attributes:
        directory: folder with the manifest and the tokenizer; of the cache, if the text is in a store.
        cache_policy: what the host keeps (:mod:`shoal.decide.cache_policy`); empty without a cache.

    Raises:
        UsageError: the text is in a store, and there is no cache; there is no manifest or no such split, or
            the directory has another tokenizer.
        ShoalError: a file is missing, truncated, damaged, or of another format version.

    Example (``runs/text`` was written by ``shoal prepare text``):

        >>> shards = TextShards(Path("runs/text"), "train")
        >>> shards.num_documents, shards.manifest.vocab_size
        (20, 100)
    """

    def __init__(
        self,
        location: Path | str,
        split: str,
        *,
        verify: Literal["sizes", "checksums"] = "sizes",
        manifest: Manifest | None = None,
        cache: CacheConfig | None = None,
    ) -> None:
        """Map the shards of ``split``."""
        self.location = location
        self.split = split
        storage = open_storage(location)
        self.manifest = manifest or storage.manifest(Manifest)
        self._cache_config = cache
        self.cache_policy = ""
        self.shards: list[Shard] = []
        data_of = None
        if cache is None and isinstance(storage, RemoteStorage):
            raise UsageError(
                f"{location}: text of an object store is read from copies on this host: name a folder for "
                "them, e.g. --data.cache /dev/shm/shards (TextShards(…, cache=CacheConfig(…)))"
            )
        self.directory = directory = Path(location)
        if cache is not None:
            from shoal.data.cache import CachedFiles

            needed = [file for info in self.manifest.shards(split) for file in info.file_list()]
            files = CachedFiles(cache, storage, self.manifest.files(), needed)
            data_of, self.cache_policy = files.get, files.kept.policy
            if isinstance(storage, RemoteStorage):
                self.directory = files.description(MANIFEST, self.manifest.tokenizer.file)
        self.manifest.check_tokenizer(self.tokenizer_file)
        for info in self.manifest.shards(split):
            shard = Shard(directory, info, self.manifest.vocab_size, data_of)
            if verify == "checksums":
                if cache is None:  # else each copy was compared
                    info.check(directory)
                shard.check(self.manifest.vocab_size)
            self.shards.append(shard)
        counts = [len(shard.document_offsets) - 1 for shard in self.shards]
        self.first_documents: Int64Array = np.cumsum([0, *counts], dtype=np.int64)
        """Number of the first document of each shard, and the number of all documents, ``[shards + 1]``."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (partial(TextShards, cache=self._cache_config), (self.location, self.split))

    @property
    def counts_folder(self) -> Path | None:
        """The folder in which the host's processes count what they read, see ``CacheConfig``."""
        return self._cache_config.counts if self._cache_config else None

    @property
    def tokenizer_file(self) -> Path:
        """The tokenizer with which the text was prepared."""
        return self.directory / self.manifest.tokenizer.file

    @property
    def num_documents(self) -> int:
        return int(self.first_documents[-1])

    @property
    def num_sentences(self) -> int:
        return sum(len(shard.sentence_offsets) - 1 for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        return sum(len(shard.tokens) for shard in self.shards)

    def document_lengths(self) -> Int64Array:
        """Return the number of tokens of each document, int64 ``[num_documents]``."""
        return np.concatenate(
            [np.zeros(0, np.int64), *(np.diff(shard.document_token_offsets) for shard in self.shards)]
        )

    def document(self, number: int) -> list[npt.NDArray[Any]]:
        """Return the token ids of each sentence of a document (views of the mapped file)."""
        index = int(np.searchsorted(self.first_documents, number, side="right")) - 1
        shard, local = self.shards[index], number - int(self.first_documents[index])
        first, last = shard.document_offsets[local], shard.document_offsets[local + 1]
        bounds = shard.sentence_offsets[first : last + 1]
        return [shard.tokens[a:b] for a, b in pairwise(bounds)]


RecordOf = Callable[[npt.NDArray[Any], npt.NDArray[Any]], bytes]
"""Returns the record of a document, given its token ids and the lengths of its sentences."""


class ShardWriter:
    """Writes one shard. Tokens are streamed to the file; only offsets (16 bytes per sentence) stay in memory.

    Use it as a context manager: leaving the block without ``finish`` (an exception) removes the temporary
    files.
    """

    def __init__(
        self, directory: Path, name: str, vocab_size: int, *, as_record: RecordOf | None = None
    ) -> None:
        """Start the shard ``name`` in ``directory``.

        Args:
            as_record: makes the TFRecord of a document, for a further file.

        Raises:
            ShoalError: a file cannot be created.
        """
        self.num_tokens = 0
        self._path = directory / name
        self._vocab_size = vocab_size
        self._dtype = token_dtype(vocab_size)
        self._sentences = array("q", [0])
        self._documents = array("q", [0])
        self._document_tokens = array("q", [0])
        self._tokens = AtomicFile(directory / f"{name}.tokens")
        self._records = AtomicFile(directory / f"{name}.{TFRECORD}") if as_record else None
        self._as_record = as_record

    def add_document(self, sentences: Sequence[Sequence[int] | npt.NDArray[Any]]) -> None:
        """Append a document, given as the token ids of its sentences.

        Empty sentences are skipped, and so is a document without any token.

        Raises:
            ShoalError: an id is not in the vocabulary; the disk is full.
        """
        lengths = [len(sentence) for sentence in sentences if len(sentence)]
        if not lengths:
            return
        tokens = np.concatenate([np.asarray(sentence) for sentence in sentences if len(sentence)])
        least, largest = int(tokens.min()), int(tokens.max())
        if least < 0 or largest >= self._vocab_size:
            raise ShoalError(
                f"{self._path}.tokens: document {len(self._documents) - 1} has the token id "
                f"{least if least < 0 else largest}, which is not in the vocabulary of "
                f"{self._vocab_size}; the tokenizer and its vocabulary size do not belong together"
            )
        self._tokens.write(tokens.astype(self._dtype).tobytes())
        if self._records and self._as_record:
            self._records.write(self._as_record(tokens, np.asarray(lengths)))
        ends = self.num_tokens + np.cumsum(lengths, dtype=np.int64)
        self._sentences.frombytes(ends.tobytes())
        self.num_tokens = int(ends[-1])
        self._documents.append(len(self._sentences) - 1)
        self._document_tokens.append(self.num_tokens)

    def finish(self) -> ShardInfo:
        """Write the index, fsync all files and give them their names.

        Raises:
            ShoalError: the disk is full; the temporary files are gone, finished shards untouched.
        """
        counts = (len(self._documents) - 1, len(self._sentences) - 1, self.num_tokens)
        with self._tokens, AtomicFile(self._path.with_name(f"{self._path.name}.index")) as index:
            index.write(HEADER.pack(MAGIC, VERSION, self._dtype.itemsize, *counts))
            for offsets in (self._sentences, self._documents, self._document_tokens):
                index.write(np.asarray(offsets, dtype="<i8").tobytes())
            files = {"tokens": self._tokens.close(), "index": index.close()}
            if self._records:
                files[TFRECORD] = self._records.close()
                self._records.publish()
            # The index comes last: a shard with an index is complete.
            self._tokens.publish()
            index.publish()
        num_documents, num_sentences, num_tokens = counts
        return ShardInfo(
            name=self._path.name,
            num_documents=num_documents,
            num_sentences=num_sentences,
            num_tokens=num_tokens,
            files=files,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._tokens.discard()
        if self._records:
            self._records.discard()
