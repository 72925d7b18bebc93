"""Exchanges a job's secret and its helpers' addresses through a folder that all hosts share.

The job's folder outlives its starts (a requeued job starts again); each start has a folder of its own in it:

    progress              step of the last checkpoint, from the first worker
    starts.json           the starts so far, each with the progress at its beginning
    starts/4711.2/secret  written by the first worker host, new for each start
    starts/4711.2/helper-00003   address of a helper's server
    starts/4711.2/helpers        helpers that answered in time, which all workers use
    starts/4711.2/place   where hosts meet that come and go, for those that join later

Every file is renamed into place, so that readers find it complete.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shoal.errors import ShoalError, UsageError
from shoal.json_text import parse_json

SHARED_DEADLINE_S = 90.0
"""Time for the first worker host's files to appear on the others."""
MAX_IDLE_STARTS = 3
"""Starts in a row without progress after which a job does not start again."""
NEXT = ".next"
"""End of the name of a start that has no number."""
_NOTICE_AFTER_S = 10.0
_PAUSES_S = (0.1, 2.0)
_SERVER = re.compile(r"[0-9a-zA-Z.:_-]{1,256}:[1-9][0-9]{0,4}")
_MAX_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class JobStart:
    """A start of the job."""

    run_id: str
    progress: str
    """The file ``progress`` at its beginning; empty: there was none."""
    saved: bool = False
    """True if workers that write no progress finished, or left with the exit code for "saved"."""


class JobFolder:
    """The folder of a job, for one of its starts.

    Args:
        job: folder of the job; created if missing.
        run_id: name of this start, the same on all its hosts. ``JOB.next`` is for schedulers that do not
            number starts: the first worker host takes the next number, which the others never learn.
    """

    def __init__(self, job: Path, run_id: str) -> None:
        self.job, self.run_id = job, run_id
        self.progress_file = job / "progress"

    @property
    def folder(self) -> Path:
        """Folder of this start."""
        return self.job / "starts" / self.run_id

    # ---- the first worker host ---------------------------------------------------------------------------

    def begin(self, *, with_secret: bool = True) -> Path:
        """Record this start, create its secret unless the job has one, and return the secret's file.

        Raises:
            ShoalError: the last starts have made no progress, or the folder cannot be written.
        """
        starts = self.starts()
        name = self.run_id.rpartition(".")[0]
        if self.run_id == f"{name}{NEXT}":
            self.run_id = f"{name}.{sum(start.run_id.rpartition('.')[0] == name for start in starts)}"
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as problem:
            raise ShoalError(
                f"--job {self.job} cannot be made: {problem.strerror}; it has to be on a file system that "
                "all hosts share, and that you can write to"
            ) from None
        if not any(start.run_id == self.run_id for start in starts):
            now = self.progress()
            if not may_start(starts, now, job=name):
                raise ShoalError(
                    f"the job does not start again: its last {MAX_IDLE_STARTS} starts ended without a new "
                    f"checkpoint ({'the last is of step ' + now if now else 'there is none'}). See why in "
                    f"its output; then remove {self.job / 'starts.json'} and submit it again"
                )
            self._write_starts([*starts, JobStart(run_id=self.run_id, progress=now)])
        if (
            with_secret and not self.secret_file.exists()
        ):  # a second command in the same allocation uses the first one's
            _write(self.secret_file, secrets.token_hex(32))
        return self.secret_file

    def saved(self) -> None:
        """Record that the workers saved or finished, which counts as progress where they report none."""
        starts = self.starts()
        self._write_starts([replace(s, saved=s.saved or s.run_id == self.run_id) for s in starts])

    def publish_place(self, *, rdzv: str, nnodes: int, workers: int) -> None:
        """Write, for hosts that join this start later, the options with which its hosts have met."""
        _write(self.folder / "place", json.dumps({"rdzv": rdzv, "nnodes": nnodes, "workers": workers}))

    def gather_helpers(self, count: int, *, deadline_s: float, required: bool) -> str:
        """Wait for the addresses of ``count`` servers and publish those that came; return SHOAL_HELPERS.

        Raises:
            ShoalError: some did not come and are required.
        """
        names = [f"helper-{number:05}" for number in range(count)]
        until, begun, noticed = time.monotonic() + deadline_s, time.monotonic(), False
        while missing := [name for name in names if not (self.folder / name).exists()]:
            if time.monotonic() > until:
                break
            if not noticed and time.monotonic() - begun > _NOTICE_AFTER_S:
                noticed = True
                print(f"shoal launch: waiting for {len(missing)} of {count} helpers", file=sys.stderr)
            time.sleep(_PAUSES_S[0])
        if missing and required:
            raise ShoalError(
                f"{', '.join(missing)} did not come within {deadline_s:g} s, and --helpers-required was "
                "given; see their output in the job's"
            )
        if missing:
            print(
                f"shoal launch: WARNING: {', '.join(missing)} did not come within {deadline_s:g} s; the run "
                f"starts with {count - len(missing)} of {count} helpers"
                + ("" if len(missing) < count else ": the workers' hosts do all the sums"),
                file=sys.stderr, flush=True,
            )  # fmt: skip
        paths = [self.folder / name for name in names if name not in missing]
        servers = ",".join(_server(path, _read(path).strip()) for path in paths)
        _write(self.folder / "helpers", servers)
        return servers

    # ---- the others --------------------------------------------------------------------------------------

    @property
    def secret_file(self) -> Path:
        """File with the secret of this start."""
        return self.folder / "secret"

    def await_secret(self) -> Path:
        """Wait until the first worker host has created the secret's file, and return it.

        Raises:
            ShoalError: it does not come.
        """
        _await(self.secret_file, SHARED_DEADLINE_S)
        return self.secret_file

    def await_helpers(self, *, deadline_s: float) -> str:
        """Return the value of SHOAL_HELPERS that the first worker host has published."""
        path = self.folder / "helpers"
        _await(path, deadline_s + SHARED_DEADLINE_S)
        servers = [entry.strip() for entry in _read(path).split(",")]
        return ",".join(_server(path, server) for server in servers if server)

    def place(self) -> dict[str, Any]:
        """Return the options that the first worker host has published, for a host that joins later.

        Raises:
            UsageError: this start has one host, or its workers do not come and go.
            ShoalError: the file is damaged.
        """
        path = self.folder / "place"
        if not path.exists():
            raise UsageError(
                f"--join: start {self.run_id} of {self.job} takes in no hosts: it has one, or was started "
                "without --elastic or --distributed.elastic, or has not begun"
            )
        place: Any = parse_json(path.read_bytes(), str(path), remedy="start the job again")
        types = {"rdzv": str, "nnodes": int, "workers": int}
        if not isinstance(place, dict) or {name: type(each) for name, each in place.items()} != types:
            raise ShoalError(f"{path} is not what shoal launch writes; start the job again")
        return dict(place)

    def publish_helper(self, number: int, server: str) -> None:
        """Write the address of a helper's server."""
        _write(self.folder / f"helper-{number:05}", server)

    def progress(self) -> str:
        """Return the step of the last checkpoint, as the first worker wrote it; empty if there is none."""
        try:
            return _read(self.progress_file).strip()[:64]
        except OSError:
            return ""

    def starts(self) -> list[JobStart]:
        """Return the starts of the folder, in their order."""
        path = self.job / "starts.json"
        if not path.exists():
            return []
        rows = parse_json(path.read_bytes(), str(path), remedy=f"remove {path}")
        try:
            starts = [JobStart(**row) for row in rows]
        except TypeError:
            starts = None
        types = {"run_id": str, "progress": str, "saved": bool}
        if starts is None or any(
            not isinstance(getattr(start, name), kind) for start in starts for name, kind in types.items()
        ):
            raise ShoalError(f"{path} is not what shoal launch writes; remove it")
        return starts

    def _write_starts(self, starts: list[JobStart]) -> None:
        _write(self.job / "starts.json", json.dumps([asdict(start) for start in starts], indent=1))


def may_start(starts: list[JobStart], progress: str, *, job: str) -> bool:
    """Return whether a job may start again, given its earlier starts and its progress now.

    Args:
        starts: of the folder, in their order; those of jobs with another ``job`` do not count.
        progress: step of the last checkpoint; empty: there is none.
        job: part of the run's name before the last dot.
    """
    own = [start for start in starts if start.run_id.rpartition(".")[0] == job]
    values = [start.progress for start in own] + [progress]
    idle = 0
    for number, start in enumerate(own):
        moved = values[number + 1] != start.progress or (start.saved and not values[number + 1])
        idle = 0 if moved else idle + 1
    return idle < MAX_IDLE_STARTS


def usable_hosts(num_hosts: int, workers_per_host: int, global_batch: int | None) -> int:
    """Return the largest number of hosts, up to ``num_hosts``, over whose workers a global batch divides.

    >>> usable_hosts(7, 8, 512)
    4

    Raises:
        UsageError: it does not divide over the workers of one host.
    """
    if global_batch is None:
        return num_hosts
    for count in range(num_hosts, 0, -1):
        if global_batch % (count * workers_per_host) == 0:
            return count
    raise UsageError(
        f"--global-batch {global_batch} does not divide over the {workers_per_host} workers of one host; "
        f"give a multiple of {workers_per_host}"
    )


def _read(path: Path) -> str:
    """Return the first MiB of a file as text; other bytes than UTF-8's are replaced."""
    with path.open("rb") as file:
        return file.read(_MAX_BYTES).decode("utf-8", "replace")


def _server(path: Path, text: str) -> str:
    if not _SERVER.fullmatch(text):
        raise ShoalError(f"{path} has {text!r:.100}, which is no ADDRESS:PORT; start the job again")
    return text


def _await(path: Path, deadline_s: float) -> None:
    begun, pause_s, noticed = time.monotonic(), _PAUSES_S[0], False
    while not path.exists():
        waited_s = time.monotonic() - begun
        if waited_s > deadline_s:
            raise ShoalError(
                f"{path} did not appear on {os.uname().nodename} in {deadline_s:g} s: either the first "
                "worker host did not start (see its output), or this folder is not shared; --job has to name "
                "one on a file system that all hosts mount"
            )
        if not noticed and waited_s > _NOTICE_AFTER_S:
            noticed = True
            print(f"shoal launch: {os.uname().nodename} waits for {path}", file=sys.stderr, flush=True)
        time.sleep(pause_s)
        pause_s = min(1.5 * pause_s, _PAUSES_S[1])


def _write(path: Path, text: str) -> None:
    """Write a file that only its owner can read, complete from the moment it has its name.

    The temporary name is random, and a link there is not followed: others may write to the folder.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    flags = os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_WRONLY
    with os.fdopen(os.open(temporary, flags, 0o600), "w") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
