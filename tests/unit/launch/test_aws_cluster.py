"""Counts the mistakes that are planted for each back-end; both clusters on AWS share their settings."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import test_cloudformation
import test_kubernetes
import test_parallelcluster
import test_remote
import test_sagemaker
import test_slurm

import parallelcluster_mistakes
from shoal.errors import UsageError
from shoal.launch.aws_cluster import AwsCluster, CloudFormation, ParallelCluster

# In generated files; each is planted by a test of that module, and in Slurm's script by tests/real too
IN_FILES: dict[str, list[Any]] = {
    "JobSet": test_kubernetes.JOBSET_MISTAKES,
    "TrainJob": test_kubernetes.TRAINJOB_MISTAKES,
    "SageMaker": test_sagemaker.MISTAKES,
    "ParallelCluster": parallelcluster_mistakes.MISTAKES,
    "CloudFormation": test_cloudformation.MISTAKES,
}
IN_SETTINGS: dict[str, list[tuple[dict[str, Any], str]]] = {
    "Slurm": test_slurm.SETTINGS,
    "Kubernetes": test_kubernetes.SETTINGS,
    "SageMaker": test_sagemaker.SETTINGS,
    "ssh and MPI": test_remote.SETTINGS,
    "ParallelCluster": test_parallelcluster.SETTINGS,
    "CloudFormation": test_cloudformation.SETTINGS,
}


@pytest.mark.parametrize("kind", IN_FILES)
def test_eight_mistakes_are_planted_in_written_files(kind: str) -> None:
    assert len(IN_FILES[kind]) >= 8


@pytest.mark.parametrize("back_end", IN_SETTINGS)
def test_eight_mistakes_are_planted_in_the_settings(back_end: str) -> None:
    """Each message has the option; the value, unless it is missing; and what may be there."""
    table = IN_SETTINGS[back_end]
    assert len({repr(settings) for settings, _ in table}) >= 8


def test_both_writers_have_the_same_options() -> None:
    shared = [field.name for field in fields(AwsCluster)]
    for kind in (CloudFormation, ParallelCluster):
        assert [field.name for field in fields(kind)][: len(shared)] == shared
    with pytest.raises(
        UsageError, match=r"--bucket 's3://b' is not of the form .*, like my-data, without s3://"
    ):
        AwsCluster(region="us-east-1", subnet="subnet-0123456789abcdef0", key="k", bucket="s3://b")
