"""What a job's end means: the exit code to return and the one failure to show. Standard library only."""

from __future__ import annotations

import signal
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import EXIT_FAILURE, EXIT_OK, EXIT_STOPPED
from shoal.launch.worker import WorkerError

_TAIL_LINES = 20


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The launcher's exit code, and what it prints on stderr (empty: nothing)."""

    exit_code: int
    text: str = ""

    def tell(self) -> int:
        """Print the text, if there is any, and return the exit code."""
        if self.text:
            print(self.text, file=sys.stderr, flush=True)
        return self.exit_code


def decide_outcome(
    exit_codes: Mapping[int, int],
    errors: Mapping[int, WorkerError],
    *,
    killed: Collection[int] = (),
    forwarded: Collection[int] = (),
    logs: Mapping[int, Path] | None = None,
) -> Outcome:
    """Find the failure that caused the others.

    An error of a worker's own comes first, the earliest of several; then a death by a signal that the
    launcher did not send, and an exit without an error; then the mere loss of another worker.

    Args:
        exit_codes: of this host's workers by rank; minus the signal's number for a death by signal.
        errors: what workers have reported themselves, by rank.
        killed: ranks that the launcher has ended itself.
        forwarded: signals that it has passed on; a worker that died of one had nothing to save yet.
        logs: files that hold the output of workers, by rank.
    """
    logs = logs or {}
    own = [error for error in errors.values() if not error.lost_peer]
    if own:
        return _of_error(min(own, key=lambda error: error.time_s), logs)
    silent = {
        rank: code
        for rank, code in sorted(exit_codes.items())
        if rank not in errors and rank not in killed and code not in (EXIT_OK, EXIT_STOPPED)
        and -code not in forwarded
    }  # fmt: skip
    if silent:
        # a death by signal explains an exit code elsewhere rather than the other way round
        rank = min(silent, key=lambda rank: silent[rank] > 0)
        return _of_silent(rank, silent[rank], logs)
    stopped = any(code == EXIT_STOPPED or -code in forwarded for code in exit_codes.values())
    if stopped:
        return Outcome(exit_code=EXIT_STOPPED)
    if errors:
        first = min(errors.values(), key=lambda error: error.time_s)
        return Outcome(
            exit_code=EXIT_FAILURE,
            text=f"worker {first.rank} lost another worker, which runs on another host: look for the error "
            f"in that host's output. It says: {first.message}{_where(first.rank, logs)}",
        )
    return Outcome(exit_code=EXIT_FAILURE if killed else EXIT_OK)


def _of_error(error: WorkerError, logs: Mapping[int, Path]) -> Outcome:
    if not error.traceback:
        return Outcome(exit_code=error.exit_code, text=error.message)
    return Outcome(
        exit_code=error.exit_code,
        text=f"worker {error.rank} failed:\n{error.traceback.rstrip()}{_where(error.rank, logs)}",
    )


def _of_silent(rank: int, code: int, logs: Mapping[int, Path]) -> Outcome:
    tail = _tail(logs.get(rank))
    if code > 0:  # it has printed what it had to say: the first worker to the terminal, others to a file
        text = f"worker {rank} ended with exit code {code}{_where(rank, logs)}{tail}"
        return Outcome(exit_code=code, text=text)
    name = _signal_name(-code)
    return Outcome(
        exit_code=EXIT_FAILURE,
        text=f"worker {rank} was ended by {name}{_hint(-code)}{_where(rank, logs)}{tail}",
    )


def _hint(number: int) -> str:
    if number == signal.SIGKILL:
        return (
            ": somebody killed it, or the kernel did because the memory was full (dmesg says so); a smaller "
            "--train.micro-batch-size needs less"
        )
    if number in (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE):
        return ": native code crashed; the lines above or in its log show where in Python"
    return ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _where(rank: int, logs: Mapping[int, Path]) -> str:
    return f"\n(its whole output: {logs[rank]})" if rank in logs else ""


def _tail(path: Path | None) -> str:
    if path is None or not path.is_file():
        return ""
    lines = path.read_text("utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
    return "".join(f"\n  {line}" for line in lines)
