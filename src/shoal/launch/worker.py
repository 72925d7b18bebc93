"""Runs the main function of a worker process and reports its error.

Under shoal's launcher a worker writes its error to a file, and the launcher shows only the failure that
caused the others. Under torchrun, mpirun or by hand the worker prints its error.
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
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from shoal.env.launcher import worker_env
from shoal.env.settings import debug, launch_dir
from shoal.errors import ending, flush_output, hook_errors, is_lost_peer, print_any_character
from shoal.json_text import parse_json

EXIT_DEADLINE_S = 5.0
"""Time after which a failed worker exits even if a library's clean-up hangs."""

_PARENT_CHECK_S = 1.0


@dataclass(frozen=True, kw_only=True)
class WorkerError:
    """Error report of a worker."""

    rank: int
    time_s: float
    message: str
    exit_code: int
    is_bug: bool
    """True for an unexpected error; the message names the file with the traceback."""
    lost_peer: bool
    """True if the error only reports that another worker is gone."""


def run_worker(main: Callable[[], int], *, run: Path | None = None) -> NoReturn:
    """Call ``main`` and exit with the code that it returns, or with that of its error.

    Any error is reported as one line (:func:`shoal.errors.ending`). If the launcher is killed, the worker
    sends itself SIGTERM, so that it saves and exits.

    Args:
        main: main function of a worker.
        run: the run directory, to whose ``logs`` tracebacks of unexpected errors are written.
    """
    folder = launch_dir()
    faulthandler.enable()
    if not debug():
        hook_errors()
    print_any_character()
    if folder is not None:
        _stop_without_launcher()
    try:
        exit_code = main()
        _leave_groups()
    except SystemExit:
        _leave_groups()
        raise
    except BaseException as error:  # noqa: BLE001  # every error is reported
        env = worker_env()
        rank, size = (env.ranks.rank, env.ranks.num_workers) if env else (0, 1)
        report = describe_error(error, rank=rank, run=run, is_alone=size == 1)
        if folder is not None:
            write_error(folder, report)
        if folder is None or report.rank != 0:  # the others' stderr is a file under our launcher
            prefix = f"worker {report.rank}: " if size > 1 else ""
            print(f"{prefix}{report.message}", file=sys.stderr, flush=True)
        if not debug():
            hook_errors(has_ended=True)
        _exit_soon(report.exit_code)
        exit_code = report.exit_code
    flush_output()
    sys.exit(exit_code)


def describe_error(
    error: BaseException, *, rank: int, run: Path | None = None, is_alone: bool = False
) -> WorkerError:
    """Return the report of an exception; the traceback of an unexpected one is written to a file."""
    end = ending(error, run=run, rank=rank, debug=debug(), is_alone=is_alone)
    return WorkerError(
        rank=rank,
        time_s=time.time(),
        message=end.text,
        exit_code=end.exit_code,
        is_bug=end.is_bug,
        lost_peer=not is_alone and is_lost_peer(error),
    )


def write_error(folder: Path, error: WorkerError) -> None:
    """Write a report to ``folder``, atomically."""
    path = folder / f"error-{error.rank}.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(error)), encoding="utf-8")
    temporary.rename(path)


def read_errors(folder: Path) -> dict[int, WorkerError]:
    """Return the reports in ``folder``, by rank."""
    errors = (WorkerError(**parse_json(path.read_bytes(), str(path))) for path in folder.glob("error-*.json"))
    return {error.rank: error for error in errors}


def _leave_groups() -> None:
    """Free the reference cycles of main, and destroy its process groups.

    Threads of a group or of a model's reducer that are alive during the interpreter's shutdown end the
    process by SIGABRT: seen in 2 of 10 runs on a busy machine, each after the run had saved.
    """
    gc.collect()
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def _exit_soon(exit_code: int) -> None:
    """Exit after :data:`EXIT_DEADLINE_S`, even if the interpreter still waits."""

    def exit_now() -> None:
        flush_output()
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
