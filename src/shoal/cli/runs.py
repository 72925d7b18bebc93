"""Defines ``shoal runs`` and ``shoal stop``: what became of submitted jobs."""

from __future__ import annotations

from pathlib import Path

from shoal.errors import EXIT_OK


def runs(folder: Path = Path("jobs")) -> int:
    """List the jobs that `shoal submit slurm` has submitted: state, starts, last saved step, last line.

    Parameters
    ----------
    folder
        The folder with a folder for each job.
    """
    from shoal.launch import slurm

    found = slurm.jobs(folder)
    if not found:
        print(f"{folder} has no submitted job")
        return EXIT_OK
    rows = [("name", "job", "state", "starts", "saved step", "last line")]
    rows += [(job.name, job.id, job.state, str(job.starts), job.step or "-", job.last_line) for job in found]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    return EXIT_OK


def stop(name: str, /, *, folder: Path = Path("jobs")) -> int:
    """Let a submitted job save and leave; it is not queued again. Submitting it again continues it.

    Parameters
    ----------
    name
        Name of the job, that of its folder.
    folder
        The folder with a folder for each job.
    """
    from shoal.launch import slurm

    print(slurm.stop(folder / name))
    return EXIT_OK
