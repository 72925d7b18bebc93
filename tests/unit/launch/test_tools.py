"""Programs of the system as they fail: one error each, with the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from shoal.errors import ShoalError
from shoal.launch.tools import run_tool

REMEDIES = {"No Such Queue": "sinfo lists them", "timeout": "ping the controller"}


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    path = tmp_path / "tool"
    path.touch(0o755)
    return path


def run(deadline_s: float = 60.0, stdin: str = "") -> tuple[str, str]:
    done = run_tool(
        ["tool", "a b"], absent="install it", remedies=REMEDIES, stdin=stdin, deadline_s=deadline_s
    )
    return done.stdout, done.stderr


def test_both_outputs_are_returned_apart(tool: Path) -> None:
    tool.write_text('#!/bin/sh\ncat; echo "$1"; echo "a plug-in greets" >&2\n')
    assert run(stdin="in ") == ("in a b\n", "a plug-in greets\n")


def test_bytes_that_are_no_text_end_nothing(tool: Path) -> None:
    tool.write_text("#!/bin/sh\nprintf 'a\\377\\303\\227'\n")
    assert run()[0] == "a�×"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo 'error: no such queue: x' >&2; exit 3", "tool: error: no such queue: x; sinfo lists them"),
        ("echo 'tool: error: all is lost' >&2; exit 1", "tool: error: all is lost"),
        ("echo 'on stdout'; exit 1", "tool: on stdout"),
        ("exit 7", "tool: ended with exit code 7"),
        ("seq 20 >&2; exit 1", "tool: 13\n14\n15\n16\n17\n18\n19\n20"),
    ],
    ids=["remedy", "named", "stdout", "silent", "long"],
)
def test_a_failure_is_one_error(tool: Path, text: str, message: str) -> None:
    tool.write_text(f"#!/bin/sh\n{text}\n")
    with pytest.raises(ShoalError) as raised:
        run()
    assert str(raised.value) == message


def test_tools_that_are_absent_no_programs_or_slow(tool: Path) -> None:
    tool.write_text("#!/bin/sh\nexec sleep 60\n")
    with pytest.raises(ShoalError, match=r"tool a b did not answer in 0\.2 s; ping the controller"):
        run(deadline_s=0.2)
    tool.write_text("#!/no/such/interpreter\n")
    with pytest.raises(ShoalError, match="tool was not found: install it"):
        run()
    tool.write_bytes(b"\x00\x01")
    with pytest.raises(ShoalError, match="tool cannot be started: Exec format error; install it"):
        run()
    tool.unlink()
    with pytest.raises(ShoalError, match="tool was not found: install it"):
        run()
