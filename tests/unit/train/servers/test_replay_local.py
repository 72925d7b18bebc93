"""Tests the replay of local steps with a quorum, of workers that are late by a seed.

The oracle keeps one number for each fragment and plays the workers in the order of their times, with the rule
that rank 0 decides by.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.decide.bounded_waiting import Contribution, StepDecider, WaitingRule
from shoal.errors import ShoalError
from shoal.optim.sgd import SGD
from shoal.train.servers.log import replay_local
from shoal.train.servers.tensors import checksum

EVERY, LAST = 4, 42


@torch.no_grad()
def move_weights(weights: list[Tensor], rank: int, step: int) -> None:
    """Take a local step, which depends on all weights, on the rank and on the batch."""
    mean = sum(float(weight) for weight in weights) / len(weights)
    for number, weight in enumerate(weights):
        weight.mul_(0.9).add_(0.1 * mean + (step % 7) * (number + 1) - 2.0 * rank)


def tokens_of(rank: int, step: int) -> int:
    return (7 * rank + 3 * step) % 5


def weighed(moves: list[Tensor], tokens: list[int]) -> Tensor:
    """Return the mean by tokens, added in the order of the ranks."""
    total = sum(tokens)
    parts = [move * (each / total) for move, each in zip(moves, tokens, strict=True)]
    return sum(parts[1:], parts[0])


@dataclass
class Worker:
    """A worker of the oracle."""

    rank: int
    own: list[Tensor]
    begun: list[Tensor]
    tokens: list[int]
    step: int = 0
    exchange: int = 1
    sent_at: int | None = None


class Oracle:
    """Plays workers that are late now and then, and writes what rank 0 writes."""

    def __init__(
        self, num_workers: int, count: int, delay: int, mix: float, seed: int, *, partial: bool = False
    ) -> None:
        self.draw, self.count, self.delay, self.partial = random.Random(seed), count, delay, partial
        self.kept = mix if delay else 0.0
        waiting = {"late": "partial", "grace_s": 1.5} if partial else {}
        rule = WaitingRule(num_workers, wait_for=num_workers // 2 + 1, **waiting)
        self.decider, self.num_partial = StepDecider(rule), 0
        self.newest = [torch.zeros(()) for _ in range(count)]
        self.workers = [
            Worker(rank, [torch.zeros(()) for _ in range(count)], list(self.newest), [0] * count)
            for rank in range(num_workers)
        ]
        self.moves: dict[tuple[int, int], Tensor] = {}
        self.shares: dict[tuple[int, int], list[int]] = {}
        self.rows: list[dict[str, Any]] = [{"workers": num_workers, "hosts": [*range(num_workers)]}]
        self.taken: Counter[int] = Counter()

    def run(self) -> None:
        times = [(0.0, worker.rank) for worker in self.workers]
        while times:
            now, rank = heappop(times)
            worker = self.workers[rank]
            self.decide(now)
            if self.is_due(worker):
                if self.decider.step < worker.exchange:  # it waits
                    heappush(times, (now + 0.1, rank))
                    continue
                self.merge(worker)
            if worker.sent_at is None and self.is_to_send(worker):
                self.send(worker, now)
                heappush(times, (now, rank))
            elif worker.step < LAST:
                worker.step += 1
                move_weights(worker.own, rank, worker.step)
                worker.tokens = [each + tokens_of(rank, worker.step) for each in worker.tokens]
                self.taken[rank] += 1
                slow = 3.0 if self.draw.random() < 0.3 else 1.0
                heappush(times, (now + slow + self.draw.random(), rank))
        self.finish()

    def end_of(self, exchange: int) -> int:
        return exchange * EVERY // self.count

    def is_due(self, worker: Worker) -> bool:
        return worker.sent_at is not None and worker.step == min(worker.sent_at + self.delay, LAST)

    def is_to_send(self, worker: Worker) -> bool:
        if worker.step == self.end_of(worker.exchange):
            return True
        closes = self.decider.due is not None and worker.exchange == self.decider.step + 1
        is_partial = self.partial and closes and worker.tokens[(worker.exchange - 1) % self.count] > 0
        self.num_partial += is_partial
        return is_partial

    def send(self, worker: Worker, now: float) -> None:
        k, worker.sent_at = (worker.exchange - 1) % self.count, worker.step
        self.moves[worker.rank, worker.exchange] = worker.begun[k] - worker.own[k]
        self.shares[worker.rank, worker.exchange] = [worker.step, worker.tokens[k]]
        worker.tokens[k] = 0
        self.decider.offer(Contribution(worker.rank, worker.exchange, worker.exchange - 1), now)
        self.decide(now)

    def decide(self, now: float) -> None:
        if decision := self.decider.decide(now):
            used, dropped = (self.rows_of(part) for part in (decision.used, decision.dropped))
            moves = [self.moves[rank, n] for rank, n, *_ in used]
            self.step_on((decision.step - 1) % self.count, moves, [tokens for *_, tokens in used])
            self.rows.append({"step": decision.step, "used": used, "dropped": dropped})

    def rows_of(self, part: tuple[Contribution, ...]) -> list[list[int]]:
        return [[each.rank, each.batch, each.version, *self.shares[each.rank, each.batch]] for each in part]

    def step_on(self, fragment: int, moves: list[Tensor], tokens: list[int]) -> None:
        self.newest[fragment] = self.newest[fragment] - weighed(moves, tokens)

    def merge(self, worker: Worker) -> None:
        first, newest = worker.exchange, self.decider.step
        for k in {(exchange - 1) % self.count for exchange in range(first, newest + 1)}:
            worker.begun[k] = self.newest[k]
            if k != (first - 1) % self.count:
                worker.tokens[k] = 0
            mixed = torch.lerp(worker.own[k], self.newest[k], 1.0 - self.kept)
            worker.own[k] = mixed if self.kept else self.newest[k].clone()
        worker.exchange, worker.sent_at = newest + 1, None
        worker.step = max(worker.step, self.end_of(newest))

    def finish(self) -> None:
        """Exchange what is left: all but a fragment that was sent after the very last step."""
        assert all(worker.step == LAST for worker in self.workers)
        last = self.decider.step
        late = self.rows_of(self.decider.take_dropped())
        self.rows.append({"step": last, "used": [], "dropped": late})
        left = [k for k in range(self.count) if self.end_of(last) != LAST or k != (last - 1) % self.count]
        tokens = [[worker.tokens[k] for k in left] for worker in self.workers]
        for number, k in enumerate(left):
            moves = [worker.begun[k] - worker.own[k] for worker in self.workers]
            self.step_on(k, moves, [of_worker[number] for of_worker in tokens])
        self.rows.append({"step": last, "used": [], "dropped": [], "left": LAST, "tokens": tokens})
        self.rows.append({"step": last, "used": [], "dropped": [], "weights": checksum(self.newest)})


@pytest.mark.parametrize("num_workers", [3, 5])
@pytest.mark.parametrize(
    ("count", "delay", "mix"), [(1, 0, 0.5), (2, 0, 0.5), (2, 1, 0.25), (4, 1, 0.5), (2, 2, 0.0), (1, 4, 0.5)]
)
@pytest.mark.parametrize("partial", [False, True], ids=["whole", "partial"])
def test_the_replay_of_late_workers_has_the_bits_of_the_oracle(
    tmp_path: Path, num_workers: int, count: int, delay: int, mix: float, partial: bool
) -> None:
    num_dropped = num_partial = 0
    for seed in range(3):
        oracle = Oracle(num_workers, count, delay, mix, seed, partial=partial)
        oracle.run()
        num_partial += oracle.num_partial
        log = tmp_path / f"{seed}.jsonl"
        log.write_text("".join(json.dumps(row) + "\n" for row in oracle.rows))
        model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(count)))
        weights = list(model.parameters())
        for weight in weights:
            nn.init.zeros_(weight)
        taken: Counter[int] = Counter()

        def take_step(rank: int, step: int, weights: Any = weights, taken: Any = taken) -> None:
            move_weights(weights, rank, step)
            taken[rank] += 1

        outer = SGD(weights, lr=1.0)
        options = {"every": EVERY, "fragments": count, "delay": delay, "mix": mix}
        assert replay_local(log, model, outer, take_step, **options) == oracle.decider.step
        assert [weight.item() for weight in weights] == [weight.item() for weight in oracle.newest]
        assert taken == oracle.taken
        num_dropped += sum(len(row.get("dropped", ())) for row in oracle.rows)
        if seed == 0:  # the weights are zero no more
            with pytest.raises(ShoalError, match=r"the weights after step .* are not those of the workers"):
                replay_local(log, model, outer, take_step, **options)
    assert num_dropped
    assert bool(num_partial) == partial
