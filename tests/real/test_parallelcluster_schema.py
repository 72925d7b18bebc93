"""ParallelCluster's own schema and validators read the configuration, and find planted mistakes.

The package and its hundred requirements do not fit into this environment: they have one of their own in
``build/parallelcluster``, made once. The validators ask EC2, which moto stands for there.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from parallelcluster_mistakes import COMMON, MISTAKES, UNSOUND
from shoal.launch.aws_cluster import CLUSTER, ParallelCluster

ENVIRONMENT = Path(__file__).parents[2] / "build" / "parallelcluster"
PACKAGES = ("aws-parallelcluster==3.16.*", "moto[ec2,iam,s3]>=5.1")
CHECK = """
import json, os, sys
os.environ.update(AWS_ACCESS_KEY_ID="x", AWS_SECRET_ACCESS_KEY="x", AWS_DEFAULT_REGION="us-east-1")
import boto3
from moto import mock_aws
from pcluster.schemas.cluster_schema import ClusterSchema

given = json.loads(sys.stdin.read())

def load(configuration):
    return ClusterSchema(cluster_name="shoal").load(configuration)

def refused(configuration):
    try:
        load(configuration)
    except Exception as error:
        return str(error)
    return ""

def validated(configuration):
    text = json.dumps({**configuration, "Image": {**configuration["Image"], "CustomAmi": ami}})
    found = load(json.loads(text.replace(given["subnet"], subnet))).validate()
    return [[each.level.name, each.validator_type, each.message] for each in found]

with mock_aws():
    ec2 = boto3.client("ec2")
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    place = dict(CidrBlock="10.0.0.0/20", AvailabilityZone="us-east-1a")
    subnet = ec2.create_subnet(VpcId=vpc, **place)["Subnet"]["SubnetId"]
    ec2.create_key_pair(KeyName=given["key"])
    boto3.client("s3").create_bucket(Bucket=given["bucket"])
    ami = ec2.describe_images()["Images"][0]["ImageId"]
    json.dump(
        {
            "refused": [refused(each) for each in given["schema"]],
            "validated": [validated(each) for each in given["validators"]],
        },
        sys.stdout,
    )
"""
GAPS_OF_MOTO = {
    "HeadNodeLaunchTemplateValidator",
    "ComputeResourceLaunchTemplateValidator",
    "KeyPairValidator",
}
"""Validators whose questions to EC2 moto cannot answer."""


@pytest.fixture(scope="module")
def python() -> Path:
    """Return the interpreter of an environment with ParallelCluster."""
    found = ENVIRONMENT / "bin" / "python"
    ready = ENVIRONMENT / "ready"
    if not ready.exists():
        uv = str(Path(sys.executable).parent / "uv")
        make = [uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(ENVIRONMENT)]
        subprocess.run(make, check=True)
        install = [uv, "pip", "install", "--quiet", "--python", str(found), *PACKAGES]
        subprocess.run(install, check=True)
        ready.touch()
    return found


def with_mistake(good: dict[str, Any], path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    bad = copy.deepcopy(good)
    inner: Any = bad
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return bad


@pytest.mark.timeout(600)
def test_parallelcluster_takes_the_configuration_and_finds_planted_mistakes(python: Path) -> None:
    good, other = (
        yaml.safe_load(ParallelCluster(**COMMON, **settings).files()[CLUSTER])
        for settings in ({}, {"helpers": 0, "spot": True, "fsx_gb": 4_800})
    )
    asked = {
        **COMMON,
        "schema": [good, other, *(with_mistake(good, *each) for each in MISTAKES)],
        "validators": [good, other, *(with_mistake(good, path, value) for path, value, _ in UNSOUND)],
    }
    done = subprocess.run([str(python), "-c", CHECK], input=json.dumps(asked), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["refused"][:2] == ["", ""]
    for (path, value), said in zip(MISTAKES, found["refused"][2:], strict=True):
        assert str(path[-1]) in said, f"nothing is said of {path}: {value}"
    errors = [{name for level, name, _ in each if level == "ERROR"} for each in found["validated"]]
    assert errors[:2] == [GAPS_OF_MOTO, GAPS_OF_MOTO]
    for (_, _, validator), each in zip(UNSOUND, errors[2:], strict=True):
        assert validator in each
