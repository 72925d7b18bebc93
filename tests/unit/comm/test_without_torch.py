"""Tests that ranks meet and reduce over any store, in a process that has neither torch nor NumPy."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys
sys.modules["torch"] = sys.modules["numpy"] = None

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import shoal.comm.server
from shoal.comm.engine import CommError, Operation
from shoal.comm.rendezvous import connect_engine
from shoal.comm.store import monitored_barrier

LIMIT = timedelta(seconds=30)


class DictStore:
    def __init__(self):
        self.values, self.changed = {}, threading.Condition()

    def set(self, key, value):
        with self.changed:
            self.values[key] = value.encode()
            self.changed.notify_all()

    def get(self, key):
        self.wait([key], LIMIT)
        return self.values[key]

    def check(self, keys):
        return all(key in self.values for key in keys)

    def add(self, key, amount):
        with self.changed:
            self.values[key] = str(int(self.values.get(key, b"0")) + amount).encode()
            return int(self.values[key])

    def wait(self, keys, timeout):
        with self.changed:
            if not self.changed.wait_for(lambda: self.check(keys), timeout.total_seconds()):
                raise TimeoutError(keys)


def run(rank):
    engine = connect_engine(store, rank, 3, "group", rank, LIMIT)
    values = (ctypes.c_float * 1000)(*([rank + 1.0] * 1000))
    where = ctypes.addressof(values)
    handle = engine.submit(
        Operation(kind="all_reduce", input=where, output=where, count=1000, dtype="float32", timeout_s=30.0)
    )
    assert engine.wait(handle, 30.0)
    monitored_barrier(store, 1, rank, 3, LIMIT, False)
    engine.close()
    return list(values) == [6.0] * 1000


store = DictStore()
with ThreadPoolExecutor(3) as pool:
    assert list(pool.map(run, range(3))) == [True] * 3
try:
    connect_engine(DictStore(), 1, 2, "other", 1, timedelta(seconds=0.2))
except CommError as error:
    assert "rank 0 of the group did not come within 0.2 s" in str(error), error
else:
    raise AssertionError("rank 0 is missing")
"""


def test_ranks_meet_and_reduce_without_torch() -> None:
    child = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
