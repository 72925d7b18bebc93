"""Makes batches for causal language models: blocks of prepared text, packed without padding.

The documents of a shard follow each other, each with the end token behind it. A block is a run of them of one
length, with the token that follows as the last target. By default a block's documents are independent of each
other: positions restart, and the end token has no target. Across documents, as in GPT-2, positions run
through the block and all tokens have targets.

Only tokens are stored: the blocks of an epoch begin at an offset that is drawn per epoch, and wrap around the
end of a shard; less than a block per shard is left out. For the scores of a whole text, blocks begin at its
first token, and none is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from shoal.data.steps import Reader, example_names
from shoal.data.text.segments import gather
from shoal.data.text.shards import TextShards
from shoal.decide.rng import Int64Array, Stream, below, dropout_keys, random_keys
from shoal.errors import UsageError, require_positive

NO_TARGET = -100
"""Label of a token without a target, as in transformers."""


def num_targets(batch: Mapping[str, Any]) -> int:
    """Return the number of targets of a batch of blocks."""
    return int((batch["labels"] != NO_TARGET).sum())


def num_bytes(tokenizer: Tokenizer, labels: npt.NDArray[Any], end_id: int) -> int:
    """Return the UTF-8 bytes of the text of targets.

    The targets of each document are decoded together. A character that the border of a block divides counts
    as U+FFFD.

    Args:
        labels: int64 ``[B, block_length]``.
        end_id: the end token, which has no bytes.
    """
    parts: list[list[int]] = []
    for row in labels:
        cuts = np.flatnonzero((row == NO_TARGET) | (row == end_id))
        begins, ends = [0, *(cuts + 1).tolist()], [*cuts.tolist(), len(row)]
        parts += [row[a:b].tolist() for a, b in zip(begins, ends, strict=True) if a < b]
    return sum(len(text.encode()) for text in tokenizer.decode_batch(parts))


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """Sets the length of blocks, and whether documents see each other.

    Raises:
        UsageError: the length is not positive.
    """

    block_length: int = 1_024
    across_documents: bool = False
    seed: int = 0
    every_token: bool = False
    """Begin at the first token of each shard; its last block has the targets that are left."""

    def __post_init__(self) -> None:
        require_positive("", self, "block_length")


class BlockReader(Reader):
    """Makes blocks for causal language models from the shards of a split.

    Args:
        shards: of one split.
        config: length of blocks, and the seed.

    Raises:
        UsageError: no shard of the split is long enough for a block.

    Example (``runs/text`` was written by ``shoal prepare text``):

        >>> from pathlib import Path
        >>> reader = BlockReader(TextShards(Path("runs/text"), "train"), BlockConfig(block_length=64))
        >>> batch = reader.batch(0, [0, 1])
        >>> batch["input_ids"].shape, batch["labels"].shape
        ((2, 64), (2, 64))
    """

    def __init__(self, shards: TextShards, config: BlockConfig) -> None:
        """Number the blocks."""
        self.shards, self.config = shards, config
        self.seed, self.example_tokens = config.seed, config.block_length
        self._bounds: list[Int64Array] = [
            shard.document_token_offsets + np.arange(len(shard.document_token_offsets))
            for shard in shards.shards
        ]
        """Offset of each document's first token, each document counted with its end token."""
        self._sizes: Int64Array = np.array([bounds[-1] for bounds in self._bounds], dtype=np.int64)
        more = config.block_length - 1 if config.every_token else 0
        self._first_examples = np.concatenate([[0], np.cumsum((self._sizes + more) // config.block_length)])
        if not self.num_examples:
            raise UsageError(
                f"{shards.location}: the split {shards.split!r} gives no blocks: none of its shards has "
                f"the {config.block_length} tokens of one; prepare more text or shorten the blocks"
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return (BlockReader, (self.shards, self.config), {"epoch": self.epoch})

    @property
    def num_examples(self) -> int:
        return int(self._first_examples[-1])

    def batch(self, epochs: npt.ArrayLike, indices: npt.ArrayLike) -> dict[str, npt.NDArray[Any]]:
        """Return the blocks ``indices`` (``[B]``, below ``num_examples``) as they are in ``epochs``.

        - ``input_ids`` int64 ``[B, block_length]``: documents, each with its end token;
        - ``position_ids`` int64 ``[B, block_length]``: from 0 in each document, or in the block;
        - ``labels`` int64 ``[B, block_length]``: the token after each, :data:`NO_TARGET` where there is none;
        - ``dropout_keys`` int64 ``[B]``: keys of the blocks (:mod:`shoal.dropout`).

        Raises:
            ShoalError: a shard holds a token id beyond the vocabulary.
        """
        epochs_, indices_ = example_names(epochs, indices)
        length = self.config.block_length
        shard = self._first_examples.searchsorted(indices_, side="right") - 1
        sizes = self._sizes[shard]
        starts = (indices_ - self._first_examples[shard]) * length
        if not self.config.every_token:
            starts += below(random_keys(self.config.seed, Stream.BLOCK_PHASE, epochs_, shard), sizes)
        offsets = starts[:, None] + np.arange(length + 1)
        ids, begins = self._tokens(shard, offsets % sizes[:, None])
        columns = np.broadcast_to(np.arange(length), (len(ids), length))
        labels = ids[:, 1:].copy()
        if self.config.across_documents:
            positions = columns.copy()
        else:
            labels[begins[:, 1:]] = NO_TARGET
            positions = columns - np.maximum.accumulate(np.where(begins[:, :-1], columns, 0), axis=1)
        if self.config.every_token:
            labels[offsets[:, 1:] >= sizes[:, None]] = NO_TARGET
        return {
            "input_ids": ids[:, :-1].copy(),
            "position_ids": positions,
            "labels": labels,
            "dropout_keys": dropout_keys(self.config.seed, epochs_, indices_),
        }

    def micro_batch(self, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """Return the blocks unchanged: all have the same length."""
        return dict(arrays)

    def _tokens(self, shard: Int64Array, positions: Int64Array) -> tuple[Int64Array, npt.NDArray[np.bool_]]:
        """Return the tokens at positions ``[B, T]`` of documents with end tokens, and which begin one."""
        documents = np.empty_like(positions)
        for number in np.unique(shard):
            rows = shard == number
            documents[rows] = self._bounds[number].searchsorted(positions[rows], side="right") - 1
        begins, ends = (self._at(shard, documents + after) for after in (0, 1))
        is_end = positions == ends - 1
        # documents before this one have an end token each, which the shard does not store
        ids = gather(self.shards, shard, positions - documents - is_end)
        ids[is_end] = self.shards.manifest.sep_id
        return ids, positions == begins

    def _at(self, shard: Int64Array, documents: Int64Array) -> Int64Array:
        """Return where documents ``[B, T]`` of each row's shard begin."""
        offsets = np.empty_like(documents)
        for number in np.unique(shard):
            rows = shard == number
            offsets[rows] = self._bounds[number][documents[rows]]
        return offsets
