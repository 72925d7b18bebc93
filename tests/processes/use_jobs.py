"""``shoal predict`` and ``shoal evaluate`` as torchrun starts them: workers forked with torch loaded."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

from forked import command, fork_process, free_port, shoal, wait_for
from shoal.errors import EXIT_OK, EXIT_USAGE


def lines(folder: Path, *arguments: object, workers: int = 1) -> list[dict[str, Any]]:
    """Run a command on workers in ``folder`` and return the JSON objects that it prints, one a line."""
    return [json.loads(line) for line in said(folder, *arguments, workers=workers).splitlines()]


def said(folder: Path, *arguments: object, workers: int = 1) -> str:
    """Run a command on workers in ``folder`` and return what it prints; their errors stay there."""
    port, words = free_port(), tuple(map(str, arguments))
    files = [[folder / f"{rank}.out", folder / f"{rank}.err"] for rank in range(workers)]
    for file in (file for both in files for file in both):
        file.unlink(missing_ok=True)
    processes = [fork_process(_work, rank, workers, port, words, own) for rank, own in enumerate(files)]
    assert wait_for(processes) == [EXIT_OK] * workers, [err.read_text() for _, err in files]
    assert all(not out.read_text() for out, _ in files[1:])
    return files[0][0].read_text()


def commands_of_page(name: str) -> list[list[str]]:
    """Return the commands ``shoal predict …`` and ``shoal evaluate …`` of a page, without the name shoal."""
    page = Path(__file__).parents[2] / "docs" / name
    found = re.findall(r"^    shoal ((?:predict|evaluate) .*)$", page.read_text("utf-8"), re.MULTILINE)
    return [shlex.split(line) for line in found]


def refused(*arguments: object) -> str:
    """Return the message with which a command refuses its input before workers start."""
    result = shoal(*map(str, arguments))
    assert result.returncode == EXIT_USAGE, result.stdout + result.stderr
    return " ".join(result.stderr.replace("│", " ").split())


def _work(rank: int, workers: int, port: int, arguments: tuple[str, ...], files: list[Path]) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(workers),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    command(arguments, files, files[0].parent)
