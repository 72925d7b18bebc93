"""Defines the errors that users see, and the exit codes of every command. Standard library only.

An error message states the file, field or peer, the value, the rule and the remedy, in that order where it
reads well. The command line prints it without a traceback; any other exception is a bug and keeps its
traceback.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from difflib import get_close_matches
from importlib import import_module
from typing import Any

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_STOPPED = 75
"""A signal ended the run after it saved: start the same command again (sysexits.h, EX_TEMPFAIL)."""
EXIT_LOST = 76
"""Another host is gone, or a worker on it: the run continues from its last checkpoint when started again."""

MODULES_OF_EXTRAS = {
    "torch": ("torch", "safetensors", "tensorboardX"),
    "jax": ("jax", "optax"),
    "keras": ("keras",),
    "tensorflow": ("tensorflow",),
    "text": ("transformers", "tokenizers", "sentencepiece", "google"),
    "corpora": ("pyarrow", "zstandard", "mwparserfromhell"),
    "vision": ("torchvision", "PIL", "faster_coco_eval"),
    "aws": ("boto3",),
    "report": ("matplotlib", "jinja2"),
    "watch": ("tensorboard",),
    "mlperf": ("mlperf_logging",),
    "scores": ("rouge_score", "sacrebleu"),
    "onnx": ("onnx", "onnxscript"),
}
"""Modules that each optional dependency of users adds to numpy and cyclopts."""


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
        if extra == (found[1] if (found := re.search(r"""extra\s*==\s*['"]([\w.-]+)""", requirement)) else "")
    ]
    return f"pip install {' '.join(packages)}"


def import_extra(module: str, extra: str, purpose: str) -> Any:
    """Import a module of an optional dependency; ``purpose`` says what it is for ("images need Pillow").

    Raises:
        UsageError: it, or another package of an extra that it imports, is not installed.
        ShoalError: it is installed, but damaged or of a version that does not fit.
    """
    try:
        return import_module(module)
    except ImportError as error:
        text = f"{purpose}, which cannot be imported ({error}); {install_command(extra)}"
        raise (UsageError if missing_extra(error) else ShoalError)(text) from None


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
