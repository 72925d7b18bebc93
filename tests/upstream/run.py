"""Runs PyTorch's and torchft's own tests, as they are, with shoal in gloo's place and beside gloo.

    python tests/upstream/run.py --pytorch ~/pytorch --torchft ~/torchft

The folders are checkouts of the repositories; that of torchft has its extension built (``pip install -e``).
PyTorch's checkout is best of the installed version. Each file of tests runs in a process of its own, once
with gloo and once with shoal. The result is a table, and a list of the tests that pass with gloo only.
Differences that are understood are listed in ``known.toml``, each with its reason.

Exit code: 0; 1 if a test passes with gloo, does not with shoal, and is not in that list; 2 for wrong usage.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import Counter
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

HERE = Path(__file__).resolve().parent
KNOWN = HERE / "known.toml"
BACKENDS = ("gloo", "shoal")

PYTORCH = {
    "c10d": (
        "test/distributed/test_c10d_common.py",
        "test/distributed/test_c10d_fault_tolerance.py",
        "test/distributed/test_c10d_functional_native.py",
        "test/distributed/test_c10d_gloo.py",
        "test/distributed/test_c10d_object_collectives.py",
        "test/distributed/test_c10d_spawn_gloo.py",
        "test/distributed/test_collective_utils.py",
        "test/distributed/test_device_mesh.py",
        "test/distributed/test_distributed_spawn.py",
        "test/distributed/test_functional_api.py",
        "test/distributed/test_inductor_collectives.py",
        "test/distributed/test_pg_wrapper.py",
    ),
    "DTensor": ("test/distributed/tensor/**/test_*.py", "test/distributed/_tensor/test_*.py"),
    "FSDP2": (
        "test/distributed/_composable/fsdp/test_*.py",
        "test/distributed/_composable/test_composability/test_*.py",
        "test/distributed/_composable/test_replicate*.py",
    ),
}
"""Files of a checkout by subject. Tensor parallelism is in a folder of DTensor's."""
TORCHFT = {"torchft": ("torchft/*_test.py", "torchft/checkpointing/*_test.py")}

_TEST_LIMIT_S = 120
_PARTS = {"failure": "failed", "error": "failed", "skipped": "skipped"}


@dataclass
class FileResult:
    """Outcomes of one file's tests with one backend; ``problem`` says why there are none."""

    tests: dict[str, str] = field(default_factory=dict)
    problem: str = ""
    seconds: float = 0.0

    def passed(self) -> set[str]:
        return {name for name, outcome in self.tests.items() if outcome == "passed"}

    def describe(self) -> str:
        if self.problem:
            return self.problem
        counts = Counter(self.tests.values())
        return " / ".join(str(counts[each]) for each in ("passed", "failed", "skipped"))


@dataclass(frozen=True)
class SuiteFile:
    subject: str
    checkout: Path
    path: str
    """Relative to the checkout, with slashes."""


def suite_files(checkout: Path, subjects: dict[str, tuple[str, ...]], only: str) -> list[SuiteFile]:
    """Return a checkout's files of tests whose path matches ``only``."""
    found = [
        SuiteFile(subject, checkout, path.relative_to(checkout).as_posix())
        for subject, patterns in subjects.items()
        for pattern in patterns
        for path in sorted(checkout.glob(pattern))
    ]
    return [each for each in found if fnmatchcase(each.path, only)]


def run_file(file: SuiteFile, backend: str, limit_s: float) -> FileResult:
    """Run a file's tests with pytest, without the checkout's configuration of it."""
    path = [str(file.checkout)] if "torchft" in file.subject else []
    path += [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    if backend == "shoal":
        path.insert(0, str(HERE / "site"))
    with tempfile.TemporaryDirectory(prefix="upstream-") as name:
        folder = Path(name)
        report, settings = folder / "report.xml", folder / "pytest.ini"
        settings.write_text(f"[pytest]\ntimeout = {_TEST_LIMIT_S}\njunit_family = xunit2\n")
        command = [
            sys.executable, "-m", "pytest", "-q", "-c", str(settings), "--noconftest", "--assert=plain",
            "-p", "no:cacheprovider", "-p", "no:warnings", "-p", "no:xdist", f"--rootdir={file.checkout}",
            f"--junitxml={report}", str(file.checkout / file.path),
        ]  # fmt: skip
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path),
            "OMP_NUM_THREADS": "1",
            "BACKEND": "gloo",  # of test_distributed_spawn.py, as are the next two
            "WORLD_SIZE": "3",
            "TEMP_DIR": name,
            "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(_TEST_LIMIT_S // 2),
        }
        begin = time.monotonic()
        with (folder / "log").open("w+b") as log:
            ended = _run(command, file.checkout, environment, log.fileno(), limit_s)
            log.seek(max(0, log.tell() - 4000))
            tail = log.read().decode(errors="replace").strip().splitlines()
        seconds = round(time.monotonic() - begin, 1)
        if ended is None:
            return FileResult(problem=f"over {limit_s:g} s", seconds=seconds)
        if not report.exists():
            return FileResult(problem=f"exit code {ended}: {tail[-1][:200] if tail else ''}", seconds=seconds)
        return FileResult(tests=outcomes(report), seconds=seconds)


def _run(command: list[str], cwd: Path, environment: dict[str, str], log: int, limit_s: float) -> int | None:
    """Return the exit code; ``None`` after the limit. Nothing that was started is left."""
    process = subprocess.Popen(
        command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
        start_new_session=True,
    )  # fmt: skip
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def outcomes(report: Path) -> dict[str, str]:
    """Read a JUnit report: each test, as ``Class::name``, with passed, failed or skipped."""
    found: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        group = case.get("classname", "").rpartition(".")[2]
        name = f"{group}::{case.get('name')}"
        outcome = next((_PARTS[part.tag] for part in case if part.tag in _PARTS), "passed")
        found[name] = "failed" if "failed" in (outcome, found.get(name)) else outcome  # error in tear-down
    return found


def lost(path: str, results: dict[str, FileResult]) -> list[str]:
    """Return the tests that pass with gloo and not with shoal; the file itself if it has no result."""
    gloo, shoal = (results[backend] for backend in BACKENDS)
    if shoal.problem and not gloo.problem:
        return [path]
    return [f"{path}::{name}" for name in sorted(gloo.passed() - shoal.passed())]


def read_known(path: Path) -> dict[str, str]:
    """Return the reasons of the known differences, by pattern."""
    known: dict[str, str] = tomllib.loads(path.read_text(encoding="utf-8"))
    return known


def reason_for(test: str, known: dict[str, str]) -> str | None:
    return next((reason for pattern, reason in known.items() if fnmatchcase(test, pattern)), None)


def print_table(results: dict[SuiteFile, dict[str, FileResult]]) -> None:
    print(f"\n{'passed / failed / skipped':<75} {'gloo':>18} {'shoal':>18}")
    subjects: dict[str, Counter[str]] = {}
    for file, each in results.items():
        print(f"{file.path[-75:]:<75} " + " ".join(f"{each[b].describe():>18}" for b in BACKENDS))
        counts = subjects.setdefault(file.subject, Counter())
        for backend in BACKENDS:
            counts.update(f"{backend} {outcome}" for outcome in each[backend].tests.values())
    for subject, counts in subjects.items():
        texts = [
            " / ".join(str(counts[f"{backend} {each}"]) for each in ("passed", "failed", "skipped"))
            for backend in BACKENDS
        ]
        print(f"{'all of ' + subject:<75} " + " ".join(f"{text:>18}" for text in texts))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pytorch", type=Path, metavar="DIR", help="checkout of pytorch/pytorch")
    parser.add_argument("--torchft", type=Path, metavar="DIR", help="checkout of meta-pytorch/torchft")
    parser.add_argument("--only", default="*", metavar="GLOB", help="only files whose path matches")
    parser.add_argument("--time-limit", type=float, default=1800, metavar="S", help="seconds for a file")
    parser.add_argument("--known", type=Path, default=KNOWN, metavar="FILE", help="known differences")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all outcomes")
    given = parser.parse_args(arguments)
    if not (given.pytorch or given.torchft):
        parser.error("give a checkout: --pytorch DIR, --torchft DIR, or both")
    for name in ("pytorch", "torchft"):
        if (folder := getattr(given, name)) and not folder.is_dir():
            parser.error(f"--{name} {folder} is no folder")
    return given


def main(arguments: list[str] | None = None) -> int:
    given = parse(arguments)
    files: list[SuiteFile] = []
    if given.pytorch:
        files += suite_files(given.pytorch.resolve(), PYTORCH, given.only)
    if given.torchft:
        files += suite_files(given.torchft.resolve(), TORCHFT, given.only)
    if not files:
        print(f"no file of tests matches {given.only} in these checkouts", file=sys.stderr)
        return 2

    results: dict[SuiteFile, dict[str, FileResult]] = {}
    for file in files:
        results[file] = {}
        for backend in BACKENDS:
            result = results[file][backend] = run_file(file, backend, given.time_limit)
            print(f"{file.path}  {backend}: {result.describe()}  ({result.seconds:.0f} s)", flush=True)
    print_table(results)

    known = read_known(given.known)
    missing = [test for file, each in results.items() for test in lost(file.path, each)]
    reasons = {test: reason_for(test, known) for test in missing}
    print(f"\npass with gloo and not with shoal: {len(missing)}")
    for test, reason in reasons.items():
        print(f"  {test}: {reason or 'NOT KNOWN'}")
    if given.json:
        rows = {
            file.path: {b: asdict(result) for b, result in each.items()} for file, each in results.items()
        }
        given.json.write_text(json.dumps({"files": rows, "differences": reasons}, indent=1) + "\n")
    return 1 if None in reasons.values() else 0


if __name__ == "__main__":
    sys.exit(main())
