"""Detects the death of a pipeline's process and names it on all others within seconds.

Only the neighbours of a dead process notice it, by their broken connections; the others would wait for
values that never come. So the first process to fail requests a roll call through the store of the
rendezvous. A thread of every worker polls for the request, answers it, and aborts the waits of its own
process. A process that does not answer has died.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from shoal.errors import ShoalError
from shoal.json_text import parse_json
from shoal.pipelining.adapter import default_store

_POLL_S = 0.3
_ROLL_S = 2.5
"""Time to answer. A thread that holds the interpreter for longer than this makes its process look dead."""
_LONGEST = 500
_ABORT_TAG = 0x7FFF_FFE0

_numbers = itertools.count()


class FailureDetector:
    """Watches the processes of one pipeline and of its replicas.

    Args:
        peers: role of each global rank, this one included: "stages 0, 2 of replica 1".
        groups: process groups in which a step waits.
    """

    def __init__(self, peers: Mapping[int, str], *groups: dist.ProcessGroup | None) -> None:
        self._peers = dict(peers)
        self._groups = [group for group in groups if group is not None]
        self._rank = dist.get_rank()
        self._store = PrefixStore(f"shoal.pipeline/{next(_numbers)}", default_store())
        self._closed = threading.Event()
        self._called = threading.Event()
        self._in_step = threading.Event()
        if len(self._peers) > 1:
            threading.Thread(target=self._listen, name="shoal-pipeline-watch", daemon=True).start()

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Run a step inside; an error that another process caused becomes one that names that process.

        Raises:
            ShoalError: another process died or failed, now or since the last step.
        """
        if self._called.is_set() and (reason := self._reason(None)):
            raise ShoalError(reason)
        self._in_step.set()
        try:
            yield
        except Exception as error:
            if reason := self._reason(error):
                raise ShoalError(reason) from error
            raise
        finally:
            self._in_step.clear()

    def close(self) -> None:
        """Stop the thread of this process."""
        self._closed.set()

    def _listen(self) -> None:
        try:
            while not self._closed.wait(_POLL_S):
                if self._store.check(["roll"]):
                    self._store.set(f"here/{self._rank}", "1")
                    self._called.set()
                    living = self._living()
                    break
            else:
                return
        except RuntimeError:  # the store is gone, with the process that hosted it
            self._called.set()
            living = set(self._peers)
        if self._in_step.is_set():
            for group in self._groups:
                _break_off(group, living - {self._rank})

    def _living(self) -> set[int]:
        """Return the ranks that have answered the roll call, after waiting for the others."""
        end = time.monotonic() + _ROLL_S
        while True:
            living = {rank for rank in self._peers if self._store.check([f"here/{rank}"])}
            if len(living) == len(self._peers) or time.monotonic() > end:
                return living
            time.sleep(_POLL_S / 3)

    def _reason(self, error: Exception | None) -> str | None:
        """Return the process that caused ``error``, as a message; ``None`` if it is this one or cannot be
        found."""
        if len(self._peers) == 1:
            return None
        try:
            if error is not None and self._store.add("callers", 1) == 1:
                message = " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST]
                self._store.set("roll", json.dumps({"rank": self._rank, "error": message}))
            self._store.set(f"here/{self._rank}", "1")
            lost = sorted(set(self._peers) - self._living())
            roll = self._store.get("roll")
        except RuntimeError:
            return (
                f"another worker was lost: the store by which the workers met is gone, and with it "
                f"{self._named(0)} or the launcher that kept it"
            )
        if lost:
            names = " and ".join(self._named(rank) for rank in lost)
            return f"another worker was lost: {names} died; see its output, or whether it was killed"
        first = parse_json(roll, "the failure report in the store")
        if first["rank"] == self._rank:
            return None
        return f"another worker was lost: {self._named(first['rank'])} failed with {first['error']}"

    def _named(self, rank: int) -> str:
        return f"rank {rank} ({self._peers[rank]})" if rank in self._peers else f"rank {rank}"


def _break_off(group: dist.ProcessGroup, living: set[int]) -> None:
    """Abort the operations of this process that wait in ``group``.

    gloo closes all connections of a group when a receive times out, which ends every operation in flight; it
    has no other way to be aborted. Backend "shoal" notices the loss itself.
    """
    backend = dist.get_backend(group)
    with contextlib.suppress(RuntimeError):
        if "nccl" in backend:
            group.abort()
        elif "gloo" in backend:
            for peer, rank in enumerate(dist.get_process_group_ranks(group)):
                if rank in living:
                    group.recv([torch.empty(1)], peer, _ABORT_TAG).wait(timedelta(milliseconds=1))
