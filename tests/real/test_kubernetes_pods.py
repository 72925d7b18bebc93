"""The containers of manifests for Kubernetes on emulated hosts: a pod's command, variables, names and files.

They run as uid 1000 with the secret as Kubernetes mounts it: a link to a file of root with mode 0440.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from worker_scripts import SUM

from shoal.launch.emulated import Cluster
from shoal.launch.kubernetes import KubernetesJob
from shoal.launch.kubernetes_manifest import render

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("tc"), reason="emulated hosts need root and iproute2"
)

MOUNT = "/mnt"
SCRIPT = (
    SUM
    + """
import os, pathlib, signal, sys, time
rank = os.environ["RANK"]
if sys.argv[1] == "sum":
    sum_over_workers()
    names = os.environ["SHOAL_HELPERS"]
    pathlib.Path("done-" + rank).write_text(f"{os.getuid()} {os.getcwd()} {names}")
else:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    pathlib.Path("waits-" + rank).touch()
    time.sleep(100)
"""
)
# Mounts of a pod, made in a mount namespace of its own: names, the secret, the claim. Folder, uid, gid, the
# interpreter's folder, the private folder above it and the working directory come before the command.
ENTER = f"""
mount --bind "$1/hosts" /etc/hosts
mount -t tmpfs tmpfs /run
install -d -m 755 /run/shoal /run/shoal/..data
install -m 440 -o root -g "$3" "$1/secret" /run/shoal/..data/secret
ln -s ..data/secret /run/shoal/secret
mount --bind "$1/claim" {MOUNT}
python=$4; private=$5; if [ -n "$private" ]; then  # replaced by one that all can enter, with the interpreter
    mkdir /run/python
    mount --bind "$python" /run/python
    mount -t tmpfs -o mode=755 tmpfs "$private"
    mkdir -p "$python"
    mount --bind /run/python "$python"
fi
cd "$6"
user=$2 group=$3; shift 6
exec setpriv --reuid "$user" --regid "$group" --groups "$group" --no-new-privs -- "$@"
"""


class Pods:
    """The pods of a manifest, a host for each."""

    def __init__(self, cluster: Cluster, folder: Path, text: str) -> None:
        self._cluster, self._folder = cluster, folder
        self.started: dict[str, subprocess.Popen[str]] = {}
        self._pods = dict(each for document in yaml.safe_load_all(text) for each in pods_of(document))
        lines = [f"{cluster.address(number)} {name}" for number, name in enumerate(self._pods)]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
        (folder / "secret").write_text(secrets.token_hex(32))
        (folder / "claim").mkdir()
        os.chown(folder / "claim", 1000, 1000)
        (folder / "claim" / "script.py").write_text(SCRIPT)
        for parent in (folder, *folder.parents):
            if parent.stat().st_mode & 0o005 != 0o005 and parent != Path("/"):
                parent.chmod(parent.stat().st_mode | 0o055)

    def start(self) -> None:
        for number, (name, (index, pod)) in enumerate(self._pods.items()):
            container, user = pod["containers"][0], pod["securityContext"]
            variables = {"JOB_COMPLETION_INDEX": str(index)}
            for variable in container["env"]:
                source = str(variable.get("valueFrom", ""))
                value = self._cluster.address(number) if "status.podIP" in source else "0"
                variables[variable["name"]] = variable.get("value", value)
            words = [*container["command"], *container.get("args", ())]
            for name_, value in variables.items():
                words = [word.replace(f"$({name_})", value) for word in words]
            python = (sys.base_prefix, private_folder(Path(sys.base_prefix)))
            given = (str(self._folder), str(user["runAsUser"]), str(user["fsGroup"]), *python)
            enter = ["unshare", "--mount", "sh", "-ec", ENTER, "sh", *given, container.get("workingDir", "/")]
            path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
            with (self._folder / f"{name}.log").open("a") as log:
                self.started[name] = self._cluster.start(
                    number,
                    [*enter, *words],
                    env={
                        **variables,
                        "PATH": path,
                        "HOME": "/",
                        "SHOAL_NATIVE_GROUP": "0",
                        "GLOO_SOCKET_IFNAME": "",
                    },
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )

    def of(self, kind: str) -> list[subprocess.Popen[str]]:
        return [process for name, process in self.started.items() if f"-{kind}-" in name]

    def logs(self) -> str:
        return "\n".join(f"== {path.name}\n{path.read_text()}" for path in sorted(self._folder.glob("*.log")))

    def await_claim(self, *names: str) -> None:
        end = time.monotonic() + 60.0
        while not all((self._folder / "claim" / name).exists() for name in names):
            assert time.monotonic() < end, self.logs()
            time.sleep(0.1)


def private_folder(path: Path) -> str:
    """Return the uppermost folder above ``path`` that only its owner can enter, or the empty string."""
    return next((str(folder) for folder in reversed(path.parents) if not folder.stat().st_mode & 0o001), "")


def pods_of(document: dict[str, Any]) -> Iterator[tuple[str, tuple[int, Any]]]:
    """Yield DNS name, index and spec of each pod of a manifest's document."""
    kind, name, spec = document["kind"], document["metadata"]["name"], document["spec"]
    if kind == "TrainJob":
        return
    jobset = spec if kind == "JobSet" else spec["template"]["spec"]
    for each in jobset["replicatedJobs"]:
        job, inner = f"{name}-{each['name']}-0", each["template"]["spec"]
        for index in range(inner["completions"]):
            yield f"{job}-{index}.sums", (index, inner["template"]["spec"])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(hosts=3) as cluster:
        yield cluster


def manifest(api: Any, what: str) -> str:
    job = KubernetesJob(
        hosts=2, helpers=1, image="shoal:1", claim="runs", mount=MOUNT, cpus_per_host="1", name="sums",
        api=api, workers_per_host=1,
    )  # fmt: skip
    return render(job, ("python3", "script.py", what))


@pytest.mark.parametrize("api", ["jobset", "trainjob"])
def test_workers_sum_through_the_helper(cluster: Cluster, tmp_path: Path, api: str) -> None:
    pods = Pods(cluster, tmp_path, manifest(api, "sum"))
    pods.start()
    workers = pods.of("node" if api == "trainjob" else "workers")
    assert [pod.wait(120) for pod in workers] == [0, 0], pods.logs()
    (helper,) = pods.of("helpers")
    helper.send_signal(signal.SIGTERM)
    assert helper.wait(30) == 0
    assert re.search(r"stopped; .* [1-9][\d,]* chunks summed", pods.logs()), pods.logs()
    for rank in range(2):
        text = (tmp_path / "claim" / f"done-{rank}").read_text()
        assert text == f"1000 {MOUNT} sums-helpers-0-0.sums:7070"


def test_evicted_pods_save(cluster: Cluster, tmp_path: Path) -> None:
    pods = Pods(cluster, tmp_path, manifest("jobset", "wait"))
    pods.start()
    pods.await_claim("waits-0", "waits-1")
    for pod in pods.of("workers"):
        pod.send_signal(signal.SIGTERM)
    assert [pod.wait(60) for pod in pods.of("workers")] == [75, 75], pods.logs()
    (helper,) = pods.of("helpers")
    helper.send_signal(signal.SIGTERM)
    assert helper.wait(30) == 0, pods.logs()
    (start,) = json.loads((tmp_path / "claim/jobs/sums/starts.json").read_text())
    assert (start["run_id"], start["saved"]) == ("sums.0", True)
