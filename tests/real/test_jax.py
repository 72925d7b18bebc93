"""Tests ``shoal.jax`` in an environment with the wheel, JAX and optax, and without torch.

The programs are in ``jax_workers.py``. They run ``shoal.jax.collectives``, ``shoal.jax.optimizer``,
``shoal.jax.process``, ``shoal.jax.program`` and ``shoal.jax.mpi``. The environment has 400 MB and is made
once per wheel; the first program compiles the handlers for XLA, once per cache.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import framework_jobs
import pytest
from framework_jobs import environment
from wheels import ROOT

WORKERS = Path(__file__).with_name("jax_workers.py")
SEAM = Path(__file__).with_name("seam_workers.py")
WITH_SHARED_MEMORY = pytest.param("", id="shared memory")
OVER_TCP = pytest.param("hosts", id="tcp", marks=pytest.mark.slow)
TWO = pytest.param(2)
FOUR = pytest.param(4, marks=pytest.mark.slow)


@pytest.fixture(scope="session")
def python() -> Path:
    """Return the interpreter of an environment with the wheel's extra ``jax``."""
    return environment("jax", "jax,keras", "flax", "hypothesis")


def run(
    python: Path | str, name: str, size: int, hosts: str = "", *, lost: int | None = None, **more: str
) -> str:
    """Run a program of ``jax_workers.py`` in ``size`` processes; return what rank 0 printed."""
    return framework_jobs.run(python, WORKERS, name, size, hosts, lost=lost, **more)


def results(text: str) -> list[str]:
    """Return the lines of results, without those of warnings."""
    return [line for line in text.splitlines() if line.startswith(("float", "bfloat", "weights", "rank"))]


@pytest.mark.parametrize("hosts", [WITH_SHARED_MEMORY, OVER_TCP])
@pytest.mark.parametrize("size", [TWO, FOUR])
def test_sums_have_the_bits_of_the_torch_backend(python: Path, size: int, hosts: str) -> None:
    of_jax = results(run(python, "sums", size, hosts))
    assert len(of_jax) == 8
    of_torch = results(run(sys.executable, "torch_sums", size, hosts, SHOAL_NATIVE_GROUP="0"))
    assert of_jax == of_torch
    of_psum = results(framework_jobs.run(python, SEAM, "sums", size, hosts))
    assert len(of_psum) == 3 and set(of_psum) <= set(of_torch)


@pytest.mark.parametrize("size", [TWO, FOUR])
def test_sums_of_any_shapes(python: Path, size: int) -> None:
    run(python, "shapes", size)


@pytest.mark.parametrize("hosts", [WITH_SHARED_MEMORY, OVER_TCP])
@pytest.mark.parametrize("size", [TWO, FOUR])
def test_collectives_are_those_of_numpy(python: Path, size: int, hosts: str) -> None:
    run(python, "collectives", size, hosts)


def test_one_process_alone(python: Path) -> None:
    run(python, "alone", 1)
    run(python, "alone", 1, PATH="", CXX="")  # it is compiled by now
    run(python, "of_devices", 1, OF_DEVICES="alone")


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


@pytest.mark.parametrize("hosts", [WITH_SHARED_MEMORY, OVER_TCP])
@pytest.mark.parametrize("size", [TWO, FOUR])
@pytest.mark.parametrize("name", ["sums", "shapes", "collectives", "training", "order"])
def test_the_handler_for_cuda_gives_what_that_for_cpus_gives(
    python: Path, name: str, size: int, hosts: str
) -> None:
    of_devices = results(run(python, "of_devices", size, hosts, RUNS="2", OF_DEVICES=name))
    assert bool(of_devices) == (name in ("sums", "training"))  # the others compare with NumPy themselves
    assert not of_devices or of_devices == results(run(python, name, size, hosts))


@pytest.mark.parametrize("name", ["mixed_sizes", "shapes"])
def test_ranks_on_devices_and_on_cpus_match(python: Path, name: str) -> None:
    run(python, "of_devices", 3, RUNS="2", OF_DEVICES=name, OF_EVERY="2")


def test_errors_of_the_handler_for_cuda_are_those_of_cpus(python: Path, tmp_path: Path) -> None:
    of_lost = run(python, "of_devices", 2, OF_DEVICES="lost", lost=1, TMPDIR=str(tmp_path))
    assert results(of_lost) == ["rank 1 was named"]
    run(python, "of_devices", 2, OF_DEVICES="differing", TMPDIR=str(tmp_path))
    said = run(python, "broken_device", 2, MEET=str(tmp_path / "met"), TMPDIR=str(tmp_path))
    assert results(said) == ["rank 0 had the error of rank 1"]


def test_a_program_for_cuda_calls_its_handler_and_names_what_is_missing(python: Path) -> None:
    run(python, "without_a_device", 2)


def test_programs_for_several_devices_are_refused(python: Path) -> None:
    run(python, "several_devices", 2, JAX_NUM_CPU_DEVICES="2")


@pytest.mark.parametrize(
    ("size", "runs"), [pytest.param(2, 20), pytest.param(4, 200, marks=pytest.mark.slow)]
)
def test_many_calls_of_a_program_keep_their_order(python: Path, size: int, runs: int) -> None:
    run(python, "order", size, RUNS=str(runs), PJRT_NPROC="8")  # threads of XLA


def test_compiled_programs_need_no_token_of_jax(python: Path) -> None:
    run(python, "dispatch", 2)


@pytest.mark.parametrize("size", [TWO, FOUR])
def test_weights_are_those_of_one_process(python: Path, size: int) -> None:
    first = results(run(python, "training", size))
    assert len(first) == 2
    for _ in range(1 if size == 2 else 4):
        assert results(run(python, "training", size)) == first


def test_powers_of_two_leave_no_difference(python: Path) -> None:
    run(python, "exact_training", 2)


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


@pytest.mark.parametrize("size", [2, 4])
def test_jaxs_own_collectives_are_those_of_devices_of_one_process(python: Path, size: int) -> None:
    ours = results(framework_jobs.run(python, SEAM, "collectives", size))
    devices = {"PLACES": str(size), "JAX_NUM_CPU_DEVICES": str(size)}
    assert len(ours) == (11 if size == 4 else 8)
    assert ours == results(framework_jobs.run(python, SEAM, "collectives", 1, **devices))


@pytest.mark.parametrize("size", [TWO, FOUR])
@pytest.mark.parametrize("name", ["flax_model", pytest.param("keras_model", marks=pytest.mark.slow)])
def test_models_of_flax_and_keras_train_on_jaxs_own_collectives(python: Path, name: str, size: int) -> None:
    framework_jobs.run(python, SEAM, name, size, KERAS_BACKEND="jax")


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_psum_scatter_of_4_mib_is_right_10_000_times(python: Path, size: int) -> None:
    framework_jobs.run(python, SEAM, "scatter", size, RUNS="10000")


@pytest.mark.parametrize("size", [TWO, FOUR])
def test_helper_hosts_change_no_bit(python: Path, size: int, tmp_path: Path) -> None:
    without = results(run(python, "sums", size, "hosts"))
    with framework_jobs.helper(python, tmp_path) as address:
        assert results(run(python, "sums", size, "hosts", SHOAL_HELPERS=address)) == without
        run(python, "mpi", size, "hosts", RUNS="50", SHOAL_HELPERS=address)


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
