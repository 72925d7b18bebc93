"""Tests ``shoal.tensorflow`` in an environment with the wheel and TensorFlow, and without torch.

The programs are in ``tensorflow_workers.py``. They run ``shoal.tensorflow.ops``, ``shoal.tensorflow.op``,
``shoal.tensorflow.tape``, ``shoal.tensorflow.process`` and ``shoal.comm.horovod``. The environment has
1.3 GB and is made once per wheel; the first program compiles the operation, once per cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from framework_jobs import environment, run
from wheels import ROOT

WORKERS = Path(__file__).with_name("tensorflow_workers.py")
TWO = pytest.param(2, "")
SLOW = [
    pytest.param(2, "hosts", marks=pytest.mark.slow),
    pytest.param(3, "", marks=pytest.mark.slow),
    pytest.param(4, "", marks=pytest.mark.slow),
    pytest.param(5, "", marks=pytest.mark.slow),
    pytest.param(4, "hosts", marks=pytest.mark.slow),
]
CHECKOUTS = os.environ.get("SHOAL_TEST_CHECKOUTS", "")
NO_COMPILER = {"PATH": "", "CXX": ""}


@pytest.fixture(scope="session")
def python() -> Path:
    """Return the interpreter of an environment with the wheel, Keras and TensorFlow."""
    return environment("tensorflow", "keras", "tensorflow-cpu")


def results(text: str) -> list[str]:
    """Return the lines of results, without those of warnings."""
    return [line for line in text.splitlines() if line.startswith(("float", "bfloat"))]


@pytest.mark.parametrize(("size", "hosts"), [TWO, *SLOW])
def test_results_are_those_of_torch_numpy_and_one_process(python: Path, size: int, hosts: str) -> None:
    of_torch = run(
        sys.executable, WORKERS.with_name("jax_workers.py"), "torch_sums", size, hosts, SHOAL_NATIVE_GROUP="0"
    )
    said = run(python, WORKERS, "sums,collectives,order,training,horovod", size, hosts)
    assert results(said) == results(of_torch) and len(results(said)) == 8


def test_memory_of_tensors_is_kept(python: Path) -> None:
    one_thread = {"TF_NUM_INTRAOP_THREADS": "1", "TF_ENABLE_ONEDNN_OPTS": "0"}
    run(python, WORKERS, "memory", 2, KERAS_BACKEND="tensorflow", **one_thread)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_numpy_function_stands_in_on_all_ranks_or_some(python: Path, size: int, tmp_path: Path) -> None:
    compiled = results(run(python, WORKERS, "sums", size))
    cache = {**NO_COMPILER, "SHOAL_CACHE_DIR": str(tmp_path), "FALLBACK": "1"}
    said = run(python, WORKERS, "sums,collectives,order,training", size, **cache)
    line = (
        "shoal.tensorflow: using tf.numpy_function, which copies and waits, as its operation for TensorFlow"
    )
    assert said.count(line) == 1 and "no C++ compiler is found; install g++" in said
    assert results(said) == compiled
    some = [cache if rank % 2 else {} for rank in range(size)]
    assert results(run(python, WORKERS, "sums,collectives,order,training", size, of_rank=some)) == compiled


@pytest.mark.slow
def test_a_lost_rank_and_both_sides_of_a_mismatch_are_named(python: Path) -> None:
    assert "rank 1 was named" in run(python, WORKERS, "lost", 2, lost=1)
    run(python, WORKERS, "differing", 2)


@pytest.mark.slow
def test_examples_in_docstrings(python: Path) -> None:
    names = sorted(path.stem for path in (ROOT / "src/shoal/tensorflow").glob("[a-z]*.py"))
    program = "import doctest, importlib, sys\nfor name in sys.argv[1:]:\n"
    program += "    failed, _ = doctest.testmod(importlib.import_module(name)); assert not failed, name\n"
    subprocess.run(
        [python, "-c", program, *(f"shoal.tensorflow.{name}" for name in names)], check=True, cwd="/",
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"},
    )  # fmt: skip


# Besides its imports: other data, fewer steps, and what Keras 3 has no more (docs/from-horovod.md).
DATA = """
    import numpy as np
    mnist_images = np.random.default_rng(hvd.rank()).integers(0, 255, (600, 28, 28)).astype("uint8")
    mnist_labels = np.random.default_rng(hvd.rank()).integers(0, 10, 600)
"""
OF_BOTH = (
    ("import horovod\n", ""),
    (
        "    (mnist_images, mnist_labels), _ = \\\n        tf.keras.datasets.mnist.load_data(",
        DATA + "    _ = dict(",
    ),
)
EXAMPLES = {
    "tensorflow2_keras_mnist.py": (
        ("import horovod.tensorflow.keras as hvd", "import shoal.keras as hvd"),
        (",\n                        experimental_run_tf_function=False", ""),
        ("500 //", "9 //"),
        ("epochs=24", "epochs=4"),
    ),
    "tensorflow2_mnist.py": (
        ("import horovod.tensorflow as hvd", "import shoal.tensorflow as hvd"),
        ("opt.variables()", "opt.variables"),
        ("10000 //", "45 //"),
    ),
}


@pytest.mark.slow
@pytest.mark.skipif(not CHECKOUTS, reason="give a checkout of Horovod: SHOAL_TEST_CHECKOUTS=DIR")
@pytest.mark.parametrize("name", EXAMPLES)
def test_horovods_examples(python: Path, name: str, tmp_path: Path) -> None:
    text = Path(CHECKOUTS, "horovod/examples/tensorflow2", name).read_text(encoding="utf-8")
    for old, new in (*OF_BOTH, *EXAMPLES[name]):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (tmp_path / name).write_text(text, encoding="utf-8")
    command = [python, "-m", "shoal", "launch", "--workers", "3", "--", python, name]
    chosen = {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **chosen}, stdout=subprocess.PIPE, text=True, check=True
    )
    assert "loss" in done.stdout.lower()
    assert list(tmp_path.glob("checkpoint*"))
