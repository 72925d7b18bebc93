"""A training job of SageMaker on emulated hosts: submitted to moto's server, then played by this test.

Each host has its own ``/opt/ml``, network and names, and runs the entry point and arguments of the request.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from worker_scripts import SUM

from shoal.launch.emulated import Cluster
from shoal.launch.emulated_network import end_processes, identity

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not shutil.which("tc"), reason="emulated hosts need root and iproute2"
)

NAMES = ("algo-1", "algo-2", "algo-3")
GROUPS = {"helpers": ["algo-1"], "workers": ["algo-2", "algo-3"]}
MOTO = 3
TRAIN = (
    SUM
    + """
import os, pathlib, signal, sys, time
import part

what, out = sys.argv[1], pathlib.Path(sys.argv[2], os.environ["RANK"])
if what == "sum":
    sum_over_workers()
    out.write_text(f"{part.WORD} {os.environ['SHOAL_HELPERS']} {os.getcwd()}")
if what == "wait":
    signal.signal(signal.SIGTERM, lambda *_: (out.write_text("saved"), sys.exit(75)))
    out.write_text("waits")
    time.sleep(100)
if what == "fail":
    if os.environ["RANK"] == "1":
        sys.exit("the disk of 1 is full")
"""
)

MAKE_BUCKET = """
import time, boto3
for _ in range(150):
    try:
        boto3.client("s3").create_bucket(Bucket="bucket")
        break
    except Exception:  # the server starts
        time.sleep(0.2)
"""


class SageMaker:
    """A region: moto's server for its API, and hosts on which jobs are played."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._cluster = Cluster(hosts=4)

    def __enter__(self) -> SageMaker:
        self._cluster.__enter__()
        lines = [f"{self._cluster.address(number)} {name}" for number, name in enumerate(NAMES)]
        (self.folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *lines]) + "\n")
        server = shutil.which("moto_server", path=str(Path(sys.executable).parent))
        assert server is not None
        self._cluster.start(
            MOTO,
            [server, "-H", "0.0.0.0", "-p", "5000"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.aws = {
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://{self._cluster.address(MOTO)}:5000",
        }
        return self

    def __exit__(self, *_: object) -> None:
        self._cluster.close()

    def login(self, *command: str) -> str:
        """Run a command on a host that reaches the API, and return its output."""
        environ = {**os.environ, **self.aws, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        done = subprocess.run(
            [*self._cluster.enter(MOTO), *command],
            cwd=self.folder,
            env=environ,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def play(self, request: dict[str, Any]) -> dict[str, subprocess.Popen[str]]:
        """Start the containers of a training job and return them by the names of their hosts."""
        started = {}
        for number, host in enumerate(NAMES):
            base = self.folder / request["TrainingJobName"] / host
            self._fill(base, host, request)
            algorithm = request["AlgorithmSpecification"]
            entry = [*algorithm["ContainerEntrypoint"], *algorithm["ContainerArguments"]]
            mount = 'mount --bind "$0" /etc/hosts && exec "$@"'
            with (base / "log").open("w") as log:
                started[host] = self._cluster.start(
                    number,
                    ["unshare", "--mount", "sh", "-c", mount, str(self.folder / "hosts"), *entry],
                    env={
                        **self.aws,
                        **request["Environment"],
                        "SHOAL_SAGEMAKER_BASE": str(base),
                        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                        "GLOO_SOCKET_IFNAME": "",
                        "SHOAL_NATIVE_GROUP": "0",  # no minute for a compiler in a test with deadlines
                    },
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    cwd=base,
                )
        return started

    def _fill(self, base: Path, host: str, request: dict[str, Any]) -> None:
        """Make what SageMaker puts into ``/opt/ml``."""
        config = base / "input" / "config"
        config.mkdir(parents=True)
        groups = [{"instance_group_name": name, "hosts": hosts} for name, hosts in GROUPS.items()]
        found = {"current_host": host, "hosts": list(NAMES), "instance_groups": groups}
        (config / "resourceconfig.json").write_text(json.dumps(found | {"network_interface_name": "eth0"}))
        for channel in request["InputDataConfig"]:
            if channel["ChannelName"] == "source":
                target = base / "input" / "data" / "source" / "source.tar.gz"
                target.parent.mkdir(parents=True)
                shutil.copy(self.folder / "source.tar.gz", target)

    def kill(self, host: str) -> None:
        """End all processes of a host at once."""
        network = self._cluster.enter(NAMES.index(host))[1].removeprefix("--net=")
        end_processes({identity(network)}, grace_s=0)


@pytest.fixture(scope="module")
def region(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SageMaker]:
    folder = tmp_path_factory.mktemp("sagemaker")
    (folder / "program").mkdir()
    (folder / "program" / "train.py").write_text(TRAIN)
    (folder / "program" / "part.py").write_text("WORD = 'imported'\n")
    with SageMaker(folder) as region:
        region.login(sys.executable, "-c", MAKE_BUCKET)
        yield region


def submitted(region: SageMaker, name: str, *command: str) -> dict[str, Any]:
    """Submit a job, and return the request that the API got."""
    network = (
        "--fsx",
        "fs-0123456789abcdef0",
        "--fsx-path",
        "/x",
        "--subnets",
        "s-1",
        "--security-groups",
        "g-1",
    )
    image = "123456789012.dkr.ecr.us-east-1.amazonaws.com/shoal:1"
    options = ("--bucket", "s3://bucket", "--role", "arn:aws:iam::123456789012:role/training", "--name", name)
    hosts = ("--hosts", "2", "--helpers", "1", "--instance", "ml.m5.xlarge", "--workers-per-host", "1")
    words = (*hosts, "--image", image, *options, *network, "--source", "program", "--", "python3", *command)
    said = region.login("shoal", "submit", "sagemaker", *words)
    request: dict[str, Any] = json.loads((region.folder / "jobs" / name / "request.json").read_text())
    assert said.startswith(f"training job {request['TrainingJobName']} is submitted; its output: shoal logs")
    key = f"{request['TrainingJobName']}/source.tar.gz"
    fetch = f"boto3.client('s3').download_file('bucket', {key!r}, 'source.tar.gz')"
    region.login(sys.executable, "-c", f"import boto3; {fetch}")
    return request


def logs(region: SageMaker, request: dict[str, Any]) -> str:
    return "\n".join(
        f"== {host}\n{(region.folder / request['TrainingJobName'] / host / 'log').read_text()}"
        for host in NAMES
    )


def await_files(paths: list[Path], text: str) -> None:
    end = time.monotonic() + 60.0
    while not all(path.exists() and path.read_text() == text for path in paths):
        assert time.monotonic() < end
        time.sleep(0.1)


def test_workers_sum_through_a_helper_which_ends_with_them(region: SageMaker, tmp_path: Path) -> None:
    request = submitted(region, "sum", "train.py", "sum", str(tmp_path))
    hosts = region.play(request)
    codes = {host: process.wait(120) for host, process in hosts.items()}
    assert codes == dict.fromkeys(NAMES, 0), logs(region, request)
    said = logs(region, request)
    assert "SageMaker, helper 0 of 2 workers and 1 helpers" in said
    assert re.search(r"stopped; .* [1-9][\d,]* chunks summed", said), "the helper took part"
    for rank, host in enumerate(GROUPS["workers"]):
        base = region.folder / request["TrainingJobName"] / host
        assert (tmp_path / str(rank)).read_text() == f"imported algo-1:7070 {base}/code"


def test_a_stopped_container_saves_and_waits_to_be_killed(region: SageMaker, tmp_path: Path) -> None:
    hosts = region.play(submitted(region, "wait", "train.py", "wait", str(tmp_path)))
    ranks = [tmp_path / str(rank) for rank in range(2)]
    await_files(ranks, "waits")
    for process in hosts.values():
        process.send_signal(signal.SIGTERM)
    await_files(ranks, "saved")
    time.sleep(3.0)
    assert [hosts[host].poll() for host in NAMES] == [None, None, None]
    for host in NAMES:
        region.kill(host)
        assert hosts[host].wait(30) == -signal.SIGKILL


def test_a_failed_job_says_why_where_sagemaker_looks(region: SageMaker, tmp_path: Path) -> None:
    request = submitted(region, "fail", "train.py", "fail", str(tmp_path))
    hosts = region.play(request)
    assert [hosts[host].wait(120) for host in NAMES] == [0, 0, 1], logs(region, request)
    failure = region.folder / request["TrainingJobName"] / "algo-3" / "output" / "failure"
    assert "the disk of 1 is full" in failure.read_text()
