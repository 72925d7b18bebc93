"""Describes a job on Kubernetes, and creates its secret and its manifest with kubectl."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from shoal.errors import ShoalError, UsageError
from shoal.launch.job_size import SIZE, JobSize, check_form, name_of
from shoal.launch.tools import run_tool

MANIFEST = "job.yaml"
_LABEL = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_IMAGE = re.compile(r"[a-z0-9][\w.:/@-]{0,400}")
_QUANTITY = re.compile(r"\d{1,9}(\.\d{1,3})?(m|[kMGT]i?)?")
_RESOURCE = re.compile(r"([a-z0-9.-]{1,63}/)?[a-z][\w.-]{0,62}")
_SELECTOR = re.compile(r"[\w./-]{1,300}=[\w.-]{0,63}")
_TOLERATION = re.compile(r"[\w./-]{1,300}(=[\w.-]{0,63})?(:(NoSchedule|PreferNoSchedule|NoExecute))?")
_ACCOUNT = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_PATH = re.compile(r"/[\w./-]*")


@dataclass(frozen=True, kw_only=True)
class KubernetesJob(JobSize):
    """A job of pods."""

    hosts: Annotated[int, SIZE]
    """Worker pods; their GPU requests decide how many share a host."""
    helpers_required: Annotated[bool, SIZE] = False
    """Start the workers only when all helpers serve. By default they wait a minute, then start without."""
    gpus_per_host: Annotated[int | None, SIZE] = None
    """GPUs of a worker pod."""
    efa_per_host: Annotated[int | None, SIZE] = None
    """EFA interfaces of a worker pod (vpc.amazonaws.com/efa), for NCCL's plug-in and --transport ofi:efa."""
    helper_efa: Annotated[int | None, SIZE] = None
    """EFA interfaces of a helper pod; default: 1 with --transport ofi:efa."""
    cpus_per_host: Annotated[str | None, SIZE] = None
    """CPUs of a worker pod; needed without GPUs."""
    memory_per_host: Annotated[str | None, SIZE] = None
    """Memory of a worker pod."""
    helper_cpus: Annotated[str, SIZE] = "8"
    """CPUs of a helper pod."""
    helper_memory: Annotated[str, SIZE] = "16Gi"
    """Memory of a helper pod."""
    image: str
    """Name of the container image with shoal, preferably with its digest @sha256:…"""
    claim: str
    """PersistentVolumeClaim (ReadWriteMany) of the runs, which all pods mount at --mount."""
    mount: str = "/runs"
    """Folder in which the claim is mounted."""
    gpu: str = "nvidia.com/gpu"
    """Resource name of a GPU in the cluster."""
    shared_memory: str = "8Gi"
    """Size of /dev/shm in a worker pod."""
    namespace: str | None = None
    """Namespace; default: kubectl's."""
    queue: str | None = None
    """LocalQueue of Kueue."""
    node_selector: tuple[str, ...] = ()
    """Labels of the workers' nodes, like node.kubernetes.io/instance-type=p4d.24xlarge."""
    helper_node_selector: tuple[str, ...] = ()
    """Labels of the helpers' nodes."""
    toleration: tuple[str, ...] = ()
    """Taints of nodes on which workers may run: KEY, KEY=VALUE or KEY=VALUE:EFFECT, like
    nvidia.com/gpu:NoSchedule."""
    helper_toleration: tuple[str, ...] = ()
    """The same of helpers."""
    service_account: str | None = None
    """Service account of all pods, such as one with a role in AWS (IRSA) or with the image's pull secrets."""
    transport: str | None = None
    """tcp, or ofi:efa for workers and helpers, if the image has libfabric; default: ofi:efa with
    --efa-per-host, otherwise tcp."""
    save_s: int = 120
    """Seconds that saving a checkpoint may take when a pod is asked to stop."""
    api: Literal["jobset", "trainjob"] = "jobset"
    """Kind of manifest: JobSet, or Kubeflow's TrainJob."""
    topology: str | None = None
    """Label of nodes within which Kueue places all pods, like cloud.provider.com/topology-rack."""
    user: int = 1000
    """User and group id in the containers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.user < 1:
            raise UsageError(f"--user {self.user} must be at least 1: not root")
        if self.gpus_per_host is None and self.cpus_per_host is None:
            raise UsageError("say what a worker pod has: --gpus-per-host N, or --cpus-per-host N")
        forms = {
            "image": _IMAGE, "claim": _LABEL, "mount": _PATH, "gpu": _RESOURCE, "helper_cpus": _QUANTITY,
            "helper_memory": _QUANTITY, "cpus_per_host": _QUANTITY, "memory_per_host": _QUANTITY,
            "shared_memory": _QUANTITY, "name": _LABEL, "namespace": _LABEL, "queue": _LABEL,
            "topology": _RESOURCE, "service_account": _ACCOUNT,
        }  # fmt: skip
        for name, form in forms.items():
            check_form(self, name, form, f"is not what Kubernetes takes ({form.pattern})")
        for name in ("node_selector", "helper_node_selector"):
            check_form(self, name, _SELECTOR, "is not of the form KEY=VALUE")
        for name in ("toleration", "helper_toleration"):
            rule = "is not of the form KEY, KEY=VALUE or KEY=VALUE:EFFECT with NoSchedule or NoExecute"
            check_form(self, name, _TOLERATION, rule)
        self._check_efa()
        if self.topology is not None and self.queue is None:
            raise UsageError(f"--topology {self.topology} is for Kueue: name its --queue too")

    def _check_efa(self) -> None:
        if self.transport is not None and "efa" in self.transport and self.efa_per_host is None:
            raise UsageError(
                f"--transport {self.transport} needs the pods' devices: add --efa-per-host N, the EFA "
                "interfaces of an instance"
            )
        if self.helper_efa is not None and not self.uses_efa:
            raise UsageError(
                f"--helper-efa {self.helper_efa} is of no use over TCP: add --efa-per-host N for the "
                "workers, whose transport helpers share, and leave out --transport tcp"
            )

    @property
    def uses_efa(self) -> bool:
        """True if backend shoal uses EFA, so that helpers need interfaces as well."""
        return "efa" in (self.chosen_transport or "")

    @property
    def chosen_transport(self) -> str | None:
        """The transport of workers and helpers; ``None``: shoal's default."""
        return self.transport or ("ofi:efa" if self.efa_per_host else None)


def job_name(job: KubernetesJob, command: Sequence[str]) -> str:
    """Return the name of the job: the given one, or one from the command's first words."""
    name = re.sub(r"[^a-z0-9]+", "-", name_of(command).lower()).strip("-")[:40].strip("-")
    return job.name or (name if _LABEL.fullmatch(name) else f"job-{name}"[:40].strip("-"))


# ---- kubectl -----------------------------------------------------------------------------------------------


def submit(path: Path, name: str, namespace: str | None, queue: str | None = None) -> None:
    """Create the job's secret, which is piped to kubectl, and the objects of the manifest.

    Raises:
        ShoalError: kubectl is not installed, the cluster refuses, or it has no such queue, for which a job
            would wait forever.
    """
    flags = _in(namespace)
    if queue is not None:
        try:
            _kubectl(["kubectl", "get", *flags, "localqueues.kueue.x-k8s.io", queue, "--output=name"], "")
        except ShoalError as problem:
            if "forbidden" not in str(problem).lower():  # some may submit to queues that they cannot list
                raise
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": f"{name}-secret"},
        "immutable": True,
        "stringData": {"secret": secrets.token_hex(32)},
    }
    _kubectl(["kubectl", "create", *flags, "--filename", "-"], json.dumps(secret))
    _kubectl(["kubectl", "create", *flags, "--filename", str(path)], "")


_REMEDIES = {
    "AlreadyExists": "kubectl delete it, or choose another --name",
    "exceeded quota": "kubectl describe resourcequota shows what is left: ask for more, or fewer --hosts",
    'kind "JobSet"': "the cluster has no JobSet controller: install it, or use --api trainjob",
    'kind "TrainJob"': "the cluster has no Kubeflow trainer: install it, or use --api jobset",
    'kind "TrainingRuntime"': "the cluster has no Kubeflow trainer: install it, or use --api jobset",
    "localqueues": "kubectl get localqueues lists the queues of --queue",
    'namespaces "': "kubectl get namespaces lists those of --namespace",
    "forbidden": "kubectl auth can-i --list shows what you may do there",
    "must be logged in": "the credentials have expired: log in again, with EKS aws eks update-kubeconfig",
    "expired": "the credentials have expired: log in again, with EKS aws eks update-kubeconfig",
    "connection to the server": "kubectl config current-context names the cluster",
    "connection refused": "kubectl config get-contexts lists the clusters; --to DIR writes the manifest",
}

_WORKERS = {"jobset": "workers-0", "trainjob": "node-0"}
"""End of the name of the workers' Job, by the kind of manifest."""


def state_of(api: str, name: str, namespace: str | None) -> str:
    """Return the true conditions of a job, such as ``Completed``, or ``RUNNING``; empty if it was deleted.

    Raises:
        ShoalError: kubectl is not installed, the cluster refuses, or the job is of another kind.
    """
    _check_kind(api, name)
    path = '{range .status.conditions[?(@.status=="True")]}{.type} {end}'
    try:
        status = _kubectl(["kubectl", "get", *_in(namespace), api, name, "--output", f"jsonpath={path}"], "")
    except ShoalError as problem:
        if "NotFound" in str(problem):
            return ""
        raise
    return " ".join(status.split()) or "RUNNING"


def delete(manifest: Path, name: str, namespace: str | None) -> None:
    """Delete the objects of a manifest, and the secret; pods get SIGTERM and time to save.

    Raises:
        ShoalError: kubectl is not installed, or the cluster refuses.
    """
    gone = ["--ignore-not-found", "--wait=false"]
    _kubectl(["kubectl", "delete", *_in(namespace), "--filename", str(manifest), *gone], "")
    _kubectl(["kubectl", "delete", *_in(namespace), "secret", f"{name}-secret", *gone], "")


def logs_command(api: str, name: str, namespace: str | None) -> list[str]:
    """Return the command that prints the output of the first worker.

    Raises:
        ShoalError: the job is of another kind.
    """
    _check_kind(api, name)
    return ["kubectl", "logs", *_in(namespace), f"job/{name}-{_WORKERS[api]}"]


def _check_kind(api: str, name: str) -> None:
    if api not in _WORKERS:
        raise ShoalError(
            f"{name} was submitted with --api {api}, and this version of shoal has only jobset and trainjob: "
            "use kubectl, or shoal stop"
        )


def _in(namespace: str | None) -> list[str]:
    return ["--namespace", namespace] if namespace else []


def _kubectl(command: list[str], text: str) -> str:
    absent = "install it, or write the manifest with --to DIR"
    return run_tool(command, absent=absent, remedies=_REMEDIES, stdin=text).stdout
