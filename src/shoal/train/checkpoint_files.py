"""Reads and writes the files of a checkpoint, without process groups.

A checkpoint is the folder ``checkpoints/step-00000100`` of a run directory:

- ``worker-00000.safetensors``, …: the tensors that each worker wrote, in the safetensors format;
- ``contents.json``: the file and offsets of each tensor's chunks, and the plain values of the state;
- ``complete.json``: format number, and sizes and CRC-32 of the other files and of itself, written last.

The owner of number 7 of the run directory writes it as ``step-00000100.7.tmp``. If the step was saved before,
the older folder is renamed to ``step-00000100.old`` until the new one has its name, so that one of the two is
complete at any moment. The next start finds a complete one that a killed process left unnamed.
``step-00000100.gone`` is being deleted.

CRC-32 detects accidents, not attacks; it runs at 3.9 GiB/s on one core, SHA-256 at 1.7. Nothing is pickled:
``torch.distributed.checkpoint`` pickles its ``.metadata`` and unpickles non-tensors without restriction, and
its safetensors storage holds no plain values and no sizes of shards.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from shoal.atomic_io import sync_folder, write_atomically
from shoal.errors import ShoalError
from shoal.json_text import parse_json

FOLDER = "checkpoints"
CONTENTS = "contents.json"
COMPLETE = "complete.json"
BEST = "best-step"
"""File of the folder with the step of the run's best checkpoint."""
FORMAT = 2
"""Number of the format, the names and meaning of the values that a run saves included."""
_TEMPORARY, _REPLACED, _DELETED = ".tmp", ".old", ".gone"
_NAME = re.compile(r"step-(\d{8,})")
_UNNAMED = re.compile(r"step-(\d{8,})\.(?:(\d+)\.)?\w+")
_CHUNK_BYTES = 8 << 20
DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Element types of safetensors 0.5 and newer."""
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True, kw_only=True)
class WrittenFile:
    """A file with its size and checksum."""

    name: str
    num_bytes: int
    crc32: str

    def __post_init__(self) -> None:
        _check_name(self.name)


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A box of a tensor (``offsets`` and ``sizes`` per dimension), and the file and key that hold it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    key: str

    def __post_init__(self) -> None:
        _check_name(self.file)


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor of global shape ``size``; ``dtype`` is the name of its element type in safetensors."""

    dtype: str
    size: tuple[int, ...]
    chunks: tuple[Chunk, ...]


def _check_name(name: str) -> None:
    if not name or name == ".." or Path(name).name != name:
        raise ValueError(f"{name!r} is not the name of a file in the checkpoint's folder")


def checkpoint_path(run_dir: Path, step: int) -> Path:
    """Return the folder of the checkpoint of ``step``."""
    return run_dir / FOLDER / f"step-{step:08}"


def is_checkpoint(path: Path) -> bool:
    """Return whether ``path`` is a folder with the name of a checkpoint, complete or not."""
    return path.is_dir() and _NAME.fullmatch(path.name) is not None


def is_named(path: Path) -> bool:
    """Return whether a folder has the name of a checkpoint, temporary or final; exports have others."""
    return (_NAME.fullmatch(path.name) or _UNNAMED.fullmatch(path.name)) is not None


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint's folder, temporary or final.

    Raises:
        ShoalError: it has another name.
    """
    match = _NAME.fullmatch(path.name) or _UNNAMED.fullmatch(path.name)
    if match is None:
        raise ShoalError(f"{path} is not named like a checkpoint (step-00000100)")
    return int(match[1])


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Return the checkpoints of the run, the oldest first. Their files are not checked."""
    return sorted(filter(is_checkpoint, (run_dir / FOLDER).glob("*")), key=step_of)


def newest_or_best(path: Path) -> Path | None:
    """Return the checkpoint that a path names: itself, or the best one that a run keeps, or its newest.

    Args:
        path: a checkpoint or a run directory.

    Returns:
        ``None``: the path is no checkpoint, and no run that has one.
    """
    if is_checkpoint(path):
        return path
    best = best_step(path)
    if best is not None and is_checkpoint(checkpoint_path(path, best)):  # it may never have been completed
        return checkpoint_path(path, best)
    return next(reversed(list_checkpoints(path)), None)


def best_step(run_dir: Path) -> int | None:
    """Return the step of the run's best checkpoint, if it keeps one.

    Raises:
        ShoalError: the file that names it is malformed.
    """
    path = run_dir / FOLDER / BEST
    if not path.is_file():
        return None
    text = path.read_text(encoding="utf-8").strip()
    if not (text.isascii() and text.isdigit()):
        raise ShoalError(f"{path} has {text[:80]!r} instead of a step: delete it, and the newest one counts")
    return int(text)


def write_best_step(run_dir: Path, step: int | None) -> None:
    """Name the run's best checkpoint; ``None``: it keeps none.

    Raises:
        ShoalError: the file cannot be written.
    """
    path = run_dir / FOLDER / BEST
    if step is not None:
        write_atomically(path, f"{step}\n".encode())
    elif path.exists():
        path.unlink()


def temporary_path(path: Path, owner: int) -> Path:
    """Return the folder in which the run directory's owner of this number writes a checkpoint.

    Two owners never write to one folder, even if one of them has not noticed yet that it lost the directory.
    """
    return path.with_name(f"{path.name}.{owner}{_TEMPORARY}")


def fetched_path(path: Path) -> Path:
    """Return the folder in which a checkpoint is that comes from an object store, until it is complete."""
    return path.with_name(f"{path.name}.fetched")


def list_unnamed(run_dir: Path) -> list[Path]:
    """Return folders that may hold the only copy of a step because a process was killed before the rename.

    The newest of each step comes first. Each has ``complete.json``; the files are not checked.
    """
    folders = [
        path
        for path in _leftovers(run_dir)
        if path.suffix in (_TEMPORARY, _REPLACED)
        and (path / COMPLETE).is_file()
        and not checkpoint_path(run_dir, step_of(path)).exists()
    ]
    return sorted(folders, key=lambda path: (path.suffix == _TEMPORARY, _owner_of(path)), reverse=True)


def tidy(run_dir: Path, whole: Iterable[Path]) -> None:
    """Rename the complete folders ``whole`` of :func:`list_unnamed`, and delete all other leftovers."""
    for path in whole:
        path.rename(checkpoint_path(run_dir, step_of(path)))
    for path in _leftovers(run_dir):
        remove_folder(path)


def remove_checkpoint(path: Path) -> None:
    """Delete a checkpoint; a process killed meanwhile leaves no partial checkpoint under its name."""
    doomed = path.with_name(path.name + _DELETED)
    with contextlib.suppress(FileNotFoundError):
        path.rename(doomed)
        remove_folder(doomed)


def remove_folder(path: Path) -> None:
    """Delete a folder; errors are ignored."""
    shutil.rmtree(path, ignore_errors=True)


def describe_file(path: Path) -> WrittenFile:
    """Return the size and checksum of a file."""
    checksum = num_bytes = 0
    with path.open("rb") as file:
        while piece := file.read(_CHUNK_BYTES):
            checksum, num_bytes = zlib.crc32(piece, checksum), num_bytes + len(piece)
    return WrittenFile(name=path.name, num_bytes=num_bytes, crc32=f"{checksum:08x}")


def write_file(path: Path, pieces: Iterable[bytes | memoryview]) -> WrittenFile:
    """Write ``pieces`` to ``path``, computing the checksum in the same pass, and flush it to disk.

    Raises:
        ShoalError: the file cannot be written: full disk, quota, lost mount.
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


def write_contents(path: Path, tensors: Mapping[str, StoredTensor], values: Mapping[str, Any]) -> WrittenFile:
    """Write ``contents.json`` into the folder ``path``.

    Raises:
        ShoalError: the file cannot be written.
    """
    table = {"tensors": {name: asdict(tensor) for name, tensor in tensors.items()}, "values": values}
    return write_file(path / CONTENTS, [json.dumps(table).encode()])


def complete(path: Path, step: int, files: Iterable[WrittenFile]) -> int:
    """Write ``complete.json`` into ``path``, rename the folder and return its size in bytes.

    Raises:
        ShoalError: a file of another worker is missing, or the folder cannot be written.
    """
    files = sorted(files, key=lambda file: file.name)
    for file in files:
        if not (path / file.name).is_file():
            raise ShoalError(
                f"{path / file.name} was written by another worker and is not there on the first worker's "
                "host: the run directory must be on a file system that all hosts share, or its checkpoints "
                "in an object store (--run.upload-to s3://BUCKET/PREFIX)"
            )
    mark = write_file(path / COMPLETE, [mark_of(step, files)])
    final = path.with_name(f"step-{step:08}")
    replaced = path.with_name(final.name + _REPLACED)
    try:
        sync_folder(path)
        if final.exists():
            remove_folder(replaced)
            final.rename(replaced)
        path.rename(final)
        sync_folder(final.parent)
    except OSError as error:
        raise ShoalError(f"cannot complete the checkpoint {final}: {error.strerror}") from error
    remove_folder(replaced)
    return sum(file.num_bytes for file in files) + mark.num_bytes


def mark_of(step: int, files: Iterable[WrittenFile]) -> bytes:
    """Return the content of ``complete.json``."""
    listed = [asdict(file) for file in sorted(files, key=lambda file: file.name)]
    record = {"format": FORMAT, "step": step, "files": listed}
    return json.dumps(record | {"crc32": _crc32_of(record)}, indent=1).encode()


def find_damage(path: Path, *, part: int = 0, num_parts: int = 1) -> str | None:
    """Return a description of the damage of a checkpoint, or ``None``.

    ``complete.json`` is always checked. Of the other files only every ``num_parts``-th from ``part`` on is
    read, so that workers can share the work.

    Raises:
        ShoalError: the checkpoint is of another format, so it is not damaged and must not be skipped.
    """
    files, damage = listed_files(path)
    found = (_file_damage(path, file) for file in files[part::num_parts])
    return damage or next((problem for problem in found if problem), None)


def listed_files(path: Path) -> tuple[list[WrittenFile], str | None]:
    """Return the files that ``complete.json`` in a folder lists, of a checkpoint or an export; its damage.

    Raises:
        ShoalError: the checkpoint is of another format, so it is not damaged and must not be skipped.
    """
    try:
        record = parse_json((path / COMPLETE).read_bytes(), COMPLETE)
        stored = record.pop("crc32")
        files = [WrittenFile(**file) for file in record["files"]]
        if stored != _crc32_of(record):
            return [], f"{COMPLETE} has the checksum {_crc32_of(record)} instead of {stored}"
        if is_named(path) and record["step"] != step_of(path):
            return [], f"{COMPLETE} is of step {record['step']}"
        version = int(record["format"])
    except FileNotFoundError:
        return [], f"{COMPLETE} is missing"
    except OSError as error:
        return [], f"{COMPLETE} cannot be read: {error.strerror}"
    except (ShoalError, ValueError, KeyError, TypeError, AttributeError):
        return [], f"{COMPLETE} is malformed"
    if version != FORMAT:
        raise ShoalError(
            f"the checkpoint {path} has format {version}, of {'an older' if version < FORMAT else 'a newer'} "
            f"shoal, and this one reads {FORMAT}: continue the run with that version, or start it again with "
            "another --run.dir"
        )
    return files, None


def read_contents(path: Path) -> tuple[dict[str, StoredTensor], dict[str, Any]]:
    """Return the tensors and the plain values of an undamaged checkpoint.

    Raises:
        ShoalError: ``contents.json`` cannot be read.
    """
    try:
        table = parse_json((path / CONTENTS).read_bytes(), str(path / CONTENTS))
        tensors = {
            name: StoredTensor(
                dtype=tensor["dtype"],
                size=tuple(tensor["size"]),
                chunks=tuple(
                    Chunk(**chunk | {"offsets": tuple(chunk["offsets"]), "sizes": tuple(chunk["sizes"])})
                    for chunk in tensor["chunks"]
                ),
            )
            for name, tensor in table["tensors"].items()
        }
        return tensors, table["values"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ShoalError(f"{path / CONTENTS} cannot be read: {error!r}") from error


def superseded(
    steps: Iterable[int], *, newest: int, keep: int, damaged: Iterable[int] = (), best: int | None = None
) -> list[int]:
    """Return the steps whose checkpoints can be deleted once that of step ``newest`` is complete.

    The last ``keep`` up to ``newest`` are kept, the ``best`` one, and all after ``newest``, which belong to
    an earlier attempt that got further. ``damaged`` ones do not count towards ``keep``.
    """
    past = {step for step in steps if step <= newest}
    good = sorted(past - (set(damaged) - {newest}))
    return sorted(past - set(good[-keep:]) - {best})


def _leftovers(run_dir: Path) -> list[Path]:
    return [path for path in (run_dir / FOLDER).glob("*") if _UNNAMED.fullmatch(path.name)]


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
    try:
        num_bytes = (path / expected.name).stat().st_size
        if num_bytes != expected.num_bytes:
            return f"{expected.name} has {num_bytes} bytes instead of {expected.num_bytes}"
        checksum = describe_file(path / expected.name).crc32
    except FileNotFoundError:
        return f"{expected.name} is missing"
    except OSError as error:
        return f"{expected.name} cannot be read: {error.strerror}"
    if checksum != expected.crc32:
        return f"{expected.name} has the checksum {checksum} instead of {expected.crc32}"
    return None


def step_in(name: str) -> int:
    """Return the step of a copy in an object store by its name."""
    return int(name.partition(".")[0].removeprefix("step-"))
