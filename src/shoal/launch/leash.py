"""Ends a launcher that ssh or mpirun has started with its starter: by its stdin, which closes then."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import IO

from shoal.errors import UsageError


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
