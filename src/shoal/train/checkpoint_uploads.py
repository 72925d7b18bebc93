"""Copies a run's checkpoints to an object store, and brings them back on machines that have lost the disk.

Below the location of the run are

- ``checkpoints/step-00000100.NUMBER/``: the files of a checkpoint, ``complete.json`` last. No object of it is
  written twice, so one with ``complete.json`` is complete. The number is the time at which it began;
- ``record.jsonl``, ``config.toml``, ``checkpoints/best-step`` and the folder of the data's description, as
  they were at the last upload;
- what the export at the run's end wrote; each folder of it, such as ``transformers``, with a
  ``complete.json`` of its own, written last;
- ``owner``: who uploads. A job that begins puts its own name there, and the one before it then stops.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

from shoal import record
from shoal.atomic_io import sync_folder, write_atomically
from shoal.data.storage import open_objects
from shoal.errors import ShoalError
from shoal.train import checkpoint_files as files
from shoal.train.checkpoint_files import COMPLETE, FOLDER, WrittenFile
from shoal.train.run_dir import CONFIG_FILE, DESCRIPTION

_OWNER = "owner"
_BEST = f"{FOLDER}/{files.BEST}"
_RUN_FILES = (CONFIG_FILE, record.FILE_NAME, _BEST)
_OF_OTHERS = (FOLDER, "owner", "tensorboard")
"""Folders of a run directory to which an export does not write, but others do meanwhile."""
Stamps = dict[Path, tuple[int, int]]
"""The inode and time of files."""
_NAME = re.compile(rf"{FOLDER}/(step-(\d{{8,}})\.[0-9a-f]{{16}})/([^/]+)")


class Uploads:
    """The copies of one run in an object store. Threads may share it, one at a time.

    Args:
        location: ``s3://bucket/prefix`` of the run.
        run_dir: of the run, on this host.

    Raises:
        UsageError: the location is not one of a store.
    """

    def __init__(self, location: str, run_dir: Path) -> None:
        self._objects = open_objects(location)
        self._run_dir = run_dir
        self._token = uuid.uuid4().hex

    def uri(self, name: str) -> str:
        """Return the location of a copy, for messages."""
        return self._objects.uri(f"{FOLDER}/{name}")

    def take_over(self) -> None:
        """Become the one who uploads, and remove what a killed process has left. The first worker does it.

        Raises:
            ShoalError: the store cannot be read and written.
        """
        self._objects.put(_OWNER, self._token.encode())
        self._objects.abandon_parts(f"{FOLDER}/")
        contents = self._contents()
        partial = [names for names in contents.values() if COMPLETE not in names.values()]
        self._objects.remove(name for names in partial for name in names)

    def names(self) -> list[str]:
        """Return the names of complete copies, the oldest first; their files are not checked."""
        return [name for name, held in self._contents().items() if COMPLETE in held.values()]

    def new_name(self, step: int) -> str:
        """Return the name of a copy that begins now.

        Raises:
            ShoalError: another job uploads.
        """
        self._require()
        return f"step-{step:08}.{time.time_ns():016x}"

    def put(self, name: str, folder: Path, written: Iterable[WrittenFile]) -> None:
        """Upload files of a checkpoint; each worker does it with those that it has written.

        Raises:
            ShoalError: a file cannot be uploaded.
        """
        for file in written:
            self._objects.put_file(f"{FOLDER}/{name}/{file.name}", folder / file.name)

    def complete(self, name: str, written: Iterable[WrittenFile]) -> None:
        """Complete a copy whose files are there, and upload the files of the run. The first worker does it.

        Raises:
            ShoalError: another job uploads, or the store fails.
        """
        self._require()
        self._objects.put(f"{FOLDER}/{name}/{COMPLETE}", files.mark_of(files.step_in(name), written))
        self.put_run_files()

    def prune(self, name: str, *, keep: int, best: int | None) -> None:
        """Delete copies that the one of this name supersedes, by the rule of those on disk."""
        self._require()
        newest, contents = files.step_in(name), self._contents()
        steps = {files.step_in(other) for other in contents}
        old = files.superseded(steps, newest=newest, keep=keep, best=best)
        for other, held in contents.items():
            if files.step_in(other) in old or (files.step_in(other) == newest and other != name):
                # first the mark: what is left of a deletion is not complete
                self._objects.remove(sorted(held, key=lambda object_: held[object_] != COMPLETE))

    def put_run_files(self) -> None:
        """Upload the settings, the record and the description of the data."""
        description = sorted(path for path in (self._run_dir / DESCRIPTION).glob("*") if path.is_file())
        for path in (*(self._run_dir / name for name in _RUN_FILES), *description):
            if path.is_file():
                data = path.read_bytes()
                if path.name == record.FILE_NAME:  # a line may be half written
                    data = data[: data.rfind(b"\n") + 1]
                self._objects.put(str(path.relative_to(self._run_dir)), data)

    def export_files(self) -> Stamps:
        """Return the files of the run directory that an export may write, to see later which it wrote."""
        return dict(sorted(self._export_files()))

    def _export_files(self) -> Iterator[tuple[Path, tuple[int, int]]]:
        for path in self._run_dir.rglob("*"):
            name = path.relative_to(self._run_dir)
            if name.parts[0] not in _OF_OTHERS and str(name) not in _RUN_FILES and path.is_file():
                yield path, ((state := path.stat()).st_ino, state.st_mtime_ns)

    def put_export(self, step: int, before: Stamps) -> None:
        """Upload what the export at the run's end wrote: what :meth:`export_files` did not return before.

        Raises:
            ShoalError: another job uploads, or the store fails.
        """
        self._require()
        wrote = [path for path, stamp in self.export_files().items() if before.get(path) != stamp]
        names = {path: str(path.relative_to(self._run_dir)) for path in wrote}
        folders = sorted({path.parent for path in wrote} - {self._run_dir})
        for folder in folders:  # an older one is absent before parts of it are replaced
            old = self._objects.names(f"{folder.relative_to(self._run_dir)}/")
            self._objects.remove(sorted(old, key=lambda name: Path(name).name != COMPLETE))
        for path, name in names.items():
            self._objects.put_file(name, path)
        for folder in folders:
            listed = [files.describe_file(path) for path in wrote if path.parent == folder]
            mark = f"{folder.relative_to(self._run_dir)}/{COMPLETE}"
            self._objects.put(mark, files.mark_of(step, listed))

    def exports(self) -> list[str]:
        """Return the names of the folders that the export at the run's end wrote."""
        marks = [Path(name) for name in self._objects.names() if Path(name).name == COMPLETE]
        return [mark.parent.name for mark in marks if len(mark.parts) == 2]

    def fetch_run_files(self, *, again: bool = False) -> None:
        """Bring the settings, the record and the description into the run directory.

        Args:
            again: even if there is a record.

        Raises:
            ShoalError: the store cannot be read, or the directory cannot be written.
        """
        if (self._run_dir / record.FILE_NAME).exists() and not again:
            return
        for name in self._objects.names():
            is_description = Path(name).parent == Path(DESCRIPTION) and Path(name).name not in ("", "..")
            if name in _RUN_FILES or is_description:
                path = self._run_dir / name
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, self._objects.get(name))

    def fetch(self, name: str) -> Path:
        """Bring a copy into the run directory; return its folder there. Its files are not checked.

        Raises:
            ShoalError: it cannot be read, or is damaged.
        """
        final = files.checkpoint_path(self._run_dir, files.step_in(name))
        return self._fetch(f"{FOLDER}/{name}", final, self._mark(f"{FOLDER}/{name}"))

    def bring(self, name: str) -> Path:
        """Bring a copy, or a folder of the export, as :meth:`fetch`, unless it is there; check its files.

        Other checkpoints in the run directory are deleted.

        Raises:
            ShoalError: it cannot be read, or is damaged.
        """
        is_export = _NAME.fullmatch(f"{FOLDER}/{name}/{COMPLETE}") is None
        below = name if is_export else f"{FOLDER}/{name}"
        final = (
            self._run_dir / name if is_export else files.checkpoint_path(self._run_dir, files.step_in(name))
        )
        mark, own = self._mark(below), final / COMPLETE
        if own.is_file() and own.read_bytes() == mark:
            return final
        self._fetch(below, final, mark)
        if damage := files.find_damage(final):
            files.remove_checkpoint(final)
            raise ShoalError(f"{self._objects.uri(below)} is damaged: {damage}; upload it again")
        for other in files.list_checkpoints(self._run_dir):
            if other != final and not is_export:
                files.remove_checkpoint(other)
        return final

    def _mark(self, below: str) -> bytes:
        return self._objects.get(f"{below}/{COMPLETE}")

    def _fetch(self, below: str, final: Path, mark: bytes) -> Path:
        partial = files.fetched_path(final)
        files.remove_folder(partial)
        partial.mkdir(parents=True)
        (partial / COMPLETE).write_bytes(mark)
        listed, damage = files.listed_files(partial)
        if damage is not None:
            raise ShoalError(damage)
        for file in listed:
            parts = self._objects.parts(f"{below}/{file.name}", file.num_bytes)
            files.write_file(partial / file.name, parts)
        sync_folder(partial)
        files.remove_checkpoint(final)
        partial.rename(final)
        sync_folder(final.parent)
        return final

    def _contents(self) -> dict[str, dict[str, str]]:
        """Return the copies, the oldest first: by name, the objects of each and their files' names."""
        found: dict[str, dict[str, str]] = {}
        for name in self._objects.names(f"{FOLDER}/"):
            if match := _NAME.fullmatch(name):
                found.setdefault(match[1], {})[name] = match[3]
        return dict(sorted(found.items(), key=lambda item: (files.step_in(item[0]), item[0])))

    def _require(self) -> None:
        if self._objects.get(_OWNER).decode(errors="replace") != self._token:
            raise ShoalError(
                f"{self._objects.location}: another job has begun to upload there, so this one stops; let "
                "only one job use it, or give this one another --run.upload-to"
            )
