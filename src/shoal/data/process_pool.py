"""One function over many tasks in several processes: results as they come, a clean end on every way out.

Processes are spawned, not forked: `tokenizers` and numpy have threads by then. A worker ignores Ctrl-C,
which is its parent's to handle, and leaves at once if the parent is killed, so that no orphan goes on
writing. Tasks say how far they are through a shared counter and look at a shared flag to end early.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.sharedctypes import Synchronized
from typing import Any, TypeVar

from shoal.errors import ShoalError

Task = TypeVar("Task")
Result = TypeVar("Result")

_POLL_S = 0.2

_done: Synchronized[int]
_stop: Synchronized[int]


class Stopped(Exception):
    """The parent wants this task to end unfinished."""


def num_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def advance(num_bytes: int) -> None:
    """Report from inside a task that ``num_bytes`` more are done.

    Raises:
        Stopped: the parent is on its way out.
    """
    if _stop.value:
        raise Stopped
    with _done.get_lock():
        _done.value += num_bytes


def run_tasks(
    function: Callable[[Task], Result],
    tasks: Sequence[Task],
    *,
    processes: int,
    initializer: Callable[..., None] | None = None,
    initargs: tuple[Any, ...] = (),
    show: Callable[[int], None] = lambda done_bytes: None,
) -> Iterator[tuple[int, Result]]:
    """Yield (index of the task, result) in order of completion.

    ``show`` is called several times a second with the sum of all ``advance`` calls so far. The first error
    of a task ends the others and is raised.

    Raises:
        ShoalError: a worker process was killed.
    """
    context = multiprocessing.get_context("spawn")
    done, stop = context.Value("q", 0), context.Value("b", 0)
    executor = ProcessPoolExecutor(
        min(processes, max(len(tasks), 1)),
        mp_context=context,
        initializer=_start_worker,
        initargs=(done, stop, initializer, initargs),
    )
    try:
        index_of = {executor.submit(function, task): index for index, task in enumerate(tasks)}
        pending = set(index_of)
        while pending:
            finished, pending = wait(pending, timeout=_POLL_S, return_when=FIRST_COMPLETED)
            for future in finished:
                yield index_of[future], future.result()
            show(done.value)
    except BrokenProcessPool:
        raise ShoalError(
            "a worker process ended without a word; most likely the system was out of memory and killed it: "
            "run the same command again, it goes on where it was, with fewer --processes"
        ) from None
    finally:
        stop.value = 1
        executor.shutdown(wait=True, cancel_futures=True)


def _start_worker(
    done: Synchronized[int],
    stop: Synchronized[int],
    initializer: Callable[..., None] | None,
    initargs: tuple[Any, ...],
) -> None:
    global _done, _stop
    _done, _stop = done, stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    if initializer is not None:
        initializer(*initargs)


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
