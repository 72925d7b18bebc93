"""Runs programs of the system, such as sbatch, kubectl and docker; a failure is one error with its remedy."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence

from shoal.errors import ShoalError

DEADLINE_S = 60.0
_LAST_LINES = 8


def run_tool(
    command: Sequence[str],
    *,
    absent: str,
    remedies: Mapping[str, str],
    stdin: str = "",
    deadline_s: float | None = DEADLINE_S,
    shows_output: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end and return its exit code 0, stdout and stderr.

    Args:
        command: the program and its arguments.
        absent: what to do if it is not installed.
        remedies: what to do about a failure, by a part of the program's message; capitals do not matter.
        stdin: text for its standard input.
        deadline_s: seconds until it is killed; ``None``: it may take any time.
        shows_output: its stdout is that of this process, and not returned.

    Raises:
        ShoalError: it is not here, does not answer in time, or fails.

    Example:
        >>> run_tool(["echo", "4711"], absent="install it", remedies={}).stdout
        '4711\\n'
    """
    name = command[0]
    try:
        done = subprocess.run(
            command,
            input=stdin,
            stdout=None if shows_output else subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            timeout=deadline_s,
        )
    except FileNotFoundError:
        raise ShoalError(f"{name} was not found: {absent}") from None
    except OSError as problem:
        raise ShoalError(f"{name} cannot be started: {problem.strerror}; {absent}") from None
    except subprocess.TimeoutExpired:
        slow = remedies.get("timeout", "see whether its server can be reached from here")
        raise ShoalError(f"{' '.join(command)} did not answer in {deadline_s:g} s; {slow}") from None
    if done.returncode == 0:
        return done
    lines = (done.stderr.strip() or (done.stdout or "").strip()).splitlines()[-_LAST_LINES:]
    message = "\n".join(lines) or f"ended with exit code {done.returncode}"
    remedy = next((each for sign, each in remedies.items() if sign.lower() in message.lower()), "")
    raise ShoalError(f"{'' if message.startswith(name) else f'{name}: '}{message}{remedy and f'; {remedy}'}")
