"""Runs what there is to measure on a machine with one GPU, in three parts: ``make gpu PART=1``.

    python -m benchmarks.gpu.kit --part 1             # in 9 minutes
    python -m benchmarks.gpu.kit --part 1 --smoke     # in 90 s: every job starts, nothing is compiled
    python -m benchmarks.gpu.kit --stage bert --stage t5
    python -m benchmarks.gpu.kit --rehearsal          # tiny sizes on a CPU

Every job is a process of its own with a limit of time; one that fails is reported, and the next goes on.
After each job the results so far are written to ``build/gpu/results``, or what ``--results`` names:
``kit.json`` and ``kit.md``, beside ``kit.log`` with the output of all jobs. With ``--part`` or ``--stage``
those of other stages stay. The exit status is 0 if no job failed. Compiled kernels are kept in
``build/gpu/cache``, which travels.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.gpu.stages import PARTS, Job, Stage, smoked, stages
from benchmarks.gpu.travel import CACHE, DATA, FOLDER, MADE, MOST_RESULTS, RESULTS
from shoal.env.settings import TEST_DATA, test_data_dir
from shoal.env.variables import child_environment

BUDGET_S, PART_S, SMOKE_S = 1_440.0, 540.0, 90.0
"""Of all parts, of one, and of a smoke test."""
MOST_USED_MIB = 1_024
"""Memory of the GPU that is in use though nothing else runs."""
H100_SHARE = 0.9
"""Of an H200's throughput, which the targets are for."""
REHEARSAL_PATIENCE = 4.0
"""Times the limits of stages and jobs, in a rehearsal."""
_LAST_LINES = 12
MOST_LOG = 1 << 20
"""Characters of a job's output that the log keeps."""
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
    beside: str = ""
    """Other processes on the GPU when the job began or ended; empty: none."""
    state: str = ""
    """Free memory and clock of the GPU when the job began."""
    quiet: bool = False
    """Nothing else used the GPU, by its processes and its memory."""
    figures: list[dict[str, Any]] = field(default_factory=list)
    """``what``, ``value``, ``unit``, and ``peer``, ``ratio``, ``target`` where there are some."""


class Kit:
    """Runs jobs and writes what they found.

    Args:
        folder: of the results, which it makes.
        budget_s: for all jobs together.
        rehearsal: figures mean nothing, so two jobs run at once, with a thread each; and stages and jobs have
            more time, since a busy CPU is no fault of the kit.
        kept: outcomes of stages that are not run.
        smoke: nothing is compiled, and three jobs run at once.
    """

    def __init__(
        self,
        folder: Path,
        budget_s: float,
        *,
        rehearsal: bool,
        kept: Sequence[Outcome] = (),
        smoke: bool = False,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._rehearsal, self._smoke = folder, rehearsal, smoke
        self._end_s = time.monotonic() + budget_s
        self._ends_s: dict[str, float] = {}  # of stages
        self._ended: dict[str | None, threading.Event] = {}  # of jobs
        self._log = folder / "kit.log"
        self._log.write_text("", encoding="utf-8")
        self._kept = list(kept)
        self.outcomes: list[Outcome] = []

    def run(self, chosen: Sequence[Stage]) -> bool:
        """Run the jobs until the budget is spent; return whether none failed."""
        jobs = [(stage, job) for stage in chosen for job in stage.jobs]
        self._ended = {job.title: threading.Event() for _, job in jobs}
        self._run_jobs([each for each in jobs if each[1].is_first], at_once=1)
        others = [each for each in jobs if not each[1].is_first]
        self._run_jobs(others, at_once=3 if self._smoke else 2 if self._rehearsal else 1)
        return all(outcome.status == "done" for outcome in self.outcomes)

    def _run_jobs(self, jobs: Sequence[tuple[Stage, Job]], *, at_once: int) -> None:
        if not jobs:
            return
        with ThreadPoolExecutor(at_once) as pool:
            outcomes = pool.map(self._run_in_time, *zip(*jobs, strict=True))
            for (_, job), outcome in zip(jobs, outcomes, strict=True):
                compare(job, outcome, self.outcomes)
                self.outcomes.append(outcome)
                print(
                    f"{outcome.stage:<10}{outcome.title:<40}{outcome.status}, {outcome.seconds:.0f} s",
                    flush=True,
                )
                if outcome.said:
                    print(outcome.said, flush=True)
                self.write()

    def _run_in_time(self, stage: Stage, job: Job) -> Outcome:
        """Run a job after the one whose files it reads, unless the time of its stage or of all is over."""
        if job.after in self._ended:  # it began earlier, so this ends
            self._ended[job.after].wait()
        patience = REHEARSAL_PATIENCE if self._rehearsal else 1.0
        end_s = self._ends_s.setdefault(stage.name, time.monotonic() + patience * stage.limit_s)
        left_s = min(self._end_s, end_s) - time.monotonic()
        try:
            if left_s <= 1:
                return Outcome(stage=stage.name, title=job.title, status="not run")
            return self._run(stage, job, min(left_s, patience * job.limit_s))
        finally:
            self._ended[job.title].set()

    def _run(self, stage: Stage, job: Job, limit_s: float) -> Outcome:
        begin_s, before = time.monotonic(), gpu_state()
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
        seconds, after = time.monotonic() - begin_s, gpu_state()
        return Outcome(
            stage=stage.name, title=job.title, status=status, seconds=seconds, said=said, figures=figures,
            beside=before.others or after.others, state=before.said, quiet=before.is_idle and after.is_idle,
        )  # fmt: skip

    def _call(self, command: list[str], limit_s: float) -> tuple[Status, str]:
        """Run a command in a session of its own, which ends with it."""
        environment = child_environment()
        environment.pop("PYTHONPATH", None)  # make's, by which the kit runs before shoal is installed
        environment.setdefault(TEST_DATA, str(data_folder().absolute()))
        for name, folder in (("TORCHINDUCTOR_CACHE_DIR", "inductor"), ("TRITON_CACHE_DIR", "triton")):
            environment.setdefault(name, str((FOLDER / CACHE / folder).absolute()))
        if self._rehearsal:  # the threads of two jobs would wait for each other's processors
            environment["OMP_NUM_THREADS"] = "1"
        if self._smoke:
            environment["TORCH_COMPILE_DISABLE"] = "1"
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            start_new_session=True, env=environment,
        )  # fmt: skip
        with suppress(OSError):  # the kernel ends the job, not the kit, where memory is full
            Path(f"/proc/{process.pid}/oom_score_adj").write_text("1000", encoding="utf-8")
        status: Status
        try:
            text, _ = process.communicate(timeout=limit_s)
            status = "failed" if process.returncode else "done"
        except subprocess.TimeoutExpired:
            end_session(process.pid)
            text, _ = process.communicate()
            status = "out of time"
        end_session(process.pid)  # what a job has left would keep memory of the GPU
        with self._log.open("a", encoding="utf-8") as log:
            log.write(f"\n$ {' '.join(command)}\n{text[-MOST_LOG:]}")
        return status, text

    def write(self) -> None:
        """Write the results so far."""
        cuda = torch.cuda.is_available()
        device = torch.cuda.get_device_name() if cuda else "no GPU: a rehearsal, whose figures mean nothing"
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        about = {
            "date": date,
            "device": device,
            "rehearsal": self._rehearsal,
            "versions": {"torch": torch.__version__, "python": sys.version.split()[0]},
            "command": " ".join(sys.orig_argv),
        }
        share = H100_SHARE if "H100" in device else 1.0
        outcomes = [*self._kept, *self.outcomes]
        tree = {**about, "jobs": [asdict(outcome) for outcome in outcomes]}
        stem = self._folder / "kit"
        stem.with_suffix(".json").write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
        lines = table(outcomes, title=f"{device}, torch {torch.__version__}, {date}", target_share=share)
        stem.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class GpuState:
    """Holds what the GPU's driver says between two jobs."""

    others: str = ""
    """Other processes and their memory; empty: none run."""
    said: str = ""
    """Free memory, that in use, and the clock."""
    is_idle: bool = False
    """It is known that nothing else uses the GPU."""


def gpu_state() -> GpuState:
    """Return the state of the GPU; a machine without one has none."""
    if not torch.cuda.is_available():
        return GpuState()
    processes = _ask_driver("--query-compute-apps=pid,used_memory")
    memory = _ask_driver("--query-gpu=memory.free,memory.used,clocks.sm")
    if processes is None or not memory:
        return GpuState(others="nvidia-smi does not say")
    others = "; ".join(line for line in processes if not line.startswith(f"{os.getpid()},"))
    free, used, clock = (word.strip() for word in memory[0].split(","))
    # processes of another container are not listed, but their memory is in use
    is_idle = not others and used.split()[0].isdecimal() and int(used.split()[0]) <= MOST_USED_MIB
    return GpuState(others=others, said=f"{free} free, {used} in use, {clock}", is_idle=is_idle)


def _ask_driver(query: str) -> list[str] | None:
    """Return the lines of an answer; ``None``: there is none."""
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.splitlines() if done.returncode == 0 else None


def end_session(leader: int) -> None:
    """Kill all processes of a session, and their descendants, which may have begun sessions of their own.

    Workers and Inductor's compilers have; alive, they would keep the output open.
    """
    sessions = {leader}
    while members := members_of(sessions):
        for pid in members:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


def members_of(sessions: set[int]) -> list[int]:
    """Return the processes of sessions that run, by Linux's ``/proc``; add the sessions of their children."""
    running: dict[int, tuple[int, int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text(encoding="utf-8", errors="replace")
        except OSError:  # ended in the meantime
            continue
        state, parent, _, session = text[text.rindex(")") + 2 :].split()[:4]
        if state not in "ZX":
            running[int(stat.parent.name)] = int(parent), int(session)
    count = 0
    while count != len(sessions):
        count = len(sessions)
        found = [pid for pid, (_, session) in running.items() if session in sessions]
        sessions |= {session for parent, session in running.values() if parent in found}
    return found


def data_folder() -> Path:
    """Return where the test data is: what travelled, else that of the tests."""
    return FOLDER / DATA if (FOLDER / DATA).is_dir() else test_data_dir()


def outcomes_of_others(results: Path, chosen: Sequence[str]) -> list[Outcome]:
    """Return what an earlier run has found in stages that are not ``chosen``."""
    file = results / "kit.json"
    if not file.is_file():
        return []
    jobs = json.loads(file.read_text(encoding="utf-8"))["jobs"]
    return [Outcome(**job) for job in jobs if job["stage"] not in chosen]


def check_results(results: Path) -> None:
    """Count the files that come back.

    Raises:
        SystemExit: they are too many.
    """
    found = sorted(path.name for path in results.rglob("*") if path.is_file())
    if len(found) > MOST_RESULTS:
        names = ", ".join(found)
        raise SystemExit(
            f"{results} has {len(found)} files, and at most {MOST_RESULTS} may come back: {names}"
        )


def compare(job: Job, outcome: Outcome, before: Sequence[Outcome]) -> None:
    """Add to each of our figures its ratio to the figure of the peer."""
    if job.beside is None or not outcome.figures:
        return
    peer = outcome.figures[0]
    for ours in (figure for each in before for figure in each.figures if figure["what"] == job.beside):
        ours["peer"], ours["ratio"] = peer["what"], ours["value"] / peer["value"]


def figures_of(job: Job, tree: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the figures of the file that a job wrote."""
    if job.kind == "train":
        figures: list[dict[str, Any]]
        value, unit = tree["samples_per_s"], f"{tree['unit']}/s"
        busy = tree["samples_per_s"] * tree["flops_per_sample"] / tree["matmul_flops_per_s"]
        figures = [{"what": job.title, "value": value, "unit": unit, "target": job.target}]
        figures.append({"what": f"{job.title}: share of a large product", "value": busy, "unit": ""})
        if tree["mfu"] is not None:
            what = f"{job.title}: share of the data sheet's peak (MFU)"
            figures.append({"what": what, "value": tree["mfu"], "unit": ""})
        return figures
    if job.kind == "peer":  # the fastest first: it is what ours is compared with
        by_speed = sorted(tree["samples_per_s"].items(), key=lambda form: -form[1])
        return [
            {"what": f"{job.title}, {form}" if form else job.title, "value": value, "unit": tree["unit"]}
            for form, value in by_speed
        ]
    if job.kind == "rows":
        return [
            {
                "what": row["case"], "value": row["ours"], "unit": row["unit"],
                "peer": row["peer_name"], "ratio": row["ratio"], "target_ratio": row["target"],
            }
            for row in tree["rows"]
        ]  # fmt: skip
    raise ValueError(f"a job of kind {job.kind} has no figures")


def table(outcomes: Sequence[Outcome], *, title: str, target_share: float) -> list[str]:
    """Return the results as lines of Markdown."""
    lines = [
        *(f"# {title}", "", "| stage | job | figure | against | target | GPU |"),
        "|---|---|---:|---|---:|---|",
    ]  # fmt: skip
    for outcome in outcomes:
        gpu = "quiet" if outcome.quiet else "; ".join(filter(None, (outcome.beside, outcome.state)))
        if not outcome.figures:
            lines.append(f"| {outcome.stage} | {outcome.title} | {outcome.status} | | | {gpu} |")
        for figure in outcome.figures:
            against = f"{figure['ratio']:.2f} × {figure['peer']}" if figure.get("ratio") else ""
            target, reached = figure.get("target_ratio"), figure.get("ratio")
            if figure.get("target"):
                target, reached = target_share * figure["target"], figure["value"]
            wanted = f"{target:.4g}: {reached / target:.0%} of it" if target and reached else ""
            lines.append(
                f"| {outcome.stage} | {figure['what'].replace('|', '/')} | {figure['value']:.4g} "
                f"{figure['unit']} | {against} | {wanted} | {gpu} |"
            )
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", type=int, choices=PARTS, help="only the stages of this call")
    parser.add_argument("--stage", action="append", metavar="NAME", help="only this one; may be repeated")
    parser.add_argument(
        "--results", type=Path, default=FOLDER / RESULTS, metavar="FOLDER", help="of the files that come back"
    )
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS",
        help=f"stop after so long; default: {BUDGET_S:.0f}, a part {PART_S:.0f}, with --smoke {SMOKE_S:.0f}",
    )  # fmt: skip
    parser.add_argument(
        "--smoke", action="store_true", help="two steps of each job with an eighth of its batch, uncompiled"
    )
    parser.add_argument("--rehearsal", action="store_true", help="tiny sizes, on a CPU")
    args = parser.parse_args(argv)
    if not args.rehearsal and not torch.cuda.is_available():
        parser.error("torch finds no CUDA device here; --rehearsal tries the kit itself")
    all_stages = stages(FOLDER / MADE, data_folder(), args.results, rehearsal=args.rehearsal)
    names = [stage.name for stage in all_stages]
    if unknown := set(args.stage or ()) - set(names):
        parser.error(f"--stage {', '.join(sorted(unknown))} is none of {', '.join(names)}")
    chosen = [
        stage
        for stage in all_stages
        if (not args.stage or stage.name in args.stage)
        and (args.part is None or stage.part in (None, args.part))
    ]
    if args.smoke:
        chosen = [smoked(stage) for stage in chosen]
    budget_s = args.budget or (SMOKE_S if args.smoke else PART_S if args.part else BUDGET_S)
    results = args.results
    kept = outcomes_of_others(results, [stage.name for stage in chosen])
    kit = Kit(results, budget_s, rehearsal=args.rehearsal, kept=kept, smoke=args.smoke)
    is_well = kit.run(chosen)
    check_results(results)
    print(f"results: {results}")
    return 0 if is_well else 1


if __name__ == "__main__":
    raise SystemExit(main())
