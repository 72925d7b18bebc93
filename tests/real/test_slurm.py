"""Jobs on a real Slurm, submitted by ``shoal submit slurm``: what ends a start changes no bit of the run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())

TRAINED_S = 20.0
"""Time that a run trains before something ends its start."""
JOB_DEADLINE_S = 420.0
STEPS = "400"
TRAIN = (
    "shoal", "train", "albert", "--preset", "tiny", "--data.path", "text",
    "--train.global-batch-size", "16", "--train.total-steps", STEPS, "--optim.warmup-steps", "10",
    "--run.log-frequency", "10",
)  # fmt: skip


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    folder = tmp_path_factory.mktemp("slurm")
    with SlurmCluster(folder / "cluster", workers=2, helpers=2) as cluster:
        cluster.run("shoal", "prepare", "text", "builtin", "--out", "text", "--vocab-size", "2048")
        yield cluster


@pytest.fixture(scope="module")
def uninterrupted(slurm: SlurmCluster) -> dict[str, str]:
    """Return the checksums of a run of two workers that nothing ended, on one host."""
    subprocess.run(
        [sys.executable, "-m", *TRAIN, "--run.dir", "whole", "--workers", "2"],
        cwd=slurm.folder, check=True, capture_output=True, timeout=JOB_DEADLINE_S,
    )  # fmt: skip
    return checksums(slurm.folder / "whole")


def checksums(run_dir: Path) -> dict[str, str]:
    """Return the checksums of the last checkpoint: weights and optimizer state of each worker."""
    (last,) = run_dir.glob(f"checkpoints/step-{int(STEPS):08}/complete.json")
    files = json.loads(last.read_text())["files"]
    return {file["name"]: file["crc32"] for file in files if file["name"].endswith(".safetensors")}


def submit(slurm: SlurmCluster, name: str, *options: str) -> tuple[str, Path]:
    """Submit the run as a user does; return the job's id and the run's directory."""
    said = slurm.run(
        "shoal", "submit", "slurm", "--hosts", "2", "--partition", "gpu", "--name", name, "--time", "20",
        "--workers-per-host", "1", *options, "--", *TRAIN, "--run.dir", name,
    )  # fmt: skip
    return said.split()[1], slurm.folder / name


def output(slurm: SlurmCluster, name: str) -> str:
    path = slurm.folder / "jobs" / name / "output.log"
    return path.read_text() if path.exists() else ""


def train_a_while(slurm: SlurmCluster, run_dir: Path) -> None:
    """Wait until the run has trained for some time after its first step."""
    record = run_dir / "record.jsonl"
    slurm.await_true(lambda: record.exists() and '"kind":"step"' in record.read_text().replace(" ", ""), 240)
    time.sleep(TRAINED_S)


def test_a_preempted_run_ends_with_the_bits_of_an_uninterrupted_one(
    slurm: SlurmCluster, uninterrupted: dict[str, str]
) -> None:
    job, run_dir = submit(slurm, "preempted", "--helpers", "1", "--helper-partition", "cpu")
    train_a_while(slurm, run_dir)
    high = slurm.run(
        "sbatch", "--parsable", "-p", "high", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "true"
    )
    slurm.await_true(lambda: "75" in output(slurm, "preempted"), 60)
    slurm.await_true(lambda: not slurm.state(high.strip()), 120)
    slurm.await_true(lambda: slurm.ended(job), JOB_DEADLINE_S)
    said = output(slurm, "preempted")
    assert slurm.ended(job) == "0:0", said
    assert "the same command continues" in said and "continuing from" in said
    assert "1 helpers with" in said
    assert checksums(run_dir) == uninterrupted
    assert "SHOAL_SECRET" not in (slurm.folder / "jobs" / "preempted" / "job.sbatch").read_text()


@pytest.mark.slow
def test_a_lost_helper_node_changes_no_bit(slurm: SlurmCluster, uninterrupted: dict[str, str]) -> None:
    job, run_dir = submit(slurm, "helperless", "--helpers", "1", "--helper-partition", "cpu")
    train_a_while(slurm, run_dir)
    used = slurm.run("squeue", "-h", "-p", "cpu", "-o", "%N").strip()
    slurm.kill_node(next(node for node in range(slurm.num_nodes) if slurm.name(node) == used))
    slurm.await_true(lambda: slurm.ended(job), JOB_DEADLINE_S)
    assert slurm.ended(job) == "0:0", output(slurm, "helperless")
    assert "continuing from" in output(slurm, "helperless")
    assert checksums(run_dir) == uninterrupted


@pytest.mark.slow
def test_after_a_node_is_lost_the_run_continues_on_fewer(slurm: SlurmCluster) -> None:
    job, run_dir = submit(slurm, "fewer", "--min-hosts", "1", "--global-batch", "16")
    train_a_while(slurm, run_dir)
    slurm.kill_node(1)
    slurm.await_true(lambda: slurm.ended(job), JOB_DEADLINE_S)
    said = output(slurm, "fewer")
    assert slurm.ended(job) == "0:0", said
    assert "2 workers" in said and "1 worker " in said
    assert checksums(run_dir).keys() == {"worker-00000.safetensors"}
