"""``shoal train`` as a person runs it: the launcher, its workers, signals, torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pretrain_jobs as jobs
import pytest
import use_jobs

from forked import shoal, torchrun
from shoal.errors import EXIT_OK, EXIT_STOPPED, EXIT_USAGE
from shoal.record import Evaluation, Start, read_record

SHOAL = (sys.executable, "-m", "shoal")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return jobs.prepare_small(tmp_path_factory.mktemp("data"))


def settings(data: Path, run_dir: Path, steps: int) -> list[str]:
    return [
        *("train", "albert", "--preset", "tiny", "--data.path", str(data), "--run.dir", str(run_dir)),
        *("--model.hidden-size", "32", "--model.intermediate-size", "64", "--model.vocab-size", "96"),
        *("--data.max-seq-length", "32", "--data.max-predictions-per-seq", "5"),
        *("--train.total-steps", str(steps), "--optim.warmup-steps", "2", "--train.global-batch-size", "8"),
        *("--run.log-frequency", "1", "--run.validation-frequency", str(steps)),
    ]


def test_sigterm_to_the_launcher_saves_and_the_same_command_continues(data: Path, tmp_path: Path) -> None:
    command = [*SHOAL, *settings(data, tmp_path / "run", 4_000), "--workers", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 120
    while time.monotonic() < end and not (tmp_path / "run" / "record.jsonl").is_file():
        time.sleep(0.05)
    while time.monotonic() < end and max(jobs.losses(tmp_path / "run"), default=0) < 3:
        time.sleep(0.05)
    second = shoal(*settings(data, tmp_path / "run", 4_000), "--workers", "1")
    assert second.returncode == EXIT_USAGE
    assert f"{tmp_path / 'run'} is in use by job" in second.stderr and len(second.stderr.splitlines()) == 1
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == EXIT_STOPPED, err
    assert "stopped at step" in err and "the same command continues" in err
    assert "Traceback" not in err
    stopped = max(jobs.losses(tmp_path / "run"))
    assert 3 <= stopped < 4_000
    (owner,) = (tmp_path / "run" / "owner").iterdir()
    assert json.loads(owner.read_bytes())["released"]

    shorter = settings(data, tmp_path / "run", stopped + 3)
    use_jobs.said(tmp_path, *shorter)  # on one worker
    said = (tmp_path / "0.err").read_text()
    assert f"continuing from {tmp_path / 'run' / 'checkpoints'}" in said
    assert sorted(jobs.losses(tmp_path / "run")) == list(range(1, stopped + 4))

    again = use_jobs.said(tmp_path, *shorter)
    assert "is finished" in again and "to begin again, name another --run.dir" in again


def test_under_torchrun_the_same_command_joins(data: Path, tmp_path: Path) -> None:
    """Its workers are forked; those of ``test_the_same_workers_join_under_torchrun`` are programs."""
    command = ["-m", "shoal", *settings(data, tmp_path / "run", 3)]
    code, said = torchrun(*command, output=tmp_path / "said", forks=True)
    assert code == EXIT_OK, said
    (start,) = [row for row in read_record(tmp_path / "run") if isinstance(row, Start)]
    assert start.num_workers == 2
    assert sorted(jobs.losses(tmp_path / "run")) == [1, 2, 3]


@pytest.mark.slow
@pytest.mark.timeout(1_200)
def test_the_tiny_bert_learns(tmp_path: Path) -> None:
    """The preset on the English of this Python: below the unigram entropy, in both phases."""
    text, run_dir = str(tmp_path / "text"), str(tmp_path / "run")
    prepare = [*SHOAL, "prepare", "text", "builtin", "--out", text, "--vocab-size", "2048"]
    assert subprocess.run(prepare, timeout=600).returncode == EXIT_OK
    command = ("train", "bert", "--preset", "tiny", "--data.path", text, "--run.dir", run_dir)
    assert subprocess.run([*SHOAL, *command, "--workers", "2"], timeout=900).returncode == EXIT_OK
    rows = read_record(tmp_path / "run")
    (start,) = [row for row in rows if isinstance(row, Start)]
    found = {row.step: row.metrics["mlm_loss"] for row in rows if isinstance(row, Evaluation)}
    assert sorted(found) == [300, 600, 900, 1_150]
    for last_step in (900, 1_150):
        assert found[last_step] < start.references["mlm_loss"] - 0.5


PLAIN = {
    "ascii": {"PYTHONIOENCODING": "ascii"},
    "locale C": {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"},
}
"""Variables of a process whose output cannot have all characters."""


@pytest.mark.parametrize(
    ("command", "output"),
    [
        ("train", "ascii"),
        ("plan", "locale C"),
        # each is quick with the other output
        pytest.param("train", "locale C", marks=pytest.mark.slow),
        pytest.param("plan", "ascii", marks=pytest.mark.slow),
    ],
)
def test_an_output_without_all_characters_ends_no_command(
    data: Path, tmp_path: Path, command: str, output: str
) -> None:
    words = {
        "train": [*settings(data, tmp_path / "run", 8), "--dry-run"],
        "plan": ["plan", "albert-base", "--cluster", "8xp4d.24xlarge"],
    }[command]
    environ = {**os.environ, **PLAIN[output]}
    done = subprocess.run([*SHOAL, *words], capture_output=True, check=False, env=environ)
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"\xd7" in done.stdout  # the sign of multiplication
