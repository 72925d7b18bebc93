"""Signs of workers that come and go for the launcher of their host, in the folder that they share."""

from __future__ import annotations

from pathlib import Path

_BEGUN = "begun"


def name_standstill(folder: Path, rank: int, pid: str) -> None:
    """Tell the launcher of ``folder`` that the others have given up a worker, which stands still."""
    (folder / f"standstill-{rank}-{pid}").touch()


def take_standstills(folder: Path) -> list[tuple[int, int]]:
    """Return rank and process of the workers that were named since the last call."""
    paths = list(folder.glob("standstill-*-*"))
    for path in paths:
        path.unlink()
    return [(int(rank), int(pid)) for _, rank, pid in (path.name.split("-") for path in paths)]


def name_begin(folder: Path) -> None:
    """Tell the launcher of ``folder`` that the workers have met: from now on the others go on without one."""
    (folder / _BEGUN).touch()


def have_begun(folder: Path) -> bool:
    """Return whether the workers have met."""
    return (folder / _BEGUN).exists()
