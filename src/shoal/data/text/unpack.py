"""Unpacks compressed sources beside the shards, so that processes can begin at any place in them.

A compressed stream can only be read from its beginning. Each file is unpacked once, by one process, to
``records/unpacked``, and the rows of a data set (``hub``) are written there as JSON lines. The directory is
removed with the other records when the preparation is complete. A file that is there is whole, so an
interrupted preparation continues with the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.atomic_io import AtomicFile
from shoal.data.process_pool import advance, run_unfinished
from shoal.data.progress import Progress
from shoal.data.text.corpus import SourceFile, content_bytes
from shoal.data.text.hub import PREFIX, json_lines
from shoal.data.text.packed import unpacked_blocks
from shoal.errors import UsageError

UNPACKED = "unpacked"
"""Folder of the unpacked files, among the records."""


@dataclass(frozen=True)
class _Task:
    file: SourceFile
    target: Path


def unpack_files(
    files: Sequence[SourceFile], records: Path, shown: Progress, *, processes: int
) -> list[SourceFile]:
    """Unpack the compressed ones of ``files``; return all in their order, as files that are not compressed.

    Raises:
        UsageError: a file is damaged, or not compressed as its name says; a data set cannot be loaded.
        ShoalError: the disk is full, a worker process was killed.
    """
    tasks = [
        _Task(file, records / UNPACKED / f"{number:05d}") for number, file in enumerate(files) if file.packing
    ]
    if not tasks:
        return list(files)
    (records / UNPACKED).mkdir(parents=True, exist_ok=True)
    run_unfinished(
        _unpack,
        tasks,
        lambda task: task.target if task.target.is_file() else None,
        shown,
        what="unpacked files",
        num_bytes=lambda task: task.file.num_bytes,
        processes=processes,
    )
    targets = {task.file: task.target for task in tasks}
    return [_unpacked(file, targets[file]) if file.packing else file for file in files]


def _unpack(task: _Task) -> Path:
    file = task.file
    if file.packing == PREFIX:
        blocks = json_lines(file.name)
    else:
        blocks = unpacked_blocks(file.path, file.packing, advance)
    try:
        with AtomicFile(task.target) as out:
            for block in blocks:
                out.write(block)
                advance(0)  # ends early if the parent shuts down
            out.close()
            out.publish()
    except OSError as error:
        raise UsageError(f"{file.path}: cannot be read: {error.strerror or error}") from None
    return task.target


def _unpacked(file: SourceFile, target: Path) -> SourceFile:
    plain = replace(file, path=target, packing="", source=file.name)
    return replace(plain, num_bytes=content_bytes(plain))
