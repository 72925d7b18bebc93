"""Batch scripts for Slurm: what they say, and the mistakes that are found before a job is queued."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from shoal.errors import ShoalError, UsageError
from shoal.launch import slurm
from shoal.launch.slurm import SlurmJob, job_name, render

BERT = ("shoal", "train", "bert", "--preset", "large", "--data.path", "/fsx/my text", "--run.dir", "runs/b")
FOLDER = Path("/fsx/jobs/bert")

HETEROGENEOUS = """\
#!/bin/bash
#SBATCH --job-name=bert --time=24:00:00
#SBATCH --partition=gpu --nodes=4-8 --gpus-per-node=8 --exclusive
#SBATCH --requeue --open-mode=append --signal=USR1@180
#SBATCH --output=/fsx/jobs/bert/output.log
#SBATCH hetjob
#SBATCH --job-name=bert --time=24:00:00 --partition=cpu
#SBATCH --nodes=4 --ntasks-per-node=1 --exclusive

job=/fsx/jobs/bert  # shared by all nodes
module load cuda

srun --het-group=1 --mpi=none --kill-on-bad-exit=0 shoal launch --role helper --job "$job" &
helpers=$!
srun --het-group=0 --mpi=none --kill-on-bad-exit=0 --ntasks-per-node=1 \\
    shoal launch --job "$job" --workers=8 --global-batch=512 --helpers=4 -- \\
    shoal train bert --preset large --data.path '/fsx/my text' --run.dir runs/b
code=$?
scancel --signal=TERM "$SLURM_JOB_ID_HET_GROUP_1"  # the helpers stop
sleep 60 && kill "$helpers" &  # those that have not are killed after a minute
wait "$helpers"
kill $!  # the sleep

# 75: the workers saved and left; 76: another host is gone. Slurm starts the same job again.
case $code in
    75 | 76) [ -e "$job/stop" ] || { scontrol requeue "$SLURM_JOB_ID" && sleep 60; } ;;
esac
exit $code
"""


def test_a_job_with_helpers_reads_like_this() -> None:
    job = SlurmJob(
        hosts=8, min_hosts=4, helpers=4, workers_per_host=8, gpus_per_host=8, global_batch=512,
        partition="gpu", helper_partition="cpu", prolog=("module load cuda",),
    )  # fmt: skip
    assert render(job, BERT, FOLDER) == HETEROGENEOUS


def test_one_task_per_worker_and_no_helpers() -> None:
    job = SlurmJob(hosts=2, workers_per_host=4, task_per_worker=True, cpus_per_host=8, option=("--mem=0",))
    script = render(job, BERT, FOLDER)
    assert "#SBATCH --nodes=2 --ntasks-per-node=4 --cpus-per-task=2 --mem=0\n" in script
    assert "hetjob" not in script and "scancel" not in script and "--workers" not in script


def test_a_node_that_fails_ends_no_job_whose_workers_come_and_go() -> None:
    elastic = (*BERT, "--distributed.elastic", "2:3")
    script = render(SlurmJob(hosts=3), elastic, FOLDER)
    assert script.count("--no-kill") == 2
    assert "\n#SBATCH --no-kill\n" in script
    assert "\nsrun --mpi=none --kill-on-bad-exit=0 --no-kill \\\n" in script
    assert "--no-kill" not in render(SlurmJob(hosts=3), BERT, FOLDER)


def test_a_transport_is_that_of_all_hosts_in_quotes() -> None:
    job = SlurmJob(hosts=2, helpers=1, transport="ofi:tcp;ofi_rxm", interface="eth0")
    script = render(job, BERT, FOLDER)
    assert """shoal launch --role helper --job "$job" --transport='ofi:tcp;ofi_rxm' &""" in script
    assert """--helpers=1 --interface=eth0 --transport='ofi:tcp;ofi_rxm' -- """ in script


def test_seeds_are_jobs_of_an_array() -> None:
    command = ("python", "train.py", "--seed", "{seed}", "--out", "my runs/{seed}")
    script = render(SlurmJob(hosts=1, array="0-2%1"), command, FOLDER)
    assert "#SBATCH --array=0-2%1\n" in script and "--output=/fsx/jobs/bert/output-%a.log" in script
    assert "job=/fsx/jobs/bert/$SLURM_ARRAY_TASK_ID  #" in script
    assert '--seed "$SLURM_ARRAY_TASK_ID" --out \'my runs/\'"$SLURM_ARRAY_TASK_ID"\n' in script


COMMANDS = [
    BERT,
    ("python", "train.py", "--name", 'it\'s $HOME `id` "x" \\ ; rm -rf / #', ""),
    ("./run", *(f"--option-{number}={number * 'x'}" for number in range(12))),
]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("helpers", [0, 2])
def test_bash_starts_the_very_words_of_the_command(
    tmp_path: Path, command: tuple[str, ...], helpers: int
) -> None:
    """Run the script with a ``srun`` that prints its arguments."""
    for name in ("srun", "scancel"):
        program = tmp_path / name
        program.write_text('#!/bin/sh\nprintf \'%s\\0\' "$@" >> "$(dirname "$0")/said"\n')
        program.chmod(0o755)
    script = render(SlurmJob(hosts=2, helpers=helpers), command, tmp_path)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID_HET_GROUP_1": "5", "SLURM_JOB_ID": "4"}
    subprocess.run(["bash", "-u", "-c", script], env=environ, check=True)
    said = (tmp_path / "said").read_bytes().decode().split("\0")
    begin = said.index("--") + 1
    assert said[begin : begin + len(command)] == list(command)


@pytest.mark.parametrize(("code", "again"), [(0, False), (1, False), (2, False), (75, True), (76, True)])
def test_which_exit_codes_start_the_job_again(tmp_path: Path, code: int, again: bool) -> None:
    (tmp_path / "srun").write_text(f"#!/bin/sh\nexit {code}\n")
    (tmp_path / "scontrol").write_text('#!/bin/sh\necho "$@" > "$(dirname "$0")/asked"\n')
    (tmp_path / "sleep").write_text("#!/bin/sh\n")
    for name in ("srun", "scontrol", "sleep"):
        (tmp_path / name).chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "4711"}
    done = subprocess.run(["bash", "-c", render(SlurmJob(hosts=2), BERT, tmp_path)], env=environ)
    asked = tmp_path / "asked"
    assert (done.returncode, asked.exists() and asked.read_text()) == (code, again and "requeue 4711\n")


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("helpers", [0, 2])
def test_shellcheck_finds_nothing(tmp_path: Path, helpers: int) -> None:
    path = slurm.write(render(SlurmJob(hosts=2, helpers=helpers), BERT, FOLDER), tmp_path)
    subprocess.run(["shellcheck", str(path)], check=True)


SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"hosts": 0}, "--hosts 0 must be at least 1"),
    ({"hosts": 4, "min_hosts": 8}, "--min-hosts 8 must be at most --hosts 4"),
    ({"hosts": 4, "helpers": -1}, "--helpers -1 must be at least 0"),
    ({"hosts": 4, "task_per_worker": True}, "--task-per-worker needs --workers-per-host"),
    ({"hosts": 4, "helpers": 2, "array": "0-3"}, "no arrays of heterogeneous jobs"),
    ({"hosts": 4, "time": "a day"}, "--time 'a day' must be one word"),
    ({"hosts": 4, "time": "1h"}, "--time '1h' is not of Slurm's form, like 1-12:00:00"),
    ({"hosts": 4, "array": "a-b"}, "--array 'a-b' is not of Slurm's form, like 0-4"),
    ({"hosts": 4, "partition": "gpu\n#SBATCH --uid=0"}, "--partition .* must be one word"),
    ({"hosts": 4, "name": "my job"}, "--name 'my job' must be one word"),
    ({"hosts": 4, "option": ("--nodes=3",)}, "--option --nodes=3: the script sets --nodes itself"),
    ({"hosts": 4, "option": ("mem=0",)}, "--option 'mem=0' must be one word like --mem=0"),
    ({"hosts": 4, "prolog": ("a\nb",)}, "--prolog is one line"),
    ({"hosts": 4, "save_s": 0}, "--save-s 0 must be at least 1"),
    (
        {"hosts": 4, "workers_per_host": 8, "gpus_per_host": 4},
        "--workers-per-host 8 must be at most --gpus-per-host 4: a worker has a GPU of its own",
    ),
]


@pytest.mark.parametrize(("settings", "said"), SETTINGS)
def test_mistakes_are_found(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        SlurmJob(**settings)


def test_a_folder_that_a_script_cannot_name() -> None:
    with pytest.raises(UsageError, match="must not have spaces or quotes"):
        render(SlurmJob(hosts=1), BERT, Path("/fsx/my jobs"))


def test_an_array_of_equal_jobs() -> None:
    with pytest.raises(UsageError, match=r"all jobs would be the same; write \{seed\}"):
        render(SlurmJob(hosts=1, array="0-2"), BERT, FOLDER)


def test_names() -> None:
    assert job_name(SlurmJob(hosts=1), BERT) == "bert"
    assert job_name(SlurmJob(hosts=1), ("python3", "my scripts/train it.py")) == "train-it"
    assert job_name(SlurmJob(hosts=1, name="x"), BERT) == "x"


def test_no_slurm_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ShoalError, match=r"sbatch was not found: submit on a login node .* --to DIR"):
        slurm.submit(slurm.write(render(SlurmJob(hosts=1), BERT, FOLDER), tmp_path), earlier=None)
    assert not slurm.is_here()


@pytest.mark.parametrize(
    ("complaint", "remedy"),
    [
        ("invalid partition specified: gpuu", "sinfo lists the partitions"),
        ("Invalid account or account/partition combination specified", "sacctmgr show associations"),
        ("Invalid qos specification", "sacctmgr show qos lists them"),
        (
            "Job violates accounting/QOS policy (job submit limit, user's size and/or time limits)",
            "shows the limits",
        ),
        ("Invalid generic resource (gres) specification", "sinfo -o '%P %G' shows the GPUs"),
        ("Requested node configuration is not available", "shows what nodes have"),
        ("Node count specification invalid", "shows how many nodes"),
        ("Requested time limit is invalid (missing or exceeds some limit)", "shows the partitions' limits"),
    ],
)
def test_what_slurm_refuses_is_passed_on_with_a_remedy(
    tmp_path: Path, fake: Path, complaint: str, remedy: str
) -> None:
    (fake / "sbatch").write_text(f'#!/bin/sh\necho "sbatch: error: {complaint}" >&2; exit 1\n')
    with pytest.raises(ShoalError) as raised:
        slurm.submit(slurm.write(render(SlurmJob(hosts=1), BERT, FOLDER), tmp_path), earlier=None)
    assert complaint in str(raised.value) and remedy in str(raised.value)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put programs with the names of Slurm's first in the path; they write down how they were called."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, answer in (("sbatch", "4711"), ("squeue", "RUNNING"), ("scancel", "")):
        log = f'echo {name} "$@" >> "$(dirname "$0")/said"\n' if name == "scancel" else ""
        (programs / name).write_text(f"#!/bin/sh\n{log}echo {answer}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    return programs


def test_a_job_is_stopped_and_submitted_again(tmp_path: Path, fake: Path) -> None:
    folder = tmp_path / "jobs" / "bert"
    path = slurm.write(render(SlurmJob(hosts=1), BERT, folder), folder)
    assert slurm.submit(path, earlier=None) == "4711"
    with pytest.raises(ShoalError, match=r"its job 4711 is RUNNING; scancel 4711 first"):
        slurm.submit(path, earlier="4711")
    assert slurm.stop(folder, "4711") == "job 4711 saves and leaves"
    assert (fake / "said").read_text() == "scancel --signal=USR1 4711\n"
    assert (folder / "stop").exists()
    (fake / "squeue").write_text(
        "#!/bin/sh\necho 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1\n"
    )
    with pytest.raises(UsageError, match=r"bert has no job that waits or runs"):
        slurm.stop(folder, "4711")
    slurm.submit(path, earlier="4711")
    assert not (folder / "stop").exists()


def test_what_a_plug_in_says_beside_the_job_id_is_no_part_of_it(tmp_path: Path, fake: Path) -> None:
    path = slurm.write(render(SlurmJob(hosts=1), BERT, tmp_path), tmp_path)
    (fake / "sbatch").write_text("#!/bin/sh\necho '4711;cluster'; echo 'sbatch: lua: welcome' >&2\n")
    assert slurm.submit(path, earlier=None) == "4711"
    (fake / "sbatch").write_text("#!/bin/sh\necho 'welcome'\n")
    with pytest.raises(ShoalError, match="sbatch --parsable said 'welcome', which is no job id; see squeue"):
        slurm.submit(path, earlier=None)


def test_a_job_that_waits_is_cancelled(tmp_path: Path, fake: Path) -> None:
    (fake / "squeue").write_text("#!/bin/sh\necho PENDING\n")
    assert slurm.stop(tmp_path, "4711") == "job 4711 was PENDING and is cancelled"
    assert (fake / "said").read_text() == "scancel 4711\n"


def test_a_stopped_job_is_not_queued_again(tmp_path: Path) -> None:
    (tmp_path / "srun").write_text("#!/bin/sh\nexit 75\n")
    (tmp_path / "scontrol").write_text("#!/bin/sh\nexit 9\n")
    for name in ("srun", "scontrol"):
        (tmp_path / name).chmod(0o755)
    (tmp_path / "stop").touch()
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "4711"}
    assert (
        subprocess.run(["bash", "-c", render(SlurmJob(hosts=2), BERT, tmp_path)], env=environ).returncode
        == 75
    )
