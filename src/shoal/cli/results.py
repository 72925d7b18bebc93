"""``shoal export``, ``shoal report`` and ``shoal doctor``: what came out, and on what it ran."""

from __future__ import annotations

from pathlib import Path


def export(source: Path, *, out: Path | None = None) -> None:
    """Write a run's model as a directory that others load.

    A language model and its tokenizer for transformers; a network for images as safetensors under
    torchvision's names and a config.json.

    Parameters
    ----------
    source
        A run directory, whose newest checkpoint is taken, or one of its checkpoints.
    out
        What to write; default: transformers-STEP or model-STEP in the run directory.
    """
    from shoal.recipes.exporting import export_any

    print(export_any(source, out))


def report(*runs: Path, out: Path | None = None) -> None:
    """Write one HTML page about one run, or several side by side.

    Parameters
    ----------
    runs
        Run directories.
    out
        The page; default: report.html in the first run's directory.
    """
    from shoal.report.page import write_report

    print(write_report(runs, out))


def doctor() -> int:
    """Show versions, devices and the native core, what is missing and how to get it."""
    from shoal.doctor.examination import run_doctor

    return run_doctor()
