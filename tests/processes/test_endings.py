"""Whatever ends a command or a worker is one line; ``--debug`` shows the traceback."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from forked import fork_process, wait_for

FULL = Path("/dev/full")
"""A device without room, which a file can be a link to."""


# ---- causes: each is the real thing, with the file ``path`` ------------------------------------------------


def missing(path: Path) -> None:
    path.with_name("absent").read_bytes()


def not_permitted(_: Path) -> None:
    Path("/proc/sys/kernel/osrelease").write_text("1")  # of mode 0444, for root too


def read_only(_: Path) -> None:
    Path("/sys/kernel/new").mkdir()  # also a file system without room for it


def full(path: Path) -> None:
    path.symlink_to(FULL)
    path.write_bytes(b"x")


def full_while_open(path: Path) -> None:
    path.symlink_to(FULL)
    with path.open("w") as shard:
        shard.write("x" * (1 << 20))


def too_large(path: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    path.write_bytes(bytes(5000))


def record_too_large(path: Path) -> None:
    """The same of a run's record, and of TensorBoard's file, which a thread and an exit function write."""
    from shoal.record import Stop
    from shoal.train.reporting import EventWriter, Progress, RecordWriter, RunLog

    path.mkdir()
    with RunLog(path, Progress(10, 0)) as log:
        record, events = log._writers[0], log._writers[-2]
        assert isinstance(record, RecordWriter) and isinstance(events, EventWriter)
        for number in range(99):
            events._events.add_scalar("loss", 1.0, number)
        events._events.flush()
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, resource.RLIM_INFINITY))
        events._events.add_scalar("loss", 1.0, 99)
        for number in range(99):
            record.write(Stop(step=number, reason="none", exit_code=0))


def too_many_files(path: Path) -> None:
    path.touch()
    resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
    kept = [path.open() for _ in range(64)]
    assert not kept


def not_utf8(path: Path) -> None:
    path.write_bytes(b"caf\xe9 au lait")
    path.read_text(encoding="utf-8")


def not_printable(_: Path) -> None:
    "\u20ac".encode("ascii")


def no_memory(_: Path) -> None:
    import numpy as np

    resource.setrlimit(resource.RLIMIT_AS, (1 << 36, resource.RLIM_INFINITY))
    np.ones(1 << 40)


def no_memory_for_torch(_: Path) -> None:
    import torch

    resource.setrlimit(resource.RLIMIT_AS, (1 << 36, resource.RLIM_INFINITY))
    torch.ones(1 << 40)


def no_connection(_: Path) -> None:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        socket.create_connection(free.getsockname())


def damaged_weights(path: Path) -> None:
    from safetensors import safe_open

    path.write_bytes(b"no weights")
    safe_open(path, framework="pt")


def not_json(_: Path) -> None:
    json.loads("{")


def not_toml(_: Path) -> None:
    tomllib.loads("a = ")


def failed_command(_: Path) -> None:
    subprocess.run([sys.executable, "-c", "raise SystemExit(3)"], check=True)


def defect(_: Path) -> None:
    {}["key\nof two lines"]


def refused(_: Path) -> None:
    from shoal.errors import UsageError

    raise UsageError("rate -1 must be at least 0")


CAUSES: dict[Callable[[Path], None], str] = {
    missing: "{folder}/absent: No such file or directory; check the path",
    not_permitted: "/proc/sys/kernel/osrelease: Permission denied; change its permissions",
    read_only: "/sys/kernel/new: ",
    full: "{path}: No space left on device; free some space or choose another folder",
    full_while_open: "{path}: No space left on device; free some space or choose another folder",
    too_large: "{path}: File too large; the file system or `ulimit -f` allows no larger files",
    record_too_large: "{path}/record.jsonl ",
    too_many_files: "{path}: Too many open files; allow more open files: ulimit -n",
    not_utf8: "{path}: byte 4 (0xe9) is not utf-8; convert the file to UTF-8",
    not_printable: "the character '\\u20ac' cannot be written in ascii; set PYTHONUTF8=1",
    no_memory: "out of memory (Unable to allocate 8.00 TiB",
    no_memory_for_torch: "out of memory (",
    no_connection: "Connection refused; --debug shows where",
    damaged_weights: "safetensors.SafetensorError: Error while deserializing header",
    not_json: "json.JSONDecodeError: Expecting property name",
    not_toml: "tomllib.TOMLDecodeError: Invalid value",
    failed_command: "subprocess.CalledProcessError: Command ",
    defect: "KeyError: 'key\\nof two lines'",
    refused: "rate -1 must be at least 0",
}
UNEXPECTED = {damaged_weights, not_json, not_toml, failed_command, defect}


class Ended(NamedTuple):
    """The exit code of a process and what it wrote to stderr."""

    code: int | None
    text: str


def in_command(cause: Callable[[Path], None], folder: Path, debug: bool) -> None:
    """Run the command line with a command that does what ``cause`` does."""
    from shoal.cli import app

    sys.argv = ["shoal", *(["--debug"] if debug else []), "plan"]
    app.app = lambda *_, **__: cause(folder / "file")  # type: ignore[assignment]
    app.main()


def in_worker(cause: Callable[[Path], None], folder: Path, debug: bool) -> None:
    """Run a worker that does what ``cause`` does."""
    from shoal.env.settings import set_debug
    from shoal.launch.worker import run_worker

    if debug:
        set_debug()

    def work() -> int:
        cause(folder / "file")
        return 0

    run_worker(work, run=folder / "run")


def _begin(place: Callable[..., None], cause: Callable[[Path], None], folder: Path, debug: bool) -> None:
    os.dup2(os.open(folder / "stderr", os.O_CREAT | os.O_WRONLY | os.O_APPEND), 2)
    tempfile.tempdir = str(folder)
    place(cause, folder, debug)


def ended(place: Callable[..., None], cause: Callable[[Path], None], folder: Path, debug: bool) -> Ended:
    (code,) = wait_for([fork_process(_begin, place, cause, folder, debug)])
    return Ended(code, (folder / "stderr").read_text())


@pytest.mark.parametrize("place", [in_command, in_worker])
@pytest.mark.parametrize("cause", CAUSES)
def test_an_error_is_one_line(
    place: Callable[..., None], cause: Callable[[Path], None], tmp_path: Path
) -> None:
    begin = CAUSES[cause].format(path=tmp_path / "file", folder=tmp_path)
    end = ended(place, cause, tmp_path, debug=False)
    assert end.code == (2 if cause is refused else 1)
    assert end.text.startswith(f"shoal: {begin}" if place is in_command else begin)
    assert end.text.count("\n") == 1 and end.text.endswith("\n")
    kept = [*tmp_path.glob("shoal-*.traceback"), *tmp_path.glob("run/logs/worker-00000.traceback")]
    assert len(kept) == (cause in UNEXPECTED)
    if kept:
        assert str(kept[0]) in end.text and "shoal doctor --bundle" in end.text
        assert f"in {cause.__name__}\n" in kept[0].read_text()


@pytest.mark.parametrize("place", [in_command, in_worker])
@pytest.mark.parametrize("cause", [missing, defect, refused])
def test_debug_shows_the_traceback(
    place: Callable[..., None], cause: Callable[[Path], None], tmp_path: Path
) -> None:
    end = ended(place, cause, tmp_path, debug=True)
    assert end.code == (2 if cause is refused else 1)
    assert (
        end.text.startswith("Traceback (most recent call last):\n") and f"in {cause.__name__}\n" in end.text
    )
    last = CAUSES[cause].format(path=tmp_path / "file", folder=tmp_path)
    assert end.text.splitlines()[-1].startswith(f"shoal: {last}" if place is in_command else last)
    assert not list(tmp_path.rglob("*.traceback"))


# ---- what is printed ---------------------------------------------------------------------------------------


def say(words: list[str], out: Path | None, errors: Path) -> None:
    """Run a command whose stdout is the file ``out``; ``None``: a pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    os.dup2(writing if out is None else os.open(out, os.O_WRONLY), 1)
    os.dup2(os.open(errors, os.O_CREAT | os.O_WRONLY), 2)
    sys.argv = ["shoal", *words]
    from shoal.cli.app import main

    main()


@pytest.mark.parametrize(
    ("words", "code"), [(["train", "albert", "--help"], 0), (["--help"], 0), (["--version"], 141)]
)
def test_a_reader_that_stops_reading_is_no_error(words: list[str], code: int, tmp_path: Path) -> None:
    assert wait_for([fork_process(say, words, None, tmp_path / "stderr")]) == [code]
    assert (tmp_path / "stderr").read_text() == ""


def test_an_output_without_room_is_one_line(tmp_path: Path) -> None:
    assert wait_for([fork_process(say, ["--version"], FULL, tmp_path / "stderr")]) == [1]
    said = (tmp_path / "stderr").read_text()
    assert said.startswith("shoal: No space left on device; free some space")
    assert said.count("\n") == 1
