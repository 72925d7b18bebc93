"""Coordinates each step: workers report their gradients to rank 0, which broadcasts which ones to use.

Messages are JSON of one length. From a worker:

    {"kind": "ready", "batch": 3, "version": 2, "options": {...}, "asks": false}    a gradient, and the step's
                                         options; whether all are to synchronize soon. The batch is the
                                         step for which it is meant; of asynchronous steps, this worker's
                                         number of batches. Of local steps also "share": [150, 4800], the
                                         last of them and the tokens of the change
    {"kind": "away"}                     of local steps: exchanges do not wait for this worker
    {"kind": "back", "step": 170, "version": 2}    it returns; it had left after this local step, with the
                                         weights of this exchange
    {"kind": "synchronize", "batch": 8, "then": "dump", "ends": false}    no more gradients after this batch

From rank 0, to all in the same order:

    {"kind": "step", "step": 3, "used": [[0, 3, 2], [1, 3, 2]], "dropped": [[2, 2, 1]], "options": {...},
     "until": null}                      rank, batch and version of gradients, and of local steps their
                                         shares; the step after which all synchronize, once one has asked
                                         for it; of asynchronous ones, the number of gradients of each worker
    {"kind": "close", "step": 4}         who has none for it yet hands over what it has, after its local step
    {"kind": "back", "rank": 2, "step": 170, "version": 2}
    {"kind": "late", "dropped": [[2, 8, 7]]}                         gradients after which there is no step
    {"kind": "synchronize", "step": 8, "then": "dump", "ends": false}
    {"kind": "abort", "reason": "..."}
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple
from datetime import timedelta
from typing import Any, Literal

import torch

from shoal import native
from shoal.comm.engine import CommError
from shoal.decide.bounded_waiting import Contribution, Decision, Share, StepDecider, WaitingRule
from shoal.decide.fragments import weights_of
from shoal.env.machine import host_identity
from shoal.json_text import parse_json

Message = dict[str, Any]
Then = Literal["nothing", "dump", "load"]
"""The action on the optimizer's state once all workers have synchronized."""
_FOREVER = timedelta(days=365)
"""A worker may be silent for as long as an evaluation takes; one that is lost fails the group."""
_TO_COORDINATOR, _TO_WORKERS = 1, 2
MOST_TOKENS = 2**53
"""Maximum tokens of a share: weights are exact up to it."""


class Mail:
    """Sends and receives the messages of a process group in Python of backend ``"shoal"``.

    Args:
        group: for these messages and the steps alone.
        max_bytes: of a message; the same on all ranks.
    """

    def __init__(self, group: Any, max_bytes: int) -> None:
        self._group, self._max_bytes = group, max_bytes
        self._lock = threading.Lock()
        self._under_way: list[Any] = []

    def send(self, message: Message, to: int, tag: int) -> None:
        """Begin to send a message; does not wait for the other rank."""
        text = json.dumps(message).encode()
        if len(text) > self._max_bytes:
            raise CommError(f"a message of {len(text)} bytes, {message['kind']}, exceeds {self._max_bytes}")
        data = torch.frombuffer(bytearray(text.ljust(self._max_bytes)), dtype=torch.uint8)
        work = self._group.send([data], to, tag, _FOREVER)
        with self._lock:
            self._under_way = [each for each in self._under_way if not each.is_completed()] + [work]

    def receive(self, source: int | None, tag: int) -> tuple[int, Message]:
        """Wait for a message of a rank, or of any for ``None``; also return the rank."""
        data = torch.empty(self._max_bytes, dtype=torch.uint8)
        work = self._group.recv([data], source, tag, _FOREVER)
        work.wait()
        rank = work.source_rank()
        message = parse_json(bytes(data.numpy()), f"a message of rank {rank}", error=CommError)
        if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
            raise CommError(f"rank {rank} has sent {str(message)[:80]!r} instead of a message with a kind")
        return rank, message


def max_bytes_of(num_workers: int, num_groups: int) -> int:
    """Return a length that fits all messages: options of groups, and five numbers of each worker."""
    return 1024 + 1024 * num_groups + 2 * 96 * num_workers


class Coordinator:
    """Decides the steps of all workers; on rank 0.

    Args:
        mail: to the other ranks.
        rule: for whom steps wait.
        after: steps that the weights have seen.

    Attributes:
        own: the messages for rank 0 itself.
    """

    def __init__(self, mail: Mail, rule: WaitingRule, *, after: int = 0) -> None:
        self.own: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._mail, self._rule = mail, rule
        self._decider = StepDecider(rule, after=after)
        self._lock = threading.Lock()
        self._timer = threading.Timer(0.0, self._on_time)
        self._options: dict[int, tuple[int, Any]] = {}  # by batch: of which rank, and the options
        self._ended: dict[int, tuple[int, Then, bool]] = {}  # by rank: batch, then what, whether for good
        self._last_batch = 0  # of all gradients
        self._closing = after  # the last step that all know to have enough gradients
        self._sync_requested = False
        self._until: int | None = None  # whether a worker asks to synchronize, and after which step

    def listen(self) -> None:
        """Handle the other ranks' messages, on a thread of its own, until all have ended or one is lost."""
        has_ended = False
        while not has_ended:
            rank, message = self._mail.receive(None, _TO_COORDINATOR)
            has_ended = self.handle(rank, message)

    def handle(self, rank: int, message: Message) -> bool:
        """Handle a worker's message, and broadcast what follows; return whether all have ended."""
        with self._lock:
            try:
                if message["kind"] == "ready":
                    self._sync_requested = self._sync_requested or bool(message["asks"])
                    self._offer(rank, message)
                elif message["kind"] == "away":
                    self._decider.leave(rank)
                elif message["kind"] == "back":
                    self._broadcast_late(self._decider.take_dropped())
                    self._decider.come_back(rank)
                    numbers = {name: int(message[name]) for name in ("step", "version")}
                    self._broadcast({"kind": "back", "rank": rank, **numbers})
                else:
                    self._ended[rank] = int(message["batch"]), message["then"], bool(message["ends"])
                self._require_same_end()
                self._advance()
                return self._end()
            except (ValueError, KeyError, TypeError) as problem:
                self._broadcast({"kind": "abort", "reason": str(problem)[:500]})
                return True

    def _advance(self) -> None:
        """Broadcast the steps that can be taken, and set the timer for the next one."""
        while decision := self._decider.decide(time.monotonic()):
            self._broadcast_step(decision)
            self._closing = decision.step
        if (
            self._decider.due is not None
            and self._rule.late == "partial"
            and self._closing == self._decider.step
        ):
            self._closing += 1
            self._broadcast({"kind": "close", "step": self._closing})
        if self._decider.due is not None and not self._timer.is_alive():
            self._timer = threading.Timer(self._decider.due - time.monotonic(), self._on_time)
            self._timer.daemon = True
            self._timer.start()

    def _on_time(self) -> None:
        with self._lock, suppress(CommError):  # the thread that waits for the group gets the error too
            self._timer = threading.Timer(0.0, self._on_time)
            self._advance()
            self._end()

    def _offer(self, rank: int, message: Message) -> None:
        gradient = Contribution(
            rank, int(message["batch"]), int(message["version"]), _share_of(rank, message)
        )
        if self._rule.asynchronous:  # its step is the next one
            self._options[self._decider.step + 1] = rank, message["options"]
        elif gradient.batch > self._decider.step:
            other, options = self._options.setdefault(gradient.batch, (rank, message["options"]))
            if options != message["options"]:
                raise ValueError(
                    f"the optimizer's options of step {gradient.batch} differ: {str(options)[:200]} on rank "
                    f"{other} and {str(message['options'])[:200]} on rank {rank}; schedules depend on the "
                    "step's number only"
                )
        self._last_batch = max(self._last_batch, gradient.batch)
        self._decider.offer(gradient, time.monotonic())
        if self._rule.late != "next" and self._rule.grace_s:  # a worker that does not rest waits for this
            self._broadcast_late(self._decider.take_dropped())

    def _require_same_end(self) -> None:
        ends = sorted({batch for batch, _, _ in self._ended.values()})
        last = 0 if self._rule.asynchronous else max([self._decider.step, *self._options], default=0)
        if ends and (len(ends) > 1 or last > ends[0]):
            rank = min(rank for rank, (batch, _, _) in self._ended.items() if batch == ends[0])
            raise ValueError(
                f"rank {rank} has finished after batch {ends[0]}, and another goes on with batch "
                f"{max(ends[-1], last)}; give all workers as many batches"
            )

    def _broadcast_step(self, decision: Decision) -> None:
        _, options = self._options[decision.step]
        self._options = {batch: each for batch, each in self._options.items() if batch > decision.step}
        dropped = decision.dropped
        if len(dropped) > self._rule.num_workers:  # a worker far behind has several
            self._broadcast_late(dropped)
            dropped = ()
        if self._sync_requested and self._until is None:
            # no worker that has not heard of it has begun a later batch
            self._until = decision.step + (self._rule.staleness if self._rule.waits_for_all else 0)
            if self._rule.asynchronous:  # the batch of a worker that is under way is the next one at most
                self._until = self._last_batch + 1
        self._broadcast(
            {
                "kind": "step", "step": decision.step, "used": as_lists(decision.used),
                "dropped": as_lists(dropped), "options": options, "until": self._until,
            }
        )  # fmt: skip

    def _broadcast_late(self, dropped: Sequence[Contribution]) -> None:
        for begin in range(0, len(dropped), self._rule.num_workers):
            self._broadcast(
                {"kind": "late", "dropped": as_lists(dropped[begin : begin + self._rule.num_workers])}
            )

    def _end(self) -> bool:
        """Release workers that wait for a step that does not come; synchronize when all have ended."""
        if not self._ended:
            return False
        if self._decider.step == next(iter(self._ended.values()))[0]:
            self._broadcast_late(self._decider.drop_late())
        if len(self._ended) < self._rule.num_workers:
            return False
        wishes = {(then, ends) for _, then, ends in self._ended.values()}
        if len(wishes) > 1:
            raise ValueError(f"the workers synchronize for different reasons: {sorted(wishes)}")
        ((then, ends),) = wishes
        self._ended, self._until, self._sync_requested = {}, None, False
        self._decider.synchronize()
        self._broadcast_late(self._decider.take_dropped())
        self._broadcast({"kind": "synchronize", "step": self._decider.step, "then": then, "ends": ends})
        return ends

    def _broadcast(self, message: Message) -> None:
        for rank in range(1, self._rule.num_workers):
            self._mail.send(message, rank, _TO_WORKERS)
        self.own.put(message)


class CoordinatorConnection:
    """A worker's connection to the coordinator, which on rank 0 is in this process.

    Args:
        mail: of this rank.
        coordinator: on rank 0.
    """

    def __init__(self, mail: Mail, coordinator: Coordinator | None) -> None:
        self._mail, self._coordinator = mail, coordinator

    def send(self, message: Message) -> None:
        if self._coordinator is not None:
            self._coordinator.handle(0, message)
        else:
            self._mail.send(message, 0, _TO_COORDINATOR)

    def next_order(self) -> Message:
        if self._coordinator is not None:
            return self._coordinator.own.get()
        return self._mail.receive(0, _TO_WORKERS)[1]


def _share_of(rank: int, message: Message) -> Share | None:
    """Return the share of local steps in a worker's message; ``None``: it has none."""
    if "share" not in message:
        return None
    share = Share(*map(int, message["share"]))
    if share.step < 0 or not 0 <= share.tokens <= MOST_TOKENS:
        raise ValueError(f"worker {rank} has a share of {share.tokens} tokens after local step {share.step}")
    return share


def as_lists(gradients: Sequence[Contribution]) -> list[list[int]]:
    """Return rank, batch and version of each gradient; of local steps also the step and the tokens."""
    return [
        [each.rank, each.batch, each.version, *(astuple(each.share) if each.share else ())]
        for each in gradients
    ]


def weight_of(rank: int, used: Sequence[Sequence[int]]) -> float:
    """Return the weight of a worker's gradient in the mean of those that a step has used.

    Args:
        rank: of the worker, which is one of them.
        used: rank, batch and version of each, and of local steps the step and the tokens.
    """
    ranks = [each[0] for each in used]
    return weights_of([each[4] if len(each) > 4 else 1 for each in used])[ranks.index(rank)]


def hosts_of(group: Any) -> list[int]:
    """Return the number of each rank's host: sums are added within hosts first. All ranks call it."""
    if group.member.options.order == "rank":
        return list(range(group.size()))
    every = [own for (own,) in gather(group, [native.crc32c(host_identity().encode())])]
    known = list(dict.fromkeys(every))
    return [known.index(each) for each in every]


def gather(group: Any, numbers: Sequence[int]) -> list[list[int]]:
    """Return the numbers of all ranks, as many of each. All ranks call it."""
    own = torch.tensor(numbers, dtype=torch.int64)
    every = torch.zeros(group.size() * len(numbers), dtype=torch.int64)
    if len(numbers):
        group.all_gather_single(every, own).wait()
    return [part.tolist() for part in every.view(group.size(), len(numbers))]
