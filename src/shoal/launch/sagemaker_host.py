"""Runs an instance's part of a training job of SageMaker, by the files of the service in ``/opt/ml``."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from shoal.env.sagemaker import SECRET_ID, sagemaker_base, secret_id, source_sha256
from shoal.env.secret import job_secret
from shoal.env.settings import HELPERS, SECRET_FILE
from shoal.env.variables import set_variables
from shoal.errors import EXIT_LOST, EXIT_STOPPED, WARNING_SIGNALS, ShoalError
from shoal.json_text import parse_json
from shoal.launch.aws_calls import called, client
from shoal.launch.in_job import HostOptions, in_job
from shoal.launch.job_size import HELPER_PORT, RENDEZVOUS_PORT
from shoal.launch.sagemaker import HELPERS as HELPER_GROUP
from shoal.launch.sagemaker import SOURCE_CHANNEL
from shoal.launch.source import ARCHIVE, unpack

_CONFIG = Path("input/config/resourceconfig.json")
_STOPPED_WAIT_S = 300.0
"""SageMaker sends SIGKILL 120 s after SIGTERM."""
_MAX_REASON = 1_024


@dataclass(frozen=True, kw_only=True)
class JobInstance:
    """An instance among those of the job."""

    role: Literal["worker", "helper"]
    number: int
    """Among the instances of its group."""
    workers: tuple[str, ...]
    """Names of the worker instances."""
    helpers: tuple[str, ...]
    interface: str | None


def is_here() -> bool:
    """Return whether this container is one of SageMaker's."""
    return (sagemaker_base() / _CONFIG).exists()


def read_instance(path: Path) -> JobInstance:
    """Return this instance, from the file that SageMaker has written.

    Raises:
        ShoalError: the file is not one of SageMaker's.
    """
    stored = parse_json(path.read_bytes(), str(path))
    try:
        groups = {
            group["instance_group_name"]: group["hosts"] for group in stored.get("instance_groups") or ()
        }
        helpers = tuple(map(str, groups.get(HELPER_GROUP, ())))
        workers = tuple(str(host) for host in stored["hosts"] if host not in helpers)
        host = str(stored["current_host"])
        own = helpers if host in helpers else workers
        return JobInstance(
            role="helper" if host in helpers else "worker",
            number=own.index(host),
            workers=workers,
            helpers=helpers,
            interface=stored.get("network_interface_name"),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as problem:
        raise ShoalError(f"{path}: is not what SageMaker writes ({problem!r})") from None


def run(command: Sequence[str], options: HostOptions) -> int:
    """Run this instance's part of the job and return the exit code.

    SageMaker restarts the containers of an interrupted spot job, but takes any exit code except 0 as a
    failure. So a container that has saved, or that has lost another host, waits until it is killed.

    Raises:
        UsageError: the command or the options are wrong.
        ShoalError: the secret or the source cannot be read, or in_job fails.
    """
    base = sagemaker_base()
    try:
        code = _run(base, command, options)
    except ShoalError as problem:
        _give_reason(base, str(problem))
        raise
    if code in (EXIT_STOPPED, EXIT_LOST):
        for number in (signal.SIGTERM, signal.SIGHUP, *WARNING_SIGNALS):
            signal.signal(number, signal.SIG_IGN)
        time.sleep(_STOPPED_WAIT_S)
    return code


def _run(base: Path, command: Sequence[str], options: HostOptions) -> int:
    instance = read_instance(base / _CONFIG)
    is_helper = instance.role == "helper"
    print(
        f"shoal launch: SageMaker, {instance.role} {instance.number} of {len(instance.workers)} workers and "
        f"{len(instance.helpers)} helpers",
        flush=True,
    )
    fetch_secret()
    if instance.helpers and not is_helper:
        set_variables({HELPERS: ",".join(f"{host}:{HELPER_PORT}" for host in instance.helpers)})
    if (sha256 := source_sha256()) and not is_helper:
        unpack(base / "input" / "data" / SOURCE_CHANNEL / ARCHIVE, base / "code", sha256)
        os.chdir(base / "code")
    options = replace(
        options,
        role=instance.role,
        nnodes=len(instance.workers),
        node_rank=instance.number,
        rdzv=f"{instance.workers[0]}:{RENDEZVOUS_PORT}",
        helper_port=HELPER_PORT if is_helper else None,
        interface=options.interface or instance.interface,
        log_dir=options.log_dir or base / "output" / "data" / "logs",
    )
    words = () if is_helper else command
    return in_job(words, options, failure_file=base / "output" / "failure")


def fetch_secret() -> None:
    """Write the job's secret from Secrets Manager to a file, unless it is given already."""
    name = secret_id()
    if job_secret() is not None or not name:
        return
    manager = client("secretsmanager", None)
    try:
        value = called(lambda: manager.get_secret_value(SecretId=name))["SecretString"]
    except ShoalError as problem:
        raise ShoalError(
            f"{SECRET_ID}={name} cannot be read: {problem}; the job's role needs "
            "secretsmanager:GetSecretValue on it"
        ) from None
    path = Path("/dev/shm" if Path("/dev/shm").is_dir() else "/tmp", f"shoal-secret-{os.getpid()}")
    with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        file.write(value)
    set_variables({SECRET_FILE: str(path)})


def _give_reason(base: Path, text: str) -> None:
    """Write the reason of a failure to the file that SageMaker reads."""
    path = base / "output" / "failure"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text[:_MAX_REASON], encoding="utf-8")
