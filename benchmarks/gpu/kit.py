"""Runs what there is to measure on a machine with one GPU, within a budget of time: ``make gpu``.

    python -m benchmarks.gpu.kit --budget 1320
    python -m benchmarks.gpu.kit --stage bert --stage t5
    python -m benchmarks.gpu.kit --rehearsal          # tiny sizes on a CPU

Every job is a process of its own with a limit of time; one that fails is reported, and the next goes on.
After each job the results so far are written: ``kit_DATE.json`` and ``kit_DATE.md``, beside ``kit.log`` with
the output of all jobs. The exit status is 0 if no job failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.bert_step import CASES, VOCABULARY
from benchmarks.gpu.stages import Job, Stage, stages
from shoal.env import TEST_DATA, child_environment, test_data_dir

FOLDER = Path("build/gpu")
DATA = FOLDER / "data"
DATA_FILES = (VOCABULARY, *CASES["pretraining"].needs, *CASES["squad"].needs)
BUDGET_S = 1_320.0
H100_SHARE = 0.9
"""Of an H200's throughput, which the targets are for."""
_LAST_LINES = 12
Status = Literal["done", "failed", "out of time", "not run"]


@dataclass(kw_only=True)
class Outcome:
    """Holds the result of a job."""

    stage: str
    title: str
    status: Status
    seconds: float = 0.0
    said: str = ""
    """The end of the output of a job that failed."""
    figures: list[dict[str, Any]] = field(default_factory=list)
    """``what``, ``value``, ``unit``, and ``peer``, ``ratio``, ``target`` where there are some."""


class Kit:
    """Runs jobs one after the other and writes what they found."""

    def __init__(self, folder: Path, budget_s: float, *, rehearsal: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._rehearsal = folder, rehearsal
        self._end_s = time.monotonic() + budget_s
        self._log = folder / "kit.log"
        self._log.write_text("", encoding="utf-8")
        self.outcomes: list[Outcome] = []

    def run(self, chosen: Sequence[Stage]) -> bool:
        """Run the jobs until the budget is spent; return whether none failed."""
        for stage in chosen:
            stage_end_s = time.monotonic() + stage.limit_s
            for job in stage.jobs:
                left_s = min(self._end_s, stage_end_s) - time.monotonic()
                if left_s <= 1:
                    outcome = Outcome(stage=stage.name, title=job.title, status="not run")
                else:
                    outcome = self._run(stage, job, min(left_s, job.limit_s))
                self.outcomes.append(outcome)
                print(f"{stage.name:<10}{job.title:<40}{outcome.status}, {outcome.seconds:.0f} s", flush=True)
                if outcome.said:
                    print(outcome.said, flush=True)
                self.write()
        return all(outcome.status == "done" for outcome in self.outcomes)

    def _run(self, stage: Stage, job: Job, limit_s: float) -> Outcome:
        begin_s = time.monotonic()
        with tempfile.TemporaryDirectory() as name:
            out = Path(name) / "out.json"
            command = [str(out) if word == "{out}" else word for word in job.command]
            status, text = self._call(command, limit_s)
            figures: list[dict[str, Any]] = []
            if out.is_file():  # a benchmark whose row misses its target has measured it all the same
                try:
                    figures = figures_of(job, json.loads(out.read_text(encoding="utf-8")))
                except (ValueError, KeyError, TypeError) as error:  # cut off, or of another version
                    status, text = "failed", f"{text}\nits file cannot be read: {error!r}"
                else:
                    status = "done" if status == "failed" and job.kind == "rows" and figures else status
        said = "" if status == "done" else "\n".join(text.strip().splitlines()[-_LAST_LINES:])
        seconds = time.monotonic() - begin_s
        return Outcome(
            stage=stage.name, title=job.title, status=status, seconds=seconds, said=said, figures=figures
        )

    def _call(self, command: list[str], limit_s: float) -> tuple[Status, str]:
        """Run a command in a process group of its own, which ends with it."""
        environment = child_environment()
        if DATA.is_dir() and TEST_DATA not in environment:
            environment[TEST_DATA] = str(DATA.absolute())
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            start_new_session=True, env=environment,
        )  # fmt: skip
        status: Status
        try:
            text, _ = process.communicate(timeout=limit_s)
            status = "failed" if process.returncode else "done"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            text, _ = process.communicate()
            status = "out of time"
        with self._log.open("a", encoding="utf-8") as log:
            log.write(f"\n$ {' '.join(command)}\n{text}")
        return status, text

    def write(self) -> None:
        """Write the results so far."""
        cuda = torch.cuda.is_available()
        device = torch.cuda.get_device_name() if cuda else "no GPU: a rehearsal, whose figures mean nothing"
        date = datetime.date.today().isoformat()
        about = {
            "date": date,
            "device": device,
            "rehearsal": self._rehearsal,
            "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
            "command": " ".join(sys.orig_argv),
        }
        share = H100_SHARE if "H100" in device else 1.0
        tree = {**about, "jobs": [asdict(outcome) for outcome in self.outcomes]}
        stem = self._folder / f"kit_{date}"
        stem.with_suffix(".json").write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
        lines = table(self.outcomes, title=f"{device}, torch {torch.__version__}, {date}", target_share=share)
        stem.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def figures_of(job: Job, tree: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the figures of the file that a job wrote."""
    if job.kind == "train":
        value, unit = tree["samples_per_s"], f"{tree['unit']}/s"
        busy = tree["samples_per_s"] * tree["flops_per_sample"] / tree["matmul_flops_per_s"]
        figures = [{"what": job.title, "value": value, "unit": unit, "target": job.target}]
        return [*figures, {"what": f"{job.title}: share of a large product", "value": busy, "unit": ""}]
    if job.kind == "rows":
        return [
            {
                "what": row["case"], "value": row["ours"], "unit": row["unit"],
                "peer": row["peer_name"], "ratio": row["ratio"], "target_ratio": row["target"],
            }
            for row in tree["rows"]
        ]  # fmt: skip
    kernels = [
        {"what": f"{tree['model']}: {kernel['name'][:80]}", "value": kernel["share"], "unit": "of the step"}
        for kernel in tree["kernels"]
    ]
    queued = tree["queued_s"] / tree["step_s"]
    return [{"what": f"{tree['model']}: the host queues", "value": queued, "unit": "of the step"}, *kernels]


def table(outcomes: Sequence[Outcome], *, title: str, target_share: float) -> list[str]:
    """Return the results as lines of Markdown."""
    lines = [f"# {title}", "", "| stage | job | figure | against | target |", "|---|---|---:|---|---:|"]
    for outcome in outcomes:
        if not outcome.figures:
            lines.append(f"| {outcome.stage} | {outcome.title} | {outcome.status} | | |")
        for figure in outcome.figures:
            against = f"{figure['ratio']:.2f} × {figure['peer']}" if figure.get("ratio") else ""
            target = figure.get("target_ratio")
            if figure.get("target"):
                target = target_share * figure["target"]
            lines.append(
                f"| {outcome.stage} | {figure['what'].replace('|', '/')} | {figure['value']:.4g} "
                f"{figure['unit']} | {against} | {f'{target:.4g}' if target else ''} |"
            )
    return lines


def copy_data(source: Path, target: Path) -> int:
    """Copy the test data that the kit reads, and return its bytes.

    Raises:
        SystemExit: some of it is not there.
    """
    num_bytes = 0
    for name in DATA_FILES:
        if not (source / name).is_file():
            raise SystemExit(f"{source / name} is not there: name the folder of the test data in {TEST_DATA}")
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / name, target / name)
        num_bytes += (source / name).stat().st_size
    return num_bytes


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stage", action="append", metavar="NAME", help="only this one; may be repeated")
    parser.add_argument(
        "--budget", type=float, default=BUDGET_S, metavar="SECONDS", help="stop after so long"
    )
    parser.add_argument("--rehearsal", action="store_true", help="tiny sizes, on a CPU")
    parser.add_argument("--data", action="store_true", help="only copy the test data that the kit reads")
    args = parser.parse_args(argv)
    if args.data:
        print(f"{copy_data(test_data_dir(), DATA) / 1e6:.1f} MB in {DATA}")
        return 0
    if not args.rehearsal and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device here; --rehearsal tries the kit itself")
    folder = FOLDER.with_name("gpu-rehearsal") if args.rehearsal else FOLDER
    all_stages = stages(folder, rehearsal=args.rehearsal)
    names = [stage.name for stage in all_stages]
    if unknown := set(args.stage or ()) - set(names):
        parser.error(f"--stage {', '.join(sorted(unknown))} is none of {', '.join(names)}")
    chosen = [stage for stage in all_stages if not args.stage or stage.name in args.stage]
    kit = Kit(folder, args.budget, rehearsal=args.rehearsal)
    is_well = kit.run(chosen)
    print(f"results: {folder}")
    return 0 if is_well else 1


if __name__ == "__main__":
    raise SystemExit(main())
