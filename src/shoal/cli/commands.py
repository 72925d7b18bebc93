"""Defines ``shoal export``, ``report`` and ``emulate``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from shoal.errors import EXIT_OK, UsageError
from shoal.json_text import json_document


def export(
    source: Path,
    *,
    out: Path | None = None,
    onnx: Path | None = None,
    precision: Literal["fp32", "bf16", "fp16"] = "fp32",
) -> None:
    """Export a run's model for other libraries.

    Language models are exported for transformers, with their tokenizer; image networks as safetensors with
    torchvision's names and a config.json; encoders and residual networks also as ONNX.

    Parameters
    ----------
    source
        A run directory (its best or newest checkpoint), or one of its checkpoints, also at s3:// or gs://;
        for --onnx also a directory written by an export or a finetuning.
    out
        Output directory; default: transformers-STEP or model-STEP in the run directory, if it is a folder.
    onnx
        Output file of the ONNX model. An existing export of the run, such as a finetuned model, is reused.
    precision
        Type of the weights in the output directory, written into its config.json; ONNX is fp32.
    """
    if onnx is not None and precision != "fp32":
        raise UsageError(f"--onnx is written in fp32: leave out --precision {precision}, or leave out --onnx")
    from shoal.recipes.model_source import find_model
    from shoal.recipes.uploaded_runs import is_uploaded, local_model, location_of

    if is_uploaded(source) and out is None and onnx is None:
        raise UsageError(f"{location_of(source)} lies in an object store: name a folder with --out")
    source = local_model(source, checkpoint=onnx is None)
    # a wrong path is refused at once, before torch is imported
    find_model(source, "SOURCE", kinds=("run", "checkpoint", "export") if onnx else ("run", "checkpoint"))
    if onnx is None:
        from shoal.recipes.export import export_model

        print(export_model(source, out, precision=precision))
        return
    from shoal.recipes.onnx_export import export_onnx

    export_onnx(source, onnx, out)
    print(onnx)


def report(*runs: Path, out: Path | None = None, json: bool = False) -> None:
    """Write one HTML page about one run, or several side by side.

    Parameters
    ----------
    runs
        Run directories, or s3:// or gs://BUCKET/PREFIX of runs that --run.upload-to uploaded.
    out
        Output file; default: report.html in the first run's directory, if it is a folder.
    json
        Print state, settings, times and last scores of the runs as JSON; the page is written with --out only.
    """
    from shoal.recipes.uploaded_runs import is_uploaded, local_record, location_of
    from shoal.record import Row, read_record, record_of

    if runs and is_uploaded(runs[0]) and out is None and not json:
        raise UsageError(f"{location_of(runs[0])} lies in an object store: name a file with --out")
    named = [location_of(run) if is_uploaded(run) else run for run in runs]
    folders = {name: local_record(run) for name, run in zip(named, runs, strict=True)}
    for folder in folders.values():
        record_of(folder)  # a wrong path is said at once, before what draws is imported

    def read(name: Path | str) -> list[Row]:
        return read_record(folders[name])

    if json and runs:
        from shoal.report.runs import load_runs
        from shoal.report.summary import summary

        print(json_document({"runs": [summary(run) for run in load_runs(named, read)]}))
        if out is None:
            return
    from shoal.report.page import write_report

    page = write_report(named, out, read)
    print(page, file=sys.stderr if json else sys.stdout)


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

    Each host has its own network with a link of the given rate; processor, memory and files are this
    machine's. The command gets torchrun's environment variables. Needs Linux, root and iproute2.

    Parameters
    ----------
    command
        The command and its arguments, after `--`.
    hosts
        Number of hosts.
    nic
        Rate of each host's link in each direction, such as 200mbit; default: not limited.
    helpers
        Number of helper hosts, each with a server that sums gradients for backend shoal.
    helper_nic
        Rate of the helper hosts' links; default: --nic.
    workers_per_host
        Processes per host.
    log_dir
        Folder for the output of all ranks except rank 0; default: a temporary one, kept after a failure.
    dry_run
        Print the hosts, their addresses and rates, and exit.
    """
    from shoal.launch import emulated_job

    cluster = emulated_job.Hosts(hosts=hosts, nic=nic, helpers=helpers, helper_nic=helper_nic)
    if dry_run:
        print(cluster.check(workers_per_host))
        return EXIT_OK
    return emulated_job.emulate(command, cluster, workers_per_host=workers_per_host, log_dir=log_dir)
