"""Sets the futures of a group's operations, which runs their callbacks, on background threads.

Callbacks run one at a time, in the order in which their operations were submitted. A callback may submit
operations of the group and wait for these or any others without deadlock:

- Futures of operations that a callback submitted do not wait for that callback to return. A free thread sets
  them, in their own order.
- A callback that waits for anything else, such as an operation submitted after its own, blocks the operation
it
  waits for. A callback whose thread uses no CPU time for ``_CHECK_S`` therefore stops blocking later ones.

Each future is so set soon after its operation has completed. The number of threads is the number of callbacks
that wait, plus one, plus the watchdog.

A callback runs at a different time on each rank. If both the program and the callback submit operations,
ranks may submit them in different orders and reduce unrelated tensors. The callback raises an error in that
case. With ``EngineOptions.ordered_callbacks``, the program's operations wait until earlier callbacks have
returned.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from shoal.comm.engine import CommError, Engine
from shoal.comm.single_process import SingleProcessEngine
from shoal.comm.work import EngineWork
from shoal.errors import UsageError

_IDLE_S = 0.1
_CHECK_S = 0.1


@dataclass(eq=False)
class _Task:
    """A future to be set."""

    work: EngineWork
    depth: int
    """0 if the program submitted the operation, 1 if a callback of such an operation did, and so on"""
    num_begun: int
    """number of operations that the program had submitted when the future was requested"""
    turn: object = None
    clock: int | None = None
    """CPU-time clock of the thread that runs the callbacks"""
    used_s: float = -1.0
    is_blocked: bool = False

    def check_blocked(self) -> bool:
        """Return whether the callbacks block: their thread has used no CPU time since the last check."""
        if self.clock is None or self.is_blocked:
            return False
        before_s, self.used_s = self.used_s, time.clock_gettime(self.clock)
        self.is_blocked = before_s == self.used_s
        return self.is_blocked


class Completer:
    """Sets the futures of one engine's operations; starts its threads with the first one."""

    def __init__(self, engine: Engine | SingleProcessEngine, *, ordered: bool = False) -> None:
        self._engine = engine
        self._ordered = ordered
        self._tasks: dict[int, _Task] = {}
        self._done: set[int] = set()
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        # The watchdog has its own condition, and only the first task after a pause wakes it: each wake-up
        # costs as much as a small operation.
        self._resumed = threading.Condition(lock)
        self._watchdog_paused = False
        self._beginning = threading.Lock()
        self._num_begun = 0
        self._turn: object = None
        """Token of the thread that polls the engine."""
        self._is_offered = False
        self._num_free = 0
        self._threads: list[threading.Thread] = []
        self._here = threading.local()
        """``task``: the one whose callbacks the thread is running"""
        self._stopping = False

    def _running(self) -> _Task | None:
        """Return the task whose callbacks the calling thread is running."""
        return getattr(self._here, "task", None)

    def begin(self, submit: Callable[[], int], name: str, limit: timedelta) -> int:
        """Submit an operation for the program or for a callback, and return its handle.

        Raises:
            CommError: earlier callbacks have not returned in time.
            UsageError: a callback submits an operation after the program has submitted others.
        """
        task = self._running()
        if task is None and self._ordered:
            with self._changed:
                ended = self._changed.wait_for(
                    lambda: not self._tasks or self._stopping, limit.total_seconds()
                )
                if not ended:
                    raise CommError(f"{name}: callbacks of earlier operations ran longer than {limit}")
        with self._beginning:
            if task is None:
                self._num_begun += 1
            elif self._num_begun > task.num_begun:
                raise UsageError(
                    f"a callback begins {name}, and the program has begun other collectives of this group "
                    "since it asked for the future: each rank may do so in another order. Make the group "
                    "with pg_options=EngineOptions(ordered_callbacks=True), or begin nothing else until the "
                    "callback has ended (with DistributedDataParallel: have one bucket)"
                )
            return submit()

    def add(self, work: EngineWork) -> None:
        """Set the work's future once the operation is done and earlier futures are set."""
        outer = self._running()
        with self._changed:
            stopping = self._stopping
            if not stopping:
                self._tasks[work.handle] = _Task(
                    work,
                    depth=0 if outer is None else outer.depth + 1,
                    num_begun=self._num_begun if outer is None else outer.num_begun,
                )
                if not self._threads:
                    self._start(self._watchdog, "shoal-futures-watchdog")
                    self._offer_turn()
                elif outer is not None and outer.turn is self._turn:
                    self._offer_turn()
                self._changed.notify_all()
                if self._watchdog_paused:
                    self._resumed.notify()
        if stopping:
            work.complete_future()
        else:
            self._engine.watch(work.handle)

    def stop(self) -> None:
        """Join the threads; complete open futures with the group's outcome."""
        with self._changed:
            self._stopping = True
            waiting = [self._tasks[handle] for handle in sorted(self._tasks)]
            self._tasks.clear()
            self._changed.notify_all()
            self._resumed.notify()
        for task in waiting:
            if task.turn is None:
                task.work.complete_future()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    # ---- threads ------------------------------------------------------------------------------------------

    def _start(self, run: Callable[[], None], name: str) -> None:
        self._threads.append(threading.Thread(target=run, name=name, daemon=True))
        self._threads[-1].start()

    def _offer_turn(self) -> None:
        """Hand the polling of the engine to a free thread."""
        self._turn, self._is_offered = None, True
        self._changed.notify_all()
        if not self._num_free:
            self._start(self._run, "shoal-futures")

    def _wait_for_turn(self) -> object:
        with self._changed:
            self._num_free += 1
            self._changed.wait_for(lambda: self._is_offered or self._stopping)
            self._num_free -= 1
            self._turn, self._is_offered = object(), False
            return self._turn

    def _run(self) -> None:
        clock = time.pthread_getcpuclockid(threading.get_ident())
        while not self._stopping:
            turn = self._wait_for_turn()
            while self._has(turn):
                done = self._engine.next_watched(_IDLE_S)
                with self._changed:
                    self._done.update(done)
                while (task := self._take(turn)) is not None:
                    self._here.task, task.clock = task, clock
                    task.work.complete_future()
                    self._here.task = None
                    self._end(task)

    def _has(self, turn: object) -> bool:
        """Wait for a task; return whether ``turn`` is still current."""
        with self._changed:
            self._changed.wait_for(lambda: self._tasks or self._stopping or self._turn is not turn)
            return not self._stopping and self._turn is turn

    def _take(self, turn: object) -> _Task | None:
        """Return the first completed task of a depth at which no callback is running."""
        with self._changed:
            if self._stopping:
                return None
            held = {task.depth for task in self._tasks.values() if task.turn and not task.is_blocked}
            for handle in sorted(self._tasks):
                task = self._tasks[handle]
                if task.turn is None and task.depth not in held:
                    if handle in self._done:
                        self._done.discard(handle)
                        task.turn = turn
                        return task
                    held.add(task.depth)
            return None

    def _end(self, task: _Task) -> None:
        with self._changed:
            self._tasks.pop(task.work.handle, None)
            if self._ordered:
                self._changed.notify_all()

    def _watchdog(self) -> None:
        """Let later futures pass callbacks that block."""
        while True:
            with self._changed:
                self._watchdog_paused = not self._tasks
                self._resumed.wait_for(lambda: self._tasks or self._stopping)
                self._watchdog_paused = False
                self._resumed.wait_for(lambda: self._stopping, _CHECK_S)
                if self._stopping:
                    return
                blocked = [task for task in self._tasks.values() if task.check_blocked()]
                if any(task.turn is self._turn for task in blocked):
                    self._offer_turn()
                del blocked  # or their group would live until the next tasks
