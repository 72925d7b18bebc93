"""Opens run directories: writes their settings, and locks them for one job on any shared file system.

``owner/N.json`` in the run directory names a job and the process of its first worker; the highest N owns the
directory.

1. A process becomes the owner by exclusive creation of the file with the next number, which succeeds for one
   process only. It then deletes the lower ones.
2. Only the process that created a file writes it, and the highest is never deleted, so that numbers are not
   reused. A process that was suspended and creates a lower number finds the higher one and gives up.
3. The owner updates the modification time of its file every :data:`BEAT_S` seconds. It loses the directory
   when its process has ended. If its process is not visible (another host or container), it loses the
   directory when the time has not changed for :data:`PATIENCE_S`, by the clock of the watching host.
4. An owner that was suspended for longer finds its file deleted, and stops before it writes a checkpoint.

``flock`` is not used, because NFSv3 and Lustre are often mounted with locks that are local to a host.
Exclusive creation, reading after opening, and deletion reach the server on both.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import socket
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from shoal import record
from shoal.atomic_io import write_atomically
from shoal.decide.backend import Recorded
from shoal.env import settings
from shoal.env.slurm import job_id
from shoal.errors import ShoalError, UsageError
from shoal.json_text import parse_json
from shoal.train.config import load_toml, to_toml

CONFIG_FILE = "config.toml"
FOLDER = "owner"
DESCRIPTION = "data"
"""Folder of the description of the prepared data: manifest, tokenizer, classes or categories."""
BEAT_S = 5.0
"""Seconds between heartbeats of an owner."""
PATIENCE_S = 60.0
"""Seconds without a heartbeat after which an owner whose process is not visible loses the directory."""
SAME_JOB_PATIENCE_S = 15.0
"""The same if the owner has the id of this job, which the scheduler has restarted."""

_POLL_S = 0.2
_NAME = re.compile(r"[1-9]\d{0,8}\.json")
_MOST_BYTES = 1 << 16


class Ownership:
    """Ownership of a run directory by this process, from :func:`own` until it is released or collected.

    ``is_lost`` is set by a heartbeat that finds another owner, and by :meth:`release`.
    """

    def __init__(self, run_dir: Path, file: Path, content: bytes) -> None:
        self._run_dir, self._file, self._content = run_dir, file, content
        self.is_lost, ended = threading.Event(), threading.Event()
        threading.Thread(
            target=_beat, args=(file, content, self.is_lost, ended), name="owner", daemon=True
        ).start()
        self._end = weakref.finalize(self, _release, os.getpid(), file, content, ended)

    @property
    def number(self) -> int:
        """A number that is unique among all owners of this run directory."""
        return int(self._file.stem)

    @property
    def token(self) -> str:
        """A text that no other owner has; see ``given_up`` of :func:`own`."""
        return str(parse_json(self._content, str(self._file))["token"])

    def require(self) -> None:
        """Raise an error unless this process still owns the run directory.

        Raises:
            ShoalError: another job has taken it over, or it was released.
            OSError: the file system does not respond.
        """
        if not _is_mine(self._file, self._content):
            self.is_lost.set()
        if self.is_lost.is_set() or not self._end.alive:
            raise ShoalError(
                f"{self._run_dir} no longer belongs to this process: {_successor(self._file.parent)}. "
                "Nothing more is written there; start the same command again when no other job uses it"
            )

    def release(self) -> None:
        """Release the run directory, so that other jobs can own it at once."""
        self.is_lost.set()
        self._end()


_held: weakref.WeakValueDictionary[Path, Ownership] = weakref.WeakValueDictionary()


def own(run_dir: Path, *, given_up: str = "") -> Ownership:
    """Make this process the owner of ``run_dir``, or return the ownership that it has.

    Args:
        run_dir: the run directory.
        given_up: token of an owner in the place of which this process comes, whether it has ended or not.

    Raises:
        UsageError: a running job owns it; the message names the job and the remedy.
        ShoalError: this process owned it, and another job has taken it over.
        OSError: the owner file cannot be written.
    """
    key = run_dir.resolve()
    held = _held.get(key)
    if held is not None and held._end.alive:  # not released
        held.require()
        return held
    _held[key] = taken = Ownership(run_dir, *_claim(run_dir, given_up))
    return taken


def require_free(run_dir: Path) -> None:
    """Raise if a visible running process owns ``run_dir``. Does not wait, and changes nothing.

    Raises:
        UsageError: the message names the job and the remedy.
    """
    folder = run_dir / FOLDER
    with contextlib.suppress(OSError):  # the worker that becomes the owner reports it
        if seen := _look(_file(folder, _newest(folder))):
            _judge(run_dir, seen)


def owner_beat(run_dir: Path) -> tuple[bytes, int] | None:
    """Return what changes while the owner of a run directory lives; ``None``: it has no owner now."""
    folder = run_dir / FOLDER
    with contextlib.suppress(OSError):
        seen = _look(_file(folder, _newest(folder)))
        if seen is not None and not (seen.owner is not None and seen.owner.released):
            return seen.content, seen.changed_ns
    return None


# ----------------------------------------------------------------------------------------- owner files


@dataclass(frozen=True, kw_only=True)
class _Owner:
    """The content of an owner file: identity of a process among all hosts, and a description."""

    job: str
    host: str
    pid: int
    since: str
    namespace: str
    """Boot id of the kernel and PID namespace, within which processes are visible; empty: unknown."""
    started: int
    """Ticks from boot to the start of the process, which distinguish it from a later one of the same id."""
    token: str
    released: bool = False

    def __str__(self) -> str:
        return f"job {self.job} (process {self.pid} on host {self.host}, since {self.since})"


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """A snapshot of an owner file; ``owner`` is ``None`` if its content is malformed."""

    owner: _Owner | None
    content: bytes
    changed_ns: int


def _look(file: Path) -> _Seen | None:
    """Read an owner file; ``None`` if it was deleted. Opening it makes NFS ask the server."""
    try:
        with file.open("rb") as opened:
            changed_ns = os.fstat(opened.fileno()).st_mtime_ns
            content = opened.read(_MOST_BYTES)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):
            return None
        raise
    return _Seen(owner=_parsed(content), content=content, changed_ns=changed_ns)


def _parsed(content: bytes) -> _Owner | None:
    try:
        owner = _Owner(**parse_json(content, "an owner's file"))
    except (ShoalError, TypeError):
        return None
    texts = (owner.job, owner.host, owner.since, owner.namespace, owner.token)
    well = all(isinstance(text, str) and text.isprintable() for text in texts) and all(
        type(number) is int and 0 <= number < 1 << 62 for number in (owner.pid, owner.started)
    )
    return owner if well else None


def _file(folder: Path, number: int) -> Path:
    return folder / f"{number}.json"


def _numbers(folder: Path) -> list[int]:
    try:
        return sorted(int(path.stem) for path in folder.iterdir() if _NAME.fullmatch(path.name))
    except FileNotFoundError:
        return []


def _newest(folder: Path) -> int:
    return max(_numbers(folder), default=0)


def _is_mine(file: Path, content: bytes) -> bool:
    seen = _look(file)
    return seen is not None and seen.content == content


def _successor(folder: Path) -> str:
    seen = _look(_file(folder, _newest(folder)))
    if seen is None or seen.owner is None:
        return "it was taken over by another job, released, or removed by hand"
    return f"it was taken over by {seen.owner} while this process was suspended or disconnected"


# -------------------------------------------------------------------------------------------- processes


def _this_process() -> _Owner:
    token = uuid.uuid4().hex
    return _Owner(
        job=job_id() or token[:12],
        host=socket.gethostname(),
        pid=os.getpid(),
        since=datetime.now().astimezone().isoformat(sep=" ", timespec="seconds"),
        namespace=_process_namespace(),
        started=_status_of(os.getpid())[1],
        token=token,
    )


def _process_namespace() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return " ".join([boot, str(Path("/proc/self/ns/pid").readlink()), settings.host_id() or ""])
    except OSError:  # not Linux
        return ""


def _status_of(pid: int) -> tuple[str, int]:
    """Return state (``Z``: ended) and start time in ticks of a process; ``("", 0)`` if unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", 0
    after_name = fields.rpartition(")")[2].split()
    return after_name[0], int(after_name[19])


def _has_ended(owner: _Owner) -> bool:
    """Return whether a process of this host has ended; ``/proc`` may hide those of other users."""
    try:
        os.kill(owner.pid, 0)
    except (ProcessLookupError, OverflowError):
        return True
    except PermissionError:
        pass
    state, started = _status_of(owner.pid)
    return state in ("Z", "X") or (bool(state) and started != owner.started)


# ----------------------------------------------------------------------------------- acquire and release


def _claim(run_dir: Path, given_up: str) -> tuple[Path, bytes]:
    """Become the owner, and return the owner file and its content."""
    folder = run_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    content = json.dumps(asdict(_this_process())).encode()
    while True:
        number = _newest(folder)
        if number and not _may_follow(run_dir, _file(folder, number), given_up):
            time.sleep(_POLL_S)
            continue
        mine = _file(folder, number + 1)
        try:
            with mine.open("xb") as opened:
                opened.write(content)
        except FileExistsError:
            continue
        except OSError as error:  # of a full disk, it names no file
            mine.unlink(missing_ok=True)
            raise OSError(error.errno, error.strerror, str(mine)) from error
        if _newest(folder) > number + 1:  # this process was suspended while others were owners
            mine.unlink(missing_ok=True)
            continue
        for older in _numbers(folder)[:-1]:
            _file(folder, older).unlink(missing_ok=True)  # notifies a suspended owner
        return mine, content


def _may_follow(run_dir: Path, file: Path, given_up: str) -> bool:
    """Return whether the owner in the newest ``file`` has lost the directory; ``False``: check again.

    Raises:
        UsageError: it still owns the directory.
    """
    seen = _look(file)
    if seen is None:
        return False
    if (seen.owner is not None and seen.owner.token == given_up) or _judge(run_dir, seen):
        return True
    patience_s = PATIENCE_S
    if seen.owner is not None and seen.owner.job == job_id():
        patience_s = SAME_JOB_PATIENCE_S
    end, reported = time.monotonic() + patience_s, False
    while time.monotonic() < end:
        time.sleep(_POLL_S)
        now = _look(file)
        if now is None or now.content != seen.content:
            return False
        if now.changed_ns != seen.changed_ns:
            raise _in_use(run_dir, seen)
        if not reported:
            print(
                f"shoal: {run_dir} belongs to {_describe(seen)}, which cannot be seen from here; waiting up "
                f"to {patience_s:.0f} s for a sign that it runs",
                file=sys.stderr,
                flush=True,
            )
            reported = True
    return True


def _judge(run_dir: Path, seen: _Seen) -> bool:
    """Return whether the owner has certainly lost the directory; ``False``: only heartbeats can show it.

    Raises:
        UsageError: its process is visible and runs.
    """
    owner = seen.owner
    if owner is None:
        return False
    if owner.released:
        return True
    if not owner.namespace or owner.namespace != _process_namespace():
        return False
    if owner.pid == os.getpid() or _has_ended(owner):
        return True
    raise _in_use(run_dir, seen)


def _describe(seen: _Seen) -> str:
    return str(seen.owner) if seen.owner else "another job (its owner file cannot be read)"


def _in_use(run_dir: Path, seen: _Seen) -> UsageError:
    return UsageError(
        f"{run_dir} is in use by {_describe(seen)}, and only one job may write into a run directory: wait "
        "until that job has ended or stop it, or name another --run.dir"
    )


def _beat(file: Path, content: bytes, lost: threading.Event, ended: threading.Event) -> None:
    while not ended.wait(BEAT_S):
        with contextlib.suppress(OSError):  # the server may be unavailable for a while
            if not _is_mine(file, content):
                lost.set()
                return
            os.utime(file)


def _release(pid: int, file: Path, content: bytes, ended: threading.Event) -> None:
    """Mark the owner file as released. It is not deleted, so that its number is never reused."""
    ended.set()
    if os.getpid() != pid:  # a forked child does not own it
        return
    temporary = file.with_suffix(".tmp")
    with contextlib.suppress(OSError):  # other jobs then detect the end of this process
        if _is_mine(file, content):
            temporary.write_bytes(json.dumps(parse_json(content, str(file)) | {"released": True}).encode())
            temporary.replace(file)


# ---- settings --------------------------------------------------------------------------------------------


def open_run_dir(path: Path, config: Mapping[str, Any], fixed: Sequence[str]) -> None:
    """Create the run directory and write the resolved settings into it.

    A directory whose run was refused before its first step has no record, and takes any settings.

    Args:
        path: the run directory.
        config: the settings as a tree of two levels.
        fixed: dotted names of settings that must be those of a run that exists in the directory.

    Raises:
        UsageError: the directory cannot be written, a fixed setting differs, or a setting is not UTF-8.
    """
    require_writable(path)
    file = path / CONFIG_FILE
    if file.exists() and (path / record.FILE_NAME).exists():
        _require_same(path, load_toml(file), config, fixed)
    comment = "# Resolved configuration of this run: `shoal train … --config` reads it back.\n"
    write_atomically(file, (comment + to_toml(config)).encode())


def require_writable(path: Path) -> None:
    """Create the directory and a temporary file in it.

    Raises:
        UsageError: the directory cannot be created or written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / f".writable-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(
            f"run.dir {path} cannot be written: {error.strerror}; "
            "choose another --run.dir or make it writable"
        ) from None


def _require_same(path: Path, old: Mapping[str, Any], new: Mapping[str, Any], fixed: Sequence[str]) -> None:
    before, after = flat_settings(old), flat_settings(new)
    for name in sorted(before.keys() | after.keys()):
        is_fixed = any(name == rule or name.startswith(f"{rule}.") for rule in fixed)
        if is_fixed and before.get(name) != after.get(name):
            raise UsageError(
                f"{path} has a run with {name} = {before.get(name)!r}, and this command sets "
                f"{after.get(name)!r}: restore the setting to continue, or start again in another --run.dir"
            )


def flat_settings(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in sections by their dotted names."""
    return {f"{section}.{name}": value for section, values in tree.items() for name, value in values.items()}


# ---- what the record says of the workers so far -----------------------------------------------------------


def last_start(run_dir: Path) -> record.Start | None:
    """Return the newest start of a run; ``None``: it has no record.

    Raises:
        ShoalError: the record is damaged, or of another version.
    """
    rows = record.read_record(run_dir) if (run_dir / record.FILE_NAME).is_file() else []
    return next((row for row in reversed(rows) if isinstance(row, record.Start)), None)


def recorded_backend(run_dir: Path) -> Recorded | None:
    """Return the backend of a run that continues; ``None``: it begins.

    Raises:
        ShoalError: see :func:`last_start`.
    """
    last = last_start(run_dir)
    if last is None:
        return None
    return Recorded(backend=last.backend, num_workers=last.num_workers, num_hosts=last.num_hosts)


# ---- the description of the prepared data ------------------------------------------------------------------
# Exporting, predicting and finetuning from a run read it from there: a run can be used without its data.


def keep_description(directory: Path, read: Callable[[str], bytes], *names: str) -> None:
    """Copy small files of the prepared data into the run directory; the first worker calls it.

    Args:
        directory: the run directory.
        read: returns a file's content.
        names: the files.

    Raises:
        ShoalError: the disk is full or the directory cannot be written.
    """
    folder = directory / DESCRIPTION
    folder.mkdir(exist_ok=True)
    for name in names:
        write_atomically(folder / name, read(name))


def description_in(run_dir: Path) -> Path:
    """Return the folder that :func:`keep_description` wrote.

    Raises:
        UsageError: the run has none.
    """
    folder = run_dir / DESCRIPTION
    if not folder.is_dir():
        raise UsageError(
            f"{folder} is missing, which describes the data of the run: it has not begun to train, or only a "
            f"part of it was copied; copy the whole directory {run_dir}"
        )
    return folder
