"""What threads and processes make ahead, as an iterator that ends them: :class:`Stream`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from itertools import islice
from typing import Generic, TypeVar

_Task = TypeVar("_Task")
_Made = TypeVar("_Made")
_Other = TypeVar("_Other")


class Stream(Iterator[_Made], Generic[_Made]):
    """Items that the threads and processes of ``pools`` make; closing it, or its end, waits for theirs.

    Not a generator with a ``finally``: Python closes one that was left behind (by an error whose traceback
    still holds it) whenever it collects garbage, in any thread and under any lock, where waiting for a thread
    hangs. Pools that are left behind end their threads and processes by themselves, and nobody waits.
    """

    def __init__(self, items: Iterator[_Made], pools: Sequence[Executor]) -> None:
        self._items = items
        self._pools = pools

    def __next__(self) -> _Made:
        try:
            return next(self._items)
        except BaseException:
            self.close()
            raise

    def map(self, function: Callable[[_Made], _Other]) -> Stream[_Other]:
        """Return the stream of what ``function`` makes of each item; it takes this one's place."""
        return Stream(map(function, self), self._pools)

    def close(self) -> None:
        """Drop what was not begun, wait for what was, and end threads and processes. May be repeated."""
        self._items = iter(())
        for pool in self._pools:
            pool.shutdown(cancel_futures=True)


def in_order(
    begin: Callable[[_Task], Future[_Made]], tasks: Iterable[_Task], num_ahead: int
) -> Iterator[_Made]:
    """Yield what becomes of each task, in order; ``num_ahead`` are begun before they are asked for."""
    rest = iter(tasks)
    ahead = deque(map(begin, islice(rest, num_ahead)))
    while ahead:
        ahead[0].result()
        ahead.extend(map(begin, islice(rest, 1)))
        yield ahead.popleft().result()  # not kept here while its user has it: batches of images are large
