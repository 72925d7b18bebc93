"""The files of a checkpoint, without any process group: written so that a kill leaves the old or the new one.

A checkpoint is the folder ``checkpoints/step-00000100`` of a run directory:

- ``worker-00000.safetensors``, … – what each worker wrote; the safetensors format, so any tool reads them;
- ``contents.json`` – where each tensor's chunks lie, and the plain values of the state;
- ``complete.json`` – sizes and CRC-32 of the others and of itself; without it nothing counts.

It is written as ``step-00000100.7.tmp`` by the run directory's owner of number 7. Where the step was saved
before, that one becomes ``step-00000100.old`` until the new one has its name, so at least one is whole at any
moment; what a kill leaves unnamed is found at the next start. ``step-00000100.gone`` is being deleted.

CRC-32 is for accidents, not for attacks; it runs at 3.9 GiB/s on one core where SHA-256 takes 1.7. There is
no pickle: ``torch.distributed.checkpoint`` stores its ``.metadata`` as one and unpickles what is not a tensor
without a restriction, and its safetensors storage holds no values and does not know the sizes of shards.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shoal.errors import ShoalError
from shoal.json_text import parse_json

FOLDER = "checkpoints"
CONTENTS = "contents.json"
COMPLETE = "complete.json"
_FORMAT = 1
_TEMPORARY, _REPLACED, _DELETED = ".tmp", ".old", ".gone"
_NAME = re.compile(r"step-(\d{8,})")
_UNNAMED = re.compile(r"step-(\d{8,})\.(?:(\d+)\.)?\w+")
_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True)
class WrittenFile:
    name: str
    num_bytes: int
    crc32: str


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A box of a tensor (``offsets``, ``sizes`` per dim) and where it is stored."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    key: str


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor of global shape ``size`` in its chunks."""

    dtype: str
    size: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, kw_only=True)
class Contents:
    tensors: dict[str, StoredTensor]
    values: dict[str, Any]


def checkpoint_path(run_dir: Path, step: int) -> Path:
    return run_dir / FOLDER / f"step-{step:08}"


def is_checkpoint(path: Path) -> bool:
    """Return whether ``path`` is a folder with a checkpoint's name, whole or not."""
    return path.is_dir() and _NAME.fullmatch(path.name) is not None


def step_of(path: Path) -> int:
    """Return the step of a checkpoint, or of one that has not got its name."""
    match = _NAME.fullmatch(path.name) or _UNNAMED.fullmatch(path.name)
    if match is None:
        raise ShoalError(f"{path} is not named like a checkpoint (step-00000100)")
    return int(match[1])


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Return the folders of the run's checkpoints, oldest first. Their files have not been looked at."""
    folder = run_dir / FOLDER
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if is_checkpoint(path)]
    return sorted(found, key=step_of)


def temporary_path(path: Path, owner: int) -> Path:
    """Return where the run directory's owner of this number writes a checkpoint before it takes its name.

    No two owners write to one folder, not even if one of them does not know yet that it is the owner no more.
    """
    return path.with_name(f"{path.name}.{owner}{_TEMPORARY}")


def list_unnamed(run_dir: Path) -> list[Path]:
    """Return what may be the only copy of a step because a kill came before it had its name again.

    The newest of each step is first. Their files have not been looked at, but for ``complete.json``.
    """
    found = [
        path
        for path in _leftovers(run_dir)
        if path.suffix in (_TEMPORARY, _REPLACED)
        and (path / COMPLETE).is_file()
        and not checkpoint_path(run_dir, step_of(path)).exists()
    ]
    return sorted(found, key=lambda path: (path.suffix == _TEMPORARY, _owner_of(path)), reverse=True)


def tidy(run_dir: Path, whole: Iterable[Path]) -> None:
    """Give the ``whole`` ones of :func:`list_unnamed` their names, and delete what else kills have left."""
    for path in whole:
        path.rename(checkpoint_path(run_dir, step_of(path)))
    for path in _leftovers(run_dir):
        shutil.rmtree(path, ignore_errors=True)


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint; a kill in between leaves no half checkpoint under its name."""
    doomed = path.with_name(path.name + _DELETED)
    with contextlib.suppress(FileNotFoundError):
        path.rename(doomed)
        remove_folder(doomed)


def remove_folder(path: Path) -> None:
    """Delete a folder as far as that is possible."""
    shutil.rmtree(path, ignore_errors=True)


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> WrittenFile:
    """Write ``pieces`` to the disk at ``path``, the checksum in the same pass.

    Raises:
        ShoalError: it cannot be written: a full disk, a limit, a lost mount.
    """
    checksum = num_bytes = 0
    try:
        with path.open("wb") as file:
            for piece in pieces:
                for begin in range(0, len(piece), _CHUNK_BYTES):
                    part = piece[begin : begin + _CHUNK_BYTES]
                    file.write(part)
                    checksum = zlib.crc32(part, checksum)
                    num_bytes += len(part)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ShoalError(f"cannot write {path}: {_advice(error, path)}") from error
    return WrittenFile(name=path.name, num_bytes=num_bytes, crc32=f"{checksum:08x}")


def write_contents(path: Path, contents: Contents) -> WrittenFile:
    return write_file(path / CONTENTS, [json.dumps(asdict(contents)).encode()])


def complete(path: Path, step: int, files: Iterable[WrittenFile]) -> int:
    """Write ``complete.json`` into ``path``, give the checkpoint its name and return its size in bytes.

    Raises:
        ShoalError: a worker's file is not there, or the folder cannot be written.
    """
    files = sorted(files, key=lambda file: file.name)
    for file in files:
        if not (path / file.name).is_file():
            raise ShoalError(
                f"{path / file.name} was written by another worker and is not there on the first worker's "
                "host: the run directory must be on a file system that all hosts share"
            )
    record = {"format": _FORMAT, "step": step, "files": [asdict(file) for file in files]}
    mark = write_file(path / COMPLETE, [json.dumps(record | {"crc32": _crc32_of(record)}, indent=1).encode()])
    final = path.with_name(f"step-{step:08}")
    replaced = path.with_name(final.name + _REPLACED)
    try:
        _sync_folder(path)
        if final.exists():
            remove_folder(replaced)
            final.rename(replaced)
        path.rename(final)
        _sync_folder(final.parent)
    except OSError as error:
        raise ShoalError(f"cannot complete the checkpoint {final}: {error.strerror}") from error
    remove_folder(replaced)
    return sum(file.num_bytes for file in files) + mark.num_bytes


def find_damage(path: Path, *, part: int = 0, num_parts: int = 1) -> str | None:
    """Return what is wrong with a checkpoint, or ``None``.

    ``complete.json`` is always checked; of the other files only each ``num_parts``-th from ``part`` on, so
    that the workers can share the reading.
    """
    try:
        record = parse_json((path / COMPLETE).read_bytes(), COMPLETE)
        stored = record.pop("crc32")
        files = [WrittenFile(**file) for file in record["files"]]
        if stored != _crc32_of(record):
            return f"{COMPLETE} has the checksum {_crc32_of(record)} instead of {stored}"
        if record["format"] != _FORMAT:
            return f"{COMPLETE} has the format {record['format']}, and this shoal reads {_FORMAT}"
        if record["step"] != step_of(path):
            return f"{COMPLETE} is of step {record['step']}"
    except FileNotFoundError:
        return f"{COMPLETE} is missing"
    except OSError as error:
        return f"{COMPLETE} cannot be read: {error.strerror}"
    except (ShoalError, ValueError, KeyError, TypeError, AttributeError):
        return f"{COMPLETE} is not what a checkpoint holds"
    return next((damage for file in files[part::num_parts] if (damage := _file_damage(path, file))), None)


def read_contents(path: Path) -> Contents:
    """Return the table of a checkpoint that :func:`find_damage` has found good.

    Raises:
        ShoalError: it cannot be read.
    """
    try:
        table = parse_json((path / CONTENTS).read_bytes(), str(path / CONTENTS))
        tensors = {
            name: StoredTensor(
                dtype=tensor["dtype"],
                size=tuple(tensor["size"]),
                chunks=tuple(
                    Chunk(
                        offsets=tuple(chunk["offsets"]),
                        sizes=tuple(chunk["sizes"]),
                        file=_name_in_folder(chunk["file"]),
                        key=chunk["key"],
                    )
                    for chunk in tensor["chunks"]
                ),
            )
            for name, tensor in table["tensors"].items()
        }
        return Contents(tensors=tensors, values=table["values"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ShoalError(f"{path / CONTENTS} cannot be read: {error!r}") from error


def _name_in_folder(name: str) -> str:
    """Return the name, which must not lead out of the checkpoint's folder."""
    if not name or Path(name).name != name:
        raise ValueError(f"{name!r} is not the name of a file in the checkpoint's folder")
    return name


def superseded(
    steps: Iterable[int], *, newest: int, keep: int, keep_every: int = 0, damaged: Iterable[int] = ()
) -> list[int]:
    """Return the steps whose checkpoints may go, now that the one of step ``newest`` is complete.

    Kept are the last ``keep`` up to ``newest``, every multiple of ``keep_every``, and all beyond ``newest``:
    they come from an attempt that this one has not overtaken yet. ``damaged`` ones never count as kept.
    """
    past = {step for step in steps if step <= newest}
    good = sorted(past - (set(damaged) - {newest}))
    kept = set(good[-keep:]) | {step for step in good if keep_every and step % keep_every == 0}
    return sorted(past - kept)


def _leftovers(run_dir: Path) -> list[Path]:
    folder = run_dir / FOLDER
    return [path for path in folder.iterdir() if _UNNAMED.fullmatch(path.name)] if folder.is_dir() else []


def _owner_of(path: Path) -> int:
    match = _UNNAMED.fullmatch(path.name)
    return int(match[2] or 0) if match else 0


def _advice(error: OSError, path: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(path.parent).free >> 20
        return (
            f"{error.strerror} ({free} MiB free there); free some space or keep fewer checkpoints, then "
            "start the same command again: the checkpoint before this one is untouched"
        )
    return f"{error.strerror}; the checkpoint before this one is untouched"


def _crc32_of(record: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(record, sort_keys=True).encode()):08x}"


def _file_damage(path: Path, expected: WrittenFile) -> str | None:
    checksum = 0
    try:
        with (path / expected.name).open("rb") as file:
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes != expected.num_bytes:
                return f"{expected.name} has {num_bytes} bytes instead of {expected.num_bytes}"
            while piece := file.read(_CHUNK_BYTES):
                checksum = zlib.crc32(piece, checksum)
    except FileNotFoundError:
        return f"{expected.name} is missing"
    except OSError as error:
        return f"{expected.name} cannot be read: {error.strerror}"
    if f"{checksum:08x}" != expected.crc32:
        return f"{expected.name} has the checksum {checksum:08x} instead of {expected.crc32}"
    return None


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
