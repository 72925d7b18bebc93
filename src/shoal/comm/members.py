"""Agrees on the processes that train together, when some are lost and others come.

1. The first processes meet in the job's store, in the order of their ranks (:meth:`Members.begin`).
2. When a member is lost, the others say there that they are present, and one proposes the next members: those
   that are present once no other can come. The first proposal counts (:meth:`Members.renew`).
3. A process that starts later asks there (:meth:`Members.ask`); the first member takes it in, between two
   steps (:meth:`Members.admit`).
4. All that were decided upon change the process group by torch's interface of 2.14; what follows from it is
   the part of :attr:`Members.on_change`.

Each process counts up a number in the store, by which the others notice that it stands still
(:class:`StandstillWatch`).
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import distributed_c10d as c10d

from shoal.comm import native_group
from shoal.comm.engine import CommError
from shoal.decide.members import is_larger_part, part_of, read_counts
from shoal.env.member_signs import name_begin, name_standstill
from shoal.env.settings import launch_dir
from shoal.errors import EXIT_LOST, UsageError
from shoal.json_text import parse_json

_log = logging.getLogger(__name__)
_POLL_S = 0.01
_FIRST_ATTEMPT_S = 8.0
"""For the members to meet, since one that is lost then is not noticed; twice as long after each failure."""
_PATIENCES_UNTIL_LOST = 2
"""A first member that stands still is replaced after one."""
_SETTLE_S = 0.5
"""After a network was cut: the members notice it one after another."""


class ExcludedError(CommError):
    """The others go on without this process, for which they have waited."""

    exit_code = EXIT_LOST


def require_changing_groups() -> None:
    """Raise a :class:`UsageError` if torch has no groups whose members change."""
    if not hasattr(c10d, "_reconfigure"):
        raise UsageError(
            f"torch {torch.__version__} has no groups whose members change: install torch 2.14 or later"
        )


class Members:
    """The members of the default process group, which was made with ``enable_reconfigure``.

    Args:
        at_least: fewer members do not go on.
        at_most: more are not taken in; default: any number.
        patience_s: a process that stands still for so long is lost.

    Attributes:
        on_change: called when the members have changed, on all of them; may use collectives.
        generation: number of the present members, from 1; it grows when they change. 0: this process is none.
        has_begun: whether others were members before this process came.
        num_before: number of members before the last change.

    Raises:
        UsageError: torch is older than 2.14.
    """

    def __init__(self, *, at_least: int, patience_s: float, at_most: int | None = None) -> None:
        require_changing_groups()
        self.on_change: Callable[[], None] = lambda: None
        self._at_least, self._at_most, self._patience_s = at_least, at_most, patience_s
        self._group = native_group.python_group(dist.group.WORLD)
        self._store = PrefixStore("crew/", self._group.store)
        self._handle = c10d._get_reconfigure_handle()
        self.generation = self.num_before = 0
        self._num_asked = self._phase = self._tried = self._num_failed = 0
        self._num_admitted: dict[str, int] = {}  # by phase
        self._handles: list[str] = []
        self._shown = b"", time.monotonic()
        self._is_told = False
        self._watch = StandstillWatch(
            self._store, self._handle, patience_s, self._give_up, self._look_for_newcomers
        )
        self._store.set(f"pid/{self._handle}", str(os.getpid()))
        self.has_begun = self._store.check(["newest"])

    @property
    def rank(self) -> int:
        """Return the rank of this process among the present members."""
        return dist.get_rank()

    @property
    def size(self) -> int:
        """Return the number of present members."""
        return dist.get_world_size()

    @property
    def is_first(self) -> bool:
        """Return whether this process is the first member."""
        return self.generation > 0 and self.rank == 0

    def begin(self) -> None:
        """Meet the processes with which the group was made."""
        size = dist.get_world_size()
        self._store.set(f"first/{dist.get_rank()}", self._handle)
        handles = [self._store.get(f"first/{rank}").decode() for rank in range(size)]
        self._become(1, handles, self._patience_s)
        self._store.set("newest", "1")

    def be_alone(self) -> None:
        """Make a group of this process alone, for what comes before :meth:`ask`."""
        self._reconfigure(secrets.randbits(62), [self._handle], self._patience_s)

    def enter(self, phase: int) -> None:
        """Begin a phase of the work, the same on all members; numbers of phases grow."""
        self._phase, self._num_asked = phase, 0
        self._tell("phase", str(phase))
        if self.is_first:  # whose record has begun
            self.tell_launcher()

    def tell_launcher(self) -> None:
        """Let the launcher of this host know that the others go on from now on if one of these is lost."""
        folder = launch_dir()
        if folder is not None and not self._is_told:
            name_begin(folder)
            self._is_told = True

    def ask(self, phase: int = 0) -> bool:
        """Wait until the members take this process in; return false if they are past this phase.

        Raises:
            CommError: no member is there any more.
        """
        self._phase, self._shown = phase, (b"", time.monotonic())
        self.tell_launcher()
        while True:
            number = self._store.add(self._key("num_waiting"), 1)
            self._store.set(self._key(f"waiting/{number}"), self._handle)
            while not self._store.check([self._key(f"welcome/{number}")]):
                if self.are_done or self._is_past(phase):
                    return False
                self._require_members()
                time.sleep(_POLL_S)
            try:
                self._follow(int(self._store.get(self._key(f"welcome/{number}")).decode()))
            except CommError as error:  # one of the others was lost meanwhile
                if self.generation > 0:  # after they had met
                    self.renew(error, 0)
                    return True
                _log.warning("not taken in, asks again: %s", error)
            else:
                return True

    def _require_members(self) -> None:
        """Raise a :class:`CommError` if no first member has shown for long that it is there."""
        shown, now = self._store.get("shown") if self._store.check(["shown"]) else b"", time.monotonic()
        if shown != self._shown[0]:
            self._shown = shown, now
        if now - self._shown[1] > _PATIENCES_UNTIL_LOST * self._patience_s:
            raise CommError(
                "the processes that would take this one in were lost, all of them, and with them what came "
                "after the last checkpoint: start the job again"
            )

    def end(self) -> None:
        """Let those that ask know that the members need nobody any more."""
        self._tell("over", "1")

    @property
    def are_done(self) -> bool:
        """Return whether the members need nobody any more."""
        return bool(self._store.check(["over"]))

    def _is_past(self, phase: int) -> bool:
        """Return whether the members are in a later phase."""
        return self._store.check(["phase"]) and int(self._store.get("phase")) > phase

    def _key(self, name: str) -> str:
        """Return the name in the store of what belongs to the present phase."""
        return f"{name}/{self._phase}"

    def _tell(self, key: str, value: str) -> None:
        """Write what helps those that come later, of whom there are none without the store."""
        try:
            self._store.set(key, value)
        except dist.DistError as error:
            _log.warning("the job's store is lost, and no process can join any more: %s", error)

    def close(self) -> None:
        """Watch the others no more."""
        self._watch.close()

    def put(self, name: str, text: str) -> None:
        """Keep a text for all, present and future members."""
        self._store.set(f"text/{name}", text)

    def get(self, name: str) -> str:
        """Return a text that a member has :meth:`put`."""
        return self._store.get(f"text/{name}").decode()

    def num_waiting(self) -> int:
        """Return how many processes have asked so far, and have room.

        A thread looks for them, so that a store that does not answer holds up no step.
        """
        asked = max(self._num_asked, self._admitted)
        return asked if self._at_most is None else min(asked, self._admitted + self._at_most - self.size)

    def _look_for_newcomers(self, store: Any) -> None:
        """Count those that have asked, in the first member's watching thread, and show that it is there."""
        if self._handles[:1] != [self._handle]:
            return
        phase = self._phase
        asked = int(store.add(self._key("num_waiting"), 0))
        store.set("shown", str(time.monotonic()))
        if phase == self._phase:
            self._num_asked = asked

    @property
    def _admitted(self) -> int:
        """Number of processes that were taken in in this phase."""
        return self._num_admitted.get(str(self._phase), 0)

    def admit(self, num_waiting: int) -> bool:
        """Take in who waits; return whether somebody did.

        Args:
            num_waiting: the first member's :meth:`num_waiting`, on all members.
        """
        if num_waiting <= self._admitted:
            return False
        generation = self.generation + 1
        if self.rank == 0:
            numbers = range(self._admitted + 1, num_waiting + 1)
            new = [self._store.get(self._key(f"waiting/{number}")).decode() for number in numbers]
            admitted = self._num_admitted | {str(self._phase): num_waiting}
            self._decide(generation, [*self._handles, *new], admitted)
            for number in numbers:
                self._store.set(self._key(f"welcome/{number}"), str(generation))
        self._follow(generation)
        return True

    def can_spare(self, num_members: int) -> bool:
        """Return whether the others go on if so many leave."""
        return 0 < num_members <= self.size - self._at_least

    def leave(self) -> None:
        """Be no member any more; the others :meth:`renew` meanwhile."""
        self._store.set(f"leaving/{self.generation + 1}/{self._handle}", "1")
        self.generation = 0

    def has_lost(self) -> bool:
        """Return whether the group has failed, so that an exception may come from the loss of a member."""
        return self._group.engine.error() is not None

    def renew(self, cause: object, step: int) -> None:
        """Go on with those that are left. All of them call it.

        Args:
            cause: the error by which a loss was noticed, or another reason in words.
            step: steps done, for messages.

        Raises:
            CommError: too few are left, or they went on without this process.
        """
        generation = max(self.generation, self._tried)
        while True:
            _log.warning("the members change after step %d: %s", step, cause)
            generation += 1
            self._await(generation, step)
            try:
                return self._follow(generation, step)
            except ExcludedError:
                raise
            except CommError as error:
                cause = error

    def _await(self, generation: int, step: int) -> None:
        """Wait until the next members are decided: those that are present once no other can come.

        A network that is cut in two leaves two parts that can reach the store. The smaller one waits for the
        other's decision as long as some process there counts on.
        """
        since = time.monotonic()
        deadline = since + self._group.operations.timeout.total_seconds()
        own: list[str] | None = None
        losses: dict[str, list[str]] = {}
        while not self._store.check([f"plan/{generation}"]):
            if own != (own := [self._handles[rank] for rank in self._group.engine.lost_ranks()]):
                self._store.set(f"present/{generation}/{self._handle}", json.dumps(own))
            if losses != (losses := self._losses(generation)):
                since = time.monotonic()
            part, now = part_of(self._handle, losses), time.monotonic()
            if self._may_decide(generation, part, losses, now - since) or now > deadline:
                if len(part) < self._at_least:
                    raise CommError(
                        f"{len(part)} of {len(self._handles)} members are left after step {step}, "
                        f"and at_least={self._at_least}: start the job again"
                    )
                self._decide(generation, part, self._num_admitted)
            time.sleep(_POLL_S)

    def _may_decide(
        self, generation: int, part: list[str], losses: Mapping[str, list[str]], unchanged_s: float
    ) -> bool:
        """Return whether no other member can come to a part of them, which is to go on.

        Args:
            losses: members that each one has lost; all these are there.
            unchanged_s: for how long they have been so.
        """
        is_cut = any(losses.keys() & set(lost) for lost in losses.values())
        if is_cut and unchanged_s < _SETTLE_S:
            return False
        leaving = [each for each in self._handles if self._store.check([f"leaving/{generation}/{each}"])]
        missing = set(self._handles) - set(part)
        gone = {*self._watch.silent, *losses[self._handle], *leaving, *losses}
        is_larger = is_larger_part(part + leaving, self._handles)
        return gone >= missing and (is_larger or self._watch.stand_still(missing))

    def _losses(self, generation: int) -> dict[str, list[str]]:
        """Return the members that each present one has lost, by rank."""
        keys = {each: f"present/{generation}/{each}" for each in self._handles}
        present = {each: key for each, key in keys.items() if self._store.check([key])}
        return {
            each: parse_json(self._store.get(key), "a member's losses in the job's store", error=CommError)
            for each, key in present.items()
        }

    def _give_up(self, silent: frozenset[str]) -> None:
        """Fail what waits for members that stand still; on their host, its launcher ends them."""
        ranks = ", ".join(str(rank) for rank, each in enumerate(self._handles) if each in silent)
        self._group.engine.abort(f"rank {ranks} was lost: it stood still for {self._patience_s:g} s")
        if (folder := launch_dir()) is not None:
            for handle in silent:
                name_standstill(
                    folder, int(handle.partition("-")[0]), self._store.get(f"pid/{handle}").decode()
                )

    def _decide(self, generation: int, handles: list[str], num_admitted: dict[str, int]) -> None:
        """Propose the next members; the first proposal counts."""
        timeout_s = min(self._patience_s, _FIRST_ATTEMPT_S * 2**self._num_failed)
        proposal = json.dumps({"members": handles, "num_admitted": num_admitted, "timeout_s": timeout_s})
        self._store.compare_set(f"plan/{generation}", "", proposal)

    def _follow(self, generation: int, step: int = 0) -> None:
        """Become what was decided."""
        plan = parse_json(
            self._store.get(f"plan/{generation}"), "the members' plan in the job's store", error=CommError
        )
        self._num_admitted = plan["num_admitted"]
        if self._handle not in plan["members"]:
            raise ExcludedError(
                f"the others went on without this process after step {step}, which stood still for "
                f"{self._patience_s:g} s: start it again, and it will be taken in"
            )
        if any(self._store.check([f"present/{generation + 1}/{each}"]) for each in plan["members"]):
            raise CommError(f"another member has given up attempt {generation}")
        self._become(generation, plan["members"], plan["timeout_s"])

    def _become(self, generation: int, handles: list[str], timeout_s: float) -> None:
        self._tried, self._num_failed = generation, self._num_failed + 1
        self._reconfigure(generation, handles, timeout_s)
        self._num_failed = 0
        self.num_before = len(self._handles)
        self.generation, self._handles = generation, handles
        self._watch.follow(handles)
        try:
            self.on_change()
        except Exception as error:
            if not self.has_lost():
                raise
            raise CommError(f"a member was lost while the members changed: {error}") from error

    def _reconfigure(self, uuid: int, handles: list[str], timeout_s: float) -> None:
        c10d._reconfigure(uuid, handles, timeout=timedelta(seconds=timeout_s)).wait()


def meet(elastic: str, patience_s: float) -> Members:
    """Return the members of the default process group; if they train already, this process is none yet.

    Args:
        elastic: the setting, least and most members.
        patience_s: a process that stands still for so long is lost.

    Raises:
        UsageError: torch is older than 2.14, or these are fewer or more processes than the setting says.
    """
    counts = read_counts(elastic)
    members = Members(at_least=counts.least, at_most=counts.most, patience_s=patience_s)
    if members.has_begun:
        members.be_alone()
    else:
        counts.require(dist.get_world_size())
        members.begin()
    return members


# ---- who stands still -----------------------------------------------------------------------------------

_MOST_BEAT_S = 3.0
_LOOK_S = 0.25
_COUNTS_OF_END = 3
_END_S = 5.0


class StandstillWatch:
    """A thread that shows in the store that this process runs, and watches others.

    A process that is stopped, or whose host is, counts no further. Without the store nobody is suspected.

    Args:
        store: of the job; the thread uses a connection of its own.
        own: name of this process.
        patience_s: how long a process may stand still.
        on_silence: called by the thread with the processes that have stood still for so long.
        on_look: called by the thread several times a second, with its connection.
    """

    def __init__(
        self,
        store: Any,
        own: str,
        patience_s: float,
        on_silence: Callable[[frozenset[str]], None],
        on_look: Callable[[Any], None] = lambda store: None,
    ) -> None:
        self._store, self._own, self._patience_s = store.clone(), own, patience_s
        self._beat_s = min(patience_s / 10, _MOST_BEAT_S)
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[str, float]] = {}
        self._silent: frozenset[str] = frozenset()
        self._ended = threading.Event()
        self._on_silence, self._on_look = on_silence, on_look
        self._thread = threading.Thread(target=self._run, name="standstill-watch", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def follow(self, names: Sequence[str]) -> None:
        """Watch these processes from now on, instead of others."""
        now = time.monotonic()
        with self._lock:
            self._seen = {name: ("", now) for name in names if name != self._own}
            self._silent = frozenset()

    @property
    def silent(self) -> frozenset[str]:
        """The watched processes that stand still."""
        with self._lock:
            return self._silent

    def stand_still(self, names: Collection[str]) -> bool:
        """Return whether these have stood still for several counts, so that they have probably ended."""
        until = time.monotonic() - _COUNTS_OF_END * self._beat_s
        with self._lock:
            return all(self._seen[name][1] < until for name in names if name in self._seen)

    def close(self) -> None:
        """End the thread."""
        self._ended.set()
        self._thread.join(_END_S)

    def _run(self) -> None:
        number, last, next_beat = 0, time.monotonic(), 0.0
        while not self._ended.wait(min(self._beat_s, _LOOK_S)):
            now = time.monotonic()
            if now - last > self._patience_s / 2:  # this process stood still itself, and knows nothing
                self.follow([*self._seen])
            last = now
            try:
                self._on_look(self._store)
                if now >= next_beat:
                    number, next_beat = number + 1, now + self._beat_s
                    self._store.set(f"beat/{self._own}", str(number))
                    self._look()
            except dist.DistError:  # nobody can be heard
                self.follow([*self._seen])

    def _look(self) -> None:
        """Read the others' numbers."""
        with self._lock:
            seen = dict(self._seen)
        for name, (value, _) in seen.items():
            key = f"beat/{name}"
            newest = self._store.get(key).decode() if self._store.check([key]) else ""
            if newest != value:
                seen[name] = newest, time.monotonic()
        now = time.monotonic()
        silent = frozenset(name for name, (_, since) in seen.items() if now - since > self._patience_s)
        with self._lock:
            if seen.keys() != self._seen.keys():
                return  # others are watched by now
            self._seen, news, self._silent = seen, silent - self._silent, silent
        if news:
            self._on_silence(news)
