"""Reads the variables of Slurm: the tasks of an ``srun``, and the job's id."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.env.variables import Environ, number, text, variables_of, without_brackets
from shoal.env.worker import WorkerEnv, WorkerRanks
from shoal.errors import UsageError

_JOB_ID = "SLURM_JOB_ID"
_SPECIAL_STEPS = 0xFFFFFFF0
"""Slurm numbers steps that are no srun from here on: the batch script, the shell of salloc."""
_FIRST_JOB_PORT, _NUM_JOB_PORTS = 20_000, 10_000


@dataclass(frozen=True, kw_only=True)
class SlurmStep:
    """This process among the tasks of an ``srun``."""

    job: int
    restarts: int
    """Times that Slurm has requeued the job."""
    ranks: WorkerRanks
    """The task, its number among all tasks and among those of its node."""
    node: int
    num_nodes: int
    first_node: str
    num_gpus: int = 0
    """GPUs that Slurm gives the job on this node; 0: it does not say."""

    @property
    def port(self) -> int:
        """A port for the rendezvous, which other jobs on the same nodes do not have."""
        return _FIRST_JOB_PORT + self.job % _NUM_JOB_PORTS

    @property
    def run_id(self) -> str:
        """A name of this start of the job."""
        return f"{self.job}.{self.restarts}"


def job_id(environ: Environ = None) -> str | None:
    """Return the scheduler's job id, which a requeued job keeps, or ``None``."""
    return text(_JOB_ID, environ)


def slurm_step(environ: Environ = None) -> SlurmStep | None:
    """Return the task of an ``srun`` that this process is, else ``None``.

    The batch script and the shell of ``salloc`` have most of Slurm's variables but are no tasks.

    Raises:
        UsageError: a variable of Slurm is missing or malformed.
    """
    environ = variables_of(environ)
    step = environ.get("SLURM_STEP_ID", "")
    if not step.isdecimal() or int(step) >= _SPECIAL_STEPS:
        return None
    node = number(environ, "SLURM_NODEID")
    counts = _tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if node >= len(counts):
        raise UsageError(
            f"SLURM_NODEID={node} and SLURM_STEP_TASKS_PER_NODE={environ.get('SLURM_STEP_TASKS_PER_NODE')!r} "
            "contradict each other: start the command with srun"
        )
    return SlurmStep(
        job=number(environ, _JOB_ID),
        restarts=number(environ, "SLURM_RESTART_COUNT", default=0),
        ranks=WorkerRanks(
            rank=number(environ, "SLURM_PROCID"),
            num_workers=sum(counts),
            local_rank=number(environ, "SLURM_LOCALID"),
            num_local_workers=counts[node],
        ),
        node=node,
        num_nodes=len(counts),
        first_node=first_node(environ.get("SLURM_STEP_NODELIST", "")),
        num_gpus=number(environ, "SLURM_GPUS_ON_NODE", default=0),
    )


def slurm_worker(step: SlurmStep, environ: Mapping[str, str]) -> WorkerEnv | None:
    """Return the worker of a task; ``None`` for a single task, which may start workers itself."""
    if step.ranks.num_workers == 1:
        return None
    return WorkerEnv(
        ranks=step.ranks,
        master_addr=without_brackets(environ.get("MASTER_ADDR", ""))
        or (step.first_node if step.num_nodes > 1 else "127.0.0.1"),
        master_port=number(environ, "MASTER_PORT", default=step.port),
        launcher="Slurm",
    )


def first_node(node_list: str) -> str:
    """Return the first name of a node list of Slurm.

    Such a list is ``gpu-[003-010,12],login1`` or ``rack[0-1]_blade[00-41]``.

    Raises:
        UsageError: the list is empty or malformed.
    """
    match = re.match(r"[\w.-]+(?:\[\d[^][]*\][\w.-]*)*(?=,|$)", node_list)
    if match is None:
        raise UsageError(f"the node list {node_list!r} is not one of Slurm: start the command with srun")
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", match[0])


def workers_first_node(environ: Environ = None) -> str | None:
    """Return the first node of the first group of a heterogeneous job of Slurm, or ``None``."""
    nodes = text("SLURM_JOB_NODELIST_HET_GROUP_0", environ)
    return first_node(nodes) if nodes else None


def _tasks_per_node(counts: str) -> list[int]:
    """Return the numbers of tasks of ``2(x3),1``: 2, 2, 2, 1."""
    tasks: list[int] = []
    for part in counts.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\(x(\d{1,6})\))?", part)
        if match is None:
            raise UsageError(
                f"SLURM_STEP_TASKS_PER_NODE={counts!r} is not of the form 2(x3),1: "
                "start the command with srun"
            )
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks
