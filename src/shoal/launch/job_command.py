"""Finds the program in the command of a job's workers, whatever stands before it, and checks its files.

``env A=b ./venv/bin/python -u -m shoal train bert`` runs the module ``shoal``; ``bash -c 'exec /opt/x/shoal
train bert'`` and ``torchrun --nproc-per-node 8 train.py`` run what their names say.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shoal.errors import UsageError, did_you_mean

_PYTHON = re.compile(r"(python|pypy)[\d.]*")
_PYTHONS_FLAG = re.compile(r"-[bBdEiIOPqsSuvVx]+|--check-hash-based-pycs=.*")
_PYTHONS_MODULE = re.compile(r"-[bBdEiIOPqsSuvVx]*m")
_SHELLS = ("sh", "bash", "dash", "zsh")
_SHELLS_TEXT = re.compile(r"-[a-zA-Z]*c")
_MORE_THAN_A_COMMAND = re.compile(r"[;|&<>$`()\n]")
LAUNCHERS = ("torchrun", "accelerate", "deepspeed", "mpirun", "mpiexec", "horovodrun", "srun")
"""Programs that start several workers by themselves."""
_LAUNCHERS_MODULES = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")
_TORCHRUNS_FLAGS = ("--standalone", "--no-python", "--no_python", "--run-path", "--run_path")
_ANYWAY = " (--no-check submits it anyway)"
_CONTAINERS = ("apptainer", "singularity", "docker", "podman", "enroot")
_ENVIRONMENTS = ("conda", "micromamba", "uv", "pixi", "poetry")
_WRAPPERS = (
    *("env", "exec", "nice", "ionice", "nohup", "time", "timeout", "setsid", "stdbuf", "numactl", "taskset"),
    *("chrt", "nsys", "ncu", "py-spy", "strace", "setpriv", *_ENVIRONMENTS, *_CONTAINERS),
)
"""Programs that run the one that is named after their options."""


@dataclass(frozen=True, kw_only=True)
class JobCommand:
    """The command of the workers, taken apart."""

    words: tuple[str, ...]
    """All of it."""
    program: str
    """The program that runs: Python, shoal, or the first word if nothing else is known."""
    script: str = ""
    """The file that Python or a shell runs."""
    module: str = ""
    """The module that Python runs."""
    arguments: tuple[str, ...] = ()
    """Of the program, the script or the module."""
    launcher: str = ""
    """A program of :data:`LAUNCHERS` before it."""
    is_elsewhere: bool = False
    """True if its files are those of a container, or another environment."""

    @property
    def is_shoal(self) -> bool:
        """True if ``arguments`` are those of shoal's command line."""
        name = Path(self.script or self.program).name
        return self.module == "shoal" or (not self.module and name == "shoal")


def read_command(words: Sequence[str]) -> JobCommand:
    """Take the command of a job's workers apart.

    Example:
        >>> command = read_command(["env", "A=b", "./venv/bin/python", "-u", "-m", "shoal", "train", "bert"])
        >>> command.program, command.module, command.is_shoal, command.arguments
        ('./venv/bin/python', 'shoal', True, ('train', 'bert'))
    """
    base, name, rest = JobCommand(words=tuple(words), program=words[0]), Path(words[0]).name, list(words[1:])
    if name in _WRAPPERS:
        inner = _first_known(rest)
        elsewhere = inner is None or inner.is_elsewhere or name in (*_CONTAINERS, *_ENVIRONMENTS)
        return replace(inner or base, words=base.words, is_elsewhere=elsewhere)
    if name in _SHELLS:
        return _of_shell(base, rest)
    if name in LAUNCHERS:
        return _of_launcher(base, name, rest)
    if _PYTHON.fullmatch(name):
        return _of_python(base, rest)
    return replace(base, script=words[0] if words[0].endswith((".py", ".sh")) else "", arguments=tuple(rest))


def _first_known(words: list[str]) -> JobCommand | None:
    """Return the program after a wrapper's own options; ``None`` if it is not known."""
    at = next((number for number, word in enumerate(words) if _is_known(word)), None)
    return None if at is None else read_command(words[at:])


def _is_known(word: str) -> bool:
    """Return whether a word after a wrapper's options is the program that it runs."""
    if word.startswith("-") or re.match(r"\w+=", word):
        return False
    name = Path(word).name
    known = (*_SHELLS, *LAUNCHERS, *_WRAPPERS, "shoal")
    return name in known or bool(_PYTHON.fullmatch(name)) or word.endswith((".py", ".sh"))


def _of_python(base: JobCommand, rest: list[str]) -> JobCommand:
    while rest:
        word = rest.pop(0)
        if _PYTHONS_MODULE.fullmatch(word) and rest:
            module, arguments = rest[0], rest[1:]
            if module in _LAUNCHERS_MODULES:
                return _of_launcher(base, module, arguments)
            return replace(base, module=module, arguments=tuple(arguments))
        if word in ("-c", "-"):
            break
        if word in ("-X", "-W"):
            rest = rest[1:]
        elif not _PYTHONS_FLAG.fullmatch(word):
            return replace(base, script=word, arguments=tuple(rest))
    return base


def _of_shell(base: JobCommand, rest: list[str]) -> JobCommand:
    for number, word in enumerate(rest):
        if _SHELLS_TEXT.fullmatch(word):
            text = "".join(rest[number + 1 : number + 2])
            inner = _one_command(text)
            return replace(read_command(inner), words=base.words) if inner else base
        if not word.startswith("-"):
            return replace(base, script=word, arguments=tuple(rest[number + 1 :]))
    return base


def _one_command(text: str) -> list[str]:
    """Return the words of a shell's text that is one command; empty for any other."""
    try:
        return [] if _MORE_THAN_A_COMMAND.search(text) else shlex.split(text)
    except ValueError:  # a quote is open
        return []


def _of_launcher(base: JobCommand, name: str, rest: list[str]) -> JobCommand:
    """Return the program that torchrun starts; of other launchers, the first that is known."""
    inner: JobCommand | None
    if name not in ("torchrun", *_LAUNCHERS_MODULES[:2]):
        inner = _first_known(rest)
    else:
        has_program = False
        while rest and rest[0].startswith("-") and rest[0] not in ("-m", "--module"):
            word = rest.pop(0)
            has_program |= word in ("--no-python", "--no_python")
            if "=" not in word and word not in _TORCHRUNS_FLAGS:
                rest = rest[1:]
        words = ["-m" if word == "--module" else word for word in rest[:1]] + rest[1:]
        inner = read_command(words if has_program and words else ["python", *words])
    return replace(inner or base, words=base.words, launcher=name)


def check_launcher(command: JobCommand, *, num_workers: int | None) -> None:
    """Check that no launcher is started once per worker: each would begin a training of its own.

    Args:
        command: of a worker.
        num_workers: of the job; ``None``: one per GPU of hosts that are not known.

    Raises:
        UsageError: one is.
    """
    if command.launcher and num_workers != 1:
        raise UsageError(
            f"{command.launcher} would be started by each worker, and each would train by itself: shoal "
            "launch starts the workers with torchrun's variables, so name the program alone, such as "
            f"{shlex.join(_alone(command))}"
        )


def _alone(command: JobCommand) -> list[str]:
    program = ["python"] if command.script or command.module else [command.program]
    return [*program, *(["-m", command.module] if command.module else filter(None, [command.script]))]


def check_files(command: JobCommand, folder: Path, *, searches_path: bool) -> None:
    """Check that the program and its script are there.

    Args:
        command: of a worker.
        folder: in which it runs, on a file system of this machine.
        searches_path: a name without a folder is looked for in this machine's PATH, but for shoal itself.

    Raises:
        UsageError: one is not there, or may not be executed.
    """
    first = command.words[0]
    programs = [first] if command.is_elsewhere else list(dict.fromkeys((first, command.program)))
    for program in programs:
        path = folder / program
        if "/" in program and not (path.is_file() and os.access(path, os.X_OK)):
            raise UsageError(
                f"{program}, the program of the workers, is not in {folder}, or may not be executed; give "
                f"its path from there{_ANYWAY}"
            )
    is_known = "/" in first or first in ("shoal", command.script) or shutil.which(first) is not None
    if searches_path and not is_known:
        raise UsageError(
            f"{first}, the program of the workers, was not found in PATH; give its path{_ANYWAY}"
        )
    if command.script and not command.is_elsewhere and not (folder / command.script).exists():
        raise UsageError(_absent(command.script, folder))


def check_source(command: JobCommand, source: Path) -> None:
    """Check that a script with a relative path is in the folder that is sent to the containers.

    Raises:
        UsageError: it is not.
    """
    script = command.script
    if script and not Path(script).is_absolute() and not (source / script).is_file():
        raise UsageError(_absent(script, source))


def _absent(script: str, folder: Path) -> str:
    near = did_you_mean(script, (path.name for path in folder.glob("*.py")))
    return f"{script}, the script of the workers, is not in {folder}.{near} Give its path from there{_ANYWAY}"
