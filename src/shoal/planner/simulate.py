"""Simulates buckets that travel over shared links, as events on a heap.

A bucket travels in pieces; piece k + 1 enters a phase when piece k has left it, so that phases overlap.
Pieces of several buckets share links max-min fairly (Bertsekas & Gallager, Data Networks, section 6.5.2),
as flows of TCP and of fair switches do.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from shoal.planner.network import Collective

PIECE_BYTES, MOST_PIECES = 32 << 10, 32
"""Pieces that a bucket travels in; the second hop begins after the first of them. The engine's are of 32 KiB
between hosts (``EngineOptions.chunk_bytes``); at most 32 pieces are simulated per bucket, which makes a
large one up to 3 % slower than it is."""


@dataclass(frozen=True, kw_only=True)
class PhaseTime:
    """A bucket in a phase, in seconds since the step began."""

    bucket: int
    phase: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """The averaging of all buckets of a step."""

    end_s: float
    """Arrival of the last bucket; 0 without buckets."""
    spans: tuple[PhaseTime, ...]
    busy_s: Mapping[str, float]
    """Seconds that each link would be busy at its full rate."""


@dataclass(eq=False, slots=True)
class _Piece:
    bucket: int
    amount: float
    left: float = 0.0
    phase: int = 0


def exchange(
    ready: Sequence[tuple[float, float]],
    collective: Collective,
    rates: Mapping[str, float],
    *,
    most_pieces: int = MOST_PIECES,
) -> Exchange:
    """Simulate the averaging of buckets.

    Args:
        ready: (second at which it is ready, bytes) of each bucket.
        rates: bytes/s of each link.
        most_pieces: limit on the pieces of a bucket.
    """
    if not collective.phases or not ready:
        return Exchange(end_s=max((time for time, _ in ready), default=0.0), spans=(), busy_s={})
    return _Simulation(ready, collective, rates, most_pieces).run()


class _Simulation:
    """State of one exchange; times are seconds, a piece's amount is bytes of its bucket."""

    def __init__(
        self,
        ready: Sequence[tuple[float, float]],
        collective: Collective,
        rates: Mapping[str, float],
        most_pieces: int,
    ) -> None:
        self.ready, self.phases, self.at_once = ready, collective.phases, collective.at_once
        self.rates, self.most_pieces = rates, most_pieces if len(self.phases) > 1 else 1
        self.now = self.end_s = 0.0
        self.events: list[tuple[float, int, _Piece]] = []
        self.sequence = itertools.count()
        self.active: list[_Piece] = []
        # A bucket's pieces pass a phase one after the other: (bucket, phase) -> the active one, then others.
        self.queues: defaultdict[tuple[int, int], deque[_Piece]] = defaultdict(deque)
        self.unreleased = enumerate(ready)
        self.unfinished: dict[int, int] = {}
        self.speeds: dict[tuple[int, ...], list[float]] = {}
        self.begun: dict[tuple[int, int], float] = {}
        self.ended: dict[tuple[int, int], float] = {}

    def run(self) -> Exchange:
        self._release(self.at_once)
        while self.events or self.active:
            self._advance()
        spans = tuple(
            PhaseTime(
                bucket=bucket, phase=self.phases[phase].name, begin_s=begin, end_s=self.ended[bucket, phase]
            )
            for (bucket, phase), begin in sorted(self.begun.items())
        )
        total = sum(num_bytes for _, num_bytes in self.ready)
        busy: defaultdict[str, float] = defaultdict(float)
        for phase in self.phases:
            for link, amount in phase.demands:
                busy[link] += amount * total / self.rates[link]
        return Exchange(end_s=self.end_s, spans=spans, busy_s=busy)

    def _release(self, count: int | None) -> None:
        """Allow the next buckets (None: all) to begin as soon as they are ready."""
        for bucket, (time, num_bytes) in itertools.islice(self.unreleased, count):
            num_pieces = min(max(math.ceil(num_bytes / PIECE_BYTES), 1), self.most_pieces)
            self.unfinished[bucket] = num_pieces
            for _ in range(num_pieces):
                self._at(max(time, self.now), _Piece(bucket, num_bytes / num_pieces))

    def _at(self, time: float, piece: _Piece) -> None:
        heapq.heappush(self.events, (time, next(self.sequence), piece))

    def _advance(self) -> None:
        """Advance the clock to the next arrival or departure."""
        speeds = self._speeds()
        needs = [piece.left / speed for piece, speed in zip(self.active, speeds, strict=True)]
        first = min(needs, default=math.inf)
        arrival = self.events[0][0] if self.events else math.inf
        time = min(self.now + first, arrival)
        passed = time - self.now
        # The first one is done now, whatever the rounding of the clock.
        due = first * (1 + 1e-9) if self.now + first <= arrival else -1.0
        gone = []
        for piece, speed, need in zip(self.active, speeds, needs, strict=True):
            if need <= due:
                gone.append(piece)
            elif math.isfinite(speed):
                piece.left = max(piece.left - speed * passed, 0.0)
        self.now = time
        for piece in gone:
            self.active.remove(piece)
            self._finish_phase(piece)
        while self.events and self.events[0][0] <= self.now:
            self._arrive(heapq.heappop(self.events)[2])

    def _arrive(self, piece: _Piece) -> None:
        """Enter the next phase behind the piece before, or finish."""
        if piece.phase < len(self.phases):
            queue = self.queues[piece.bucket, piece.phase]
            queue.append(piece)
            if len(queue) == 1:
                self._begin(piece)
            return
        self.end_s = max(self.end_s, self.now)
        self.unfinished[piece.bucket] -= 1
        if self.unfinished[piece.bucket] == 0:
            self._release(1)

    def _begin(self, piece: _Piece) -> None:
        self.begun.setdefault((piece.bucket, piece.phase), self.now)
        piece.left = piece.amount
        self.active.append(piece)

    def _finish_phase(self, piece: _Piece) -> None:
        key = (piece.bucket, piece.phase)
        self.ended[key] = self.now + self.phases[piece.phase].latency_s
        piece.phase += 1
        self._at(self.ended[key], piece)
        queue = self.queues[key]
        queue.popleft()
        if queue:
            self._begin(queue[0])

    def _speeds(self) -> list[float]:
        """Return the max-min fair rate of each active piece, in bytes of its bucket per second."""
        phases = tuple(piece.phase for piece in self.active)
        if phases not in self.speeds:
            self.speeds[phases] = self._fair_rates(phases)
        return self.speeds[phases]

    def _fair_rates(self, phases: tuple[int, ...]) -> list[float]:
        """Return the rates of pieces in these phases, which depend on nothing else."""
        demands = [self.phases[phase].demands for phase in phases]
        if len(demands) == 1:
            return [min(self.rates[link] / amount for link, amount in demands[0])]
        speeds = [math.inf] * len(demands)
        left = dict(self.rates)
        open_ = set(range(len(demands)))
        while open_:
            load: defaultdict[str, float] = defaultdict(float)
            for index in open_:
                for link, amount in demands[index]:
                    load[link] += amount
            if not load:
                break
            level, tight = min((left[link] / amount, link) for link, amount in load.items())
            fixed = [i for i in open_ if any(link == tight for link, _ in demands[i])]
            for index in fixed:
                speeds[index] = level
                open_.discard(index)
                for link, amount in demands[index]:
                    left[link] = max(left[link] - level * amount, 0.0) if math.isfinite(level) else left[link]
        return speeds


@lru_cache(maxsize=1024)
def slowest(num_workers: int, jitter: float) -> float:
    """Return the time of the slowest worker relative to the mean, averaged over 32 steps.

    Each worker's time is drawn from a normal distribution with relative standard deviation ``jitter``.
    """
    draws = np.random.default_rng([0, num_workers])
    largest = [np.max(draws.standard_normal(num_workers)) for _ in range(32)]
    return 1.0 + jitter * float(np.mean(largest))
