"""Defines ``shoal runs``, ``shoal logs`` and ``shoal stop``, which show runs and jobs, and stop jobs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shoal.errors import EXIT_OK, ShoalError
from shoal.json_text import json_document
from shoal.record import FILE_NAME

if TYPE_CHECKING:
    from shoal.launch.submissions import Submitted

_DEPTH = 5
"""Folders below the current one in which runs and jobs are looked for."""
_NO_RUNS_IN = {"checkpoints", "logs", "node_modules", "site-packages"}


def runs(folder: Path = Path(), *, json: bool = False) -> int:
    """List the runs below a folder, and the jobs that `shoal submit` has submitted from there.

    Shows of a run its state, steps and last score. Shows of a job the scheduler's state, starts, last saved
    step, last line of output and, if the run's directory can be read here, steps per second and remaining
    time.

    Parameters
    ----------
    folder
        Where to look: runs and jobs in this folder and five levels below; default: the current folder.
    json
        Print them as JSON: `jobs` and `runs`, these with the keys of `shoal report --json`.
    """
    from shoal.launch import submissions

    folders = list(_folders(folder))
    jobs = submissions.jobs([path for path in folders if (path / submissions.SUBMITTED).is_file()])
    summaries = [_summary(path) for path in folders if (path / FILE_NAME).is_file()]
    if json:
        print(json_document({"jobs": [_job_as_json(job) for job in jobs], "runs": summaries}))
        return EXIT_OK
    tables = [_table(_job_rows(jobs))] if jobs else []
    tables += [_table(_run_rows(summaries))] if summaries else []
    print("\n\n".join(tables) or f"{folder.absolute()} has no run and no submitted job")
    return EXIT_OK


def _folders(top: Path) -> Iterator[Path]:
    """Yield a folder and those below that may have a run or a job, in the order of their names."""
    for path, names, _ in os.walk(top):
        yield Path(path)
        depth = len(Path(path).relative_to(top).parts)
        kept = [name for name in names if name[0] not in "._" and name not in _NO_RUNS_IN]
        names[:] = sorted(kept) if depth < _DEPTH else []


def _summary(path: Path) -> dict[str, Any]:
    """Return what is known of a run; of one whose record cannot be read, the reason."""
    from shoal.report.runs import load_runs
    from shoal.report.summary import summary

    try:
        return summary(load_runs([path])[0])
    except ShoalError as problem:
        return {"name": path.name, "path": str(path), "state": "unreadable", "problem": str(problem)}


def _run_rows(summaries: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("run", "recipe", "state", "step", "last score")]
    for run in summaries:
        if "problem" in run:
            rows.append((run["path"], "-", "?", "-", run["problem"]))
            continue
        state = {"open": "running or killed"}.get(run["state"], run["state"])
        score = run["scores"][-1] if run["scores"] else None
        last = f"{score['split']} {score['metric']} {score['value']:.4g}" if score else "-"
        rows.append((run["path"], run["recipe"], state, f"{run['step']:,}/{run['total_steps']:,}", last))
    return rows


def _job_rows(jobs: Sequence[Submitted]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        ("name", "on", "job", "state", "starts", "saved step", "steps/s", "left", "last line")
    ]
    for job in jobs:
        saved, starts = job.step or "-", str(job.starts)
        rows.append((job.name, job.backend, job.id, job.state, starts, saved, *pace(job.run), job.last_line))
    return rows


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _job_as_json(job: Submitted) -> dict[str, Any]:
    step_s, left_s = _pace_s(job.run)
    return {
        "name": job.name,
        "on": job.backend,
        "job": job.id,
        "state": job.state,
        "starts": job.starts,
        "checkpoint_step": int(job.step) if job.step.isdecimal() else None,
        "run": str(job.run) if job.run else None,
        "step_s": step_s,
        "left_s": left_s,
        "last_line": job.last_line,
    }


def pace(run: Path | None) -> tuple[str, str]:
    """Return steps per second and remaining time of a run, as texts; ``-`` if they are unknown."""
    from shoal.formatting import duration

    step_s, left_s = _pace_s(run)
    return ("-", "-") if step_s is None or left_s is None else (f"{1 / step_s:.3g}", duration(left_s))


def _pace_s(run: Path | None) -> tuple[float | None, float | None]:
    """Return the seconds of a step and those that remain."""
    from shoal.record import Start, Step, read_record

    try:
        rows = read_record(run) if run is not None else []
    except ShoalError:
        rows = []
    start = next((row for row in reversed(rows) if isinstance(row, Start)), None)
    step = next((row for row in reversed(rows) if isinstance(row, Step)), None)
    if start is None or step is None or step.step_s <= 0:
        return None, None
    return step.step_s, (start.total_steps - step.step) * step.step_s


def logs(name: str, /, *, follow: bool = False, folder: Path = Path("jobs")) -> int:
    """Print the output of a submitted job: the last 100 lines, on SageMaker all of it.

    Parameters
    ----------
    name
        Name of the job, that of its folder.
    follow
        Print new output until Ctrl-C.
    folder
        The folder with a folder for each job.
    """
    from shoal.launch import submissions

    return submissions.logs(folder / name, follow=follow)


def stop(name: str, /, *, folder: Path = Path("jobs")) -> int:
    """Stop a submitted job after it has saved; it is not requeued. Submitting it again continues it.

    Parameters
    ----------
    name
        Name of the job, that of its folder.
    folder
        The folder with a folder for each job.
    """
    from shoal.launch import submissions

    print(submissions.stop(folder / name))
    return EXIT_OK
