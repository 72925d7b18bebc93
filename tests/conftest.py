"""Skips are listed with their reasons; where the gate promises what a test needs, a skip is a failure.

After a long run the modules that took longest are listed too: the quick tests have a budget.

In the gate, at most three failures of tests that start processes are tried again, alone: another test's
processes disturb what such a test measures. Both outcomes are listed.
"""

from __future__ import annotations

import gc
import importlib
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

import hypothesis
import pytest

from shoal.env.settings import NATIVE_GROUP
from shoal.env.settings import test_data_dir as data_dir

if TYPE_CHECKING:
    import torch.distributed as dist

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Tests run side by side, each with processes of its own: more threads a process only get in the way (a small
training job took 97 s with two threads beside another test, and 16 s with one)."""

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
"""Modules are kept compiled where an image's environment forbids it: a fresh process that imports torch,
transformers and ``shoal.train.run`` takes 4.8 s of processor time with them and 10.6 s without."""

hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")  # an example may take any time on a busy machine

MAY_BE_MISSING = [r"CUDA", r"GPU", r"fused multiply-add"]
"""Causes of skips that ``.ci/run`` cannot remove; the real test data only if it is not there."""


@pytest.fixture(params=["python", "native"])
def both_groups(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a test with each process group of backend ``"shoal"``: that in Python and that in C++."""
    monkeypatch.setenv(NATIVE_GROUP, "1" if request.param == "native" else "0")


@pytest.fixture(params=[pytest.param("python", marks=pytest.mark.slow), "native"])
def both_groups_or_native(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``both_groups``; the quick tests use the group in C++ only, which is the default."""
    monkeypatch.setenv(NATIVE_GROUP, "1" if request.param == "native" else "0")


@pytest.fixture
def group() -> Iterator[dist.ProcessGroup]:
    """Make a group of this process alone and destroy it after the test."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.fixture
def forked_pools() -> Iterator[None]:
    """Fork the processes of pools that prepare data, from one that has loaded what they import."""
    with importlib.import_module("forked_programs").forked_pools():
        yield


_LEFT_GROUP = "left its process group"


@pytest.fixture(autouse=True)
def _no_process_group_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Destroy a process group that a test left, so that the next test does not fail for it; name the test."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
        request.node.user_properties.append((_LEFT_GROUP, True))


def pytest_configure() -> None:
    gc.disable()  # until tests are collected: modules that are imported stay


def pytest_collection_finish(session: pytest.Session) -> None:
    """Build the group in C++ before a test starts, whose time limit would include it.

    What is loaded by now stays: the collector need not visit it again in every test.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    if any("processes" in item.path.parts for item in session.items):
        with suppress(Exception):  # a test says why
            importlib.import_module("shoal.comm.native_group").build()


def pytest_unconfigure() -> None:
    """Let the collector see all again: Triton's bindings name what it cannot free at the exit as leaked."""
    gc.unfreeze()


def _reasons(config: pytest.Config) -> list[str]:
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter else []
    return [r.longrepr[2] if isinstance(r.longrepr, tuple) else str(r.longrepr) for r in skipped]


def _not_allowed(reasons: list[str]) -> list[str]:
    allowed = MAY_BE_MISSING + ([] if data_dir().is_dir() else [r"SHOAL_TEST_DATA"])
    return [reason for reason in reasons if not any(re.search(pattern, reason) for pattern in allowed)]


_MOST_AGAIN = 3
_again = pytest.StashKey[str]()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Decide what the run as a whole is, in the gate: skips that fail, and failures that are tried again."""
    if not os.environ.get("CI") or hasattr(session.config, "workerinput"):
        return
    if session.exitstatus == pytest.ExitCode.TESTS_FAILED and _pass_alone(session.config):
        session.exitstatus = pytest.ExitCode.OK
    if not session.exitstatus and _not_allowed(_reasons(session.config)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _pass_alone(config: pytest.Config) -> bool:
    """Try failed tests again where all of them start processes; return whether they pass."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    names = sorted({report.nodeid for kind in ("failed", "error") for report in reporter.stats.get(kind, [])})
    several_processes = all(name.startswith(("tests/processes/", "tests/real/")) for name in names)
    if not names or len(names) > _MOST_AGAIN or not several_processes:
        return False
    command = [sys.executable, "-m", "pytest", "-q", *names]
    # without CI: what fails again is not tried a third time
    done = subprocess.run(command, env={**os.environ, "CI": ""}, cwd=config.rootpath)
    config.stash[_again] = f"{'FAILED' if done.returncode else 'passed'} alone: {', '.join(names)}"
    return done.returncode == 0


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    reasons = _reasons(config)
    terminalreporter.write_line(f"skipped: {len(reasons)}")
    for reason in sorted(set(reasons)):
        terminalreporter.write_line(f"  {reasons.count(reason)} × {reason}")
    for report in _test_reports(terminalreporter):
        if report.when == "teardown" and (_LEFT_GROUP, True) in report.user_properties:
            terminalreporter.write_line(f"{report.nodeid} {_LEFT_GROUP}")
    _list_slowest(terminalreporter)
    if again := config.stash.get(_again, ""):
        terminalreporter.write_line(f"tried again, {again}")
    if os.environ.get("CI") and (promised := _not_allowed(reasons)):
        terminalreporter.write_line(f"FAILED: {len(promised)} skips for what the gate should have provided")


def _test_reports(terminalreporter: pytest.TerminalReporter) -> Iterator[pytest.TestReport]:
    """Yield the reports of all phases of all tests; the statistics hold warnings and left-out tests too."""
    for reports in terminalreporter.stats.values():
        yield from (report for report in reports if isinstance(report, pytest.TestReport))


def _list_slowest(terminalreporter: pytest.TerminalReporter, num_modules: int = 25) -> None:
    seconds: Counter[str] = Counter()
    for report in _test_reports(terminalreporter):
        seconds[report.nodeid.partition("::")[0]] += report.duration
    if (total := sum(seconds.values())) > 60:
        terminalreporter.write_line(f"{total:.0f} s in {len(seconds)} modules, most of them in")
        for module, spent in seconds.most_common(num_modules):
            terminalreporter.write_line(f"  {spent:6.1f} s  {module}")
