"""Lets helpers end with the workers where no scheduler ends them: a connection that closes.

The first worker host's launcher listens, and says nothing but its exit code at its end. The launcher of each
helper keeps a connection to it, and stops its server when that closes: because the launcher has ended, or
because its host is gone.

A launcher that ssh or mpirun has started holds on to its stdin in the same way.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Self

from shoal.errors import ShoalError, UsageError

PORT_OFFSET = 1
"""The leash's port, above that of the launchers' rendezvous."""
_MAX_HELD = 1_024
_MAX_SAID = 16
_PAUSE_S = 0.5
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}


class Leash:
    """The end that the first worker host holds; a context."""

    exit_code: int | None = None
    """Said to the helpers at the end of the context."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._listener: socket.socket | None = None
        self._held: list[socket.socket] = []

    def __enter__(self) -> Self:
        try:
            self._listener = socket.create_server(("", self._port), backlog=_MAX_HELD)
        except OSError as problem:
            reason = os.strerror(problem.errno or 0)
            print(
                f"shoal launch: WARNING: port {self._port} cannot be opened ({reason}); "
                "helpers that wait for the workers' end will not notice it",
                file=sys.stderr, flush=True,
            )  # fmt: skip
            return self
        threading.Thread(target=self._accept, args=(self._listener,), name="leash", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        for held in self._held:
            if self.exit_code is not None:
                with suppress(OSError):
                    held.sendall(f"{self.exit_code}\n".encode())
            held.close()
        if self._listener is not None:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()

    @property
    def num_held(self) -> int:
        """Number of helpers that hold on."""
        return len(self._held)

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _ = listener.accept()
                if len(self._held) < _MAX_HELD:
                    self._held.append(connection)
                else:
                    connection.close()


def take_secret(stdin: IO[str]) -> Path:
    """Return a file with the first line of ``stdin``; when that closes, or at USR2, SIGTERM comes.

    Raises:
        UsageError: it is empty.
    """
    secret = stdin.readline().strip()
    if not secret:
        raise UsageError(
            "--leash reads the job's secret from stdin, which is empty; shoal submit ssh starts it"
        )
    folder = Path(tempfile.mkdtemp(prefix="shoal-leash-"))  # 0700
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = folder / "secret"
    with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        file.write(secret)

    def wait() -> None:
        with suppress(OSError, ValueError):
            while stdin.readline():
                pass
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGUSR2, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    threading.Thread(target=wait, name="stdin", daemon=True).start()
    return path


def await_release(
    host: str, port: int, *, deadline_s: float, held: threading.Event | None = None
) -> int | None:
    """Return when the process that holds the leash on ``host`` has ended, and its exit code if it said one.

    ``held`` is set once that process has been reached.

    Raises:
        ShoalError: nobody listens there before the deadline.
    """
    until = time.monotonic() + deadline_s
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=_PAUSE_S * 4)
            break
        except OSError as problem:
            if time.monotonic() > until:
                raise ShoalError(
                    f"the first worker host {host}:{port} did not come within {deadline_s:g} s ({problem})"
                ) from None
            time.sleep(_PAUSE_S)
    if held is not None:
        held.set()
    with connection:
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        said = b""
        with suppress(OSError):
            while len(said) < _MAX_SAID and (part := connection.recv(_MAX_SAID)):
                said += part
    word = said.decode("ascii", errors="replace").strip()
    return int(word) if word.isdecimal() else None
