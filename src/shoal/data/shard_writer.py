"""Writes token shards in the form that ``shards`` describes, in bounded memory, whole or not at all."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from shoal.data.files import GrowingFile
from shoal.data.manifest import ShardInfo
from shoal.data.shards import HEADER, MAGIC, VERSION, token_dtype
from shoal.errors import ShoalError


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
        self._tokens = GrowingFile(self._path("tokens"))

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
        with self._tokens, GrowingFile(self._path("index")) as index:
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
