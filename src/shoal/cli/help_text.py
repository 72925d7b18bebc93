"""Lays out the texts of ``--help``: as Markdown would, without the 0.1 s that its parser takes to import.

Also says which argument of a command is missing, and in which section a misplaced setting is.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cyclopts import CycloptsError, UnknownOptionError
    from cyclopts.help import HelpPanel
    from rich.console import Console, ConsoleOptions
    from rich.panel import Panel
    from rich.text import Text

_EMPTY = ("()", '""')
"""Defaults that say nothing."""
_CALLED_ELSEWHERE = {
    "lr": ("--optim.learning-rate", "--optim.base-learning-rate", "--phase1.learning-rate"),
    "learning-rate": ("--optim.learning-rate", "--optim.base-learning-rate", "--phase1.learning-rate"),
    "batch-size": ("--train.global-batch-size", "--phase1.global-batch-size"),
    "per-device-train-batch-size": ("--train.micro-batch-size", "--phase1.micro-batch-size"),
    "epochs": ("--train.epochs", "--train.total-epochs", "--train.total-steps", "--phase1.total-steps"),
    "num-train-epochs": ("--train.epochs", "--train.total-epochs", "--train.total-steps"),
    "max-steps": ("--train.total-steps", "--phase1.total-steps", "--train.total-epochs", "--train.epochs"),
    "steps": ("--train.total-steps", "--phase1.total-steps", "--train.total-epochs", "--train.epochs"),
    "wd": ("--optim.weight-decay",),
    "warmup": ("--optim.warmup-steps", "--optim.warmup-epochs", "--optim.warmup-share"),
    "output-dir": ("--run.dir", "--out"),
    "output": ("--run.dir", "--out"),
    "out-dir": ("--run.dir", "--out"),
    "num-workers": ("--workers",),
    "nproc-per-node": ("--workers",),
    "gpus": ("--workers",),
    "num-nodes": ("--nnodes", "--hosts"),
    "nodes": ("--nnodes", "--hosts"),
    "fp16": ("--train.precision", "--precision"),
    "bf16": ("--train.precision", "--precision"),
    "amp": ("--train.precision", "--precision"),
    "compile": ("--train.compile",),
    "optimizer": ("--optim.optimizer",),
    "data-dir": ("--data.path", "--data"),
    "dataset": ("--data.path", "--data"),
    "train-file": ("--data",),
    "validation-file": ("--eval",),
    "max-length": ("--window.max-seq-length", "--data.max-seq-length", "--data.block-length"),
    "checkpoint": ("--model", "--model.checkpoint-path"),
    "model-name-or-path": ("--model",),
    "save-steps": ("--run.checkpoint-frequency",),
    "eval-steps": ("--run.validation-frequency", "--run.evaluation-frequency"),
    "logging-steps": ("--run.log-frequency",),
}
"""Maps option names of other programs to candidates here; the first that the command has is suggested."""
_CODE = re.compile(r"``?([^`]+)``?")


class HelpText:
    """A help formatter of cyclopts: its own, of texts that :func:`laid_out` has laid out."""

    def __call__(self, console: Console, options: ConsoleOptions, panel: HelpPanel) -> None:
        """Print a box of options or commands."""
        from attrs import evolve
        from cyclopts.help import DefaultFormatter

        for entry in panel.entries:
            _lay_out(entry.description)
        entries = [
            evolve(entry, default=None) if entry.default in _EMPTY else entry for entry in panel.entries
        ]
        DefaultFormatter()(console, options, panel.copy(entries=entries))

    def render_usage(self, console: Console, options: ConsoleOptions, usage: Any) -> None:
        """Print the line with the command's form."""
        from cyclopts.help import DefaultFormatter

        DefaultFormatter().render_usage(console, options, usage)

    def render_description(self, console: Console, _: ConsoleOptions, description: Any) -> None:
        """Print what a command does."""
        _lay_out(description)
        console.print(description)


def _lay_out(description: Any) -> None:
    """Lay out the text of a description in its place; defaults and choices of options stand beside it."""
    text = getattr(description, "primary_renderable", None)
    if text:
        description.primary_renderable = laid_out(text.plain)


def laid_out(text: str) -> Text:
    """Return a text with paragraphs as one line, lines of code as they are, and bold instead of backticks."""
    from rich.text import Text

    blocks = [
        block if block.startswith("    ") else " ".join(block.split())
        for block in re.split(r"\n\s*\n", text.strip("\n"))
    ]
    result = Text()
    for index, part in enumerate(_CODE.split("\n\n".join(blocks))):
        result.append(part, style="bold" if index % 2 else "")
    return result


def explained(error: CycloptsError) -> Panel:
    """Return the box of an error in the command line."""
    from cyclopts import CycloptsPanel

    text = explanation(error)
    return CycloptsPanel(error if text == str(error) else text)


def explanation(error: CycloptsError) -> str:
    """Return the text of an error in the command line."""
    from cyclopts import MissingArgumentError, UnknownOptionError

    if type(error) is MissingArgumentError and not error.keyword and error.argument:
        command = " ".join(("shoal", *(error.command_chain or ())))
        name = (
            error.argument.name if error.argument.index is None else error.argument.name.lstrip("-").upper()
        )
        return f"{command} needs {name}; see {command} --help"
    if isinstance(error, UnknownOptionError) and (namesake := _namesake(error)):
        return f"{str(error).partition(' Did you mean')[0]} Did you mean {namesake}?"
    return str(error)


def _namesake(error: UnknownOptionError) -> str:
    """Return the option that is meant by the unknown one; empty if none has its name.

    It is the option of another section with this name, or the one that other programs call so.
    """
    option = (error.token.keyword or error.token.value).partition("=")[0]
    names = [name for argument in error.argument_collection if argument.parse for name in argument.names]
    word = option.lstrip("-").rpartition(".")[2].replace("_", "-")
    for name in _CALLED_ELSEWHERE.get(word, ()):
        if name in names:
            return name
    namesakes = [name for name in names if name.lstrip("-").rpartition(".")[2] == word != ""]
    return next(iter(get_close_matches(option, namesakes, n=1, cutoff=0.0)), "")
