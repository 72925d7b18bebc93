"""``shoal …``: reads options, calls the package, turns errors into one line and an exit code.

Thin on purpose, and quick to start: each command imports what it needs when it runs.
"""

from __future__ import annotations

import sys
import tomllib
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

import cyclopts
from cyclopts import App, Parameter

import shoal
from shoal.errors import EXIT_OK, EXIT_USAGE, ShoalError
from shoal.recipes.albert.config import PRESETS, AlbertPretrainConfig
from shoal.train.config import load_toml

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
prepare = App(name="prepare", help="Turn raw data into shards that training reads.")
train = App(name="train", help="Train a recipe; the same command again continues where the run stopped.")
evaluate = App(name="evaluate", help="Score predictions by the official rules.")
bench = App(name="bench", help="Measure this machine or cluster.")
for group in (prepare, train, evaluate, bench):
    app.command(group)


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


def _apply_settings(app: App, commands: tuple[str, ...], arguments: Any) -> None:
    """Fill in what the command line left open: first from ``--config``, then from ``--preset``.

    Keys are checked like options, so that a misspelt one in a file fails with a suggestion too.
    """
    given = {argument.name: argument.tokens[0].value for argument in arguments if argument.tokens}
    trees: list[tuple[str, dict[str, Any]]] = []
    if path := given.get("--config"):
        trees.append((path, load_toml(Path(path))))
    preset = given.get("--preset", "base")
    folder = resources.files("shoal.recipes") / commands[-1] / "presets"
    if (file := folder / f"{preset}.toml").is_file():
        trees.append((f"preset {preset}", tomllib.loads(file.read_text(encoding="utf-8"))))
    for source, tree in trees:
        for command in reversed(commands):
            tree = {command: tree}
        cyclopts.config.Dict(tree, source=source)(app, commands, arguments)


train.config = (_apply_settings,)


@train.command(name="albert")
def train_albert(
    *,
    preset: Literal[PRESETS] = "base",  # type: ignore[valid-type]
    config: Path | None = None,
    settings: Annotated[AlbertPretrainConfig, Parameter(name="*")] = AlbertPretrainConfig(),  # noqa: B008
    workers: int | None = None,
    nnodes: int = 1,
    rdzv: str | None = None,
    on: Literal["local", "emulated"] = "local",
    hosts: int | None = None,
    nic: str | None = None,
    helpers: int = 0,
    helper_nic: str | None = None,
    dry_run: bool = False,
) -> int:
    """Pretrain ALBERT: masked language model and sentence order.

    Started alone, the command starts the workers; started by torchrun, mpirun or anything that sets RANK and
    WORLD_SIZE, it joins them. Run it again to continue after a stop or a crash.

    Parameters
    ----------
    preset
        Settings to start from.
    config
        TOML file with settings that go before the preset's; options go before both.
    workers
        Workers on this host; default: one a GPU, or one.
    nnodes
        Hosts; start the same command on each, with --rdzv.
    rdzv
        HOST:PORT of the first host, where the hosts meet.
    on
        local: workers on this host; emulated: on hosts with a network of their own, made on this machine.
    hosts
        Emulated hosts, each with --workers workers.
    nic
        Rate of each emulated host's link in each direction, such as 200mbit; default: not limited.
    helpers
        Emulated helper hosts, which only sum gradients.
    helper_nic
        Rate of the helper hosts' links; default: --nic.
    dry_run
        Print the resolved settings, the batch arithmetic, parameters and memory, and stop.
    """
    from shoal.recipes.albert import start

    return start.run(
        settings,
        start.Launch(
            preset=preset,
            num_workers=workers,
            nnodes=nnodes,
            rdzv=rdzv,
            on=on,
            hosts=hosts,
            nic=nic,
            helpers=helpers,
            helper_nic=helper_nic,
            dry_run=dry_run,
        ),
        command=[sys.executable, "-m", "shoal", *sys.argv[1:]],
    )


@prepare.command(name="text")
def prepare_text(
    *sources: str,
    out: Path,
    format: Literal["auto", "lines", "files", "wikitext"] = "auto",
    tokenizer: str = "unigram",
    vocab_size: int = 8_192,
    lowercase: bool = True,
    validation: float = 0.05,
    shard_bytes: int = 64 << 20,
    errors: Literal["strict", "replace"] = "strict",
    seed: int = 0,
    processes: int = 0,
    overwrite: bool = False,
) -> None:
    """Turn text into token shards. Run it again to continue after a stop or a crash.

    Parameters
    ----------
    sources
        Files, directories or globs of text; `builtin` is the English of this Python installation.
    out
        Directory for tokenizer, shards and manifest.
    format
        One article a line, one a file, or WikiText's headings; auto looks at each file.
    tokenizer
        unigram or wordpiece to train one on the text; else the path of a sentencepiece .model, a BERT
        vocab.txt or a tokenizer.json.
    vocab_size
        Tokens of a trained tokenizer at most.
    lowercase
        Lower-case the text and drop accents; a tokenizer.json brings its own rules.
    validation
        Share of articles held out.
    shard_bytes
        Bytes of text that make one shard at most.
    errors
        Stop at bytes that are not UTF-8, or replace them.
    seed
        Another seed holds out other articles.
    processes
        Worker processes; 0: one a core. The result does not depend on it.
    overwrite
        Remove what an earlier preparation wrote there, and begin anew.
    """
    from shoal.data import prepare as text

    settings = text.PrepareConfig(
        sources=sources,
        out=out,
        format=format,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        lowercase=lowercase,
        validation=validation,
        shard_bytes=shard_bytes,
        errors=errors,
        seed=seed,
        processes=processes,
        overwrite=overwrite,
    )
    text.prepare_text(settings)


@evaluate.command(name="squad")
def evaluate_squad(
    *,
    data: Path,
    predictions: Path,
    null_odds: Path | None = None,
    null_threshold: float = 1.0,
    rules: Literal["auto", "1.1", "2.0"] = "auto",
    json: Path | None = None,
) -> None:
    """Score answers to SQuAD 1.1 or 2.0: exact match and F1, as the official scripts print them.

    A question without a prediction counts as wrong.

    Parameters
    ----------
    data
        The official JSON file of questions and answers.
    predictions
        JSON object: question id to answer, empty for "no answer".
    null_odds
        2.0 only. JSON object: question id to the odds that there is no answer; gives the best thresholds.
    null_threshold
        Odds above which a question counts as not answered.
    rules
        Those of 1.1 or 2.0; auto: 2.0 if questions are marked as impossible or have no answer.
    json
        File for the scores as well.
    """
    from shoal.data.squad import evaluate as squad

    version = None if rules == "auto" else rules
    lines = squad.evaluate(
        data, predictions, null_odds=null_odds, null_threshold=null_threshold, version=version, out=json
    )
    print(lines)


@app.command
def emulate(
    *command: Annotated[str, Parameter(allow_leading_hyphen=True)],
    hosts: int,
    nic: str | None = None,
    helpers: int = 0,
    helper_nic: str | None = None,
    workers_per_host: int = 1,
    log_dir: Path | None = None,
    dry_run: bool = False,
) -> int:
    """Run any command on emulated hosts: `shoal emulate --hosts 8 --nic 1gbit -- python job.py`.

    Each host has a network of its own with a link of the given rate; processor, memory and files are this
    machine's. The command finds its place in torchrun's variables. Needs Linux, root and iproute2.

    Parameters
    ----------
    command
        The command and its arguments, after `--`.
    hosts
        Hosts to make.
    nic
        Rate of each host's link in each direction, such as 200mbit; default: not limited.
    helpers
        Helper hosts, each with a server that sums gradients for backend shoal.
    helper_nic
        Rate of the helper hosts' links; default: --nic.
    workers_per_host
        How often the command runs on each host.
    log_dir
        Folder for the output of all ranks but the first; default: a temporary one, kept after a failure.
    dry_run
        Print the hosts, their addresses and rates, and stop.
    """
    from shoal.launch import emulated_job

    where = emulated_job.Hosts(
        hosts=hosts, nic=nic, helpers=helpers, helper_nic=helper_nic, workers_per_host=workers_per_host
    )
    if dry_run:
        print(where.check())
        return EXIT_OK
    return emulated_job.emulate(command, where, log_dir=log_dir)


@app.command
def serve(
    *, address: str, port: int = 7070, secret_file: Path | None = None, report_every_s: float = 0.0
) -> int:
    """Sum gradients on a helper host for workers whose backend is shoal, until SIGTERM or Ctrl-C.

    Start it on each helper host, then the workers with SHOAL_HELPERS=ADDRESS:PORT,... and the same secret. It
    needs neither torch nor a GPU.

    Parameters
    ----------
    address
        IPv4 address of the interface to listen on, and on no other.
    port
        Port to listen on; 0 takes a free one.
    secret_file
        File with the job's secret; default: SHOAL_SECRET_FILE or SHOAL_SECRET.
    report_every_s
        Print counters so often; 0 for never.
    """
    from shoal.comm import server

    return server.serve(address=address, port=port, secret_file=secret_file, report_every_s=report_every_s)


@app.command
def export(source: Path, *, out: Path | None = None) -> None:
    """Write a run's model and tokenizer as a directory that transformers loads.

    Parameters
    ----------
    source
        A run directory, whose newest checkpoint is taken, or one of its checkpoints.
    out
        What to write; default: transformers-STEP in the run directory.
    """
    from shoal.recipes.albert.export import export_run

    print(export_run(source, out))


@app.command
def report(*runs: Path, out: Path | None = None) -> None:
    """Write one HTML page about one run, or several side by side.

    Parameters
    ----------
    runs
        Run directories.
    out
        The page; default: report.html in the first run's directory.
    """
    from shoal.report.page import write_report

    print(write_report(runs, out))


@bench.command(name="comm")
def bench_comm(
    *,
    sizes: str = "4k,64k,1m,16m",
    collectives: str = "all_reduce",
    backends: str = "",
    dtype: str = "float32",
    repeats: int = 7,
    workers: int | None = None,
    hosts: int | None = None,
    nic: str | None = None,
    helpers: int = 0,
    helper_nic: str | None = None,
    link: str | None = None,
    timeout: float = 300.0,
    json: Path | None = None,
    plot: Path | None = None,
    trace: Path | None = None,
) -> int:
    """Time the collectives of gloo and shoal, and compare them with what the links allow.

    Started by torchrun or mpirun, the command is one of their workers and measures your hosts. Started alone,
    it starts workers on this machine; with --hosts on emulated hosts.

    Parameters
    ----------
    sizes
        Bytes of the tensor, separated by commas; k, m and g are powers of 1,024.
    collectives
        all_reduce, reduce_scatter, all_gather, broadcast, reduce, barrier; several separated by commas.
    backends
        Backends of torch.distributed, and shoal-colocated for shoal without its helper hosts. Default: gloo
        and shoal, and shoal-colocated where there are helpers.
    dtype
        Of the elements.
    repeats
        Times that each is measured.
    workers
        Workers on this machine (default 2), or on each emulated host (default 1).
    hosts
        Emulated hosts to make. Needs Linux, root and iproute2.
    nic
        Rate of each emulated host's link, such as 200mbit.
    helpers
        Emulated helper hosts.
    helper_nic
        Rate of their links; default: --nic.
    link
        Rate of a host's link on a real cluster, such as 10gbit: shows how near to the limit it gets.
    timeout
        Seconds after which a collective has failed.
    json
        File for all samples.
    plot
        File for a picture: .png, .svg or .pdf.
    trace
        File for a timeline, which chrome://tracing and ui.perfetto.dev open.
    """
    from shoal.bench import comm
    from shoal.bench.settings import CommBench, parse_sizes, split_list

    settings = CommBench(
        sizes=parse_sizes(split_list(sizes)),
        collectives=tuple(split_list(collectives)),
        backends=tuple(split_list(backends)),
        dtype=dtype,
        repeats=repeats,
        timeout_s=timeout,
        workers=workers,
        hosts=hosts,
        nic=nic,
        num_helpers=helpers,
        helper_nic=helper_nic,
        link=link,
        json=json,
        plot=plot,
        trace=trace,
    )
    return comm.run(settings, command=[sys.executable, "-m", "shoal", *sys.argv[1:]])


@app.command
def doctor() -> int:
    """Show versions, devices and the native core, what is missing and how to get it."""
    from shoal.doctor import run_doctor

    return run_doctor()


if __name__ == "__main__":
    main()
