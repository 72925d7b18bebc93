"""Sets the futures of a group's operations, which runs their callbacks, on background threads.

Callbacks run one at a time, in the order in which their operations were submitted. A callback may submit
operations of the group and wait for these or any others without deadlock:

- Futures of operations that a callback submitted do not wait for that callback to return. A free thread sets
  them, in their own order.
- A callback that waits for anything else, such as an operation submitted after its own, blocks the operation
  it waits for. A callback whose thread sleeps and uses no CPU time for ``_CHECK_S`` therefore stops blocking
  later ones. A thread that is ready to run, on a busy machine, does not sleep.

A *task* is a future to be set; its *depth* is 0 if the program submitted the operation, 1 if a callback of
such an operation did, and so on. The invariant, whenever the lock is free:

1.  Of the tasks of one depth, at most one is running whose callbacks are not blocked, and it is the first.
2.  If there are tasks, one thread has the *turn*: it polls the engine and runs what has become due. Or the
    turn is offered, and a free thread takes it.
3.  A thread whose callbacks wait loses the turn to another: at once if they wait for a future that they have
    requested, else when the watchdog finds them blocked.

Each future is so set soon after its operation has completed. The number of threads is the largest number of
callbacks that waited at a time, plus one, plus the watchdog.

A callback runs at a different time on each rank. If both the program and the callback submit operations,
ranks may submit them in different orders and reduce unrelated tensors. ``Operations.begin`` refuses that.
With ``EngineOptions.ordered_callbacks``, the program's operations wait until earlier callbacks have returned.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from shoal.comm.engine import CollectiveEngine, CommError
from shoal.comm.work import EngineWork

_IDLE_S = 0.1
_CHECK_S = 0.1


class Turn:
    """The right to poll the engine, of one thread; valid until another is made."""


class ThreadUse:
    """Tells how the calling thread uses the CPU, to other threads."""

    def __init__(self) -> None:
        self._clock = time.pthread_getcpuclockid(threading.get_ident())
        self._stat = Path(f"/proc/self/task/{threading.get_native_id()}/stat")

    def used_s(self) -> float:
        """Return the CPU time that the thread has used, in seconds."""
        return time.clock_gettime(self._clock)

    def is_ready(self) -> bool:
        """Return whether the thread runs, or would if a CPU were free."""
        return self._stat.read_text().rpartition(")")[2].split()[0] == "R"


@dataclass(eq=False)
class Task:
    """A future to be set."""

    work: EngineWork
    depth: int
    num_begun: int
    """number of operations that the program had submitted when the future was requested"""
    turn: Turn | None = None
    """of the thread that runs the callbacks, once they run"""
    thread: ThreadUse | None = None
    used_s: float = -1.0
    is_blocked: bool = False

    def check_blocked(self) -> bool:
        """Return whether the callbacks have blocked: their thread sleeps and has not run since last time."""
        if self.thread is None or self.is_blocked:
            return False
        before_s, self.used_s = self.used_s, self.thread.used_s()
        self.is_blocked = before_s == self.used_s and not self.thread.is_ready()
        return self.is_blocked


class CallbackThread(threading.local):
    """The task whose callbacks the current thread is running."""

    task: Task | None = None


class Completer:
    """Sets the futures of one engine's operations; starts its threads with the first one."""

    def __init__(self, engine: CollectiveEngine, current: CallbackThread) -> None:
        self._engine = engine
        self._current = current
        self._tasks: dict[int, Task] = {}
        self._done: set[int] = set()
        """operations that the engine has reported, and whose task has not yet run"""
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        # The watchdog has its own condition, and only the first task after a pause wakes it: each wake-up
        # costs as much as a small operation.
        self._resumed = threading.Condition(lock)
        self._became_idle = threading.Condition(lock)
        self._watchdog_paused = False
        self._turn: Turn | None = None
        self._is_offered = False
        self._num_threads = 0
        """that set futures"""
        self._threads: list[threading.Thread] = []
        self._stopping = False

    def add(self, work: EngineWork, num_begun: int) -> None:
        """Set the work's future once the operation is done and earlier futures are set."""
        outer = self._current.task
        with self._changed:
            stopping = self._stopping
            if not stopping:
                self._tasks[work.handle] = Task(work, 0 if outer is None else outer.depth + 1, num_begun)
                if not self._threads:
                    self._start(self._watch, "shoal-futures-watchdog")
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

    def wait_until_idle(self, name: str, limit: timedelta) -> None:
        """Wait until all callbacks have returned, before operation ``name`` begins.

        Raises:
            CommError: they have not, within ``limit``.
        """
        with self._changed:
            is_idle = self._became_idle.wait_for(
                lambda: not self._tasks or self._stopping, limit.total_seconds()
            )
        if not is_idle:
            raise CommError(f"{name}: callbacks of earlier operations ran longer than {limit}")

    def stop(self) -> None:
        """Join the threads; complete open futures with the group's outcome."""
        with self._changed:
            self._stopping = True
            waiting = [self._tasks[handle] for handle in sorted(self._tasks)]
            self._tasks.clear()
            for condition in (self._changed, self._resumed, self._became_idle):
                condition.notify_all()
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
        """Take the turn from its thread and offer it to one that runs no callbacks."""
        self._turn, self._is_offered = None, True
        self._changed.notify_all()
        if sum(task.turn is not None for task in self._tasks.values()) == self._num_threads:
            self._num_threads += 1
            self._start(self._run, "shoal-futures")

    def _run(self) -> None:
        thread = ThreadUse()
        while not self._stopping:
            turn = self._take_turn()
            while self._has_work(turn):
                done = self._engine.next_watched(_IDLE_S)
                with self._changed:
                    self._done.update(done)
                while (task := self._next_due(turn)) is not None:
                    self._current.task, task.thread = task, thread
                    task.work.complete_future()
                    self._current.task = None
                    self._end(task)

    def _take_turn(self) -> Turn:
        """Wait, as a free thread, until the turn is offered."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_offered or self._stopping)
            self._turn, self._is_offered = Turn(), False
            return self._turn

    def _has_work(self, turn: Turn) -> bool:
        """Wait for a task; return whether ``turn`` is still valid."""
        with self._changed:
            self._changed.wait_for(lambda: self._tasks or self._stopping or self._turn is not turn)
            return not self._stopping and self._turn is turn

    def _next_due(self, turn: Turn) -> Task | None:
        """Return the first task of a depth at which no callback is running, if its operation is done."""
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

    def _end(self, task: Task) -> None:
        with self._changed:
            self._tasks.pop(task.work.handle, None)
            if not self._tasks:
                self._became_idle.notify_all()

    def _watch(self) -> None:
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
