"""Tests mismatched collectives, ranks that never come, and user aborts: errors instead of hangs."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import pytest
from comm_group import BOUND_S, Group, Member

from shoal.comm.engine import EngineOptions
from shoal.errors import ShoalError

HOSTS = [pytest.param("aa", marks=pytest.mark.slow), "ab", pytest.param("aba", marks=pytest.mark.slow), "aab"]
QUICK = EngineOptions(straggler_s=0.4)
Request = tuple[str, str, tuple[int, ...], dict[str, Any]]
"""Kind, dtype, shape and what else a rank asks for."""


def reduction(shape: tuple[int, ...], dtype: str = "float32", op: str = "sum") -> Request:
    return "all_reduce", dtype, shape, {"op": op}


def delegated(name: str, shape: tuple[int, ...]) -> Request:
    return "delegated", "float32", shape, {"op": name}


BARRIER: Request = ("barrier", "uint8", (), {"count": 0})
SIX: Request = reduction((6,))


def brings(rank: int, shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    """Return a rank's operand: small integers that differ by rank and position."""
    numbers = (rank + 1) * (1 + np.arange(math.prod(shape)) % 11)
    return numbers.astype(dtype).reshape(shape)


def ask(member: Member, requests: dict[int, list[Request]], late_s: float = 0.0) -> None:
    """Agree once, then submit what ``requests`` gives this rank, rank 1 so much later, and wait for it.

    Reports as ``"outputs"`` what each request has left in ``size`` times the memory that was given.
    """
    agreed = np.ones(100_000, np.float32)
    member.end(member.begin("all_reduce", agreed))
    assert (agreed == member.size).all()
    member.report("agreed")
    member.told(60)
    held, handles = [], []
    time.sleep(late_s if member.rank == 1 else 0)
    member.report("asks")
    for kind, dtype, shape, given in requests[member.rank]:
        data = brings(member.rank, shape, dtype)
        output = np.zeros((member.size, *shape), dtype)
        held.append((data, output))
        handles.append(member.begin(kind, data, output, **given))
    for handle in handles:
        member.end(handle)
    member.report("outputs", [output for _, output in held])
    time.sleep(0.5)  # a root does not wait for the others: what it hears too late ends the operation after
    member.end(member.begin("barrier", np.zeros(0, np.uint8)))


def let_all_ask(group: Group) -> None:
    """Let the ranks go on once none of them is still in the first operation."""
    for rank in range(group.size):
        group.expect(rank, "agreed")
    for rank in range(group.size):
        group.tell(rank)


def run(hosts: str, one: list[Request], others: list[Request]) -> tuple[Group, list[str]]:
    """Rank 1 asks for ``one`` and the others for ``others``; return the group and each rank's error."""
    requests = {rank: one if rank == 1 else others for rank in range(len(hosts))}
    with Group(ask, hosts, requests, options=QUICK) as group:
        let_all_ask(group)
        since = max(group.expect(rank, "asks").at for rank in range(group.size))
        return group, group.errors(range(group.size), since)


CASES: dict[str, tuple[list[Request], list[Request], tuple[str, str]]] = {
    "shape": ([reduction((11, 3))], [reduction((10, 3))], ("float32[11, 3]", "float32[10, 3]")),
    "chunks": ([reduction((500_000,))], [SIX], ("float32[500000]", "float32[6]")),
    "width": ([reduction((6,), "float64")], [SIX], ("float64[6]", "float32[6]")),
    "dtype": ([reduction((6,), "int32")], [SIX], ("int32[6]", "float32[6]")),
    "op": ([reduction((6,), op="max")], [SIX], ("float32[6] (max)", "float32[6] (sum)")),
    "order": ([BARRIER, SIX], [SIX, BARRIER], ("asks for barrier", "all_reduce of float32[6]")),
    "kind": ([("all_gather", "float32", (6,), {})], [SIX], ("all_gather of float32[6]", "all_reduce of")),
    "root": (
        [("broadcast", "float32", (6,), {"root": 1}), BARRIER],
        [("broadcast", "float32", (6,), {"root": 0}), BARRIER],
        ("float32[6] from rank 1", "float32[6] from rank 0"),
    ),
    "target": (
        [("reduce", "float32", (6,), {"root": 1}), BARRIER],
        [("reduce", "float32", (6,), {"root": 0}), BARRIER],
        ("to rank 1", "to rank 0"),
    ),
    "delegated": ([delegated("scatter", (6,))], [SIX], ("scatter of float32[6]", "all_reduce of float32[6]")),
    "both delegated": (
        [delegated("scatter", (6,))],
        [delegated("gather", (6,))],
        ("scatter of float32[6]", "gather of"),
    ),
}
"""The collectives of rank 1 and of the others, and parts of the error message."""

MATRIX = [
    pytest.param(hosts, name, marks=() if hosts == ("ab", "aab")[number % 2] else pytest.mark.slow)
    for number, name in enumerate(CASES)
    for hosts in ("aa", "ab", "aba", "aab")
]
"""Quick: each case on one placement, each of two placements with half the cases."""


@pytest.mark.parametrize(("hosts", "name"), MATRIX)
def test_a_disagreement_names_both_ranks_and_what_they_ask_for(hosts: str, name: str) -> None:
    one, others, words = CASES[name]
    group, errors = run(hosts, one, others)
    for text in errors:
        assert "the ranks do not agree about operation #1" in text
        named = [rank for rank in range(group.size) if f"{group.name(rank)} asks for" in text]
        assert len(named) == 2 and 1 in named, text
        for word in words:
            assert word in text


def test_a_disagreement_is_found_when_it_comes_after_the_end_on_one_rank() -> None:
    requests = {root: [("broadcast", "float32", (6,), {"root": root}), BARRIER] for root in range(2)}
    with Group(ask, "ab", requests, 0.3, options=QUICK) as group:  # a root does not wait for the others
        let_all_ask(group)
        for text in group.errors(range(2), group.expect(1, "asks").at):
            assert "the ranks do not agree about operation #1" in text
            assert "from rank 0" in text and "from rank 1" in text


@pytest.mark.parametrize("hosts", HOSTS)
def test_shapes_of_equal_size_agree(hosts: str) -> None:
    requests = {rank: [reduction((2, 3) if rank == 1 else (6,))] for rank in range(len(hosts))}
    with Group(ask, hosts, requests, options=QUICK) as group:
        let_all_ask(group)
        total = sum(brings(rank, (6,)) for rank in range(group.size))
        for rank in range(group.size):
            (output,) = group.expect(rank, "outputs").value
            sums, rest = output.reshape(group.size, 6)[0], output.reshape(group.size, 6)[1:]
            assert (sums == total).all() and not rest.any(), (rank, output)
            group.expect(rank, "done")


# ---- deadlines and giving up -----------------------------------------------------------------------------


def come_late(member: Member, absent: int, timeout_s: float) -> None:
    data = np.ones((50, 2), np.float32)
    if member.rank != absent:
        member.report("asks")
        member.end(member.begin("all_reduce", data, timeout_s=timeout_s))
        return
    while member.engine.error() is None:
        time.sleep(0.01)
    member.end(member.begin("barrier", data, count=0))  # raises: the group has failed while it was away


@pytest.mark.parametrize(
    "hosts", [pytest.param("aaa", marks=pytest.mark.slow), "aba", pytest.param("abc", marks=pytest.mark.slow)]
)
def test_a_rank_that_never_comes_is_named_at_the_deadline(hosts: str) -> None:
    timeout_s = 1.5
    with Group(come_late, hosts, 1, timeout_s) as group:
        since = min(group.expect(rank, "asks").at for rank in (0, 2))
        errors = group.errors(range(3), since, bound_s=3 * timeout_s)
        for rank in (0, 2):
            assert group.expect(rank, "error").at - since >= timeout_s
        for text in errors:
            assert (
                f"the timeout of {timeout_s} s passed for operation #0, all_reduce of float32[50, 2]" in text
            )
            assert f"{group.name(1)} has not begun it" in text


def give_up(member: Member) -> None:
    data = np.ones(1000, np.float32)
    member.end(member.begin("all_reduce", data))
    if member.rank == 1:
        member.told(60)
        member.report("aborts")
        member.engine.abort("the user has given up")
        raise ShoalError(member.engine.error())
    handles = [member.begin("all_reduce", data) for _ in range(3)] + [member.begin("barrier", data, count=0)]
    member.report("waits")
    member.end(handles[-1])


@pytest.mark.parametrize(
    "hosts", [pytest.param("aaa", marks=pytest.mark.slow), pytest.param("aba", marks=pytest.mark.slow), "abc"]
)
def test_abort_frees_the_waiters_everywhere(hosts: str) -> None:
    with Group(give_up, hosts) as group:
        for rank in (0, 2):
            group.expect(rank, "waits")
        group.tell(1)
        since = group.expect(1, "aborts").at
        for text in group.errors([0, 2], since, bound_s=BOUND_S / 2):
            assert "the user has given up" in text and "under way here: operation #1" in text
        assert "the user has given up" in group.expect(1, "crash").value
