"""Defines the errors that users see, and the exit codes of every command. Standard library only.

An error message states the file, field or peer, the value, the rule and the remedy, in that order where it
reads well. Whatever else ends a command or a worker becomes such a line by :func:`ending`. The traceback of
an exception that nobody expected, a likely bug, goes to a file that the line names.
"""

from __future__ import annotations

import codecs
import errno
import io
import math
import os
import re
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_STOPPED = 75
"""A signal ended the run after it saved: start the same command again (sysexits.h, EX_TEMPFAIL)."""
EXIT_LOST = 76
"""Another host is gone, or a worker on it: the run continues from its last checkpoint when started again."""
EXIT_INTERRUPTED = 130
"""Ctrl-C: 128 and the number of SIGINT."""
WARNING_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""Schedulers send one of them to all processes of a job before its time limit or a preemption.

Workers save and leave with :data:`EXIT_STOPPED`, helpers go on. USR1 is usual with Slurm, USR2 is submitit's.
"""

_PACKAGE = Path(__file__).parent
_NETS = ("cli/app.py", "launch/worker.py")
_MAX_CHARACTERS = 400
"""Of another library's message: some quote whole files."""
_SPACE = "free some space or choose another folder, then run the command again"
_REMEDIES = {
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: _SPACE,
    errno.EFBIG: "the file system or `ulimit -f` allows no larger files; choose another folder",
    errno.EROFS: "choose a folder that can be written",
    errno.EACCES: "change its permissions, or choose a path that this user may read and write",
    errno.EPERM: "change its permissions, or choose a path that this user may read and write",
    errno.ENOENT: "check the path",
    errno.ENOTDIR: "a part of the path is a file; check it",
    errno.EISDIR: "name a file; this is a folder",
    errno.ELOOP: "a link in the path leads back to itself; remove it, or name the file",
    errno.ENAMETOOLONG: "no file has such a long name; check it",
    errno.EMFILE: "allow more open files: ulimit -n 65536",
    errno.ENFILE: "this machine has too many open files; end other programs",
    errno.EIO: "the device failed; dmesg may say why",
    errno.EPIPE: "the program that read the output has ended",
}

MODULES_OF_EXTRAS = {
    "torch": ("torch", "safetensors", "tensorboardX"),
    "jax": ("jax", "optax"),
    "keras": ("keras",),
    "tensorflow": ("tensorflow",),
    "text": ("transformers", "tokenizers", "sentencepiece", "google"),
    "corpora": ("pyarrow", "zstandard", "mwparserfromhell"),
    "vision": ("torchvision", "PIL", "faster_coco_eval"),
    "aws": ("boto3",),
    "objects": ("obstore",),
    "report": ("matplotlib", "jinja2"),
    "watch": ("tensorboard",),
    "mlperf": ("mlperf_logging",),
    "scores": ("rouge_score", "sacrebleu"),
    "onnx": ("onnx", "onnxscript"),
    "lora": ("peft",),
    "wandb": ("wandb",),
    "mlflow": ("mlflow",),
}
"""Modules that each optional dependency of users adds to numpy and cyclopts."""
_LOST_PEER_SIGNS = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "read error",
    "timed out waiting",
    "timeout waiting for key",  # torch's FileStore, to whose time-outs it gives no type of their own
    "wait timeout",
    "waiting for clients",
    "remote process exited",
    "was lost",  # of backend shoal, as "rank 1 (10.0.0.2, pid 7) was lost: it closed the connection"
    "has left the group",
)
_LOST_PEER_TYPES = frozenset({"DistBackendError", "DistNetworkError"})
"""Not DistStoreError: a store in a file raises it for errors of the file system, too."""


class ShoalError(RuntimeError):
    """Something outside the program failed (a damaged file, a full disk, a lost peer): exit code 1."""

    exit_code = EXIT_FAILURE


class UsageError(ShoalError, ValueError):
    """A command, setting or file of the user is invalid: exit code 2."""

    exit_code = EXIT_USAGE


class RetryStep(ShoalError):
    """An optimizer step could not be completed on any worker and may be repeated: nothing was changed."""


def missing_extra(error: ImportError) -> str:
    """Return the remedy for a failed import, to follow the name of the feature that needs the package.

    Returns:
        Like ``needs keras, which is not installed: pip install 'keras>=3.10'``; empty for other modules.
    """
    absent = error if error.name else error.__cause__  # cyclopts wraps the error of a command's import
    if not isinstance(absent, ModuleNotFoundError) or not absent.name:
        return ""
    module = absent.name.partition(".")[0]
    for extra, modules in MODULES_OF_EXTRAS.items():
        if module in modules:
            return f"needs {module}, which is not installed: {install_command(extra)}"
    return ""


def install_command(extra: str = "") -> str:
    """Return the command that installs the packages of an extra, or those that shoal always needs.

    It has their own names: the name shoal is not registered in any index, so a stranger could take it.

    Example:
        >>> install_command("keras")
        "pip install 'keras>=3.10'"
    """
    from importlib import metadata  # slow, and only needed for errors

    try:
        requirements = metadata.requires("shoal") or []
    except metadata.PackageNotFoundError:  # a source folder on the path, never installed
        return f"pip install '.[{extra}]' in the source folder"
    packages = [
        f"'{requirement.partition(';')[0].strip()}'"
        for requirement in requirements
        if extra
        == (marker[1] if (marker := re.search(r"""extra\s*==\s*['"]([\w.-]+)""", requirement)) else "")
    ]
    return f"pip install {' '.join(packages)}"


def import_extra(module: str, extra: str, purpose: str) -> Any:
    """Import a module of an optional dependency; ``purpose`` names its use ("images need Pillow").

    Raises:
        UsageError: it, or another package of an extra that it imports, is not installed.
        ShoalError: it is installed, but damaged or of a version that does not fit.
    """
    try:
        return import_module(module)
    except ImportError as error:
        text = f"{purpose}, which cannot be imported ({error}); {install_command(extra)}"
        raise (UsageError if missing_extra(error) else ShoalError)(text) from None


# ---- the end of a command or a worker ----------------------------------------------------------------------


@dataclass(frozen=True)
class Ending:
    """Holds the line of an error that ends a process, and the exit code."""

    text: str
    """One line; with ``debug`` the traceback before it."""
    exit_code: int
    is_bug: bool = False
    """True if nobody expected the error."""


def ending(
    error: BaseException,
    *,
    prefix: str = "",
    run: Path | None = None,
    rank: int = 0,
    debug: bool = False,
    is_alone: bool = False,
) -> Ending:
    """Return how ``error`` ends this process, and keep the traceback of a likely bug.

    Args:
        error: any exception.
        prefix: of the line.
        run: the run directory, whose ``logs`` get the traceback; ``None``: a file in the temporary folder.
        rank: of this worker.
        debug: put the traceback before the line instead.
        is_alone: there is no other worker, whose loss could be the cause.
    """
    line, exit_code = _explain(error, is_alone=is_alone)
    is_bug = not line
    if is_bug:
        message = " ".join(str(error).split())[:_MAX_CHARACTERS]
        line = f"{_name(error)}{message and ': '}{message}{_source_line(error)}, which shoal did not expect"
    trace = "".join(traceback.format_exception(error)) if debug or is_bug else ""
    if is_bug and not debug:
        kept = _keep(trace, run and run / "logs" / f"worker-{rank:05}.traceback")
        of_run = f" --run {run}" if run is not None and (run / "record.jsonl").is_file() else ""
        line += (
            f"; {kept}. Unless a file or setting explains it, report it with that text and: shoal doctor "
            f"--bundle bug.tar.gz{of_run}"
        )
    return Ending(text=f"{trace if debug else ''}{prefix}{line}", exit_code=exit_code, is_bug=is_bug)


def print_any_character() -> None:
    """Write characters that stdout's encoding lacks as ``\\u2026``, as Python does on stderr.

    Under ``LC_ALL=C`` or ``PYTHONIOENCODING=ascii`` the first ``×`` would end the command.
    """
    if isinstance(sys.stdout, io.TextIOWrapper) and codecs.lookup(sys.stdout.encoding).name != "utf-8":
        sys.stdout.reconfigure(errors="backslashreplace")


def flush_output() -> None:
    """Write out what was printed.

    What nobody reads, or the disk has no room for, is dropped: the interpreter would fail by it at its end.
    """
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def hook_errors(*, has_ended: bool = False) -> None:
    """Print expected errors of threads, and of what runs at the interpreter's end, as one line too.

    Args:
        has_ended: an error has been printed; those that follow from the end of the process are not, as those
            of the same full disk.
    """

    def is_said(error: BaseException | None) -> bool:
        line = "" if error is None else _explain(error)[0]
        if line and not has_ended:
            print(line, file=sys.stderr, flush=True)
        return has_ended or bool(line)

    def of_thread(args: threading.ExceptHookArgs) -> None:
        if not is_said(args.exc_value):
            threading.__excepthook__(args)

    def unraisable(args: sys.UnraisableHookArgs) -> None:
        if not is_said(args.exc_value):
            sys.__unraisablehook__(args)

    threading.excepthook, sys.unraisablehook = of_thread, unraisable


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether ``error`` was raised because the device or the host is out of memory."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"  # torch's, which is not imported for this
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or "can't allocate memory" in str(error)
    )


def is_lost_peer(error: BaseException) -> bool:
    """Return whether the error, or one of its causes, reports the loss of another worker."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if type(cause).__name__ in _LOST_PEER_TYPES:
            return True
        if isinstance(cause, RuntimeError) and any(sign in str(cause).lower() for sign in _LOST_PEER_SIGNS):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def cannot_read(path: os.PathLike[str] | str, error: OSError) -> str:
    """Return the message that a file or folder cannot be read, with the reason and its remedy."""
    name = str(path)
    if error.errno == errno.ENOENT:
        for part in (Path(name), *Path(name).parents):
            if part.is_symlink() and not part.exists():
                link = "it" if str(part) == name else str(part)
                return (
                    f"{name}: cannot be read: {link} is a link to {part.readlink()}, where nothing is; "
                    "mend the link, or name the file itself"
                )
    reason = error.strerror or " ".join(str(error).split()) or type(error).__name__
    remedy = _REMEDIES.get(error.errno or 0, "")
    return f"{name}: cannot be read: {reason}{remedy and f'; {remedy}'}"


def no_such_file(path: Path) -> str:
    """Return the message that there is no such file or folder, or that a link leads to none."""
    return cannot_read(path, FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT)))


def _explain(error: BaseException, *, is_alone: bool = False) -> tuple[str, int]:
    """Return the line of an error that can be expected, and the exit code; an empty line for any other."""
    if isinstance(error, ShoalError):
        return str(error), error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", EXIT_INTERRUPTED
    if isinstance(error, ImportError) and (needs := missing_extra(error)):
        return f"this command {needs}", EXIT_USAGE
    message = " ".join(str(error).split())
    excerpt = message[:_MAX_CHARACTERS]
    if is_out_of_memory(error):
        remedy = "use smaller batches, fewer workers on this host or a smaller model, or see `ulimit -v`"
        return f"out of memory{excerpt and f' ({excerpt})'}{_source_line(error)}; {remedy}", EXIT_FAILURE
    if not is_alone and is_lost_peer(error):
        return f"another worker was lost ({excerpt}); its own output says why", EXIT_FAILURE
    if type(error).__name__ == "DistStoreError":
        remedy = "a store in a file needs a file system with locks and space: set TMPDIR to a local one"
        return f"torch's key-value store failed ({excerpt}){_source_line(error)}; {remedy}", EXIT_FAILURE
    if isinstance(error, OSError):
        names = [str(name) for name in (error.filename, error.filename2) if name is not None]
        file = " and ".join(names) or _open_file(error)
        reason = error.strerror or message or type(error).__name__
        remedy = _REMEDIES.get(error.errno or 0, "--debug shows where")
        return f"{file}{file and ': '}{reason}{'' if file else _source_line(error)}; {remedy}", EXIT_FAILURE
    if isinstance(error, UnicodeDecodeError):
        source = f"{_open_file(error) or 'a text'}: byte {error.start + 1} ({error.object[error.start]:#04x})"
        return (
            f"{source} is not {error.encoding}; convert the file to UTF-8{_source_line(error)}",
            EXIT_FAILURE,
        )
    if isinstance(error, UnicodeEncodeError):
        reason = f"the character {error.object[error.start]!a} cannot be written in {error.encoding}"
        return f"{reason}{_source_line(error)}; set PYTHONUTF8=1, or LANG=C.UTF-8", EXIT_FAILURE
    return "", EXIT_FAILURE


def _name(error: BaseException) -> str:
    kind = type(error)
    library = kind.__module__.partition(".")[0]
    return kind.__name__ if library == "builtins" else f"{library}.{kind.__name__}"


def _source_line(error: BaseException) -> str:
    """Return the line of this package that was running, such as `` (shoal/record.py, line 7)``."""
    for frame, number in reversed(list(traceback.walk_tb(error.__traceback__))):
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(_PACKAGE) and (source := str(file.relative_to(_PACKAGE))) not in _NETS:
            return f" (shoal/{source}, line {number})"
    return ""


def _open_file(error: BaseException) -> str:
    """Return the file that the innermost of the error's functions had open; empty if there is none.

    An error of reading or writing an open file, unlike one of opening it, does not name it.
    """
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        own = frame.f_locals.get("self")
        if isinstance(own, Path):  # of its method read_text or write_bytes
            return str(own)
        for value in frame.f_locals.values():
            name = getattr(value, "name", None) if isinstance(value, io.IOBase) else None
            if isinstance(name, str) and value not in (sys.stdin, sys.stdout, sys.stderr):
                return name
    return ""


def _keep(trace: str, path: Path | None) -> str:
    """Write a traceback to ``path``, and say where it is; print it if it cannot be written."""
    try:
        if path is None:
            with tempfile.NamedTemporaryFile("w", prefix="shoal-", suffix=".traceback", delete=False) as file:
                file.write(trace)
            return f"its traceback is in {file.name}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(trace, encoding="utf-8", errors="backslashreplace")
    except OSError:
        print(trace, file=sys.stderr, flush=True)
        return "its traceback is above"
    return f"its traceback is in {path}"


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` with the choice nearest to ``word``, or an empty string."""
    near = get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return f" Did you mean {near[0]!r}?" if near else ""


def require_positive(
    section: str,
    config: object,
    *names: str,
    least: float = 1,
    below: float = math.inf,
    most: float = math.inf,
) -> None:
    """Raise a :class:`UsageError` if one of the named settings is a number out of its range.

    The range is [``least``, ``below``), or [``least``, ``most``].

    Args:
        section: of the settings, which messages name before the setting; empty: none.
    """
    prefix = section and f"{section}."
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int | float) and not (least <= value < below and value <= most):
            rule = f"at least {least}" if most == math.inf else f"from {least} to {most}"
            limit = f" and below {below}" if below < math.inf else ""
            raise UsageError(f"{prefix}{name} {value} must be {rule}{limit}")
