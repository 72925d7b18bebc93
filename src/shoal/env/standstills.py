"""Names workers that stand still to the launcher of their host, in the folder that they share."""

from __future__ import annotations

from pathlib import Path


def name_standstill(folder: Path, rank: int, pid: str) -> None:
    """Tell the launcher of ``folder`` that the others have given up a worker, which stands still."""
    (folder / f"standstill-{rank}-{pid}").touch()


def take_standstills(folder: Path) -> list[tuple[int, int]]:
    """Return rank and process of the workers that were named since the last call."""
    paths = list(folder.glob("standstill-*-*"))
    for path in paths:
        path.unlink()
    return [(int(rank), int(pid)) for _, rank, pid in (path.name.split("-") for path in paths)]
