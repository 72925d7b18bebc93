"""The check of locks and threads in the C++ core rejects an unguarded access, and nothing else."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHECK = ROOT / ".ci" / "thread-safety"

pytestmark = pytest.mark.skipif(shutil.which("clang++") is None, reason="clang is not installed")


def check(*files: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([CHECK, *files], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("name", "guard", "rule"),
    [
        (
            "op_table.cc",
            "OpPtr OpTable::find(std::uint64_t seq) {\n  const MutexLock lock(mutex_);",
            "ops_.*requires holding mutex 'mutex_'",
        ),
        (
            "engine.cc",
            "void Engine::on_tick() {\n  channel_->assert_here();",
            "requires holding role 'network_thread'",
        ),
    ],
)
def test_an_unguarded_access_is_rejected(tmp_path: Path, name: str, guard: str, rule: str) -> None:
    source = (ROOT / "csrc" / "engine" / name).read_text()
    assert guard in source
    planted = tmp_path / name
    planted.write_text(source.replace(guard, guard.partition("\n")[0]))
    result = check(planted)
    assert result.returncode != 0
    errors = re.findall(r"error: (.*)", result.stderr)
    assert errors and all(re.search(rule, error) for error in errors), result.stderr
