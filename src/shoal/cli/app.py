"""``shoal …``: reads options, calls the package, turns errors into one line and an exit code.

Thin on purpose, and quick to start: each command imports what it needs when it runs.
"""

from __future__ import annotations

import sys

import cyclopts
from cyclopts import App

import shoal
from shoal.cli.bench import bench
from shoal.cli.evaluate import evaluate
from shoal.cli.finetune import finetune
from shoal.cli.hosts import emulate, serve
from shoal.cli.pipeline import pipeline
from shoal.cli.plan import plan
from shoal.cli.predict import predict
from shoal.cli.prepare import prepare
from shoal.cli.results import doctor, export, report
from shoal.cli.train import train
from shoal.errors import EXIT_OK, EXIT_USAGE, ShoalError

app = App(
    name="shoal",
    version=f"shoal {shoal.__version__}",
    help="""Train PyTorch models on many machines in the least time.

A first run, from text to a report:

    shoal prepare text builtin --out runs/text

    shoal train albert --preset tiny --data.path runs/text --run.dir runs/first --workers 2

    shoal report runs/first
    """,
    help_format="markdown",
)
for command in (
    prepare,
    train,
    finetune,
    evaluate,
    predict,
    plan,
    pipeline,
    emulate,
    serve,
    export,
    report,
    bench,
    doctor,
):
    app.command(command)


def main() -> None:
    """Run the command line; the only place that turns an error into an exit code."""
    try:
        result = app(sys.argv[1:], result_action="return_value", exit_on_error=False, print_error=True)
    except cyclopts.CycloptsError:
        sys.exit(EXIT_USAGE)
    except ShoalError as error:
        print(f"shoal: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(result if isinstance(result, int) else EXIT_OK)
