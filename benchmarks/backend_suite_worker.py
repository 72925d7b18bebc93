"""Runs PyTorch's own distributed tests with one backend and writes what came of each: see backend_suite."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import tempfile
import time
import traceback
import unittest
import warnings
from pathlib import Path
from typing import Any

WORLD_SIZE = 4
_DEADLINE_S = 60
"""For each test; one that hangs has failed then."""


class _Outcomes(unittest.TestResult):
    """Notes each test's outcome, and the end of what went wrong, as it comes."""

    def __init__(self, num_tests: int) -> None:
        super().__init__()
        self.outcomes: dict[str, dict[str, Any]] = {}
        self._num_tests = num_tests
        self._begin_s = 0.0

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._begin_s = time.monotonic()

    def _note(self, test: unittest.TestCase, outcome: str, why: str = "") -> None:
        name = test.id().rpartition(".")[2]
        seconds = round(time.monotonic() - self._begin_s, 2)
        self.outcomes[name] = {"outcome": outcome, "why": why, "seconds": seconds}
        if outcome != "skipped":
            print(f"{len(self.outcomes)}/{self._num_tests} {name}: {outcome} {seconds} s", flush=True)

    def addSuccess(self, test: unittest.TestCase) -> None:
        self._note(test, "passed")

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._note(test, "skipped", reason)

    def addFailure(self, test: unittest.TestCase, err: Any) -> None:
        self._note(test, "failed", "".join(traceback.format_exception(*err))[-2000:])

    addError = addFailure


def suite_class(backend: str, counters: Path, *, called_gloo: bool) -> type[unittest.TestCase]:
    """Return the wheel's test case, with workers that are forked and use ``backend``.

    The conditions of the tests are evaluated as for gloo, so that none is skipped for our name. Those of
    all_to_all in CPU memory run too: torch 2.15 skips them for every backend but MPI, though gloo has the
    operation. With ``called_gloo`` the name is hidden: the groups are made with ``backend``, and torch
    calls them gloo.
    """
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(WORLD_SIZE), TEMP_DIR=tempfile.mkdtemp(prefix="suite-"))
    import torch
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed import distributed_test

    common_distributed.TIMEOUT_DEFAULT = _DEADLINE_S
    common_distributed.TIMEOUT_OVERRIDE.clear()
    for test in vars(distributed_test.DistributedTest._DistTestBase).values():
        if getattr(test, "__unittest_skip_why__", "").startswith("Only MPI supports"):
            del test.__unittest_skip__, test.__unittest_skip_why__
    if called_gloo:
        make = torch.distributed.init_process_group
        torch.distributed.init_process_group = lambda *args, **kwargs: make(
            *args, **{**kwargs, "backend": backend}
        )
        world: Any = torch.distributed.group
        torch.distributed.get_backend = lambda group=None: (group or world.WORLD).name()
    else:
        distributed_test.BACKEND = backend
    torch.set_num_threads(1)
    if backend == "shoal":
        _record_counters(counters)

    class Suite(  # type: ignore[no-untyped-call]
        distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase
    ):
        def setUp(self) -> None:
            super().setUp()  # type: ignore[no-untyped-call]
            self._start_processes(multiprocessing.get_context("fork").Process)

        @classmethod
        def _run(cls, rank: int, test_name: str, *args: Any, **kwargs: Any) -> None:
            os.environ["SUITE_TEST"] = test_name
            super()._run(rank, test_name, *args, **kwargs)  # type: ignore[no-untyped-call]

    return Suite


def _record_counters(path: Path) -> None:
    """Make every group append its engine's counters to a file when it ends."""
    from shoal.comm.backend import ShoalProcessGroup

    original = ShoalProcessGroup.shutdown

    def shutdown(self: ShoalProcessGroup) -> None:
        if not self.operations.is_closed:
            counted = {
                "test": os.environ["SUITE_TEST"],
                **self.engine.counters(),
            }
            with path.open("a") as file:
                file.write(json.dumps(counted) + "\n")
        original(self)

    ShoalProcessGroup.shutdown = shutdown  # type: ignore[method-assign]


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Return the outcome of each test, and the counters of all engines.

    The spec: ``{"backend": "shoal", "match": "test_all_reduce", "called_gloo": false}``: a regular expression
    of the tests' names, and whether the backend's name is hidden from them.
    """
    warnings.simplefilter("ignore")
    counters = Path(spec["folder"]) / "counters.jsonl"
    tests = unittest.defaultTestLoader.loadTestsFromTestCase(
        suite_class(spec["backend"], counters, called_gloo=spec["called_gloo"])
    )
    chosen = [
        test
        for test in tests
        if isinstance(test, unittest.TestCase) and re.search(spec["match"], test.id().rpartition(".")[2])
    ]
    outcomes = _Outcomes(len(chosen))
    for test in chosen:
        test.run(outcomes)
    lines = counters.read_text().splitlines() if counters.exists() else []
    return {"tests": outcomes.outcomes, "counters": [json.loads(line) for line in lines]}
