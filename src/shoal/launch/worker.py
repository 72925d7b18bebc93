"""Runs the main function of a worker process and reports its error.

Under shoal's launcher a worker writes its error to a file instead of the terminal, which then shows only the
failure that caused the others. Under torchrun, mpirun or by hand it prints the error itself.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from shoal.env import launch_dir, worker_env
from shoal.errors import EXIT_FAILURE, ShoalError
from shoal.json_text import parse_json

EXIT_DEADLINE_S = 5.0
"""Time after which a failed worker exits even if a library's clean-up hangs."""

_PARENT_CHECK_S = 1.0
_LOST_PEER_SIGNS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "read error",
    "timed out waiting",
    "timeout waiting for key",  # torch's FileStore, to whose time-outs it gives no type of their own
    "wait timeout",
    "remote process exited",
    "another worker was lost",
)
_LOST_PEER_TYPES = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError"})


@dataclass(frozen=True, kw_only=True)
class WorkerError:
    """Error report of a worker."""

    rank: int
    time_s: float
    message: str
    traceback: str
    """Empty for a :class:`ShoalError`, whose message is enough."""
    exit_code: int
    lost_peer: bool
    """True if the error only reports that another worker is gone."""


def run_worker(main: Callable[[], int]) -> NoReturn:
    """Call ``main`` and exit with the code that it returns, or with that of its error.

    A :class:`ShoalError` is reported by its message, any other exception by its traceback. If the launcher is
    killed, the worker sends itself SIGTERM, so that it saves and exits.
    """
    folder = launch_dir()
    faulthandler.enable()
    if folder is not None:
        _stop_without_launcher()
    try:
        exit_code = main()
        _leave_groups()
    except SystemExit:
        _leave_groups()
        raise
    except BaseException as error:
        env = worker_env()
        report = describe_error(error, rank=env.place.rank if env else 0)
        if folder is not None:
            write_error(folder, report)
        if folder is None or report.rank != 0:  # the others' stderr is a file under our launcher
            who = f"worker {report.rank}: " if env and env.place.num_workers > 1 else ""
            print(f"{who}{report.traceback or report.message}", file=sys.stderr, flush=True)
        _exit_soon(report.exit_code)
        exit_code = report.exit_code
    sys.exit(exit_code)


def describe_error(error: BaseException, *, rank: int) -> WorkerError:
    """Return the report of an exception."""
    known = isinstance(error, ShoalError)
    return WorkerError(
        rank=rank,
        time_s=time.time(),
        message=str(error) if known else f"{type(error).__name__}: {error}",
        traceback="" if known else "".join(traceback.format_exception(error)),
        exit_code=error.exit_code if isinstance(error, ShoalError) else EXIT_FAILURE,
        lost_peer=_is_lost_peer(error),
    )


def write_error(folder: Path, error: WorkerError) -> None:
    """Write a report to ``folder``, atomically."""
    path = folder / f"error-{error.rank}.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(error)), encoding="utf-8")
    temporary.rename(path)


def read_errors(folder: Path) -> dict[int, WorkerError]:
    """Return the reports in ``folder``, by rank."""
    found = (WorkerError(**parse_json(path.read_bytes(), str(path))) for path in folder.glob("error-*.json"))
    return {error.rank: error for error in found}


def _is_lost_peer(error: BaseException) -> bool:
    """Return whether the error, or one of its causes, reports the loss of another worker."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if type(cause).__name__ in _LOST_PEER_TYPES:
            return True
        if isinstance(cause, RuntimeError) and any(sign in str(cause).lower() for sign in _LOST_PEER_SIGNS):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _leave_groups() -> None:
    """Free what main has left in reference cycles, and destroy its process groups.

    Threads of a group or of a model's reducer that are alive during the interpreter's shutdown end the
    process by SIGABRT: seen in 2 of 10 runs on a busy machine, each after the run had saved.
    """
    gc.collect()
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def _exit_soon(exit_code: int) -> None:
    """Exit after :data:`EXIT_DEADLINE_S`, whatever the interpreter still waits for."""

    def exit_now() -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)

    timer = threading.Timer(EXIT_DEADLINE_S, exit_now)
    timer.daemon = True
    timer.start()


def _stop_without_launcher() -> None:
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_CHECK_S)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()
