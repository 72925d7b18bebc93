"""Tests ``shoal.keras`` under its three backends: ``model.fit`` of several processes against one.

The programs are in ``keras_workers.py``. They run ``shoal.keras.optimizer``, ``shoal.keras.gradients``,
``shoal.keras.callbacks``, ``shoal.keras.shards``, ``shoal.keras.values`` and ``shoal.keras.process``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from framework_jobs import environment, run
from wheels import ROOT

WORKERS = Path(__file__).with_name("keras_workers.py")
PROGRAMS = (
    "training",
    "accumulation",
    "scaling",
    "mixed_precision",
    "resume",
    "without_input",
    "subclassed",
    "metrics",
    "vector_metrics",
    "steps",
    "others",
    "horovod",
)


def python_of(backend: str) -> Path | str:
    if backend == "torch":
        return sys.executable
    if backend == "jax":
        return environment("jax", "jax,keras", "flax", "hypothesis")
    return environment("tensorflow", "keras", "tensorflow-cpu")


@pytest.mark.parametrize(
    ("backend", "size", "hosts"),
    [
        ("torch", 2, ""),
        pytest.param("jax", 2, "", marks=pytest.mark.slow),
        ("tensorflow", 2, ""),
        *(
            pytest.param(backend, size, hosts, marks=pytest.mark.slow)
            for backend in ("torch", "jax", "tensorflow")
            for size, hosts in ((3, ""), (4, ""), (5, ""), (4, "hosts"))
        ),
    ],
)
def test_fit_is_that_of_one_process(backend: str, size: int, hosts: str) -> None:
    said = run(python_of(backend), WORKERS, ",".join(PROGRAMS), size, hosts, KERAS_BACKEND=backend)
    assert said.count("weights ") == 4, said


def test_gradients_on_a_device_of_torch_are_staged() -> None:
    """On a runtime of CUDA without a GPU; one process is compared on the CPU."""
    said = run(sys.executable, WORKERS, "training,scaling,staged", 2, KERAS_BACKEND="torch", STAGED="1")
    assert said.count("weights ") == 4, said


def test_examples_in_docstrings() -> None:
    modules = [f"shoal.keras.{path.stem}" for path in sorted((ROOT / "src/shoal/keras").glob("[a-z]*.py"))]
    program = "import doctest, importlib, sys\nfor name in sys.argv[1:]:\n"
    program += "    failed, _ = doctest.testmod(importlib.import_module(name)); assert not failed, name\n"
    subprocess.run(
        [python_of("torch"), "-c", program, *modules], check=True, cwd="/",
        env={**os.environ, "KERAS_BACKEND": "torch"},
    )  # fmt: skip
