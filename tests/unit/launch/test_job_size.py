"""The options that all schedulers share: one set of checks, and one way to ``shoal launch``."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import UsageError
from shoal.launch.in_job import HostOptions
from shoal.launch.job_size import (
    Workers,
    check_use_of_helpers,
    hosts_apart,
    is_elastic,
    name_of,
    option,
    usable_workers,
)
from shoal.launch.kubernetes import KubernetesJob
from shoal.launch.remote import RemoteJob
from shoal.launch.sagemaker import SageMakerJob
from shoal.launch.slurm import SlurmJob

SCHEDULERS: dict[type[Workers], dict[str, Any]] = {
    SlurmJob: {"hosts": 2},
    KubernetesJob: {"hosts": 2, "image": "shoal:1", "claim": "runs", "cpus_per_host": "8"},
    SageMakerJob: {"hosts": 2, "instance": "ml.p4d.24xlarge", "image": "shoal:1", "bucket": "s3://bucket"},
    RemoteJob: {"hosts": ("n1", "n2")},
}


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("name", ["workers_per_host", "global_batch"])
def test_counts_are_checked_for_all_schedulers(kind: type[Workers], name: str) -> None:
    with pytest.raises(UsageError, match=f"{option(name)} 0 must be at least 1"):
        kind(**SCHEDULERS[kind], **{name: 0})


@pytest.mark.parametrize("kind", [SlurmJob, KubernetesJob, SageMakerJob])
def test_hosts_and_helpers_are_checked_for_all_queues(kind: type[Workers]) -> None:
    for name, value, least in (("hosts", 0, 1), ("helpers", -1, 0)):
        with pytest.raises(UsageError, match=f"--{name} {value} must be at least {least}"):
            kind(**{**SCHEDULERS[kind], name: value})


@pytest.mark.parametrize("name", ["workers", "nnodes", "global_batch", "helper_port"])
def test_counts_of_shoal_launch_are_checked_too(name: str) -> None:
    with pytest.raises(UsageError, match=f"{option(name)} 0 must be at least 1"):
        HostOptions(**{name: 0})


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_options_of_shoal_launch(kind: type[Workers]) -> None:
    assert kind(**SCHEDULERS[kind]).launch_options() == []
    job = kind(**SCHEDULERS[kind], workers_per_host=8, global_batch=512, helpers_required=True)
    assert job.launch_options() == ["--workers=8", "--global-batch=512", "--helpers-required"]


@pytest.mark.parametrize("kind", [*SCHEDULERS, HostOptions])
def test_transports_are_checked_before_anything_is_submitted(kind: type[Any]) -> None:
    given = SCHEDULERS.get(kind, {})
    assert kind(**given, transport="ofi:tcp;ofi_rxm").transport == "ofi:tcp;ofi_rxm"
    with pytest.raises(UsageError, match="transport 'efa' is not known; it is tcp, or ofi:"):
        kind(**given, transport="efa")


@pytest.mark.parametrize(
    ("words", "num_helpers", "is_refused"),
    [
        (("--distributed.backend", "nccl"), 1, True),
        (("--distributed.backend=Gloo",), 2, True),
        (("--distributed.backend", "nccl"), 0, False),
        (("--distributed.backend", "shoal"), 1, False),
        (("--distributed.backend", "auto"), 1, False),
        (("--distributed.wire", "int8"), 1, True),
        (("--distributed.wire", "int8"), 0, False),
        (("--distributed.wire=bf16",), 1, False),
        (("--config", "absent.toml"), 1, False),
        ((), 1, False),
    ],
)
def test_helpers_that_would_be_idle(words: tuple[str, ...], num_helpers: int, is_refused: bool) -> None:
    with pytest.raises(UsageError, match="does not use helper") if is_refused else nullcontext():
        check_use_of_helpers(("shoal", "train", "bert", *words), num_helpers)


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (("shoal", "train", "bert", "--preset", "large"), "bert"),
        (("python3", "-u", "scripts/train_it.py"), "train_it"),
        (("shoal",), "shoal"),
    ],
)
def test_the_name_of_a_command(command: tuple[str, ...], name: str) -> None:
    assert name_of(command) == name


def test_workers_that_come_and_go(tmp_path: Path) -> None:
    file = tmp_path / "lm.toml"
    file.write_text('[distributed]\nelastic = "2:4"\n')
    assert is_elastic(["train", "lm", "--distributed.elastic", "2:4"])
    assert is_elastic(["train", "lm", f"--config={file}"])
    assert not is_elastic(["train", "lm", "--distributed.backend", "shoal"])


def test_hosts_that_evaluate_do_not_count_among_those_that_train(tmp_path: Path) -> None:
    file = tmp_path / "lm.toml"
    file.write_text("[run]\nvalidation_hosts = 2\n")
    by_option, by_file = ["train", "lm", "--run.validation-hosts=1"], ["train", "lm", "--config", str(file)]
    assert (hosts_apart(by_option), hosts_apart(by_file), hosts_apart(["train", "lm"])) == (1, 2, 0)
    assert usable_workers(9, 8, 512, by_option) == 64  # 8 hosts of 9
    assert usable_workers(9, 8, None, by_file) == 56
    with pytest.raises(UsageError, match="validation_hosts 1 leaves none of 1 hosts to train"):
        usable_workers(1, 8, None, by_option)
