"""Threads that Python does not know, and threads that want it when the interpreter ends."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal import native
from shoal.comm.engine import CollectiveEngine, Engine, EngineOptions, SingleProcessEngine

TESTS = Path(__file__).parents[1]
LEFT = 7
"""Exit code of a process whose interpreter has ended as far as the program wants."""

PROGRAM = """
import atexit, os, sys, threading, time
sys.path.insert(0, sys.argv[1])
import numpy as np
from engine_group import engine_group, submit
from shoal.comm import engine

class Late:
    def __del__(self, sleep=time.sleep, leave=os._exit, code=int(sys.argv[2])):
        sleep(3)  # other threads run meanwhile
        leave(code)

sys.last_value = Late()  # the first object that goes when the interpreter ends
atexit.unregister(engine._close_all)
opened = engine_group(["a", "b"])
first = opened.__enter__().engines[0]
values = np.ones(4, np.float32)
handle = submit(first, "all_reduce", values, values.copy(), timeout_s=1.0)
"""


def release(group: int) -> bool:
    """Drop a reference to a C group on a thread of the C library; return whether that needs no GIL."""
    file = native.core().__file__
    assert file is not None
    shoal = ctypes.PyDLL(str(Path(file).parent / "lib" / "libshoal.so"))  # its calls keep the GIL
    c = ctypes.PyDLL(None)
    thread, until = ctypes.c_ulong(), (ctypes.c_long * 2)(int(time.time()) + 10, 0)
    address = ctypes.c_void_p(group)
    assert c.pthread_create(ctypes.byref(thread), None, shoal.shoal_group_release, address) == 0
    return bool(c.pthread_timedjoin_np(thread, None, until) == 0)


def engine_of(size: int) -> CollectiveEngine:
    if size == 1:
        return SingleProcessEngine()
    return Engine(
        rank=0, size=size, group="let go", secret=b"secret", address="127.0.0.1", options=EngineOptions()
    )


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("is_last", [False, True])
def test_a_thread_lets_go_of_a_group_without_python(size: int, is_last: bool) -> None:
    engine = engine_of(size)
    group = engine.c_group()
    if is_last:
        del engine
    assert release(group)


@pytest.mark.parametrize(
    "wanted",
    [
        pytest.param("first.then(handle, print)", id="a function at an operation's end"),
        pytest.param(
            "threading.Thread(target=first.wait, args=(handle, 1.0), daemon=True).start()",
            id="a thread that waits",
        ),
    ],
)
def test_a_thread_that_wants_python_when_it_ends_is_no_crash(wanted: str) -> None:
    program = [sys.executable, "-c", PROGRAM + wanted, TESTS, str(LEFT)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (LEFT, "")
