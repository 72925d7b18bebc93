"""Unpacks compressed sources beside the shards, so that processes can begin at any place in them.

A compressed stream can only be read from its beginning, and so can a JSON array. Each file is unpacked once,
by one process, to ``records/unpacked``, and the rows of a data set (``hub``) and the entries of an array are
written there as JSON lines. The directory is
removed with the other records when the preparation is complete. A file that is there is whole, so an
interrupted preparation continues with the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.atomic_io import AtomicFile
from shoal.data.process_pool import advance, run_unfinished
from shoal.data.progress import PreparationProgress
from shoal.data.text.corpus import Errors, SourceFile, content_bytes
from shoal.data.text.hub import PREFIX, json_lines
from shoal.data.text.packed import unpacked_blocks
from shoal.data.text.rows import array_lines
from shoal.errors import UsageError, cannot_read

UNPACKED = "unpacked"
"""Folder of the unpacked files, among the records."""


@dataclass(frozen=True)
class _Task:
    file: SourceFile
    target: Path
    errors: Errors


def unpack_files(
    files: Sequence[SourceFile],
    records: Path,
    shown: PreparationProgress,
    *,
    processes: int,
    errors: Errors = "strict",
) -> list[SourceFile]:
    """Unpack the compressed ones of ``files``, and arrays; return all in their order, as files to cut.

    Args:
        files: those of the source.
        records: directory of the preparation's records.
        shown: gets the progress.
        processes: at most so many.
        errors: what bytes of an array that are not UTF-8 are: an error, or U+FFFD.

    Raises:
        UsageError: a file is damaged, or not compressed as its name says; an array is not JSON, or all are
            empty; a data set cannot be loaded.
        ShoalError: the disk is full, a worker process was killed.
    """
    tasks = [
        _Task(file, records / UNPACKED / f"{number:05d}", errors)
        for number, file in enumerate(files)
        if file.packing or file.is_array
    ]
    if not tasks:
        return list(files)
    (records / UNPACKED).mkdir(parents=True, exist_ok=True)
    run_unfinished(
        _unpack,
        tasks,
        lambda task: task.target if task.target.is_file() else None,
        shown,
        outputs="unpacked files",
        num_bytes=lambda task: task.file.num_bytes,
        processes=processes,
    )
    targets = {task.file: task.target for task in tasks}
    unpacked = [_unpacked(file, targets[file]) if file in targets else file for file in files]
    if not any(file.num_bytes for file in unpacked):
        raise UsageError(f"{files[0].name}: is empty, as all of the source; there is no article in it")
    return unpacked


def _unpack(task: _Task) -> Path:
    file = task.file
    try:
        with AtomicFile(task.target) as out:
            for block in _blocks(task):
                out.write(block)
                advance(0)  # ends early if the parent shuts down
            out.close()
            out.publish()
    except OSError as error:
        raise UsageError(cannot_read(file.path, error)) from None
    return task.target


def _blocks(task: _Task) -> Iterator[bytes]:
    """Yield the content of a file, that of an array as lines."""
    file = task.file
    if file.packing == PREFIX:
        return json_lines(file.name)
    blocks = unpacked_blocks(file.path, file.packing, advance)
    return array_lines(blocks, file.name, task.errors) if file.is_array else blocks


def _unpacked(file: SourceFile, target: Path) -> SourceFile:
    plain = replace(file, path=target, packing="", source=file.name)
    return replace(plain, num_bytes=content_bytes(plain))
