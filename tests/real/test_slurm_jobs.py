"""Jobs on a real Slurm whose command counts: preempted, requeued, with helpers, with seeds, refused."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from slurm_cluster import SlurmCluster, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

DEADLINE_S = 240.0
COUNT = """
import os, pathlib, signal, sys, time
asked = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: asked.append(number))
place = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
helpers = len(os.environ.get("SHOAL_HELPERS", "").split(",")) if os.environ.get("SHOAL_HELPERS") else 0
file = pathlib.Path(f"{sys.argv[1]}-{place[0]}")
step = int(file.read_text()) if file.exists() else 0
with open(f"{file}.log", "a") as log:
    print(*place, helpers, os.environ["TORCHELASTIC_RUN_ID"].partition(".")[2], step, file=log)
while step < int(sys.argv[2]):
    step += 1
    time.sleep(0.2)
    if asked:
        file.write_text(str(step))
        sys.exit(75)
file.write_text("done")
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with SlurmCluster(tmp_path_factory.mktemp("slurm") / "cluster", workers=2, helpers=2) as cluster:
        (cluster.folder / "count.py").write_text(COUNT)
        yield cluster


def submit(slurm: SlurmCluster, *arguments: str) -> str:
    """Submit a job and return its id."""
    said = slurm.run("shoal", "submit", "slurm", "--hosts", "2", "--partition", "gpu", *arguments)
    return said.split()[1]


def starts(slurm: SlurmCluster, name: str) -> list[list[str]]:
    """Return what a worker wrote at each of its starts."""
    path = slurm.folder / f"{name}.log"
    return [line.split() for line in path.read_text().splitlines()] if path.exists() else []


def test_a_preempted_job_with_helpers_saves_and_is_started_again(slurm: SlurmCluster) -> None:
    command = ("--", "python3", "count.py", "out", "120")
    job = submit(slurm, "--helpers", "2", "--helper-partition", "cpu", "--workers-per-host", "1", *command)
    slurm.await_true(lambda: starts(slurm, "out-0") and starts(slurm, "out-1"), DEADLINE_S)
    time.sleep(2.0)
    high = slurm.run(
        "sbatch", "--parsable", "-p", "high", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "true"
    ).strip()
    slurm.await_true(lambda: not slurm.state(high), DEADLINE_S)
    slurm.await_true(lambda: slurm.ended(job), DEADLINE_S)
    assert slurm.ended(job) == "0:0", slurm.logs()
    for rank in range(2):
        first, second = starts(slurm, f"out-{rank}")
        assert first == [str(rank), "2", "0", "1", "2", "0", "0"]
        assert second[:6] == [str(rank), "2", "0", "1", "2", "1"]
        assert int(second[6]) > 5, "it continues where it saved"


def test_seeds_with_a_task_for_each_worker(slurm: SlurmCluster) -> None:
    tasks = ("--workers-per-host", "2", "--cpus-per-host", "2", "--task-per-worker", "--array", "0-1")
    submit(slurm, *tasks, "--", "python3", "count.py", "seed{seed}", "1")
    slurm.await_true(lambda: len(list(slurm.folder.glob("seed?-?.log"))) == 8, DEADLINE_S)
    for seed in range(2):
        for rank in range(4):
            assert starts(slurm, f"seed{seed}-{rank}") == [
                [str(rank), "4", str(rank % 2), "2", "0", "0", "0"]
            ]


def test_a_job_takes_as_many_nodes_of_its_range_as_there_are(slurm: SlurmCluster) -> None:
    slurm.await_true(lambda: slurm.idle_nodes() == slurm.num_nodes, DEADLINE_S)
    helper = ("--helpers", "1", "--helper-partition", "cpu", "--workers-per-host", "1")
    submit(slurm, "--min-hosts", "1", *helper, "--", "python3", "count.py", "range", "1")
    slurm.await_true(lambda: starts(slurm, "range-0"), DEADLINE_S)
    assert starts(slurm, "range-0")[0][:5] == ["0", "2", "0", "1", "1"]


def test_an_allocation_by_hand(slurm: SlurmCluster) -> None:
    """As the documentation has it: ``salloc``, and in its shell ``srun``."""
    slurm.await_true(lambda: slurm.idle_nodes() == slurm.num_nodes, DEADLINE_S)
    shell = (
        "srun --ntasks-per-node=1 shoal launch --workers 1 -- python3 count.py hand 1 && "
        "srun --ntasks-per-node=2 shoal launch -- python3 count.py tasks 1"
    )
    slurm.run("salloc", "--nodes=2", "--partition=gpu", "--exclusive", "bash", "-c", shell)
    places = [starts(slurm, f"hand-{rank}")[0][:5] for rank in range(2)]
    assert places == [[str(rank), "2", "0", "1", "0"] for rank in range(2)]
    assert [starts(slurm, f"tasks-{rank}")[0][:5] for rank in range(4)] == [
        [str(rank), "4", str(rank % 2), "2", "0"] for rank in range(4)
    ]


MISTAKES = [
    ("--partition=gpu", "--partition=gpuu", "invalid partition specified: gpuu"),
    ("--nodes=2", "--nodes=9", "Requested node configuration is not available"),
    ("--nodes=2", "--nodse=2", "unrecognized option '--nodse=2'"),
    ("--time=24:00:00", "--time=24h", "Invalid --time specification"),
    ("USR1@180", "USR77@180", "Invalid --signal specification"),
    ("--exclusive", "--gpus-per-node=8", "Invalid generic resource (gres) specification"),
    ("--exclusive", "--constraint=a100", "Invalid feature specification"),
    ("--exclusive", "--mem=9000T", "Requested node configuration is not available"),
    ("--exclusive", "--cpus-per-task=64", "Requested node configuration is not available"),
    ("#!/bin/bash\n", "", "This does not look like a batch script"),
]


def test_planted_mistakes_in_the_script_are_found(slurm: SlurmCluster) -> None:
    """Slurm itself reads the script, as ``shoal submit slurm --dry-run`` lets it."""
    options = ("--hosts", "2", "--partition", "gpu", "--to", "planted", "--", "true")
    slurm.run("shoal", "submit", "slurm", *options)
    path = slurm.folder / "planted" / "job.sbatch"
    good = path.read_text()
    assert slurm.try_to("sbatch", "--test-only", str(path))[0] == 0
    missed = {}
    for right, wrong, said in MISTAKES:
        assert right in good
        path.write_text(good.replace(right, wrong, 1))
        code, out, err = slurm.try_to("sbatch", "--test-only", str(path))
        if code == 0 or said not in err:
            missed[wrong] = out + err
    assert not missed


def test_what_slurm_refuses_is_said_with_a_remedy(slurm: SlurmCluster) -> None:
    code, _, said = slurm.try_to(
        "shoal", "submit", "slurm", "--hosts", "2", "--partition", "no", "--", "true"
    )
    assert (code, "invalid partition specified: no" in said, "sinfo lists" in said) == (1, True, True)
    said = slurm.run("shoal", "submit", "slurm", "--hosts", "2", "--dry-run", "--", "true")
    assert "to start at" in said and "#SBATCH --nodes=2" in said
