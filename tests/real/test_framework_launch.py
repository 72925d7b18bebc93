"""Runs the examples for JAX, Keras and TensorFlow by ``shoal launch`` and on emulated hosts, without torch.

``shoal bench comm`` needs torch beside them. They reach ``shoal.launch.local`` and ``shoal.launch.emulated``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
from framework_jobs import DEADLINE_S, NOT_FOR_CHILDREN, environment
from wheels import ROOT

EXAMPLES = ROOT / "examples"
LAUNCH = ["launch", "--workers", "2"]
EMULATE = ["emulate", "--hosts", "2", "--helpers", "1", "--nic", "200mbit"]


def shoal(python: Path, folder: Path, *arguments: str, **variables: str) -> str:
    kept = {name: value for name, value in os.environ.items() if name not in NOT_FOR_CHILDREN}
    done = subprocess.run(
        [python, "-m", "shoal", *arguments], cwd=folder, timeout=DEADLINE_S, check=False, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**kept, "TF_CPP_MIN_LOG_LEVEL": "2", "JAX_PLATFORMS": "cpu", **variables},
    )  # fmt: skip
    logs = "\n".join(path.read_text() for path in folder.rglob("worker-*"))
    assert done.returncode == 0, done.stdout + logs
    return done.stdout


def losses(said: str, size: int) -> list[float]:
    found = re.findall(rf"loss (\d\.\d+).* on {size} processes", said)
    assert len(found) == 3, said
    return [float(each) for each in found]


@pytest.mark.parametrize(
    "how",
    [pytest.param(LAUNCH, id="launch"), pytest.param(EMULATE, id="emulate", marks=pytest.mark.slow)],
)
def test_jax(how: list[str], tmp_path: Path) -> None:
    python = environment("jax", "jax,keras", "flax", "hypothesis")
    said = shoal(python, tmp_path, *how, "--", str(python), str(EXAMPLES / "jax_optax.py"))
    assert losses(said, 2)[-1] < 0.6


def test_a_launcher_on_each_of_two_hosts(tmp_path: Path) -> None:
    """The launchers meet at MASTER_ADDR and MASTER_PORT, which the emulated hosts have."""
    python = environment("jax", "jax,keras", "flax", "hypothesis")
    secret = tmp_path / "job.secret"
    secret.touch(0o600)
    secret.write_text("the secret of two launchers without torch")
    launch = [str(python), "-m", "shoal", "launch", "--workers", "2", "--nnodes", "2"]
    program = [*launch, "--log-dir", "logs", "--", str(python), str(EXAMPLES / "jax_optax.py")]
    said = shoal(python, tmp_path, *EMULATE, "--", *program, SHOAL_SECRET_FILE=str(secret))
    assert losses(said, 4)[-1] < 0.6 and "2 hosts over TCP" in said and "1 helpers" in said


@pytest.mark.slow
@pytest.mark.parametrize("how", [LAUNCH, EMULATE], ids=["launch", "emulate"])
def test_tensorflow(how: list[str], tmp_path: Path) -> None:
    python = environment("tensorflow", "keras", "tensorflow-cpu")
    said = shoal(python, tmp_path, *how, "--", str(python), str(EXAMPLES / "tensorflow_tape.py"))
    assert losses(said, 2)[-1] < 0.6


@pytest.mark.slow
@pytest.mark.parametrize("how", [LAUNCH, EMULATE], ids=["launch", "emulate"])
def test_keras_goes_on(how: list[str], tmp_path: Path) -> None:
    python = environment("jax", "jax,keras", "flax", "hypothesis")
    program = [str(python), str(EXAMPLES / "keras_fit.py"), "--backup", "backup"]
    first = losses(shoal(python, tmp_path, *how, "--", *program, KERAS_BACKEND="jax"), 2)
    again = shoal(python, tmp_path, *how, "--", *program, "--epochs", "4", KERAS_BACKEND="jax")
    assert first[-1] < first[0] and "epoch 3" not in again and "epoch 4: loss" in again


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "name", "extra", "packages"),
    [
        ("shoal-jax", "jax-torch", "jax,torch", ()),
        ("shoal-tensorflow", "tensorflow-torch", "torch", ("tensorflow-cpu",)),
    ],
)
def test_bench_comm(backend: str, name: str, extra: str, packages: tuple[str, ...], tmp_path: Path) -> None:
    python, found = environment(name, extra, *packages), tmp_path / "comm.json"
    collectives = ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier"]
    arguments = ["--collectives", ",".join(collectives), "--sizes", "1k,1m", "--repeats", "2"]
    said = shoal(
        python, tmp_path, "bench", "comm", "--backends", f"shoal,{backend}", *arguments, "--json", str(found)
    )
    rows = json.loads(found.read_text())["rows"]
    assert [row["collective"] for row in rows if row["backend"] == backend] == [
        each for each in collectives for _ in range(1 if each == "barrier" else 2)
    ]
    assert len(rows) == 2 * 9 and said.count(backend) == 9
    for row in rows:  # workers compare each result with the exact one first
        assert len(row["samples_s"]) == 2 and min(row["samples_s"]) > 0
