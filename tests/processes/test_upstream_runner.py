"""Tests the runner of PyTorch's own tests on a small checkout: what it reports, and when it fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from upstream import run

ON_A_GROUP = """
import unittest
import torch
import torch.distributed as dist

class GroupTest(unittest.TestCase):
    def setUp(self):
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.assertEqual(dist.get_backend(), "gloo")
    def tearDown(self):
        dist.destroy_process_group()
    def test_sum(self):
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        self.assertEqual(tensor.tolist(), [1, 1, 1])
    def test_only_gloo_passes(self):
        self.assertEqual(dist.group.WORLD._get_backend(torch.device("cpu")).name(), "gloo")
    def test_no_backend_passes(self):
        raise AssertionError
    @unittest.skip("as the machine has no GPU")
    def test_skipped(self): pass
"""
PLAIN = """
import unittest
class PlainTest(unittest.TestCase):
    def test_passes(self): pass
"""
SLOW = "import time; time.sleep(60)"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    folder = tmp_path / "test" / "distributed"
    folder.mkdir(parents=True)
    (folder / "test_c10d_common.py").write_text(ON_A_GROUP)
    (folder / "test_collective_utils.py").write_text(PLAIN)
    (folder / "test_device_mesh.py").write_text(SLOW)
    return tmp_path


@pytest.mark.slow
def test_a_difference_is_found_and_fails(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known, report = tmp_path / "known.toml", tmp_path / "report.json"
    known.write_text("")
    given = ["--pytorch", str(checkout), "--only", "*_co*", "--known", str(known), "--json", str(report)]
    assert run.main(given) == 1
    name = "test/distributed/test_c10d_common.py::GroupTest::test_only_gloo_passes"
    found = json.loads(report.read_text())
    assert found["differences"] == {name: None}
    outcomes = {
        path: {backend: each[backend]["tests"] for backend in run.BACKENDS}
        for path, each in found["files"].items()
    }
    common = {
        "GroupTest::test_no_backend_passes": "failed",
        "GroupTest::test_skipped": "skipped",
        "GroupTest::test_sum": "passed",
    }
    plain = {"PlainTest::test_passes": "passed"}
    assert outcomes == {
        "test/distributed/test_c10d_common.py": {
            "gloo": {**common, "GroupTest::test_only_gloo_passes": "passed"},
            "shoal": {**common, "GroupTest::test_only_gloo_passes": "failed"},
        },
        "test/distributed/test_collective_utils.py": {"gloo": plain, "shoal": plain},
    }
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[3:] for line in lines if line.startswith("all of c10d")] == [
        ["3", "/", "1", "/", "1", "2", "/", "2", "/", "1"]
    ]
    assert f"  {name}: NOT KNOWN" in lines


def test_known_differences_have_a_reason(tmp_path: Path) -> None:
    known = tmp_path / "known.toml"
    known.write_text('"*::GroupTest::test_only_*" = "it asks for the name"\n')
    reasons = run.read_known(known)
    assert run.reason_for("a/b.py::GroupTest::test_only_gloo_passes", reasons) == "it asks for the name"
    assert run.reason_for("a/b.py::GroupTest::test_sum", reasons) is None
    assert all(run.read_known(run.KNOWN).values())


def test_a_file_over_its_time_counts_as_one(checkout: Path) -> None:
    file = run.SuiteFile("c10d", checkout, "test/distributed/test_device_mesh.py")
    late = run.run_file(file, "gloo", 2)
    assert (late.problem, late.tests) == ("over 2 s", {})
    passed = run.FileResult(tests={"MeshTest::test_one": "passed"})
    assert run.lost(file.path, {"gloo": passed, "shoal": late}) == [file.path]
    assert run.lost(file.path, {"gloo": late, "shoal": passed}) == []


def test_wrong_usage_ends_with_2(checkout: Path) -> None:
    for given in ([], ["--pytorch", str(checkout / "nowhere")]):
        with pytest.raises(SystemExit) as ended:
            run.main(given)
        assert ended.value.code == 2
    assert run.main(["--pytorch", str(checkout), "--only", "nothing"]) == 2
