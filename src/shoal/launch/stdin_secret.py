"""Connects a launcher to the process that started it through ssh or mpirun: by its stdin.

The first line of stdin is the job's secret. When stdin closes, because that process has ended, the launcher
stops.
"""

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
from shoal.launch.supervision import write_secret


def take_secret(stdin: IO[str]) -> Path:
    """Write the first line of ``stdin`` to a file; SIGTERM follows when stdin closes, or at USR2.

    Raises:
        UsageError: it is empty.
    """
    secret = stdin.readline().strip()
    if not secret:
        raise UsageError(
            "--stdin-secret reads the job's secret from stdin, which is empty; shoal submit ssh starts it"
        )
    folder = Path(tempfile.mkdtemp(prefix="shoal-secret-"))  # 0700
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path = write_secret(folder, secret.encode())

    def wait() -> None:
        with suppress(OSError, ValueError):
            while stdin.readline():
                pass
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGUSR2, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    threading.Thread(target=wait, name="stdin", daemon=True).start()
    return path
