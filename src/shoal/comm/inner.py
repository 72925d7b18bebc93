"""The inner gloo group: for what the engine does not do itself. It is made when it is first needed.

It is made without waiting for anybody: each rank publishes its address in the store, and gloo connects two
ranks when they first talk. So two ranks may send to each other while a third is elsewhere.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, Work

from shoal.comm.engine import CommError
from shoal.comm.meeting import MeetingStore, met

_POLL_S = 0.2
# A rank that dies resets gloo's connections as well as ours. Ours name it, within this time.
_NAMING_S = 3.0
_ABORT_TAG = 0x7FFF_FFF0

Start = Callable[[Any], Work]
"""Starts an operation on the inner group that it is given."""


class InnerGloo:
    """The gloo group inside a group, and the thread that breaks it off when the engine reports a failure."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        address: str,
        timeout: timedelta,
        error: Callable[[], str | None],
    ) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._address = address
        self._timeout = timeout
        self.error = error
        self._group: Any = None
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._broken_off = False
        self._meeting = MeetingStore(PrefixStore("gloo/", store), self._must_end)

    @property
    def exists(self) -> bool:
        return self._group is not None

    def group(self) -> Any:
        """Return the inner group, made now if it has not been."""
        with self._lock:
            if self._stopped.is_set():
                raise CommError("this process group has been shut down; make a new one")
            if self._group is None:
                gloo: Any = ProcessGroupGloo
                options = gloo._Options()
                options._devices = [gloo.create_device(hostname=self._address, lazy_init=True)]
                options._timeout = self._timeout
                self._group = gloo(self._meeting, self._rank, self._size, options)
                self._store.set(f"inner/{self._rank}", "1")
                threading.Thread(target=self._guard, name="shoal-inner-group", daemon=True).start()
            return self._group

    def join_if_wanted(self) -> None:
        """Make the inner group if a rank waits for a message from anybody; slow waits call this again."""
        if self._group is None and self._store.check(["inner/wanted"]):
            self.group()

    def want_all(self) -> None:
        """Ask every rank to make its inner group."""
        self._store.set("inner/wanted", "1")

    def is_ready(self, peer: int) -> bool:
        return bool(self._store.check([f"inner/{peer}"]))

    def until_ready(self, peer: int, timeout: timedelta) -> None:
        """Wait until ``peer`` has made its inner group.

        Raises:
            CommError: it has not in this time, or the group failed.
        """
        if not met(self._store, [f"inner/{peer}"], self._must_end, timeout):
            raise CommError(
                self.error()
                or f"rank {peer} of the group did not send or receive within {timeout.total_seconds():g} s; "
                "see whether it still runs, or give the group a longer timeout"
            )

    def explain(self, problem: Exception) -> Exception:
        """Return the engine's reason, which names the rank, if the group has failed; else ``problem``."""
        end = time.monotonic() + (_NAMING_S if "imed out" not in str(problem) else 0.0)
        while True:
            if reason := self.error():
                return CommError(reason)
            if time.monotonic() >= end:
                return problem
            time.sleep(_POLL_S / 4)

    def _must_end(self) -> bool:
        return self._stopped.is_set() or self.error() is not None

    def _guard(self) -> None:
        while not self._stopped.wait(_POLL_S):
            if self.error():
                self._break_off()
                return

    def _break_off(self) -> None:
        # gloo closes all connections of a group when an application's wait for a message runs out of time,
        # which ends every operation under way. It has no other way to be told.
        with self._lock:
            group = self._group
            if group is None or self._broken_off:
                return
            self._broken_off = True
        peer = next((rank for rank in range(self._size) if rank != self._rank and self.is_ready(rank)), None)
        if peer is not None:
            with contextlib.suppress(RuntimeError):
                group.recv([torch.empty(1)], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout
        if self._group is not None:
            self._group._set_default_timeout(timeout)

    def stop(self) -> None:
        """End the inner group; what is still under way after a failure is broken off."""
        self._stopped.set()
        if self.error():
            self._break_off()
        with self._lock:
            self._group = None
