"""``shoal submit`` as a user runs it: what it writes, prints and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from pretrain_jobs import prepare_small

from forked import shoal

TRAIN = ("shoal", "train", "albert", "--preset", "tiny", "--data.path", "text")


def test_a_script_is_written_and_a_wrong_setting_of_the_recipe_is_found_first(tmp_path: Path) -> None:
    prepare_small(tmp_path).rename(tmp_path / "text")
    where = ("submit", "slurm", "--hosts", "2", "--workers-per-host", "1", "--to", "job")
    wrong = shoal(*where, "--", *TRAIN, "--train.global-batch-size", "9", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "train.global_batch_size 9 does not divide over 2 workers" in wrong.stderr
    assert "--no-check submits it anyway" in wrong.stderr
    assert not (tmp_path / "job").exists()
    for program in (("/opt/venv/bin/shoal",), ("python3", "-m", "shoal")):
        by_path = shoal(*where, "--", *program, *TRAIN[1:], "--data.pth", "x", cwd=tmp_path)
        assert by_path.returncode == 2 and "data.pth" in by_path.stderr
    done = shoal(*where, "--", *TRAIN, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    script = tmp_path / "job" / "job.sbatch"
    assert done.stdout == f"{script}\nsubmit it with: sbatch {script}\n"
    assert f"    {' '.join(TRAIN)}\ncode=$?" in script.read_text()
    assert [path.name for path in (tmp_path / "job").iterdir()] == ["job.sbatch"]


SUBMISSIONS = {
    "slurm": ("--hosts", "2", "--helpers", "1", "--no-check"),
    "kubernetes": ("--hosts", "2", "--helpers", "1", "--image", "shoal:1", "--claim", "runs",
                   "--cpus-per-host", "8"),
    "sagemaker": ("--hosts", "2", "--helpers", "1", "--instance", "ml.p4d.24xlarge", "--image", "shoal:1",
                  "--bucket", "s3://bucket/shoal", "--role", "arn:aws:iam::1:role/x", "--fsx", "fs-1",
                  "--fsx-path", "/abc", "--subnets", "s", "--security-groups", "g"),
    "ssh": ("--hosts", "n1", "--hosts", "n2", "--helper-hosts", "h1"),
    "mpi": ("--hosts", "n1", "--hosts", "n2", "--helper-hosts", "h1"),
}  # fmt: skip


@pytest.mark.parametrize("back_end", SUBMISSIONS)
def test_helpers_that_the_command_would_leave_idle_are_refused(tmp_path: Path, back_end: str) -> None:
    """Before anything is written; settings may be in the command's file too."""
    (tmp_path / "run.toml").write_text('[distributed]\nwire = "int8"\n')
    for words, remedy in ((("--distributed.backend=nccl",), "leave"), (("--config", "run.toml"), "take")):
        options = (*SUBMISSIONS[back_end], "--dry-run", "--", "shoal", "train", "bert", *words)
        done = shoal("submit", back_end, *options, cwd=tmp_path)
        assert done.returncode == 2, done.stdout
        assert f"does not use helper hosts, and 1 helper is named: {remedy}" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_a_dry_run_for_slurm_names_the_backend_of_the_job(tmp_path: Path) -> None:
    """It does so on hosts without Slurm's daemon too."""
    prepare_small(tmp_path).rename(tmp_path / "text")
    job = ("submit", "slurm", "--hosts", "2", "--gpus-per-host", "2", "--dry-run")
    for options, expected in (
        ((), "nccl, or shoal if it is 10 % faster in a comparison of 3 s at the start"),
        (("--helpers", "1"), "shoal (1 helper is named)"),
    ):
        lines = shoal(*job, *options, "--", *TRAIN, cwd=tmp_path).stdout.splitlines()
        assert [line for line in lines if "backend" in line] == [f"# backend      {expected}"]
        assert lines[0] == "#!/bin/bash" and any(line.startswith("# batch ") for line in lines)
        assert not any(line.startswith("# [") for line in lines)  # not all settings


def test_settings_come_from_a_file_and_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text('partition = "a100"\ngpus-per-host = 8\nhelpers = 2\n')
    options = ("--config", "cluster.toml", "--hosts", "4", "--no-check", "--dry-run")
    plan = ("--machine", "p4d.24xlarge", "--helper-machine", "c5n.18xlarge")
    done = shoal("submit", "slurm", *options, *plan, "--", "shoal", "train", "bert", cwd=tmp_path)
    assert (
        "#SBATCH --partition=a100 --nodes=4 --ntasks-per-node=1 --gpus-per-node=8 --exclusive" in done.stdout
    )
    assert "hetjob" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["cluster.toml"]
    if done.returncode == 0:  # else Slurm is here and its daemon is not
        assert "p4d.24xlarge" in done.stdout


def test_a_misspelt_key_of_the_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text('partion = "a100"\n')
    options = ("--config", "cluster.toml", "--hosts", "4", "--no-check", "--dry-run")
    done = shoal("submit", "slurm", *options, "--", "python", "train.py", cwd=tmp_path)
    assert done.returncode == 2 and "partion" in done.stdout + done.stderr


def test_no_command_and_workers_in_it(tmp_path: Path) -> None:
    done = shoal("submit", "slurm", "--hosts", "4", cwd=tmp_path)
    assert (done.returncode, "name the command of the workers after --" in done.stderr) == (2, True)
    done = shoal("submit", "slurm", "--hosts", "4", "--", *TRAIN, "--workers", "8", cwd=tmp_path)
    assert (done.returncode, "--workers-per-host N goes before the --" in done.stderr) == (2, True)


def test_a_manifest_for_kubernetes_and_how_its_secret_is_made(tmp_path: Path) -> None:
    options = ("--hosts", "2", "--image", "shoal:1", "--claim", "runs", "--gpus-per-host", "8", "--to", "job")
    done = shoal("submit", "kubernetes", *options, "--", *TRAIN, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "kubectl create secret generic albert-secret --from-file=secret\n" in done.stdout
    manifest = yaml.safe_load((tmp_path / "job" / "job.yaml").read_text())
    assert (manifest["kind"], manifest["metadata"]["name"]) == ("JobSet", "albert")


def test_dry_runs_have_the_planners_summary(tmp_path: Path) -> None:
    options = ("--hosts", "2", "--helpers", "1", "--dry-run")
    pods = ("--image", "shoal:1", "--claim", "runs", "--gpus-per-host", "8")
    machines = ("--machine", "p4d.24xlarge", "--helper-machine", "c5n.18xlarge")
    bert = ("--", "shoal", "train", "bert", "--preset", "large-lans")
    on_fsx = (*bert, "--data.path", "/opt/ml/input/data/fsx/text", "--run.dir", "/opt/ml/input/data/fsx/bert")
    done = shoal("submit", "kubernetes", *options, *pods, *machines, *bert, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert yaml.safe_load(done.stdout)["kind"] == "JobSet"  # the summary is a comment
    said = done.stdout.partition("\n# ")[2]
    assert "bert-large-lans on 2xp4d.24xlarge" in said and "c5n.18xlarge" in said
    (tmp_path / "cluster.toml").write_text(
        'instance = "ml.p4d.24xlarge"\nimage = "a/shoal:1"\nbucket = "s3://my-data/shoal"\n'
        'region = "us-east-1"\nrole = "arn:aws:iam::123456789012:role/shoal"\n'
        'subnets = ["subnet-0123456789abcdef0"]\nsecurity-groups = ["sg-0123456789abcdef0"]\n'
        'fsx = "fs-0123456789abcdef0"\nfsx-path = "/abcdefgh"\n'
    )
    training = ("--config", "cluster.toml")
    done = shoal("submit", "sagemaker", *options, *training, *on_fsx, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["RoleArn"].endswith("/shoal")
    assert "bert-large-lans on 2xp4d.24xlarge" in done.stderr and "c5n.18xlarge" in done.stderr
    written = shoal("submit", "sagemaker", *options[:4], *training, "--to", "job", *on_fsx, cwd=tmp_path)
    assert "head -c 32 /dev/urandom | base64 > secret); aws secretsmanager create-secret" in written.stdout
    assert "--secret-string file://secret; rm secret\n" in written.stdout  # not an argument, which ps shows


def test_commands_for_other_hosts_are_shown(tmp_path: Path) -> None:
    hosts = ("--hosts", "n1", "--hosts", "n2", "--helper-hosts", "h1", "--dry-run")
    done = shoal("submit", "ssh", *hosts, "--", "python", "train.py", cwd=tmp_path)
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 4
    assert "--node-rank=1 -- python train.py" in done.stdout.splitlines()[3]


def test_there_is_no_job_to_list_or_stop(tmp_path: Path) -> None:
    assert shoal("runs", cwd=tmp_path).stdout == f"{tmp_path} has no run and no submitted job\n"
    done = shoal("stop", "bert", cwd=tmp_path)
    assert (done.returncode, "jobs/bert has no job that waits or runs" in done.stderr) == (2, True)
