"""Manifests for Kubernetes against JobSet's own schema, read strictly, and the rules that it has as code."""

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

from shoal.env import test_data_dir as data_dir
from shoal.errors import ShoalError, UsageError
from shoal.launch import kubernetes
from shoal.launch.kubernetes import KubernetesJob, job_name, render

SCHEMA = data_dir() / "kubernetes" / "jobset.yaml"
BERT = ("shoal", "train", "bert", "--preset", "large", "--data.path", "/runs/my text", "--run.dir", "/runs/b")
COMMON = {"hosts": 8, "image": "registry.example/shoal:1", "claim": "runs", "gpus_per_host": 8}


def manifest(command: tuple[str, ...] = BERT, **settings: Any) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(render(KubernetesJob(**{**COMMON, **settings}), command))
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
def validator() -> jsonschema.Draft7Validator:
    if not SCHEMA.exists():
        pytest.skip(f"{SCHEMA} is not here")
    (definition,) = yaml.load(SCHEMA.read_text(), Loader=yaml.CSafeLoader)["spec"]["versions"]
    return jsonschema.Draft7Validator(strict(definition["schema"]["openAPIV3Schema"]))


def problems(jobset: dict[str, Any]) -> list[str]:
    """Return what JobSet's schema, its rules and those of Jobs have against a manifest."""
    found = [f"{'/'.join(map(str, each.path))}: {each.message}" for each in validator().iter_errors(jobset)]
    return found or rules(jobset)


def rules(jobset: dict[str, Any]) -> list[str]:
    """Check what the API server checks beside the schema."""
    spec, found = jobset["spec"], []
    names = [each["name"] for each in spec["replicatedJobs"]]
    if "startupPolicy" in spec and any("dependsOn" in each for each in spec["replicatedJobs"]):
        found.append("startupPolicy and dependsOn exclude each other")
    for number, each in enumerate(spec["replicatedJobs"]):
        job = each["template"]["spec"]
        pod = job["template"]["spec"]
        earlier = names[:number]
        if any(other["name"] not in earlier for other in each.get("dependsOn", [])):
            found.append("dependsOn names an earlier job")
        if "podFailurePolicy" in job and pod["restartPolicy"] != "Never":
            found.append("a podFailurePolicy needs restartPolicy Never")
        if job["completionMode"] != "Indexed":
            found.append("pods have names only in Indexed jobs")
        volumes = {volume["name"] for volume in pod["volumes"]}
        if any(mount["name"] not in volumes for mount in pod["containers"][0]["volumeMounts"]):
            found.append("a mount without its volume")
        if len(f"{jobset['metadata']['name']}-{each['name']}-0-{job['completions'] - 1}") > 63:
            found.append("the pods' names are too long")
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
        {"name": "a" * 40, "hosts": 1000, "helpers": 1000},
    ],
)
def test_the_api_takes_what_is_written(settings: dict[str, Any]) -> None:
    assert problems(manifest(**settings)) == []


Change = Callable[[dict[str, Any]], Any]


def workers_of(jobset: dict[str, Any]) -> Any:
    return jobset["spec"]["replicatedJobs"][1]


def pod_of(jobset: dict[str, Any]) -> Any:
    return workers_of(jobset)["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
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
    ],
)
def test_planted_mistakes_are_found(change: Change, said: str) -> None:
    good = manifest(helpers=2, helpers_required=True)
    bad = copy.deepcopy(good)
    change(bad)
    assert problems(good) == []
    assert said in "; ".join(problems(bad))


def test_the_common_case_has_at_most_60_lines_and_no_secret() -> None:
    text = render(KubernetesJob(**COMMON, queue="team"), BERT)
    assert len(text.splitlines()) <= 60
    assert "stringData" not in text and "\t" not in text


def test_what_the_containers_run() -> None:
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
    secret = pod_of(jobset)["volumes"][0]["secret"]
    assert secret == {"secretName": "bert-secret", "defaultMode": 0o440}
    assert pod_of(jobset)["securityContext"]["fsGroup"] == 1000
    assert pod_of(jobset)["terminationGracePeriodSeconds"] == 180


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


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"hosts": 0}, "--hosts 0 must be at least 1"),
        ({"helpers": -1}, "--helpers -1 must be at least 0"),
        ({"gpus_per_host": None}, "say what a worker pod has"),
        ({"image": "x y"}, "--image 'x y' is not what Kubernetes takes"),
        ({"claim": "Runs"}, "--claim 'Runs' is not"),
        ({"name": "my_job"}, "--name 'my_job' is not"),
        ({"queue": "a\n  b: c"}, "--queue .* is not"),
        ({"memory_per_host": "64 GB"}, "--memory-per-host '64 GB' is not"),
        ({"node_selector": ("p4d",)}, "--node-selector 'p4d' is not of the form KEY=VALUE"),
        ({"user": 0}, "--user 0 not root"),
        ({"mount": "runs"}, "--mount 'runs' is not"),
    ],
)
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
