"""Writes token shards in the form that ``shards`` describes, in bounded memory, whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from shoal.data.files import PARTIAL, publish, write_error
from shoal.data.manifest import ShardInfo
from shoal.data.shards import HEADER, MAGIC, VERSION, token_dtype
from shoal.errors import ShoalError

_BUFFER_BYTES = 1 << 20


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
        self._hash = hashlib.sha256()
        try:
            self._file = self._partial("tokens").open("wb", buffering=_BUFFER_BYTES)
        except OSError as error:
            raise write_error(self._path("tokens"), error) from error

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
        data = tokens.astype(self._dtype).tobytes()
        try:
            self._file.write(data)
        except OSError as error:
            self.discard()
            raise write_error(self._path("tokens"), error) from error
        self._hash.update(data)
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
        index = io.BytesIO()
        index.write(
            HEADER.pack(MAGIC, VERSION, self._dtype.itemsize, num_documents, num_sentences, self.num_tokens)
        )
        for offsets in (self._sentences, self._documents, self._document_tokens):
            index.write(np.asarray(offsets, dtype="<i8").tobytes())
        suffix = "tokens"
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            suffix = "index"
            with self._partial("index").open("wb") as file:
                file.write(index.getbuffer())
                file.flush()
                os.fsync(file.fileno())
            # The index comes last: a shard with an index is complete.
            for suffix in ("tokens", "index"):
                publish(self._partial(suffix), self._path(suffix))
        except OSError as error:
            self.discard()
            raise write_error(self._path(suffix), error) from error
        digests = {"tokens": self._hash, "index": hashlib.sha256(index.getbuffer())}
        sizes = {"tokens": self.num_tokens * self._dtype.itemsize, "index": index.getbuffer().nbytes}
        return ShardInfo(
            name=self._name,
            num_documents=num_documents,
            num_sentences=num_sentences,
            num_tokens=self.num_tokens,
            files={s: {"bytes": sizes[s], "sha256": digests[s].hexdigest()} for s in ("tokens", "index")},
        )

    def discard(self) -> None:
        """Remove what is unfinished; after ``finish`` there is nothing to remove."""
        with contextlib.suppress(OSError):  # closing flushes, and the disk may be full
            self._file.close()
        for suffix in ("tokens", "index"):
            with contextlib.suppress(OSError):
                self._partial(suffix).unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()

    def _path(self, suffix: str) -> Path:
        return self._directory / f"{self._name}.{suffix}"

    def _partial(self, suffix: str) -> Path:
        return self._directory / f"{self._name}.{suffix}{PARTIAL}"
