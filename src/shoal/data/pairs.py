"""Texts and pairs with labels to sequences that fit a model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from shoal.data.classify import ClassifyData
from shoal.data.frame import Frame, Int32Array, Int64Array, encode_texts, plain
from shoal.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class PairFeatures:
    """Sequences of ``data.examples``; tokens of number ``k`` are ``bounds[k]`` to ``bounds[k + 1]``."""

    data: ClassifyData
    tokens: Int32Array
    """Token ids of all sequences, flat."""
    types: npt.NDArray[np.uint8]
    """Segment ids of all sequences, flat."""
    bounds: Int64Array
    """Where sequences begin, and where the last one ends: ``[num_sequences + 1]``."""
    labels: Int32Array
    """Index of each sequence's label in ``data.labels``."""
    num_cut: int
    """Sequences that were too long."""

    def __len__(self) -> int:
        return len(self.labels)


def make_pairs(data: ClassifyData, tokenizer: Tokenizer, *, max_seq_length: int) -> PairFeatures:
    """Tokenise all examples and cut what is too long, at the end of the longer text first.

    Args:
        tokenizer: its padding and truncation do not count. Names of special tokens in a text are ordinary
            characters.
        max_seq_length: tokens in a sequence at most, the special ones included.

    Raises:
        UsageError: the tokenizer puts no special tokens around texts, or no room is left for these.
    """
    columns = [[example.first for example in data.examples]]
    if data.examples[0].second is not None:
        columns.append([example.second or "" for example in data.examples])
    frame = Frame(tokenizer, num_texts=len(columns))
    room = max_seq_length - frame.num_special
    if room < len(columns):
        raise UsageError(
            f"max_seq_length {max_seq_length} has no room beside {frame.num_special} special tokens; raise it"
        )
    with plain(tokenizer):
        encoded = [encode_texts(tokenizer, texts, with_offsets=False)[:2] for texts in columns]
    lengths = [np.diff(bounds) for _, bounds in encoded]
    kept: tuple[Int64Array, ...]
    if len(columns) == 1:
        kept = (np.minimum(lengths[0], room),)
    else:
        kept = cut_longer(lengths[0], lengths[1], room)
    tokens, types, bounds, _ = frame.fill(
        *((ids, bounds[:-1], count) for (ids, bounds), count in zip(encoded, kept, strict=True))
    )
    return PairFeatures(
        data=data,
        tokens=tokens,
        types=types,
        bounds=bounds,
        labels=np.array([example.label for example in data.examples], dtype=np.int32),
        num_cut=int((np.sum(lengths, axis=0) > room).sum()),
    )


def cut_longer(first: Int64Array, second: Int64Array, room: int) -> tuple[Int64Array, Int64Array]:
    """Return how many tokens of each text stay if the longer one, of equal ones the second, loses its last
    until both fit: the rule of Google's BERT (``_truncate_seq_pair``)."""
    kept_first = np.minimum(first, np.maximum(room - second, (room + 1) // 2))
    return kept_first, np.minimum(second, room - kept_first)
