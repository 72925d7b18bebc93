"""Runs `prepare_text` as a process, and makes text for it."""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from forked import fork_process, wait_for
from forked_programs import fork_programs

# what a command line does with the errors of the package
DRIVER = """
import json, sys
from pathlib import Path
from shoal.data.text.prepare import PrepareConfig, prepare_text
from shoal.errors import ShoalError
if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    options |= {"out": Path(options["out"]), "sources": tuple(options["sources"])}
    try:
        prepare_text(PrepareConfig(**options))
    except ShoalError as error:
        print("error:", error, file=sys.stderr)
        sys.exit(error.exit_code)
"""
# the sample is bounded at 10 million characters; with less, small sources show the same
SMALL_SAMPLE = "import shoal.data.text.prepare\nshoal.data.text.prepare._SAMPLE_CHARACTERS = 200_000\n"
DEADLINE_S = 240
BASE = {"tokenizer": "wordpiece", "vocab_size": 300, "shard_bytes": 1 << 16, "processes": 2}
"""A WordPiece vocabulary is trained in less time than a unigram model."""


def command(source: Path | str, out: Path, driver: str = DRIVER, **options: Any) -> list[str]:
    values = {"sources": [str(source)], "out": str(out), **BASE, **options}
    return [sys.executable, "-c", driver, json.dumps(values)]


def prepare(
    source: Path | str, out: Path, *, most_bytes: int | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Prepare in a process; ``most_bytes`` is the size of a file beyond which its disk is full."""
    return run(command(source, out, **options), most_bytes=most_bytes)


def run(command: list[str], *, most_bytes: int | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``python -c PROGRAM ARGUMENTS`` in a process forked with what it needs loaded."""
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder, "said")
        (code,) = wait_for([fork_process(_run, command[2:], said, most_bytes)], DEADLINE_S)
        assert code is not None, said.read_text()
        return subprocess.CompletedProcess(command, code, "", said.read_text())


def _run(words: list[str], said: Path, most_bytes: int | None) -> None:
    os.dup2(os.open(said, os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    if most_bytes is None:
        fork_programs()
    else:  # its pools have the limit from this process
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))
    program, *sys.argv[1:] = words
    exec(program, {"__name__": "__main__"})


def contents(out: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(out.iterdir())}


def write_corpus(path: Path, num_bytes: int, seed: int = 0) -> Path:
    """One article a line, of 20 to 60 sentences of made-up words; now and then with accents."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(1, 8))) for _ in range(2000)] + ["été", "Über"]
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < num_bytes:
            sentences = (
                " ".join(rng.choices(words, k=rng.randint(5, 20))) for _ in range(rng.randint(20, 60))
            )
            file.write(" ".join(s.capitalize() + "." for s in sentences) + "\n")
    return path
