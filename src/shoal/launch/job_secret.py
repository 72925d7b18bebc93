"""The job's secret on its way to the workers: by a file that their user alone can read."""

from __future__ import annotations

import os
from pathlib import Path


def write_secret(folder: Path, secret: bytes) -> Path:
    """Write the secret to a new file in ``folder``, which only this user can enter; return its path."""
    path = folder / "secret"
    with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(secret)
    return path
