"""Tests the checks of ``shoal submit`` on every back-end, for commands that start shoal in various ways."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from shoal.cli.submit import submit
from shoal.errors import UsageError

FSX = (
    "--subnets subnet-0123456789abcdef0 "
    "--security-groups sg-0123456789abcdef0 --fsx fs-0123456789abcdef0 --fsx-path /abcdefgh"
)
SAGEMAKER = (
    "sagemaker --instance ml.p4d.24xlarge --image a/shoal:1 --bucket s3://my-data/shoal --region us-east-1 "
    "--role arn:aws:iam::123456789012:role/shoal --workers-per-host 1 --dry-run"
)
JOBS = {
    "slurm": "slurm --hosts 2 --workers-per-host 1 --to job",
    "kubernetes": "kubernetes --hosts 2 --image shoal:1 --claim runs --gpus-per-host 1 --to job",
    "sagemaker": f"{SAGEMAKER} --hosts 2 {FSX}",
    "ssh": "ssh --hosts n1 --hosts n2 --workers-per-host 1 --dry-run",
    "mpi": "mpi --hosts n1 --hosts n2 --workers-per-host 1 --dry-run",
}
PROGRAMS = {
    "name": "shoal",
    "path": "{here}/x/shoal",
    "venv": "./venv/bin/python -m shoal",
    "env": "env A=b nice -n 5 ./venv/bin/shoal",
    "shell": "bash -c 'exec {here}/x/shoal {words}'",
    "recipe": "python3 -m shoal.recipes.albert",
}
TRAIN = "train albert --preset tiny --data.path {data} --run.dir {run}"
PLACES = {
    "kubernetes": ("text", "/runs/bert"),
    "sagemaker": ("/opt/ml/input/data/fsx/text", "/opt/ml/input/data/fsx/runs"),
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("x/shoal", "venv/bin/python", "venv/bin/shoal"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(0o755)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(options: str, command: str) -> int:
    words = [*shlex.split(options), "--", *shlex.split(command)]
    return submit(words, exit_on_error=False, print_error=False, result_action="return_value")


def refusal(options: str, command: str) -> str:
    with pytest.raises(UsageError) as raised:
        run(options, command)
    return str(raised.value)


def told(program: str, words: str, here: Path) -> str:
    """Return the command of workers that run shoal by a program with these words."""
    text = PROGRAMS[program].format(here=here, words=words)
    if program == "recipe":
        words = words.removeprefix("train albert ")
    return text if "{words}" in PROGRAMS[program] else f"{text} {words}"


@pytest.mark.parametrize("backend", JOBS)
def test_a_job_without_a_host_that_trains_is_refused(backend: str) -> None:
    data, folder = PLACES.get(backend, ("text", "run"))
    words = TRAIN.format(data=data, run=folder)
    said = refusal(JOBS[backend], f"shoal {words} --run.validation-hosts 2")
    assert "run.validation_hosts 2 leaves none of 2 hosts to train" in said


@pytest.mark.parametrize("backend", JOBS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_wrong_settings_are_found_whatever_starts_shoal(backend: str, program: str, here: Path) -> None:
    data, folder = PLACES.get(backend, ("text", "run"))
    train = TRAIN.format(data=data, run=folder)
    for more, said in (
        ("--data.pth x", "--data.pth. Did you mean --data.path?"),
        ("--train.global-batch-size 9", "train.global_batch_size 9 does not divide over 2 workers"),
        ("--workers 2", "leave --workers out of the command: --workers-per-host N goes before the --"),
    ):
        message = refusal(JOBS[backend], told(program, f"{train} {more}", here))
        assert said in message and message.endswith("(--no-check submits it anyway)"), message
    assert not (here / "job").exists()


@pytest.mark.parametrize("backend", ["kubernetes", "sagemaker", "ssh"])
def test_right_settings_are_taken_without_their_data(backend: str, here: Path) -> None:
    data, folder = PLACES.get(backend, ("text", "run"))
    for program in PROGRAMS:
        assert run(JOBS[backend], told(program, TRAIN.format(data=data, run=folder), here)) == 0
    train = TRAIN.format(data=data, run=folder)
    assert run(JOBS[backend], f"shoal {train} --train.total-steps 240") == 0  # its preset warms up 200 steps


@pytest.mark.parametrize("backend", JOBS)
def test_other_mistakes_of_the_command(backend: str) -> None:
    assert "albrt" in refusal(JOBS[backend], "shoal train albrt")
    assert "trian" in refusal(JOBS[backend], "shoal trian albert")
    message = refusal(JOBS[backend], "env A=b torchrun --nproc-per-node 8 /absent/train.py")
    assert "torchrun" in message or "/absent/train.py, the script of the workers, is not in" in message


def test_no_check_submits_it_anyway(here: Path) -> None:
    for backend in ("slurm", "kubernetes", "ssh"):
        assert run(f"{JOBS[backend]} --no-check", "./absent/python -m shoal train albert --data.pth x") == 0


def test_files_are_looked_for_on_a_cluster_and_in_the_source(here: Path) -> None:
    assert "./venv2/bin/python, the program of the" in refusal(JOBS["slurm"], "./venv2/bin/python train.py")
    (here / "train.py").touch()
    assert "Did you mean 'train.py'?" in refusal(JOBS["slurm"], "./venv/bin/python trian.py")
    assert run(JOBS["slurm"], "./venv/bin/python train.py --lr 1") == 0
    assert run(f"{JOBS['slurm']} --prolog 'module load x'", "a-program-of-the-module x") == 0
    assert "was not found in PATH" in refusal(JOBS["slurm"], "a-program-of-the-module x")
    (here / "code").mkdir()
    (here / "code" / "other.py").write_text("pass")
    with_source = f"{JOBS['sagemaker']} --source code"
    assert "train.py, the script of the workers, is not in code" in refusal(with_source, "python train.py")
    (here / "code" / "train.py").write_text("pass")
    assert run(with_source, "python train.py") == 0


KUBERNETES = {
    "--run.dir /scratch/bert --data.path /runs/text": "--run.dir /scratch/bert would be lost with the pods, "
    "which mount the claim runs at /runs: name a path in it, or another --mount",
    "--run.dir ../bert --data.path text": "--run.dir ../bert would be lost",
    "--run.dir bert --data.path /data/text": "--data.path /data/text is not in the pods",
    "--run.dir /runs2/bert --data.path text": "--run.dir /runs2/bert would be lost",
    "--run.dir /runs/../bert --data.path text": "--run.dir /runs/../bert would be lost",
    "--data.path text": "",
    "--run.dir /runs/bert --data.path /runs/./text": "",
}  # fmt: skip


@pytest.mark.parametrize("paths", KUBERNETES)
def test_paths_of_pods_are_below_the_mount(paths: str) -> None:
    command = f"shoal train albert --preset tiny {paths}"
    if KUBERNETES[paths]:
        assert KUBERNETES[paths] in refusal(JOBS["kubernetes"], command)
        assert run(f"{JOBS['kubernetes']} --mount /", command) == 0
    else:
        assert run(JOBS["kubernetes"], command) == 0


def test_a_cache_of_each_pod_and_files_of_a_finetuning() -> None:
    images = "shoal train resnet50 --preset tiny --data.path images --data.cache /tmp/cache"
    assert run(JOBS["kubernetes"], images) == 0
    squad = "shoal finetune squad --model {} --data train.json --eval {} --train.global-batch-size 8"
    assert "--model.path /models/b is not" in refusal(
        JOBS["kubernetes"], squad.format("/models/b", "dev.json")
    )
    assert "--data.eval /dev.json is not" in refusal(JOBS["kubernetes"], squad.format("b", "/dev.json"))
    assert run(JOBS["kubernetes"], squad.format("/runs/b", "dev.json")) == 0


ONE = f"{SAGEMAKER} --hosts 1"
INPUT, TEXT = "/opt/ml/input/data", "--channel text=s3://my-bucket/text"
CHANNELS = {
    (TEXT, f"{INPUT}/text", "/opt/ml/model/run"): "",
    (f"{TEXT} --checkpoints s3://my-bucket/c", f"{INPUT}/text/x", "/opt/ml/checkpoints"): "",
    (
        "--checkpoints s3://my-bucket/c",
        f"{INPUT}/text",
        "/opt/ml/checkpoints",
    ): f"--data.path {INPUT}/text is not in "
    "the containers, whose folders are: /opt/ml/checkpoints, /opt/ml/model. Copy it there by "
    "--channel NAME=s3://…, or bring it by --fsx",
    (
        TEXT,
        f"{INPUT}/text",
        "/opt/ml/checkpoints/run",
    ): "--run.dir /opt/ml/checkpoints/run would be lost with the instances: name a path in /opt/ml/model",
    (TEXT, f"{INPUT}/text", "runs/albert"): "--run.dir runs/albert would be lost",
    (FSX, f"{INPUT}/fsx/text", f"{INPUT}/fsx/run"): "",
    (FSX, "/fsx/text", f"{INPUT}/fsx/run"): "--data.path /fsx/text is not in the containers",
}


@pytest.mark.parametrize("place", CHANNELS, ids=map(str, range(len(CHANNELS))))
def test_paths_of_containers_are_in_channels(place: tuple[str, str, str]) -> None:
    options, data, folder = place
    command = f"shoal train albert --preset tiny --data.path {data} --run.dir {folder}"
    if CHANNELS[place]:
        assert CHANNELS[place] in refusal(f"{ONE} {options}", command)
    else:
        assert run(f"{ONE} {options}", command) == 0


def test_data_in_the_source_is_there(here: Path) -> None:
    (here / "code" / "text").mkdir(parents=True)
    (here / "code" / "a.txt").write_text("a")
    command = "shoal train albert --preset tiny --data.path {} --run.dir /opt/ml/model/run"
    assert run(f"{ONE} --source code", command.format("text")) == 0
    assert "--data.path texts is not in the containers" in refusal(
        f"{ONE} --source code", command.format("texts")
    )


def test_a_run_in_the_memory_of_one_node_is_refused(here: Path) -> None:
    command = f"{here}/x/shoal train albert --preset tiny --data.path text --run.dir /dev/shm/run"
    said = refusal(JOBS["slurm"], command)
    assert "--run.dir /dev/shm/run is in the memory of this machine (tmpfs), which no other node sees" in said
