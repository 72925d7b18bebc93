"""Writes batch scripts for Slurm, which users can read and edit, and submits them."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

from shoal.errors import ShoalError, UsageError
from shoal.launch.job_size import SIZE, JobSize, check_form, is_elastic, name_of
from shoal.launch.tools import run_tool

SEED = "{seed}"
"""Part of the command that is replaced by the number of an array's task."""
SCRIPT, STOP = "job.sbatch", "stop"
_SIGNAL_MARGIN_S = 60
"""A signal may come up to 60 s early, by Slurm's man page; one came 10 s late."""
_WORD = re.compile(r"[\w.,:/@%+=~*\[\]-]+")
_OPTION = re.compile(rf"--{_WORD.pattern}")
_TIME = re.compile(r"\d+(:\d\d){0,2}|\d+-\d+(:\d\d){0,2}|UNLIMITED", re.IGNORECASE)
_ARRAY = re.compile(r"\d+(-\d+)?(,\d+(-\d+)?)*(%\d+)?")
_OWNED = (
    "array", "het-group", "job-name", "kill-on-bad-exit", "mpi", "no-kill", "nodes", "ntasks",
    "ntasks-per-node", "open-mode", "output", "error", "requeue", "no-requeue", "signal", "time", "wrap",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SlurmJob(JobSize):
    """A job of Slurm. Its helpers are a second component of a heterogeneous job."""

    min_hosts: Annotated[int | None, SIZE] = None
    """Start with any number of hosts from this one to --hosts, as many as are available."""
    task_per_worker: Annotated[bool, SIZE] = False
    """Start each worker as a separate Slurm task; needs --workers-per-host."""
    gpus_per_host: Annotated[int | None, SIZE] = None
    """GPUs of each worker host."""
    cpus_per_host: Annotated[int | None, SIZE] = None
    """CPUs of each worker host; default: the whole node with --exclusive."""
    partition: str | None = None
    """Partition of the workers; default: Slurm's."""
    helper_partition: str | None = None
    """Partition of the helpers; default: that of the workers."""
    account: str | None = None
    """Account to charge."""
    qos: str | None = None
    """Quality of service."""
    constraint: str | None = None
    """Features that the worker nodes must have."""
    time: str = "24:00:00"
    """Time limit; a job that reaches it saves and is queued again."""
    save_s: int = 120
    """Seconds that saving a checkpoint may take before the time limit or a preemption."""
    array: str | None = None
    """Numbers of a job array, like 0-4, for seeds; {seed} in the command is replaced by each."""
    interface: str | None = None
    """Network interface for shoal, gloo and NCCL."""
    prolog: tuple[str, ...] = ()
    """Shell lines at the start of the script, such as "module load cuda"."""
    option: tuple[str, ...] = ()
    """More options of sbatch for the workers, as in --option=--mem=0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_hosts is not None and self.min_hosts > self.hosts:
            raise UsageError(f"--min-hosts {self.min_hosts} must be at most --hosts {self.hosts}")
        if self.task_per_worker and self.workers_per_host is None:
            raise UsageError("--task-per-worker needs --workers-per-host, the number of tasks per node")
        if self.task_per_worker and self.min_hosts is not None:
            raise UsageError("--min-hosts goes with one task per host: leave out --task-per-worker")
        if self.array is not None and self.helpers:
            raise UsageError(
                "Slurm has no arrays of heterogeneous jobs: leave out --helpers, or submit each by itself"
            )
        for field in fields(self):
            if isinstance(getattr(self, field.name), str) and field.name != "transport":
                check_form(self, field.name, _WORD, "must be one word without quotes")
        check_form(self, "time", _TIME, "is not of Slurm's form, like 1-12:00:00")
        check_form(self, "array", _ARRAY, "is not of Slurm's form, like 0-4")
        check_form(self, "option", _OPTION, "must be one word like --mem=0")
        for word in self.option:
            if (name := word.removeprefix("--").partition("=")[0]) in _OWNED:
                raise UsageError(f"--option {word}: the script sets --{name} itself; edit it after --to DIR")
        if any("\n" in line for line in self.prolog):
            raise UsageError("--prolog is one line; give it several times for several lines")

    def launch_options(self) -> list[str]:
        """Return the options of ``shoal launch``; the tasks of a node are its workers otherwise."""
        options = super().launch_options()
        if self.task_per_worker:
            options.remove(f"--workers={self.workers_per_host}")
        return [
            *options,
            *([f"--helpers={self.helpers}"] if self.helpers else []),
            *([f"--interface={self.interface}"] if self.interface else []),
            *self.transport_option(),
        ]

    def transport_option(self) -> list[str]:
        """Return the transport as an option of ``shoal launch``, in quotes where bash needs them."""
        return [f"--transport={shlex.quote(self.transport)}"] if self.transport else []


def render(job: SlurmJob, command: Sequence[str], folder: Path) -> str:
    """Return the batch script.

    Args:
        job: the job.
        command: of the workers; ``{seed}`` in it is replaced by an array's number.
        folder: absolute path of the job's folder, which all nodes share.

    Raises:
        UsageError: the folder cannot be written in a script, or the command has no ``{seed}`` for an array.
    """
    if not folder.is_absolute() or not _WORD.fullmatch(str(folder)):
        raise UsageError(f"the job's folder {str(folder)!r} must not have spaces or quotes in its path; --to")
    if job.array is not None and not any(SEED in word for word in command):
        raise UsageError(
            f"--array {job.array}: all jobs would be the same; write {SEED} where the command differs, "
            f"such as --train.seed {SEED} --run.dir runs/bert-{SEED}"
        )
    workers, helpers = (
        f"srun{f' --het-group={group}' if job.helpers else ''} --mpi=none --kill-on-bad-exit=0"
        for group in (0, 1)
    )
    workers += " --no-kill" * is_elastic(command)
    lines = ["#!/bin/bash", *_directives(job, command, folder), ""]
    lines += [f"job={folder}{'/$SLURM_ARRAY_TASK_ID' * (job.array is not None)}  # shared by all nodes"]
    lines += [*job.prolog, ""]
    if job.helpers:
        option = "".join(f" {each}" for each in job.transport_option())
        lines.append(f'{helpers} shoal launch --role helper --job "$job"{option} &')
        lines.append("helpers=$!")
    lines += [
        f"{workers}{' --ntasks-per-node=1' if job.min_hosts else ''} \\",
        f'    shoal launch --job "$job"{"".join(f" {option}" for option in job.launch_options())} -- \\',
        f"    {_quoted(command)}",
        "code=$?",
    ]
    if job.helpers:
        lines += [
            'scancel --signal=TERM "$SLURM_JOB_ID_HET_GROUP_1"  # the helpers stop',
            'sleep 60 && kill "$helpers" &  # those that have not are killed after a minute',
            'wait "$helpers"',
            "kill $!  # the sleep",
        ]
    return "\n".join([*lines, *_ENDING]) + "\n"


_ENDING = (
    "",
    "# 75: the workers saved and left; 76: another host is gone. Slurm starts the same job again.",
    "case $code in",
    '    75 | 76) [ -e "$job/stop" ] || { scontrol requeue "$SLURM_JOB_ID" && sleep 60; } ;;',
    "esac",
    "exit $code",
)


def _directives(job: SlurmJob, command: Sequence[str], folder: Path) -> list[str]:
    """Return the lines for sbatch."""
    name = job_name(job, command)
    tasks = job.workers_per_host if job.task_per_worker else 1
    # with tasks per node Slurm would take the fewest nodes of a range, enough for as many tasks
    nodes = f"{job.min_hosts}-{job.hosts}" if job.min_hosts else f"{job.hosts} --ntasks-per-node={tasks}"
    cpus = job.cpus_per_host and job.cpus_per_host // (tasks or 1)
    common = [f"--job-name={name}", f"--time={job.time}"]
    common += [f"--{key}={value}" for key in ("account", "qos") if (value := getattr(job, key))]
    workers = [
        *([f"--partition={job.partition}"] if job.partition else []),
        f"--nodes={nodes}",
        *([f"--gpus-per-node={job.gpus_per_host}"] if job.gpus_per_host else []),
        f"--cpus-per-task={cpus}" if cpus else "--exclusive",
        *([f"--constraint={job.constraint}"] if job.constraint else []),
        *job.option,
    ]
    output = folder / output_name(job)
    lines = [
        " ".join(common),
        " ".join(workers),
        f"--requeue --open-mode=append --signal=USR1@{job.save_s + _SIGNAL_MARGIN_S}",
        f"--output={output}",
        *(["--no-kill"] if is_elastic(command) else []),  # a node that fails ends neither job nor step
        *([f"--array={job.array}"] if job.array is not None else []),
    ]
    if job.helpers:
        partition = job.helper_partition or job.partition
        lines += ["hetjob", " ".join([*common, *([f"--partition={partition}"] if partition else [])])]
        lines += [f"--nodes={job.helpers} --ntasks-per-node=1 --exclusive"]
    return [f"#SBATCH {line}" for line in lines]


def job_name(job: SlurmJob, command: Sequence[str]) -> str:
    """Return the name of the job: the given one, or one from the command's first words."""
    return job.name or re.sub(r"[^\w.-]", "-", name_of(command))


def output_name(job: SlurmJob) -> str:
    """Return the name of the output file in the job's folder; Slurm replaces ``%a`` by an array's number."""
    return "output.log" if job.array is None else "output-%a.log"


def _quoted(command: Sequence[str]) -> str:
    """Return the command for bash, with quoted words; a long one has each option on a line of its own."""
    seed = '"$SLURM_ARRAY_TASK_ID"'
    words = [seed.join(shlex.quote(p) if p else "" for p in w.split(SEED)) or "''" for w in command]
    text = " ".join(words)
    return text if len(text) <= 100 else re.sub(r" (?=--[a-z])", " \\\\\n        ", text)


# ---- sbatch ------------------------------------------------------------------------------------------------


def write(script: str, folder: Path) -> Path:
    """Write the script to the job's folder and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / SCRIPT
    path.write_text(script, encoding="utf-8")
    return path


def submit(path: Path, *, earlier: str | None) -> str:
    """Submit a script and return the job's id.

    Args:
        path: of the script, in the job's folder.
        earlier: id of the job that was submitted from this folder before.

    Raises:
        ShoalError: Slurm is not installed, refuses the job, or still has the earlier one.
    """
    if earlier is not None and (state := state_of(earlier)):
        raise ShoalError(
            f"{path.parent}: its job {earlier} is {state}; scancel {earlier} first, or choose another --name"
        )
    for marker in (path.parent / STOP, *path.parent.glob(f"*/{STOP}")):
        marker.unlink(missing_ok=True)
    number = _slurm("sbatch", "--parsable", str(path)).stdout.strip().partition(";")[0]
    if not number.isdecimal():
        raise ShoalError(f"sbatch --parsable said {number!r:.200}, which is no job id; see squeue")
    return number


def stop(folder: Path, number: str) -> str:
    """Stop the job of a folder after it has saved; return a message.

    A file ``stop`` in the folder prevents its script from requeueing it until it is submitted again.

    Raises:
        UsageError: it has ended.
        ShoalError: Slurm refuses.
    """
    state = state_of(number)
    if not state:
        raise UsageError(f"{folder} has no job that waits or runs")
    for start in {folder, *(path.parent for path in folder.glob("*/starts.json"))}:
        (start / STOP).touch()
    if state != "RUNNING":
        _slurm("scancel", number)
        return f"job {number} was {state} and is cancelled"
    _slurm("scancel", "--signal=USR1", number)
    return f"job {number} saves and leaves"


def test_only(path: Path) -> str:
    """Return the output of ``sbatch --test-only`` for a script: expected start and nodes.

    Raises:
        ShoalError: Slurm would refuse it.
    """
    done = _slurm("sbatch", "--test-only", str(path))
    return (done.stdout + done.stderr).strip()


def state_of(number: str) -> str:
    """Return the state of a job that waits or runs, such as ``PENDING``; empty if it has ended."""
    try:
        listed = _slurm("squeue", "--noheader", "--format=%T", "--jobs", number).stdout
        return listed.partition("\n")[0].strip()
    except ShoalError as problem:
        if "Invalid job id" in str(problem):
            return ""
        raise


def is_here() -> bool:
    """Return whether Slurm's commands are installed."""
    return shutil.which("sbatch") is not None


def _slurm(*command: str) -> subprocess.CompletedProcess[str]:
    absent = "submit on a login node of the cluster, or write the script with --to DIR"
    return run_tool(command, absent=absent, remedies=_REMEDIES)


_REMEDIES = {
    "invalid partition": "sinfo lists the partitions",
    "Invalid account": "sacctmgr show associations user=$USER lists your accounts",
    "Invalid qos": "sacctmgr show qos lists them",
    "invalid generic resource": "sinfo -o '%P %G' shows the GPUs that nodes have",
    "violates accounting": "sacctmgr show associations user=$USER shows the limits",
    "node count specification invalid": "sinfo -o '%P %D' shows how many nodes partitions have",
    "node configuration is not available": "sinfo -o '%P %D %c %G' shows what nodes have",
    "configuration source": "submit on a host of the cluster, or write the script with --to DIR",
    "contact slurm controller": "scontrol ping shows whether it runs; --to DIR writes the script",
    "Time limit": "sinfo -o '%P %l' shows the partitions' limits",
    "timeout": "try scontrol ping",
}
