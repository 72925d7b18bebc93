"""Python programs that launchers and runs start, forked from the process that has torch loaded.

A program of this package takes 3 to 5 s of processor time to start, most of it imports. What is left out is
the start of the interpreter alone: ``test_train_command.py`` and slow cases of ``test_beside.py`` start real
programs.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver, reduction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest import mock

from forked import fork_process, start_server
from shoal import recipes
from shoal.errors import EXIT_FAILURE

STARTERS = ("shoal.launch.emulated", "shoal.launch.local", "shoal.train.beside")
"""Modules whose programs are forked."""
POOLS = "shoal.data.process_pool.multiprocessing"
FORKED_POOLS = SimpleNamespace(get_context=lambda _: multiprocessing.get_context("forkserver"))
"""The module ``multiprocessing``, for pools of processes that prepare data; they spawn."""
STAY = ("shoal.launch.emulated_network",)
"""Modules whose programs make namespaces for themselves."""


def fork_programs() -> None:
    """From here on, let this process fork the Python programs that it would start or replace itself by."""
    # This process was forked by the server that forks them: it needs no other one.
    for known in (forkserver, forkserver._forkserver):
        mock.patch.object(known, "ensure_running").start()
    mock.patch(POOLS, FORKED_POOLS).start()
    for name in STARTERS:
        mock.patch(f"{name}.subprocess", FORKING).start()
    mock.patch("subprocess.run", run).start()
    mock.patch("os.execv", _replace).start()


_run_program = subprocess.run


@contextmanager
def forked_pools() -> Iterator[None]:
    """Let the tests' own process fork pools that prepare data."""
    start_server()
    with mock.patch(POOLS, FORKED_POOLS):
        yield


def fork_workers_of_torchrun() -> None:
    """Let torchrun in this process fork its workers."""
    fork_programs()
    handler = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
    mock.patch(f"{handler}.Popen", lambda args, **options: start(args, **options)).start()


def start(command: Sequence[str], **options: Any) -> Any:
    """Fork a Python program, on an emulated host too; start any other."""
    namespaces = [word.partition("=")[2] for word in command if word.startswith(("--net=", "--uts="))]
    words = list(command[command.index("--") + 1 :] if namespaces else command)
    if words[0] != sys.executable or words[-1] in STAY:
        return subprocess.Popen(command, **options)
    return ForkedProgram(words[1:], namespaces, **options)


def run(command: Sequence[str], *, capture_output: bool = False, **options: Any) -> Any:
    """Run a Python program to its end, whose output is wanted; run any other as it is."""
    if command[0] != sys.executable or not capture_output:
        return _run_program(command, capture_output=capture_output, **options)
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        code = ForkedProgram(command[1:], env=options.get("env"), stdout=out, stderr=err).wait()
        for file in (out, err):
            file.seek(0)
        return subprocess.CompletedProcess(command, code, out.read(), err.read())


FORKING = SimpleNamespace(**{**vars(subprocess), "Popen": start, "run": run})
"""The module ``subprocess``, for what starts Python programs."""


class ForkedProgram:
    """A program in a process of its own, with the methods of ``subprocess.Popen``; it leads a session."""

    def __init__(
        self,
        words: Sequence[str],
        namespaces: Sequence[str] = (),
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: int | None = None,
        stdout: Any = None,
        stderr: Any = None,
        **_: Any,
    ) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.stdin = self.stdout = None
        ours = []
        if stdin == subprocess.PIPE:
            into, end = os.pipe()
            self.stdin, ours = os.fdopen(end, "w"), [into]
        else:
            ours = [into := os.open(os.devnull, os.O_RDONLY)]
        if stdout == subprocess.PIPE:
            end, stdout = os.pipe()
            self.stdout = os.fdopen(end)
            ours.append(stdout)
        out = _descriptor(stdout, 1)
        err = out if stderr == subprocess.STDOUT else _descriptor(stderr, 2)
        environ = dict(os.environ if env is None else env)
        streams = [_Passed(each) for each in (into, out, err)]
        self._process = fork_process(_run, list(words), environ, cwd or Path.cwd(), list(namespaces), streams)
        for descriptor in ours:
            os.close(descriptor)
        assert self._process.pid is not None
        self.pid = self._process.pid
        with suppress(ProcessLookupError):  # it has ended
            while os.getpgid(self.pid) != self.pid:  # a kill goes to its group
                time.sleep(0.001)

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired("a forked program", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


class _Passed:
    """A descriptor of this process, of which the process that is forked gets a copy."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return _taken, (reduction.DupFd(self.descriptor),)


def _taken(duplicate: Any) -> int:
    return int(duplicate.detach())


def _descriptor(stream: Any, inherited: int) -> int:
    if stream is None:
        return inherited
    return stream if isinstance(stream, int) else int(stream.fileno())


def _run(
    words: list[str], environ: dict[str, str], cwd: Path, namespaces: list[str], streams: list[int]
) -> None:
    os.setsid()
    for path in namespaces:
        enter(path)
    for number, descriptor in enumerate(streams):
        os.dup2(descriptor, number)
    for descriptor in set(streams) - {0, 1, 2}:
        os.close(descriptor)
    sys.stdin = os.fdopen(0, closefd=False)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    fork_programs()
    try:
        become(words)
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(EXIT_FAILURE)


def _replace(_: str, words: Sequence[str]) -> NoReturn:
    become(words[1:])
    sys.exit()


def enter(path: str) -> None:
    """Enter a namespace by its file."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path(path).open() as file:
        if libc.setns(file.fileno(), 0) != 0:
            raise OSError(ctypes.get_errno(), "setns")


def find_recipes() -> None:
    """Reload the registry of recipes, and drop the imported commands that list it."""
    recipes.RECIPES.update(recipes.installed())
    for name in [name for name in sys.modules if name.startswith("shoal.cli.") or name == "shoal.cli"]:
        del sys.modules[name]


def become(words: Sequence[str]) -> None:
    """Do what ``python WORDS`` does: a module, a program in a word, or a file, with what PYTHONPATH names."""
    if named := os.environ.get("PYTHONPATH"):
        sys.path[:0] = named.split(os.pathsep)
        find_recipes()
    first, *rest = [word for word in words[:1] if word != "-u"] + list(words[1:])
    if first == "-m":
        sys.argv = rest[:]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(rest[0], {"__name__": "__main__"})
    else:
        sys.argv = [first, *rest]
        sys.path.insert(0, str(Path(first).parent))
        runpy.run_path(first, run_name="__main__")
