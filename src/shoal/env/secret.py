"""Reads the job's secret, and says which variables are secret in a bug report."""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from pathlib import Path

from shoal.env.settings import SECRET, SECRET_FILE
from shoal.env.variables import Environ, variables_of
from shoal.errors import UsageError

MAKE_SECRET = "(umask 077; head -c 32 /dev/urandom | base64 > job.secret)"
"""Shell command that makes a secret's file."""
_SECRET_BYTES = (16, 4_096)
"""Minimum and maximum; a shorter secret could be guessed from the messages of a handshake."""
_SHORTEST_VALUE = 6
"""Shorter values, such as 1 or true, are no secrets."""
_SECRET_NAME = re.compile(
    r"SECRET|TOKEN(?!IZERS)|PASS(?!IVE)|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE|AUTH|SIGNATURE|COOKIE|_KEY$|_PAT$"
)
_REPORTED = re.compile(
    r"(?:SHOAL|NCCL|GLOO|TORCH|TORCHELASTIC|PET|PYTORCH|CUDA|NVIDIA|HIP|ROCR|FI|UCX|OMP|GOMP|KMP|MKL|OPENBLAS|OMPI_COMM"
    r"|PMI|PMIX|MPI|TOKENIZERS|SLURM)_\w+"
    r"|(?:GLOBAL_|LOCAL_|GROUP_|ROLE_)?RANK|(?:LOCAL_|GROUP_|ROLE_)?WORLD_SIZE|NODE_RANK|MASTER_(?:ADDR|PORT)"
    r"|LD_(?:LIBRARY_PATH|PRELOAD)|MALLOC_\w+|PYTHON\w*|VIRTUAL_ENV|CONDA_PREFIX|CXX|CC|TMPDIR|LANG|LC_ALL"
)
"""Environment variables for bug reports."""


def job_secret(environ: Environ = None) -> bytes | None:
    """Return the job's secret from ``SHOAL_SECRET`` or the file ``SHOAL_SECRET_FILE``, or ``None``.

    Raises:
        UsageError: the file cannot be read, is another user's, or others can read it; or the secret is too
            short.
    """
    environ = variables_of(environ)
    if SECRET in environ:
        source, value = SECRET, environ[SECRET].encode(errors="surrogateescape").strip()
    elif (path := environ.get(SECRET_FILE)) is not None:
        source, value = f"{SECRET_FILE}={path}", _read_secret(path).strip()
    else:
        return None
    if not _SECRET_BYTES[0] <= len(value) <= _SECRET_BYTES[1]:
        raise UsageError(
            f"{source}: a secret has {_SECRET_BYTES[0]} to {_SECRET_BYTES[1]:,} bytes, and this one has "
            f"{'more' if len(value) > _SECRET_BYTES[1] else len(value)}; make one with {MAKE_SECRET} and use "
            "the same on all hosts"
        )
    return value


def _read_secret(path: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            status = os.fstat(file.fileno())  # of the file itself: Kubernetes mounts a link to it
            value = file.read(_SECRET_BYTES[1] + 3)  # and a line break
    except OSError as problem:
        raise UsageError(f"{SECRET_FILE}={path} cannot be read: {problem.strerror}") from None
    mode = stat.S_IMODE(status.st_mode)
    in_group = status.st_gid in {os.getegid(), *os.getgroups()}
    if mode & (0o006 if in_group else 0o066):
        raise UsageError(
            f"{SECRET_FILE}={path} has the mode {mode:04o}, so that other users can read or change it; "
            f"chmod 600 {path} (a secret that Kubernetes mounts: defaultMode: 0440)"
        )
    if status.st_uid not in (os.geteuid(), 0):
        raise UsageError(
            f"{SECRET_FILE}={path} belongs to the user with the id {status.st_uid}, who knows what is in it; "
            f"a secret is a file of this user ({os.geteuid()}) or of root: copy it"
        )
    return value


def reportable(environ: Environ = None) -> dict[str, str]:
    """Return the environment variables that a bug report may show, sorted; values of secrets are removed.

    Example:
        >>> reportable({"NCCL_DEBUG": "INFO", "SHOAL_SECRET": "0123456789abcdef", "MY_NOTES": "private"})
        {'NCCL_DEBUG': 'INFO', 'SHOAL_SECRET': '<removed>'}
    """
    return {
        name: "<removed>" if _SECRET_NAME.search(name) else value
        for name, value in sorted(variables_of(environ).items())
        if _REPORTED.fullmatch(name)
    }


def secret_values(environ: Environ = None) -> set[str]:
    """Return the values of variables with a secret's name, their single lines, and the secret's file."""
    environ = variables_of(environ)
    values = [value for name, value in environ.items() if _SECRET_NAME.search(name.upper())]
    if path := environ.get(SECRET_FILE):
        with suppress(OSError), Path(path).open("rb") as file:
            values.append(file.read(_SECRET_BYTES[1] + 3).decode(errors="surrogateescape"))
    texts = {text.strip() for value in values for text in (value, *value.splitlines())}
    return {text for text in texts if len(text) >= _SHORTEST_VALUE}
