"""Findings of ``shoal doctor``, on this machine and on ones where something is missing or broken."""

from __future__ import annotations

import compileall
import importlib
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import shoal
from shoal import doctor
from shoal.data.cache import OWN_FOLDER
from shoal.doctor import Check, examine
from shoal.env import machine
from shoal.errors import MODULES_OF_EXTRAS, UsageError
from shoal.formatting import parse_bytes, size

REQUIREMENTS = [
    "numpy>=1.26",
    "cyclopts>=5.0",
    'torch>=2.11; extra == "torch"',
    'transformers>=5.0; extra == "text"',
    'matplotlib>=3.9; extra == "report"',
    "boto3 (>=1.40) ; extra == 'aws'",
    'pytest>=8.4; extra == "dev"',
]
COMPLETE = {"torch": "2.11.0+cpu", "numpy": "1.26", "cyclopts": "5.1", "transformers": "5.23.0", "matplotlib": "3.11", "boto3": "1.40.2"}  # fmt: skip  # noqa: E501


def by_name(checks: Iterable[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks}


def examined_here() -> dict[str, Check]:
    return by_name(chain(*examine().values()))


def examined(prelude: str = "") -> subprocess.CompletedProcess[str]:
    """Run the examination in a child after ``prelude``."""
    program = f"import sys\n{prelude}\nfrom shoal.doctor import doctor\nsys.exit(doctor())"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


def test_this_machine_can_train() -> None:
    child = examined()
    assert child.returncode == 0, child.stdout
    assert child.stderr == ""
    for topic in ("Software", "Machine", "Training"):
        assert f"\n{topic}\n" in child.stdout
    for package in ("torch", "numpy", "transformers", "tokenizers", "cyclopts", "safetensors"):
        assert f"{package} {metadata.version(package)}" in child.stdout
    assert "native core" in child.stdout
    assert "gloo" in child.stdout
    assert re.search(r"ok  backend +auto is (shoal \(workers on CPUs\)|nccl, or shoal)", child.stdout)
    assert child.stdout.endswith("Training can run here.\n")


def test_the_checks_as_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    checks = {"Software": [Check("python", "3.14")], "Machine": [Check("disk", "full", "missing", "delete")]}
    monkeypatch.setattr(doctor, "examine", lambda: checks)
    assert doctor.doctor(json=True) == 1
    assert json.loads(capsys.readouterr().out) == {
        "version": shoal.__version__,
        "can_train": False,
        "checks": [
            {"topic": "Software", "name": "python", "finding": "3.14", "state": "ok", "remedy": ""},
            {"topic": "Machine", "name": "disk", "finding": "full", "state": "missing", "remedy": "delete"},
        ],
    }


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_compiler_workers_take_gloo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("PATH", ""), ("CXX", ""), ("SHOAL_CACHE_DIR", str(tmp_path))):
        monkeypatch.setenv(name, value)
    child = examined()
    assert child.returncode == 0, child.stdout
    assert "--  backend       auto is gloo (shoal's process group in C++ does not load)" in child.stdout
    assert "> shoal's process group in C++ does not load: no C++ compiler is found" in child.stdout
    assert not list(tmp_path.iterdir()), "nothing is built to find out"


@pytest.mark.parametrize(
    ("prelude", "said", "remedy"),
    [
        ("sys.modules['torch'] = None", "torch         cannot be imported", "pip install 'torch>="),
        ("sys.modules['shoal._core'] = None", "native core cannot be loaded", "install a C++20 compiler"),
    ],
)
def test_something_needed_is_missing(prelude: str, said: str, remedy: str) -> None:
    child = examined(prelude)
    assert child.returncode == 1
    assert said in child.stdout
    assert remedy in child.stdout
    assert "Training cannot run here until these are put right: " in child.stdout
    assert "GiB free in" in child.stdout  # everything that can still be looked at is shown
    assert child.stderr == ""


def test_broken_torch_is_told_with_its_reason(tmp_path: Path) -> None:
    broken = tmp_path / "torch"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise OSError('libcudart.so.13: cannot open shared object file')\n")
    child = examined(f"sys.path.insert(0, {str(tmp_path)!r})")
    assert child.returncode == 1
    assert "cannot be imported (OSError: libcudart.so.13: cannot open shared object file)" in child.stdout
    assert child.stderr == ""


def test_command_works_without_torch() -> None:
    """The command line itself must not need what the doctor is to diagnose."""
    program = (
        "import sys; sys.modules['torch'] = None; sys.argv[1:] = ['doctor']; "
        "from shoal.cli.app import main; main()"
    )
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert child.returncode == 1
    assert "cannot be imported" in child.stdout
    assert child.stderr == ""


def test_modules_that_are_compiled_at_each_start_are_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "stand_in" / "__init__.py"
    package.parent.mkdir()
    package.write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    module = importlib.import_module("stand_in")
    [check] = doctor._startup(module)
    remedy = f"unset PYTHONDONTWRITEBYTECODE, or run: {sys.executable} -m compileall -q {package.parent}"
    assert (check.state, check.remedy) == ("note", remedy)
    assert compileall.compile_dir(package.parent, quiet=1)  # what the remedy says
    assert doctor._startup(module) == []


def test_no_compiler_is_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    check = examined_here()["C++ compiler"]
    assert (check.state, check.finding) == ("note", "none found")
    assert "torch.compile on the CPU needs one" in check.remedy


def test_launcher_is_recognised_and_its_mistakes_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**place, "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "1234"}.items():
        monkeypatch.setenv(name, value)
    check = examined_here()["launcher"]
    assert (check.state, check.finding) == ("ok", "torchrun: worker 1 of 2, meeting at tcp://10.0.0.7:1234")
    monkeypatch.setenv("RANK", "2")
    check = examined_here()["launcher"]
    assert check.state == "missing"
    assert "RANK=2 must be below WORLD_SIZE=2" in check.finding


def test_complete_packages() -> None:
    checks = by_name(doctor.package_checks(REQUIREMENTS, COMPLETE.get))
    assert list(checks) == ["packages", "[torch]", "[text]", "[report]", "[aws]"]
    assert {check.state for check in checks.values()} == {"ok"}
    assert checks["packages"].finding == "numpy 1.26, cyclopts 5.1"
    assert checks["[torch]"].finding == "torch 2.11.0+cpu"
    assert all(check.remedy == "" for check in checks.values())


@pytest.mark.parametrize(
    ("package", "version", "name", "state", "found", "remedy"),
    [
        ("torch", "2.10.1+cpu", "[torch]", "missing", "torch 2.10.1+cpu (too old, needs 2.11)",
         "for the backend, the optimizers, pipelines and training: "
         "pip install 'torch>=2.11' 'safetensors>=0.5' 'tensorboardX>=2.6.4'"),
        ("numpy", None, "packages", "missing", "numpy not installed, cyclopts 5.1",
         "pip install 'numpy>=1.26' 'cyclopts>=5.0'"),
        ("transformers", "4.57.3", "[text]", "missing", "transformers 4.57.3 (too old, needs 5.0)",
         "to train ALBERT and to prepare text: "
         "pip install 'transformers>=5.0' 'tokenizers>=0.22' 'sentencepiece>=0.2.1' 'protobuf>=5'"),
        ("matplotlib", None, "[report]", "note", "matplotlib not installed",
         "to write reports: pip install 'matplotlib>=3.9' 'jinja2>=3.1'"),
        ("boto3", "1.4.2", "[aws]", "note", "boto3 1.4.2 (too old, needs 1.40)",
         "to start runs on AWS, and for s3://: pip install 'boto3>=1.40'"),
    ],
)  # fmt: skip
def test_package_missing_or_too_old(
    package: str, version: str | None, name: str, state: str, found: str, remedy: str
) -> None:
    installed = {**COMPLETE, package: version}
    checks = by_name(doctor.package_checks(REQUIREMENTS, installed.get))
    assert (checks[name].state, checks[name].finding, checks[name].remedy) == (state, found, remedy)
    assert {check.state for check in checks.values() if check.name != name} == {"ok"}


def test_every_extra_for_users_is_known() -> None:
    """A new extra needs a word on what it is for, or must be one for developers."""
    pyproject = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))
    extras = set(pyproject["project"]["optional-dependencies"])
    assert extras - {"dev", "docs", "bench"} == set(doctor.EXTRAS) == set(MODULES_OF_EXTRAS)


def test_a_cache_has_to_fit_with_the_copies_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, free = tmp_path / "to/come", shutil.disk_usage(tmp_path).free
    fits = doctor.cache_check(folder, free // 2)
    assert fits.state == "ok" and fits.finding.endswith(f"free for {folder}") and not fits.remedy
    wanted = free + (1 << 30)
    check = doctor.cache_check(folder, wanted)
    assert check.state == "note"
    for number in (123, 1 << 30, (5 << 30) + 1, 60 << 30):
        with monkeypatch.context() as patch:
            patch.setattr(shutil, "disk_usage", lambda path, free=number: SimpleNamespace(free=free))
            option, value = doctor.cache_check(folder, 1 << 60).remedy.partition("set ")[2].split()[:2]
            assert option == "--data.cache-bytes" and 0.9 * number < parse_bytes(value) <= number
    copies = folder / OWN_FOLDER
    copies.mkdir(parents=True)
    with (copies / "train-00000-0123456789abcdef.tar").open("wb") as copy:
        copy.truncate(2 << 30)  # sparse: it takes no room itself
    assert doctor.cache_check(folder, wanted) == Check(
        "cache", f"{size(shutil.disk_usage(tmp_path).free)} free for {folder}, besides 2 GiB of copies"
    )
    shared = doctor.cache_check(Path("/dev/shm/absent/folder"), 1 << 60)
    assert "free for /dev/shm/absent/folder" in shared.finding and "docker run --shm-size" in shared.remedy


def test_the_cache_is_named_by_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "examine", lambda: {"Training": []})
    assert doctor.doctor(cache=tmp_path, cache_bytes="1KB") == 0
    assert re.search(r"ok  cache +.* free for ", capsys.readouterr().out)
    with pytest.raises(UsageError, match="cache_bytes 'much' must be a number with a unit"):
        doctor.doctor(cache=tmp_path, cache_bytes="much")


def test_machine_facts_come_from_files(tmp_path: Path) -> None:
    cpuinfo, meminfo, limit = tmp_path / "cpuinfo", tmp_path / "meminfo", tmp_path / "memory.max"
    assert doctor.cpu_name(cpuinfo) != ""
    assert doctor.memory_bytes(meminfo, limit) == 0
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Fast CPU @ 3 GHz\nmodel name\t: Fast CPU @ 3 GHz\n")
    meminfo.write_text("MemFree: 1 kB\nMemTotal:       8388608 kB\n")
    assert doctor.cpu_name(cpuinfo) == "Fast CPU @ 3 GHz"
    assert doctor.memory_bytes(meminfo, limit) == 8 * 2**30
    limit.write_text("max\n")
    assert doctor.memory_bytes(meminfo, limit) == 8 * 2**30
    limit.write_text(f"{2**30}\n")
    assert doctor.memory_bytes(meminfo, limit) == 2**30


@pytest.mark.parametrize(
    ("quota", "words"),
    [
        (1.5, "1 cores for this process, by the quota of its container (1.5)"),
        (99.0, "8 cores for this process"),
    ],
)
def test_a_quota_of_the_container_is_said(quota: float, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (doctor, machine):
        monkeypatch.setattr(module, "cpu_quota", lambda: quota)
        monkeypatch.setattr(module, "num_scheduled", lambda: 8)
    assert doctor._processor().finding.endswith(words)
