"""Defines ``shoal launch``: one host's part in a cluster's job."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter


def launch(
    *command: Annotated[str, Parameter(allow_leading_hyphen=True)],
    role: Literal["worker", "helper"] = "worker",
    job: Path | None = None,
    workers: int | None = None,
    nnodes: int | None = None,
    rdzv: str | None = None,
    node_rank: int | None = None,
    run_id: str | None = None,
    helpers: int = 0,
    helpers_required: bool = False,
    helpers_wait_s: float = 60.0,
    global_batch: int | None = None,
    interface: str | None = None,
    log_dir: Path | None = None,
    helper_port: int | None = None,
    leash: bool = False,
) -> int:
    """Start the workers of a job on this host: `srun shoal launch -- python train.py`, once per host.

    The command runs once per worker with torchrun's variables, SHOAL_HELPERS and the job's secret. Exit code
    75: a signal asked to stop, and the workers saved. 76: another host is lost; start again to continue from
    the last checkpoint.

    Parameters
    ----------
    command
        The command of a worker and its arguments, after `--`.
    role
        worker: start workers; helper: run a server that sums gradients, until SIGTERM.
    job
        Folder on a shared file system, through which the hosts find each other. In Slurm by default jobs/ID.
    workers
        Workers per host; default: one per GPU, or one.
    nnodes
        Number of worker hosts; default: the nodes of the Slurm step, or one.
    rdzv
        HOST:PORT of the first worker host; default: from Slurm, or from MASTER_ADDR and MASTER_PORT.
    node_rank
        Number of this host among the worker or helper hosts, from 0; default in Slurm: from Slurm.
    run_id
        Name of this start of the job, such as bert.2; default in Slurm: from Slurm. bert.next takes the next
        number if the scheduler does not number starts; it needs the job's secret.
    helpers
        Number of helper hosts that join through the job's folder.
    helpers_required
        Fail if helpers are missing. By default the run starts without them, after a warning.
    helpers_wait_s
        Seconds to wait for helpers.
    global_batch
        Samples per step: use the largest number of hosts whose workers divide it; the others stay idle.
    interface
        Network interface, such as eth0, for shoal, gloo and NCCL.
    log_dir
        Folder for the output of all workers except the first; default: logs, in the job's folder if any.
    helper_port
        Port of a helper's server, as in the workers' SHOAL_HELPERS. The helper then needs no --job, and ends
        with the launcher of the first worker host.
    leash
        Read the job's secret from stdin, and save and exit when stdin closes; set by `shoal submit ssh`.
    """
    from shoal.launch import sagemaker_host
    from shoal.launch.in_job import InJob, in_job

    how = InJob(
        helper=role == "helper",
        job=job,
        workers=workers,
        nnodes=nnodes,
        rdzv=rdzv,
        node_rank=node_rank,
        run_id=run_id,
        num_helpers=helpers,
        helpers_required=helpers_required,
        helpers_wait_s=helpers_wait_s,
        global_batch=global_batch,
        interface=interface,
        log_dir=log_dir,
        helper_port=helper_port,
        leash=leash,
    )
    return sagemaker_host.run(command, how) if sagemaker_host.is_here() else in_job(command, how)
