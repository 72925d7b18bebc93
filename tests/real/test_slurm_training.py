"""ALBERT's tiny job on a real Slurm ends with the bits of an uninterrupted one, whatever Slurm does to it.

Every start takes 15 steps or more before something happens to it, and so writes a checkpoint. Links of
40 Mbit/s make a step take as long on a fast machine as on a slow one.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster, missing

from shoal import record
from shoal.record import read_record

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), pytest.mark.timeout(900)]

STEPS, EVERY = 120, 10
STEPS_OF_8_SLOTS = 600
TRAINED, TRAINED_OF_8_SLOTS = 15, 40
LOST_S = 30.0
HELPER = 2
DEADLINE_S = 300.0
ROOT = Path(__file__).parents[2]
FIGURES = ROOT / "build" / "slurm_latency.txt"
"""Gets a line for each job: how long it took to save, and to start again."""
SETTINGS = {
    "data.path": "text",
    "run.log-frequency": 1,
    "run.checkpoint-frequency": EVERY,
    "run.keep-checkpoints": STEPS_OF_8_SLOTS,
    "run.validation-frequency": 0,
    "run.validation-samples": 256,
}
SUBMIT = (
    "shoal",
    "submit",
    "slurm",
    "--partition",
    "gpu",
    "--helper-partition",
    "cpu",
    "--workers-per-host",
    "1",
)


def train(run: str, steps: int = STEPS) -> list[str]:
    settings = {**SETTINGS, "train.total-steps": steps}
    options = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    return ["shoal", "train", "albert", "--preset", "tiny", "--run.dir", run, *options]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with SlurmCluster(
        tmp_path_factory.mktemp("slurm") / "cluster", workers=2, helpers=2, nic="40mbit"
    ) as cluster:
        pages = ("shoal", "prepare", "text", f"{ROOT}/docs/*.md", "--out", "text", "--vocab-size", "2048")
        cluster.run(*pages, deadline_s=DEADLINE_S)
        yield cluster


@pytest.fixture(scope="module")
def whole(slurm: SlurmCluster) -> Path:
    """Return the run that nothing interrupts: two workers, without Slurm."""
    return alone(slurm, "whole", num_workers=2)


def alone(slurm: SlurmCluster, run: str, *, num_workers: int, steps: int = STEPS) -> Path:
    """Run the job on this machine to its end, and return its directory."""
    command = [sys.executable, "-m", *train(run, steps), "--workers", str(num_workers)]
    done = subprocess.run(command, cwd=slurm.folder, capture_output=True, text=True, timeout=2 * DEADLINE_S)
    assert done.returncode == 0, done.stderr
    return slurm.folder / run


class Job:
    """A submitted job and what its run's record says."""

    def __init__(self, slurm: SlurmCluster, run: str, *options: str, steps: int = STEPS) -> None:
        self.slurm, self.run = slurm, slurm.folder / run
        slurm.await_true(lambda: slurm.idle_nodes() == slurm.num_nodes, DEADLINE_S)
        said = slurm.run(*SUBMIT, "--name", run, *options, "--", *train(run, steps), deadline_s=DEADLINE_S)
        self.id = said.split()[1]
        self.figures: list[str] = []

    def rows(self, kind: type[record.Row]) -> list[record.Row]:
        found = read_record(self.run) if (self.run / "record.jsonl").exists() else []
        return [row for row in found if isinstance(row, kind)]

    def train(self, start: int, num_steps: int = TRAINED) -> None:
        """Return when a start, counted from 1, has taken ``num_steps`` steps."""
        self.slurm.await_true(lambda: len(self.rows(record.Start)) >= start, DEADLINE_S)
        begun = self.rows(record.Start)[start - 1].time_s

        def times() -> list[float]:
            return [row.time_s for row in self.rows(record.Step) if row.time_s > begun]

        self.slurm.await_true(lambda: len(times()) >= num_steps, DEADLINE_S)
        self.figures.append(f"start {start}: first step {times()[0] - self.began():.1f} s after Slurm began")
        assert not self.rows(record.End), "the job is too short for this machine"

    def start_after(self, start: int) -> int:
        """Return the number of the next start, or that of the last one if the run just carries on."""
        until = time.monotonic() + LOST_S
        while time.monotonic() < until and len(self.rows(record.Start)) == start:
            time.sleep(0.2)
        return len(self.rows(record.Start))

    def limit(self, minutes: int) -> None:
        """Set the time limit of the job, of which it is told 3 minutes before."""
        for part in range(2):
            self.slurm.run("scontrol", "update", f"JobId={self.id}+{part}", f"TimeLimit={minutes}")

    def began(self) -> float:
        """Return when Slurm has started the job's script for the last time."""
        text = self.slurm.run("scontrol", "show", "job", self.id)
        return time.mktime(time.strptime(text.partition("StartTime=")[2].split()[0], "%Y-%m-%dT%H:%M:%S"))

    def stops(self, why: str, cause: Callable[[], object]) -> None:
        """Do what makes the workers save and leave, and wait until they have."""
        before, asked = len(self.rows(record.Stop)), time.time()
        cause()
        self.slurm.await_true(lambda: len(self.rows(record.Stop)) > before, DEADLINE_S)
        self.figures.append(
            f"{why}: saved and stopped {self.rows(record.Stop)[-1].time_s - asked:.1f} s later"
        )

    def ends(self, deadline_s: float = DEADLINE_S) -> None:
        self.slurm.await_true(lambda: self.slurm.ended(self.id), deadline_s)
        with FIGURES.open("a") as file:
            print(time.strftime("%Y-%m-%d %H:%M"), self.run.name, "; ".join(self.figures), file=file)
        assert self.slurm.ended(self.id) == "0:0", self.slurm.logs()


def losses(run: Path, until: int = STEPS_OF_8_SLOTS) -> dict[int, float]:
    return {
        row.step: row.loss for row in read_record(run) if isinstance(row, record.Step) if row.step <= until
    }


def end_of(run: Path, steps: int = STEPS) -> dict[str, bytes]:
    """Return the content of the last checkpoint's tensors and of the exported model."""
    (checkpoint,) = (run / "checkpoints").glob(f"step-{steps:08}")
    files = [*checkpoint.glob("**/*.safetensors"), *(run / "transformers").glob("*.safetensors")]
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


def test_three_slots_give_the_bits_of_one(slurm: SlurmCluster, whole: Path) -> None:
    """Preempt the first start; the second is told of its time limit; the third may end."""
    job = Job(slurm, "slots", "--hosts", "2", "--helpers", "1", "--time", "60")
    interrupt(job, slots=3, trained=TRAINED)
    assert losses(job.run) == losses(whole)
    assert end_of(job.run) == end_of(whole)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_eight_slots_give_the_bits_of_one(slurm: SlurmCluster) -> None:
    steps = STEPS_OF_8_SLOTS
    reference = alone(slurm, "whole8", num_workers=2, steps=steps)
    job = Job(slurm, "slots8", "--hosts", "2", "--helpers", "1", "--time", "60", steps=steps)
    interrupt(job, slots=8, trained=TRAINED_OF_8_SLOTS)
    assert losses(job.run) == losses(reference)
    assert end_of(job.run, steps) == end_of(reference, steps)


def interrupt(job: Job, *, slots: int, trained: int) -> None:
    """After ``trained`` steps of each start but the last, preempt it or limit its time, in turn."""
    urgent = (
        "sbatch",
        "--parsable",
        "-p",
        "high",
        "-N2",
        "--exclusive",
        "-o",
        "/dev/null",
        "--wrap",
        "sleep 1",
    )
    for start in range(1, slots):
        job.train(start, trained)
        if start % 2:
            job.stops("preempted", lambda: job.slurm.run(*urgent))
        else:
            job.stops("the time limit is near", lambda: job.limit(3))
            job.limit(60)
    job.ends(2 * DEADLINE_S)  # most steps are those of the last start
    assert len(job.rows(record.Start)) >= slots


def test_lost_helper_lost_worker_and_fewer_nodes(slurm: SlurmCluster, whole: Path) -> None:
    """Kill the helper's node, then a worker's, which stays away: the rest runs on the node that is left."""
    options = ("--hosts", "2", "--min-hosts", "1", "--helpers", "1", "--global-batch", "128")
    job = Job(slurm, "nodes", *options)
    job.train(1)
    slurm.kill_node(HELPER)
    slurm.start_node(HELPER)
    job.train(job.start_after(1))
    slurm.kill_node(1)
    job.ends()
    one_worker = next(row.time_s for row in job.rows(record.Start) if row.num_workers == 1)
    step = next(row.step for row in job.rows(record.Resume) if row.time_s >= one_worker)
    assert 0 < step < STEPS
    assert losses(job.run, step) == losses(whole, step)
    reference = until(job.run, step, slurm.folder / "reference")
    alone(slurm, reference.name, num_workers=1)
    assert losses(job.run) == losses(reference)
    assert end_of(job.run) == end_of(reference)


def until(run: Path, step: int, out: Path) -> Path:
    """Copy a run as it was when the checkpoint of a step had been written."""
    later = [path.name for path in (run / "checkpoints").iterdir() if int(path.name.partition("-")[2]) > step]
    shutil.copytree(run, out, ignore=shutil.ignore_patterns(*later, "transformers", "results.json"))
    path = out / "record.jsonl"  # what it says of later steps is void when it continues
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if '"kind": "end"' not in line))
    return out
