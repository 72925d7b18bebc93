"""Hidden tokens: whole words, n-grams of the right lengths, exactly as many as may be."""

import numpy as np
import plain_examples as plain
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.data.text.masking import (
    choose_ngrams,
    choose_tokens,
    prediction_budgets,
    replace_tokens,
    split_ngrams,
)
from shoal.decide.rng import Stream, draw, random_keys
from synthetic_text import assert_binomial


@pytest.mark.parametrize("max_ngram", [1, 2, 3, 5])
def test_lengths_of_ngrams_are_inversely_likely(max_ngram):
    """The first n-grams of long rows, which no end cuts: p(n) ∝ 1/n."""
    num_rows, num_words, num_kept = 2000, 100, 10
    words = np.ones((num_rows, num_words), dtype=bool)
    segment = np.zeros_like(words)
    segment[:, 0] = True
    ngrams = split_ngrams(random_keys(1, Stream.EXAMPLE, np.arange(num_rows)), words, segment, max_ngram)
    lengths = np.stack([(ngrams == j).sum(axis=1) for j in range(num_kept)])
    total = sum(1 / n for n in range(1, max_ngram + 1))
    for n in range(1, max_ngram + 1):
        if max_ngram > 1:
            assert_binomial(int((lengths == n).sum()), lengths.size, 1 / n / total)
    assert lengths.max() == max_ngram


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_ngrams_are_those_of_the_plain_rules(data):
    num_rows = data.draw(st.integers(1, 5))
    num_tokens = data.draw(st.integers(2, 40))
    max_ngram = data.draw(st.integers(1, 4))
    starts = np.array(
        data.draw(
            st.lists(
                st.lists(st.booleans(), min_size=num_tokens, max_size=num_tokens),
                min_size=num_rows,
                max_size=num_rows,
            )
        )
    )
    border = data.draw(st.integers(1, num_tokens - 1))
    segment = np.zeros_like(starts)
    segment[:, [0, border]] = True
    starts |= segment
    keys = random_keys(data.draw(st.integers(0, 2**64 - 1)), Stream.EXAMPLE, np.arange(num_rows))
    ngrams = split_ngrams(keys, starts, segment, max_ngram)
    for row in range(num_rows):
        word = np.cumsum(starts[row]) - 1
        expected = plain.split_ngrams(int(keys[row]), word[-1] + 1, [0, word[border]], max_ngram)
        number = {w: j for j, words in enumerate(expected) for w in words}
        assert ngrams[row].tolist() == [number[w] for w in word]


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_ngrams_are_taken_greedily_in_random_order(data):
    num_rows, num_ngrams = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 40))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    sizes = rng.integers(0, 7, (num_rows, num_ngrams))
    budgets = rng.integers(0, 30, num_rows)
    keys = random_keys(data.draw(st.integers(0, 2**64 - 1)), Stream.EXAMPLE, np.arange(num_rows))
    chosen = choose_ngrams(keys, sizes, budgets)
    for row in range(num_rows):
        expected = plain.choose(int(keys[row]), sizes[row].tolist(), int(budgets[row]))
        assert set(np.flatnonzero(chosen[row])) == expected


def test_each_ngram_is_equally_likely():
    num_rows, num_ngrams = 20_000, 12
    sizes = np.full((num_rows, num_ngrams), 2)
    chosen = choose_ngrams(random_keys(2, Stream.EXAMPLE, np.arange(num_rows)), sizes, np.full(num_rows, 7))
    assert (chosen.sum(axis=1) == 3).all()
    for count in chosen.sum(axis=0):
        assert_binomial(int(count), num_rows, 3 / num_ngrams)


def test_ngrams_with_special_tokens_are_left_alone():
    ngrams = np.array([[-1, 0, 0, 1, 1, 2, 2, 2]])
    text = np.array([[False, True, True, True, True, True, False, False]])
    maskable = text.copy()
    maskable[0, 3] = False
    for number in range(20):
        chosen = choose_tokens(random_keys(number, Stream.EXAMPLE), ngrams, maskable, text, np.array([9]))
        assert chosen.tolist() == [[False, True, True, False, False, True, False, False]]


def test_budgets_are_rounded_and_bounded():
    budgets = prediction_budgets(np.array([11, 3, 128, 512]), mask_prob=0.15, max_predictions=20)
    assert budgets.tolist() == [2, 1, 19, 20]


def test_replacements_are_80_10_10():
    num_tokens, ordinary = 100_000, np.arange(5, 55)
    ids = np.full(num_tokens, 7)
    seen = replace_tokens(draw(random_keys(3, Stream.EXAMPLE), np.arange(num_tokens)), ids, 4, ordinary)
    assert set(seen.tolist()) == {4, *ordinary.tolist()}
    assert_binomial(int((seen == 4).sum()), num_tokens, 0.8)
    assert_binomial(int((seen == 7).sum()), num_tokens, 0.1 + 0.1 / 50)
    for other in (5, 30, 54):
        assert_binomial(int((seen == other).sum()), num_tokens, 0.1 / 50)
