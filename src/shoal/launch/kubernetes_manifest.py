"""Writes manifests for Kubernetes: the pods of workers and helpers.

A JobSet has both as replicated jobs; a TrainJob of Kubeflow names a runtime, which has them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from textwrap import indent

from shoal.env.settings import TRANSPORT
from shoal.launch.job_size import HELPER_PORT, RENDEZVOUS_PORT, is_elastic
from shoal.launch.kubernetes import KubernetesJob, job_name

_GRACE_MARGIN_S = 60
_EFA = "vpc.amazonaws.com/efa"
_RESTARTS = "jobset.sigs.k8s.io/restart-attempt"


def render(job: KubernetesJob, command: Sequence[str]) -> str:
    """Return the manifest as YAML.

    A mistake in the command (exit code 2) ends the job; codes 75 and 76, evictions and preemptions start it
    again without being counted, other failures up to 3 times.
    """
    write = {"jobset": _jobset, "trainjob": _trainjob}[job.api]
    return write(job, job_name(job, command), command)


def _jobset(job: KubernetesJob, name: str, command: Sequence[str]) -> str:
    head = f"apiVersion: jobset.x-k8s.io/v1alpha2\nkind: JobSet\n{_metadata(job, name, queue=job.queue)}"
    return f"{head}spec:\n{indent(_jobset_spec(job, name, command, workers='workers'), '  ')}"


def _trainjob(job: KubernetesJob, name: str, command: Sequence[str]) -> str:
    version = "apiVersion: trainer.kubeflow.org/v1alpha1"
    spec = indent(_jobset_spec(job, name, command, workers="node"), "      ")
    runtime = f"{version}\nkind: TrainingRuntime\n{_metadata(job, name)}spec:\n"
    runtime += f"  mlPolicy: {{numNodes: {job.hosts}}}\n  template:\n    spec:\n{spec}"
    head = f"---\n{version}\nkind: TrainJob\n{_metadata(job, name, queue=job.queue)}spec:\n"
    runs = f"  runtimeRef: {{kind: TrainingRuntime, name: {name}}}\n  trainer: {{numNodes: {job.hosts}}}\n"
    return runtime + head + runs


def _metadata(job: KubernetesJob, name: str, *, queue: str | None = None) -> str:
    namespace = f"\n  namespace: {job.namespace}" if job.namespace else ""
    label = f"\n  labels: {{kueue.x-k8s.io/queue-name: {queue}}}" if queue else ""
    return f"metadata:\n  name: {name}{namespace}{label}\n"


def _jobset_spec(job: KubernetesJob, name: str, command: Sequence[str], *, workers: str) -> str:
    """Return the spec of a JobSet whose replicated job of workers has the given name."""
    helpers = f"- name: helpers\n  template:\n    spec:\n{indent(_helper_job(job, name), '      ')}"
    depends = "  dependsOn: [{name: helpers, status: Ready}]\n" if job.helpers_required else ""
    trainer = "    metadata: {labels: {trainer.kubeflow.org/trainjob-ancestor-step: trainer}}\n"
    mine = f"- name: {workers}\n{depends}  template:\n{trainer if workers == 'node' else ''}    spec:\n"
    mine += indent(_worker_job(job, name, command, workers), "      ")
    return _JOBSET.format(name=name, workers=workers, jobs=(helpers if job.helpers else "") + mine)


_JOBSET = """\
network: {{enableDNSHostnames: true, subdomain: {name}, publishNotReadyAddresses: true}}
successPolicy: {{operator: All, targetReplicatedJobs: [{workers}]}}
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
{jobs}"""

_HELPERS = """\
completionMode: Indexed
completions: {count}
parallelism: {count}
template:
{pod}  spec:
    restartPolicy: OnFailure
    securityContext: {security}
    automountServiceAccountToken: false
{scheduling}    containers:
    - name: shoal
      image: {image}
      securityContext: {container_security}
      command: [shoal, serve, --address, $(POD_IP), --port, "{port}"]
      env:
      - {{name: SHOAL_SECRET_FILE, value: /run/shoal/secret}}
      - {{name: POD_IP, valueFrom: {{fieldRef: {{fieldPath: status.podIP}}}}}}
{transport}      resources: {{limits: {{{limits}}}}}
{probe}      volumeMounts: [{{name: secret, mountPath: /run/shoal, readOnly: true}}]
    volumes: [{{name: secret, secret: {{secretName: {name}-secret, defaultMode: 0440}}}}]
"""

_WORKERS = """\
completionMode: Indexed
completions: {count}
parallelism: {count}
{failures}template:
{pod}  spec:
    restartPolicy: Never
    terminationGracePeriodSeconds: {grace}
    securityContext: {security}
    automountServiceAccountToken: false
{scheduling}    containers:
    - name: {container}
      image: {image}
      securityContext: {container_security}
      command: [shoal, launch, --nnodes={count}, --node-rank=$(JOB_COMPLETION_INDEX),
         --rdzv={name}-{workers}-0-0.{name}:{port}, --job={mount}/jobs/{name},
         --run-id={name}.$(RESTARTS){options}]
      args:
        [{command}]
      workingDir: {mount}
      env:
      - {{name: SHOAL_SECRET_FILE, value: /run/shoal/secret}}
{gpus}      - {{name: RESTARTS, valueFrom: {{fieldRef: {{fieldPath: "metadata.labels['{restarts}']"}}}}}}
{servers}{transport}      resources: {{limits: {{{limits}}}}}
      volumeMounts:
      - {{name: secret, mountPath: /run/shoal, readOnly: true}}
      - {{name: runs, mountPath: {mount}}}
      - {{name: shm, mountPath: /dev/shm}}
    volumes:
    - {{name: secret, secret: {{secretName: {name}-secret, defaultMode: 0440}}}}
    - {{name: runs, persistentVolumeClaim: {{claimName: {claim}}}}}
    - {{name: shm, emptyDir: {{medium: Memory, sizeLimit: {shm}}}}}
"""


_FAILURES = """\
backoffLimit: 0
podFailurePolicy:
  rules:
  - {action: FailJob, onExitCodes: {operator: In, values: [2, 75, 76]}}
  - {action: FailJob, onPodConditions: [{type: DisruptionTarget, status: "True"}]}
"""
"""All workers start again together."""
_ELASTIC_FAILURES = """\
backoffLimit: 100
successPolicy: {rules: [{succeededIndexes: "0"}]}
podFailurePolicy:
  rules:
  - {action: FailJob, onExitCodes: {operator: In, values: [2]}}
  - {action: Ignore, onExitCodes: {operator: In, values: [75, 76]}}
  - {action: Ignore, onPodConditions: [{type: DisruptionTarget, status: "True"}]}
"""
"""A pod that fails is replaced, and its workers are taken in by the others."""


def _helper_job(job: KubernetesJob, name: str) -> str:
    """Return the spec of the helpers' Job, which JobSet ends with the workers'."""
    probe = f"      readinessProbe: {{tcpSocket: {{port: {HELPER_PORT}}}}}\n"
    limits = {
        "cpu": job.helper_cpus,
        "memory": job.helper_memory,
        _EFA: (job.helper_efa or 1) if job.uses_efa else None,
    }
    return _HELPERS.format(
        count=job.helpers,
        name=name,
        image=job.image,
        port=HELPER_PORT,
        limits=_flow_map(limits),
        scheduling=_scheduling(job, job.helper_node_selector, job.helper_toleration),
        probe=probe if job.helpers_required else "",
        **_common(job, name),
    )


def _worker_job(job: KubernetesJob, name: str, command: Sequence[str], workers: str) -> str:
    servers = ",".join(f"{name}-helpers-0-{number}.{name}:{HELPER_PORT}" for number in range(job.helpers))
    limits = {
        job.gpu: job.gpus_per_host,
        _EFA: job.efa_per_host,
        "cpu": job.cpus_per_host,
        "memory": job.memory_per_host,
    }
    return _WORKERS.format(
        name=name,
        workers=workers,
        count=job.hosts,
        failures=_ELASTIC_FAILURES if is_elastic(command) else _FAILURES,
        container="node" if workers == "node" else "shoal",
        image=job.image,
        mount=job.mount,
        claim=job.claim,
        shm=job.shared_memory,
        port=RENDEZVOUS_PORT,
        grace=job.save_s + _GRACE_MARGIN_S,
        restarts=_RESTARTS,
        gpus=f'      - {{name: SHOAL_GPUS, value: "{job.gpus_per_host}"}}\n' if job.gpus_per_host else "",
        scheduling=_scheduling(job, job.node_selector, job.toleration),
        options="".join(f", {option}" for option in job.launch_options()),
        command=_flow(command),
        servers=f"      - {{name: SHOAL_HELPERS, value: {json.dumps(servers)}}}\n" if servers else "",
        limits=_flow_map(limits),
        **_common(job, name),
    )


def _scheduling(job: KubernetesJob, selector: Sequence[str], tolerations: Sequence[str]) -> str:
    """Return the lines of a pod about the nodes where it may run, and its service account."""
    labels = {key: value for key, _, value in (label.partition("=") for label in selector)}
    tolerated = ", ".join(f"{{{_flow_map(_toleration(text))}}}" for text in tolerations)
    lines = [
        *([f"serviceAccountName: {json.dumps(job.service_account)}"] if job.service_account else []),
        *([f"nodeSelector: {{{_flow_map(labels)}}}"] if labels else []),
        *([f"tolerations: [{tolerated}]"] if tolerated else []),
    ]
    return "".join(f"    {line}\n" for line in lines)


def _toleration(text: str) -> dict[str, str | None]:
    """Return the toleration of a taint as ``kubectl taint`` writes it; without a value, of any."""
    taint, _, effect = text.partition(":")
    key, has_value, value = taint.partition("=")
    operator = {"operator": "Equal", "value": value} if has_value else {"operator": "Exists"}
    return {"key": key, **operator, "effect": effect or None}


def _flow_map(values: Mapping[str, object]) -> str:
    """Return the fields of a YAML map on one line, without those that are ``None``."""
    return ", ".join(f"{key}: {json.dumps(value)}" for key, value in values.items() if value is not None)


def _common(job: KubernetesJob, name: str) -> dict[str, str]:
    """Return the common part of the pods of workers and helpers: a namespace may be "restricted"."""
    annotations = f"      kueue.x-k8s.io/podset-required-topology: {job.topology}\n"
    if job.helpers:
        annotations += f"      kueue.x-k8s.io/podset-group-name: {name}  # workers and helpers side by side\n"
    transport = json.dumps(job.chosen_transport)
    ids = ", ".join(f"{key}: {job.user}" for key in ("runAsUser", "runAsGroup", "fsGroup"))
    return {
        "security": f"{{runAsNonRoot: true, {ids}, seccompProfile: {{type: RuntimeDefault}}}}",
        "container_security": "{allowPrivilegeEscalation: false, capabilities: {drop: [ALL]}}",
        "transport": f"      - {{name: {TRANSPORT}, value: {transport}}}\n" if job.chosen_transport else "",
        "pod": f"  metadata:\n    annotations:\n{annotations}" if job.topology else "",
    }


def _flow(command: Sequence[str]) -> str:
    """Return the words of the command for a YAML list; a long one has each option on a line of its own."""
    text = ", ".join(map(_word, ["--", *command]))
    return text if len(text) <= 90 else re.sub(r", (?=--[a-z])", ",\n         ", text)


def _word(word: str) -> str:
    """Return a word of the command for YAML; ``$$(`` prevents Kubernetes from replacing ``$(NAME)``."""
    word = word.replace("$(", "$$(")
    plain = re.fullmatch(r"[A-Za-z/][\w./-]*|--([A-Za-z][\w.-]*)?", word) and word.lower() not in _YAML_WORDS
    return word if plain else json.dumps(word, ensure_ascii=False)


_YAML_WORDS = frozenset(("y", "n", "yes", "no", "on", "off", "true", "false", "null"))
