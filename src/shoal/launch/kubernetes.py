"""Writes manifests for Kubernetes: a JobSet with the workers' pods, and those of the helpers beside them."""

from __future__ import annotations

import json
import re
import secrets
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import ShoalError, UsageError

MANIFEST = "job.yaml"
HELPER_PORT, MEETING_PORT = 7070, 29400
_GRACE_MARGIN_S = 60
_LABEL = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
_IMAGE = re.compile(r"[a-z0-9][\w.:/@-]{0,400}")
_QUANTITY = re.compile(r"\d{1,9}(\.\d{1,3})?(m|[kMGT]i?)?")
_RESOURCE = re.compile(r"([a-z0-9.-]{1,63}/)?[a-z][\w.-]{0,62}")
_SELECTOR = re.compile(r"[\w./-]{1,300}=[\w.-]{0,63}")
_PATH = re.compile(r"/[\w./-]*")
_DEADLINE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class KubernetesJob:
    """A job: its pods, and where they run."""

    hosts: int
    """Worker pods, each on a host of its own as far as its GPUs demand it."""
    image: str
    """Container image with shoal; its name, best with @sha256:…"""
    claim: str
    """PersistentVolumeClaim (ReadWriteMany) of the runs, which all pods mount at --mount."""
    mount: str = "/runs"
    """Where the claim is mounted."""
    helpers: int = 0
    """Helper pods."""
    helpers_required: bool = False
    """Start workers only when all helpers serve."""
    helper_cpus: str = "8"
    """CPUs of a helper pod."""
    helper_memory: str = "16Gi"
    """Memory of a helper pod."""
    gpus_per_host: int | None = None
    """GPUs of a worker pod."""
    gpu: str = "nvidia.com/gpu"
    """The cluster's name for a GPU."""
    efa_per_host: int | None = None
    """EFA interfaces of a worker pod (vpc.amazonaws.com/efa); without any the pods use TCP."""
    cpus_per_host: str | None = None
    """CPUs of a worker pod; needed without GPUs."""
    memory_per_host: str | None = None
    """Memory of a worker pod."""
    shared_memory: str = "8Gi"
    """Size of /dev/shm in a worker pod."""
    workers_per_host: int | None = None
    """Workers per pod; default: one a GPU, or one."""
    global_batch: int | None = None
    """Samples a step: use the largest number of pods over whose workers it divides."""
    name: str | None = None
    """Name of the job; default: the command's first words."""
    namespace: str | None = None
    """Namespace; default: kubectl's."""
    queue: str | None = None
    """LocalQueue of Kueue."""
    node_selector: tuple[str, ...] = ()
    """Labels of the workers' nodes, like node.kubernetes.io/instance-type=p4d.24xlarge."""
    save_s: int = 120
    """Seconds that saving a checkpoint may take when a pod is asked to stop."""
    user: int = 1000
    """User and group id in the containers."""

    def __post_init__(self) -> None:
        for name in ("hosts", "gpus_per_host", "efa_per_host", "workers_per_host", "global_batch", "save_s"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise UsageError(f"--{_option(name)} {value} must be at least 1")
        if self.helpers < 0 or self.user < 1:
            raise UsageError(f"--helpers {self.helpers} must be at least 0, and --user {self.user} not root")
        if self.gpus_per_host is None and self.cpus_per_host is None:
            raise UsageError("say what a worker pod has: --gpus-per-host N, or --cpus-per-host N")
        forms = {
            "image": _IMAGE, "claim": _LABEL, "mount": _PATH, "gpu": _RESOURCE, "helper_cpus": _QUANTITY,
            "helper_memory": _QUANTITY, "cpus_per_host": _QUANTITY, "memory_per_host": _QUANTITY,
            "shared_memory": _QUANTITY, "name": _LABEL, "namespace": _LABEL, "queue": _LABEL,
        }  # fmt: skip
        for name, form in forms.items():
            if (value := getattr(self, name)) is not None and not form.fullmatch(value):
                raise UsageError(f"--{_option(name)} {value!r} is not what Kubernetes takes ({form.pattern})")
        for label in self.node_selector:
            if not _SELECTOR.fullmatch(label):
                raise UsageError(f"--node-selector {label!r} is not of the form KEY=VALUE")


def _option(field: str) -> str:
    return field.replace("_", "-")


def job_name(job: KubernetesJob, command: Sequence[str]) -> str:
    """Return the name of the job: the given one, or one from the command's first words."""
    words = [Path(word).stem for word in command if word not in ("shoal", "train", "finetune")]
    words = [word for word in words if not word.startswith(("-", "python"))]
    name = re.sub(r"[^a-z0-9]+", "-", (words[0] if words else "shoal").lower()).strip("-")[:40].strip("-")
    return job.name or (name if _LABEL.fullmatch(name) else f"job-{name}"[:40].strip("-"))


def render(job: KubernetesJob, command: Sequence[str]) -> str:
    """Return the manifest of a JobSet (``jobset.x-k8s.io/v1alpha2``) as YAML.

    A mistake in the command (exit code 2) ends the JobSet; codes 75 and 76, evictions and preemptions start
    it again without being counted, other failures up to 3 times.
    """
    name = job_name(job, command)
    namespace = f"\n  namespace: {job.namespace}" if job.namespace else ""
    queue = f"\n  labels: {{kueue.x-k8s.io/queue-name: {job.queue}}}" if job.queue else ""
    return _JOBSET.format(
        name=name,
        meta=namespace + queue,
        helpers=_helpers(job, name) if job.helpers else "",
        workers=_workers(job, name, command),
    )


_JOBSET = """\
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {name}{meta}
spec:
  network: {{enableDNSHostnames: true, subdomain: {name}, publishNotReadyAddresses: true}}
  successPolicy: {{operator: All, targetReplicatedJobs: [workers]}}
  failurePolicy:
    maxRestarts: 3
    restartStrategy: BlockingRecreate
    rules:
    - name: mistake  # in the command
      action: FailJobSet
      onJobFailureReasons: [PodFailurePolicy]
      onJobFailureMessagePatterns: ["exit code 2 "]
    - name: resumable  # 75: saved and left; 76: another host is gone; or evicted
      action: RestartJobSetAndIgnoreMaxRestarts
      onJobFailureReasons: [PodFailurePolicy]
  replicatedJobs:
{helpers}{workers}"""

_HELPERS = """\
  - name: helpers
    template:
      spec:
        completionMode: Indexed
        completions: {count}
        parallelism: {count}
        template:
          spec:
            restartPolicy: OnFailure
            securityContext: {security}
            containers:
            - name: shoal
              image: {image}
              command: [shoal, serve, --address, $(POD_IP), --port, "{port}"]
              env:
              - {{name: SHOAL_SECRET_FILE, value: /run/shoal/secret}}
              - {{name: POD_IP, valueFrom: {{fieldRef: {{fieldPath: status.podIP}}}}}}
              resources: {{limits: {{cpu: "{cpus}", memory: {memory}}}}}
{probe}              volumeMounts: [{{name: secret, mountPath: /run/shoal, readOnly: true}}]
            volumes: [{{name: secret, secret: {{secretName: {name}-secret, defaultMode: 0440}}}}]
"""

_WORKERS = """\
  - name: workers
{depends}    template:
      spec:
        completionMode: Indexed
        completions: {count}
        parallelism: {count}
        backoffLimit: 0
        podFailurePolicy:
          rules:
          - {{action: FailJob, onExitCodes: {{operator: In, values: [2, 75, 76]}}}}
          - {{action: FailJob, onPodConditions: [{{type: DisruptionTarget, status: "True"}}]}}
        template:
          spec:
            restartPolicy: Never
            terminationGracePeriodSeconds: {grace}
            securityContext: {security}
{selector}            containers:
            - name: shoal
              image: {image}
              command:
                [shoal, launch, --nnodes={count}, --node-rank=$(JOB_COMPLETION_INDEX),
                 --rdzv={name}-workers-0-0.{name}:{port}, --job={mount}/jobs/{name},
                 --run-id={name}.$(RESTARTS){options}]
              args:
                [{command}]
              workingDir: {mount}
              env:
              - {{name: SHOAL_SECRET_FILE, value: /run/shoal/secret}}
              - {{name: RESTARTS, valueFrom: {{fieldRef: {{fieldPath: "metadata.labels['{restarts}']"}}}}}}
{servers}              resources: {{limits: {{{limits}}}}}
              volumeMounts:
              - {{name: secret, mountPath: /run/shoal, readOnly: true}}
              - {{name: runs, mountPath: {mount}}}
              - {{name: shm, mountPath: /dev/shm}}
            volumes:
            - {{name: secret, secret: {{secretName: {name}-secret, defaultMode: 0440}}}}
            - {{name: runs, persistentVolumeClaim: {{claimName: {claim}}}}}
            - {{name: shm, emptyDir: {{medium: Memory, sizeLimit: {shm}}}}}
"""


def _helpers(job: KubernetesJob, name: str) -> str:
    probe = f"              readinessProbe: {{tcpSocket: {{port: {HELPER_PORT}}}}}\n"
    return _HELPERS.format(
        count=job.helpers,
        image=job.image,
        port=HELPER_PORT,
        cpus=job.helper_cpus,
        memory=job.helper_memory,
        name=name,
        probe=probe if job.helpers_required else "",
        security=_security(job),
    )


def _workers(job: KubernetesJob, name: str, command: Sequence[str]) -> str:
    options = {"workers": job.workers_per_host, "global-batch": job.global_batch}
    given = [f"--{option}={value}" for option, value in options.items() if value is not None]
    servers = ",".join(f"{name}-helpers-0-{i}.{name}:{HELPER_PORT}" for i in range(job.helpers))
    limits = {
        job.gpu: job.gpus_per_host,
        "vpc.amazonaws.com/efa": job.efa_per_host,
        "cpu": job.cpus_per_host,
        "memory": job.memory_per_host,
    }
    labels = [label.partition("=") for label in job.node_selector]
    selector = ", ".join(f"{key}: {json.dumps(value)}" for key, _, value in labels)
    return _WORKERS.format(
        name=name,
        count=job.hosts,
        image=job.image,
        mount=job.mount,
        claim=job.claim,
        shm=job.shared_memory,
        port=MEETING_PORT,
        grace=job.save_s + _GRACE_MARGIN_S,
        security=_security(job),
        restarts="jobset.sigs.k8s.io/restart-attempt",
        depends="    dependsOn: [{name: helpers, status: Ready}]\n" if job.helpers_required else "",
        selector=f"            nodeSelector: {{{selector}}}\n" if selector else "",
        options="".join(f", {option}" for option in given),
        command=_flow(command),
        servers=f"              - {{name: SHOAL_HELPERS, value: {json.dumps(servers)}}}\n" if servers else "",
        limits=", ".join(f"{key}: {json.dumps(v)}" for key, v in limits.items() if v is not None),
    )


def _security(job: KubernetesJob) -> str:
    return f"{{runAsNonRoot: true, runAsUser: {job.user}, runAsGroup: {job.user}, fsGroup: {job.user}}}"


def _flow(command: Sequence[str]) -> str:
    """Return the words of the command for a list in brackets, an option a line if they are many."""
    text = ", ".join(map(_word, ["--", *command]))
    return text if len(text) <= 90 else re.sub(r", (?=--[a-z])", ",\n                 ", text)


def _word(word: str) -> str:
    """Return a word of the command for YAML; ``$$(`` keeps Kubernetes from replacing ``$(NAME)``."""
    word = word.replace("$(", "$$(")
    plain = re.fullmatch(r"[A-Za-z/][\w./-]*|--([A-Za-z][\w.-]*)?", word) and word.lower() not in _YAML_WORDS
    return word if plain else json.dumps(word, ensure_ascii=False)


_YAML_WORDS = frozenset(("y", "n", "yes", "no", "on", "off", "true", "false", "null"))


# ---- kubectl -----------------------------------------------------------------------------------------------


def submit(path: Path, name: str, namespace: str | None) -> None:
    """Create the job's secret, which goes to kubectl by a pipe, and the JobSet.

    Raises:
        ShoalError: kubectl is not here, or the cluster refuses.
    """
    where = ["--namespace", namespace] if namespace else []
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": f"{name}-secret"},
        "immutable": True,
        "stringData": {"secret": secrets.token_hex(32)},
    }
    _kubectl(["kubectl", "create", *where, "--filename", "-"], json.dumps(secret))
    _kubectl(["kubectl", "create", *where, "--filename", str(path)], "")


def _kubectl(command: list[str], text: str) -> None:
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=_DEADLINE_S)
    except FileNotFoundError:
        raise ShoalError("kubectl was not found: install it, or write the manifest with --to DIR") from None
    except subprocess.TimeoutExpired:
        raise ShoalError(f"the cluster did not answer kubectl in {_DEADLINE_S:g} s") from None
    if done.returncode != 0:
        hint = "; kubectl delete it, or choose another --name" if "AlreadyExists" in done.stderr else ""
        raise ShoalError(f"kubectl: {done.stderr.strip()}{hint}")
