"""torchrun's agent, with our rules for the end of a job. Imports torch; ``local`` imports it when needed."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, Worker, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, SubprocessContext
from torch.distributed.elastic.rendezvous import RendezvousHandler

from shoal.errors import EXIT_OK, EXIT_STOPPED
from shoal.launch.ending import Deadlines
from shoal.launch.worker import read_errors

_POLL_S = 0.1


class WorkerLogs(LogsSpecs):  # type: ignore[misc,unused-ignore]
    """Where workers write: worker 0 to the terminal, so that its progress bar sees one, others to files."""

    def __init__(self, log_dir: Path, worker_env: dict[str, str], error_folder: Path) -> None:
        super().__init__(str(log_dir))
        self._folder = log_dir
        self._worker_env = worker_env
        self._error_folder = error_folder
        self.stderr_files: dict[int, Path] = {}

    @property
    def root_log_dir(self) -> str:
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Choose the files by rank, and add our variables to the workers' environments."""
        destination = LogsDest()
        for local_rank, env in envs.items():
            env.update(self._worker_env)
            rank = int(env["RANK"])
            destination.stdouts[local_rank] = destination.stderrs[local_rank] = ""
            destination.error_files[local_rank] = str(self._error_folder / f"elastic-{rank}.json")
            if rank != 0:
                self.stderr_files[rank] = self._folder / f"worker-{rank:05}.err"
                destination.stdouts[local_rank] = str(self._folder / f"worker-{rank:05}.out")
                destination.stderrs[local_rank] = str(self.stderr_files[rank])
        return destination


class WorkerAgent(LocalElasticAgent):  # type: ignore[misc,unused-ignore]
    """Starts this host's workers, passes signals on, and ends all when one has failed.

    It runs in a thread of its own: in the main thread torch would take the signals' handlers over.
    """

    def __init__(self, spec: WorkerSpec, logs: WorkerLogs, error_folder: Path, deadlines: Deadlines) -> None:
        super().__init__(spec=spec, logs_specs=logs)
        self._error_folder = error_folder
        self._deadlines = deadlines
        self._lock = threading.RLock()  # a second signal may interrupt the handler of the first
        self._cancelled = False
        self._thread = threading.Thread(target=self._run_to_end, name="agent", daemon=True)
        self._rank_of: dict[int, int] = {}
        self.stderr_files = logs.stderr_files
        self.failure: Exception | None = None
        """The error that ended the agent itself, such as a rendezvous to which other hosts did not come."""
        self.killed: set[int] = set()
        self.forwarded: list[signal.Signals] = []

    def start(self) -> None:
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Wait for the end of the job, and return whether it has come."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def exit_codes(self) -> dict[int, int]:
        """Exit codes of the workers that have ended, by rank; minus the number for a death by signal."""
        return {rank: code for rank, code in self._polled().items() if code is not None}

    def send(self, number: signal.Signals) -> bool:
        """Send a signal to all workers once; return whether there are any. None are started after a no."""
        with self._lock:
            if not self._rank_of:
                self._cancelled = True
                return False
            if number not in self.forwarded:
                self.forwarded.append(number)
                for rank in self._alive():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(self._pid(rank), number)
            return True

    def kill_workers(self) -> None:
        """End all workers, and what they have started, at once."""
        for rank in self._alive():
            self.killed.add(rank)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._pid(rank), signal.SIGKILL)  # each worker leads a process group

    def _run_to_end(self) -> None:
        try:
            self.run()
        except Exception as error:
            self.failure = error
        finally:
            with contextlib.suppress(Exception):
                self._rdzv_handler.shutdown()

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Count the ranks from the host's rank, since all hosts have as many workers.

        torch would read them from the store, where a stranger may write. What else its agent reads there is
        the count of the hosts that are done (``_exit_barrier``, an integer); it unpickles nothing. Seen in
        torch 2.15.
        """
        first, world_size = group_rank * spec.local_world_size, group_world_size * spec.local_world_size
        return [
            Worker(
                local_rank=local_rank,
                global_rank=first + local_rank,
                role_rank=first + local_rank,
                world_size=world_size,
                role_world_size=world_size,
            )
            for local_rank in range(spec.local_world_size)
        ]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with self._lock:  # a signal waits until it can reach them all
            if self._cancelled:
                raise RuntimeError("asked to stop before the workers were started")
            pids: dict[int, Any] = super()._start_workers(worker_group)
            self._rank_of = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        return pids

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if self._has_failed() or self._has_stopped():
            self._await_others()
        result: RunResult = super()._monitor_workers(worker_group)
        return result

    def _await_others(self) -> None:
        """Wait until all workers have ended, and kill those that take too long.

        torch would send SIGTERM, which our workers only take note of, and wait 30 s.
        """
        noticed = time.monotonic()
        failed_at: float | None = None
        while self._alive():
            now = time.monotonic()
            if failed_at is None and self._has_failed():
                failed_at = now
            if (failed_at is not None and now - failed_at > self._deadlines.after_failure_s) or (
                now - noticed > self._deadlines.after_stop_s
            ):
                self.kill_workers()
            time.sleep(_POLL_S)

    def _has_failed(self) -> bool:
        codes = self.exit_codes.values()
        return any(code not in (EXIT_OK, EXIT_STOPPED) for code in codes) or bool(
            read_errors(self._error_folder)
        )

    def _has_stopped(self) -> bool:
        return EXIT_STOPPED in self.exit_codes.values()

    def _alive(self) -> list[int]:
        return [rank for rank, code in self._polled().items() if code is None]

    def _polled(self) -> dict[int, int | None]:
        context = self._pcontext
        if not isinstance(context, SubprocessContext):
            return {}
        return {
            self._rank_of[local_rank]: handler.proc.poll()
            for local_rank, handler in context.subprocess_handlers.items()
            if local_rank in self._rank_of
        }

    def _pid(self, rank: int) -> int:
        local_rank = next(local for local, other in self._rank_of.items() if other == rank)
        assert isinstance(self._pcontext, SubprocessContext)
        return int(self._pcontext.subprocess_handlers[local_rank].proc.pid)


def make_agent(
    command: list[str],
    *,
    num_workers: int,
    rendezvous: RendezvousHandler,
    logs: WorkerLogs,
    error_folder: Path,
    deadlines: Deadlines,
) -> WorkerAgent:
    """Return the agent of this host, not started yet."""
    spec = WorkerSpec(
        role="worker",
        local_world_size=num_workers,
        rdzv_handler=rendezvous,
        entrypoint=command[0],
        args=tuple(command[1:]),
        max_restarts=0,
        monitor_interval=_POLL_S,
    )
    return WorkerAgent(spec, logs, error_folder, deadlines)
