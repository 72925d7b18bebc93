"""Lists and stops the jobs that were submitted from here, on all schedulers, and prints their output.

It reads the jobs' folders and calls the schedulers' commands; no process runs in between.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import ShoalError, UsageError
from shoal.json_text import parse_json
from shoal.launch import kubernetes, sagemaker, slurm
from shoal.launch.job_folder import JobFolder

SUBMITTED = "submitted.json"
_ENDED = "ENDED"
_TAIL_LINES = 100
_POLL_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A submitted job, as its folder describes it."""

    folder: Path
    backend: str
    id: str
    details: dict[str, Any]
    """Region, namespace, kind of manifest; ``run``: the run directory in the command."""


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """A submitted job with its state and progress."""

    name: str
    backend: str
    id: str
    state: str
    """The scheduler's state; ``ENDED``; or the reason why it is unknown."""
    starts: int
    step: str
    """Of the last checkpoint; empty: there is none, or the workers do not report it."""
    run: Path | None
    last_line: str


def note(folder: Path, backend: str, number: str, **details: str | None) -> None:
    """Record that a job of this folder was submitted."""
    folder.mkdir(parents=True, exist_ok=True)
    submission = {"backend": backend, "id": number, **{key: value for key, value in details.items() if value}}
    (folder / SUBMITTED).write_text(json.dumps(submission) + "\n", encoding="utf-8")


def read(folder: Path) -> Submission:
    """Return the stored submission of a folder.

    Raises:
        UsageError: no job was submitted from it.
        ShoalError: its file is damaged.
    """
    path = folder / SUBMITTED
    if not path.exists():
        raise UsageError(f"{folder} has no job that waits or runs")
    stored = parse_json(path.read_bytes(), str(path), remedy=f"remove {path}")
    details = stored if isinstance(stored, dict) else {}
    details = {key: value for key, value in details.items() if isinstance(value, str)}
    backend = details.get("backend", "slurm")
    if not re.fullmatch(r"\d{1,12}" if backend == "slurm" else r"[\w.-]{1,100}", details.get("id", "")):
        raise ShoalError(f"{path} has no job id; remove it")
    return Submission(folder=folder, backend=backend, id=details["id"], details=details)


def earlier_id(folder: Path) -> str | None:
    """Return the id of the job that was submitted from this folder, or ``None`` if none was.

    Raises:
        ShoalError: its file is damaged.
    """
    return read(folder).id if (folder / SUBMITTED).exists() else None


def jobs(folders: Iterable[Path]) -> list[Submitted]:
    """Return the jobs that were submitted from these folders, in their order.

    Raises:
        ShoalError: a folder's files are damaged.
    """
    submitted = []
    for folder in folders:
        job, job_folder = read(folder), JobFolder(folder, "")
        outputs = sorted(folder.glob("output*.log"), key=lambda file: file.stat().st_mtime)
        submitted.append(
            Submitted(
                name=folder.name,
                backend=job.backend,
                id=job.id,
                state=_state_or_reason(job),
                starts=len(job_folder.starts()),
                step=job_folder.progress(),
                run=Path(job.details["run"]) if "run" in job.details else None,
                last_line=_last_line(outputs[-1]) if outputs else "",
            )
        )
    return submitted


def _state_or_reason(job: Submission) -> str:
    """Return the state, or a scheduler's error, which must not hide the jobs of the others."""
    try:
        return state_of(job) or _ENDED
    except ShoalError as problem:
        return f"? ({str(problem).partition(chr(10))[0][:60]})"


def state_of(job: Submission) -> str:
    """Return the scheduler's state of a job; empty if it has forgotten the job."""
    if job.backend == "kubernetes":
        return kubernetes.state_of(job.details.get("api", "jobset"), job.id, job.details.get("namespace"))
    if job.backend == "sagemaker":
        return sagemaker.state_of(job.id, job.details.get("region"))
    return slurm.state_of(job.id)


def stop(folder: Path) -> str:
    """Stop the job of a folder after it has saved; it is not requeued. Return a message.

    Raises:
        UsageError: no job was submitted from this folder, or it has ended.
        ShoalError: the scheduler refuses.
    """
    job = read(folder)
    if job.backend == "kubernetes":
        kubernetes.delete(folder / kubernetes.MANIFEST, job.id, job.details.get("namespace"))
        return f"the pods of {job.id} save and leave; submitting it again continues it"
    if job.backend == "sagemaker":
        sagemaker.stop(job.id, job.details.get("region"))
        return f"training job {job.id} has two minutes to save"
    return slurm.stop(folder, job.id)


def logs(folder: Path, *, follow: bool) -> int:
    """Print the output of a folder's job, with ``follow`` until it ends or Ctrl-C, and return the exit code.

    Raises:
        UsageError: no job was submitted from this folder, or it has written nothing.
        ShoalError: the scheduler refuses.
    """
    job = read(folder)
    if job.backend == "sagemaker":
        return _cloud_logs(job, follow=follow)
    if job.backend == "kubernetes":
        command = kubernetes.logs_command(
            job.details.get("api", "jobset"), job.id, job.details.get("namespace")
        )
        command += [f"--tail={_TAIL_LINES}", *(["--follow"] if follow else [])]
    else:
        outputs = sorted(folder.glob("output*.log"))
        if not outputs:
            raise UsageError(f"{folder} has no output yet: the job is {state_of(job) or _ENDED}")
        command = [
            "tail",
            f"--lines={_TAIL_LINES}",
            *(["--follow=name"] if follow else []),
            *map(str, outputs),
        ]
    try:
        return subprocess.run(command).returncode
    except FileNotFoundError:
        raise ShoalError(f"{command[0]} was not found: install it") from None


def _cloud_logs(job: Submission, *, follow: bool) -> int:
    region, since = job.details.get("region"), 0
    while True:
        is_running = follow and state_of(job).startswith("InProgress")
        for line, when in sagemaker.log_lines(job.id, region, since=since):
            print(line)
            since = max(since, when + 1)
        sys.stdout.flush()
        if not is_running and not since:
            raise UsageError(f"{job.id} has no output yet: the job is {state_of(job) or _ENDED}")
        if not is_running:
            return 0
        time.sleep(_POLL_S)


def _last_line(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(path.stat().st_size - 4096, 0))
        lines = file.read().decode(errors="replace").splitlines()
    text = next((line for line in reversed(lines) if line.strip()), "")
    return "".join(c for c in text if c.isprintable())[:100]
