"""Manifests for Kubernetes against the controllers' own schemas, read strictly, and the rules beside them."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from shoal.env.settings import test_data_dir as data_dir
from shoal.errors import ShoalError, UsageError
from shoal.launch import kubernetes
from shoal.launch.kubernetes import KubernetesJob, job_name
from shoal.launch.kubernetes_manifest import render

SCHEMAS = data_dir() / "kubernetes"
BERT = ("shoal", "train", "bert", "--preset", "large", "--data.path", "/runs/my text", "--run.dir", "/runs/b")
COMMON = {"hosts": 8, "image": "registry.example/shoal:1", "claim": "runs", "gpus_per_host": 8}


def documents(command: tuple[str, ...] = BERT, **settings: Any) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(render(KubernetesJob(**{**COMMON, **settings}), command)))


def manifest(command: tuple[str, ...] = BERT, **settings: Any) -> dict[str, Any]:
    (found,) = documents(command, **settings)
    return found


def strict(schema: Any) -> Any:
    """Return a CRD's schema as JSON schema that refuses unknown fields."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: v if key in ("enum", "default", "required") else strict(v) for key, v in schema.items()}
    if kept.get("x-kubernetes-int-or-string"):
        kept.pop("type", None)
        kept.setdefault("anyOf", [{"type": "integer"}, {"type": "string"}])
    open_object = kept.get("x-kubernetes-preserve-unknown-fields")
    if kept.get("type") == "object" and "properties" in kept and not open_object:
        kept.setdefault("additionalProperties", False)
    return kept


@cache
def schema(file: str) -> Any:
    if not (SCHEMAS / file).exists():
        pytest.skip(f"{SCHEMAS / file} is not here")
    (definition,) = yaml.load((SCHEMAS / file).read_text(), Loader=yaml.CSafeLoader)["spec"]["versions"]
    return strict(definition["schema"]["openAPIV3Schema"])


@cache
def validator(kind: str) -> jsonschema.Draft7Validator:
    files = {
        "JobSet": "jobset.yaml",
        "TrainingRuntime": "trainingruntimes.yaml",
        "TrainJob": "trainjobs.yaml",
    }
    return jsonschema.Draft7Validator(schema(files[kind]))


def problems(document: dict[str, Any]) -> list[str]:
    """Return the violations of the schema, of the rules beside it and of those of Jobs."""
    kind = document["kind"]
    found = [
        f"{'/'.join(map(str, each.path))}: {each.message}" for each in validator(kind).iter_errors(document)
    ]
    if found or kind == "TrainJob":
        return found
    return rules_of_a_runtime(document) if kind == "TrainingRuntime" else rules(document)


def rules_of_a_runtime(runtime: dict[str, Any]) -> list[str]:
    """Check the rules of the webhooks of Kubeflow's trainer."""
    spec, found = runtime["spec"]["template"]["spec"], []
    if any(each.get("replicas", 1) != 1 for each in spec["replicatedJobs"]):
        found.append("replicas must be 1")
    steps = [each for each in spec["replicatedJobs"] if "metadata" in each["template"]]
    label = "trainer.kubeflow.org/trainjob-ancestor-step"
    if [each["template"]["metadata"]["labels"].get(label) for each in steps] != ["trainer"]:
        found.append("one job is the trainer's step")
    elif steps[0]["template"]["spec"]["template"]["spec"]["containers"][0]["name"] != "node":
        found.append("the trainer's container is called node")
    elif steps[0]["template"]["spec"]["completions"] != runtime["spec"]["mlPolicy"]["numNodes"]:
        found.append("as many completions as nodes")
    return found + rules({"metadata": runtime["metadata"], "spec": spec})


def rules_of_a_job(name: str, job: dict[str, Any]) -> list[str]:
    """Check the API server's rules of an Indexed Job beside the schema."""
    pod, found = job["template"]["spec"], []
    if "podFailurePolicy" in job and pod["restartPolicy"] != "Never":
        found.append("a podFailurePolicy needs restartPolicy Never")
    if "podFailurePolicy" in job and job.get("podReplacementPolicy") == "TerminatingOrFailed":
        found.append("a podFailurePolicy needs podReplacementPolicy Failed")
    if job["completionMode"] != "Indexed":
        found.append("pods have names only in Indexed jobs")
    if job["parallelism"] != job["completions"]:
        found.append("all pods run at once")
    volumes = {volume["name"] for volume in pod["volumes"]}
    if any(mount["name"] not in volumes for mount in pod["containers"][0]["volumeMounts"]):
        found.append("a mount without its volume")
    if len(f"{name}-{job['completions'] - 1}") > 63:
        found.append("the pods' names are too long")
    return found + rules_of_restricted_pods(pod)


def rules_of_restricted_pods(pod: dict[str, Any]) -> list[str]:
    """Check the rules of the Pod Security Standard "restricted" (Kubernetes 1.25 to 1.34)."""
    found, outer = [], pod.get("securityContext", {})
    volumes = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim"}
    volumes |= {"projected", "secret", "name"}
    if any(pod.get(name) for name in ("hostNetwork", "hostPID", "hostIPC")):
        found.append("the host's namespaces")
    if any(volume.keys() - volumes for volume in pod["volumes"]):
        found.append("restricted volume types")
    for container in (*pod["containers"], *pod.get("initContainers", [])):
        own = container.get("securityContext", {})
        if own.get("allowPrivilegeEscalation") is not False:
            found.append("allowPrivilegeEscalation != false")
        if "ALL" not in own.get("capabilities", {}).get("drop", []):
            found.append("unrestricted capabilities")
        if not own.get("runAsNonRoot", outer.get("runAsNonRoot")):
            found.append("runAsNonRoot != true")
        if own.get("runAsUser", outer.get("runAsUser")) == 0:
            found.append("runAsUser=0")
        if {**outer, **own}.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
            found.append("seccompProfile")
        if any("hostPort" in port for port in container.get("ports", [])):
            found.append("hostPort")
    if pod.get("automountServiceAccountToken") is not False:  # no part of it, but nothing here needs a token
        found.append("the token of the service account")
    return found


def rules(jobset: dict[str, Any]) -> list[str]:
    """Check the API server's rules beside the schema."""
    spec, found = jobset["spec"], []
    names = [each["name"] for each in spec["replicatedJobs"]]
    if "startupPolicy" in spec and any("dependsOn" in each for each in spec["replicatedJobs"]):
        found.append("startupPolicy and dependsOn exclude each other")
    for number, each in enumerate(spec["replicatedJobs"]):
        if any(other["name"] not in names[:number] for other in each.get("dependsOn", [])):
            found.append("dependsOn names an earlier job")
        found += rules_of_a_job(f"{jobset['metadata']['name']}-{each['name']}-0", each["template"]["spec"])
    for rule in spec["failurePolicy"]["rules"]:
        if not re.fullmatch(r"[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?", rule["name"]):
            found.append("the name of a rule")
    if any(name not in names for name in spec["successPolicy"]["targetReplicatedJobs"]):
        found.append("successPolicy names no job")
    return found


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"helpers": 4},
        {"helpers": 4, "helpers_required": True, "queue": "team", "namespace": "train", "efa_per_host": 4},
        {"gpus_per_host": None, "cpus_per_host": "16", "memory_per_host": "64Gi", "global_batch": 512},
        {"node_selector": ("node.kubernetes.io/instance-type=p4d.24xlarge",), "workers_per_host": 8},
        {"helpers": 2, "queue": "team", "topology": "cloud.provider.com/topology-rack"},
        {"name": "a" * 40, "hosts": 1000, "helpers": 1000},
        {
            "helpers": 2, "efa_per_host": 4, "helper_efa": 2, "service_account": "trainer.a",
            "toleration": ("nvidia.com/gpu:NoSchedule", "team=bert", "a"),
            "helper_toleration": ("b=:NoExecute",),
            "helper_node_selector": ("node.kubernetes.io/instance-type=c5n.18xlarge", "a=true"),
        },
        {"helpers": 2, "efa_per_host": 4, "transport": "tcp"},
    ],
    ids=["least", "helpers", "required", "cpus", "selector", "rack", "many", "efa", "tcp"],
)  # fmt: skip
@pytest.mark.parametrize("api", ["jobset", "trainjob"])
def test_the_api_accepts_manifests(settings: dict[str, Any], api: str) -> None:
    found = documents(**settings, api=api)
    kinds = {"jobset": ["JobSet"], "trainjob": ["TrainingRuntime", "TrainJob"]}
    assert [each["kind"] for each in found] == kinds[api]
    assert [problems(each) for each in found] == [[]] * len(found)


@pytest.mark.parametrize("api", ["jobset", "trainjob"])
def test_a_pod_is_replaced_alone_where_workers_come_and_go(api: str) -> None:
    found = documents((*BERT, "--distributed.elastic", "4:8"), api=api)
    assert [problems(each) for each in found] == [[]] * len(found)
    spec = found[0]["spec"] if api == "jobset" else found[0]["spec"]["template"]["spec"]
    job = spec["replicatedJobs"][-1]["template"]["spec"]
    actions = {
        code: rule["action"]
        for rule in job["podFailurePolicy"]["rules"]
        for code in rule.get("onExitCodes", {"values": ["evicted"]})["values"]
    }
    assert actions == {2: "FailJob", 75: "Ignore", 76: "Ignore", "evicted": "Ignore"}
    assert job["backoffLimit"] == 100
    assert job["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}  # one may be away at the end


Change = Callable[[dict[str, Any]], Any]


def workers_of(jobset: dict[str, Any]) -> Any:
    return jobset["spec"]["replicatedJobs"][1]


def job_of(jobset: dict[str, Any]) -> Any:
    return workers_of(jobset)["template"]["spec"]


def pod_of(jobset: dict[str, Any]) -> Any:
    return job_of(jobset)["template"]["spec"]


JOBSET_MISTAKES: list[tuple[Change, str]] = [
    (lambda m: m["spec"].update(failPolicy={}), "failPolicy"),
    (
        lambda m: m["spec"]["failurePolicy"]["rules"][0].update(action="Restart"),
        "'Restart' is not one of",
    ),
    (lambda m: m["spec"]["failurePolicy"].update(restartStrategy="Block"), "'Block' is not one of"),
    (lambda m: workers_of(m).update(replica=1), "replica"),
    (lambda m: workers_of(m)["dependsOn"][0].update(status="Running"), "'Running' is not one of"),
    (lambda m: workers_of(m)["dependsOn"][0].update(name="helper"), "dependsOn names an earlier job"),
    (lambda m: m["spec"].update(startupPolicy={"startupPolicyOrder": "InOrder"}), "exclude each other"),
    (lambda m: pod_of(m)["containers"][0].update(resource={}), "resource"),
    (lambda m: pod_of(m)["containers"][0]["volumeMounts"][0].update(name="x"), "a mount without its"),
    (lambda m: pod_of(m).update(restartPolicy="OnFailure"), "needs restartPolicy Never"),
    (lambda m: m["spec"]["failurePolicy"]["rules"][0].update(name="not-allowed"), "the name of a rule"),
    (lambda m: pod_of(m).update(terminationGracePeriodSeconds="180s"), "is not of type 'integer'"),
    (lambda m: pod_of(m)["securityContext"].pop("seccompProfile"), "seccompProfile"),
    (lambda m: pod_of(m)["containers"][0].pop("securityContext"), "unrestricted capabilities"),
    (lambda m: pod_of(m).update(hostNetwork=True), "the host's namespaces"),
    (lambda m: job_of(m).update(backofLimit=1), "backofLimit"),
    (lambda m: job_of(m).update(completions="8"), "is not of type 'integer'"),
    (lambda m: job_of(m).update(completionMode="NonIndexed"), "only in Indexed jobs"),
    (lambda m: job_of(m).update(parallelism=4), "all pods run at once"),
    (lambda m: job_of(m).update(podReplacementPolicy="TerminatingOrFailed"), "podReplacementPolicy Failed"),
    (lambda m: job_of(m)["podFailurePolicy"]["rules"][0].pop("action"), "'action' is a required"),
    (lambda m: pod_of(m)["containers"][0].update(workdir="/"), "workdir"),
    (lambda m: pod_of(m)["volumes"].pop(0), "a mount without its volume"),
]


@pytest.mark.parametrize(("change", "said"), JOBSET_MISTAKES)
def test_planted_mistakes_are_found(change: Change, said: str) -> None:
    good = manifest(helpers=2, helpers_required=True)
    bad = copy.deepcopy(good)
    change(bad)
    assert problems(good) == []
    assert said in "; ".join(problems(bad))


TRAINJOB_MISTAKES: list[tuple[int, Change, str]] = [
    (0, lambda m: m["spec"]["mlPolicy"].update(numNode=8), "numNode"),
    (0, lambda m: m["spec"]["mlPolicy"].update(numNodes=4), "as many completions as nodes"),
    (0, lambda m: workers_of(m["spec"]["template"]).update(replicas=2), "replicas must be 1"),
    (0, lambda m: workers_of(m["spec"]["template"])["template"].pop("metadata"), "the trainer's step"),
    (0, lambda m: pod_of(m["spec"]["template"])["containers"][0].update(name="shoal"), "is called node"),
    (0, lambda m: pod_of(m["spec"]["template"])["containers"][0].update(resource={}), "resource"),
    (1, lambda m: m["spec"]["trainer"].update(numNodes="8"), "is not of type 'integer'"),
    (1, lambda m: m["spec"].update(podTemplateOverrides=[]), "podTemplateOverrides"),
    (1, lambda m: m["spec"]["runtimeRef"].pop("name"), "'name' is a required property"),
]


@pytest.mark.parametrize(("kind", "change", "said"), TRAINJOB_MISTAKES)
def test_planted_mistakes_in_trainjobs_are_found(kind: int, change: Change, said: str) -> None:
    good = documents(helpers=2, api="trainjob")[kind]
    bad = copy.deepcopy(good)
    change(bad)
    assert problems(good) == []
    assert said in "; ".join(problems(bad))


def test_kueue_keeps_all_pods_in_one_rack() -> None:
    jobset = manifest(helpers=2, queue="team", topology="example/rack")
    for each in jobset["spec"]["replicatedJobs"]:
        assert each["template"]["spec"]["template"]["metadata"]["annotations"] == {
            "kueue.x-k8s.io/podset-group-name": "bert",
            "kueue.x-k8s.io/podset-required-topology": "example/rack",
        }
    assert jobset["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team"}


def test_the_common_case_has_at_most_60_lines_and_no_secret() -> None:
    text = render(KubernetesJob(**COMMON, queue="team"), BERT)
    assert len(text.splitlines()) <= 60
    assert "stringData" not in text and "\t" not in text


def test_commands_variables_and_limits_of_the_containers() -> None:
    jobset = manifest(helpers=2, global_batch=512, efa_per_host=4)
    helpers, workers = (
        each["template"]["spec"]["template"]["spec"]["containers"][0]
        for each in jobset["spec"]["replicatedJobs"]
    )
    assert helpers["command"] == ["shoal", "serve", "--address", "$(POD_IP)", "--port", "7070"]
    assert workers["command"] == [
        "shoal", "launch", "--nnodes=8", "--node-rank=$(JOB_COMPLETION_INDEX)",
        "--rdzv=bert-workers-0-0.bert:29400", "--job=/runs/jobs/bert", "--run-id=bert.$(RESTARTS)",
        "--global-batch=512",
    ]  # fmt: skip
    assert workers["args"] == ["--", *BERT]
    variables = {each["name"]: each.get("value") for each in workers["env"]}
    assert variables["SHOAL_HELPERS"] == "bert-helpers-0-0.bert:7070,bert-helpers-0-1.bert:7070"
    assert variables["SHOAL_SECRET_FILE"] == "/run/shoal/secret"
    assert workers["resources"]["limits"] == {"nvidia.com/gpu": 8, "vpc.amazonaws.com/efa": 4}
    assert variables["SHOAL_TRANSPORT"] == "ofi:efa"
    secret = pod_of(jobset)["volumes"][0]["secret"]
    assert secret == {"secretName": "bert-secret", "defaultMode": 0o440}
    assert pod_of(jobset)["securityContext"]["fsGroup"] == 1000
    assert pod_of(jobset)["terminationGracePeriodSeconds"] == 180


def pods_of(jobset: dict[str, Any]) -> list[Any]:
    """Return the pods of helpers and of workers."""
    return [each["template"]["spec"]["template"]["spec"] for each in jobset["spec"]["replicatedJobs"]]


@pytest.mark.parametrize("api", ["jobset", "trainjob"])
def test_efa_is_for_workers_and_helpers_or_for_nccl_alone(api: str) -> None:
    def found(**settings: Any) -> list[tuple[Any, Any]]:
        first = documents(helpers=2, api=api, **settings)[0]
        pods = pods_of(first["spec"]["template"] if api == "trainjob" else first)
        containers = [pod["containers"][0] for pod in pods]
        variables = [{each["name"]: each.get("value") for each in one["env"]} for one in containers]
        efa = [one["resources"]["limits"].get("vpc.amazonaws.com/efa") for one in containers]
        return list(zip(efa, (each.get("SHOAL_TRANSPORT") for each in variables), strict=True))

    assert found() == [(None, None), (None, None)]
    assert found(efa_per_host=4) == [(1, "ofi:efa"), (4, "ofi:efa")]
    assert found(efa_per_host=4, helper_efa=2) == [(2, "ofi:efa"), (4, "ofi:efa")]
    assert found(efa_per_host=4, transport="tcp") == [(None, "tcp"), (4, "tcp")]
    assert found(transport="ofi:tcp;ofi_rxm") == [(None, "ofi:tcp;ofi_rxm")] * 2


def test_where_pods_may_run_and_for_whom() -> None:
    jobset = manifest(
        helpers=2, service_account="trainer", node_selector=("pool=gpu",), helper_node_selector=("pool=1",),
        toleration=("nvidia.com/gpu:NoSchedule", "team=bert", "a=:NoExecute"), helper_toleration=("any",),
    )  # fmt: skip
    helpers, workers = pods_of(jobset)
    assert workers["nodeSelector"] == {"pool": "gpu"} and helpers["nodeSelector"] == {"pool": "1"}
    assert workers["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "team", "operator": "Equal", "value": "bert"},
        {"key": "a", "operator": "Equal", "value": "", "effect": "NoExecute"},
    ]
    assert helpers["tolerations"] == [{"key": "any", "operator": "Exists"}]
    for pod in (helpers, workers):
        assert pod["serviceAccountName"] == "trainer"
        assert pod["automountServiceAccountToken"] is False  # a role in AWS has a volume of its own
    for pod in pods_of(manifest(helpers=2)):
        assert not {"nodeSelector", "tolerations", "serviceAccountName"} & pod.keys()


def test_the_words_of_the_command_arrive_as_they_are() -> None:
    words = (
        "python",
        "a b",
        "it's",
        '"',
        "$(HOME)",
        "$HOME",
        "{x}",
        "no",
        "7",
        "",
        "# x",
        "é",
        "a: b",
        "-",
        "\n",
    )
    container = manifest(words, helpers=1)["spec"]["replicatedJobs"][1]["template"]["spec"]["template"]
    given = container["spec"]["containers"][0]["args"]
    assert given == ["--"] + [word.replace("$(", "$$(") for word in words]


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"hosts": 0}, "--hosts 0 must be at least 1"),
    ({"helpers": -1}, "--helpers -1 must be at least 0"),
    ({"gpus_per_host": None}, "say what a worker pod has"),
    ({"image": "x y"}, "--image 'x y' is not what Kubernetes takes"),
    ({"claim": "Runs"}, "--claim 'Runs' is not"),
    ({"name": "my_job"}, "--name 'my_job' is not"),
    ({"queue": "a\n  b: c"}, "--queue .* is not"),
    ({"workers_per_host": 9}, "--workers-per-host 9 must be at most --gpus-per-host 8"),
    ({"memory_per_host": "64 GB"}, "--memory-per-host '64 GB' is not"),
    ({"node_selector": ("p4d",)}, "--node-selector 'p4d' is not of the form KEY=VALUE"),
    ({"user": 0}, "--user 0 must be at least 1: not root"),
    ({"mount": "runs"}, "--mount 'runs' is not"),
    ({"topology": "rack"}, "--topology rack is for Kueue: name its --queue too"),
    ({"helper_node_selector": ("c5n",)}, "--helper-node-selector 'c5n' is not of the form KEY=VALUE"),
    ({"toleration": ("a:Never",)}, "--toleration 'a:Never' is not of the form KEY, KEY=VALUE or"),
    ({"helper_toleration": ("a b",)}, "--helper-toleration 'a b' is not of the form"),
    ({"service_account": "Me"}, "--service-account 'Me' is not"),
    ({"transport": "udp"}, "transport 'udp' is not known; it is tcp, or ofi:"),
    ({"transport": "ofi:efa"}, "--transport ofi:efa needs the pods' devices: add --efa-per-host N"),
    ({"helper_efa": 1}, "--helper-efa 1 is of no use over TCP: add --efa-per-host N"),
    ({"efa_per_host": 4, "transport": "tcp", "helper_efa": 1}, "--helper-efa 1 is of no use over TCP"),
    ({"helper_efa": 0}, "--helper-efa 0 must be at least 1"),
]


@pytest.mark.parametrize(("settings", "said"), SETTINGS)
def test_mistakes_are_found_before_the_api_sees_them(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        KubernetesJob(**{**COMMON, **settings})


def test_names() -> None:
    job = KubernetesJob(**COMMON)
    assert job_name(job, BERT) == "bert"
    assert job_name(job, ("python", "My_Script 2.py")) == "my-script-2"
    assert job_name(job, ("python", "7.py")) == "job-7"


def test_the_secret_goes_to_kubectl_by_a_pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "kubectl"
    program.write_text('#!/bin/sh\necho "$@" >> "$(dirname "$0")/said"\ncat >> "$(dirname "$0")/piped"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    kubernetes.submit(tmp_path / "job.yaml", "bert", "train")
    said = (tmp_path / "said").read_text().splitlines()
    assert said == [
        "create --namespace train --filename -",
        f"create --namespace train --filename {tmp_path}/job.yaml",
    ]
    piped = yaml.safe_load((tmp_path / "piped").read_text())
    assert piped["metadata"] == {"name": "bert-secret"}
    assert len(piped["stringData"]["secret"]) == 64 and piped["immutable"] is True
    program.write_text("#!/bin/sh\necho 'secrets \"bert-secret\" AlreadyExists' >&2; exit 1\n")
    with pytest.raises(ShoalError, match=r"AlreadyExists; kubectl delete it, or choose another --name"):
        kubernetes.submit(tmp_path / "job.yaml", "bert", None)
    program.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ShoalError, match="kubectl was not found"):
        kubernetes.submit(tmp_path / "job.yaml", "bert", None)


@pytest.mark.parametrize(
    ("complaint", "remedy"),
    [
        (
            'jobs.batch "bert" is forbidden: exceeded quota: team, requested: nvidia.com/gpu=64, used: '
            "nvidia.com/gpu=8, limited: nvidia.com/gpu=64",
            "kubectl describe resourcequota shows what is left",
        ),
        (
            'no matches for kind "JobSet" in version "jobset.x-k8s.io/v1alpha2"',
            "or use --api trainjob",
        ),
        (
            'no matches for kind "TrainJob" in version "trainer.kubeflow.org/v1alpha1"',
            "or use --api jobset",
        ),
        (
            'localqueues.kueue.x-k8s.io "teem" not found',
            "kubectl get localqueues lists the queues of --queue",
        ),
        ('namespaces "trian" not found', "kubectl get namespaces lists those of --namespace"),
        ('jobs.batch is forbidden: User "me" cannot create resource', "kubectl auth can-i --list"),
        ("You must be logged in to the server (Unauthorized)", "aws eks update-kubeconfig"),
        ("The connection to the server 10.0.0.1:6443 was refused", "kubectl config current-context"),
    ],
)
def test_errors_of_the_cluster_have_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, complaint: str, remedy: str
) -> None:
    (tmp_path / "kubectl").write_text(f"#!/bin/sh\necho 'error: {complaint}' >&2; exit 1\n")
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(ShoalError) as raised:
        kubernetes.submit(tmp_path / "job.yaml", "bert", None)
    assert complaint in str(raised.value) and remedy in str(raised.value)


def test_the_queue_is_looked_up_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kubectl").write_text(
        '#!/bin/sh\necho "$@" >> "$(dirname "$0")/said"\n[ "$1" != get ] || { cat "$0.says" >&2; exit 1; }\n'
    )
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    (tmp_path / "kubectl.says").write_text('localqueues.kueue.x-k8s.io "team" not found')
    with pytest.raises(ShoalError, match="kubectl get localqueues lists the queues"):
        kubernetes.submit(tmp_path / "job.yaml", "bert", "train", "team")
    said = (tmp_path / "said").read_text()
    assert said == "get --namespace train localqueues.kueue.x-k8s.io team --output=name\n"
    (tmp_path / "kubectl.says").write_text("localqueues is forbidden: User cannot get resource")
    kubernetes.submit(tmp_path / "job.yaml", "bert", "train", "team")
    assert (tmp_path / "said").read_text().count("create --namespace train") == 2
