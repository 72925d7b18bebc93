"""Tests ``shoal.jax`` in an environment with the wheel, JAX and optax, and without torch.

The programs are in ``jax_workers.py``. They run ``shoal.jax.collectives``, ``shoal.jax.optimizer``,
``shoal.jax.process`` and ``shoal.jax.mpi``. The environment has 400 MB and is made once per wheel; the first
program compiles the handlers for XLA, once per cache.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from wheels import ROOT, find_wheel

WORKERS = Path(__file__).with_name("jax_workers.py")
SECRET = "the secret of the tests of JAX"
DEADLINE_S = 240.0
NOT_FOR_CHILDREN = ("PYTHONPATH", "VIRTUAL_ENV", "RANK", "WORLD_SIZE")
WITH_SHARED_MEMORY = pytest.param("", id="shared memory")
OVER_TCP = pytest.param("hosts", id="tcp", marks=pytest.mark.slow)
TWO = pytest.param(2)
FOUR = pytest.param(4, marks=pytest.mark.slow)


@pytest.fixture(scope="session")
def python() -> Path:
    """Return the interpreter of an environment with ``pip install shoal[jax]``."""
    own = "abi3" if sys.version_info >= (3, 12) else f"cp3{sys.version_info.minor}"
    wheel = find_wheel("make wheels", own)
    folder = ROOT / "build" / "jax-environment"
    made_of, stamp = f"{wheel.name} {wheel.stat().st_mtime_ns}", folder / "made-of.txt"
    if not stamp.exists() or stamp.read_text() != made_of:
        uv = [sys.executable, "-m", "uv"]
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([*uv, "venv", "--quiet", "--python", sys.executable, folder], check=True)
        subprocess.run(
            [
                *uv,
                "pip",
                "install",
                "--quiet",
                "--python",
                folder / "bin/python",
                f"shoal[jax] @ {wheel.as_uri()}",
            ],
            check=True,
        )
        stamp.write_text(made_of)
    return folder / "bin" / "python"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def run(
    python: Path | str, name: str, size: int, hosts: str = "", *, lost: int | None = None, **more: str
) -> str:
    """Run a program of ``jax_workers.py`` in ``size`` processes; return what rank 0 printed.

    Args:
        hosts: not empty: each process counts as a host, so that data goes over TCP.
        lost: rank that kills itself.
    """
    kept = {key: value for key, value in os.environ.items() if key not in NOT_FOR_CHILDREN}
    common = {
        **kept, **more, "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "COORDINATOR_PORT": str(free_port()), "SHOAL_SECRET": SECRET, "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    workers = [
        subprocess.Popen(
            [python, WORKERS, name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd="/",
            env={**common, "RANK": str(rank)} | ({"SHOAL_HOST_ID": f"host-{rank}"} if hosts else {}),
        )
        for rank in range(size)
    ]  # fmt: skip
    try:
        said = [worker.communicate(timeout=DEADLINE_S)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    expected = [-signal.SIGKILL if rank == lost else 0 for rank in range(size)]
    assert [worker.returncode for worker in workers] == expected, "\n".join(said)
    return said[0]


def results(text: str) -> list[str]:
    """Return the lines of results, without those of warnings."""
    return [line for line in text.splitlines() if line.startswith(("float", "bfloat", "weights", "rank"))]


@pytest.mark.parametrize("hosts", [WITH_SHARED_MEMORY, OVER_TCP])
@pytest.mark.parametrize("size", [TWO, FOUR])
def test_sums_have_the_bits_of_the_torch_backend(python: Path, size: int, hosts: str) -> None:
    of_jax = results(run(python, "sums", size, hosts))
    assert len(of_jax) == 8
    assert of_jax == results(run(sys.executable, "torch_sums", size, hosts, SHOAL_NATIVE_GROUP="0"))


@pytest.mark.parametrize("hosts", [WITH_SHARED_MEMORY, OVER_TCP])
@pytest.mark.parametrize("size", [TWO, FOUR])
def test_collectives_are_those_of_numpy(python: Path, size: int, hosts: str) -> None:
    run(python, "collectives", size, hosts)


def test_one_process_alone(python: Path) -> None:
    run(python, "alone", 1)
    run(python, "alone", 1, PATH="", CXX="")  # it is compiled by now


def test_without_a_compiler_it_says_what_to_install(python: Path, tmp_path: Path) -> None:
    alone = {"RANK": "0", "WORLD_SIZE": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [python, WORKERS, "alone"],
        env={**os.environ, **alone, "PATH": "", "CXX": "", "SHOAL_CACHE_DIR": str(tmp_path)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "UsageError: shoal.jax compiles its handlers for XLA on first use: " in done.stderr
    assert "no C++ compiler is found; install g++ or clang++, or set CXX" in done.stderr


@pytest.mark.parametrize(
    ("size", "runs"), [pytest.param(2, 20), pytest.param(4, 200, marks=pytest.mark.slow)]
)
def test_many_calls_of_a_program_keep_their_order(python: Path, size: int, runs: int) -> None:
    run(python, "order", size, RUNS=str(runs))


@pytest.mark.parametrize("size", [TWO, FOUR])
def test_weights_are_those_of_one_process(python: Path, size: int) -> None:
    first = results(run(python, "training", size))
    assert len(first) == 2
    assert results(run(python, "training", size)) == first


def test_a_lost_rank_is_named(python: Path) -> None:
    assert results(run(python, "lost", 2, lost=1)) == ["rank 1 was named"]


def test_both_sides_of_a_mismatch_are_named(python: Path) -> None:
    run(python, "differing", 2)


@pytest.mark.parametrize("hosts", [WITH_SHARED_MEMORY, OVER_TCP])
@pytest.mark.parametrize(
    ("size", "runs"), [pytest.param(2, 10_000, marks=pytest.mark.slow), pytest.param(4, 100)]
)
def test_jaxs_own_collectives_run_unchanged(python: Path, size: int, runs: int, hosts: str) -> None:
    run(python, "mpi", size, hosts, RUNS=str(runs))


def test_collectives_are_chosen_before_jax_is_imported(python: Path) -> None:
    done = subprocess.run(
        [python, WORKERS, "too_late"], env={**os.environ, "RANK": "0", "WORLD_SIZE": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "use_collectives() has to be called before `import jax`" in done.stderr


def test_examples_in_docstrings(python: Path) -> None:
    modules = [f"shoal.jax.{path.stem}" for path in sorted((ROOT / "src/shoal/jax").glob("[a-z]*.py"))]
    program = "import doctest, importlib, sys\nfor name in sys.argv[1:]:\n"
    program += "    failed, _ = doctest.testmod(importlib.import_module(name)); assert not failed, name\n"
    subprocess.run(
        [python, "-c", program, *modules], check=True, cwd="/", env={**os.environ, "JAX_PLATFORMS": "cpu"}
    )
