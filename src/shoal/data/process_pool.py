"""Runs one function over many tasks in a pool of processes, with progress and a clean shutdown.

Processes are spawned, not forked: `tokenizers` and numpy run threads by then. A worker process ignores
Ctrl-C, which its parent handles, and exits as soon as the parent is killed. Tasks add to a shared counter as
they advance, and stop early when a shared flag is set.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.sharedctypes import Synchronized
from typing import Any, TypeVar

from shoal.data.progress import PreparationProgress
from shoal.data.steps import exit_with_parent
from shoal.errors import ShoalError

Task = TypeVar("Task")
Result = TypeVar("Result")

_POLL_S = 0.2

_done: Synchronized[int]
_stop: Synchronized[int]


class Stopped(Exception):
    """Ends a task early, on the parent's request."""


def advance(num_bytes: int) -> None:
    """Report from inside a task that ``num_bytes`` more are done.

    Raises:
        Stopped: the parent is shutting down.
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
) -> list[Result]:
    """Return the results of all tasks, in order.

    ``show`` is called several times per second with the sum of all ``advance`` calls so far. The first error
    of a task stops the others and is raised.

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
        futures = [executor.submit(function, task) for task in tasks]
        pending = set(futures)
        while pending:
            finished, pending = wait(pending, timeout=_POLL_S, return_when=FIRST_COMPLETED)
            for future in finished:
                future.result()
            show(done.value)
        return [future.result() for future in futures]
    except BrokenProcessPool:
        raise ShoalError(
            "a worker process was killed, most likely because memory ran out: run the same command again "
            "with fewer --processes; it continues where it stopped"
        ) from None
    finally:
        stop.value = 1
        executor.shutdown(wait=True, cancel_futures=True)


def run_unfinished(
    function: Callable[[Task], Result],
    tasks: Sequence[Task],
    finished: Callable[[Task], Result | None],
    shown: PreparationProgress,
    *,
    outputs: str,
    num_bytes: Callable[[Task], float],
    processes: int,
    initializer: Callable[..., None] | None = None,
    initargs: tuple[Any, ...] = (),
) -> list[Result]:
    """Run the tasks for which ``finished`` returns ``None``; return the results of all, in order.

    Args:
        outputs: name of what tasks write, for the report ("image shards").
        num_bytes: how many bytes of a task its ``advance`` calls add up to.

    Raises:
        ShoalError: a worker process was killed.
    """
    results = {index: finished(task) for index, task in enumerate(tasks)}
    todo = [index for index, result in results.items() if result is None]
    if len(todo) < len(tasks):
        shown.say(f"{len(tasks) - len(todo)} of {len(tasks)} {outputs} were finished before")
    if todo:
        shown.start(f"Writing {outputs}", round(sum(num_bytes(tasks[index]) for index in todo)))
        made = run_tasks(
            function,
            [tasks[index] for index in todo],
            processes=processes,
            initializer=initializer,
            initargs=initargs,
            show=shown.show,
        )
        results.update(zip(todo, made, strict=True))
    return [result for result in results.values() if result is not None]


def _start_worker(
    done: Synchronized[int],
    stop: Synchronized[int],
    initializer: Callable[..., None] | None,
    initargs: tuple[Any, ...],
) -> None:
    global _done, _stop
    _done, _stop = done, stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=exit_with_parent, daemon=True).start()
    if initializer is not None:
        initializer(*initargs)
