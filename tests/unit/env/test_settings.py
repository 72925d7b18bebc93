"""Settings, the GPUs and compilers of the machine, and the environment of children."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

import pytest

from shoal.env.machine import compiler_problem, selected_gpus
from shoal.env.settings import (
    ENCRYPT,
    HELPERS,
    NETWORK_THREADS,
    SECRET,
    encrypt,
    helpers,
    launch_dir,
    network_threads,
)
from shoal.env.settings import test_data_dir as data_dir
from shoal.env.variables import child_environment, without
from shoal.errors import UsageError


def test_network_threads_and_encryption() -> None:
    assert network_threads({}) == 0
    assert network_threads({NETWORK_THREADS: "3"}) == 3
    for wrong in ("0", "17", "two", "-1"):
        with pytest.raises(UsageError, match=f"SHOAL_NETWORK_THREADS='{wrong}' must be a number of threads"):
            network_threads({NETWORK_THREADS: wrong})
    assert encrypt({ENCRYPT: "1"}) and not encrypt({}) and not encrypt({ENCRYPT: "0"})
    with pytest.raises(UsageError, match="SHOAL_ENCRYPT='on' must be 1"):
        encrypt({ENCRYPT: "on"})


def test_folders() -> None:
    assert launch_dir({}) is None
    assert launch_dir({"SHOAL_LAUNCH_DIR": ""}) is None
    assert launch_dir({"SHOAL_LAUNCH_DIR": "/run/x"}) == Path("/run/x")
    assert data_dir({"SHOAL_TEST_DATA": "/data"}) == Path("/data")
    assert data_dir({}) == Path.cwd() / "../shared/data"


def test_child_environment_changes_only_the_child() -> None:
    before = child_environment()
    changed = child_environment(SHOAL_TEST_DATA="/elsewhere")
    assert changed == {**before, "SHOAL_TEST_DATA": "/elsewhere"}
    assert data_dir() != Path("/elsewhere")


def test_groups_made_without_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HELPERS, "10.0.0.7:4400")
    with without(HELPERS):
        assert helpers() == []
    assert [helper.port for helper in helpers()] == [4400]
    monkeypatch.delenv(HELPERS)
    with without(HELPERS):
        pass
    assert helpers() == []


# ---- the secret ------------------------------------------------------------------------------------------


def test_without_takes_a_variable_from_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "sixteen bytes of")
    with without(SECRET, "SHOAL_NEVER_SET"):
        assert SECRET not in child_environment()
    assert child_environment()[SECRET] == "sixteen bytes of"
    assert "SHOAL_NEVER_SET" not in child_environment()


def test_gpus_that_are_selected() -> None:
    for value in ("0,1", "GPU-8932f937", "MIG-1"):
        assert selected_gpus({"CUDA_VISIBLE_DEVICES": value}) == f"CUDA_VISIBLE_DEVICES={value}"
    for value in ("", "-1", "NoDevFiles"):
        assert selected_gpus({"CUDA_VISIBLE_DEVICES": value}) == ""
    assert selected_gpus({"ROCR_VISIBLE_DEVICES": "0"}) == "ROCR_VISIBLE_DEVICES=0"


def test_missing_requirements_of_compiling_for_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert "apt-get install gcc, or set CC" in compiler_problem({})
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert f"needs {tmp_path}/Python.h" in compiler_problem({"CC": "cc"})
    (tmp_path / "Python.h").touch()
    assert compiler_problem({"CC": "cc"}) == ""
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}" if name == "clang" else None)
    assert compiler_problem({}) == ""
