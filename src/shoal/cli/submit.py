"""Defines ``shoal submit``: puts a command into the queue of a cluster."""

# Annotations are objects here, not texts: cyclopts reads those of the settings.

import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import App, Group, Parameter

from shoal.cli import submit_checks
from shoal.cli.settings import settings_from
from shoal.decide.backend import Situation, planned_backend
from shoal.env.worker import num_training_hosts
from shoal.errors import EXIT_OK, UsageError
from shoal.launch import kubernetes as pods
from shoal.launch import kubernetes_manifest, remote, submissions
from shoal.launch import sagemaker as training
from shoal.launch import slurm as queue
from shoal.launch.job_command import JobCommand, check_files, check_source, read_command
from shoal.launch.job_size import check_use_of_helpers, hosts_apart, option_of, usable_workers
from shoal.launch.kubernetes import KubernetesJob
from shoal.launch.remote import RemoteJob, RemoteStart
from shoal.launch.sagemaker import SageMakerJob
from shoal.launch.slurm import SlurmJob
from shoal.launch.source import ARCHIVE, pack
from shoal.launch.tools import run_tool
from shoal.recipes import RECIPES, script

submit = App(name="submit", config=(settings_from(lambda _: ""),))
_WORDS = Annotated[str, Parameter(allow_leading_hyphen=True)]
_OUTPUT = Group("Output", sort_key=3)
_OPTION = Parameter(group=_OUTPUT)
_OUTPUT_OPTIONS = Parameter(name="*", group=_OUTPUT)
_NEW_SECRET = "(umask 077; head -c 32 /dev/urandom | base64 > secret)"


def _options(scheduler: str) -> Parameter:
    return Parameter(name="*", group=Group(scheduler, sort_key=2))


@dataclass(frozen=True, kw_only=True)
class Output:
    """Selects submission, writing or printing of a job."""

    to: Path | None = None
    """Write the job's file into this folder and submit nothing; the job's secret is not in it."""
    dry_run: bool = False
    """Print the job's file and the planner's summary; submit nothing."""
    config: Path | None = None
    """TOML file with options of this command, such as hosts = 8."""


@dataclass(frozen=True, kw_only=True)
class PlannedOutput(Output):
    """The same, with the machines that the planner takes."""

    machine: str | None = None
    """Instance type of a worker host, like p4d.24xlarge, with which --dry-run predicts time and cost."""
    helper_machine: str | None = None
    """The same for a helper host, like c5n.18xlarge."""


@submit.command
def slurm(
    *command: _WORDS,
    job: Annotated[SlurmJob, _options("Slurm")],
    output: Annotated[PlannedOutput, _OUTPUT_OPTIONS] = PlannedOutput(),
    check: Annotated[bool, _OPTION] = True,
) -> int:
    """Submit a command to Slurm: `shoal submit slurm --hosts 8 -- shoal train bert`.

    The job is requeued and continues after a preemption, its time limit or the loss of a node. --dry-run
    also prints the output of sbatch --test-only.

    Parameters
    ----------
    command
        The command of a worker and its arguments, after `--`, as after srun.
    check
        Check the program and the settings of a recipe first, as `shoal train … --dry-run` does.
    """
    parts = _read(command, job.helpers)
    folder = (output.to or Path("jobs") / queue.job_name(job, command)).absolute()
    script = queue.render(job, command, folder)
    description = _check_on_nodes(job, command) if check else []
    if output.dry_run:
        print("\n".join([script, *description]))
        _summarise(script, parts, job, output.machine, output.helper_machine)
        return EXIT_OK
    path = queue.write(script, folder)
    if output.to is not None:
        print(f"{path}\nsubmit it with: sbatch {path}")
        return EXIT_OK
    number = queue.submit(path, earlier=submissions.earlier_id(folder))
    submissions.note(folder, "slurm", number, run=_run_dir(command))
    print(f"job {number} is submitted; its output: {folder / queue.output_name(job)}")
    return EXIT_OK


@submit.command
def kubernetes(
    *command: _WORDS,
    job: Annotated[KubernetesJob, _options("Kubernetes")],
    output: Annotated[PlannedOutput, _OUTPUT_OPTIONS] = PlannedOutput(),
    check: Annotated[bool, _OPTION] = True,
) -> int:
    """Submit a command to Kubernetes: `shoal submit kubernetes --hosts 8 … -- shoal train bert`.

    As a JobSet, which needs its controller in the cluster; --api chooses another kind. The paths of the
    command are those in the containers.

    Parameters
    ----------
    command
        The command of a worker and its arguments, after `--`.
    check
        Check the settings of a recipe first, and that its paths are below --mount.
    """
    parts = _read(command, job.helpers)
    if check:
        per_host = job.workers_per_host or job.gpus_per_host or 1
        count = usable_workers(job.hosts, per_host, job.global_batch, command)
        rule = submit_checks.inside_mount(job.mount, job.claim)
        submit_checks.check_command(parts, num_workers=count, reads_data=False, allow=rule)
    name = pods.job_name(job, command)
    text = kubernetes_manifest.render(job, command)
    if output.dry_run:
        print(text, end="")
        predicted = _prediction(parts, job.hosts, output.machine, job.helpers, output.helper_machine)
        print("".join(f"# {line}\n" for line in predicted.splitlines()), end="")
        return EXIT_OK
    folder = output.to or Path("jobs") / name
    path = _write(folder / pods.MANIFEST, text)
    if output.to is not None:
        make = f"{_NEW_SECRET}; kubectl create secret generic {name}-secret --from-file=secret"
        print(f"{path}\nits secret: {make}\nsubmit it with: kubectl create --filename {path}")
        return EXIT_OK
    pods.submit(path, name, job.namespace, job.queue)
    submissions.note(folder, "kubernetes", name, api=job.api, namespace=job.namespace)
    print(f"job {name} is submitted; its output: shoal logs --follow {name}")
    return EXIT_OK


@submit.command
def sagemaker(
    *command: _WORDS,
    job: Annotated[SageMakerJob, _options("SageMaker")],
    output: Annotated[Output, _OUTPUT_OPTIONS] = Output(),
    check: Annotated[bool, _OPTION] = True,
) -> int:
    """Submit a command to SageMaker: `shoal submit sagemaker --hosts 8 --helpers 4 … -- shoal train bert`.

    Creates a training job with one instance group for workers and one for helpers. Use the paths of the
    containers in the command: /opt/ml/input/data/fsx, /opt/ml/input/data/CHANNEL. --dry-run prints the
    planner's summary to stderr.

    Parameters
    ----------
    command
        The command of a worker and its arguments, after `--`.
    check
        Check the settings of a recipe first, and that its paths are in the containers.
    """
    parts = _read(command, job.helpers)
    filled = job.filled()
    num_gpus = _check_instance(job)
    if check:
        _check_in_containers(filled, parts, num_gpus)
    base = training.base_name(filled, command)
    name = training.job_name(base)
    request = training.checked(training.render(filled, command, name))
    text = training.text_of(request)
    if output.dry_run:
        print(text)
        kinds = _in_catalog(job.instance), job.helpers, _in_catalog(job.helper_instance)
        print(_prediction(parts, job.hosts, *kinds), file=sys.stderr)
        return EXIT_OK
    folder = output.to or Path("jobs") / base
    path = _write(folder / training.REQUEST, f"{text}\n")
    if output.to is not None:
        print(path)
        if filled.source:
            archive = folder / ARCHIVE
            archive.write_bytes(pack(filled.source))
            print(f"its program: aws s3 cp {archive} {training.source_uri(filled, name)}")
        # in a file: a list of processes shows arguments
        secret = f"--name {training.secret_name(base)} --secret-string file://secret"
        print(f"its secret: {_NEW_SECRET}; aws secretsmanager create-secret {secret}; rm secret")
        print(f"submit it with: aws sagemaker create-training-job --cli-input-json file://{path}")
        return EXIT_OK
    training.submit(filled, request)
    submissions.note(folder, "sagemaker", name, region=job.region)
    print(f"training job {name} is submitted; its output: shoal logs --follow {base}")
    return EXIT_OK


@submit.command
def ssh(
    *command: _WORDS,
    job: Annotated[RemoteJob, _options("Start on hosts")],
    dry_run: Annotated[bool, _OPTION] = False,
    config: Annotated[Path | None, _OPTION] = None,
    check: Annotated[bool, _OPTION] = True,
) -> int:
    """Run a command on hosts by ssh: `shoal submit ssh --hosts n1 --hosts n2 -- python train.py`.

    Runs until the command has ended; after Ctrl-C the workers save and exit. All hosts need the same version
    of shoal and the same files, preferably on a shared file system.

    Parameters
    ----------
    command
        The command of a worker and its arguments, after `--`.
    dry_run
        Print the commands; start nothing.
    config
        TOML file with options of this command, such as hosts = ["n1", "n2"].
    check
        Check the settings of a recipe first, and on the hosts that the program is there.
    """
    parts = _read(command, len(job.helper_hosts))
    if check:
        _check_on_hosts(job, parts)
    starts = remote.ssh_starts(job, command)
    if dry_run:
        return _show(starts)
    from shoal.doctor import version_text

    remote.check_hosts(job, version_text(), parts if check else None)
    return remote.run(starts)


@submit.command
def mpi(
    *command: _WORDS,
    job: Annotated[RemoteJob, _options("Start on hosts")],
    dry_run: Annotated[bool, _OPTION] = False,
    config: Annotated[Path | None, _OPTION] = None,
    check: Annotated[bool, _OPTION] = True,
) -> int:
    """Run a command on hosts by mpirun: `shoal submit mpi --hosts n1 --hosts n2 -- python train.py`.

    Starts one launcher per host, each with its own mpirun, and runs until the command has ended. Supports
    Open MPI, MPICH and Intel MPI.

    Parameters
    ----------
    command
        The command of a worker and its arguments, after `--`.
    dry_run
        Print the commands; start nothing.
    config
        TOML file with options of this command, such as hosts = ["n1", "n2"].
    check
        Check the settings of a recipe first.
    """
    parts = _read(command, len(job.helper_hosts))
    if check:
        _check_on_hosts(job, parts)
    absent = "load MPI's module, or use shoal submit ssh"
    version = run_tool(["mpirun", "--version"], absent=absent, remedies={}).stdout
    starts = remote.mpi_starts(job, command, version)
    return _show(starts) if dry_run else remote.run(starts)


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _run_dir(command: Sequence[str]) -> str | None:
    """Return the run's directory, if the command names it."""
    folder = option_of(command, "--run.dir")
    return str(Path(folder).absolute()) if folder else None


def _show(starts: Sequence[RemoteStart]) -> int:
    print("# the first line of stdin is the job's secret; the hosts leave when it closes")
    for start in starts:
        print(shlex.join(start.command))
    return EXIT_OK


def _read(command: Sequence[str], num_helpers: int) -> JobCommand:
    """Take the command of the workers apart.

    Raises:
        UsageError: there is none, or it leaves the helper hosts idle.
    """
    if not command:
        raise UsageError("name the command of the workers after --: … -- shoal train bert --preset large")
    check_use_of_helpers(command, num_helpers)
    return read_command(command)


# ---- checks ------------------------------------------------------------------------------------------------


def _check_on_nodes(job: SlurmJob, command: Sequence[str]) -> list[str]:
    """Check a job of Slurm, whose files are here; return the description of its run."""
    parts = read_command([word.replace(queue.SEED, "0") for word in command])
    per_host = job.workers_per_host or job.gpus_per_host or 1
    least = 1 + hosts_apart(command)
    hosts = least if job.min_hosts is not None and job.global_batch is not None else job.hosts
    count = usable_workers(hosts, per_host, job.global_batch, command)
    description = submit_checks.check_command(
        parts, num_workers=count, reads_data=True, allow=submit_checks.shared_by_nodes(job.hosts)
    )
    if not any(option.startswith("--chdir") for option in job.option):
        check_files(parts, Path.cwd(), searches_path=not job.prolog)
    if not description:
        return []
    described = [line for line in description if not line.startswith("# backend ")]  # that of this host
    return [*described, f"# backend      {_planned_backend(parts.arguments, job, count)}"]


def _planned_backend(command: Sequence[str], job: SlurmJob, num_workers: int) -> str:
    """Return the backend that a recipe's workers will agree on in the job, in words."""
    mode = option_of(command, "--servers.mode") or "off"
    return planned_backend(
        Situation(
            requested=(option_of(command, "--distributed.backend") or "auto").lower(),
            wire=option_of(command, "--distributed.wire") or "fp32",
            on_gpu=bool(job.gpus_per_host) and option_of(command, "--distributed.device") != "cpu",
            num_workers=num_workers,
            num_hosts=job.hosts - hosts_apart(command),
            num_helpers=job.helpers,
            servers="" if mode == "off" else f"servers.mode {mode}",
        )
    )


def _check_in_containers(job: SageMakerJob, parts: JobCommand, num_gpus: int) -> None:
    """Check a job of SageMaker; ``num_gpus``: of an instance, 0 if it is not known."""
    if job.source is not None:
        check_source(parts, job.source)
    per_host = job.workers_per_host or num_gpus
    rule = submit_checks.inside_channels(
        training.channels(job), written=training.kept(job), source=job.source
    )
    submit_checks.check_command(
        parts,
        num_workers=(
            usable_workers(job.hosts, per_host, job.global_batch, parts.arguments) if per_host else None
        ),
        reads_data=False,
        allow=rule,
    )


def _check_on_hosts(job: RemoteJob, parts: JobCommand) -> None:
    """Check a job on hosts whose files and GPUs are not known here."""
    count = None
    if job.workers_per_host is not None:
        count = usable_workers(len(job.hosts), job.workers_per_host, job.global_batch, parts.arguments)
    submit_checks.check_command(parts, num_workers=count, reads_data=False)


def _check_instance(job: SageMakerJob) -> int:
    """Return the GPUs of an instance, 0 if its type is not in the planner's catalog.

    Raises:
        UsageError: it has fewer than workers.
    """
    from shoal.planner.hardware import Catalog

    known = Catalog().instances.get(job.instance.removeprefix("ml."))
    num_gpus = 0 if known is None or known.is_cpu else known.num_accelerators
    if 0 < num_gpus < (job.workers_per_host or 0):
        raise UsageError(
            f"--workers-per-host {job.workers_per_host} must be at most {num_gpus}, "
            f"the GPUs of {job.instance}"
        )
    return num_gpus


# ---- the planner -------------------------------------------------------------------------------------------


def _summarise(
    script: str, command: JobCommand, job: SlurmJob, machine: str | None, helper_machine: str | None
) -> None:
    if queue.is_here():
        with tempfile.TemporaryDirectory() as folder:
            print(queue.test_only(queue.write(script, Path(folder))))
    else:
        print("sbatch is not here: whether Slurm would take the job was not checked")
    if text := _prediction(command, job.hosts, machine, job.helpers, helper_machine):
        print(text)


def _prediction(
    command: JobCommand, hosts: int, machine: str | None, helpers: int, helper_machine: str | None
) -> str:
    """Return the planner's time and cost of a recipe's preset on the given machines; empty: no recipe."""
    own = submit_checks.own_words(command)
    recipe = submit_checks.recipe_of(own)
    if machine is None or recipe is None or not hasattr(script(recipe), "sample"):
        return ""
    from shoal.planner import answer
    from shoal.recipes.workloads import plan, workload_name

    preset = option_of(own, "--preset") or RECIPES[recipe].preset
    model = workload_name(recipe, preset) if RECIPES[recipe].starts_from else f"{recipe}-{preset}"
    helping = f"{helpers}x{helper_machine}" if helper_machine and helpers else None
    num_apart = hosts_apart(own)
    num_training = num_training_hosts(hosts, num_apart)
    text = answer.text_of(plan(model, f"{num_training}x{machine}", helping), [], compare=False)
    more = f"{num_apart} of {hosts} worker hosts evaluate; they are not in the cost above"
    return f"{text}\n{more}" if num_apart else text


def _in_catalog(instance: str | None) -> str | None:
    """Return the name by which the planner knows an instance type of SageMaker, or ``None``."""
    from shoal.planner.hardware import Catalog

    name = (instance or "").removeprefix("ml.")
    return name if name in Catalog().instances else None
