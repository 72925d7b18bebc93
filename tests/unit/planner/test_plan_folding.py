"""One host stands for all of its kind: a small cluster simulated host by host, chunk by chunk, takes as long.

The oracle knows nothing of the planner. Every link of every host is a queue that carries one chunk at a time;
chunks go where ``decide.server_assignment.chunk_pattern`` sends them, a server sums what all hosts have sent
and then answers each of them.
"""

from __future__ import annotations

import heapq
from collections import defaultdict

import pytest

from plan_made import hosts
from shoal.decide.server_assignment import chunk_pattern
from shoal.planner.network import capacities, collective
from shoal.planner.simulate import exchange

M = 1e8
NUM_CHUNKS = 4000


class Links:
    """Links that carry what asks first; a chunk on its way occupies two of them, one after the other."""

    def __init__(self, rates: dict[str, float]) -> None:
        self.rates = rates
        self.free_s: dict[str, float] = defaultdict(float)

    def carry(self, link: str, num_bytes: float, ready_s: float) -> float:
        """Return when the last byte has left the link."""
        self.free_s[link] = max(self.free_s[link], ready_s) + num_bytes / self.rates[link]
        return self.free_s[link]


def two_hops_host_by_host(n: int, rates: dict[str, float], pattern: list[int]) -> float:
    """Return when every host has every sum; server j is host j's, or helper j - n."""
    links, chunk = Links(rates), M / NUM_CHUNKS
    events: list[tuple[float, int, str, int, int]] = []
    arrived: dict[int, int] = defaultdict(int)
    finished_s, order = 0.0, 0

    def name(server: int) -> str:
        return f"host {server}" if server < n else f"helper {server - n}"

    def push(at_s: float, what: str, k: int, host: int) -> None:
        nonlocal order
        order += 1
        heapq.heappush(events, (at_s, order, what, k, host))

    def send(at_s: float, k: int, host: int) -> None:
        """A worker asks for its link one chunk after the other, so that its server has turns too."""
        if k < NUM_CHUNKS:
            own = pattern[k % len(pattern)] == host
            push(at_s if own else links.carry(f"out host {host}", chunk, at_s), "sent", k, host)

    for host in range(n):
        send(0.0, 0, host)
    while events:
        now_s, _, what, k, host = heapq.heappop(events)
        server = pattern[k % len(pattern)]
        if what == "sent":
            send(now_s, k + 1, host)
            push(
                now_s if server == host else links.carry(f"in {name(server)}", chunk, now_s),
                "summed", k, host,
            )  # fmt: skip
        elif what == "summed":
            arrived[k] += 1
            if arrived[k] == n:
                for other in range(n):
                    left_s = now_s if server == other else links.carry(f"out {name(server)}", chunk, now_s)
                    push(left_s, "answered", k, other)
        else:
            back_s = now_s if server == host else links.carry(f"in host {host}", chunk, now_s)
            finished_s = max(finished_s, back_s)
    return finished_s


@pytest.mark.parametrize(
    ("n", "num_helpers", "helper_nic"), [(4, 0, 1e8), (6, 0, 1e8), (4, 2, 1e8), (4, 4, 1e8), (6, 3, 2e8)]
)
def test_two_hops(n: int, num_helpers: int, helper_nic: float) -> None:
    workers = hosts(n, per_host=1, nic=1e8)
    helpers = hosts(num_helpers, per_host=0, nic=helper_nic, accelerator=None) if num_helpers else None
    algorithm = "two-hop-helpers" if helpers else "two-hop"
    how = collective(algorithm, workers, helpers)
    folded_s = exchange([(0.0, M)], how, capacities(workers, helpers), most_pieces=400).end_s
    rates = {f"{way} host {i}": 1e8 for way in ("in", "out") for i in range(n)}
    rates |= {f"{way} helper {i}": helper_nic for way in ("in", "out") for i in range(num_helpers)}
    pattern = chunk_pattern([str(i) for i in range(n)], [helper_nic / 1e8] * num_helpers)
    assert folded_s == pytest.approx(two_hops_host_by_host(n, rates, pattern), rel=0.02)


@pytest.mark.parametrize("n", [2, 3, 8])
def test_ring(n: int) -> None:
    workers = hosts(n, per_host=1, nic=1e8)
    folded_s = exchange([(0.0, M)], collective("ring", workers), capacities(workers, algorithm="ring")).end_s
    links = Links({f"{way} {i}": 1e8 for way in ("out", "in") for i in range(n)})
    pieces = 50  # of a part: what is received is passed on piece by piece
    ready_s = [[0.0] * pieces for _ in range(n)]
    for _ in range(2 * (n - 1)):
        sent = [
            [links.carry(f"out {i}", M / n / pieces, ready_s[i][k]) for k in range(pieces)] for i in range(n)
        ]
        ready_s = [
            [links.carry(f"in {i}", M / n / pieces, sent[i - 1][k]) for k in range(pieces)] for i in range(n)
        ]
    # Each piece is stored before it is passed on: a piece's time a hop, which a fluid has not.
    assert folded_s == pytest.approx(max(max(times) for times in ready_s), rel=0.03)
