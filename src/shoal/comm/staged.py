"""What a collective on a device's tensors returns."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.futures import Future

from shoal.comm.devices import Device, Mark
from shoal.comm.engine import CommError
from shoal.comm.untraced import untraced
from shoal.comm.work import NO_TIMEOUT, SingleWork, still_under_way

_SLICE_S = 0.5
# When the group fails, the operation's own error, which says more, is there within this time.
_NAMING_S = 1.0


@untraced
class StagedWork(SingleWork):
    """One collective that goes through the host's memory.

    It is *delivered* when the last of its work on the device is queued: from there on who uses the result on
    the device needs to wait for a mark only, not the processor.
    """

    def __init__(
        self,
        device: Device,
        name: str,
        result: Any,
        error: Callable[[], str | None],
        idle: Callable[[], None],
    ) -> None:
        super().__init__()
        self._device = device
        self._name = name
        self._result = result
        self._group_error, self._idle = error, idle
        self._delivered = threading.Event()
        self._mark: Mark | None = None
        self._lock = threading.Lock()
        self._begun: Future[Any] | None = None
        self._future: Future[Any] | None = None

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Let what the calling thread queues from now on see the result.

        The thread waits until the last sum has come over the network and its copy is queued; the device's
        queues are not waited for.

        Raises:
            CommError: the group has failed, or ``timeout`` has passed and the operation goes on.
        """
        end = time.monotonic() + timeout.total_seconds() if timeout > NO_TIMEOUT else None
        while not self._delivered.wait(
            _SLICE_S if end is None else max(0.0, min(_SLICE_S, end - time.monotonic()))
        ):
            if end is not None and time.monotonic() >= end:
                raise still_under_way(self._name, timeout)
            self._idle()
            if (reason := self._group_error()) and not self._delivered.wait(_NAMING_S):
                raise CommError(reason)
        if self._error is not None:
            raise self._error
        self._device.here().wait_for(self._mark)
        return True

    def deliver(self, mark: Mark) -> None:
        """Note that the result is there behind ``mark``."""
        self._mark = mark
        self._delivered.set()

    def fail(self, error: Exception) -> None:
        """Note how the operation failed, whether or not it seemed to have ended."""
        self._error = error
        self._delivered.set()
        self.complete()

    def complete(self) -> None:
        """Set the future, if there is one; called where the result may be used."""
        with self._lock:
            begun, self._begun = self._begun, None
        # A future of CUDA tensors records events in the streams that are current where it is set.
        if begun is not None:
            begun.set_result(self._result if self._error is None else None)

    def is_completed(self) -> bool:
        if not self._delivered.is_set():
            return False
        return self._error is not None or self._mark is None or self._mark.is_done()

    def _has_ended(self) -> bool:
        return self.is_completed()

    def result(self) -> Any:
        return self._result

    def get_future(self) -> Future[Any]:
        """Return a future of the output tensors; its callbacks run when the result is delivered."""
        with self._lock:
            if self._future is not None:
                return self._future
            begun: Future[Any] = Future(devices=list(self._device.future_devices()))
            future: Future[Any] = begun.then(self._outcome)
            self._future = future
            self._begun = begun
        if self._delivered.is_set():
            if self._mark is not None and self._error is None:
                self._device.here().wait_for(self._mark)
            self.complete()
        return future

    def _outcome(self, _: Future[Any]) -> Any:
        if self._error is not None:
            raise self._error
        return self._result
