"""The whole examination, and what is printed of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shoal.doctor import machine, software, training
from shoal.doctor.check import Check
from shoal.errors import EXIT_FAILURE, EXIT_OK

_MARKS = {"ok": "ok", "note": "--", "missing": "!!"}


def run_doctor() -> int:
    """Print the examination and return 0 when training can run here, else 1."""
    topics = examine()
    for topic, checks in topics.items():
        print(f"\n{topic}")
        for check in checks:
            print(f"  {_MARKS[check.state]}  {check.name:<14}{check.found}")
            if check.remedy:
                print(f"      {'':<14}> {check.remedy}")
    missing = [check.name for checks in topics.values() for check in checks if check.state == "missing"]
    if missing:
        print(f"\nTraining cannot run here until these are put right: {', '.join(missing)}")
        return EXIT_FAILURE
    print("\nTraining can run here.")
    return EXIT_OK


def examine() -> Mapping[str, list[Check]]:
    """Return everything that was looked at, by topic; it prints nothing and raises nothing."""
    torch, torch_error = software.import_torch()
    return {
        "Software": software.checks(torch, torch_error),
        "Machine": machine.checks(torch),
        "Training": training.checks(torch, Path.cwd()),
    }
