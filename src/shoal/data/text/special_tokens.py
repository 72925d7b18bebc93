"""Tokenises texts and adds special tokens around and between them, on whole arrays.

Special tokens and segment ids are read from the tokenizer's template, so BERT, ALBERT, RoBERTa and DistilBERT
all work. Sequences are concatenated without padding.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from shoal.errors import UsageError

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
Slices = tuple[Int32Array, Int64Array, Int64Array]
"""Flat ids, and for each sequence the offset and the length of its part of them."""

_SURROGATE = re.compile("[\ud800-\udfff]")
_TEXTS_AT_ONCE = 512
"""Texts per call: the tokenizer's objects of more need far more memory than their ids."""
_NO_TOKENS = np.empty(0, dtype=np.int32)


class SequenceTemplate:
    """Lays out sequences of one or two texts with the special tokens of the tokenizer's template.

    Raises:
        UsageError: the tokenizer puts no special tokens before, between and after the texts.
    """

    def __init__(self, tokenizer: Tokenizer, *, num_texts: int) -> None:
        with plain(tokenizer):
            sample = tokenizer.encode("a", "a" if num_texts == 2 else None)
        roles = sample.sequence_ids
        complete = set(range(num_texts)) <= set(roles) and roles[0] is None and roles[-1] is None
        if not complete:
            positions = (
                "before, between and after a pair of texts" if num_texts == 2 else "before and after a text"
            )
            raise UsageError(
                f"the tokenizer puts no special tokens {positions}; choose one with a post-processor for "
                f"{'pairs' if num_texts == 2 else 'texts'}, such as those of BERT, ALBERT or RoBERTa"
            )
        first = [roles.index(text) for text in range(num_texts)]
        last = [len(roles) - 1 - roles[::-1].index(text) for text in range(num_texts)]
        cuts = list(zip([0, *(at + 1 for at in last)], [*first, len(roles)], strict=True))
        ids, types = np.array(sample.ids, dtype=np.int32), np.array(sample.type_ids, dtype=np.uint8)
        self._special = [(ids[a:b], types[a:b]) for a, b in cuts]
        self._type_of = [types[at] for at in first]
        self.num_special = sum(b - a for a, b in cuts)

    def fill(self, *texts: Slices) -> tuple[Int32Array, npt.NDArray[np.uint8], Int64Array, list[Int64Array]]:
        """Lay out all sequences.

        Args:
            texts: one or two, as in the template.

        Returns:
            Flat ids, flat types, the bounds of sequences ``[B + 1]``, and the offset of each text in its
            sequence.
        """
        position = np.zeros_like(texts[0][1])
        special_begins, text_begins = [], []
        for (ids, _), (_, _, count) in zip(self._special, texts, strict=False):
            special_begins.append(position)
            text_begins.append(position + len(ids))
            position = text_begins[-1] + count
        special_begins.append(position)
        bounds = np.concatenate([[0], np.cumsum(position + len(self._special[-1][0]))])
        tokens = np.empty(bounds[-1], dtype=np.int32)
        types = np.empty(bounds[-1], dtype=np.uint8)
        at = bounds[:-1]
        for begin, (ids, kinds) in zip(special_begins, self._special, strict=True):
            for k, (token, kind) in enumerate(zip(ids, kinds, strict=True)):
                tokens[at + begin + k], types[at + begin + k] = token, kind
        for begin, (ids, source, count), kind in zip(text_begins, texts, self._type_of, strict=True):
            targets = ranges(at + begin, count)
            tokens[targets], types[targets] = ids[ranges(source, count)], kind
        return tokens, types, bounds, text_begins


@contextmanager
def plain(tokenizer: Tokenizer) -> Iterator[None]:
    """Disable truncation, padding and special tokens inside texts; restore the settings on exit."""
    truncation, padding, names = tokenizer.truncation, tokenizer.padding, tokenizer.encode_special_tokens
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    try:
        yield
    finally:
        tokenizer.encode_special_tokens = names
        if truncation is not None:
            tokenizer.enable_truncation(**truncation)
        if padding is not None:
            tokenizer.enable_padding(**padding)


def encode_texts(
    tokenizer: Tokenizer, texts: Sequence[str], *, with_offsets: bool
) -> tuple[Int32Array, Int64Array, Int32Array]:
    """Return flat ids, the bounds of texts, and (if asked) the characters of each token, ``[tokens, 2]``."""
    encode = tokenizer.encode_batch if with_offsets else tokenizer.encode_batch_fast
    ids, offsets = [_NO_TOKENS], [_NO_TOKENS.reshape(0, 2)]
    for begin in range(0, len(texts), _TEXTS_AT_ONCE):
        block = list(map(encodable, texts[begin : begin + _TEXTS_AT_ONCE]))
        for encoding in encode(block, add_special_tokens=False):
            ids.append(np.array(encoding.ids, dtype=np.int32))
            if with_offsets:
                offsets.append(np.array(encoding.offsets, dtype=np.int32).reshape(-1, 2))
    bounds = np.cumsum([len(row) for row in ids], dtype=np.int64)
    return np.concatenate(ids), bounds, np.concatenate(offsets)


def encodable(text: str) -> str:
    """Return the text with each unpaired surrogate, which no encoding has, replaced by U+FFFD."""
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


def ranges(begins: Int64Array, counts: Int64Array) -> Int64Array:
    """Return the concatenated ranges ``begin, begin + 1, …`` of ``count`` numbers each."""
    ends = np.cumsum(counts)
    numbers: Int64Array = np.arange(ends[-1]) + np.repeat(begins - (ends - counts), counts)
    return numbers
