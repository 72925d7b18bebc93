"""The command line as a whole."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cyclopts import UnknownOptionError

from shoal.cli.app import app
from shoal.doctor import version_text

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


def test_the_version_is_one_line_in_a_narrow_terminal() -> None:
    """Hosts are compared by it."""
    argv = [sys.executable, "-m", "shoal", "--version"]
    environ = {**os.environ, "COLUMNS": "20"}
    said = subprocess.run(argv, capture_output=True, text=True, check=True, env=environ).stdout
    assert said == version_text() + "\n" and len(said) > 20


def test_exit_codes_are_seen_under_a_parent_that_ignores_its_children(tmp_path: Path) -> None:
    """SIGCHLD that is ignored stays so in children, and their children's exit codes are 0 then."""
    program = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGCHLD, signal.SIG_IGN)\n"
        "os.execv(sys.argv[1], sys.argv[1:])\n"
    )
    launch = [sys.executable, "-m", "shoal", "launch", "--workers", "1", "--", "sh", "-c", "kill -USR1 $$"]
    done = subprocess.run(
        [sys.executable, "-c", program, *launch], capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (1, "worker 0 was ended by SIGUSR1\n")


@pytest.mark.parametrize("way", ["return 7", "sys.exit(7)"])
def test_with_torch_loaded_a_command_ends_at_once_with_its_output_exit_functions_and_code(way: str) -> None:
    program = (
        "import atexit, sys, threading, time\n"
        "from shoal.cli import app\n"
        "class Kept:\n    def __del__(self):\n        print('visited')\n"
        "kept = Kept()\n"
        "def late():\n    time.sleep(0.2); print('thread')\n"
        "def command(*_, **__):\n"
        "    sys.modules['torch'] = atexit.register(print, 'exit function')\n"
        "    threading.Thread(target=late).start()\n"
        f"    {way}\n"
        "app.app = command\n"
        "app.program()\n"
    )
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (child.returncode, child.stdout, child.stderr) == (7, "thread\nexit function\n", "")


WRONG_PATHS = (
    "train albert --preset tiny --data.path wrong",
    "train bert --preset tiny --data.path wrong",
    "train t5 --preset tiny --data.path wrong",
    "train resnet50 --data.path wrong",
    "train mask_rcnn --data.path wrong",
    "finetune classify --model wrong --data wrong.tsv --eval wrong.tsv",
    "finetune squad --model wrong --data wrong.json --eval wrong.json",
    "finetune t5 --task mnli --model wrong --data wrong.tsv --eval wrong.tsv",
    "evaluate imagenet wrong --data wrong",
    "evaluate squad --data wrong --predictions wrong",
    "evaluate squad --data wrong --model wrong",
    "evaluate classify wrong --model wrong",
    "evaluate mask_rcnn --data wrong --model wrong",
    "predict t5 wrong.tsv --model wrong",
    "export wrong",
    "export wrong --onnx out.onnx",
    "report wrong",
    "predict mask_rcnn wrong.jpg --model wrong",
    "predict squad wrong.json --model wrong",
    "predict classify wrong.tsv --model wrong",
    "prepare text wrong --out out",
    "prepare images wrong --out out",
    "prepare coco --images wrong --annotations wrong --out out",
)


def test_a_wrong_path_is_said_before_anything_slow_is_imported(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from shoal.cli.app import main\n"
        f"for line in {WRONG_PATHS!r}:\n"
        "    sys.argv[1:] = line.split()\n"
        "    try:\n        main()\n"
        "    except SystemExit as end:\n"
        "        slow = [name for name in ('torch', 'transformers', 'matplotlib') if name in sys.modules]\n"
        "        print(end.code, slow)\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert child.stdout.splitlines() == ["2 []"] * len(WRONG_PATHS), child.stderr
    assert [line for line in child.stderr.splitlines() if "wrong" not in line] == []


def test_images_are_prepared_without_the_packages_of_text(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "for name in ('tokenizers', 'transformers', 'sentencepiece'):\n    sys.modules[name] = None\n"
        "sys.argv[1:] = ['prepare', 'images', 'wrong', '--dry-run']\n"
        "from shoal.cli.app import main\n"
        "main()\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert child.returncode == 2
    assert child.stderr == "shoal: wrong: there is no such folder.\n"


@pytest.mark.parametrize("command", ["train", "finetune", "bench", "prepare", "evaluate", "pipeline"])
def test_commands_imported_on_use_explain_themselves(command: str) -> None:
    from shoal.cli.app import app

    assert app[command].help
    assert [name for name in app[command] if not name.startswith("-")]


@pytest.mark.parametrize(
    ("option", "suggested"),
    [
        ("--distributed.wait-for", "--servers.wait-for"),  # where it was before
        ("--train.learning-rate=1e-3", "--optim.learning-rate"),
        ("--tain.seed", "--train.seed"),
        ("--servers.wait-four", "--servers.wait-for"),
        ("--seed", "--train.seed"),
        ("--lr=1e-3", "--optim.learning-rate"),
        ("--batch-size", "--train.global-batch-size"),
        ("--train.batch-size", "--train.global-batch-size"),
        ("--batch_size", "--train.global-batch-size"),
        ("--max-steps", "--train.total-steps"),
        ("--epochs", "--train.total-steps"),
        ("--output-dir", "--run.dir"),
        ("--num-workers", "--workers"),
        ("--bf16", "--train.precision"),
    ],
)
def test_a_setting_is_found_by_its_name_alone_and_by_that_of_other_programs(
    option: str, suggested: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UnknownOptionError):
        app(["train", "albert", option, "1"], exit_on_error=False, print_error=True)
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert f"Did you mean {suggested}?" in said
