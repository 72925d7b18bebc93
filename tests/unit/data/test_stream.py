"""Ends of a stream's threads, and calls that must not wait for them."""

import gc
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal.data.loader import BatchStream, in_order

NAME = "stream-under-test"


def stream_of(tasks, make, *, num_ahead=2):
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=NAME)
    return BatchStream(in_order(lambda task: pool.submit(make, task), tasks, num_ahead), [pool])


def num_threads():
    return sum(thread.name.startswith(NAME) for thread in threading.enumerate())


@pytest.mark.parametrize("num_ahead", [1, 2, 5, 100])
def test_items_come_in_order_and_the_end_ends_threads(num_ahead):
    stream = stream_of(range(20), lambda task: task * task, num_ahead=num_ahead)
    assert list(stream.map(lambda made: made + 1)) == [task * task + 1 for task in range(20)]
    assert num_threads() == 0


@pytest.mark.parametrize("num_ahead", [1, 3])
def test_so_many_are_begun_before_they_are_asked_for(num_ahead):
    begun = []
    stream = stream_of(range(20), begun.append, num_ahead=num_ahead)
    assert begun == []
    for taken in range(1, 5):
        next(stream)
        stream.pools[0].submit(int).result()  # what was handed in before has been made
        assert begun == list(range(num_ahead + taken))
    stream.close()


def test_closing_waits_for_what_was_begun_and_drops_the_rest():
    made = []

    def make(task):
        time.sleep(0.05)
        made.append(task)

    stream = stream_of(range(100), make, num_ahead=50)
    next(stream)
    stream.close()
    assert num_threads() == 0
    assert len(made) < 10
    stream.close()
    assert list(stream) == []


def test_an_error_ends_threads():
    stream = stream_of([1, 0, 1], lambda task: 1 // task)
    with pytest.raises(ZeroDivisionError):
        list(stream.map(str))
    assert num_threads() == 0


def test_garbage_collection_waits_for_no_thread():
    """It runs in any thread and under any lock, so that it would wait for itself."""
    let_go = threading.Event()
    stream = stream_of(range(100), lambda task: task == 0 or let_go.wait(60), num_ahead=1)
    next(stream)
    cycle = [stream]
    cycle.append(cycle)
    del stream, cycle
    gc.collect()
    assert not let_go.is_set() and num_threads() == 1
    let_go.set()
    deadline = time.monotonic() + 60
    while num_threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert num_threads() == 0
