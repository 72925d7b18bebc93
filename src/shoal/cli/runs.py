"""Defines ``shoal runs``, ``shoal logs`` and ``shoal stop``, which show and stop submitted jobs."""

from __future__ import annotations

from pathlib import Path

from shoal.errors import EXIT_OK, ShoalError


def runs(folder: Path = Path("jobs")) -> int:
    """List the jobs that `shoal submit` has submitted, on all back-ends.

    Shows the scheduler's state, starts, last saved step, last line of output and, if the run's directory can
    be read here, steps per second and remaining time.

    Parameters
    ----------
    folder
        The folder with a folder for each job.
    """
    from shoal.launch import submissions

    jobs = submissions.jobs(folder)
    if not jobs:
        print(f"{folder} has no submitted job")
        return EXIT_OK
    rows = [("name", "on", "job", "state", "starts", "saved step", "steps/s", "left", "last line")]
    rows += [
        (
            job.name,
            job.backend,
            job.id,
            job.state,
            str(job.starts),
            job.step or "-",
            *pace(job.run),
            job.last_line,
        )
        for job in jobs
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    return EXIT_OK


def pace(run: Path | None) -> tuple[str, str]:
    """Return steps per second and remaining time of a run, as texts; ``-`` if they are unknown."""
    from shoal.formatting import duration
    from shoal.record import Start, Step, read_record

    try:
        rows = read_record(run) if run is not None else []
    except ShoalError:
        rows = []
    start = next((row for row in reversed(rows) if isinstance(row, Start)), None)
    step = next((row for row in reversed(rows) if isinstance(row, Step)), None)
    if start is None or step is None or step.step_s <= 0:
        return "-", "-"
    return f"{1 / step.step_s:.3g}", duration((start.total_steps - step.step) * step.step_s)


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
