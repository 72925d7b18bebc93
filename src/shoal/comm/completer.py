"""The threads that set the futures of a group's operations, and so run their callbacks.

Callbacks run one after the other, in the order in which their operations were begun. A callback may begin
operations of the group, and wait for these or for any others, without a hang:

- Futures of what a callback has begun do not wait for it to end. A thread that is free sets them. Among
  themselves they keep their order too.
- A callback that waits for anything else, say for an operation begun after its own, holds up what it waits
  for. One whose thread uses no processor time for ``_LOOK_S`` therefore no longer holds up those behind it.

So each future is set soon after its operation has ended, whatever callbacks do. There are as many threads as
callbacks that wait, one more, and one that looks after them.

A callback runs at another moment on each rank. If the program begins operations meanwhile and the callback
does too, ranks may begin them in different orders, and add up what does not belong together. The callback
gets an error then. With ``EngineOptions.ordered_callbacks`` the program's operations wait until earlier
callbacks have ended.
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
_LOOK_S = 0.1


@dataclass(eq=False)
class _Task:
    """A future that is to be set."""

    completer: Completer
    work: EngineWork
    depth: int
    """0 if the program began the operation, 1 if a callback of such a one did, and so on"""
    num_begun: int
    """how many operations the program had begun when its future was asked for"""
    turn: object = None
    clock: int | None = None
    """the processor time of the thread that runs the callbacks"""
    used_s: float = -1.0
    has_stopped: bool = False

    def look(self) -> bool:
        """Return whether the callbacks have stopped: no processor time used since the last look."""
        if self.clock is None or self.has_stopped:
            return False
        before_s, self.used_s = self.used_s, time.clock_gettime(self.clock)
        self.has_stopped = before_s == self.used_s
        return self.has_stopped


_here = threading.local()


class Completer:
    """Sets the futures of one engine's operations; its threads start with the first one."""

    def __init__(self, engine: Engine | SingleProcessEngine, *, ordered: bool = False) -> None:
        self._engine = engine
        self._ordered = ordered
        self._tasks: dict[int, _Task] = {}
        self._done: set[int] = set()
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        # The guard has a condition of its own, and is woken by the first task after a pause only: each
        # wake-up costs as much as a small operation.
        self._resumed = threading.Condition(lock)
        self._guard_pauses = False
        self._beginning = threading.Lock()
        self._num_begun = 0
        self._turn: object = None
        """Whose thread asks the engine what is done."""
        self._is_offered = False
        self._num_free = 0
        self._threads: list[threading.Thread] = []
        self._stopping = False

    def _running(self) -> _Task | None:
        """Return the task whose callbacks the calling thread runs."""
        task: _Task | None = getattr(_here, "task", None)
        return task if task is not None and task.completer is self else None

    def begin(self, submit: Callable[[], int], name: str, limit: timedelta) -> int:
        """Give the engine an operation, as the program or as a callback, and return its handle.

        Raises:
            CommError: earlier callbacks have not ended in time.
            UsageError: a callback begins an operation, and the program has begun others meanwhile.
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
        """Set the work's future once the engine is done with it and those before it are set."""
        outer = self._running()
        with self._changed:
            stopping = self._stopping
            if not stopping:
                self._tasks[work.handle] = _Task(
                    self,
                    work,
                    depth=0 if outer is None else outer.depth + 1,
                    num_begun=self._num_begun if outer is None else outer.num_begun,
                )
                if not self._threads:
                    self._start(self._guard, "shoal-futures-guard")
                    self._offer_turn()
                elif outer is not None and outer.turn is self._turn:
                    self._offer_turn()
                self._changed.notify_all()
                if self._guard_pauses:
                    self._resumed.notify()
        if stopping:
            work.complete_future()
        else:
            self._engine.watch(work.handle)

    def stop(self) -> None:
        """End the threads; futures that are still open are completed with the group's outcome."""
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
        """Let a free thread set futures from now on."""
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
                    _here.task, task.clock = task, clock
                    task.work.complete_future()
                    _here.task = None
                    self._end(task)

    def _has(self, turn: object) -> bool:
        """Wait for a task and return whether it is still this turn."""
        with self._changed:
            self._changed.wait_for(lambda: self._tasks or self._stopping or self._turn is not turn)
            return not self._stopping and self._turn is turn

    def _take(self, turn: object) -> _Task | None:
        """Return what is done, the first of its depth, and not held up by callbacks that run."""
        with self._changed:
            if self._stopping:
                return None
            held = {task.depth for task in self._tasks.values() if task.turn and not task.has_stopped}
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

    def _guard(self) -> None:
        """Let others go on behind callbacks that have stopped."""
        while True:
            with self._changed:
                self._guard_pauses = not self._tasks
                self._resumed.wait_for(lambda: self._tasks or self._stopping)
                self._guard_pauses = False
                self._resumed.wait_for(lambda: self._stopping, _LOOK_S)
                if self._stopping:
                    return
                stopped = [task for task in self._tasks.values() if task.look()]
                if any(task.turn is self._turn for task in stopped):
                    self._offer_turn()
                del stopped  # or their group would live until the next ones come
