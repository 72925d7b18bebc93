"""Chooses the text of an example: windows over documents, cut into two segments.

A pair of segments has one of two tasks. *Order* (ALBERT): the two halves of a window, in half of the
examples swapped. *Next* (BERT): in half of the examples the second segment is text of another document,
drawn with equal chance from all others, that begins at a sentence anywhere in it. It is as long as the half
that it replaces, if its document allows, so that lengths do not reveal the label. (google-research/bert
also draws the position; there the second segment is shorter near the end of a document.)

A document of ``L`` tokens has ``ceil(L / C)`` windows of ``C`` tokens (the sequence length less its three
special tokens), or none if it is too short. Their number depends on nothing else, so examples can be
numbered once for all epochs. The windows' starts are spread evenly from the document's start to ``L - C``;
they overlap a little instead of leaving a short tail. Each epoch shifts all windows of a document by a common
phase of up to half their distance, so that examples differ between epochs.

A window begins at the start of a sentence: the last one at or before its place, or its place itself in a
sentence that began more than ``C / 2`` tokens earlier. A window that the phase has pushed to the very end
of its document (the last one, in half of the epochs) begins at the next sentence start instead if that
leaves it half full, so that it ends where the document ends and no token stays unread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from shoal.data.text.shards import TextShards
from shoal.decide.rng import Int64Array, Stream, UInt64Array, below, draw, random_keys, uniform
from shoal.errors import ShoalError, UsageError

BoolArray = npt.NDArray[np.bool_]
PairTask = Literal["order", "next", "none"]
"""The task of two segments: sentence order, next sentence, or none, where there is one segment."""

_Groups = list[tuple[int, Any]]  # (shard number, the rows of a batch that lie in it)

MIN_TOKENS = 8
"""Documents with fewer tokens give no example, and segments are not shortened below this."""

_IS_SHORT, _SHORT_LENGTH, _BOUNDARY, _LABEL, _OTHER, _POSITION = range(6)  # counters of one example's draws


@dataclass(frozen=True, kw_only=True)
class TokenRange:
    """One segment of each example: tokens ``start`` to ``end`` of shard ``shard``, each array ``[B]``."""

    shard: Int64Array
    start: Int64Array
    end: Int64Array

    def where(self, condition: BoolArray, other: TokenRange) -> TokenRange:
        """Return this range where ``condition [B]`` holds and ``other`` elsewhere."""
        return TokenRange(
            shard=np.where(condition, self.shard, other.shard),
            start=np.where(condition, self.start, other.start),
            end=np.where(condition, self.end, other.end),
        )


@dataclass(frozen=True, kw_only=True)
class Segments:
    """The two segments of each example in the order of the input.

    ``labels`` (``[B]``) is true if they are swapped, or if the second is of another document. Without a task
    the second segment is empty.
    """

    first: TokenRange
    second: TokenRange
    labels: BoolArray

    @property
    def num_tokens(self) -> Int64Array:
        return self.first.end - self.first.start + self.second.end - self.second.start


class Windows:
    """Numbers all examples of a split, and computes the segments of each."""

    def __init__(
        self,
        shards: TextShards,
        *,
        num_text_tokens: int,
        short_seq_prob: float,
        seed: int,
        pairs: PairTask = "order",
    ) -> None:
        """Number the examples; keeps 8 bytes of memory per document (16 for the task ``next``)."""
        self._shards = shards
        self._pairs = pairs
        self._capacity = num_text_tokens
        self._short_seq_prob = short_seq_prob
        self._seed = seed
        lengths = shards.document_lengths()
        counts = np.where(lengths >= MIN_TOKENS, -(-lengths // num_text_tokens), 0)
        self._first_examples: Int64Array = np.concatenate([[0], np.cumsum(counts)])
        self._usable: Int64Array = np.flatnonzero(counts) if pairs == "next" else np.zeros(0, np.int64)
        if pairs == "next" and len(self._usable) == 1:
            raise UsageError(
                f"{shards.location}: the split {shards.split!r} has one document of at least {MIN_TOKENS} "
                "tokens, and next-sentence prediction needs segments of another one; prepare more documents"
            )

    @property
    def num_examples(self) -> int:
        return int(self._first_examples[-1])

    def segments(self, epochs: Int64Array, indices: Int64Array, keys: UInt64Array) -> Segments:
        """Return the segments of examples ``indices`` in ``epochs``; ``keys`` are theirs. All ``[B]``."""
        capacity = self._capacity
        documents = self._first_examples.searchsorted(indices, side="right") - 1
        shard = self._shards.first_documents.searchsorted(documents, side="right") - 1
        groups = _rows_by_shard(shard)
        first, last = self._extents(groups, documents)
        spare = np.maximum(last - first - capacity, 0)
        offset = self._window_positions(epochs, documents, indices, spare)
        position = first + offset

        snapped, following = self._sentence_starts(groups, position)
        start = np.where(position - snapped <= capacity // 2, snapped, position)
        at_end = (spare > 0) & (offset == spare) & (2 * (last - following) >= capacity)
        start = np.where(at_end, following, start)

        bits = draw(keys[:, None], np.arange(6 if self._pairs == "next" else 4))
        u = uniform(bits)
        length = np.minimum(last - start, capacity)
        short = MIN_TOKENS + below(bits[:, _SHORT_LENGTH], capacity - MIN_TOKENS + 1)
        is_short = u[:, _IS_SHORT] < self._short_seq_prob
        end = start + np.where(is_short, np.minimum(length, short), length)
        if self._pairs == "none":
            whole, nothing = (TokenRange(shard=shard, start=at, end=end) for at in (start, end))
            return Segments(first=whole, second=nothing, labels=np.zeros(len(start), dtype=np.bool_))
        middle = self._boundaries(groups, start, end, u[:, _BOUNDARY])
        before = TokenRange(shard=shard, start=start, end=middle)
        after = TokenRange(shard=shard, start=middle, end=end)
        labels = u[:, _LABEL] < 0.5
        if self._pairs == "next":
            elsewhere = self._elsewhere(documents, end - middle, bits)
            return Segments(first=before, second=elsewhere.where(labels, after), labels=labels)
        return Segments(first=after.where(labels, before), second=before.where(labels, after), labels=labels)

    def _elsewhere(self, documents: Int64Array, lengths: Int64Array, bits: UInt64Array) -> TokenRange:
        """Return text of up to ``lengths [B]`` tokens of any document but ``documents [B]``."""
        number = below(bits[:, _OTHER], len(self._usable) - 1)
        number += number >= self._usable.searchsorted(documents)
        other = self._usable[number]
        shard = self._shards.first_documents.searchsorted(other, side="right") - 1
        groups = _rows_by_shard(shard)
        first, last = self._extents(groups, other)
        position = first + below(bits[:, _POSITION], np.maximum(last - first - lengths, 0) + 1)
        snapped, _ = self._sentence_starts(groups, position)
        start = np.where(position - snapped <= self._capacity // 2, snapped, position)
        return TokenRange(shard=shard, start=start, end=np.minimum(start + lengths, last))

    def _window_positions(
        self, epochs: Int64Array, documents: Int64Array, indices: Int64Array, spare: Int64Array
    ) -> Int64Array:
        """Return each window's position in its document, in [0, spare], before it is aligned to a
        sentence."""
        before = self._first_examples[documents]
        num_gaps = np.maximum(self._first_examples[documents + 1] - before - 1, 1)
        phase = uniform(random_keys(self._seed, Stream.WINDOW_PHASE, epochs, documents)) - 0.5
        position = np.rint((indices - before + phase) * spare / num_gaps).astype(np.int64)
        clipped: Int64Array = np.clip(position, 0, spare)
        return clipped

    def _extents(self, groups: _Groups, documents: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return (first token, last token + 1) of each document."""
        first, last = np.empty_like(documents), np.empty_like(documents)
        for number, rows in groups:
            offsets = self._shards.shards[number].document_token_offsets
            local = documents[rows] - self._shards.first_documents[number]
            first[rows], last[rows] = offsets[local], offsets[local + 1]
        return first, last

    def _sentence_starts(self, groups: _Groups, positions: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return the last sentence start at or before each position, and the first one at or after it."""
        before, after = np.empty_like(positions), np.empty_like(positions)
        for number, rows in groups:
            offsets = self._shards.shards[number].sentence_offsets
            next_sentence = offsets.searchsorted(positions[rows], side="right")
            before[rows], after[rows] = offsets[next_sentence - 1], offsets[next_sentence]
        return before, np.where(before == positions, positions, after)

    def _boundaries(
        self, groups: _Groups, start: Int64Array, end: Int64Array, u: npt.NDArray[np.float64]
    ) -> Int64Array:
        """Return the split of each text: a random sentence start inside it, else its middle."""
        middle = (start + end) // 2
        for number, rows in groups:
            offsets = self._shards.shards[number].sentence_offsets
            lowest = offsets.searchsorted(start[rows], side="right")
            num_inside = offsets.searchsorted(end[rows], side="left") - lowest
            chosen = offsets[lowest + (u[rows] * num_inside).astype(np.int64)]
            middle[rows] = np.where(num_inside > 0, chosen, middle[rows])
        return middle


def gather(shards: TextShards, shard: Int64Array, positions: Int64Array) -> Int64Array:
    """Return the token ids at ``positions`` ``[B, T]`` of each row's shard.

    Raises:
        ShoalError: a shard holds a token id beyond the vocabulary.
    """
    ids = np.empty(positions.shape, dtype=np.int64)
    for number, rows in _rows_by_shard(shard):
        tokens = shards.shards[number].tokens[positions[rows]]
        if int(tokens.max()) >= shards.manifest.vocab_size:
            raise ShoalError(
                f"{shards.shards[number].path}.tokens: token id {tokens.max()} in a vocabulary of "
                f"{shards.manifest.vocab_size}; the shard is damaged: prepare the text again"
            )
        ids[rows] = tokens
    return ids


def _rows_by_shard(shard: Int64Array) -> _Groups:
    """Return (shard number, its rows) for each shard that occurs."""
    if (shard == shard[0]).all():
        return [(int(shard[0]), slice(None))]
    return [(number, np.flatnonzero(shard == number)) for number in sorted(set(shard.tolist()))]
