"""The program of a job, behind wrappers, shells and launchers; its files and its number."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from shoal.errors import UsageError
from shoal.launch.job_command import JobCommand, check_files, check_launcher, check_source, read_command

SHOAL = "train bert --preset large"


@pytest.mark.parametrize(
    "text",
    [
        f"shoal {SHOAL}",
        f"/opt/x/shoal {SHOAL}",
        f"./venv/bin/shoal {SHOAL}",
        f"python -m shoal {SHOAL}",
        f"./venv/bin/python3.12 -u -X dev -Werror -m shoal {SHOAL}".replace("-Werror", "-W error"),
        f"python -um shoal {SHOAL}",
        f"python /opt/venv/bin/shoal {SHOAL}",
        f"env A=b C=/opt/python shoal {SHOAL}",
        f"env -u A A=b nice -n 5 numactl --cpunodebind=0 python -m shoal {SHOAL}",
        f"timeout 3600 shoal {SHOAL}",
        f"bash -c 'shoal {SHOAL}'",
        f"bash -lc 'exec /opt/x/shoal {SHOAL}'",
        f"torchrun --nproc-per-node 8 --standalone -m shoal {SHOAL}",
        f"env A=b torchrun --nproc-per-node=8 --no-python shoal {SHOAL}",
        f"python -m torch.distributed.run --nnodes 2 -m shoal {SHOAL}",
        f"apptainer exec --nv image.sif python -m shoal {SHOAL}",
        f"conda run -n env shoal {SHOAL}",
    ],
)
def test_shoal_is_found(text: str) -> None:
    found = read_command(shlex.split(text))
    assert found.is_shoal
    assert found.arguments == tuple(SHOAL.split())


@pytest.mark.parametrize(
    ("text", "program", "script", "module", "arguments"),
    [
        ("python train.py --lr 1", "python", "train.py", "", ("--lr", "1")),
        ("./venv/bin/python -O sub/train.py shoal", "./venv/bin/python", "sub/train.py", "", ("shoal",)),
        ("python -m pkg shoal train", "python", "", "pkg", ("shoal", "train")),
        ("python -c pass", "python", "", "", ()),
        ("./train.py x", "./train.py", "./train.py", "", ("x",)),
        ("bash run.sh shoal", "bash", "run.sh", "", ("shoal",)),
        ("bash -c 'cd x && shoal train bert'", "bash", "", "", ()),
        ("torchrun --nproc-per-node 2 train.py -m shoal", "python", "train.py", "", ("-m", "shoal")),
        ("accelerate launch --num_processes 8 train.py", "train.py", "train.py", "", ()),
        ("true", "true", "", "", ()),
        ("env A=b ./program", "env", "", "", ()),
    ],
)
def test_other_programs_are_themselves(
    text: str, program: str, script: str, module: str, arguments: tuple[str, ...]
) -> None:
    found = read_command(shlex.split(text))
    assert (found.program, found.script, found.module) == (program, script, module)
    assert found.arguments == arguments and not found.is_shoal


def test_a_launcher_of_each_worker_is_refused() -> None:
    found = read_command(["env", "A=b", "torchrun", "--nproc-per-node", "8", "train.py", "--lr", "1"])
    assert found.launcher == "torchrun"
    for num_workers in (16, None):
        with pytest.raises(
            UsageError, match=r"torchrun would be started by each .* such as python train\.py"
        ):
            check_launcher(found, num_workers=num_workers)
    check_launcher(found, num_workers=1)
    check_launcher(read_command(["python", "train.py"]), num_workers=16)
    with pytest.raises(UsageError, match="accelerate would be started"):
        check_launcher(read_command(["accelerate", "launch", "train.py"]), num_workers=2)


def problem(command: JobCommand, folder: Path, *, searches_path: bool = True) -> str:
    try:
        check_files(command, folder, searches_path=searches_path)
    except UsageError as error:
        return str(error)
    return ""


def test_files_of_the_command_are_looked_for(tmp_path: Path) -> None:
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "python").touch(0o755)
    (tmp_path / "train.py").touch(0o644)
    (tmp_path / "package").mkdir()
    python = str(tmp_path / "venv" / "python")
    for good in (
        ["venv/python", "train.py"],
        [python, str(tmp_path / "train.py")],
        ["env", "A=b", "venv/python", "train.py"],
        ["python3", "package"],
        ["python3", "-m", "absent"],
    ):
        assert problem(read_command(good), tmp_path) == ""
    for words, said in (
        (["./venv/bin/python", "train.py"], "./venv/bin/python, the program of the workers, is not in"),
        (["env", "A=b", "/absent/python", "train.py"], "/absent/python, the program of the workers"),
        (["./train.py"], "./train.py, the program of the workers, is not in"),
        (["./package"], "./package, the program of the workers, is not in"),
        (["python3", "trian.py"], f"trian.py, the script of the workers, is not in {tmp_path}. Did you mean"),
        (["torchrun", "absent.py"], "absent.py, the script of the workers"),
        (["no-such-program"], "no-such-program, the program of the workers, was not found in PATH"),
    ):  # fmt: skip
        if words[0] == "torchrun":
            assert problem(read_command(words), tmp_path, searches_path=False).startswith(said)
        else:
            assert problem(read_command(words), tmp_path).startswith(said)
    for unknown in (
        ["no-such-program"],
        ["apptainer", "exec", "image.sif", "/venv/bin/python", "/absent.py"],
    ):
        assert problem(read_command(unknown), tmp_path, searches_path=False) == ""


def test_a_script_is_in_the_folder_that_is_sent(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    check_source(read_command(["python", "train.py"]), tmp_path)
    check_source(read_command(["python", "/opt/train.py"]), tmp_path)
    with pytest.raises(UsageError, match=r"other\.py, the script of the workers, is not in"):
        check_source(read_command(["python", "other.py"]), tmp_path)
