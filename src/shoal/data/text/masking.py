"""Masks tokens for masked language modelling.

Whole words are masked, in n-grams of up to ``max_ngram`` words with p(n) ∝ 1/n (Joshi et al., "SpanBERT",
2020; Lan et al., "ALBERT", 2020, section 4.3 of which gives these probabilities). google-research/albert
draws n-grams in random order and drops those that overlap; here the words of each segment are first cut
into consecutive n-grams of random length, which cannot overlap, and then n-grams are taken in random order,
each that still fits into the budget, until nothing fits. Lengths of n-grams follow p(n), except for one
that the border between the segments cuts in two, the last, and the last ones taken, which must fit.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from shoal.decide.rng import Int64Array, UInt64Array, below, draw, uniform

BoolArray = npt.NDArray[np.bool_]

_LOW_BITS = np.uint64(0xFFFF)
MAX_SEQ_LENGTH = 0xFFFF
"""The number of an n-gram is stored in 16 bits of its random rank."""


def prediction_budgets(num_tokens: Int64Array, *, mask_prob: float, max_predictions: int) -> Int64Array:
    """Return the number of tokens to predict in sequences of ``num_tokens`` ``[B]``, special tokens included.

    As in the original code: the rounded share, at least 1, at most ``max_predictions``.
    """
    budgets: Int64Array = np.clip(np.rint(num_tokens * mask_prob), 1, max_predictions).astype(np.int64)
    return budgets


def split_ngrams(
    keys: UInt64Array, word_starts: BoolArray, segment_starts: BoolArray, max_ngram: int
) -> Int64Array:
    """Cut words into consecutive n-grams; return the index of each token's n-gram.

    Args:
        keys: random keys ``[B]``.
        word_starts: ``[B, T]``, true at the first token of each word.
        segment_starts: ``[B, T]``, true where an n-gram must begin; a subset of ``word_starts``.
        max_ngram: longest n-gram, in words.

    Returns:
        int64 ``[B, T]``, from 0 in each row and -1 before its first word.
    """
    word: Int64Array = np.cumsum(word_starts, axis=1, dtype=np.int64)
    num_words = int(word[:, -1].max())
    bits = draw(keys[:, None], np.arange(num_words))
    harmonic = np.cumsum(1 / np.arange(1, max_ngram + 1))
    lengths = np.ones(bits.shape, dtype=np.int64)
    for threshold in harmonic[:-1] / harmonic[-1]:
        lengths += bits >= np.uint64(math.ceil(threshold * 2**53) << 11)  # uniform(bits) >= threshold
    # Words are numbered from 1. The first n-gram begins at word 1, the next where the one before ends; those
    # beyond the last word fall into the column after it.
    firsts = np.cumsum(lengths, axis=1)
    firsts += 1
    np.minimum(firsts, num_words + 1, out=firsts)
    row = np.arange(len(keys))[:, None] * (num_words + 2)
    begins = np.zeros(len(keys) * (num_words + 2), dtype=bool)
    begins[row + 1] = True
    begins[firsts + row] = True
    starts = begins[word + row]
    starts &= word_starts
    starts |= segment_starts
    ngrams: Int64Array = np.cumsum(starts, axis=1, dtype=np.int64)
    ngrams -= 1
    return ngrams


def choose_ngrams(keys: UInt64Array, sizes: Int64Array, budgets: Int64Array) -> BoolArray:
    """Take n-grams in random order if they still fit into the budget of their row.

    Args:
        keys: random keys ``[B]``.
        sizes: tokens of each n-gram ``[B, K]``; 0 is an n-gram that cannot be taken.
        budgets: tokens to take ``[B]``.

    Returns:
        bool ``[B, K]``.
    """
    num_ngrams = sizes.shape[1]
    # The n-gram's number is stored in the low bits of its random rank: a plain sort takes a third of the time
    # of an argsort. N-grams that cannot be taken sort to the end.
    numbers = np.arange(num_ngrams, dtype=np.uint64)
    ranks = draw(keys[:, None], numbers)
    ranks[sizes == 0] = ~_LOW_BITS
    ranks &= ~_LOW_BITS
    ranks |= numbers
    ranks.sort(axis=1)
    ranks &= _LOW_BITS
    order = ranks.astype(np.int64)
    order += np.arange(len(keys))[:, None] * num_ngrams
    sizes = sizes.ravel()[order]
    totals = np.cumsum(sizes, axis=1)
    available = sizes > 0
    taken = totals <= budgets[:, None]
    taken &= available
    available ^= taken
    left = budgets - (sizes * taken).sum(axis=1)
    while True:
        # What did not fit once never fits later, so the first that fits now is the next in order.
        fits = sizes <= left[:, None]
        fits &= available
        columns = fits.argmax(axis=1)
        rows = np.flatnonzero(fits[np.arange(len(keys)), columns])
        if not rows.size:
            break
        columns = columns[rows]
        taken[rows, columns] = True
        available[rows, columns] = False
        left[rows] -= sizes[rows, columns]
    chosen = np.empty(taken.size, dtype=bool)
    chosen[order] = taken
    return chosen.reshape(taken.shape)


def choose_tokens(
    keys: UInt64Array, ngrams: Int64Array, maskable: BoolArray, text: BoolArray, budgets: Int64Array
) -> BoolArray:
    """Return true for predicted tokens, bool ``[B, T]``: whole n-grams without special tokens.

    Args:
        keys: random keys ``[B]``.
        ngrams: the n-gram of each token ``[B, T]``, as ``split_ngrams`` numbers them.
        maskable: text tokens that are not special ``[B, T]``.
        text: tokens of the two segments ``[B, T]``.
        budgets: tokens to take ``[B]``.
    """
    num_rows = len(keys)
    num_ngrams = int(ngrams[:, -1].max()) + 1
    flat = ngrams + np.arange(num_rows)[:, None] * num_ngrams
    sizes = np.bincount(flat[text], minlength=num_rows * num_ngrams)
    sizes[flat[text & ~maskable]] = 0
    chosen = choose_ngrams(keys, sizes.reshape(num_rows, num_ngrams), budgets)
    # Padding and [CLS] may point beside their row's n-grams; `text` leaves them out.
    predicted: BoolArray = chosen.ravel()[flat]
    predicted &= text
    return predicted


def replace_tokens(keys: UInt64Array, ids: Int64Array, mask_id: int, ordinary_ids: Int64Array) -> Int64Array:
    """Return the inputs in place of the predicted tokens ``ids``, all ``[M]``; ``keys`` are ``[M]``.

    80 % become ``mask_id``, 10 % a random one of ``ordinary_ids``, 10 % stay (Devlin et al., "BERT", 2019).
    """
    bits = draw(keys[:, None], np.arange(2))
    u = uniform(bits[:, 0])
    random_ids = ordinary_ids[below(bits[:, 1], len(ordinary_ids))]
    return np.where(u < 0.8, mask_id, np.where(u < 0.9, random_ids, ids))
