"""Defines the ``shoal`` command: parses options, calls the package, prints errors as one line.

It starts fast because each command imports its modules when it runs.
"""

from __future__ import annotations

import atexit
import gc
import os
import select
import signal
import sys
import threading
from typing import Literal, NoReturn

import cyclopts
from cyclopts import App, Parameter

from shoal.cli.commands import emulate, export, report
from shoal.cli.help_text import HelpText, explained
from shoal.cli.output import chosen_output
from shoal.cli.plan import plan
from shoal.env.settings import debug, set_debug
from shoal.errors import EXIT_OK, EXIT_USAGE, ending, flush_output, hook_errors, print_any_character

app = App(
    name="shoal",
    version_flags=(),
    help="""Train PyTorch models on many machines in the least time.

A first run, from text to a report:

    shoal prepare text builtin --out runs/text

    shoal train albert --preset tiny --data.path runs/text --run.dir runs/first

    shoal report runs/first

An error is one line; --debug shows where it was raised. --quiet prints nothing but errors. --json of runs,
report, doctor, plan and bench prints one JSON document.
    """,
    help_format="plaintext",
    help_formatter=HelpText(),
    error_formatter=explained,
    # No --empty-measured beside --measured; of an option that is given twice the last counts, as in argparse.
    default_parameter=Parameter(negative_iterable=(), allow_repeating=True),
)
# Commands with many options are imported when they are used: `shoal --help` takes half as long
_LAZY = {
    "cli.prepare:prepare": "Turn raw data into shards that training reads.",
    "cli.train:train": "Train a recipe; the same command resumes a stopped run.",
    "cli.train:finetune": """Finetune a pretrained model on a task and score it; the same command resumes.

The model is the directory of a run of shoal (its best or newest checkpoint) or a transformers directory with
its tokenizer: BERT, ALBERT, RoBERTa or DistilBERT, or T5, which generates its answers.

    shoal finetune squad --preset albert --model runs/first --data train-v2.0.json --eval dev-v2.0.json

    shoal finetune classify --model bert/ --data train.tsv --eval dev_matched.tsv dev_mismatched.tsv

    shoal finetune t5 --task mnli --model t5/ --data train.tsv --eval dev_matched.tsv dev_mismatched.tsv
    """,
    "cli.use:predict": "Use a trained model on your files.",
    "cli.use:evaluate": "Score predictions or a trained network.",
    "cli.pipeline:pipeline": "Show pipelines: models that are split over several devices.",
    "cli.launch:launch": "Start the workers of a job on this host: `srun shoal launch -- python train.py`.",
    "cli.submit:submit": "Submit a command to a cluster.",
    "cli.cluster:cluster": "Write configuration files of a cluster for AWS's tools.",
    "cli.image:image": "Build container images for clusters, and push them.",
    "cli.runs:runs": "List the runs below this folder, and submitted jobs.",
    "cli.runs:logs": "Print the output of a submitted job.",
    "cli.runs:stop": "Make a submitted job save and exit, without a restart.",
    "cli.bench:bench": "Measure this machine or cluster.",
    "comm.server:serve": """Sum gradients on a helper host for workers with backend shoal.

Start it on each helper host, then the workers with SHOAL_HELPERS=ADDRESS:PORT,... and the same secret. It
runs until SIGTERM or Ctrl-C, and needs neither torch nor a GPU.
    """,
    "doctor:doctor": """Show versions, devices and the native core, and how to install missing parts.

With --bundle it also writes an archive for a bug report, without secrets:

    shoal doctor --bundle bug.tar.gz --run runs/first
    shoal doctor --cache /dev/shm/shards --cache-bytes 200GB
    """,
}
_EXIT_UNREAD = 128 + signal.SIGPIPE
"""Exit code of a command whose output nobody reads to its end, as the shell has it for other commands."""
for module, text in _LAZY.items():
    app.command(f"shoal.{module}", name=module.partition(":")[2], help=text)
for command in (plan, emulate, export, report):
    app.command(command)


@app.command(name="--install-completion")
def install_completion(*, shell: Literal["bash", "zsh", "fish"] | None = None) -> None:
    """Set up tab completion in your shell; open a new one to use it.

    Parameters
    ----------
    shell
        Default: the shell that runs this command.
    """
    print(app.install_completion(shell=shell))


@app.command(name="--version")
def version() -> None:
    """Print the version and the commit that it was built from."""
    from shoal.doctor import version_text

    print(version_text())


def main() -> NoReturn:
    """Run the command line; the only place that turns an error into an exit code.

    Whatever ends a command is one line on stderr. ``--debug`` before ``--`` shows the traceback too.
    """
    # A parent may have ignored it, which is inherited: the children's exit codes would be lost, and read as 0
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    words = sys.argv[1:]
    own = words[: words.index("--")] if "--" in words else list(words)
    if "--debug" in own:
        words.remove("--debug")
        own.remove("--debug")
        set_debug()
    if not debug():
        hook_errors()
    try:
        print_any_character()
        with chosen_output(words, own) as words:
            result = app(words, result_action="return_value", exit_on_error=False, print_error=True)
            sys.stdout.flush()
        code = result if isinstance(result, int) else EXIT_OK
    except cyclopts.CycloptsError:
        code = EXIT_USAGE
    except BaseException as error:  # the last net
        by_rich = isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError)
        if by_rich or (isinstance(error, BrokenPipeError) and _nobody_reads()):
            code = EXIT_OK if {"--help", "-h"} & set(own) else _EXIT_UNREAD
        elif isinstance(error, SystemExit):
            raise
        else:
            end = ending(error, prefix="shoal: ", debug=debug())
            print(end.text, file=sys.stderr)
            if not debug():
                hook_errors(has_ended=True)
            code = end.exit_code
    finally:
        flush_output()
    sys.exit(code)


def _nobody_reads() -> bool:
    """Return whether stdout is a pipe whose reader, such as ``head``, has gone."""
    state = select.poll()
    state.register(1, 0)
    return any(event & select.POLLERR for _, event in state.poll(0))


def program() -> NoReturn:
    """Run the command line as the program of this process, and end it.

    With torch and transformers loaded the interpreter spends 1 s of processor time on visiting again and
    again what they have made, and 1.5 s at its end, where the system frees everything at once. Threads and
    exit functions have their end as always.
    """
    gc.set_threshold(50_000)
    try:
        main()
    except SystemExit as ended:
        if "torch" not in sys.modules or not isinstance(ended.code, int):
            raise
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        flush_output()
        os._exit(ended.code)
