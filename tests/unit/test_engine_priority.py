"""Urgent operations overtake what waits to be sent: the order changes, the bits do not, and nothing hangs."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import numpy as np
import pytest

from engine_group import DEADLINE_S, PLACEMENTS, Array, engine_group, expected, random_values, same_bits, wait
from shoal.comm.engine import Engine, Operation

CHUNK = 8 << 10
WINDOW = {"chunk_bytes": CHUNK, "least_window_bytes": CHUNK, "window_bytes": CHUNK}
"""One chunk on its way for each server that there may be: two of them with two hosts."""


def begin(engine: Engine, data: Array, priority: int) -> int:
    """All-reduce in place."""
    asked = Operation(
        kind="all_reduce", input=data.ctypes.data, output=data.ctypes.data, count=data.size,
        dtype=str(data.dtype), shape=data.shape, timeout_s=DEADLINE_S, priority=priority,
    )  # fmt: skip
    return engine.submit(asked)


def pushes(engine: Engine) -> Iterator[int]:
    return (seq for what, _, _, seq, _ in engine.take_trace() if what == "push")


def test_urgent_chunks_overtake_and_the_oldest_operation_goes_on() -> None:
    num_old, num_urgent = 12, 6
    with engine_group(["a", "b"], pattern=[1], **WINDOW) as group:
        first, second = group.engines
        first.trace(True)
        olds = [random_values(num_old * CHUNK // 4, "float32", rank) for rank in range(2)]
        urgents = [random_values(num_urgent * CHUNK // 4, "float32", 2 + rank) for rank in range(2)]
        sums = [olds[0] + olds[1], urgents[0] + urgents[1]]
        handles = [begin(first, olds[0], 0), begin(first, urgents[0], 1)]
        wait(second, begin(second, olds[1], 0))  # ends before this rank begins the urgent one
        wait(second, begin(second, urgents[1], 1))
        for handle in handles:
            wait(first, handle)
        order = list(pushes(first))
    # The window is full of the old one when the urgent one comes; what then goes first is urgent, until the
    # window is full of it. It is not answered, and the old one goes on, one chunk at a time.
    assert order == [0, 0, 1, 1] + [0] * (num_old - 2) + [1] * (num_urgent - 2)
    for have, want in zip([*olds, *urgents], [sums[0], sums[0], sums[1], sums[1]], strict=True):
        assert same_bits(have, want)


@pytest.mark.parametrize(("hosts", "num_helpers"), PLACEMENTS.values(), ids=PLACEMENTS)
def test_any_priorities_give_the_same_bits(hosts: list[str], num_helpers: int) -> None:
    size, num_ops = len(hosts), 12
    counts = [random.Random(op).choice([1, 3000, 20_000]) for op in range(num_ops)]
    inputs = [
        [random_values(counts[op], "float32", 100 * op + r) for r in range(size)] for op in range(num_ops)
    ]
    wanted = [expected(hosts, inputs[op], "float32") for op in range(num_ops)]

    def stream(rank: int, engine: Engine) -> None:
        draw = random.Random(rank)  # each rank orders and waits as it likes
        handles: list[int] = []
        for op in range(num_ops):
            handles.append(begin(engine, inputs[op][rank], draw.randrange(-3, 4)))
            if draw.random() < 0.3:
                wait(engine, handles.pop(draw.randrange(len(handles))))
            time.sleep(draw.choice([0, 0.002]))
        for handle in handles:
            wait(engine, handle)

    with engine_group(hosts, num_helpers, **WINDOW) as group:
        group.each(stream)
    for op in range(num_ops):
        assert all(same_bits(inputs[op][rank], wanted[op]) for rank in range(size)), op


def test_operations_without_a_priority_keep_their_order() -> None:
    with engine_group(["a", "b"], pattern=[1], **WINDOW) as group:
        first, second = group.engines
        first.trace(True)
        data = [[np.ones(4 * CHUNK // 4, np.float32) for _ in range(3)] for _ in range(2)]
        ours = [begin(first, each, 0) for each in data[0]]
        theirs = [begin(second, each, 0) for each in data[1]]
        for mine, yours in zip(ours, theirs, strict=True):
            wait(first, mine)
            wait(second, yours)
        assert list(pushes(first)) == [0] * 4 + [1] * 4 + [2] * 4
