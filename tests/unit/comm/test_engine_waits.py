"""Tests counters against the formulas of the wire, waits with timeouts, refusals, and abort."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from engine_group import DEADLINE_S, PLACEMENTS, Group, engine_group, submit, wait
from shoal.comm.engine import CommError, Engine
from shoal.errors import UsageError

MIB = 1 << 20
CLOSE = 0.03
"""Headers, heartbeats, chunks that do not divide evenly."""


# ---- bytes on the wire ----------------------------------------------------------------------------------


def settle(group: Group) -> None:
    """Wait until nothing but heartbeats moves: the last bytes are counted a little after they arrive."""

    def moved() -> int:
        counts = [each.counters() for each in (*group.engines, *group.servers)]
        return sum(count["bytes_sent"] + count["bytes_received"] for count in counts)

    deadline = time.monotonic() + DEADLINE_S
    last = -MIB
    while (total := moved()) - last > 10_000 and time.monotonic() < deadline:
        last = total
        time.sleep(0.1)


def traffic(group: Group, collective: Callable[[], None]) -> list[tuple[int, int]]:
    """Bytes that each rank has sent and received."""

    def now() -> list[tuple[int, int]]:
        counts = [engine.counters() for engine in group.engines]
        return [(count["bytes_sent"], count["bytes_received"]) for count in counts]

    before = now()
    collective()
    settle(group)
    return [(sent - s, received - r) for (sent, received), (s, r) in zip(now(), before, strict=True)]


@pytest.mark.parametrize("size", [2, 4])
def test_all_reduce_with_as_many_helpers_moves_each_byte_once_each_way(size: int) -> None:
    hosts = [f"h{rank}" for rank in range(size)]
    with engine_group(hosts, size, pattern=range(size, 2 * size)) as group:
        tensors = [np.ones(4 * MIB // 4, np.float32) for _ in hosts]
        for sent, received in traffic(group, lambda: group.run("all_reduce", tensors, tensors)):
            assert sent == pytest.approx(4 * MIB, rel=CLOSE)
            assert received == pytest.approx(4 * MIB, rel=CLOSE)
        for server in group.servers:
            counts = server.counters()
            assert counts["bytes_received"] == pytest.approx(4 * MIB, rel=CLOSE)
            assert counts["bytes_sent"] == pytest.approx(4 * MIB, rel=CLOSE)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    ("kind", "passes"), [("all_reduce", 2), ("reduce_scatter", 1), ("all_gather", 1)], ids=lambda x: str(x)
)
def test_colocated_servers_move_what_a_ring_moves(size: int, kind: str, passes: int) -> None:
    """all_reduce: 2 (n - 1) / n of the tensor; one hop, half of that, for its two halves alone."""
    whole = 4 * MIB
    with engine_group([f"h{rank}" for rank in range(size)]) as group:
        large = [np.ones(whole, np.uint8) for _ in range(size)]
        small = [np.ones(whole // size, np.uint8) for _ in range(size)]
        inputs = small if kind == "all_gather" else large
        outputs = small if kind == "reduce_scatter" else large
        want = passes * (size - 1) * whole / size
        for sent, received in traffic(group, lambda: group.run(kind, inputs, outputs)):
            assert sent == pytest.approx(want, rel=CLOSE)
            assert received == pytest.approx(want, rel=CLOSE)


def test_a_host_sends_its_sum_once_however_many_workers_it_has() -> None:
    with engine_group(["a", "a", "a", "b", "b", "b"]) as group:
        tensors = [np.ones(4 * MIB // 4, np.float32) for _ in range(6)]
        moved = traffic(group, lambda: group.run("all_reduce", tensors, tensors))
    assert sum(sent for sent, _ in moved[:3]) == pytest.approx(4 * MIB, rel=CLOSE)
    assert sum(received for _, received in moved[:3]) == pytest.approx(4 * MIB, rel=CLOSE)


def test_ranks_of_one_host_send_nothing() -> None:
    with engine_group(["a"] * 4) as group:
        tensors = [np.ones(MIB, np.float32) for _ in range(4)]
        for sent, received in traffic(group, lambda: group.run("all_reduce", tensors, tensors)):
            assert max(sent, received) < 100_000  # heartbeats


def test_bfloat16_travels_in_16_bits() -> None:
    with engine_group(["a", "b"], 2, pattern=[2, 3]) as group:
        tensors = [np.ones(MIB, np.uint16) for _ in range(2)]
        for sent, _ in traffic(group, lambda: group.run("all_reduce", tensors, tensors, dtype="bfloat16")):
            assert sent == pytest.approx(2 * MIB, rel=CLOSE)


def test_operations_are_counted_by_kind() -> None:
    with engine_group(["a", "b"]) as group:
        x = [np.ones(100, np.float64) for _ in range(2)]
        for _ in range(3):
            group.run("all_reduce", x, x)
        group.run("broadcast", x, x)
        for engine in group.engines:
            counts = engine.counters()
            assert (counts["ops_all_reduce"], counts["bytes_all_reduce"]) == (3, 2400)
            assert (counts["ops_broadcast"], counts["bytes_broadcast"]) == (1, 800)


# ---- waiting --------------------------------------------------------------------------------------------


def test_a_wait_that_ends_early_says_so_and_can_be_repeated() -> None:
    with engine_group(["a", "b"]) as group:
        first, second = group.engines
        x, y = np.ones(1000, np.float32), np.ones(1000, np.float32)
        handle = submit(first, "all_reduce", x, x)
        begin = time.monotonic()
        assert first.wait(handle, 0.0) is False
        assert first.wait(handle, 0.05) is False
        assert time.monotonic() - begin >= 0.05
        assert not first.is_done(handle)
        wait(second, submit(second, "all_reduce", y, y))
        assert first.wait(handle) is True
        assert first.is_done(handle)
        assert first.wait(handle, 0.0) is True  # for ever
        assert (x == 2).all()


def test_functions_are_called_once_in_the_order_of_their_operations() -> None:
    with engine_group(["a", "b", "b"]) as group:

        def run(rank: int, engine: Engine) -> None:
            tensors = [np.ones(n, np.float32) for n in range(0, 5000, 500)]
            handles = [submit(engine, "all_reduce", x, x) for x in tensors]
            seen: queue.SimpleQueue[int] = queue.SimpleQueue()
            for handle in handles:
                engine.then(handle, partial(seen.put, handle))
            assert [seen.get(timeout=DEADLINE_S) for _ in handles] == handles
            engine.then(handles[0], partial(seen.put, -1))  # long over
            assert seen.get(timeout=DEADLINE_S) == -1
            assert seen.empty()

        group.each(run)


def test_a_function_may_submit_and_wait() -> None:
    with engine_group(["a", "b"]) as group:

        def run(rank: int, engine: Engine) -> None:
            x, y = np.ones(1000, np.float32), np.ones(500, np.float32)
            ended = threading.Event()

            def then() -> None:
                wait(engine, submit(engine, "all_reduce", y, y))
                ended.set()

            engine.then(submit(engine, "all_reduce", x, x), then)
            assert ended.wait(DEADLINE_S)
            assert (x == 2).all() and (y == 2).all()
            assert engine.num_submitted == 2

        group.each(run)


def test_a_function_does_not_submit_after_the_program_has() -> None:
    with engine_group(["a", "b"]) as group:

        def run(rank: int, engine: Engine) -> None:
            x, y, z = (np.ones(10, np.float32) for _ in range(3))
            problems: queue.SimpleQueue[str] = queue.SimpleQueue()
            overtaken = threading.Event()

            def then() -> None:
                overtaken.wait(DEADLINE_S)
                with pytest.raises(UsageError, match="a callback begins all_reduce") as problem:
                    submit(engine, "all_reduce", z, z)
                problems.put(str(problem.value))

            engine.then(submit(engine, "all_reduce", x, x), then)
            last = submit(engine, "all_reduce", y, y)
            overtaken.set()
            assert "ordered_callbacks=True" in problems.get(timeout=DEADLINE_S)
            wait(engine, last)

        group.each(run)


def test_a_passed_deadline_fails_the_group_and_names_the_missing() -> None:
    with engine_group(["a", "b"]) as group:
        x = np.ones((3, 5), np.float32)
        handle = submit(group.engines[0], "all_reduce", x, x, timeout_s=0.3)
        with pytest.raises(
            CommError, match=r"all_reduce of float32\[15\] \(sum\).*rank 1 .*pid 1001.* has not begun it"
        ):
            group.engines[0].wait(handle, DEADLINE_S)
        assert "has not begun it" in (group.engines[0].error() or "")


@pytest.mark.parametrize(("hosts", "num_helpers"), PLACEMENTS.values(), ids=PLACEMENTS)
def test_abort_frees_every_waiter_with_its_reason(hosts: list[str], num_helpers: int) -> None:
    all_wait = threading.Barrier(len(hosts))
    with engine_group(hosts, num_helpers) as group:

        def run(rank: int, engine: Engine) -> None:
            if rank == 0:
                all_wait.wait(DEADLINE_S)
                return engine.abort("enough of this")
            x = np.ones(10_000, np.float32)
            handle = submit(engine, "all_reduce", x, x)
            ended = threading.Event()
            engine.then(handle, ended.set)
            all_wait.wait(DEADLINE_S)
            with pytest.raises(CommError, match="enough of this"):
                engine.wait(handle, DEADLINE_S)
            assert ended.wait(DEADLINE_S)
            with pytest.raises(CommError, match="enough of this"):
                submit(engine, "all_reduce", x, x)
            return None

        group.each(run)


# ---- what is refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ({"kind": "all_sum"}, "all_sum"),
        ({"dtype": "complex64"}, "complex64"),
        ({"op": "median"}, "median"),
        ({"op": "bxor"}, "needs integers, not float32"),
        ({"kind": "broadcast", "root": 2}, "root .* rank 2 of 2"),
        ({"kind": "reduce", "root": -1}, "root .* rank -1 of 2"),
    ],
)
def test_what_cannot_be_is_refused_and_the_group_goes_on(words: dict[str, object], what: str) -> None:
    with engine_group(["a", "b"]) as group:
        x = [np.ones(10, np.float32) for _ in range(2)]
        for rank, engine in enumerate(group.engines):
            asked = {"kind": "all_reduce", **words}
            with pytest.raises(ValueError, match=what):
                submit(engine, input=x[rank], output=x[rank], **asked)  # type: ignore[arg-type]
        group.run("all_reduce", x, x)
        assert (x[0] == 2).all()


@pytest.mark.parametrize(("hosts", "num_helpers"), PLACEMENTS.values(), ids=PLACEMENTS)
def test_ranks_that_ask_for_different_things_are_named(hosts: list[str], num_helpers: int) -> None:
    with engine_group(hosts, num_helpers) as group:

        def run(rank: int, engine: Engine) -> None:
            x = np.ones(10, np.float32 if rank else np.int32)
            with pytest.raises(
                CommError, match=r"rank 0 .* asks for all_reduce of int32\[10\].* rank \d .* float32\[10\]"
            ):
                engine.wait(submit(engine, "all_reduce", x, x), DEADLINE_S)

        group.each(run)


def test_after_close_the_engine_is_closed() -> None:
    with engine_group(["a", "b"]) as group:
        x = np.ones(10, np.float32)
        for engine in group.engines:
            engine.close()
            engine.close()
            assert engine.error() is None
            with pytest.raises(CommError, match=r"closed|not open"):
                submit(engine, "all_reduce", x, x)
