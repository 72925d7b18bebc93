"""The command line as a whole."""

from __future__ import annotations

import subprocess
import sys

import pytest

COMMANDS = (
    "bench",
    "doctor",
    "emulate",
    "evaluate",
    "export",
    "finetune",
    "pipeline",
    "plan",
    "predict",
    "prepare",
    "report",
    "serve",
    "train",
)
SLOW = ("torch", "numpy", "rich.markdown", "shoal.recipes", "shoal.launch", "shoal.data")


def test_the_list_of_commands_is_complete_and_imports_nothing_slow() -> None:
    program = (
        "import sys; sys.argv[1:] = ['--help']\n"
        "from shoal.cli.app import main\n"
        "try:\n    main()\n"
        f"finally:\n    print([name for name in {SLOW!r} if name in sys.modules], file=sys.stderr)\n"
    )
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    words = child.stdout.split()
    assert [command for command in COMMANDS if command not in words] == []
    assert child.stderr == "[]\n"


@pytest.mark.parametrize("command", ["train", "finetune", "bench", "prepare", "evaluate", "pipeline"])
def test_commands_imported_on_use_explain_themselves(command: str) -> None:
    from shoal.cli.app import app

    assert app[command].help
    assert [name for name in app[command] if not name.startswith("-")]
