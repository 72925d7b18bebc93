"""Tests every collective of the engine, bit for bit against NumPy: kinds, dtypes, operations, placements."""

from __future__ import annotations

import numpy as np
import pytest

from engine_group import (
    FLOATS,
    INTEGERS,
    PLACEMENTS,
    Array,
    Group,
    engine_group,
    expected,
    operations_of,
    random_values,
    same_bits,
    submit,
    wait,
)
from shoal.comm.engine import Engine

REDUCING = [(dtype, op) for dtype in FLOATS + INTEGERS for op in operations_of(dtype)]
placements = pytest.mark.parametrize(("hosts", "num_helpers"), PLACEMENTS.values(), ids=PLACEMENTS)


def check_reducing(group: Group, count: int) -> None:
    """all_reduce, reduce and reduce_scatter of every type with every operation, all under way at once."""
    size = group.size
    inputs, wants = [], []
    for number, (dtype, op) in enumerate(REDUCING):
        spread = 1 if op == "prod" else 8
        inputs.append(
            [random_values(size * count, dtype, 97 * number + r, spread=spread) for r in range(size)]
        )
        wants.append(expected(group.hosts, inputs[-1], dtype, op))

    def run(rank: int, engine: Engine) -> None:
        started = []
        for number, (dtype, op) in enumerate(REDUCING):
            mine, root = inputs[number][rank], number % size
            whole, part, at_root = np.zeros_like(mine), np.zeros_like(mine[:count]), np.zeros_like(mine)
            handles = [
                submit(engine, "all_reduce", mine, whole, dtype=dtype, op=op),
                submit(engine, "reduce_scatter", mine, part, dtype=dtype, op=op),
                submit(engine, "reduce", mine, at_root, dtype=dtype, op=op, root=root),
            ]
            started.append((handles, whole, part, at_root))
        for number, (handles, whole, part, at_root) in enumerate(started):
            for handle in handles:
                wait(engine, handle)
            want, what = wants[number], (REDUCING[number], group.hosts, rank, count)
            assert same_bits(whole, want), ("all_reduce", what)
            assert same_bits(part, want[rank * count : (rank + 1) * count]), ("reduce_scatter", what)
            untouched = np.zeros_like(want)
            assert same_bits(at_root, want if rank == number % size else untouched), ("reduce", what)

    group.each(run)


def check_moving(group: Group, count: int) -> None:
    """broadcast from every root and all_gather of every type, and barriers between them."""
    size = group.size
    types = FLOATS + INTEGERS
    inputs = [[random_values(count, dtype, 31 * k + r) for r in range(size)] for k, dtype in enumerate(types)]

    def run(rank: int, engine: Engine) -> None:
        for k, dtype in enumerate(types):
            everything = np.zeros(size * count, inputs[k][0].dtype)
            handles = [submit(engine, "all_gather", inputs[k][rank], everything, dtype=dtype)]
            copies = [inputs[k][rank].copy() for _ in range(size)]
            for root, copy in enumerate(copies):
                handles.append(submit(engine, "broadcast", copy, copy, dtype=dtype, root=root))
            handles.append(submit(engine, "barrier", copies[0][:0], copies[0][:0], dtype="uint8"))
            for handle in handles:
                wait(engine, handle)
            assert same_bits(everything, np.concatenate(inputs[k])), (dtype, group.hosts, rank, count)
            for root, copy in enumerate(copies):
                assert same_bits(copy, inputs[k][root]), (dtype, group.hosts, rank, root, count)

    group.each(run)


@placements
def test_every_kind_type_and_operation(hosts: list[str], num_helpers: int) -> None:
    with engine_group(hosts, num_helpers) as group:
        check_reducing(group, 509)
        check_moving(group, 509)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 15, 16, 17, 4096, 40_001])
@placements
def test_every_kind_type_and_operation_at_many_sizes(hosts: list[str], num_helpers: int, count: int) -> None:
    with engine_group(hosts, num_helpers) as group:
        check_reducing(group, count)
        check_moving(group, count)


@placements
def test_empty_tensors_keep_the_sequence(hosts: list[str], num_helpers: int) -> None:
    with engine_group(hosts, num_helpers) as group:
        check_reducing(group, 0)
        check_moving(group, 0)
        ones = [np.ones(5, np.float32) for _ in hosts]
        group.run("all_reduce", ones, ones)
        assert all((x == len(hosts)).all() for x in ones)


def odd(values: Array) -> Array:
    """A copy that begins at an odd address."""
    memory = np.zeros(values.nbytes + 1, np.uint8)
    memory[1:] = values.view(np.uint8)
    return memory[1:].view(values.dtype)


@placements
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
def test_any_address_will_do(hosts: list[str], num_helpers: int, dtype: str) -> None:
    count = 10_007
    with engine_group(hosts, num_helpers) as group:
        inputs = [random_values(group.size * count, dtype, rank) for rank in range(group.size)]
        want = expected(hosts, inputs, dtype)
        unaligned = [odd(x) for x in inputs]
        parts = [odd(x[:count]) for x in inputs]
        group.run("reduce_scatter", unaligned, parts, dtype=dtype)
        assert same_bits(np.concatenate(parts), want)
        gathered = [odd(np.zeros_like(x)) for x in inputs]
        group.run("all_gather", parts, gathered, dtype=dtype)
        assert all(same_bits(x, want) for x in gathered)
        group.run("all_reduce", unaligned, unaligned, dtype=dtype)
        assert all(same_bits(x, want) for x in unaligned)


@placements
@pytest.mark.parametrize("count", [7, 50_001])
def test_all_gather_and_reduce_scatter_in_place(hosts: list[str], num_helpers: int, count: int) -> None:
    with engine_group(hosts, num_helpers) as group:
        size = group.size
        inputs = [random_values(size * count, "float32", rank) for rank in range(size)]
        want = expected(hosts, inputs, "float32")
        mine = [slice(rank * count, (rank + 1) * count) for rank in range(size)]
        group.run("reduce_scatter", inputs, [x[s] for x, s in zip(inputs, mine, strict=True)])
        for x, s in zip(inputs, mine, strict=True):
            assert same_bits(x[s], want[s])
        group.run("all_gather", [x[s] for x, s in zip(inputs, mine, strict=True)], inputs)
        assert all(same_bits(x, want) for x in inputs)


@placements
def test_many_under_way_and_waited_for_in_another_order(hosts: list[str], num_helpers: int) -> None:
    num_ops = 60
    with engine_group(hosts, num_helpers, num_slots=4) as group:
        sizes = [(37 * k * k) % 9001 for k in range(num_ops)]
        inputs = [
            [random_values(n, "float32", 1000 * k + r) for r in range(group.size)]
            for k, n in enumerate(sizes)
        ]
        wants = [expected(hosts, each, "float32") for each in inputs]

        def run(rank: int, engine: Engine) -> None:
            tensors = [each[rank].copy() for each in inputs]
            handles = [submit(engine, "all_reduce", x, x) for x in tensors]
            assert handles == sorted(handles)
            for k in np.random.default_rng(rank).permutation(num_ops):
                wait(engine, handles[k])
                assert same_bits(tensors[k], wants[k])

        group.each(run)
