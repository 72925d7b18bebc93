"""Keyed random numbers: the written generator, and the same numbers whatever is asked together."""

import ast
import math
from itertools import product
from pathlib import Path

import numpy as np
import pytest

import shoal
from shoal.decide.rng import Stream, below, draw, random_keys, uniform

SOURCES = Path(shoal.__file__).parent
# The first outputs of splitmix64 from state 1234567, as published with its reference implementation.
KNOWN = [
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
]


def test_outputs_are_those_of_splitmix64():
    assert draw(np.uint64(1234567), np.arange(5)).tolist() == KNOWN


def test_keys_and_counters_broadcast_and_do_not_depend_on_company():
    keys = random_keys(3, Stream.EXAMPLE, np.arange(4), 9)
    together = draw(keys[:, None], np.arange(6))
    assert together.shape == (4, 6)
    for row in range(4):
        for column in range(6):
            alone = draw(random_keys(3, Stream.EXAMPLE, row, 9), column)
            assert alone.tolist() == [together[row, column]]


def test_each_word_of_a_key_matters():
    streams = (Stream.ORDER, Stream.EXAMPLE)
    words = product((0, 1, -1, 2**70), streams, range(3), range(3))
    keys = {int(random_keys(seed, stream, a, b)[0]) for seed, stream, a, b in words}
    assert len(keys) == (4 * 3 * 3 - 9) * len(streams)  # 2**70 is 0 in the 64 bits of a seed


def test_inputs_are_left_alone():
    counters, keys = np.arange(3, dtype=np.uint64), np.arange(3, dtype=np.uint64)
    draw(keys, counters)
    assert counters.tolist() == keys.tolist() == [0, 1, 2]


def test_uniform_covers_its_range_and_stays_in_it():
    assert uniform(np.array([0, 2**64 - 1], dtype=np.uint64)).tolist() == [0.0, 1 - 2.0**-53]
    assert below(np.array([0, 2**64 - 1], dtype=np.uint64), 7).tolist() == [0, 6]


@pytest.mark.parametrize("bound", [1, 2, 3, 10])
def test_below_is_even(bound):
    num_draws = 60_000
    counts = np.bincount(
        below(draw(random_keys(5, Stream.EXAMPLE), np.arange(num_draws)), bound), minlength=bound
    )
    assert len(counts) == bound
    deviation = math.sqrt(num_draws * (1 / bound) * (1 - 1 / bound))
    assert np.abs(counts - num_draws / bound).max() <= 4.5 * deviation


def test_each_stream_has_a_number_of_its_own():
    assert len({int(stream) for stream in Stream}) == len(Stream.__members__)


def test_streams_are_passed_by_name():
    """A bare number could be that of another use of the seed."""
    texts = {path: path.read_text(encoding="utf-8") for path in SOURCES.rglob("*.py")}
    calls = [
        (path, call)
        for path, text in texts.items()
        if "random_keys" in text
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call) and getattr(call.func, "id", None) == "random_keys"
    ]
    assert len(calls) > 10
    for path, call in calls:
        stream = call.args[1]
        assert isinstance(stream, ast.Attribute), f"{path}:{call.lineno}"
        assert isinstance(stream.value, ast.Name) and stream.value.id == "Stream", f"{path}:{call.lineno}"


def test_numbers_of_a_stream_stay():
    """They decide what a resumed run reads next."""
    keys = random_keys(42, Stream.EXAMPLE, 3, np.arange(2))
    assert keys.tolist() == [16063489224280395834, 6202364888782809892]
