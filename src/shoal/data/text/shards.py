"""Token shards: flat files of token ids with sentence and document offsets, mapped into memory.

A shard ``NAME`` is two files. ``NAME.tokens`` is nothing but token ids, little-endian, two bytes each
(four if the vocabulary has more than 65,536 entries). ``NAME.index`` is a header of 64 bytes (magic,
version, bytes a token, counts) and three arrays of little-endian int64, each one longer than its count:

- ``sentence_offsets``: where each sentence starts, in tokens;
- ``document_offsets``: where each document starts, in sentences;
- ``document_token_offsets``: the same in tokens, so that opening a shard need not touch the large
  array of sentences.

``shard_writer.ShardWriter`` writes them, ``TextShards`` reads them, ``manifest`` says which there are.
"""

from __future__ import annotations

import mmap
import os
import struct
from array import array
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from shoal.data.atomic_io import AtomicFile, sha256_of
from shoal.data.manifest import Manifest, ShardInfo
from shoal.errors import ShoalError

Int64Array = npt.NDArray[np.int64]

MAGIC = b"SHOALTXT"
VERSION = 1
HEADER = struct.Struct("<8sIIqqq24x")


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return how token ids of a vocabulary are stored: uint16 where they fit, else uint32."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


class Shard:
    """One shard, mapped into memory.

    Attributes:
        tokens: token ids, uint16 or uint32 ``[num_tokens]``.
        sentence_offsets: int64 ``[num_sentences + 1]``, in tokens.
        document_offsets: int64 ``[num_documents + 1]``, in sentences.
        document_token_offsets: int64 ``[num_documents + 1]``, in tokens.
    """

    def __init__(self, directory: Path, info: ShardInfo, vocab_size: int) -> None:
        """Map the files of ``info`` and check their sizes and the ends of their offsets.

        Raises:
            ShoalError: a file is missing, has another size, or the index contradicts the manifest.
        """
        self.path = directory / info.name
        dtype = token_dtype(vocab_size)
        tokens, index = (
            _map(directory / f"{info.name}.{suffix}", info, suffix) for suffix in ("tokens", "index")
        )
        counts = (info.num_documents, info.num_sentences, info.num_tokens)
        lengths = (info.num_sentences + 1, info.num_documents + 1, info.num_documents + 1)
        expected_bytes = HEADER.size + 8 * sum(lengths)
        if len(index) != expected_bytes or len(tokens) != info.num_tokens * dtype.itemsize:
            raise _inconsistent(self.path, "its counts do not fit the sizes of its files")
        if HEADER.unpack_from(index) != (MAGIC, VERSION, dtype.itemsize, *counts):
            raise _inconsistent(self.path, "the header of its index differs from the manifest")
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
                raise _inconsistent(
                    self.path, f"its offsets run from {array_[0]} to {array_[-1]}, not 0 to {last}"
                )

    def check(self, directory: Path, info: ShardInfo, vocab_size: int) -> None:
        """Check everything: checksums, order of the offsets, token ids.

        Raises:
            ShoalError: names the file and what is wrong with it.
        """
        for suffix, expected in info.files.items():
            path = directory / f"{info.name}.{suffix}"
            found = sha256_of(path)
            if found != expected["sha256"]:
                raise ShoalError(
                    f"{path} has the wrong checksum: SHA-256 {found[:16]}…, the manifest says "
                    f"{expected['sha256'][:16]}…; it was changed or damaged: copy it again or prepare the "
                    "text again"
                )
        if (np.diff(self.sentence_offsets) <= 0).any() or (np.diff(self.document_offsets) <= 0).any():
            raise _inconsistent(self.path, "its offsets do not increase")
        if (self.sentence_offsets[self.document_offsets] != self.document_token_offsets).any():
            raise _inconsistent(self.path, "documents do not begin where their first sentence begins")
        if self.tokens.size and int(self.tokens.max()) >= vocab_size:
            raise _inconsistent(
                self.path, f"it has token id {self.tokens.max()} in a vocabulary of {vocab_size}"
            )


class TextShards:
    """All shards of one split of a prepared directory, as one sequence of documents.

    ``verify="sizes"`` compares sizes, headers and counts, which costs nothing; a shard that was cut short
    or is missing is found. ``verify="checksums"`` also reads every byte once, 1.5 GB/s
    a core: seconds for most data, so affordable at the start of a training; nothing is remembered.
    Only paths are pickled, so a loader process maps the same files again.
    """

    def __init__(
        self, directory: Path, split: str, *, verify: Literal["sizes", "checksums"] = "sizes"
    ) -> None:
        """Map the shards of ``split``.

        Raises:
            UsageError: no manifest, no such split, or another tokenizer in the directory.
            ShoalError: a file is missing, cut short, damaged, or of a newer version.
        """
        self.directory = directory
        self.split = split
        self.manifest = Manifest.load(directory)
        self.manifest.check_tokenizer(directory / self.manifest.tokenizer.file)
        self.shards: list[Shard] = []
        for info in self.manifest.shards(split):
            shard = Shard(directory, info, self.manifest.vocab_size)
            if verify == "checksums":
                shard.check(directory, info, self.manifest.vocab_size)
            self.shards.append(shard)
        counts = [len(shard.document_offsets) - 1 for shard in self.shards]
        self.first_documents: Int64Array = np.cumsum([0, *counts], dtype=np.int64)
        """Number of the first document of each shard, and the number of all documents, ``[shards + 1]``."""

    def __reduce__(self) -> tuple[type[TextShards], tuple[Path, str]]:
        return (TextShards, (self.directory, self.split))

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
        shard = self.shards[int(np.searchsorted(self.first_documents, number, side="right")) - 1]
        local = number - int(self.first_documents[self.shards.index(shard)])
        first, last = shard.document_offsets[local], shard.document_offsets[local + 1]
        bounds = shard.sentence_offsets[first : last + 1]
        return [shard.tokens[a:b] for a, b in pairwise(bounds)]


def _map(path: Path, info: ShardInfo, suffix: str) -> mmap.mmap | bytes:
    expected = int(info.files[suffix]["bytes"])
    try:
        with path.open("rb") as file:
            actual = os.fstat(file.fileno()).st_size
            if actual != expected:
                what = "was cut short" if actual < expected else "is too long"
                raise ShoalError(
                    f"{path} {what}: it has {actual:,} bytes, the manifest says {expected:,}; "
                    "copy it again or prepare the text again"
                )
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if actual else b""
    except FileNotFoundError:
        raise ShoalError(
            f"{path} is missing, though the manifest names it; copy it again or prepare the text again"
        ) from None
    except OSError as error:
        raise ShoalError(f"{path} cannot be read: {error.strerror}") from error


def _inconsistent(path: Path, what: str) -> ShoalError:
    return ShoalError(
        f"{path}: this shard contradicts itself or the manifest: {what}; prepare the text again"
    )


class ShardWriter:
    """Writes one shard. Tokens are streamed to the file; only offsets (16 bytes a sentence) stay in memory.

    Use it as a context manager: leaving the block without ``finish`` (an exception) removes the
    temporaries, and nothing else.
    """

    def __init__(self, directory: Path, name: str, vocab_size: int) -> None:
        """Start the shard ``name`` in ``directory``.

        Raises:
            ShoalError: the file cannot be created.
        """
        self.num_tokens = 0
        self._directory = directory
        self._name = name
        self._vocab_size = vocab_size
        self._dtype = token_dtype(vocab_size)
        self._sentences = array("q", [0])
        self._documents = array("q", [0])
        self._document_tokens = array("q", [0])
        self._tokens = AtomicFile(self._path("tokens"))

    def add_document(self, sentences: Sequence[Sequence[int] | npt.NDArray[Any]]) -> None:
        """Append a document, given as the token ids of its sentences.

        Sentences without tokens are left out, and so is a document without any.

        Raises:
            ShoalError: an id is not in the vocabulary; the disk is full.
        """
        lengths = [len(sentence) for sentence in sentences if len(sentence)]
        if not lengths:
            return
        tokens = np.concatenate([np.asarray(sentence) for sentence in sentences if len(sentence)])
        if int(tokens.min()) < 0 or int(tokens.max()) >= self._vocab_size:
            wrong = int(tokens.min()) if int(tokens.min()) < 0 else int(tokens.max())
            raise ShoalError(
                f"{self._path('tokens')}: document {len(self._documents) - 1} has the token id {wrong}, "
                f"which is not in the vocabulary of "
                f"{self._vocab_size}; the tokenizer and its vocabulary size do not belong together"
            )
        self._tokens.write(tokens.astype(self._dtype).tobytes())
        ends = self.num_tokens + np.cumsum(lengths, dtype=np.int64)
        self._sentences.frombytes(ends.tobytes())
        self.num_tokens = int(ends[-1])
        self._documents.append(len(self._sentences) - 1)
        self._document_tokens.append(self.num_tokens)

    def finish(self) -> ShardInfo:
        """Write the index, force both files to the disk and give them their names.

        Raises:
            ShoalError: the disk is full; the temporaries are gone, finished shards untouched.
        """
        num_documents, num_sentences = len(self._documents) - 1, len(self._sentences) - 1
        header = HEADER.pack(
            MAGIC, VERSION, self._dtype.itemsize, num_documents, num_sentences, self.num_tokens
        )
        with self._tokens, AtomicFile(self._path("index")) as index:
            index.write(header)
            for offsets in (self._sentences, self._documents, self._document_tokens):
                index.write(np.asarray(offsets, dtype="<i8").tobytes())
            files = {"tokens": self._tokens.close(), "index": index.close()}
            # The index comes last: a shard with an index is complete.
            self._tokens.publish()
            index.publish()
        return ShardInfo(
            name=self._name,
            num_documents=num_documents,
            num_sentences=num_sentences,
            num_tokens=self.num_tokens,
            files=files,
        )

    def discard(self) -> None:
        """Remove what is unfinished; after ``finish`` there is nothing to remove."""
        self._tokens.discard()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()

    def _path(self, suffix: str) -> Path:
        return self._directory / f"{self._name}.{suffix}"
