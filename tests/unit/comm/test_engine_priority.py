"""Tests that urgent operations overtake queued ones: in one order on all ranks, with the same bits."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest

from engine_group import DEADLINE_S, PLACEMENTS, Array, engine_group, expected, random_values, same_bits, wait
from shoal.comm.engine import CommError, Engine, Operation

CHUNK = 8 << 10
WINDOW = {"chunk_bytes": CHUNK, "min_window_bytes": CHUNK, "window_bytes": CHUNK}
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


def test_urgent_chunks_overtake_in_the_same_order_everywhere() -> None:
    num_chunks, priorities = (400, 6), (-2, -1)
    with engine_group(["a", "b", "c"], num_helpers=1, pattern=[3], **WINDOW) as group:
        data = [
            [random_values(num * CHUNK // 4, "float32", 10 * op + rank) for rank in range(3)]
            for op, num in enumerate(num_chunks)
        ]
        sums = [each[0] + each[1] + each[2] for each in data]

        def both(rank: int, engine: Engine) -> None:
            engine.trace(True)
            for handle in [begin(engine, data[op][rank], priorities[op]) for op in range(2)]:
                wait(engine, handle)

        group.each(both)
        orders = [list(pushes(engine)) for engine in group.engines]
    assert orders[0] == orders[1] == orders[2]
    assert Counter(orders[0]) == {0: 400, 1: 6}
    # Behind the runs that had been set when the urgent one came, and long before the old one's last chunk.
    assert max(place for place, op in enumerate(orders[0]) if op == 1) < 300
    for have, want in zip(data, sums, strict=True):
        assert all(same_bits(each, want) for each in have)


def test_operations_without_a_priority_do_not_wait_for_those_with_one() -> None:
    """One rank waits for an operation that the other begins only after an older one with a priority."""
    with engine_group(["a", "b"], pattern=[1], **WINDOW) as group:
        background = [random_values(9 * CHUNK // 4, "float32", rank) for rank in range(2)]
        now = [random_values(5 * CHUNK // 4, "float32", 2 + rank) for rank in range(2)]
        sums = [background[0] + background[1], now[0] + now[1]]

        def both(rank: int, engine: Engine) -> None:
            handle = begin(engine, background[rank], -1)
            if rank == 1:
                wait(engine, handle)
            wait(engine, begin(engine, now[rank], 0))
            if rank == 0:
                wait(engine, handle)

        group.each(both)
    for have, want in ((background, sums[0]), (now, sums[1])):
        assert all(same_bits(each, want) for each in have)


def test_all_ranks_give_a_priority_or_none() -> None:
    with engine_group(["a", "b"], straggler_s=0.2) as group:
        data = [np.ones(10, np.float32) for _ in range(2)]
        handles = [begin(engine, data[rank], -rank) for rank, engine in enumerate(group.engines)]
        for engine, handle in zip(group.engines, handles, strict=True):
            with pytest.raises(CommError, match=r"all_reduce of float32\[10\] \(sum\) with a priority"):
                wait(engine, handle)


@pytest.mark.parametrize(("hosts", "num_helpers"), PLACEMENTS.values(), ids=PLACEMENTS)
def test_any_priorities_give_the_same_bits(hosts: list[str], num_helpers: int) -> None:
    size, num_ops = len(hosts), 12
    counts = [random.Random(op).choice([1, 3000, 20_000]) for op in range(num_ops)]
    inputs = [
        [random_values(counts[op], "float32", 100 * op + r) for r in range(size)] for op in range(num_ops)
    ]
    wanted = [expected(hosts, inputs[op], "float32") for op in range(num_ops)]
    priorities = [random.Random(op).randrange(-3, 4) for op in range(num_ops)]

    def stream(rank: int, engine: Engine) -> None:
        draw = random.Random(rank)  # each rank waits as it likes
        handles: list[int] = []
        for op in range(num_ops):
            handles.append(begin(engine, inputs[op][rank], priorities[op]))
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
